"""PEFT's LoRA around a linear layer by `onepass.linear(lora=...)`: no gradient of the frozen weight, no product in fp32.

Each call looks at what is active. Plain adapters of one layer are the op's; what else PEFT knows runs by its own code: dropout,
variants such as DoRA, several adapters at once, adapters by row, merged and disabled ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.linears import precision_of
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import own_forward
from onepass.integrations.huggingface.snapshot import FSDP, hooked
from onepass.ops.linear.linear import linear
from onepass.product.lora import LoRA
from onepass.runtime.dispatch import under_autocast, under_functorch


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


@dataclass(frozen=True)
class LoRAMatch:
    """A layer that PEFT wraps, for `apply`'s report."""

    module: nn.Module

    def change(self) -> str | None:
        adapter = lora_of(self.module)
        return adapter if isinstance(adapter, str) else None


def replace_lora(model: nn.Module, patches: Patches) -> list[AppliedRow]:
    """Let the layers that PEFT wraps run by `linear` until the patches are undone. A head whose loss is ours has its own."""
    rows = []
    for name, module in model.named_modules():
        if not is_lora(module) or "_onepass" in vars(module):
            continue
        adapter, row = lora_of(module), (name, type(module).__name__, "lora")
        if own_forward(module):
            rows.append(AppliedRow(*row, why="its forward has been replaced already"))
        elif isinstance(adapter, str):
            rows.append(AppliedRow(*row, why=adapter))
        else:
            match = LoRAMatch(module)
            patches.set_forward(module, _forward, match)
            rows.append(AppliedRow(*row, by="lora_linear", match=match))
    return rows


def _forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    """options: what PEFT's hooks give its layers, such as adapters by row."""
    adapter = None
    if not (args or options or torch.compiler.is_compiling() or under_functorch()) and torch.is_grad_enabled():
        adapter = lora_of(self)
    base = self.base_layer
    if not isinstance(adapter, LoRA) or hooked(base) or not _fits(adapter, x, base.weight):
        made: Tensor = type(self).forward(self, x, *args, **options)
        return made
    return linear(x, base.weight, base.bias, lora=adapter, precision=precision_of(base))


def _fits(adapter: LoRA, x: Tensor, weight: Tensor) -> bool:
    """Whether types are those that the op takes, and weights are whole."""
    if type(weight) not in (Tensor, nn.Parameter) or x.dim() == 0:
        return False
    if under_autocast(x):
        return True
    return x.dtype == weight.dtype and {adapter.a.dtype, adapter.b.dtype} <= {x.dtype, torch.float32}
