"""Scratch memory that the kernels of one stream share: partial sums, and counters of the programs that have arrived.

The last program of a kernel to arrive can do the work that needs everybody's partial results, and so spares a second kernel.
A kernel adds 1 to a counter as each of its programs ends and sets it back to 0 when it has seen the last: the same zeros
serve every later call. Only integers are counted, so the result does not depend on who came last. Kernels of one stream run
one after the other, so the memory is theirs in turn; it is kept (a few MiB), which spares an allocation a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.runtime.lasting import lasting

_LEAST = 1 << 16
_kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}


def kept_scratch(floats: int, counters: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For the current stream at least `floats` fp32 of any value, and `counters` int32 zeros that must be left zeros."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():  # a graph may be replayed on any stream: it has its own
        return new_scratch(floats, counters, device)
    index = device.index
    key = index, torch._C._cuda_getCurrentRawStream(index)
    kept = _kept.get(key)
    if kept is None or kept[0].numel() < floats or kept[1].numel() < counters:
        kept = _kept[key] = lasting(lambda: new_scratch(max(floats, _LEAST), max(counters, _LEAST), device), device)
        for memory in kept:
            memory.record_stream(torch.cuda.current_stream(device))
    return kept


def new_scratch(floats: int, counters: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same, made for one call: in graphs, whose memory must not outlive them."""
    return (
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )
