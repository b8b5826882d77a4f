"""What tests on a GPU share: who waits, graphs, what is the same every time, and memory."""

import gc
import warnings
from contextlib import contextmanager

import pytest
import torch

needs_60_gib = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 60 * 2**30, reason="needs 60 GiB"
)
# PyTorch 2.11's own, where what was warmed up on another stream is captured
other_stream = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")


@pytest.fixture(autouse=True)
def memory_goes_back():
    """To the other processes of a run: real sizes take a good part of a GPU's."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def nobody_waits():
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
    """On a stream of its own, after what the current one has been given, and before what it is given next."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def warmed(function):
    """Twice on a stream at the side, as PyTorch asks for, with nothing left of it."""
    with at_the_side():
        for _ in range(2):
            function()
    gc.collect()


def captured(function):
    """What the function returns, which a graph writes anew, and the graph."""
    warmed(function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return results, graph


@contextmanager
def deterministic_algorithms():
    """Nothing may be said but that cuBLAS wants an environment, which it reads when a process begins."""
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
    """Bytes at most, beside what was there; and what the function returns."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    returned = function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, returned


def filled(piece=16 << 20):
    """All that this process may still have, taken."""
    pieces = []
    while True:
        try:
            pieces.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            return pieces


@contextmanager
def room_for(size):
    """So many bytes beside what is in use, whatever the allocator has kept. Other processes are not touched."""
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
    """The error of memory that ran out, as words: the error itself would keep what its frames have."""
    try:
        function()
    except torch.OutOfMemoryError as error:
        return str(error)
    pytest.fail("there was memory enough")
