"""Mixtures whose experts all get all tokens, times a score that is 0 where the router hasn't chosen an expert: Llama 4's.

An expert makes 0 of 0. So only the chosen rows are multiplied here, k of a token, where the class's code multiplies all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface import expert_trials as trials
from onepass.integrations.huggingface.expert_trials import EXPERTS, HIDDEN, ExpertsLayout, Gate
from onepass.integrations.huggingface.experts import ExpertsMatch
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import FP64, Function, close, own_forward, parameters_of, probe, probe_forward, randn
from onepass.integrations.huggingface.snapshot import UNREAD, Snapshot, is_watched, reads_of
from onepass.runtime.dispatch import under_functorch

_CHOICES = 16  # of a trial's router
_TOKENS = 6

Found = TypeVar("Found")


@dataclass
class DenseExpertsMatch:
    module: nn.Module
    experts: ExpertsMatch
    router: str  # a child's name
    shared: str  # that of the child whose output is added
    k: int  # experts of a token
    snapshot: Snapshot = UNREAD

    def change(self) -> str | None:
        return self.snapshot.change(self.module)

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        router, shared = getattr(self.module, self.router), getattr(self.module, self.shared)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        all_scores, logits = router(x)
        scores, chosen = all_scores.topk(self.k)
        rows = (x.unsqueeze(1) * scores.unsqueeze(2)).flatten(0, 1)
        y = self.experts(rows, chosen.view(-1, 1), rows.new_ones(len(rows), 1))
        return shared(x) + y.view(len(x), self.k, -1).sum(1), logits


def find_dense_experts(module: nn.Module) -> DenseExpertsMatch | None:
    children = {name: child for name, child in module._modules.items() if child is not None}
    if own_forward(module) or len(children) != 3:
        return None
    for experts, router, shared in permutations(children):
        of_experts = _read(children[experts], _find_experts)
        of_router = _read(children[router], _choices_of) if of_experts else None
        of_sum = _read(module, partial(_sums, experts=experts, router=router, shared=shared)) if of_router else None
        if of_experts and of_router and of_sum:
            parts = tuple((name, children[name], found[1]) for name, found in ((experts, of_experts), (router, of_router)))
            return DenseExpertsMatch(module, of_experts[0], router, shared, of_router[0], replace(of_sum[1], children=parts))
    return None


def _read(module: Any, find: Callable[[nn.Module], Found | None]) -> tuple[Found, Snapshot] | None:
    """Return what is found in a module without hooks, and what finding it has read."""
    if is_watched(module):
        return None
    with reads_of(module) as reads:
        found = find(module)
    return None if found is None else (found, reads.snapshot())


def _find_experts(module: nn.Module) -> ExpertsMatch | None:
    for layout in trials.layouts_of(module) if len(parameters_of(module)) == 1 else ():
        gate = _gate_of(module, layout) if layout.up_bias is None else None
        if gate is not None:
            return ExpertsMatch(module, layout, gate)
    return None


def _gate_of(module: nn.Module, layout: ExpertsLayout) -> Gate | None:
    """Return the activation of experts that get their tokens in turn, if they make 0 of 0."""

    def activate(h: Tensor) -> Any:
        return trials.narrow(trials.run_experts(module, layout, trials.identities(layout), h.repeat(EXPERTS, 1)), len(h))

    gate = trials.find_gate(activate, layout.gated)
    if gate is None or gate.formula(torch.zeros(1, 2, dtype=FP64, device="cpu")).any():
        return None
    trial, x = trials.random_experts(layout), randn(EXPERTS * _TOKENS, HIDDEN)
    each = trial.formula(x, gate).view(EXPERTS, _TOKENS, EXPERTS, HIDDEN)
    expected = torch.cat([each[e, :, e] for e in range(EXPERTS)])
    return gate if close(trials.run_experts(module, layout, trial, x), expected, 1e-6) else None


def _choices_of(router: nn.Module) -> int | None:
    """Return how many scores of each token are not 0, or None."""
    if {name for name, p in router._parameters.items() if p is not None} != {"weight"}:
        return None
    parameters = {**router._parameters, "weight": nn.Parameter(randn(_CHOICES, HIDDEN))}
    found = probe_forward(probe(router, {}, _parameters=parameters, num_experts=_CHOICES), randn(_TOKENS, HIDDEN, seed=2))
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Tensor):
        return None
    (k, *others) = set((found[0] != 0).sum(-1).flatten().tolist())
    return k if not others and found[0].shape == (_TOKENS, _CHOICES) and 0 < k < _CHOICES else None


def _sums(module: nn.Module, experts: str, router: str, shared: str) -> bool | None:
    """Whether the module's code adds, to its shared child's output, experts of tokens times scores: True or None."""
    x, scores, logits = randn(2, _TOKENS // 2, HIDDEN), randn(_TOKENS, EXPERTS, seed=2).sigmoid(), randn(_TOKENS, EXPERTS, seed=3)
    factors = torch.arange(1, EXPERTS + 1, dtype=FP64, device="cpu")[:, None, None]
    children: dict[str, nn.Module] = {
        experts: Function(lambda h: (h.view(EXPERTS, _TOKENS, HIDDEN).square() * factors).view(-1, HIDDEN)),
        router: Function(lambda h: (scores, logits)),
        shared: Function(lambda h: 2 * h),
    }
    found = probe_forward(probe(module, children, hidden_dim=HIDDEN), x)
    rows = x.view(_TOKENS, HIDDEN)
    expected = 2 * rows + (factors * (rows * scores.T[:, :, None]).square()).sum(0)
    return True if isinstance(found, tuple) and len(found) == 2 and found[1] is logits and close(found[0], expected) else None


def replace_dense_experts(model: nn.Module, patches: Patches) -> tuple[set[nn.Module], list[AppliedRow]]:
    """Return the experts within what was replaced, and the rows."""
    done, rows = set(), []
    for name, module in model.named_modules():
        match = find_dense_experts(module)
        if match is not None:
            patches.set_forward(module, _forward, match)
            done.add(match.experts.module)
            by = f"grouped products of chosen rows, {match.experts.gate}"
            rows.append(AppliedRow(name, type(module).__name__, "mlp", by=by, match=match))
    return done, rows


def _forward(self: Any, hidden_states: Tensor) -> Any:
    """Run the match, or the class's forward: under functorch, and where it was changed since."""
    if under_functorch() or not self._onepass.snapshot.unchanged(self):
        return type(self).forward(self, hidden_states)
    return self._onepass(hidden_states)
