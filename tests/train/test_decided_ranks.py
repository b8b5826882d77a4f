"""Ranks decide on a CUDA graph together, and keep it if a step takes less time.

Clocks and graphs are stand-ins, but in the last test, which trains on GPUs.
"""

import contextlib
import io
import re
import shlex
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import pytest
import torch
from parallel import worlds
from parallel.meeting import launched, meet_at
from runtime import cpu_graph
from train.checkpoint_runs import configured, go

import onepass
from onepass.cli import main
from onepass.train import loop, measured_steps, setup, steps
from onepass.train.layout import _groups
from onepass.train.measured_steps import ComparedSteps
from onepass.train.record import read_log
from onepass.train.setup import make
from onepass.train.steps import TrainSteps

WORLDS = [worlds.PAIRS[0]]
NOT_TIMED, TIMED = 3, 5
BEFORE = NOT_TIMED + TIMED + 1 + TIMED  # steps without a graph: they decide, and are compared. Then one captures
rank_context = partial(onepass.use_backend, "torch")


@dataclass
class Times:
    """Seconds of a microbatch on a rank, and whether a graph can be captured."""

    calls: float = 0.04
    waits: float = 0.001  # for the GPU, after the calls or a replay
    replay: float = 0.03
    memory: tuple[int, int] = (2 << 30, 8 << 30)
    fails: bool = False


@contextmanager
def machine(times):
    """Let this CPU capture, on a clock by which a rank takes these times."""
    now, called, replayed = [0.0], TrainSteps._micro, cpu_graph.Graph.replay

    def after(call, seconds):
        def run(*given):
            result = call(*given)
            now[0] += seconds
            return result

        return run

    def capture(*given):
        recorded = cpu_graph.record(*given, may_wait=True)  # which runs collectives, as a capture doesn't: on all ranks or none
        if times.fails:
            raise RuntimeError("out of memory")
        return recorded

    with pytest.MonkeyPatch.context() as stand_in:
        stand_in.setattr(TrainSteps, "_micro", after(called, times.calls))
        stand_in.setattr(cpu_graph.Graph, "replay", after(replayed, times.replay))
        stand_in.setattr(measured_steps, "synchronize", after(lambda device: None, times.waits))
        stand_in.setattr(measured_steps, "perf_counter", lambda: now[0])
        stand_in.setattr(measured_steps, "memory_of_graph", lambda device: times.memory)
        cpu_graph.in_training(stand_in, steps, measured_steps, capture=capture)
        yield


def train(group, of_ranks, count, **settings):
    """Train on this rank. Return what it says, the steps that were replays, losses with norms, and the weights."""
    config, options = configured(params_dtype="fp32", **settings)
    layout, said, replayed, found = _groups(config, torch.device("cpu")), [], [], []
    decides = of_ranks is not None
    with patch.object(setup, "_may_have_graphs", lambda *_: decides), machine(of_ranks[layout.rank] if decides else Times()):
        trained = make(config, options, layout, say=said.append)
        assert (type(trained.steps) is ComparedSteps) is decides
        for step in range(count):
            found += go(trained, layout, step, step + 1)
            if trained.steps.replays and trained.steps._graph is not None:
                replayed.append(step)
        has_graph = getattr(trained.steps, "_graph", None) is not None
    return said, (replayed, has_graph), found, [parameter.detach() for parameter in trained.model.parameters()]


def run(world, *of_ranks, count=BEFORE + TIMED + 2, whole=True, **settings):
    """Return what ranks say and when they replayed, once all have trained as without a graph. whole: no weight is divided."""
    ranks = world.run(train, of_ranks, count, **settings)
    expected = world.run(train, None, count, **settings)
    for (*_, found, weights), (*_, without, others) in zip(ranks, expected, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(without), rtol=1e-4, atol=1e-4)
        for weight, other, same in zip(weights, others, ranks[0][-1], strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-4)
            assert not whole or torch.equal(weight, same)
    return [(said, when) for said, when, *_ in ranks]


CANDIDATE = "as a microbatch's calls take the CPU 40.0 of its 41.0 ms"
TRIED = [*range(BEFORE, BEFORE + TIMED)]
KEPT = [*TRIED, TRIED[-1] + 1, TRIED[-1] + 2]
world = pytest.mark.parametrize("world", WORLDS, indirect=True, scope="module")


@world
@pytest.mark.parametrize(
    "settings", ({}, {"use_distributed_optimizer": True}, {"clip_grad": 0.0}), ids=("", "sharded", "unclipped")
)
def test_a_graph_that_takes_less_time_is_kept(world, settings):
    one, other = run(world, Times(), Times(replay=0.035), **settings)
    said = [f"CUDA graph: captured, {CANDIDATE}", "CUDA graph: kept, as a step takes 36.0 ms with it and 41.0 without"]
    assert one == other == (said, (KEPT, True))


