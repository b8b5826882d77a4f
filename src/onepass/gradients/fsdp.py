"""fp32 gradients inside of the products under FSDP2: `FSDPMainGrads`.

FSDP2 keeps gradients of microbatches that it doesn't reduce in buffers of its reduction's type, each as large as the unsharded
weight. To them it adds what autograd has made in the weight's type. Here that buffer is the unsharded parameter's main_grad:
products add to it, and FSDP2's reduce-scatter reads it. It has memory from a parameter's first gradient until that is reduced.
From PyTorch 2.15 on FSDP2's buffer is the unsharded parameter's `.grad`.

FSDP2 has no public way to this. `unsupported` names what of it is used, and where that isn't there gradients stay as they are.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.gradients.releasable_storage import ReleasableBuffer, ensure_written
from onepass.runtime.dispatch import TORCH

_TESTED = (2, 11), (2, 15)  # the first and the last PyTorch


class _Held(NamedTuple):
    """A parameter's main_grad, whose memory comes and goes."""

    main_grad: Tensor
    buffer: ReleasableBuffer


class FSDPMainGrads:
    """Gradients of a sharded model accumulate in fp32 inside of the products, one microbatch after another.

        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        main_grads = FSDPMainGrads(model)

    All else is as FSDP2 has it: `set_requires_gradient_sync(False)` for all microbatches but the last, and gradients, reduced
    and divided, in the sharded parameters' `.grad`. FSDP2 adds the gradients that other ops than onepass's make. Parameters that
    are frozen, that are DTensors (tensor parallelism), or that have all-gather extensions stay as they are.

    Args:
        model: sharded by `fully_shard`, with a policy that reduces in fp32.

    Where this PyTorch's FSDP2 is not as expected, a warning says so, `reason` too, and the model is left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: dict[int, _Held] = {}  # by the id of FSDP2's record of a parameter
        self._groups: list[Any] = []
        groups = list(groups_of(model))
        if not groups:
            raise ValueError("model must be sharded by fully_shard, but none of its modules is")
        self.reason = unsupported(groups)
        if self.reason is not None:
            warnings.warn(f"gradients are FSDP2's own, without main_grad: {self.reason}", stacklevel=2)
            return
        for group in groups:
            _check_policy(group)
        for group in groups:
            self._hook(group)
        self._finalizer = weakref.finalize(self, _detach, self._held)

    def undo(self) -> None:
        """Leave gradients to FSDP2 again. Call it between steps."""
        for group in self._groups:
            del group.post_backward
            for parameter in group.fsdp_params:
                del parameter.init_unsharded_param
                if id(parameter) in self._held:
                    parameter._unsharded_param.main_grad = None
        self._groups.clear()
        if self.reason is None:
            self._finalizer()

    def _hook(self, group: Any) -> None:
        if "post_backward" in vars(group):
            raise RuntimeError("model has FSDPMainGrads already")
        reduce = group.post_backward

        def post_backward(*unused: Any) -> None:
            self._hand_over(group)
            reduce(*unused)
            self._release(group)

        group.post_backward = post_backward
        for parameter in group.fsdp_params:
            self._hook_parameter(parameter)
        self._groups.append(group)

    def _hook_parameter(self, parameter: Any) -> None:
        gather = parameter.init_unsharded_param

        def init_unsharded_param() -> None:
            gather()
            self._attach(parameter)

        parameter.init_unsharded_param = init_unsharded_param
        if hasattr(parameter, "_unsharded_param"):  # made by an earlier forward
            self._attach(parameter)

    def _attach(self, parameter: Any) -> None:
        """Give the unsharded parameter its main_grad."""
        weight = parameter._unsharded_param
        if type(weight) is not nn.Parameter or not parameter.sharded_param.requires_grad:  # FSDP2 tells the weight later
            return
        held = self._held.get(id(parameter))
        if held is None:
            main_grad = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
            flat = main_grad.view(-1)
            held = self._held[id(parameter)] = _Held(main_grad, ReleasableBuffer(flat, [main_grad], []))
            held.buffer.release()
        weight.main_grad = held.main_grad  # type: ignore[attr-defined]

    @torch.no_grad()
    def _hand_over(self, group: Any) -> None:
        """Make what products have written the gradients that FSDP2 keeps or reduces."""
        held = [(parameter, self._held[id(parameter)]) for parameter in group.fsdp_params if id(parameter) in self._held]
        if not any(each.buffer.has_memory for _, each in held):
            return
        for parameter, each in held:
            if not each.buffer.has_memory:
                continue
            grad, theirs = ensure_written(each.main_grad), parameter.unsharded_accumulated_grad
            if theirs is not grad:
                _set_accumulated_grad(parameter, grad if theirs is None else grad.add_(theirs))
        if _in_leaf(held[0][0]):  # FSDP2 widens the others by itself
            return
        for parameter in group.fsdp_params:  # what is reduced together must be of one type
            if parameter.unsharded_accumulated_grad is None and hasattr(parameter, "_unsharded_param"):
                parameter.to_accumulated_grad_if_needed()

    def _release(self, group: Any) -> None:
        for parameter in group.fsdp_params:
            held = self._held.get(id(parameter))
            if held is not None and held.buffer.has_memory and parameter.unsharded_accumulated_grad is not held.main_grad:
                held.buffer.release()


def _in_leaf(parameter: Any) -> bool:
    """Whether gradients accumulate in the unsharded parameter's own `.grad`, as from PyTorch 2.15 on."""
    return isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


