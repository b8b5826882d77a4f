"""The collectives of tensor and sequence parallelism, with their gradients.

    here                       Megatron's mapping                             forward           backward
    copy_to_group              copy_to_tensor_model_parallel_region           x                 sum
    sum_over_group             reduce_from_tensor_model_parallel_region       sum               dy
    gather_last                gather_from_tensor_model_parallel_region       gather, last      part, last
    split_last                 scatter_to_tensor_model_parallel_region        part, last        gather, last
    gather_sequence            gather_from_sequence_parallel_region           gather, first     reduce-scatter, first (or part)
    reduce_scatter_sequence    reduce_scatter_to_sequence_parallel_region     reduce-scatter    gather, first
    split_sequence             scatter_to_sequence_parallel_region            part, first       gather, first

"first" and "last" are the dimension of x along which the ranks have their parts, in the order of the ranks of group. Where
group is None or has one rank, x itself comes back: nothing is sent or copied, and torch.distributed need not be initialised.

What is only moved is exact. Sums of 16-bit numbers are made in fp32 and rounded once on a CPU, where gloo would round at every
step; on a GPU NCCL makes them in the storage type, as fp32 would send twice the bytes. Inputs and incoming gradients are never
written. Shapes and types must be the same on all ranks (for gather_last: but for the last dimension), which is checked under
`onepass.validate()`. A backward communicates too: the ranks that ran forward together must run backward together.

The bare pieces, `start_all_gather`, `start_reduce_scatter` and `start_all_reduce`, know nothing of autograd. They return at
once, so that a layer can do a matrix product before it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.dispatch import cast, once
from onepass.runtime.validation import validating

# PyTorch's functional collectives: compilers and dispatch modes see them. What does the same in torch.distributed has other
# names from one version to the next, and compilers don't follow it where it is asynchronous.
_ops = torch.ops._c10d_functional

_START = 10_000  # cycles of a GPU, about 5 us


# ---- bare and asynchronous ----


class Pending:
    """A collective under way, whose result `wait` returns. On a GPU the current stream waits, and the CPU goes on.

    Until then what was sent must not be written. The thread that started it is the one to wait; autograd's threads count as the
    one that ran forward.
    """

    __slots__ = ("_finish", "_held", "_result")

    def __init__(self, running: Tensor, finish: Callable[[Tensor], Tensor] | None = None, held: Tensor | None = None) -> None:
        """running is what the collective writes, and finish makes the result of it; None where there is nothing to wait for."""
        self._result, self._finish, self._held = running, finish, held

    def wait(self) -> Tensor:
        """Wait for the result, and return it. A second call does nothing more."""
        if self._finish is not None:
            self._result = self._finish(_ops.wait_tensor(self._result))
            self._finish = self._held = None
        return self._result


def start_all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """All ranks' x, one after the other along the first dimension."""
    group = with_others(group)
    if group is None:
        return Pending(x)
    _check_dimensions(x)
    if _checking():
        _check_agreement("x", _said(x), group)
    sent = x.detach().contiguous()
    running = _ops.all_gather_into_tensor(sent, group.size(), group.group_name)
    _give_a_start(sent)
    return Pending(running, _as_it_is, sent)


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """This rank's part, along the first dimension, of the sum of all x."""
    group = with_others(group)
    if group is None:
        return Pending(x)
    if _checking():
        _check_agreement("x", _said(x), group)
    _equal_part(x, 0, group)
    sent = x.detach().to(_type_of_sum(x)).contiguous()
    running = _ops.reduce_scatter_tensor(sent, "sum", group.size(), group.group_name)
    _give_a_start(sent)
    return Pending(running, lambda total: cast(total, x.dtype), sent)


