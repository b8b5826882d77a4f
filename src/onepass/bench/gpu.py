"""Measurements that need a GPU: the memory that a call needs and keeps, and its time in a CUDA graph, without launches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from onepass.bench.model import Call, Inputs, differentiate, outputs_of
from onepass.runtime.ceilings import Clock

_IN_A_GRAPH = 20  # calls a graph: they share the cost of its launch
_WARM = 3  # calls before a capture, which may not contain one-time compilation, loading or allocation


def memory_mib(call: Call, inputs: Inputs, device: torch.device) -> tuple[float, float]:
    """Return the peak and the kept memory of a call.

    The peak is the most that forward and backward allocate beyond the inputs, results included. The kept memory is what forward
    leaves allocated beyond inputs and outputs, for backward.
    """
    asked, grads = list(inputs.asked.values()), inputs.fresh_grads()
    differentiate(call(*inputs.tensors.values()), asked, inputs.fresh_grads(), inputs.trained)  # one-time allocations happen here
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before, asked_for = torch.cuda.memory_allocated(device), _asked_for(device)
    results = call(*inputs.tensors.values())
    outputs = {output.untyped_storage().data_ptr(): output.untyped_storage().nbytes() for output in outputs_of(results)}
    kept = _asked_for(device) - asked_for - sum(outputs.values())
    got = differentiate(results, asked, grads, inputs.trained)
    torch.cuda.synchronize(device)
    del results, got
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20, kept / 2**20


def _asked_for(device: torch.device) -> int:
    """Return the bytes in use as requested, without the allocator's rounding of up to a MiB a tensor."""
    held: int = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    return held


def replay_us(call: Callable[[], object], clock: Clock) -> float:
    """Return the GPU time of one call in microseconds, from replays of a graph of several calls on the same tensors."""
    here = torch.cuda.current_stream(clock.device)
    stream = torch.cuda.Stream(clock.device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        for _ in range(_WARM):
            call()
        torch.cuda.synchronize(clock.device)
        graph = _captured(call, clock.device)
    here.wait_stream(stream)
    return clock.median(lambda _: graph.replay()) * 1e3 / _IN_A_GRAPH


def _captured(call: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture several calls, and end the capture properly if one fails.

    `with torch.cuda.graph` leaves its stream current after a failure, and the allocator in its capture. torch.cuda.empty_cache
    would never work again.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    graph.capture_begin(pool)
    try:
        for _ in range(_IN_A_GRAPH):
            call()
        graph.capture_end()
    except BaseException:
        for end in (graph.capture_end, lambda: torch._C._cuda_endAllocateToPool(device.index, pool)):
            with suppress(RuntimeError):  # one of the two has ended already
                end()
        raise
    return graph
