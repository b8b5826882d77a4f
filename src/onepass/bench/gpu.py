"""Measurements that need a GPU: the memory that a call needs and keeps, and its time in a CUDA graph, without launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onepass.bench.model import Call, Inputs, differentiate, outputs_of
from onepass.runtime.ceilings import Clock
from onepass.runtime.cuda_graph import capture, side_stream

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
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs.tensors.values()}  # which some write to and return
    storages = {output.untyped_storage().data_ptr(): output.untyped_storage().nbytes() for output in outputs_of(results)}
    kept = _asked_for(device) - asked_for - sum(size for place, size in storages.items() if place not in given)
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
    with side_stream(clock.device):
        for _ in range(_WARM):
            call()
            clock.synchronize()  # the host hears of a history of scales before the capture, in which it asks nothing
        graph, _ = capture(lambda: [call() for _ in range(_IN_A_GRAPH)], clock.device)
    return clock.median(lambda _: graph.replay()) * 1e3 / _IN_A_GRAPH