def start_all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """The sum of all ranks' x, in place of x, though not in a compiled graph. Until it is waited for, x is neither of the two."""
    group = with_others(group)
    if group is None:
        return Pending(x)
    if _checking():
        _check_agreement("x", _said(x), group)
    result = x.detach()
    running = result.to(_type_of_sum(x)).contiguous()  # the same tensor, where x is contiguous and summed in its own type
    # compilers take no op that returns what it writes; PyTorch 2.11's loses the gradient of a Function that returns its own x
    if torch.compiler.is_compiling():
        return Pending(_ops.all_reduce(running, "sum", group.group_name), lambda total: cast(total, x.dtype))
    summing = _ops.all_reduce_(running, "sum", group.group_name)
    _give_a_start(running)
    return Pending(summing, _as_it_is if running is result else result.copy_)


def _give_a_start(sent: Tensor) -> None:
    """A pause on the current stream, in which what sends takes the few multiprocessors it needs.

    A matrix product queued right behind would take them all, and what is sent wait for its end: half of it was hidden so, and
    nearly all is with the pause. Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1 instead, which orders all launches of a process.
    """
    if sent.is_cuda and not torch.compiler.is_compiling():
        torch.cuda._sleep(_START)


def _as_it_is(finished: Tensor) -> Tensor:
    return finished


def _type_of_sum(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else x.dtype


# ---- what mappings do, forward or backward ----


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if _checking():
        _check_agreement("x", _said(x), group)
    running = _ops.all_reduce(x.to(_type_of_sum(x)), "sum", group.group_name)
    return cast(_ops.wait_tensor(running), x.dtype)


def _gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return start_all_gather(x, group).wait()


def _reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return start_reduce_scatter(x, group).wait()


def _part_of_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = _equal_part(x, 0, group)
    return _copy_of_part(x, 0, group.rank() * size, size)


def _gather_columns(x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """All parts are sent as wide as the widest, as one all-gather takes parts of one size only."""
    widest = max(sizes)
    sent = x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1]))
    parts = _gather_rows(sent.unsqueeze(0), group).unbind(0)
    return torch.cat([part.narrow(-1, 0, size) for part, size in zip(parts, sizes, strict=True)], -1)


