"""Several parameters as one, for one product: q, k and v, or gate and up, which a model keeps apart.

`lay_together` gives them one storage, one after another. Then `joined` is an alias of them all; where they lie apart, a copy:

    lay_together([q.weight, k.weight, v.weight])              # once
    qkv = onepass.linear(x, joined([q.weight, k.weight, v.weight]))

The gradient of each is its rows of the one gradient. Where the parameters carry main_grad and these lie one after another too, as
`MainGrads` leaves those that were laid together, the result carries all of it as one main_grad: the product adds there, and each
parameter's flag and hooks are seen to here. Otherwise each one's rows are put where they belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from onepass.runtime.dispatch import bare_apply, needs_grad, once, transformed
from onepass.runtime.main_grad import (
    asked,
    has_own_place,
    in_fsdp,
    is_placeholder,
    main_grads_of,
    settled,
    somebody_has,
    vector_gradient,
)
from onepass.runtime.released import buffer_of

# ---- where they lie ----


def lie_together(tensors: Sequence[Tensor]) -> bool:
    """Whether they lie one after another in one storage now, alike but for how many rows each has."""
    end, first = 0, None
    for tensor in tensors:  # every call of a layer pays for this: no objects that it could do without
        if type(tensor) is not Parameter and type(tensor) is not Tensor:
            return False
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            return False
        shape, start = tensor.shape, tensor.data_ptr()
        size = tensor.itemsize
        here = start - tensor.storage_offset() * size  # two storages can be neighbours, but never begin at one place
        if first is None:
            if not start or not shape:  # nothing in it, a meta tensor, a scalar
                return False
            first, dtype, row = here, tensor.dtype, shape[1:]
        elif start != end or here != first or tensor.dtype is not dtype or shape[1:] != row:
            return False
        end = start + tensor.numel() * size
    return bool(end)


def as_laid(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """All of them, each for itself, in their order; but those that fill a storage, one after another, as `lay_together` leaves
    them, in one group as they lie, where the last of them is listed."""
    found: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if lie_together([tensor]):
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    groups = {}
    for listed in found.values():
        group = sorted(listed, key=Tensor.data_ptr)
        if lie_together(group) and _bytes(group) == group[0].untyped_storage().nbytes():
            groups[id(listed[-1])] = group
    grouped = {id(tensor) for group in groups.values() for tensor in group}
    return [groups.get(id(tensor), [tensor]) for tensor in tensors if id(tensor) in groups or id(tensor) not in grouped]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@torch.no_grad()
def lay_together(parameters: Sequence[Tensor]) -> bool:
    """Give parameters one storage, in which they lie one after another: `joined` need not copy them. Whether they lie so now.

    The parameters are the same objects with the same values. Before `MainGrads`, optimizers with tables of addresses, and CUDA
    graphs. What moves parameters later (`.to`, fully_shard) takes them apart again.

    False, and nothing is moved, where somebody else would be left with other memory, or there is nothing to move: a parameter
    whose storage another tensor has too (tied weights, a flat buffer, a file, other processes), is on the meta device, empty, not
    contiguous, made in inference mode or of a tensor's subclass, as DTensor is. `joined` copies those.

    Args:
        parameters: ``[n, ...]`` each, of one type, device and shape of a row.
    """
    _check(parameters)
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise ValueError("parameters must have each one once, but one is there twice")
    if lie_together(parameters):
        return True
    if not all(map(_can_move, parameters)):
        return False
    rows = [parameter.shape[0] for parameter in parameters]
    for parameter, place in zip(parameters, torch.cat([*parameters]).split(rows), strict=True):
        parameter.data = place
    return True


@torch.no_grad()
def lay_apart(parameters: Sequence[Tensor]) -> None:
    """Take `lay_together` back: storages of their own. Left where they lie otherwise by now, as in an optimizer's buffer."""
    if lie_together(parameters) and _bytes(parameters) == parameters[0].untyped_storage().nbytes():
        for parameter in parameters:
            parameter.data = parameter.data.clone()


def _can_move(parameter: Tensor) -> bool:
    plain = lie_together([parameter]) and not parameter.is_inference()
    return plain and not (parameter.device.type == "cpu" and parameter.is_shared()) and not somebody_has(parameter)


