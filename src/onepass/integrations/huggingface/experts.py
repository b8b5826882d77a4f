"""Mixtures of experts: the products of all experts as grouped GEMMs, with the router's weights in the activation's pass.

Transformers keeps the weights of all experts in two tensors, [experts, 2 x inner, hidden] and [experts, hidden, inner]. It calls
such a module with the tokens, each token's experts, and their weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.linear_layers import precision_of
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import close, own_forward, parameters_of, probe, probe_forward, randn, shallow
from onepass.integrations.huggingface.snapshot import UNREAD, Snapshot, is_watched, reads_of
from onepass.ops.activation.activations import ACTIVATIONS, Activation
from onepass.ops.activation.grouped import activation_grouped_linear
from onepass.ops.linear.grouped import gathered_grouped_linear
from onepass.ops.linear.routing import gather_tokens, sort_rows
from onepass.product.grouped import GroupedOptions
from onepass.runtime.dispatch import under_functorch

_EXPERTS, _HIDDEN, _INNER, _TOKENS = 3, 4, 6, 5


@dataclass
class ExpertsMatch:
    module: nn.Module
    up: str
    down: str
    activation: str
    snapshot: Snapshot = UNREAD

    def change(self) -> str | None:
        return self.snapshot.change(self.module)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        up, down = self.module._parameters[self.up], self.module._parameters[self.down]
        assert up is not None and down is not None
        return up, down

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        up, down = self.weights
        routes = sort_rows(weights, chosen, up.shape[0])
        precision = precision_of(self.module)
        h = gathered_grouped_linear(x, up, routes, GroupedOptions(precision))
        options: dict[str, Any] = {"token_weight": routes.weights, "precision": precision}
        return gather_tokens(activation_grouped_linear(h, down, routes.ends, self.activation, **options), routes)


def find_experts(module: nn.Module) -> ExpertsMatch | None:
    shapes = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    if len(shapes) != 2 or own_forward(module) or any(len(shape) != 3 for shape in shapes.values()):
        return None
    if any(map(is_watched, module.children())):
        return None
    if len(parameters_of(module)) < 3:
        return None
    for up, down in (tuple(shapes), tuple(shapes)[::-1]):
        experts, inner, hidden = shapes[up]
        if shapes[down] == (experts, hidden, inner // 2):
            activation = next((name for name, act in ACTIVATIONS.items() if act.gated and _is(module, up, down, act)), None)
            if activation is not None:
                return ExpertsMatch(module, up, down, activation)
    return None


def _is(module: Any, up: str, down: str, act: Activation) -> bool:
    """Whether the module's code, run with a few small experts on random tokens, computes experts with this activation."""
    first, second = randn(_EXPERTS, 2 * _INNER, _HIDDEN, seed=2), randn(_EXPERTS, _HIDDEN, _INNER, seed=3)
    x, weights = randn(_TOKENS, _HIDDEN), randn(_TOKENS, 2, seed=4).sigmoid()
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]], device="cpu")
    config = getattr(module, "config", None)
    attributes = {} if config is None else {"config": shallow(config, _experts_implementation="eager")}
    parameters = {up: nn.Parameter(first), down: nn.Parameter(second)}
    made = probe(module, {}, _parameters=parameters, num_experts=_EXPERTS, **attributes)
    gate, linear = torch.einsum("th,eih->tei", x, first).chunk(2, -1)
    each = torch.einsum("tei,ehi->teh", act.formula(gate) * linear, second)
    expected = (each.gather(1, chosen[..., None].expand(-1, -1, _HIDDEN)) * weights[..., None]).sum(1)
    return close(probe_forward(made, x, chosen, weights), expected, 1e-6)


def replace_experts(model: nn.Module, patches: Patches) -> list[AppliedRow]:
    rows = []
    for name, module in model.named_modules():
        with reads_of(module) as reads:
            match = find_experts(module)
        if match is not None:
            match.snapshot = reads.snapshot()
            patches.set_forward(module, _forward, match)
            rows.append(AppliedRow(name, type(module).__name__, "mlp", by=f"grouped products, {match.activation}", match=match))
        elif "experts" in type(module).__name__.lower():
            rows.append(
                AppliedRow(name, type(module).__name__, "mlp", why="it computes something else, or by another activation")
            )
    return rows


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    """Run the match, or the class's forward: in a compiler or functorch, with expert parallelism, where it was changed since."""
    traced = torch.compiler.is_compiling() or under_functorch()
    if traced or getattr(self, "_is_expert_parallel", False) or not self._onepass.snapshot.unchanged(self):
        return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
    return self._onepass(hidden_states, top_k_index, top_k_weights)
