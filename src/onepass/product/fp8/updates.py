"""Whether a weight was updated, which ends a step of delayed scales.

PyTorch counts what writes a tensor in `_version`. It misses writes through `weight.data`, as some optimizers make, and gathers of
fully_shard, whose optimizer steps shards. So the steps of all optimizers count too. No code and no scale of a weight's own hangs
on this: they are made in each call.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from onepass.kernels.device_tables import is_capturing
from onepass.runtime.cuda_graph import current_step

if TYPE_CHECKING:
    from onepass.product.fp8.scales import FP8Scales

Version = tuple[int, ...]  # of the parameter that has the state, the optimizers' steps, and of those that are packed with it
BEFORE_ANY: Version = (-1, -1)  # of a weight whose scales are those of a step before
_steps = 0
_refreshed: list[weakref.ref[FP8Scales]] = []  # after each step, in an order that ranks have alike


def _count_step(*_: Any) -> None:
    global _steps
    _steps += 1
    known = [scales for reference in _refreshed if (scales := reference()) is not None]  # held: a collection may come any time
    _refreshed[:] = [reference for reference in _refreshed if reference() is not None]
    step = current_step()
    for scales in known:
        # a graph of a step refreshes its own: it would write others' memory after they are gone
        if step is None or scales in step.scales or not is_capturing(scales.factors.device):
            scales.refresh()


def refresh_after_steps(scales: FP8Scales) -> None:
    """Refresh scales after each optimizer's step from now on, for CUDA graphs that read them: a replay sees no update."""
    if not any(reference() is scales for reference in _refreshed):
        _refreshed.append(weakref.ref(scales))


@lru_cache
def count_optimizer_steps() -> None:
    """Count the steps of all optimizers from now on."""
    register_optimizer_step_post_hook(_count_step)


def version_of(weight: Tensor) -> Version:
    """Return what is another after an update of the weight, or of one of the parameters that it is an alias of."""
    packed = getattr(weight, "packed", None)
    if packed is None:
        return weight._version, _steps
    return packed[0]._version, _steps, *[parameter._version for parameter in packed[1:]]


def may_have_changed(weight: Tensor, version: Version) -> bool:
    """Whether the weight may have changed since. `version` is that of a gathered weight where this one is divided."""
    return version[1] != _steps or (not is_divided(weight) and version[0] != weight._version)


def is_divided(weight: Tensor) -> bool:
    """Whether the weight is a DTensor, of which this rank has a part."""
    return hasattr(weight, "to_local")


def whole_of(weight: Tensor) -> Tensor:
    """Return what has the weight's state: the parameter that a view shows all of, the first of those that an alias packs, or the
    tensor itself. Views and aliases are made anew for each call."""
    packed = getattr(weight, "packed", None)
    if packed is not None:
        return packed[0]  # type: ignore[no-any-return]
    base = weight._base
    if base is None or (base.shape, base.stride(), base.dtype) != (weight.shape, weight.stride(), weight.dtype):
        return weight
    return base
