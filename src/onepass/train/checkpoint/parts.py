"""This rank's parts of parameters and moments: rectangles of the whole tensors, in fp32.

Tensor parallelism (`onepass.nn.sharding`) gives a rank a range of rows or columns of each block of the whole parameter. The
rank's optimizer has all of that part. If data-parallel ranks share it (ZeRO-1, FSDP), the optimizer has a stretch that is
contiguous in memory: the end of a row, whole rows, the start of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.gradients.adamw_state import ParameterState
from onepass.nn.sharding import Division, range_of, whole_shape
from onepass.parallel import AdamW, ShardedAdamW
from onepass.train.layout import ParallelLayout
from onepass.train.updates import FsdpUpdate, MainGradUpdate, Update

Sizes = tuple[int, ...]


class Chunk(NamedTuple):
    """A rectangle of a whole tensor that this rank has."""

    name: str
    shape: Sizes  # of the whole tensor
    offsets: Sizes
    sizes: Sizes
    open: Callable[[], Tensor]  # returns its fp32 numbers, to be read or written before the next chunk is opened
    alike: bool  # replicated: the other tensor-parallel ranks have the whole tensor too


class _Stretch(NamedTuple):
    """The contiguous range of a parameter, or of one of its moments, that this rank's optimizer has."""

    parameter: Tensor
    kind: str
    state: ParameterState
    start: int  # offset in this rank's flattened parameter


_PREFIX = {"master": "", "exp_avg": "exp_avg.", "exp_avg_sq": "exp_avg_sq."}  # of a tensor's name, by kind


@contextmanager
def chunks(model: nn.Module, update: Update, layout: ParallelLayout, *, write: bool = False) -> Iterator[list[Chunk]]:
    """Yield this rank's chunks of weights and moments. They can be opened until the block ends.

    Args:
        write: store what chunks hold after they were opened, each when the next is, the last at the end of a block without error.
    """
    _shard(model)
    homes = {id(parameter): home for parameter, home in _homes(model)}
    opened = _OpenStretch(write)
    stretches = [_Stretch(p, kind, state, start) for p, state, start in _states(update, layout) for kind in _PREFIX]
    yield [chunk for each in stretches for chunk in _cut(each, opened, *homes[id(each.parameter)], layout)]
    opened.close()


class _OpenStretch:
    """The stretch whose numbers are in memory in fp32. There is one at a time: copies of all would take too much."""

    def __init__(self, write: bool) -> None:
        self._write = write
        self._stretch: _Stretch | None = None

    def view(self, stretch: _Stretch, inside: Sizes, sizes: Sizes) -> Tensor:
        if self._stretch is not stretch:
            self.close()
            self._stretch, self._flat = stretch, stretch.state.read(stretch.kind)
        return _view(self._flat, tuple(stretch.parameter.shape), inside, sizes, stretch.start)

    def close(self) -> None:
        if self._stretch is not None and self._write:
            self._stretch.state.write(self._stretch.kind, self._flat)
        self._stretch = None


def _cut(
    stretch: _Stretch, opened: _OpenStretch, name: str, division: Division | None, layout: ParallelLayout
) -> Iterator[Chunk]:  # fmt: skip
    """Divide a stretch into rectangles of the whole tensor."""
    own = tuple(stretch.parameter.shape)
    shape = own if division is None else whole_shape(stretch.parameter, division)
    for box in _boxes(own, stretch.start, stretch.start + stretch.state.weight.numel()):
        for inside, offsets, sizes in _placed(box, division, layout.tensor.rank, layout.tensor.size):
            numbers = partial(opened.view, stretch, inside, sizes)
            yield Chunk(_PREFIX[stretch.kind] + name, shape, offsets, sizes, numbers, division is None)


def _shard(model: nn.Module) -> None:
    """Reshard FSDP's weights, because the optimizer steps the shards. After an evaluation some are still gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_step(update: Update, step: int) -> None:
    """Set how many steps the optimizer has made."""
    if isinstance(update, MainGradUpdate):
        update.optimizer.set_step(step)
        return
    for weight in _weights(update):
        _state(update.optimizer, weight)["step"].fill_(step)


# ---- model and optimizer ----


def _homes(model: nn.Module) -> Iterator[tuple[Tensor, tuple[str, Division | None]]]:
    for path, module in model.named_modules():
        divisions: dict[str, Division] = getattr(module, "_divisions", {})
        for name, parameter in module.named_parameters(recurse=False):
            yield parameter, (f"{path}.{name}" if path else name, divisions.get(name))


def _states(update: Update, layout: ParallelLayout) -> Iterator[tuple[Tensor, ParameterState, int]]:
    """Yield parameters, this rank's part of each and its state, and where in this rank's parameter that begins. torch's AdamW
    steps whole fp32 weights."""
    if not isinstance(update.optimizer, AdamW | ShardedAdamW):
        for weight in _weights(update):
            state = {name: each.view(-1) for name, each in _state(update.optimizer, weight).items() if name in _PREFIX}
            yield weight, ParameterState(weight.detach().view(-1), state, 0, weight.device), 0
        return
    for weight, mine, start in update.optimizer.parameter_states():
        if isinstance(update, FsdpUpdate):  # fully_shard's rows
            start = range_of(weight.shape[0], layout.data.rank, layout.data.size)[0] * math.prod(weight.shape[1:])
        yield weight, mine, start


def _weights(update: Update) -> Iterator[Tensor]:
    for group in update.optimizer.param_groups:
        yield from group["params"]


def _state(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, Any]:
    """Return AdamW's state of a weight. Create it as AdamW does if there was no step yet."""
    state: dict[str, Any] = optimizer.state[weight]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        state["exp_avg"] = torch.zeros_like(weight, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(weight, requires_grad=False)
    return state


# ---- rectangles ----

Box = tuple[Sizes, Sizes]  # offsets, sizes


def _boxes(shape: Sizes, start: int, stop: int) -> Iterator[Box]:
    """Yield the rectangles that make up a stretch of a flattened tensor, in order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # range of whole rows
    if first > last:
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sizes, row: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in _boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


def _placed(box: Box, division: Division | None, rank: int, ranks: int) -> Iterator[tuple[Sizes, Sizes, Sizes]]:
    """Divide a rectangle of this rank's part by blocks into rectangles of the whole tensor.

    Yields (offsets in the part, offsets in the whole, sizes).
    """
    inside, sizes = box
    if division is None or ranks == 1:
        yield inside, inside, sizes
        return
    dim = division.dim
    own = whole = 0  # the block's offset in the part and in the whole
    for size in division.blocks():
        first, last = range_of(size, rank, ranks)
        start, stop = max(inside[dim], own), min(inside[dim] + sizes[dim], own + last - first)
        if start < stop:
            yield _with(inside, dim, start), _with(inside, dim, whole + first + start - own), _with(sizes, dim, stop - start)
        own, whole = own + last - first, whole + size


def _with(sizes: Sizes, dim: int, value: int) -> Sizes:
    return *sizes[:dim], value, *sizes[dim + 1 :]


def _view(flat: Tensor, own: Sizes, inside: Sizes, sizes: Sizes, start: int) -> Tensor:
    """Return the view of a rectangle of the part. `flat` is the stretch of the part from element `start`."""
    strides = [math.prod(own[dim + 1 :]) for dim in range(len(own))]
    at = sum(offset * stride for offset, stride in zip(inside, strides, strict=True)) - start
    return flat.as_strided(sizes, strides, flat.storage_offset() + at)
