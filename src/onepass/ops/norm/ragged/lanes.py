"""Many tensors as the lanes of one launch: what they must be, how they lie, and the tables that say it on the device.

A plan is what calls with lanes of the same shapes and strides have in common. Finding it costs a look at each lane's size and
strides, and the table of addresses a look at each address; nothing else is done for each lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels import language, layout
from onepass.kernels.device_tables import device_table, is_capturing, stream_key
from onepass.kernels.launch import Bound, Grid
from onepass.kernels.layout import as_rows
from onepass.runtime.checks import check_device, check_floating

Lanes = list[Tensor]
_MOST_PLANS = 256  # kinds of call, and what is kept of each: its shapes, and its addresses
_MOST_OF_A_KIND = 64


# ---- what they must be ----


def check_lanes(xs: Lanes, name: str = "xs") -> None:
    """One type, one device, one shape but for the last dimension."""
    if not xs:
        raise ValueError(f"{name} must have at least one tensor, but is empty")
    first = xs[0]
    for lane, x in enumerate(xs):
        check_floating(f"{name}[{lane}]", x)
        if x.dim() == 0 or x.shape[-1] == 0:
            raise ValueError(f"{name}[{lane}] must have a last dimension of at least 1, but has shape {tuple(x.shape)}")
        if x.shape[:-1] != first.shape[:-1]:
            what = f"the leading dimensions {tuple(first.shape[:-1])} of {name}[0]"
            raise ValueError(f"{name}[{lane}] must have {what}, but has shape {tuple(x.shape)}")
        _check_like(f"{name}[{lane}]", x, first, f"{name}[0]")


def check_gradients(dys: Lanes, xs: Lanes, mean: Tensor, rstd: Tensor, layer: bool) -> None:
    check_lanes(xs)
    if len(dys) != len(xs):
        raise ValueError(f"dys must have {len(xs)} tensors, as xs, but has {len(dys)}")
    for lane, (dy, x) in enumerate(zip(dys, xs, strict=True)):
        if dy.shape != x.shape:
            raise ValueError(f"dys[{lane}] must have xs[{lane}]'s shape {tuple(x.shape)}, but has {tuple(dy.shape)}")
        _check_like(f"dys[{lane}]", dy, x, f"xs[{lane}]")
    shape = len(xs), xs[0].numel() // xs[0].shape[-1]
    for name, stats in (("mean", mean), ("rstd", rstd)) if layer else (("rstd", rstd),):
        if tuple(stats.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, a number for each row of each lane, but has {tuple(stats.shape)}")


def check_vectors(vectors: Lanes, xs: Lanes, name: str) -> None:
    """Of all lanes or of none, one type, as long as the lanes' rows."""
    if vectors and len(vectors) != len(xs):
        raise ValueError(f"{name} must have {len(xs)} tensors, as xs, or none, but has {len(vectors)}")
    for lane, (vector, x) in enumerate(zip(vectors, xs, strict=False)):
        check_floating(f"{name}[{lane}]", vector)
        if vector.shape != x.shape[-1:]:
            what = f"shape {tuple(x.shape[-1:])}, as xs[{lane}]'s last dimension"
            raise ValueError(f"{name}[{lane}] must have {what}, but has {tuple(vector.shape)}")
        if vector.dtype != vectors[0].dtype:
            raise TypeError(f"{name}[{lane}] must have {name}[0]'s type {vectors[0].dtype}, but is {vector.dtype}")
        check_device(f"{name}[{lane}]", vector, x, f"xs[{lane}]")


def _check_like(name: str, value: Tensor, other: Tensor, like: str) -> None:
    if value.dtype != other.dtype:
        raise TypeError(f"{name} must have {like}'s type {other.dtype}, but is {value.dtype}")
    check_device(name, value, other, like)


# ---- how they lie ----


class LaneLayout(NamedTuple):
    """How many values each lane has and how far it is to its next row."""

    sizes: list[int]
    strides: list[tuple[int, ...]]
    rows: list[int]
    copies: list[int]  # lanes that no single distance leads through from row to row: they are copied


