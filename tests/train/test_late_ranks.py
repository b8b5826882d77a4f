"""Runs in which a rank is late in each phase, and the clocks of one are fast, end.

Each phase has a rank and delays of its own, by the run's seed.
"""

import contextlib
import faulthandler
import gc
import io
import os
import random
import shlex
import shutil
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from parallel import worlds
from parallel.meeting import launched, meet_at

import onepass
from onepass.cli import main
from onepass.profiling import record
from onepass.profiling.limits import Limits
from onepass.train import checkpoint, layout, loop, table, text
from onepass.train import record as run_record
from onepass.train.batches import Batches
from onepass.train.checkpoint import storage
from onepass.train.steps import TrainSteps

LAYOUTS = (
    "--use-distributed-optimizer",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2 --num-layers 2",
    "--use-fsdp",
)
RUN = shlex.split(
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --vocab-size 300 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr-warmup-iters 2 --eval-interval 2 --eval-iters 2 "
    "--save-minutes 0.01 --samples 1 --sample-tokens 4 --no-norm-fusion --no-norm-linear-fusion --no-rope-fusion "
    "--no-bias-activation-fusion"
)
PHASES = (  # where a rank is late, and by how many seconds at most
    ("start", layout, "_groups", 0.3),
    ("tokenising", text, "load", 0.3),
    ("step", Batches, "of_step", 0.01),
    ("backward", torch.Tensor, "backward", 0.01),  # in steps and in the tables
    ("evaluation", TrainSteps, "loss", 0.02),
    ("checkpoint", checkpoint, "save", 0.2),
    ("part of a checkpoint", storage._Writer, "write_data", 0.2),
    ("table", table, "_measured", 0.3),
    ("samples", TrainSteps, "logits", 0.02),
)
SEEDS = range(2)  # each with another layout
CLOCKS = ("perf_counter", "monotonic")
FAST = 40.0
MINUTE = 60.0


def run(rank, ranks, folder, backend):
    torch.set_num_threads(1)
    os.chdir(folder)
    launched(rank, ranks, backend)
    os.environ["OMP_NUM_THREADS"] = "1"  # measures no threads
    loop.MatrixPeak = run_record.draw = lambda *args: None  # these and ceilings take seconds, of a rank alone
    record.limits_of = lambda *args: Limits()
    gc.freeze()  # tables collect what they have made
    device = "cuda" if backend == "nccl" else "cpu"
    stocks = [getattr(owner, name) for _, owner, name, _ in PHASES]
    clocks = {name: getattr(time, name) for name in CLOCKS}
    found = {}
    for seed in SEEDS:
        meet_at(f"{folder}/meeting {seed}", rank, ranks)
        draw, reached = random.Random(seed), set()
        rate = FAST if draw.randrange(ranks) == rank else 1.0
        for name, clock in clocks.items():
            setattr(time, name, lambda clock=clock, rate=rate: clock() * rate)
        for (phase, owner, name, most), stock in zip(PHASES, stocks, strict=True):
            is_late = draw.randrange(ranks) == rank
            setattr(owner, name, delayed(stock, most * is_late, random.Random(f"{seed} {phase}"), partial(reach, reached, phase)))
        arguments = [*RUN, *shlex.split(LAYOUTS[seed % len(LAYOUTS)]), "--device", device, "--seed", str(seed)]
        said = io.StringIO()
        with onepass.use_backend("torch"), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = main(["train", *arguments, "--data", "text.txt", "--run-dir", f"run {seed}"])
        faulthandler.cancel_dump_traceback_later()
        found[seed] = {"status": status, "said": said.getvalue(), "phases": reached}
    torch.save(found, f"{rank}.pt")


def reach(reached, phase):
    """Print the stack and end if the next phase is not reached within a minute, whatever else the machine does."""
    reached.add(phase)
    faulthandler.dump_traceback_later(MINUTE, exit=True, file=sys.__stderr__)


def delayed(stock, most, draw, note):
    """Sleep before half of the calls, and after the other half, which the other ranks' clocks don't see."""

    def call(*args, **options):
        note()
        before, seconds = draw.random() < 0.5, most * draw.random()
        time.sleep(seconds * before)
        result = stock(*args, **options)
        time.sleep(seconds * (not before))
        return result

    return call


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize("world", worlds.PAIRS)
def test_a_run_ends_whichever_rank_is_late_in_whichever_phase(world, tmp_path, corpus):
    shutil.copy(corpus, tmp_path / "text.txt")
    phases = {phase for phase, *_ in PHASES}
    for found in worlds.found_by(run, world, tmp_path):
        assert found == {seed: {"status": 0, "said": "", "phases": phases} for seed in SEEDS}
