"""Small tables of integers on the device: what a kernel looks up that would not fit in its arguments.

A table is made once for its numbers and kept, so that a call that repeats itself sends nothing to the GPU. It is sent on a stream
at the side (`lasting`): each stream that reads it waits once, and its memory, when it is evicted, for all that have read it.
Under capture a graph may read what was there before, as a capture begins when the GPU has done all it had to do; that stays for
good. Nothing new is kept: the numbers travel in launches of the graph itself, which neither the host's memory nor another call
can change.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from onepass.runtime.lasting import lasting, side_of

MOST = 1024  # tables kept: of a few KiB each
# with the streams that have waited for it
_kept: OrderedDict[tuple[torch.device, tuple[int, ...]], tuple[Tensor, set[tuple[int, int]]]] = OrderedDict()
_of_graphs: dict[int, Tensor] = {}  # kept tables that a graph has read: they stay for as long as it may be replayed
_zeros: dict[tuple[int, int], Tensor] = {}


def stream_of(device: torch.device) -> tuple[int, int]:
    """A GPU and its current stream; elsewhere there is one."""
    if device.type != "cuda":
        return -1, 0
    return device.index, torch._C._cuda_getCurrentRawStream(device.index)


def capturing(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def kept_table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """The numbers as int64 on the device, for kernels of the current stream. Nobody writes to it."""
    key = device, numbers
    found = _kept.get(key)
    if capturing(device):
        if found is None:
            return _written(numbers, device)
        _of_graphs[id(found[0])] = found[0]
        return found[0]
    if found is None:
        found = _kept[key] = _sent(numbers, device), set()
        if len(_kept) > MOST:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    table, waited = found
    stream = stream_of(device)
    if stream not in waited:
        waited.add(stream)
        _hand_over(table)
    return table


def kept_zeros(count: int, device: torch.device) -> Tensor:
    """At least so many int32 zeros, for kernels of the current stream, which must leave them zeros."""
    if device.type != "cuda" or capturing(device):  # a graph may be replayed on any stream: it has its own
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = stream_of(device)
    zeros = _zeros.get(key)
    if zeros is None or zeros.numel() < count:
        zeros = _zeros[key] = lasting(lambda: torch.zeros(max(count, 1 << 12), dtype=torch.int32, device=device), device)
        _hand_over(zeros)
    return zeros


def _sent(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    host = torch.tensor(numbers, dtype=torch.int64)
    if device.type != "cuda":
        return host.to(device)
    return lasting(lambda: host.pin_memory().to(device, non_blocking=True), device)


def _hand_over(tensor: Tensor) -> None:
    """To the current stream, which waits for what made it; whoever gets its memory next waits for this stream."""
    if tensor.is_cuda:
        here = torch.cuda.current_stream(tensor.device)
        here.wait_stream(side_of(tensor.device))
        tensor.record_stream(here)


def _written(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """The numbers as launches write them, which have each number among their arguments."""
    table = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    torch._foreach_add_(table.unbind(), list(numbers))
    return table