def _check(parameters: Sequence[Tensor]) -> None:
    if not parameters:
        raise ValueError("parameters must be one or more, but are none")
    first = parameters[0]
    for index, parameter in enumerate(parameters):
        if not parameter.dim():
            raise ValueError(f"parameters must have rows, but parameter {index} is a scalar")
        if parameter.dtype != first.dtype:
            raise TypeError(f"parameters must have one type, but parameter {index} is {parameter.dtype}, the first {first.dtype}")
        if parameter.device != first.device:
            raise ValueError(
                f"parameters must be on one device, but parameter {index} is on {parameter.device}, the first on {first.device}"
            )
        if parameter.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"parameters must have rows of one shape, but parameter {index} has shape {tuple(parameter.shape)}, the first "
                f"{tuple(first.shape)}"
            )


# ---- as one ----


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, together: bool, placed: bool, *parameters: Tensor) -> Tensor:
        """`placed`: some have a place of their own for gradients."""
        ctx.of_several = True
        ctx.set_materialize_grads(False)
        ctx.rows = [parameter.shape[0] for parameter in parameters]
        ctx.places = (parameters, main_grads_of(ctx.needs_input_grad[2:], *parameters)) if placed else None
        return _alias(parameters) if together else torch.cat(parameters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, *[None for _ in ctx.rows]
        if ctx.places is None:
            return None, None, *grad.split(ctx.rows)
        return _put_in_places(ctx, grad)  # type: ignore[no-any-return]


@once
def _put_in_places(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    parameters, main_grads = ctx.places
    wanted = asked(ctx, False, False, *[True for _ in parameters])[2:]
    if not torch.compiler.is_compiling() and is_placeholder(grad, several=True):  # an op has added it to all of their main_grads
        return None, None, *map(settled, parameters, wanted)
    return None, None, *map(vector_gradient, grad.split(ctx.rows), parameters, main_grads, wanted)


_apply = bare_apply(_Joined)


def joined(parameters: Sequence[Tensor]) -> Tensor:
    """All rows of the parameters, one after another: ``[sum of n, ...]``. An alias where they lie so, a copy elsewhere.

    It is for one forward: an alias shows what is written to the parameters, but not that one was given other memory. If the last
    that needs a gradient is written between forward and backward, as by an optimizer's step, that is an error, as ever. Compiled
    it is a copy.

    Args:
        parameters: as in `lay_together`. Of a single one the result is itself.
    """
    if len(parameters) == 1:
        return parameters[0]
    compiling = torch.compiler.is_compiling()
    watching = compiling or transformed()
    together = not watching and lie_together(parameters)
    if not together:
        _check(parameters)
    placed = (compiling or not watching) and any([has_own_place(parameter) for parameter in parameters])
    if not (together or placed) or not needs_grad(*parameters):
        return _alias(parameters) if together else torch.cat([*parameters])
    whole: Any = _apply(together, placed, *parameters)
    if placed and not compiling:
        main_grad = _main_grad_of_all(parameters)
        if main_grad is not None:
            whole.main_grad, whole.of_several = main_grad, True
    return whole  # type: ignore[no-any-return]


@torch.no_grad()
def as_one(parameters: Sequence[Tensor]) -> Tensor:
    """`joined`, for an op that makes no graph."""
    return _alias(parameters) if lie_together(parameters) else torch.cat([*parameters])


def _alias(tensors: Sequence[Tensor]) -> Tensor:
    """Where no graph is made. Its version is that of one that needs a gradient, if any does: autograd sees when it is written."""
    first = versions = tensors[0]
    rows = 0
    for tensor in tensors:
        rows += tensor.shape[0]
        if tensor.requires_grad:
            versions = tensor
    shape = rows, *first.shape[1:]
    return versions.as_strided(shape, first.stride(), first.storage_offset()).detach()  # which is no view for autograd


def _main_grad_of_all(parameters: Sequence[Any]) -> Tensor | None:
    """Where a product may add the gradient of all at once."""
    for parameter in parameters:
        if not parameter.requires_grad or getattr(parameter, "main_grad", None) is None or in_fsdp(parameter):
            return None
    main_grads = [parameter.main_grad for parameter in parameters]
    released = buffer_of(main_grads[0])
    if released is not None:
        return released.alias_of(main_grads)
    return _alias(main_grads) if lie_together(main_grads) else None
