"""The linear layers that PEFT's LoRA wraps, each alone: a match for `apply`'s report, and their forward by the op."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from onepass.integrations.huggingface.linear_layers import by_lora, is_lora, lora_of
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import own_forward


@dataclass(frozen=True)
class LoRAMatch:
    """A layer that PEFT wraps, for `apply`'s report."""

    module: nn.Module

    def change(self) -> str | None:
        adapters = lora_of(self.module)
        return adapters if isinstance(adapters, str) else None


def replace_lora(model: nn.Module, patches: Patches) -> list[AppliedRow]:
    """Let the layers that PEFT wraps run by `linear` until the patches are undone. A head whose loss is ours has its own."""
    rows = []
    for name, module in model.named_modules():
        if not is_lora(module) or "_onepass" in vars(module):
            continue
        adapters, row = lora_of(module), (name, type(module).__name__, "lora")
        if own_forward(module):
            rows.append(AppliedRow(*row, why="its forward has been replaced already"))
        elif isinstance(adapters, str):
            rows.append(AppliedRow(*row, why=adapters))
        else:
            match = LoRAMatch(module)
            patches.set_forward(module, by_lora, match)
            rows.append(AppliedRow(*row, by="lora_linear", match=match))
    return rows
