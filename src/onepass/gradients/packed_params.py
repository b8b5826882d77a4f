"""Several parameters in one product: q, k and v, or gate and up, which a model keeps apart.

`pack` puts them one after another into one storage. `concat` then returns an alias of all of them; elsewhere it copies:

    pack([q.weight, k.weight, v.weight])              # once
    qkv = onepass.linear(x, concat([q.weight, k.weight, v.weight]))

Each parameter's gradient is its rows of the one gradient. Where the parameters' main_grads are packed too, as `MainGrads` lays
them for packed parameters, the result carries them as one main_grad: the product adds there, and this module sets each
parameter's flag and runs its hooks. Otherwise each parameter's rows are put where they belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

from onepass.gradients.main_grad import (
    accumulates_elsewhere,
    grad_requests,
    in_fsdp,
    is_placeholder,
    is_shared,
    main_grad_of,
    main_grads_of,
    mark_accumulated,
    vector_gradients,
)
from onepass.gradients.releasable_storage import ReleasableBuffer, buffer_of, storage_id
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable, under_functorch

# ---- packing ----


def are_packed(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors are adjacent in one storage now, and differ in their number of rows only."""
    end, first = 0, None
    for tensor in tensors:  # every call of a layer pays for this: it makes no object that it can avoid
        if type(tensor) is not Parameter and type(tensor) is not Tensor:
            return False
        if tensor.layout is not torch.strided or not tensor.is_contiguous() or is_functorch_wrapped_tensor(tensor):
            return False
        shape, start = tensor.shape, tensor.data_ptr()
        size = tensor.itemsize
        here = start - tensor.storage_offset() * size  # storages can be neighbours, but never start at the same address
        if first is None:
            if not start or not shape:  # empty, a meta tensor or a scalar
                return False
            first, dtype, row = here, tensor.dtype, shape[1:]
        elif start != end or here != first or tensor.dtype is not dtype or shape[1:] != row:
            return False
        end = start + tensor.numel() * size
    return bool(end)


