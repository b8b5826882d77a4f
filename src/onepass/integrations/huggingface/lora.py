"""PEFT's plain LoRA around a linear layer, which an op computes without making its weight."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onepass.integrations.huggingface.patches import Patches
from onepass.integrations.huggingface.snapshot import FSDP, hooked
from onepass.ops.loss.lora import LoRA


def is_lora(module: nn.Module) -> bool:
    """Whether the module is PEFT's LoRA layer around a linear layer."""
    kind = type(module)
    return kind.__name__ == "Linear" and kind.__module__ == "peft.tuners.lora.layer"


def lora_of(layer: Any) -> LoRA | str | None:
    """Return what the layer adds to its base layer now, None where that is nothing, or why it is no plain LoRA."""
    base = layer.base_layer
    if type(base) is not nn.Linear or not Patches.own(base) or hooked(base, (FSDP,)):
        return "the layer that its LoRA wraps is no plain torch.nn.Linear"
    if layer.fan_in_fan_out:
        return "its LoRA has a transposed weight"
    if layer.disable_adapters:
        return "its LoRA is disabled and merged" if layer.merged else None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.merged or not active:
        return None
    if len(active) > 1:
        return f"it has {len(active)} active LoRAs: {', '.join(active)}"
    name = active[0]
    if name in layer.lora_variant:
        return f"its LoRA is a variant, {type(layer.lora_variant[name]).__name__}"
    if type(layer.lora_dropout[name]) is not nn.Identity:
        return "its LoRA has dropout, which it applies to the hidden states of its own product alone"
    a, b = layer.lora_A[name], layer.lora_B[name]
    for part in (a, b):
        if type(part) is not nn.Linear or part._parameters["bias"] is not None or not Patches.own(part) or hooked(part, (FSDP,)):
            return "its LoRA is made of other than torch.nn.Linear without a bias"
    if type(a.weight) not in (Tensor, nn.Parameter) or type(b.weight) not in (Tensor, nn.Parameter):
        return f"its LoRA's weights are of {type(a.weight).__name__}"
    return LoRA(a.weight, b.weight, float(layer.scaling[name]))