@world
def test_a_graph_that_takes_more_time_on_one_rank_is_given_up_on_all(world):
    """As where a network is so slow that reductions belong under backward."""
    one, other = run(world, Times(), Times(replay=0.045))
    said = [f"CUDA graph: captured, {CANDIDATE}", "CUDA graph: given up, as a step takes 46.0 ms with it and 41.0 without"]
    assert one == other == (said, (TRIED[:-1], False))


@world
def test_ranks_wait_for_the_one_with_the_slowest_cpu(world):
    one, other = run(world, Times(calls=0.01, waits=0.02, replay=0.01), Times())
    assert one[1] == other[1] == ([*KEPT], True)
    assert one[0] == other[0] and one[0][0] == f"CUDA graph: captured, {CANDIDATE}"


@world
@pytest.mark.parametrize(
    ("slow", "why"),
    [
        (Times(calls=0.01, waits=0.05), "not needed, as a microbatch's calls take the CPU 40.0 of its 60.0 ms"),
        (
            Times(memory=(3 << 30, 1 << 30)),
            f"not captured, as its 3.0 GiB would leave evaluations 1.0, though {CANDIDATE.removeprefix('as ')}",
        ),
    ],
    ids=("GPU", "memory"),
)
def test_one_rank_decides_for_all_that_there_is_none(world, slow, why):
    one, other = run(world, Times(), slow, count=BEFORE)
    assert one == other == ([f"CUDA graph: {why}"], ([], False))


@world
def test_a_rank_that_can_not_capture_keeps_no_one_waiting(world):
    (said, one), (others_said, other) = run(world, Times(), Times(fails=True))
    last = "CUDA graph: given up, as a rank could not capture one"
    assert said == [f"CUDA graph: captured, {CANDIDATE}", last] and one == (TRIED[:-1], False)
    failed = f"CUDA graph: not captured, though {CANDIDATE.removeprefix('as ')}, as that failed: out of memory"
    assert others_said == [failed, last] and other == ([], False)


@world
def test_tensor_parallel_ranks_capture_together_or_not_at_all(world):
    """What they capture holds collectives."""
    (said, one), (others_said, other) = run(world, Times(), Times(fails=True), tensor_model_parallel_size=2, whole=False)
    last = "CUDA graph: given up, as a rank could not capture one"
    failed = f"CUDA graph: not captured, though {CANDIDATE.removeprefix('as ')}, as that failed: "
    assert said == [f"{failed}another rank's failed", last] and others_said == [f"{failed}out of memory", last]
    assert one == other == ([], False)


# ---- runs on GPUs ----

RUN = shlex.split(
    "--device cuda --params-dtype bf16 --num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 300 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 24 --log-interval 1 --hidden-dropout 0.1 "
    "--eval-iters 0 --samples 0 --no-table --no-fusion-table"
)
RUNS = {"decides": (), "none": ("--no-cuda-graphs",)}


def run_on_gpus(rank, ranks, folder, backend, corpus, more):
    """Two runs on this rank, of which one decides. Keeps what it says."""
    launched(rank, ranks, backend)
    loop.MatrixPeak = lambda *args: None
    measured_steps._WAITS = 0.0  # as a slow CPU would have it
    for name, told in RUNS.items():
        meet_at(f"{folder}/meeting {name}", rank, ranks)
        arguments = [*RUN, *shlex.split(more), *told, "--data", corpus, "--run-dir", f"{folder}/{name}"]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert main(["train", *arguments]) == 0
        if not told:
            torch.save(said.getvalue(), f"{folder}/{rank}.pt")


@pytest.mark.parametrize(
    "more",
    (
        "", "--use-distributed-optimizer", "--fp8-format hybrid", "--lora-rank 4 --hidden-dropout 0",
        "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel --fp8-format hybrid",
    ),
)  # fmt: skip
@pytest.mark.parametrize("on_gpus", worlds.PAIRS[1:])
def test_a_run_that_decides_has_the_bits_of_one_without(on_gpus, more, corpus, tmp_path):
    if "fp8" in more and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs products in eight bits")
    said, other = worlds.found_by(run_on_gpus, on_gpus, tmp_path, str(corpus), more)
    captured, compared = (line for line in said.splitlines() if line.startswith("CUDA graph: "))
    assert captured.startswith("CUDA graph: captured, as"), captured
    assert re.match(r"CUDA graph: (kept|given up), as a step takes .* with it and", compared), compared  # on one GPU in turns
    assert "CUDA graph" not in other
    found, expected = (
        [(line.step, line.loss, line.grad_norm) for line in read_log(tmp_path / name / "log.csv")] for name in RUNS
    )
    assert found == expected and len(found) == 24
