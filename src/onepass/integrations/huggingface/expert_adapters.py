"""LoRA of experts: PEFT's `target_parameters` on a mixture's weights, whose modules wrap the experts one in another.

PEFT makes W + s B A of all experts in each forward. Here each row has its expert's adapter (`onepass.experts(lora=)`), and
nothing of the weights' size is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.experts import ExpertsMatch
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import own_forward
from onepass.integrations.huggingface.snapshot import is_watched
from onepass.product.lora import LoRA
from onepass.runtime.dispatch import under_functorch

_WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")


@dataclass(frozen=True)
class ExpertAdaptersMatch:
    """The outermost of the wrappers around experts, with the others."""

    module: nn.Module
    wrappers: tuple[Any, ...]
    experts: ExpertsMatch

    def change(self) -> str | None:
        adapters = self.adapters()
        return adapters if isinstance(adapters, str) else self.experts.change()

    def adapters(self) -> tuple[LoRA | None, LoRA | None] | str:
        """Return the active adapters of up and of down, or why PEFT's code runs."""
        found: dict[str, LoRA | None] = {}
        if any(map(is_watched, self.wrappers[1:])) or not Patches.untouched(self.experts.module, self.experts):
            return "what it wraps has hooks or a forward of its own"  # which PEFT's code calls
        for wrapper in self.wrappers:
            if wrapper.disable_adapters or wrapper.merged:
                return "its LoRA is disabled or merged"
            found[wrapper.parameter_name] = _active(wrapper, self.experts.layout.transposed)
        layout = self.experts.layout
        return found.get(layout.up), found.get(layout.down)


def _active(wrapper: Any, transposed: bool) -> LoRA | None:
    """Return the sum of a wrapper's active adapters as one: ranks one after another, and each one's scale in its b.

    PEFT's A has the weights' last dimension where PEFT has exchanged the last two, else the one before. What it takes for a
    layer's inputs need not be them: then A and B change places.
    """
    parts, exchanged = [], getattr(wrapper, "_did_swap_in_out_features", False) is transposed  # older ones exchange nothing
    for name in wrapper.active_adapters:
        if name in wrapper.lora_A:
            a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
            by_expert = a.view(wrapper.num_experts, -1, a.shape[1]), b.view(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
            a, b = (by_expert[1].mT, by_expert[0].mT) if exchanged else by_expert
            parts.append(LoRA(a, b, float(wrapper.scaling[name])))
    if len(parts) < 2:
        return parts[0] if parts else None
    return LoRA(torch.cat([each.a for each in parts], 1), torch.cat([each.b * each.scale for each in parts], 2))


def replace_expert_adapters(model: nn.Module, patches: Patches) -> list[AppliedRow]:
    """Let experts that PEFT wraps run with their adapters, where `replace_experts` has the experts."""
    rows, inner = [], set()
    for name, module in model.named_modules():  # a wrapper comes before what it wraps
        if (type(module).__module__, type(module).__name__) != _WRAPPER or module in inner:
            continue
        wrappers: list[Any] = [module]
        while (type(base := wrappers[-1].base_layer).__module__, type(base).__name__) == _WRAPPER:
            wrappers.append(base)
        inner.update(wrappers)
        experts, row = vars(base).get("_onepass"), (name, type(module).__name__, "lora")
        if not isinstance(experts, ExpertsMatch):
            if "experts" in type(base).__name__.lower():  # and not a router, which PEFT wraps too
                rows.append(AppliedRow(*row, why="the experts that it wraps run by their own code"))
        elif any(map(own_forward, wrappers)):
            rows.append(AppliedRow(*row, why="its forward has been replaced already"))
        elif not {wrapper.parameter_name for wrapper in wrappers} <= {experts.layout.up, experts.layout.down}:
            rows.append(AppliedRow(*row, why="it adapts a bias of the experts"))
        else:
            match = ExpertAdaptersMatch(module, tuple(wrappers), experts)
            patches.set_forward(module, _forward, match)
            rows.append(AppliedRow(*row, by="experts with lora", match=match))
    return rows


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the experts with their adapters, or PEFT's code: under functorch, merged, disabled, and where anything was changed."""
    match: ExpertAdaptersMatch = self._onepass
    adapters = match.adapters()
    base = match.experts.module
    by_peft = isinstance(adapters, str) or under_functorch() or getattr(base, "_is_expert_parallel", False)
    if by_peft or kwargs or len(args) != 2 or not match.experts.snapshot.unchanged(base):
        return type(self).forward(self, x, *args, **kwargs)
    return match.experts(x, *args, lora=adapters)
