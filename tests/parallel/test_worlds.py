"""The fixture `world`: what ranks return, and what a test is told of ranks that fail, die or hang."""

import ctypes
import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from parallel.meeting import gather
from parallel.worlds import PAIRS, World

import onepass

here = pytest.mark.parametrize("world", PAIRS[:1], indirect=True)


def added(group, number, more=0):
    t = torch.full((2,), float(number + more + group.rank()), requires_grad=True)
    dist.all_reduce(total := t.detach().clone(), group=group)
    return {"mine": t, "total": total, "process": os.getpid(), "random": torch.rand(())}


def failing(group):
    if group.rank() == 1:
        raise ValueError("a rank's own words")
    dist.barrier(group)


def dying(group):
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group)


def crashing(group):
    ctypes.string_at(0)


def hanging(group):
    if group.rank() == 1:
        time.sleep(100)


def leaving_a_backend(group):
    onepass.use_backend("torch")


def test_ranks_return_what_the_function_does_and_stay(world):
    first, second = world.run(added, 3, more=1), world.run(added, 4)
    device = torch.device("cpu")
    for rank, (one, other) in enumerate(zip(first, second, strict=True)):
        assert one["mine"].tolist() == [4.0 + rank] * 2 and one["total"].tolist() == [9.0] * 2
        assert one["mine"].device == one["total"].device == device
        assert one["process"] == other["process"] != os.getpid() and one["random"] == other["random"]


@here
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (failing, r"failing failed\non rank 1: Traceback(.|\n)*in failing\n(.|\n)*ValueError: a rank's own words\n"),
        (dying, "dying failed\non rank 1: the process ended with exit code -9"),
        (crashing, "(?s)crashing failed\non rank [01].* exit code -11\nFatal Python error: Segmentation fault\n.*in crashing\n"),
        (leaving_a_backend, "(?s)leaving_a_backend failed\non rank 0, 1: .*leaving_a_backend has left a backend chosen"),
    ],
)
def test_what_goes_wrong_is_told_of_its_rank_and_ends_the_ranks(world, function, words):
    before = world.run(added, 0)[0]["process"]
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=words):
        world.run(function)
    assert time.monotonic() - start < world.seconds
    assert world.run(added, 0)[0]["process"] != before


def test_ranks_that_do_not_answer_are_named():
    world = World("gloo", 2)
    world.run(added, 0)
    try:
        world.seconds = 2
        with pytest.raises(pytest.fail.Exception, match="hanging failed\non rank 1: no answer"):
            world.run(hanging)
    finally:
        world.close()


def test_a_test_of_a_group_runs_on_each_rank(group):
    assert gather(group, dist.get_rank()) == list(range(group.size()))
    assert multiprocessing.parent_process() is not None
