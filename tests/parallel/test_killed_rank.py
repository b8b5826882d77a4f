"""One rank is killed in the middle of a collective: the others end with an error, and soon. They run killed_rank_ranks.py."""

import signal
import time

import pytest
import torch.distributed as dist
from parallel import killed_rank_ranks
from parallel.killed_rank_ranks import SCENARIOS, SECONDS
from parallel.worlds import WORLDS, started

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
START = 120  # seconds to import torch and meet, on a busy machine
WHERE = {"linear": "product/function.py", "finish": "main_grads.finish()"}  # what the traceback shows


def end_of(world, scenario, folder, seconds=20):
    """The exit status of each rank, the killed one's last. They have so many seconds to end after the group's timeout."""
    backend, ranks = world
    args = ranks, str(folder), backend, scenario
    *others, killed = started(killed_rank_ranks.run, args, ranks, join=False).processes
    killed.join(START)
    limit = time.monotonic() + SECONDS + seconds
    for process in (*others, killed):
        process.join(max(0.0, limit - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            told = [path.read_text() for path in folder.glob("*.txt")]
            pytest.fail(f"a rank was waiting still after {SECONDS + seconds} seconds; told were {told}")
    return [process.exitcode for process in (*others, killed)]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world", WORLDS)
def test_the_others_are_told(world, scenario, tmp_path, monkeypatch):
    """Over NCCL only with TORCH_NCCL_BLOCKING_WAIT=1, where the CPU waits for every collective, and so can be told."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    ended = end_of(world, scenario, tmp_path, seconds=20 if world[0] == "gloo" else 90)  # NCCL takes its time to let go
    told = {rank: (tmp_path / f"{rank}.txt").read_text() for rank in range(world[1] - 1) if (tmp_path / f"{rank}.txt").exists()}
    assert ended == [1] * (world[1] - 1) + [-signal.SIGKILL], told
    assert all(WHERE[scenario] in text for text in told.values()), told


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world", [world for world in WORLDS if "nccl" in world.id])
def test_as_nccl_is_the_watchdog_ends_the_others(world, scenario, tmp_path, capfd):
    """It says so in the log, and may take its time to write down what was under way."""
    *others, killed = end_of(world, scenario, tmp_path, seconds=120)
    assert killed == -signal.SIGKILL and all(others)
    assert "NCCL" in capfd.readouterr().err
