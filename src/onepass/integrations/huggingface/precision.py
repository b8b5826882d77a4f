"""Products of a model's blocks in eight bits: which linear layers have them, and why others keep their type.

A layer that has them carries the recipe as an attribute, which each of its products reads (`linears.precision_of`). A block is an
element of a list of modules that has attention in it, or a recognised attention or MLP. No head and no embedding is in a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.dense_experts import DenseExpertsMatch
from onepass.integrations.huggingface.experts import ExpertsMatch
from onepass.integrations.huggingface.linear_layers import by_linear, is_conv1d, is_linear, sizes_of
from onepass.integrations.huggingface.linears import LinearsMatch
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import own_forward
from onepass.kernels.grouped_product import unfit_for_scaled_groups
from onepass.nn.fp8_state import drop_fp8_state
from onepass.product.frozen.fp8 import FP8FrozenWeight, freeze_weight
from onepass.runtime.fp8 import MULTIPLE, check_gpu, fits_fp8
from onepass.runtime.fp8_recipe import FP8Recipe

_ADAPTED = "base_layer"  # PEFT's name of the layer that its adapters belong to


@dataclass(frozen=True)
class PrecisionMatch:
    """A linear layer whose products run in eight bits, for `apply`'s report."""

    module: nn.Module
    shape: tuple[int, ...]  # of its product's weight, which may be that of several layers

    def stands_in(self, there: nn.Module | None) -> bool:
        """Whether what has the layer's place calls it: the layer itself, or PEFT's around it."""
        return there is self.module or getattr(there, _ADAPTED, None) is self.module

    def change(self) -> str | None:
        return _unfit(self.module, self.shape)


def set_precision(
    model: nn.Module, patches: Patches, recipe: FP8Recipe, matches: Sequence[LinearsMatch], layouts: int | None = None
) -> list[AppliedRow]:  # fmt: skip
    """Let the products of linear layers in blocks run in eight bits until the patches are undone.

    Raise where that can't be: of a model in fp64, on a GPU without eight bits, or where no layer fits.

    Args:
        matches: the layers that run by ops.
        layouts: of codes that take the place of frozen weights, or None where weights stay.
    """
    heads = set(_heads(model))
    inside = {*_in_blocks(model), *(module for match in matches for module in match.owner.modules())}
    shapes = {layer: _shape_of(match) for match in matches for layer in match.linears}
    adapters, rows = set(_adapters(model)), []
    matches_of = (vars(module).get("_onepass") for module in model.modules())
    dense = {match.experts.module for match in matches_of if isinstance(match, DenseExpertsMatch)}
    for name, module in model.named_modules():
        row = partial(AppliedRow, name, type(module).__name__, "precision")
        why: str | None
        if module in heads:
            why = "the head keeps its type"
        elif module not in inside or module in adapters:  # adapters keep their type
            continue
        elif _is_experts(module):
            match = vars(module).get("_onepass")
            why = "experts of chosen rows keep their type" if module in dense else _unfit_experts(match)
            if why is None:
                rows.append(row(by=_set_experts(name, match, patches, recipe), match=match))
                continue
        elif not _is_like_linear(module):
            continue
        elif "router" in name:
            why = "a router keeps its type"
        else:
            shape = shapes.get(module) or tuple(getattr(module._parameters.get("weight"), "shape", ()))
            why = "it has a forward of its own already" if not Patches.own(module) else _unfit(module, shape)
            if why is None:
                _check(name, module.weight)
                _set(module, patches, recipe)
                codes = ", weight as codes" if layouts and not module.weight.requires_grad else ""
                rows.append(row(by=f"fp8, {recipe.scaling} scales{codes}", match=PrecisionMatch(module, shape)))
                continue
        rows.append(row(why=why))
    if not any(row.by for row in rows):
        reasons = "".join(f"\n  {row.name}: {row.why}" for row in rows) or ": it has none in blocks"
        raise ValueError(f"precision must be None, as no linear layer of this {type(model).__name__} fits{reasons}")
    if layouts is not None:
        _freeze(model, recipe, matches, layouts)
    return rows


