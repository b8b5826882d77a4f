"""Weights that one product multiplies, as q, k and v, gathered by FSDP2 into one storage, one after another.

FSDP2 gathers each parameter into memory of its own, which it frees and allocates again: then `concat` copies, or each weight has
a product of its own. Here that memory becomes parts of one storage. FSDP2 copies from its flat buffer as before, to other
addresses. A group's parameters come and go together, so the storage does too.

This changes FSDP2's records of parameters, which are private. `fsdp.unsupported` says where they are not as expected.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from onepass.gradients.fsdp import unsupported


def pack_gathers(weights: Sequence[Tensor]) -> bool | None:
    """Let FSDP2 gather these weights, which are gathered now, into one storage from the next forward on. Return whether it will,
    or None where FSDP2 has not gathered them.

    It does not where they belong to several of its groups, differ in type, are divided unevenly or have all-gather extensions.
    """
    if _states() is None:
        return _warn("it has no _module_state_mapping")
    for group in _groups():
        of_weight = {id(getattr(each, "_unsharded_param", None)): each for each in group.fsdp_params}
        found = [of_weight.get(id(weight)) for weight in weights]
        if None in found:
            continue
        if (reason := _unsupported(group)) is not None:
            return _warn(reason)
        # one rank gathers nothing, and FSDP2 then allocates each parameter's memory by its own size
        if not _is_sharded(group) or group.mesh_info.shard_mesh_size == 1 or not all(map(_can_be_packed, found)):
            return False
        if len({each._unsharded_param.dtype for each in found}) > 1:  # type: ignore[union-attr]
            return False
        _PackedGather(group, found)
        return True
    return None


def _warn(reason: str) -> bool:
    warnings.warn(f"weights of one product have products of their own under FSDP2: {reason}", stacklevel=3)
    return False


def _unsupported(group: Any) -> str | None:
    if _is_sharded(group) and not hasattr(group.mesh_info, "shard_mesh_size"):
        return "its meshes have no shard_mesh_size"
    return unsupported([group])


def _is_sharded(group: Any) -> bool:
    """Whether the group's parameters are divided, and not only replicated."""
    return getattr(group.mesh_info, "shard_mesh_dim", 0) is not None


def _states() -> Any:
    from torch.distributed import _composable_state

    return getattr(_composable_state, "_module_state_mapping", None)


def _groups() -> Iterator[Any]:
    """All parameter groups of FSDP2 in this process."""
    for reference in list(_states().values()):
        state = reference() if callable(reference) else reference
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            if group is not None:
                yield group


def _can_be_packed(parameter: Any) -> bool:
    """Whether what is gathered is the weight, and nothing else."""
    outputs, weight = parameter.all_gather_outputs, parameter._unsharded_param
    plain = type(weight) is nn.Parameter and len(outputs) == 1 and "init_all_gather_outputs" not in vars(parameter)
    return plain and outputs[0].numel() == weight.numel() and not parameter._unsharded_inner_tensors


def _has_aliases(parameter: Any) -> bool:
    """Whether any tensor but FSDP2's two has the parameter's memory."""
    return not parameter.all_gather_outputs or _holders(parameter.all_gather_outputs[0]) > _holders_alone()


def _holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@lru_cache
def _holders_alone() -> int:
    """Return how many hold the memory of a tensor and of a parameter that was made of it."""
    gathered = torch.empty(1, device="cpu")
    weight = nn.Parameter(torch.as_strided(gathered, (1,), (1,)))
    return _holders(gathered) + 0 * weight.numel()  # the parameter must be there while they are counted


def packed_with(parameter: Any) -> list[Any]:
    """Return those of FSDP2's records of parameters that lie in one storage when this one is gathered now, or itself."""
    packed = getattr(parameter, "packed_gather", None)
    return packed.parameters if packed is not None and packed.takes_effect() else [parameter]


class _PackedGather:
    """The storage of a group's parameters that are gathered one after another. It is there from a forward on in which nothing
    has the memory of before, as a graph that has saved a view of a weight. What has the weight itself sees its new memory."""

    def __init__(self, group: Any, parameters: list[Any]) -> None:
        self._group, self.parameters = group, parameters
        self._whole: Tensor | None = None
        for parameter in parameters:
            parameter.packed_gather = self
            self._hook(parameter)

    def takes_effect(self) -> bool:
        """Whether the storage is there, or will be when what is gathered now comes."""
        if self._whole is not None:
            return True
        starts = self._group._training_state.name == "FORWARD" and not torch.is_inference_mode_enabled()
        return starts and not any(_has_aliases(parameter) for parameter in self.parameters)

    def _hook(self, parameter: Any) -> None:
        make, allocate = parameter.init_all_gather_outputs, parameter.alloc_all_gather_outputs

        def init_all_gather_outputs(*args: Any, **options: Any) -> None:
            make(*args, **options)
            if self._whole is None and self.takes_effect():
                self._lay()

        def alloc_all_gather_outputs() -> None:
            if self._whole is None:
                allocate()
                return
            storage = self._whole.untyped_storage()
            if storage.size() != self._whole.nbytes:
                storage.resize_(self._whole.nbytes)

        parameter.init_all_gather_outputs, parameter.alloc_all_gather_outputs = init_all_gather_outputs, alloc_all_gather_outputs

    @torch.no_grad()
    def _lay(self) -> None:
        """Give the parameters their parts of one storage. What they had is freed already."""
        weights = [parameter._unsharded_param for parameter in self.parameters]
        of_kind = {"dtype": weights[0].dtype, "device": weights[0].device}
        self._whole = torch.empty(sum(map(Tensor.numel, weights)), **of_kind)
        start = 0
        for parameter, weight in zip(self.parameters, weights, strict=True):
            part = torch.empty(0, **of_kind)  # no view of the whole: it keeps a version of its own
            part.set_(self._whole.untyped_storage(), start, (weight.numel(),), (1,))
            parameter.all_gather_outputs = [part]
            weight.data = part.view(weight.shape)
            start += weight.numel()
