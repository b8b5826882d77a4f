"""What a CPU shows of `capture`: the calls that begin and end it, with stand-ins for CUDA's."""

import contextlib

import pytest
import torch

from onepass.runtime import cuda_graph
from onepass.runtime.cuda_graph import capture, current_step, restored_generator, side_stream, whole_step

DEVICE = torch.device("cuda", 3)


@pytest.fixture
def done(monkeypatch):
    """What CUDA was told, in order. The first capture's end fails if `done.fails` is set."""

    class Done(list):
        fails, ended = False, False

    done = Done()

    class Graph:
        def __init__(self):
            self.name = f"graph {sum(each.startswith('begin') for each in done) + 1}"
            self.ended = False

        def capture_begin(self, pool=None, capture_error_mode="global"):
            done.append(f"begin {self.name} {capture_error_mode}")

        def capture_end(self):
            done.append(f"end {self.name}")
            if done.fails and self.name == "graph 1":
                raise RuntimeError("capture invalidated")
            self.ended = True

        def pool(self):
            if not self.ended:
                raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *to, name=name: done.append(f"{name}{to}"), raising=False)
    return done


def test_a_capture_returns_the_graph_and_the_result(done):
    graph, found = capture(lambda: done.append("call") or 5, DEVICE)
    assert found == 5 and graph.name == "graph 1"
    assert done == ["wait", "begin graph 1 thread_local", "call", "end graph 1"]


@pytest.mark.parametrize("error", (RuntimeError("waits"), KeyboardInterrupt()))
def test_a_capture_that_fails_is_ended_and_lets_go_of_the_generator(done, error):
    """The allocator would otherwise wait for its end, and refuse to empty its cache; the generator would refuse to draw."""

    def call():
        raise error

    done.fails = True
    with pytest.raises(type(error)):
        capture(call, DEVICE)
    ended = ["end graph 1", "_cuda_endAllocateToPool(3, (0, 1))", "_cuda_releasePool(3, (0, 1))"]
    assert done == ["wait", "begin graph 1 thread_local", *ended, "begin graph 2 thread_local", "end graph 2"]


def test_an_end_that_fails_is_tried_again_as_is_the_allocators(done):
    done.fails = True
    with pytest.raises(RuntimeError, match="capture invalidated"):
        capture(lambda: None, DEVICE)
    assert done[2:5] == ["end graph 1", "end graph 1", "_cuda_endAllocateToPool(3, (0, 1))"]


def test_a_pool_that_the_graph_gives_back_is_not_given_back_twice(done):
    """Python's error after work that was captured well: its end succeeds."""

    def call():
        raise KeyError("of Python's")

    with pytest.raises(KeyError):
        capture(call, DEVICE)
    assert not any("release" in each for each in done)


class _Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("fails", (False, True))
def test_a_side_stream_runs_after_earlier_and_before_later_work(monkeypatch, fails):
    log = []
    here, side = _Stream("here", log), _Stream("side", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(log.append(f"on {stream.name}")))
    with contextlib.suppress(KeyError), side_stream(DEVICE, side) as stream:
        assert stream is side
        log.append("call")
        if fails:
            raise KeyError
    assert log == ["side waits for here", "on side", "call", "here waits for side"]


def test_a_generator_draws_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))
    with restored_generator(DEVICE):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), first)


def test_a_whole_step_is_known_in_its_block_and_in_its_backwards():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(current_step()))
    assert current_step() is None
    with whole_step() as step:
        assert current_step() is step
        x.sum().backward()
    assert current_step() is None and seen == [step]
    x.sum().backward()
    assert seen[1] is None and cuda_graph._whole_step.process is None
