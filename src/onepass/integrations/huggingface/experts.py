"""Mixtures of experts: the products of all experts as grouped GEMMs, with the router's weights in the activation's pass.

Transformers keeps the weights of all experts in two tensors, [experts, 2 x inner, hidden] and [experts, hidden, inner], or both
transposed, and biases in two more. It calls such a module with the tokens, each token's experts, and their weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface import expert_trials as trials
from onepass.integrations.huggingface.expert_trials import HIDDEN, ExpertsLayout, Gate
from onepass.integrations.huggingface.linear_layers import precision_of
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import close, own_forward, parameters_of, randn
from onepass.integrations.huggingface.snapshot import UNREAD, Snapshot, is_watched, reads_of
from onepass.ops.experts.experts import experts
from onepass.runtime.dispatch import under_functorch

_TOKENS = 5


@dataclass
class ExpertsMatch:
    module: nn.Module
    layout: ExpertsLayout
    gate: Gate
    snapshot: Snapshot = UNREAD

    def change(self) -> str | None:
        return self.snapshot.change(self.module)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        up, down = self.module._parameters[self.layout.up], self.module._parameters[self.layout.down]
        assert up is not None and down is not None
        return up, down

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, lora: Any = None) -> Tensor:
        own, layout = self.module._parameters, self.layout
        biases = {name: own[at] for name, at in (("up_bias", layout.up_bias), ("down_bias", layout.down_bias)) if at is not None}
        options: dict[str, Any] = {**self.gate._asdict(), **biases, "transposed": layout.transposed, "lora": lora}
        return experts(x, *self.weights, chosen, weights, precision=precision_of(self.module), **options)


def find_experts(module: nn.Module) -> ExpertsMatch | None:
    if own_forward(module) or any(map(is_watched, module.children())) or len(parameters_of(module)) < 3:
        return None
    for layout in trials.layouts_of(module):
        gate = _gate_of(module, layout)
        if gate is not None:
            return ExpertsMatch(module, layout, gate)
    return None


def _gate_of(module: nn.Module, layout: ExpertsLayout) -> Gate | None:
    """Return the activation between the products, if the module's code computes experts of this layout, else None.

    The first trial has identities in place of weights, so that the activation's result is seen. The second has random experts.
    """

    def activate(h: Tensor) -> Any:
        first = torch.zeros(len(h), 1, dtype=torch.int64, device="cpu")
        y = trials.run_experts(module, layout, trials.identities(layout), h, first, torch.ones_like(first, dtype=h.dtype))
        return trials.narrow(y, len(h))

    gate = trials.find_gate(activate, layout.gated)
    if gate is None:
        return None
    trial = trials.random_experts(layout)
    x, weights = randn(_TOKENS, HIDDEN), randn(_TOKENS, 2, seed=4).sigmoid()
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]], device="cpu")
    each = trial.formula(x, gate).gather(1, chosen[..., None].expand(-1, -1, HIDDEN))
    expected = (each * weights[..., None]).sum(1)
    return gate if close(trials.run_experts(module, layout, trial, x, chosen, weights), expected, 1e-6) else None


def replace_experts(model: nn.Module, patches: Patches, done: Collection[nn.Module]) -> list[AppliedRow]:
    """Replace experts, apart from those that a match of another kind has."""
    rows = []
    for name, module in model.named_modules():
        if module in done:
            continue
        with reads_of(module) as reads:
            match = find_experts(module)
        if match is not None:
            match.snapshot = reads.snapshot()
            patches.set_forward(module, _forward, match)
            rows.append(AppliedRow(name, type(module).__name__, "mlp", by=f"grouped products, {match.gate}", match=match))
        elif "experts" in type(module).__name__.lower():
            rows.append(
                AppliedRow(name, type(module).__name__, "mlp", why="it computes something else, or by another activation")
            )
    return rows


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    """Run the match, or the class's forward: under functorch, with expert parallelism, and where it was changed since."""
    if under_functorch() or getattr(self, "_is_expert_parallel", False) or not self._onepass.snapshot.unchanged(self):
        return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
    return self._onepass(hidden_states, top_k_index, top_k_weights)