def _part_of_columns(x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    rank = group.rank()
    return _copy_of_part(x, -1, sum(sizes[:rank]), sizes[rank])


def _copy_of_part(x: Tensor, dim: int, start: int, size: int) -> Tensor:
    """A copy: a view would keep all of x alive, and as a gradient be added to in place, which writes the incoming one."""
    return x.narrow(dim, start, size).clone(memory_format=torch.contiguous_format)


class _Mapping(torch.autograd.Function):
    """y = there(x, *how), dx = back(dy, *how). x is the only tensor: backward runs only where its gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *how: Any) -> Tensor:
        ctx.back, ctx.how = back, how
        return there(x, *how)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(dy, *ctx.how), None, None, *(None for _ in ctx.how)


def _mapped(x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *how: Any) -> Tensor:
    y: Tensor = _Mapping.apply(x, there, back, *how)  # type: ignore[no-untyped-call]
    return y


# ---- the mappings ----


def copy_to_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """x as it is, which all ranks have alike; its gradient is the sum of theirs. Before a column-parallel product."""
    group = with_others(group)
    return x if group is None else _mapped(x, _same, _sum, group)


def sum_over_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of all ranks' x; the gradient, which all ranks have alike, is passed on. After a row-parallel product."""
    group = with_others(group)
    return x if group is None else _mapped(x, _sum, _same, group)


def gather_last(x: Tensor, group: dist.ProcessGroup | None, *, sizes: Sequence[int] | None = None) -> Tensor:
    """All ranks' x side by side along the last dimension; the gradient, which all ranks have alike, is this rank's part of it.

    Args:
        x: this rank's part, as a column-parallel product makes it. Parts may differ in their last dimension, which may be 0.
        group: the ranks that have the parts.
        sizes: each rank's last dimension, where it is known, as it must be for `torch.compile(fullgraph=True)`. Otherwise the
            ranks tell each other, and the CPU waits for that.
    """
    group = with_others(group)
    if group is None:
        return x
    _check_dimensions(x)
    if _checking():
        _check_agreement("x, but for its last dimension,", _said(x, x.shape[:-1]), group)
        _check_agreement("sizes", str(sizes if sizes is None else list(sizes)), group)
    return _mapped(x, _gather_columns, _part_of_columns, group, _sizes_of_parts(x, group, sizes))


def split_last(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's part of the last dimension of x, which all ranks have alike; the gradient is all parts side by side.

    The last dimension must be a multiple of the size of group.
    """
    group = with_others(group)
    if group is None:
        return x
    sizes = (_equal_part(x, -1, group),) * group.size()
    return _mapped(x, _part_of_columns, _gather_columns, group, sizes)


def gather_sequence(x: Tensor, group: dist.ProcessGroup | None, *, sum_gradient: bool = True) -> Tensor:
    """All ranks' x, one after the other along the first dimension.

    Args:
        x: this rank's part of the sequence; all parts have the same shape.
        group: the ranks that have the parts.
        sum_gradient: whether ranks go on with different work, as a column-parallel product does: gradients are summed, and this
            rank's part of the sum is its own. Otherwise all have the same gradient, and each takes its part without a word.
    """
    group = with_others(group)
    return x if group is None else _mapped(x, _gather_rows, _reduce_scatter_rows if sum_gradient else _part_of_rows, group)


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's part, along the first dimension, of the sum of all ranks' x; the gradient is all parts together.

    After a row-parallel product, under sequence parallelism. The first dimension must be a multiple of the size of group.
    """
    group = with_others(group)
    return x if group is None else _mapped(x, _reduce_scatter_rows, _gather_rows, group)


def split_sequence(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's part of the first dimension of x, which all ranks have alike; the gradient is all parts together.

    The first dimension must be a multiple of the size of group.
    """
    group = with_others(group)
    return x if group is None else _mapped(x, _part_of_rows, _gather_rows, group)


# ---- what they ask of their arguments ----


def with_others(group: dist.ProcessGroup | None, name: str = "group") -> dist.ProcessGroup | None:
    """The group, or None where there is nobody to talk to."""
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):  # new_group gives a number to the ranks that are left out
        raise TypeError(f"{name} must be None or a torch.distributed.ProcessGroup that has this rank, but is {group!r}")
    return group if group.size() > 1 else None


def _check_dimensions(x: Tensor) -> None:
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, but has shape ()")


def _equal_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> int:
    """The size of a rank's part of the first dimension (0) or the last (-1)."""
    _check_dimensions(x)
    ranks = group.size()
    if x.shape[dim] % ranks:
        raise ValueError(
            f"x's {'first' if dim == 0 else 'last'} dimension must be a multiple of {ranks}, the size of group, "
            f"but is {x.shape[dim]}: x has shape {tuple(x.shape)}"
        )
    return x.shape[dim] // ranks


def _sizes_of_parts(x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None) -> tuple[int, ...]:
    if sizes is None:
        return _exchanged(x, group)
    ranks, rank = group.size(), group.rank()
    if len(sizes) != ranks or min(sizes) < 0:
        raise ValueError(f"sizes must be {ranks} numbers from 0 on, one a rank of group, but is {list(sizes)}")
    found = _exchanged(x, group) if _checking() else (*sizes[:rank], x.shape[-1], *sizes[rank + 1 :])
    if found != tuple(sizes):
        raise ValueError(f"sizes must be {list(found)}, as x's last dimension on each rank of group, but is {list(sizes)}")
    return found


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(_gather_rows(torch.tensor([x.shape[-1]], device=x.device), group).tolist())


def _checking() -> bool:
    """Under validate(); compiled code is not looked into."""
    return validating() and not torch.compiler.is_compiling()


def _said(x: Tensor, shape: torch.Size | None = None) -> str:
    return f"of shape {tuple(x.shape if shape is None else shape)} and {x.dtype}"


def _check_agreement(name: str, mine: str, group: dist.ProcessGroup) -> None:
    """Raise on every rank, where one of them differs."""
    all_of_them = [""] * group.size()
    dist.all_gather_object(all_of_them, mine, group=group)
    first = all_of_them[0]
    for rank, theirs in enumerate(all_of_them):
        if theirs != first:
            raise RuntimeError(
                f"{name} must be the same on all ranks of group, but is {first} on its rank 0 and {theirs} on its rank {rank}"
            )
