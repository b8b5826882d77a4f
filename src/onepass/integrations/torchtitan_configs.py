"""Configs of torchtitan's modules: with more fields, known or refused; and whether torchtitan's methods are as they were."""

from __future__ import annotations

import inspect
from dataclasses import field, make_dataclass
from typing import Any, NoReturn

from onepass.integrations.seams import SeamError, Seams
from onepass.integrations.tested import TESTED
from onepass.kernels.invariant_product import batch_invariant
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.fp8_recipe import Precision, recipe_of

TITAN = TESTED["torchtitan"][-1]
VERSION = Seams("torchtitan", TITAN).version  # warns of a newer one


def refuse(name: str, config: Any, why: str) -> NoReturn:
    raise NotImplementedError(f"{name} can't replace {type(config).__qualname__} of torchtitan {VERSION}: {why}")


def check(name: str, config: Any, *known: Any) -> None:
    """Refuse subclasses, which compute something else, and full_dtensor, under which FSDP2 would sum a second time what ops have
    summed over data-parallel ranks."""
    from torchtitan.distributed.utils import get_spmd_backend

    if get_spmd_backend() == "full_dtensor":
        refuse(name, config, 'parallelism.spmd_backend must be "spmd_types" or "partial_dtensor", but is "full_dtensor"')
    if type(config) not in known:
        refuse(name, config, f"it takes {' or '.join(each.__qualname__ for each in known)} alone, and no subclass")


def make_invariant(name: str, config: Any, precision: Precision) -> None:
    """Turn `onepass.batch_invariant()` on, for the whole process. Refuse scales of all rows."""
    recipe = recipe_of(precision)
    if recipe is not None and recipe.scaling != "row":
        refuse(name, config, f"with batch_invariant a precision must have scales by row, but has {recipe.scaling!r} ones")
    if not invariant():
        batch_invariant()


def new_config(owner: str, stock: Any, *more: str) -> Any:
    """Return a config with stock's fields and more, None by default, of which torchtitan builds the owner."""
    own = {"__module__": __name__}
    added = [(name, Any, field(default=None)) for name in more]
    return make_dataclass(f"{owner}.Config", added, bases=(stock.Config,), namespace=own, kw_only=True, slots=True)


def check_seam(stock: Any, name: str, *arguments: str) -> None:
    """A method that was renamed upstream would be overridden in vain."""
    seam = getattr(stock, name, None)
    taken = None if seam is None else tuple(inspect.signature(seam).parameters)
    if taken != arguments:
        has = "is not there" if taken is None else f"takes ({', '.join(taken)})"
        raise SeamError(
            f"{stock.__module__}.{stock.__qualname__}.{name} of torchtitan {VERSION} {has}, and onepass overrides one that "
            f"takes ({', '.join(arguments)}), as in {TITAN}: use such a version, or leave onepass's overrides off"
        )