def _set_accumulated_grad(parameter: Any, grad: Tensor) -> None:
    if _in_leaf(parameter):
        parameter._unsharded_param.grad = grad
    else:
        parameter.unsharded_accumulated_grad = grad


def unsupported(groups: list[Any]) -> str | None:
    """Why this PyTorch's FSDP2 can't take gradients so, or None."""
    if not _TESTED[0] <= TORCH <= _TESTED[1]:
        return f"PyTorch {torch.__version__} is not one of 2.11 to 2.15, whose FSDP2 is known"
    for group in groups:
        if not callable(getattr(group, "post_backward", None)):
            return "its parameter groups have no post_backward"
        for parameter in group.fsdp_params:
            needed = "init_unsharded_param", "unsharded_accumulated_grad", "to_accumulated_grad_if_needed"
            for name in needed[:2] if _in_leaf(parameter) else needed:
                if not hasattr(parameter, name):
                    return f"its parameters have no {name}"
    return None


def groups_of(model: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups, each once."""
    from torch.distributed.fsdp import FSDPModule

    seen = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found = getattr(state, "_fsdp_param_groups", None)  # from 2.13 on
            for group in [getattr(state, "_fsdp_param_group", None)] if found is None else found:
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    yield group


def check_collectives(groups: list[Any], *, reduce: bool = False) -> None:
    """Raise where something else has replaced FSDP2's own gathers, or its reductions if `reduce`, which would be undone."""
    for group in groups:
        for name, default in (("_all_gather_comm", "DefaultAllGather"), ("_reduce_scatter_comm", "DefaultReduceScatter"))[
            : 1 + reduce
        ]:
            found = type(getattr(group, name)).__name__
            if found != default:
                raise ValueError(
                    f"the model's collectives must be FSDP2's own, but {found} has replaced them: use one of the two"
                )


def _check_policy(group: Any) -> None:
    for parameter in group.fsdp_params:
        if _in_leaf(parameter):
            dtype = parameter.mp_policy.reduce_dtype or parameter.sharded_param.grad_dtype
        else:
            dtype = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype or parameter.sharded_param.dtype
        if dtype is not torch.float32:
            raise ValueError(
                f"mp_policy must reduce gradients in fp32, but reduces in {dtype}: give fully_shard a "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )


def _detach(held: dict[int, _Held]) -> None:
    for each in held.values():
        each.buffer.detach_views()
    held.clear()
