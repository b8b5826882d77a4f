"""What only a GPU can tell of a call: the memory it needs and keeps, and its time without any launches, under a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from onepass.bench.model import Call, Inputs, differentiate, outputs_of
from onepass.runtime.ceilings import Clock

_IN_A_GRAPH = 20  # calls: what starting a graph costs is spread over them
_WARM = 3  # calls before a capture: what is compiled, loaded or allocated once may not be inside


def memory_mib(call: Call, inputs: Inputs, device: torch.device) -> tuple[float, float]:
    """The peak: what forward and backward need at most beyond the inputs, results included. What is kept: all that forward leaves
    beyond inputs and outputs, for backward."""
    grads = inputs.fresh_grads()
    call(*inputs.tensors.values())  # what is made once is made here
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before, asked_for = torch.cuda.memory_allocated(device), _asked_for(device)
    results = call(*inputs.tensors.values())
    outputs = {output.untyped_storage().data_ptr(): output.untyped_storage().nbytes() for output in outputs_of(results)}
    kept = _asked_for(device) - asked_for - sum(outputs.values())
    got = differentiate(results, list(inputs.asked.values()), grads, inputs.trained)
    torch.cuda.synchronize(device)
    del results, got
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20, kept / 2**20


def _asked_for(device: torch.device) -> int:
    """Bytes that somebody holds, without what the allocator adds: up to a MiB a tensor."""
    held: int = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    return held


def replay_us(call: Callable[[], object], clock: Clock) -> float:
    """The GPU's time of one call, microseconds: some of them, on the same tensors, in one graph that is replayed."""
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
    """Not `with torch.cuda.graph`, which after a failure leaves its stream the current one and the allocator in its capture: then
    no cache could be emptied again."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    graph.capture_begin(pool)
    try:
        for _ in range(_IN_A_GRAPH):
            call()
        graph.capture_end()
    except BaseException:
        for end in (graph.capture_end, lambda: torch._C._cuda_endAllocateToPool(device.index, pool)):
            with suppress(RuntimeError):  # the one or the other has ended already
                end()
        raise
    return graph
