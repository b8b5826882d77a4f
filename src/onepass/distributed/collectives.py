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
group is None or has one rank, x itself is returned: nothing is sent or copied, and torch.distributed need not be initialised.

Moving data is exact. On a CPU sums of 16-bit numbers are made in fp32 and rounded once; gloo would round at every step. On a GPU
NCCL makes them in the storage type, as fp32 would send twice the bytes. Inputs and incoming gradients are never written.
Shapes and types must be the same on all ranks, except the last dimension for gather_last; `onepass.validate()` checks this. A
backward communicates too: ranks that ran forward together must run backward together.

`start_all_gather`, `start_reduce_scatter` and `start_all_reduce` are not differentiable. They return at once, so that a layer can
do a matrix product before it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.dispatch import cast, not_twice_differentiable
from onepass.runtime.process_setting import validating

# PyTorch's functional collectives: compilers and dispatch modes see them. Their counterparts in torch.distributed change names
# between versions, and compilers don't follow the asynchronous ones.
_ops = torch.ops._c10d_functional

_START = 10_000  # cycles of a GPU, about 5 us


# ---- asynchronous, without autograd ----


class Pending:
    """A running collective, whose result `wait` returns. On a GPU the current stream waits, and the CPU goes on.

    Do not write the sent tensor before. The thread that started it must wait; autograd's threads count as the one that ran
    forward.
    """

    __slots__ = ("_finish", "_held", "_result")

    def __init__(self, running: Tensor, finish: Callable[[Tensor], Tensor] | None = None, held: Tensor | None = None) -> None:
        """`running` is what the collective writes, and `finish` makes the result from it; None: there is nothing to wait for."""
        self._result, self._finish, self._held = running, finish, held

    def wait(self) -> Tensor:
        """Wait for the result, and return it. A second call returns it again."""
        if self._finish is not None:
            self._result = self._finish(_ops.wait_tensor(self._result))
            self._finish = self._held = None
        return self._result


def start_all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Concatenate all ranks' x along the first dimension."""
    group = group_of_several(group)
    if group is None:
        return Pending(x)
    _check_dimensions(x)
    if _is_validating():
        _check_agreement("x", _describe(x), group)
    sent = x.detach().contiguous()
    if sent.is_cpu and not torch.compiler.is_compiling():
        # gloo's two threads note the name of what they last finished without a lock (PyTorch 2.13). all_gather_into_tensor's,
        # "ALLGATHER_COALESCED", has more than the 15 characters that a std::string holds in itself: both may free the one
        # before, and the process crashes some time later. This op's is "ALLGATHER".
        whole = sent.new_empty(group.size() * sent.shape[0], *sent.shape[1:])
        running = _ops.all_gather_into_tensor_out(sent, group.size(), group.group_name, out=whole)
    else:
        running = _ops.all_gather_into_tensor(sent, group.size(), group.group_name)
    _yield_multiprocessors(sent)
    return Pending(running, _identity, sent)


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Sum all ranks' x, and return this rank's part along the first dimension."""
    group = group_of_several(group)
    if group is None:
        return Pending(x)
    if _is_validating():
        _check_agreement("x", _describe(x), group)
    _equal_part(x, 0, group)
    sent = x.detach().to(_type_of_sum(x)).contiguous()
    running = _ops.reduce_scatter_tensor(sent, "sum", group.size(), group.group_name)
    _yield_multiprocessors(sent)
    return Pending(running, lambda total: cast(total, x.dtype), sent)


def start_all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Sum all ranks' x into x, or in a compiled graph into a new tensor. Until `wait`, x's contents are undefined."""
    group = group_of_several(group)
    if group is None:
        return Pending(x)
    if _is_validating():
        _check_agreement("x", _describe(x), group)
    result = x.detach()
    running = result.to(_type_of_sum(x)).contiguous()  # the same tensor, where x is contiguous and summed in its own type
    # compilers take no op that returns what it writes; PyTorch 2.11's loses the gradient of a Function that returns its own x
    if torch.compiler.is_compiling():
        return Pending(_ops.all_reduce(running, "sum", group.group_name), lambda total: cast(total, x.dtype))
    summing = _ops.all_reduce_(running, "sum", group.group_name)
    _yield_multiprocessors(running)
    return Pending(summing, _identity if running is result else result.copy_)