class LanePlan(NamedTuple):
    """What calls with lanes of the same shapes and strides have in common."""

    layout: LaneLayout
    M: int
    total: int  # columns of all lanes
    grid: Grid
    lanes: tuple[int, ...]  # the table's numbers
    partials: int  # columns of the sums of all programs
    multiple: int  # values in 16 bytes
    aligned: bool  # whether widths and strides are such multiples
    bounds: list[Bound]  # the kernel where something is no such multiple, and where all is
    tables: dict[tuple[int, int], Tensor]  # of `lanes`, for each stream
    seen: dict[tuple[int, ...], tuple[Tensor, bool]]  # of addresses, for each stream; and whether they are such multiples too


_plans: dict[tuple[Any, ...], list[LanePlan]] = {}


def layout_of(lanes: Lanes) -> LaneLayout:
    laid = [as_rows(lane) for lane in lanes]
    copies = [i for i, (lane, (same, _)) in enumerate(zip(lanes, laid, strict=True)) if same is not lane]
    return LaneLayout([*map(Tensor.numel, lanes)], [*map(Tensor.stride, lanes)], [row for _, row in laid], copies)


def plan_for(
    key: tuple[Any, ...], lanes: Lanes, check: Callable[[], None], make: Callable[[], LanePlan]
) -> tuple[LanePlan, Lanes]:
    """The plan of these lanes, and the lanes as kernels can take them. What is new is checked, and has its plan made."""
    sizes, strides = [*map(Tensor.numel, lanes)], [*map(Tensor.stride, lanes)]
    known = _plans.get(key)
    if known is not None:
        for plan in known:
            if plan.layout.sizes == sizes and plan.layout.strides == strides:
                return plan, _copied(lanes, plan.layout.copies) if plan.layout.copies else lanes
    check()
    plan = make()
    if known is None or len(known) >= _MOST_OF_A_KIND:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        known = _plans[key] = []
    known.append(plan)
    return plan, _copied(lanes, plan.layout.copies)


def _copied(lanes: Lanes, which: list[int]) -> Lanes:
    lanes = list(lanes)
    for lane in which:
        lanes[lane] = lanes[lane].contiguous()
    return lanes


# ---- tables ----


def table_of(plan: LanePlan, device: torch.device) -> Tensor:
    """The plan's numbers on the device."""
    stream, fixed = stream_key(device), is_capturing(device)
    table = None if fixed else plan.tables.get(stream)
    if table is None:
        table = device_table(plan.lanes, device)
        if not fixed:
            plan.tables[stream] = table
    return table


def addresses(
    plan: LanePlan, groups: tuple[Lanes, ...], vectors: tuple[Lanes, ...]
) -> tuple[tuple[Lanes, ...], Tensor, Tensor, bool]:
    """The vectors as kernels can take them, the tables of lanes and of addresses, and whether all are multiples of 16 bytes.

    An address is the distance, in values, from the group's first lane. Vectors are checked where their addresses are new.
    """
    device = groups[0][0].device
    stream, fixed = stream_key(device), is_capturing(device)
    lanes = table_of(plan, device)
    key: tuple[Any, ...] = stream
    for group in (*groups, *vectors):
        key += (*map(Tensor.data_ptr, group), (group[0].dtype, group[0].stride()) if group else None)
    found, xs = None if fixed else plan.seen.get(key), groups[-1]
    if found is not None:
        if language.INTERPRETED:  # it notes which memory a kernel may reach: these may be other tensors at the same addresses
            for group in (*groups, *vectors):
                _offsets(group, len(xs))
        return vectors, lanes, *found
    for group, name in zip(vectors, ("weights", "biases"), strict=False):
        check_vectors(group, xs, name)
    straight = tuple([vector.contiguous() for vector in group] for group in vectors)
    offsets = tuple(offset for group in (*groups, *straight) for offset in _offsets(group, len(xs)))
    found = device_table(offsets, device), plan.aligned and not any(offset % plan.multiple for offset in offsets)
    copied = any(not vector.is_contiguous() for group in vectors for vector in group)
    if not copied and not fixed:
        if len(plan.seen) >= _MOST_OF_A_KIND:
            plan.seen.clear()
        plan.seen[key] = found
    return straight, lanes, *found


def _offsets(group: Lanes, count: int) -> list[int]:
    """In values, from the first; of a group that is empty nobody reads them."""
    if not group:
        return [0] * count
    size, first = group[0].element_size(), group[0].data_ptr()
    if any((each.data_ptr() - first) % size for each in group):
        raise ValueError(f"a tensor's address is no multiple of its values' {size} bytes from another's")
    return [layout.distance(each, group[0]) for each in group]
