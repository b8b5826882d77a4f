"""Reduce gradients of parameters that each rank uses on its own part of the sequence, such as norms' weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.gradients.dtensor_parts import local_part
from onepass.gradients.releasable_storage import ensure_written
from onepass.runtime.process_setting import validating

Grads = dict[str, Tensor]


def reduce_sequence_parallel_grads(params: nn.Module | Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of the parameters marked `sequence_parallel` over the ranks of group, in place.

    Call it once a step, after the last backward and before gradients are clipped or used. A parameter's gradient is its
    ``main_grad`` where it has one, else its ``grad``. Gradients of one type and device share one all-reduce, in the order of the
    parameters. Where the group has one rank, or torch.distributed isn't initialised, nothing happens.

    All ranks must have gradients for the same of these parameters. A rank without one would leave the others waiting, or sums
    would mix parameters. Under `onepass.validate()` this is checked, and raises on every rank.

    Args:
        params: a module, or parameters in an order that is the same on all ranks; unmarked ones are ignored.
        group: the ranks that share the sequence (Megatron's tensor-parallel group); None is all of them.
    """
    named = _named(params)
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) <= 1:
        return
    grads = _marked_grads(named)
    if validating():
        _check_agreement(grads, group)
    for alike in _by_type_and_device(grads):
        _all_reduce(alike, group)


def _named(params: nn.Module | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    if isinstance(params, nn.Module):
        return list(params.named_parameters())
    if isinstance(params, Tensor):  # iterating over it would give its rows
        raise TypeError("params must be a module or parameters, but is one tensor: put it in a list")
    named = [(f"parameter {index}", parameter) for index, parameter in enumerate(params)]
    for name, parameter in named:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"params must be a module or parameters, but {name} is a {type(parameter).__name__}")
    return named


def _marked_grads(named: list[tuple[str, Tensor]]) -> Grads:
    """Return each gradient once, also where parameters are tied or given twice."""
    grads: Grads = {}
    seen: set[int] = set()
    for name, parameter in named:
        if getattr(parameter, "sequence_parallel", False) and id(parameter) not in seen:
            seen.add(id(parameter))
            main_grad = getattr(parameter, "main_grad", None)
            grad = ensure_written(main_grad) if isinstance(main_grad, Tensor) else parameter.grad
            if grad is not None:
                grads[name] = local_part(grad)  # FSDP2's part of it
    return grads


def _check_agreement(grads: Grads, group: dist.ProcessGroup | None) -> None:
    mine = {name: (tuple(grad.shape), str(grad.dtype)) for name, grad in grads.items()}
    all_of_them: list[dict[str, tuple[tuple[int, ...], str]]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(all_of_them, mine, group=group)
    first = all_of_them[0]
    for rank, theirs in enumerate(all_of_them):
        differing = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
        if differing:
            name = differing[0]
            raise RuntimeError(
                "params must have gradients for the same sequence-parallel parameters on all ranks of group, "
                f"but {name} has {_describe(first.get(name))} on its rank 0 and {_describe(theirs.get(name))} on its rank {rank}"
            )
        if list(first) != list(theirs):
            raise RuntimeError(f"params must be in the same order on all ranks of group, but isn't on its ranks 0 and {rank}")


def _describe(grad: tuple[tuple[int, ...], str] | None) -> str:
    return "none" if grad is None else f"one of shape {grad[0]} and {grad[1]}"


def _by_type_and_device(grads: Grads) -> list[list[Tensor]]:
    """Group them, in the order in which each kind first appears, which is the same on all ranks."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in grads.values():
        kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    return list(kinds.values())


@torch.no_grad()
def _all_reduce(grads: list[Tensor], group: dist.ProcessGroup | None) -> None:
    if len(grads) == 1 and grads[0].is_contiguous():
        dist.all_reduce(grads[0], group=group)
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    sums = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [part.view(grad.shape) for part, grad in zip(sums, grads, strict=True)])
