"""Captures of CUDA graphs that leave the process usable if they fail, and what runs inside of one knows about it."""

from __future__ import annotations

import gc
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from onepass.runtime.process_setting import ProcessSetting

T = TypeVar("T")
_MODE = "thread_local"  # other threads, such as a loader's that pins memory, may go on


class WholeStep:
    """A call of a whole training step, which runs now or is captured: forward, backward, update and clearing of gradients."""

    def __init__(self) -> None:
        self.written: list[Tensor] = []  # weights that the step writes beside its optimizers' parameters
        self.given: list[Tensor] = []  # parameters of which those are trained that require a gradient
        self.scales: list[Any] = []  # of weights in eight bits that the step has used


_whole_step: ProcessSetting[WholeStep | None] = ProcessSetting("whole_step", None)


@contextmanager
def whole_step() -> Iterator[WholeStep]:
    """Let the block, and backwards that run from it, know that they are parts of a step that is captured as a whole."""
    step = WholeStep()
    with _whole_step.change(step):
        yield step


def current_step() -> WholeStep | None:
    """Return the whole step that this call is a part of, if any."""
    return _whole_step.process if not _whole_step.has_blocks else _whole_step.in_thread()


@contextmanager
def side_stream(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.Stream]:
    """Run the block on a stream beside the current one, after its earlier work and before its later work."""
    here = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device) if stream is None else stream
    stream.wait_stream(here)
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:
        here.wait_stream(stream)


@contextmanager
def restored_generator(device: torch.device) -> Iterator[None]:
    """Let the device draw the block's random numbers again after it."""
    before = torch.cuda.get_rng_state(device)
    try:
        yield
    finally:
        torch.cuda.set_rng_state(before, device)


class CpuGenerators:
    """What the CPU's random generators, PyTorch's, Python's and NumPy's, are about to draw."""

    def __init__(self) -> None:
        self._numpy = sys.modules.get("numpy")  # where nobody imported it, nobody draws by it
        self._states = self._now()

    def _now(self) -> list[Any]:
        numpy = [] if self._numpy is None else [self._numpy.random.get_state()]
        return [random.getstate(), torch.get_rng_state(), *numpy]

    def unchanged(self) -> bool:
        (python, made, *numpy), (python_then, made_then, *numpy_then) = self._now(), self._states
        return python == python_then and torch.equal(made, made_then) and pickle.dumps(numpy) == pickle.dumps(numpy_then)

    def restore(self) -> None:
        """Let them draw the same numbers again."""
        python, made, *numpy = self._states
        random.setstate(python)
        torch.set_rng_state(made)
        if self._numpy is not None:
            self._numpy.random.set_state(*numpy)


def free_memory(device: torch.device) -> None:
    """Give unused memory back before a capture: a graph allocates its own, and none of what the allocator keeps."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def capture(call: Callable[[], T], device: torch.device, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a call on the current stream, a side stream. Return the graph, and the result that each replay overwrites.

    `with torch.cuda.graph` leaves its stream current after a failure, the allocator in its capture, and the random generator too:
    torch.cuda.empty_cache and random numbers would raise from then on. Here a failure ends all of these.

    Args:
        pool: the memory of other graphs, whose replays must not overlap with this one's.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle() if pool is None else pool
    written = torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    graph.capture_begin(pool, capture_error_mode=_MODE)
    try:
        result = call()
        graph.capture_end()
    except BaseException:
        _end(graph, torch.cuda.current_device() if device.index is None else device.index, pool)
        with suppress(RuntimeError):
            _release_generator(written)
        raise
    return graph, result


def _end(graph: torch.cuda.CUDAGraph, index: int, pool: Any) -> None:
    for end in (graph.capture_end, lambda: torch._C._cuda_endAllocateToPool(index, pool)):
        with suppress(RuntimeError):  # one of the two has ended already
            end()
    try:
        graph.pool()
    except RuntimeError:  # it has none, as its capture never ended: it will not give the memory back either
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(index, pool)


def _release_generator(written: Tensor) -> None:
    """Capture something else. In PyTorch 2.11 only the end of a capture lets the generator draw outside of graphs again.

    Another state in the generator's place would do so too, but earlier graphs would keep the old one, and repeat its numbers.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode=_MODE)
    written.zero_()
    graph.capture_end()