def raise_to_largest(x: Tensor, group: dist.ProcessGroup) -> None:
    """Set each number of x to the largest that a rank of the group has. The current stream waits, and the CPU goes on."""
    if _is_validating():
        _check_agreement("x", _describe(x), group)
    _ops.wait_tensor(_ops.all_reduce_(x, "max", group.group_name))


def _yield_multiprocessors(sent: Tensor) -> None:
    """Pause the current stream, so that the collective gets the few multiprocessors that it needs.

    A matrix product queued right behind would take all of them, and the collective would wait for its end. Without the pause half
    of the communication was hidden, with it nearly all is. Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1 instead, which orders
    all launches of a process.
    """
    if sent.is_cuda and not torch.compiler.is_compiling():
        torch.cuda._sleep(_START)


def _identity(finished: Tensor) -> Tensor:
    return finished


def _type_of_sum(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else x.dtype


# ---- one direction of a mapping ----


def _pass_through(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if _is_validating():
        _check_agreement("x", _describe(x), group)
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
    """Pad all parts to the widest, as one all-gather takes parts of one size only."""
    widest = max(sizes)
    sent = x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1]))
    parts = _gather_rows(sent.unsqueeze(0), group).unbind(0)
    return torch.cat([part.narrow(-1, 0, size) for part, size in zip(parts, sizes, strict=True)], -1)


