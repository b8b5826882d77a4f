"""The precision of the products of layers that a model has already, and the state of those in eight bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from torch import Tensor, nn

from onepass.nn.fp8_state import GroupedLayer
from onepass.nn.linear import ColumnParallelLinear, Linear, RowParallelLinear
from onepass.nn.norm_linear import NormLinear
from onepass.product.fp8.scales import KINDS, ROLES, counts_of
from onepass.product.fp8.updates import is_divided
from onepass.product.fp8.weight import FP8Weight
from onepass.product.grouped import GROUPED_RECIPE
from onepass.runtime.fp8 import fits_fp8
from onepass.runtime.fp8_recipe import FP8Recipe, Precision, recipe_of

_LAYERS = Linear | ColumnParallelLinear | RowParallelLinear | NormLinear


def set_precision(module: nn.Module, precision: Precision) -> int:
    """Run the products of all onepass linear layers of a module in eight bits, or None: in their own type. Return how many.

    The experts of a mixture are one layer.

        onepass.nn.set_precision(model.layers, "fp8")

    Args:
        precision: ``fp8``, an `onepass.FP8Recipe`, or None.
    """
    recipe_of(precision)
    layers = [each for each in module.modules() if isinstance(each, _LAYERS | GroupedLayer)]
    for layer in layers:
        layer.precision = precision
    return len(layers)


class FP8Layer(NamedTuple):
    """A weight whose products run in eight bits, and its layer. `name` is the weight's."""

    name: str
    layer: nn.Module
    parameter: str  # its weight's name in the layer
    recipe: FP8Recipe

    @property
    def weight(self) -> Tensor:
        """The layer's parameter: a part of it between the gathers of fully_shard."""
        weight: Tensor = getattr(self.layer, self.parameter)
        return weight

    @property
    def has_state(self) -> bool:
        """Whether the weight carries scales. Those of experts last no longer than a call."""
        return not isinstance(self.layer, GroupedLayer)


def fp8_layers(module: nn.Module) -> Iterator[FP8Layer]:
    """Yield a module's onepass linear layers whose `precision` and sizes let their products run in eight bits."""
    for path, layer in module.named_modules():
        recipe = recipe_of(layer.precision) if isinstance(layer, _LAYERS | GroupedLayer) else None
        if recipe is None:
            continue
        names: tuple[str, ...] = ("weight",)
        if isinstance(layer, GroupedLayer):
            names, recipe = layer.grouped_weights, GROUPED_RECIPE
        for name in names:
            weight = getattr(layer, name)
            if weight is not None and fits_fp8(weight.shape[-2:]):
                yield FP8Layer(f"{path}.{name}" if path else name, layer, name, recipe)


# ---- state ----


def fp8_state_dict(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the state of a module's products in eight bits, by their weights' names: the scales and what the next come from.

        torch.save({"model": model.state_dict(), "fp8": onepass.nn.fp8_state_dict(model)}, path)
        ...
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        onepass.nn.load_fp8_state_dict(model, saved["fp8"])

    A run that loads it goes on with the same bits. `state_dict()` of a module has weights alone, as in 16 bits. Tensors are those
    in use, not copies. A weight has no state before its first forward. Ranks that share a weight have states of their own.
    """
    for each in fp8_layers(module):
        if each.has_state and _state_of(each.weight) is None:
            _check_whole(each.name, each.weight)
    return {
        name: state.state_dict(parameter)
        for name, parameter in module.named_parameters()
        if (state := _state_of(parameter)) is not None and not state.is_fresh
    }


def load_fp8_state_dict(module: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Load what `fp8_state_dict` returned. Call it after the weights are loaded. Weights without a state there start anew.

    Raise ValueError for a state of another recipe or of an unknown weight. Nothing has changed then.
    """
    parameters, recipes = dict(module.named_parameters()), {each.name: each.recipe for each in fp8_layers(module)}
    made: dict[str, FP8Weight] = {}
    for name, theirs in state.items():
        if name not in parameters:
            raise ValueError(f"state must be of the module's parameters, but has {name}")
        _check_whole(name, parameters[name])
        own = _state_of(parameters[name])
        recipe = FP8Recipe(**theirs["recipe"])
        check_same_recipe(name, recipe, recipes.get(name, recipe if own is None else own.recipe))
        made[name] = FP8Weight(parameters[name], recipes.get(name, recipe))
        made[name].load_state_dict(theirs)
    for name, parameter in parameters.items():
        if name in made:
            parameter.fp8 = made[name]  # type: ignore[attr-defined]
        elif _state_of(parameter) is not None:
            del parameter.fp8  # type: ignore[attr-defined]


def check_same_recipe(name: str, theirs: FP8Recipe, ours: FP8Recipe) -> None:
    """Raise ValueError for a state that another recipe's scales are in. `wgrad` changes none."""
    before, now = asdict(theirs), asdict(ours)
    for field in before:
        if field != "wgrad" and before[field] != now[field]:
            raise ValueError(f"{field} must be {before[field]!r} for {name}, as in the state, but is {now[field]!r}")


def _check_whole(name: str, weight: Tensor) -> None:
    if is_divided(weight):
        raise ValueError(f"{name} must be whole, but fully_shard has divided it: call unshard() of its module before")


def _state_of(parameter: Tensor) -> FP8Weight | None:
    state: FP8Weight | None = getattr(parameter, "fp8", None)
    return state


def fp8_saturations(module: nn.Module) -> dict[str, dict[str, int]]:
    """Return how many numbers were past the largest so far, by the weight's name: of the layer's input and the output's gradient.

    Scales of steps before are too large for them. A weight's scale is its own in each call, so that none of it saturates. Calls
    without gradients count too. It reads all layers' counts at once, and waits for the device once.
    """
    return _counts(module, "saturated")


def fp8_underflows(module: nn.Module) -> dict[str, dict[str, int]]:
    """Return how many numbers rounded to zero so far, as `fp8_saturations` does. Scales of steps before are too small for them.

    Counted is what can matter: rows or tiles of which no number is 4096 times what rounds to zero.
    """
    return _counts(module, "underflowed")


def _counts(module: nn.Module, kind: str) -> dict[str, dict[str, int]]:
    states = {name: state for name, parameter in module.named_parameters() if (state := _state_of(parameter)) is not None}
    if not states:
        return {}
    counts = counts_of([state.scales for state in states.values()])[:, KINDS.index(kind)].tolist()
    return {name: dict(zip(ROLES, count, strict=True)) for name, count in zip(states, counts, strict=True)}
