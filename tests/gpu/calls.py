"""Helpers for tests on a GPU: synchronization, CUDA graphs, determinism and memory."""

import gc
import warnings
from contextlib import contextmanager

import pytest
import torch

needs_60_gib = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 60 * 2**30, reason="needs 60 GiB"
)
# PyTorch 2.11 warns if a function that was warmed up on another stream is captured
other_stream = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")


@pytest.fixture(autouse=True)
def memory_goes_back():
    """Free cached memory for the other processes of the run: tests at real sizes take a large part of a GPU's memory."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def nobody_waits():
    """Raise if the block synchronizes with the GPU."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def at_the_side():
    """Run the block on a side stream, ordered after the current stream's earlier work and before its later work."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def warmed(function):
    """Call a function twice on a side stream, as PyTorch requires before a capture, and collect garbage."""
    with at_the_side():
        for _ in range(2):
            function()
    gc.collect()


def captured(function):
    """Capture a function in a CUDA graph. Return its results, which each replay overwrites, and the graph."""
    warmed(function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return results, graph


def compilations(*kernels):
    """How many variants of kernels Triton has compiled or loaded so far in this process."""
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.jit.device_caches.values())


def launched(function):
    """The names of the kernels, copies and fills that a second call runs, in order."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        function()
        torch.cuda.synchronize()
    return [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def replays_on_any_stream(function, replays=1):
    """Whether a captured function's replays write what it returned before, on the current stream and on another."""
    expected = [t.detach().clone() for t in function()]
    results, graph = captured(function)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.current_stream()):
        for t in results:
            t.detach().fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(replays):
                graph.replay()
        torch.cuda.synchronize()
        if not all(map(torch.equal, results, expected)):
            return False
    return True


@contextmanager
def deterministic_algorithms():
    """Use deterministic algorithms, and fail on warnings about nondeterminism.

    cuBLAS's warning is allowed: it wants an environment variable, which it reads when a process starts.
    """
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
    said = [str(warning.message) for warning in seen]
    assert not [each for each in said if "determinis" in each and "CuBLAS" not in each], said


def taken(function):
    """Return a function's peak memory beyond what was allocated before, in bytes, and its result."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    returned = function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, returned


def filled(piece=16 << 20):
    """Allocate all the GPU memory that this process may still use, and return the tensors."""
    pieces = []
    while True:
        try:
            pieces.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            return pieces


@contextmanager
def room_for(size):
    """Limit this process to `size` bytes beyond the memory in use, whatever the allocator has cached.

    Other processes are not affected.
    """
    gc.collect()
    torch.cuda.empty_cache()
    _, whole = torch.cuda.mem_get_info()
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / whole)
        rest = filled()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / whole)
        yield
        del rest
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def said_by(function):
    """Return the message of a function's OutOfMemoryError. The error itself would keep its frames' tensors alive."""
    try:
        function()
    except torch.OutOfMemoryError as error:
        return str(error)
    pytest.fail("there was memory enough")
