"""Avoids attention masks in calls that mask nothing.

Eager, transformers checks whether its own positions are several packed sequences, which waits for the GPU at every step. Under a
compiler it can't check, and passes its attentions a mask of all scores, which keeps SDPA off its fast kernels. So this module
passes the stack a marker mask, which means that nothing is masked. The model's code passes it on as any prepared mask, and
onepass's attentions treat it as None. `apply` verifies that the code does so, and that it has no sliding windows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.attentions import NOTHING
from onepass.integrations.huggingface.layers import LayerMatch
from onepass.integrations.huggingface.patches import Patches
from onepass.integrations.huggingface.probe import Function, own_forward, parameters_of, probe, probe_forward

_INPUTS = frozenset(("input_ids", "inputs_embeds", "num_items_in_batch", "shift_labels"))  # these mask nothing
_MASK = "attention_mask"


class Stack:
    """A module whose layers are all recognised, and attend to all earlier tokens."""

    def __init__(self, place: str, layers: list[LayerMatch], names: list[str]) -> None:
        self.place = place  # of the list of layers
        self.layers = layers
        self.names = names  # of its forward's arguments

    def leaves_out(self, stack: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether this call masks nothing, and all code from here to onepass's attentions is unchanged."""
        given = {**dict(zip(self.names, args, strict=False)), **options}
        if _MASK in self.names[: len(args)]:
            return False
        if given.get("use_cache") is None and getattr(stack.config, "use_cache", False):
            return False
        if stack.config._attn_implementation != "sdpa":
            return False
        if not all(value is None or value is False or name in _INPUTS for name, value in given.items()):
            return False
        there = stack._modules[self.place]
        if len(there) != len(self.layers) or not _has_no_windows(stack):
            return False
        return all(module is layer.module and _as_it_was(layer) for module, layer in zip(there, self.layers, strict=True))


def _as_it_was(layer: LayerMatch) -> bool:
    """Whether layer and attention pass the mask on to onepass's attention."""
    attention = layer.attention
    if layer.module._modules[layer.shape.attention] is not attention.module or not Patches.untouched(layer.module, layer):
        return False
    return Patches.untouched(attention.module, attention) and attention.snapshot.unchanged(attention.module)


def replace_masks(model: nn.Module, patches: Patches) -> None:
    """Replace the forwards of suitable stacks in the model. The model's own forward stays, because other code inspects it."""
    for stack in model.modules():
        place = next((name for name, child in stack.named_children() if isinstance(child, nn.ModuleList)), None)
        known = [vars(layer).get("_onepass") for layer in (() if place is None else stack._modules[place])]  # type: ignore[union-attr]
        found = [layer for layer in known if isinstance(layer, LayerMatch)]
        if stack is model or place is None or not found or own_forward(stack):
            continue
        if all(map(_sees_what_it_is_given, found)) and _has_no_windows(stack) and _hands_on(stack, found):
            patches.set_forward(stack, _forward, Stack(place, found, list(parameters_of(stack))))


def _sees_what_it_is_given(layer: LayerMatch) -> bool:
    one_way = getattr(layer.attention.module, "is_causal", False)
    return one_way and (_MASK in layer.arguments.passed or (_MASK not in layer.arguments.names and layer.arguments.others_too))


def _has_no_windows(stack: Any) -> bool:
    config = getattr(stack, "config", None)
    if config is None or not getattr(config, "is_causal", True):
        return False
    if any(getattr(config, name, None) is not None for name in ("sliding_window", "attention_chunk_size")):
        return False
    return not set(getattr(config, "layer_types", None) or ()) - {"full_attention"}


def _hands_on(stack: nn.Module, layers: list[LayerMatch]) -> bool:
    """Whether the stack calls exactly these layers, and passes them its mask unchanged, None or the marker.

    All other arguments must be the same with both masks.
    """
    without, marked = _given_to_layers(stack, None), _given_to_layers(stack, NOTHING)
    if not len(without) == len(marked) == len(layers):
        return False
    for before, now in zip(without, marked, strict=True):
        if before.pop(_MASK, None) is not None or now.pop(_MASK, None) is not NOTHING or not _same(before, now):
            return False
    return True


def _given_to_layers(stack: Any, mask: Tensor | None) -> list[dict[str, Any]]:
    """Return the arguments of each call of a layer, by name or position, from a run with stand-ins for all children.

    Return an empty list if the code can't run with stand-ins.
    """
    hidden = torch.zeros(2, 3, 4)
    children: dict[str, nn.Module] = {}
    stubs: list[Function] = []
    for name, child in stack._modules.items():
        if isinstance(child, nn.ModuleList):
            stubs = [Function(_first) for _ in child]
            children[name] = nn.ModuleList(stubs)
        elif isinstance(child, nn.Embedding):  # of tokens or positions
            children[name] = Function(lambda *_, **__: hidden)
        elif child is not None:
            children[name] = Function(_tables if "rotary" in name else _first)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    probe_forward(probe(stack, children), input_ids=ids, use_cache=False, **{_MASK: mask})
    return [{**{str(i): value for i, value in enumerate(args)}, **options} for stub in stubs for args, options in stub.calls]


def _first(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _tables(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return x, x


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


# ---- a call ----


def _forward(self: Any, *args: Any, **options: Any) -> Any:
    known: Stack = self._onepass
    if known.leaves_out(self, args, options):
        options[_MASK] = NOTHING
    return type(self).forward(self, *args, **options)