def _part_of_columns(x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    rank = group.rank()
    return _copy_of_part(x, -1, sum(sizes[:rank]), sizes[rank])


def _copy_of_part(x: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Copy a part. A view would keep all of x alive, and autograd would add to a gradient in place, writing the incoming one."""
    return x.narrow(dim, start, size).clone(memory_format=torch.contiguous_format)


class _Mapping(torch.autograd.Function):
    """y = there(x, *how), dx = back(dy, *how). x is the only tensor: backward runs only if its gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *how: Any) -> Tensor:
        ctx.back, ctx.how = back, how
        return there(x, *how)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(dy, *ctx.how), None, None, *(None for _ in ctx.how)


def _apply_mapping(x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *how: Any) -> Tensor:
    y: Tensor = _Mapping.apply(x, there, back, *how)  # type: ignore[no-untyped-call]
    return y


# ---- the mappings ----


def copy_to_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return x, which all ranks have alike; its gradient is the sum of theirs. Use it before a column-parallel product."""
    group = group_of_several(group)
    return x if group is None else _apply_mapping(x, _pass_through, _sum, group)


def sum_over_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum all ranks' x; pass the gradient, which all ranks have alike, on. Use it after a row-parallel product."""
    group = group_of_several(group)
    return x if group is None else _apply_mapping(x, _sum, _pass_through, group)


def gather_last(x: Tensor, group: dist.ProcessGroup | None, *, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenate all ranks' x along the last dimension. dx is this rank's part of dy, which all ranks have alike.

    Args:
        x: this rank's part, as a column-parallel product makes it. Parts may differ in their last dimension, which may be 0.
        group: the ranks that have the parts.
        sizes: each rank's last dimension. `torch.compile(fullgraph=True)` needs it. Without it the ranks exchange their
            sizes, and the CPU waits for that.
    """
    group = group_of_several(group)
    if group is None:
        return x
    _check_dimensions(x)
    if _is_validating():
        _check_agreement("x, but for its last dimension,", _describe(x, x.shape[:-1]), group)
        _check_agreement("sizes", str(sizes if sizes is None else list(sizes)), group)
    return _apply_mapping(x, _gather_columns, _part_of_columns, group, _sizes_of_parts(x, group, sizes))


def split_last(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's part of the last dimension of x, which all ranks have alike. dx concatenates all ranks' dy.

    The last dimension must be a multiple of the size of group.
    """
    group = group_of_several(group)
    if group is None:
        return x
    sizes = (_equal_part(x, -1, group),) * group.size()
    return _apply_mapping(x, _part_of_columns, _gather_columns, group, sizes)


def gather_sequence(x: Tensor, group: dist.ProcessGroup | None, *, sum_gradient: bool = True) -> Tensor:
    """Concatenate all ranks' x along the first dimension.

    Args:
        x: this rank's part of the sequence; all parts have the same shape.
        group: the ranks that have the parts.
        sum_gradient: whether the ranks continue with different work, such as a column-parallel product: gradients are summed, and
            each rank gets its part of the sum. Otherwise all ranks have the same gradient, and each takes its part; nothing is
            sent.
    """
    group = group_of_several(group)
    back = _reduce_scatter_rows if sum_gradient else _part_of_rows
    return x if group is None else _apply_mapping(x, _gather_rows, back, group)


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum all ranks' x, and return this rank's part along the first dimension. dx concatenates all ranks' dy.

    Use it after a row-parallel product under sequence parallelism. The first dimension must be a multiple of the size of group.
    """
    group = group_of_several(group)
    return x if group is None else _apply_mapping(x, _reduce_scatter_rows, _gather_rows, group)


def split_sequence(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's part of the first dimension of x, which all ranks have alike. dx concatenates all ranks' dy.

    The first dimension must be a multiple of the size of group.
    """
    group = group_of_several(group)
    return x if group is None else _apply_mapping(x, _part_of_rows, _gather_rows, group)


# ---- checks ----


def group_of_several(group: dist.ProcessGroup | None, name: str = "group") -> dist.ProcessGroup | None:
    """Return the group, or None where it has one rank."""
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):  # new_group returns a number on ranks outside of the group
        raise TypeError(f"{name} must be None or a torch.distributed.ProcessGroup that has this rank, but is {group!r}")
    return group if group.size() > 1 else None


def _check_dimensions(x: Tensor) -> None:
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, but has shape ()")


def _equal_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> int:
    """Return the size of a rank's part of the first dimension (0) or the last (-1)."""
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
        return _exchange_sizes(x, group)
    ranks, rank = group.size(), group.rank()
    if len(sizes) != ranks or min(sizes) < 0:
        raise ValueError(f"sizes must be {ranks} numbers from 0 on, one a rank of group, but is {list(sizes)}")
    found = _exchange_sizes(x, group) if _is_validating() else (*sizes[:rank], x.shape[-1], *sizes[rank + 1 :])
    if found != tuple(sizes):
        raise ValueError(f"sizes must be {list(found)}, as x's last dimension on each rank of group, but is {list(sizes)}")
    return found


def _exchange_sizes(x: Tensor, group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(_gather_rows(torch.tensor([x.shape[-1]], device=x.device), group).tolist())


def _is_validating() -> bool:
    """Whether `validate()` is on and the call is not compiled."""
    return validating() and not torch.compiler.is_compiling()


def _describe(x: Tensor, shape: torch.Size | None = None) -> str:
    return f"of shape {tuple(x.shape if shape is None else shape)} and {x.dtype}"


def _check_agreement(name: str, mine: str, group: dist.ProcessGroup) -> None:
    """Raise on every rank where one of them differs."""
    all_of_them = [""] * group.size()
    dist.all_gather_object(all_of_them, mine, group=group)
    first = all_of_them[0]
    for rank, theirs in enumerate(all_of_them):
        if theirs != first:
            raise RuntimeError(
                f"{name} must be the same on all ranks of group, but is {first} on its rank 0 and {theirs} on its rank {rank}"
            )


# ---- a vocabulary divided over a tensor-parallel group ----


def vocab_range(columns: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return [2] int64 on the device: this rank's first token, and the number of all tokens. The CPU does not wait.

    Each rank has `columns` tokens of its own; the group has several ranks.
    """
    sizes = start_all_gather(torch.full((1,), columns, dtype=torch.int64, device=device), group).wait()
    return torch.stack([sizes[: group.rank()].sum(), sizes.sum()])