def packed_groups(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return groups of the tensors, in their order. Tensors that `pack` put into one storage form one group, at the place of the
    last of them and sorted by address; each other tensor is a group."""
    found: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if are_packed([tensor]):
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    groups = {}
    for listed in found.values():
        group = sorted(listed, key=Tensor.data_ptr)
        if are_packed(group) and _bytes(group) == group[0].untyped_storage().nbytes():
            groups[id(listed[-1])] = group
    grouped = {id(tensor) for group in groups.values() for tensor in group}
    return [groups.get(id(tensor), [tensor]) for tensor in tensors if id(tensor) in groups or id(tensor) not in grouped]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@torch.no_grad()
def pack(parameters: Sequence[Tensor]) -> bool:
    """Move parameters into one storage, one after another, so that `concat` need not copy them. Return whether they are packed.

    The parameters stay the same objects with the same values. Call it before `MainGrads`, optimizers with tables of addresses,
    and CUDA graphs. `.to` and fully_shard move parameters apart again.

    Return False, and move nothing, where another tensor would keep the old memory, or where memory can't be moved: a parameter
    shares its storage (tied weights, a flat buffer, a file, other processes), is on the meta device, empty, not contiguous, made
    in inference mode, or of a tensor subclass such as DTensor. `concat` copies those.

    Args:
        parameters: ``[n, ...]`` each, of one type, device and shape of a row.
    """
    _check(parameters)
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise ValueError("parameters must have each one once, but one is there twice")
    if are_packed(parameters):
        return True
    if not all(map(_can_move, parameters)):
        return False
    rows = [parameter.shape[0] for parameter in parameters]
    for parameter, place in zip(parameters, torch.cat([*parameters]).split(rows), strict=True):
        parameter.data = place
    return True


@torch.no_grad()
def unpack(parameters: Sequence[Tensor]) -> None:
    """Undo `pack`: give each parameter its own storage. Parameters that have moved since, as into a flat buffer, stay."""
    if are_packed(parameters) and _bytes(parameters) == parameters[0].untyped_storage().nbytes():
        for parameter in parameters:
            parameter.data = parameter.data.clone()


def _can_move(parameter: Tensor) -> bool:
    plain = are_packed([parameter]) and not parameter.is_inference()
    return plain and not (parameter.device.type == "cpu" and parameter.is_shared()) and not is_shared(parameter)


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


# ---- concatenation ----


class _Concat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, together: bool, placed: bool, *parameters: Tensor) -> Tensor:
        """`together`: the parameters are packed. `placed`: some carry main_grad."""
        ctx.is_concatenated = True
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
        return _accumulate_parts(ctx, grad)  # type: ignore[no-any-return]


@not_twice_differentiable
def _accumulate_parts(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    parameters, main_grads = ctx.places
    request = grad_requests(ctx, len(parameters), first=2)
    if not torch.compiler.is_compiling() and is_placeholder(grad, several=True):  # an op has added to all main_grads
        return None, None, *map(mark_accumulated, parameters, request)
    parts = zip(grad.split(ctx.rows), parameters, main_grads, request, strict=True)
    return None, None, *vector_gradients(list(parts))[0]


_apply = fast_apply(_Concat)


def concat(parameters: Sequence[Tensor]) -> Tensor:
    """Return all rows of the parameters, ``[sum of n, ...]``: an alias where they are packed, else a copy.

    Compiled it is a copy. Make it anew in each forward: an alias shows writes to the parameters, but not that one was given other
    memory. Autograd raises if the last parameter that needs a gradient is written between forward and backward, as by an
    optimizer's step.

    Args:
        parameters: as in `pack`. A single one is returned itself.
    """
    if len(parameters) == 1:
        return parameters[0]
    compiling = torch.compiler.is_compiling()
    watching = compiling or under_functorch()
    together = not watching and are_packed(parameters)
    if not together:
        _check(parameters)
    placed = (compiling or not watching) and any([accumulates_elsewhere(parameter) for parameter in parameters])
    differentiable = (together or placed) and needs_grad(*parameters)
    whole: Any
    if differentiable:
        whole = _apply(together, placed, *parameters)
    else:
        whole = _alias(parameters) if together else torch.cat([*parameters])
    if together:
        whole.packed = parameters  # a product in eight bits keeps its state there (product/fp8/updates.py)
    if differentiable and placed and not compiling:
        main_grad = _concat_main_grad(parameters)
        if main_grad is not None:
            whole.main_grad, whole.is_concatenated = main_grad, True
    return whole  # type: ignore[no-any-return]


@torch.no_grad()
def concat_no_grad(parameters: Sequence[Tensor]) -> Tensor:
    """`concat` without a graph."""
    return _alias(parameters) if are_packed(parameters) else torch.cat([*parameters])


def _alias(tensors: Sequence[Tensor]) -> Tensor:
    """Alias packed tensors, without a graph. The alias shares its version with a tensor that needs a gradient, if one does:
    autograd then sees writes to it."""
    first = versions = tensors[0]
    rows = 0
    for tensor in tensors:
        rows += tensor.shape[0]
        if tensor.requires_grad:
            versions = tensor
    shape = rows, *first.shape[1:]
    return versions.as_strided(shape, first.stride(), first.storage_offset()).detach()  # no view for autograd


def _concat_main_grad(parameters: Sequence[Any]) -> Tensor | None:
    """Return the main_grad to which a product may add all gradients at once, or None."""
    for parameter in parameters:
        if not parameter.requires_grad or getattr(parameter, "main_grad", None) is None or in_fsdp(parameter):
            return None
    main_grads = [parameter.main_grad for parameter in parameters]
    released = buffer_of(main_grads[0])
    if released is not None:
        return released.alias_of(main_grads)
    return _alias(main_grads) if are_packed(main_grads) else None


def releasable_buffers(buffers: list[Tensor], main_grads: list[Tensor], parameters: list[Tensor]) -> list[ReleasableBuffer]:
    """Make flat buffers releasable. main_grads: the parameters', as they lie. Packed ones are views over several too."""
    own: dict[int, list[Tensor]] = {storage_id(buffer): [] for buffer in buffers}
    for each in main_grads:
        own[storage_id(each)].append(each)
    together: dict[int, list[tuple[list[Any], Tensor]]] = {storage: [] for storage in own}
    for laid in packed_groups(parameters):
        mine: list[Any] = [main_grad_of(parameter) for parameter in laid]
        for first, last in combinations(range(len(laid) + 1), 2):
            if last - first > 1 and are_packed(run := mine[first:last]):
                together[storage_id(run[0])].append((run, concat_no_grad(run)))
    return [ReleasableBuffer(buffer, own[storage_id(buffer)], together[storage_id(buffer)]) for buffer in buffers]
