"""Causal masks under a compiler, where transformers can't look at one to see that SDPA's own is_causal says the same.

Traced, a model gives its attentions a mask of all scores, of positions that it has just counted itself, and SDPA leaves its
fast ways. A call that is given nothing that masks makes the plain causal one: that is tried, untraced, when onepass is applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.patches import Patches
from onepass.integrations.huggingface.stand_in import Function, own_forward, parameters_of, run, stand_in

_INPUTS = frozenset(("input_ids", "inputs_embeds", "num_items_in_batch", "shift_labels"))  # which mask nothing


class Mask:
    """What is known of the mask in a call that is being traced."""

    def __init__(self) -> None:
        self.plain = False  # causal and no more


def replace_masks(model: nn.Module, patches: Patches, attentions: Iterable[Any]) -> None:
    """Lets these attentions know, where they are all of a stack that sees everything before a token, by SDPA."""
    attentions = list(attentions)
    inside = {attention.module for attention in attentions}
    for stack in model.modules():
        lists = (child for child in stack.children() if isinstance(child, nn.ModuleList))
        layers = next((child for child in lists if inside & set(child.modules())), None)
        if layers is None:
            continue
        one_way = all(getattr(module, "is_causal", False) for module in inside)
        if one_way and inside <= set(layers.modules()) and not own_forward(stack) and _sees_all(stack, layers):
            mask = Mask()
            patches.set_forward(stack, _forward, mask)
            for attention in attentions:
                attention.mask = mask
        return


def _sees_all(stack: Any, layers: nn.ModuleList) -> bool:
    """Whether its layers have no windows, and are given no mask where nothing is masked."""
    config = getattr(stack, "config", None)
    if config is None or any(getattr(config, name, None) is not None for name in ("sliding_window", "attention_chunk_size")):
        return False
    if not getattr(config, "is_causal", True):
        return False
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"} or not hasattr(stack, "get_input_embeddings"):
        return False
    hidden = torch.zeros(2, 3, stack.get_input_embeddings().embedding_dim)
    children: dict[str, nn.Module] = {}
    for name, child in stack._modules.items():
        if child is layers:
            children[name] = nn.ModuleList(Function(lambda x, *_, **__: x) for _ in layers)
        elif isinstance(child, nn.Embedding):  # of tokens, or of positions
            children[name] = Function(lambda *_, **__: hidden)
        elif child is not None:
            children[name] = Function(_tables if "rotary" in name else _first)
    run(stand_in(stack, children), input_ids=torch.zeros(2, 3, dtype=torch.int64), use_cache=False)
    stubs: Any = next(child for child in children.values() if isinstance(child, nn.ModuleList))
    calls = [call for stub in stubs for call in stub.calls]
    return len(calls) == len(layers) and not any(_has_mask(call) for call in calls)


def _first(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _tables(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return x, x


def _has_mask(call: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    args, options = call
    given = (*args[1:], *(value for name, value in options.items() if name != "hidden_states"))
    return any(isinstance(value, Tensor) and value.dim() > 2 for value in given)


# ---- a call ----


def _forward(self: Any, *args: Any, **options: Any) -> Any:
    if not torch.compiler.is_compiling():
        return type(self).forward(self, *args, **options)
    mask: Mask = self._onepass
    mask.plain = _masks_nothing(self, args, options)
    try:
        return type(self).forward(self, *args, **options)
    finally:
        mask.plain = False


def _masks_nothing(stack: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    given = {**dict(zip(parameters_of(stack), args, strict=False)), **options}
    if given.get("use_cache") is None and getattr(stack.config, "use_cache", False):
        return False
    return all(value is None or value is False or name in _INPUTS for name, value in given.items())