def _freeze(model: nn.Module, recipe: FP8Recipe, matches: Sequence[LinearsMatch], layouts: int) -> None:
    """Put codes in the place of the frozen weights of all layers whose products run in eight bits."""
    layers = [module for module in model.modules() if "precision" in vars(module) and is_linear(module)]
    frozen = {module for module in layers if not module.weight.requires_grad}
    if not frozen:
        raise ValueError("frozen_layouts must be None, as no weight of a product in eight bits is frozen: freeze them before")
    for match in matches:
        if frozen.issuperset(match.linears):
            match.freeze(recipe, layouts)
            frozen.difference_update(match.linears)
    for module in frozen:
        freeze_weight(module, recipe, layouts=layouts)


def _set(module: nn.Module, patches: Patches, recipe: FP8Recipe) -> None:
    patches.set(module, "precision", recipe)
    if not own_forward(module):
        patches.set_forward(module, by_linear, None)
    patches.on_undo(module.register_load_state_dict_post_hook(_start_anew).remove)
    patches.on_undo(partial(_start_anew, module))


def _start_anew(module: nn.Module, *_: Any) -> None:
    """Drop the weight's scales: it was loaded, or runs in its own type from now on."""
    drop_fp8_state(module, {"weight": None}, "")


def _set_experts(name: str, match: ExpertsMatch, patches: Patches, recipe: FP8Recipe) -> str:
    """Let experts' products run in eight bits. Return what the report says."""
    first, *_ = match.weights
    _check(name, first)
    patches.set(match.module, "precision", recipe)
    by_autocast = first.is_cuda and first.dtype is torch.float32
    return f"fp8, scales by row{', under autocast to bf16' if by_autocast else ''}"


def _check(name: str, weight: Tensor) -> None:
    if weight.dtype is torch.float64:
        raise TypeError(f"model must be fp32, bf16 or fp16 with precision='fp8', but {name} is fp64")
    check_gpu("precision", weight)


# ---- which layers ----


def _in_blocks(model: nn.Module) -> Iterator[nn.Module]:
    for block in (block for each in model.modules() if isinstance(each, nn.ModuleList) for block in each):
        if any("attention" in type(module).__name__.lower() for module in block.modules()):
            yield from block.modules()


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        get: Any = getattr(module, "get_output_embeddings", None)
        head = None if get is None else get()
        if head is not None:
            yield getattr(head, _ADAPTED, head)


def _adapters(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if _ADAPTED in module._modules:
            yield from (each for name, child in module.named_children() if name != _ADAPTED for each in child.modules())


def _is_experts(module: nn.Module) -> bool:
    own = any(p is not None and p.dim() == 3 for p in module._parameters.values())
    return own and "experts" in type(module).__name__.lower()


def _is_like_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer: torch's, one derived from it, or one that keeps its weight in another way."""
    named = "linear" in type(module).__name__.lower() and not module._modules
    return isinstance(module, nn.Linear) or is_conv1d(module) or named


def _unfit(module: nn.Module, shape: tuple[int, ...]) -> str | None:
    """Return why a layer's product keeps its type, or None."""
    if is_conv1d(module):
        return "its weight is stored transposed"
    if type(module) is not nn.Linear:
        return f"it is no plain torch.nn.Linear, but {type(module).__module__}.{type(module).__name__}"
    weight: Any = module._parameters.get("weight")
    if isinstance(weight, FP8FrozenWeight):
        return None
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point() or weight.itemsize == 1:
        return f"its weight is {'missing' if weight is None else f'a {type(weight).__name__} of {weight.dtype}'}"
    if not fits_fp8(shape):
        return f"the weight's sizes, {shape[0]} x {shape[1]}, are not multiples of {MULTIPLE}"
    return None


def _unfit_experts(match: object) -> str | None:
    """Return why experts' products keep their type, or None. Autocast may make bf16 products of fp32 weights."""
    if not isinstance(match, ExpertsMatch):
        return "grouped products of experts that onepass doesn't run keep their type"
    for weight in match.weights:
        product = torch.bfloat16 if weight.dtype is torch.float32 else weight.dtype
        if (unfit := unfit_for_scaled_groups(weight.shape, product, weight.device)) is not None:
            return unfit
    return None


def _shape_of(match: LinearsMatch) -> tuple[int, int]:
    """Return the sizes of the weight of all layers in one."""
    return sum(match.sizes), sizes_of(match.linears[0])[0]
