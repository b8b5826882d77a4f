"""Small tables of integers on the device, for kernels whose numbers do not fit in their arguments.

A table is made once for its numbers and kept: a repeated call sends nothing to the GPU. A side stream sends it
(`persistent_alloc`). Each stream that reads it waits once, and an evicted table's memory waits for all streams that have read it.
A graph may read tables from before its capture, as a capture begins after the GPU has finished its work; such tables are never
evicted. A capture keeps no new table: launches of the graph itself write the numbers, which neither the host's memory nor another
call can change.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from onepass.kernels.scratch import persistent_alloc, persistent_stream

MOST = 1024  # tables kept, of a few KiB each
# each table with the streams that have waited for it
_kept: OrderedDict[tuple[torch.device, tuple[int, ...]], tuple[Tensor, set[tuple[int, int]]]] = OrderedDict()
_of_graphs: dict[int, Tensor] = {}  # tables that a graph has read, and may read at a replay: never evicted
_zeros: dict[tuple[int, int], Tensor] = {}


def stream_key(device: torch.device) -> tuple[int, int]:
    """Return the GPU and its current stream; on a CPU, one key."""
    if device.type != "cuda":
        return -1, 0
    return device.index, torch._C._cuda_getCurrentRawStream(device.index)


def is_capturing(device: torch.device) -> bool:
    """Whether launches become part of a CUDA graph now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def device_table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the numbers as int64 on the device, for kernels of the current stream. Do not write to it."""
    key = device, numbers
    entry = _kept.get(key)
    if is_capturing(device):
        if entry is None:
            return _written(numbers, device)
        _of_graphs[id(entry[0])] = entry[0]
        return entry[0]
    if entry is None:
        entry = _kept[key] = _sent(numbers, device), set()
        if len(_kept) > MOST:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    table, waited = entry
    stream = stream_key(device)
    if stream not in waited:
        waited.add(stream)
        _hand_over(table)
    return table


def device_zeros(count: int, device: torch.device) -> Tensor:
    """Return at least `count` int32 zeros, for kernels of the current stream, which must leave them zeros."""
    if device.type != "cuda" or is_capturing(device):  # a graph may be replayed on any stream: it gets its own
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = stream_key(device)
    zeros = _zeros.get(key)
    if zeros is None or zeros.numel() < count:
        zeros = _zeros[key] = persistent_alloc(lambda: torch.zeros(max(count, 1 << 12), dtype=torch.int32, device=device), device)
        _hand_over(zeros)
    return zeros


def _sent(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    host = torch.tensor(numbers, dtype=torch.int64)
    if device.type != "cuda":
        return host.to(device)
    return persistent_alloc(lambda: host.pin_memory().to(device, non_blocking=True), device)


def _hand_over(tensor: Tensor) -> None:
    """Let the current stream use the tensor: it waits for the side stream, and the tensor's memory is reused only after it."""
    if tensor.is_cuda:
        here = torch.cuda.current_stream(tensor.device)
        here.wait_stream(persistent_stream(tensor.device))
        tensor.record_stream(here)


def _written(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the numbers, written by launches that have them among their arguments."""
    table = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    torch._foreach_add_(table.unbind(), list(numbers))
    return table
