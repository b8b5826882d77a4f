"""Routers of mixtures of experts: `onepass.route` in place of scores, top-k and weights, and logits in fp32 by tensor cores.

Transformers' routers are modules with a weight [experts, hidden]. They return logits, the weights of the chosen experts, and
which these are. Some add a bias to logits, and some another to scores before they choose: a buffer, or an argument of forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import close, own_forward, parameters_of, probe, probe_forward, randn
from onepass.integrations.huggingface.snapshot import UNREAD, Snapshot, reads_of
from onepass.ops.routing.logits import router_logits
from onepass.ops.routing.route import route, route_reference
from onepass.runtime.dispatch import under_functorch
from onepass.runtime.sharding import has_dtensor

_TOKENS, _HIDDEN = 64, 6
_RESULTS = ("logits", "weights", "chosen")


class RouterOptions(NamedTuple):
    """Options of `onepass.route`."""

    k: int
    score: str
    normalise: bool
    groups: tuple[int, int] | None
    scale: float = 1.0

    def __str__(self) -> str:
        groups = "" if self.groups is None else f", {self.groups[1]} of {self.groups[0]} groups"
        scale = "" if self.scale == 1 else f", times {self.scale:g}"
        return f"route: {self.score}{', normalised' if self.normalise else ''}, top {self.k}{groups}{scale}"


@dataclass
class RouterMatch:
    module: nn.Module
    weight: str
    bias: str | None  # of logits
    choice_bias: str | None  # a buffer's name
    results: tuple[str, ...]  # the order in which they are returned
    options: RouterOptions
    wide: tuple[bool, bool]  # whether logits and weights are of fp32, and not of the module's type
    snapshot: Snapshot = UNREAD

    def change(self) -> str | None:
        return self.snapshot.change(self.module)

    def __call__(self, hidden_states: Tensor, choice_bias: Tensor | None) -> tuple[Tensor, ...]:
        weight, bias = self.module._parameters[self.weight], None if self.bias is None else self.module._parameters[self.bias]
        assert weight is not None
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.wide[0]:
            logits = router_logits(x, weight)
            logits = logits if bias is None else logits + bias
        else:
            logits = nn.functional.linear(x.to(weight.dtype), weight, bias)
        if self.choice_bias is not None:
            choice_bias = self.module._buffers[self.choice_bias]
        routing = route(logits, bias=choice_bias, **self.options._asdict())
        weights = routing.weights if self.wide[1] else routing.weights.to(hidden_states.dtype if self.wide[0] else logits.dtype)
        results = {"logits": logits, "weights": weights, "chosen": routing.chosen}
        return tuple(results[name] for name in self.results)


def find_router(module: nn.Module) -> RouterMatch | None:
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    buffers = {name: b for name, b in module._buffers.items() if b is not None}
    matrices = [name for name, p in parameters.items() if p.dim() == 2]
    others = [name for name in parameters if name not in matrices]
    taken = len(parameters_of(module)) if not own_forward(module) else 0
    if len(matrices) != 1 or len(others) > 1 or len(buffers) > 1 or any(module.children()) or taken not in (1, 2):
        return None
    experts, hidden = parameters[matrices[0]].shape
    if any(tuple(each.shape) != (experts,) for each in (*(parameters[name] for name in others), *buffers.values())):
        return None
    if isinstance(module, nn.Linear) or (taken == 2 and buffers):
        return None
    trial = _Trial(module, matrices[0], next(iter(others), None), next(iter(buffers), None), experts, hidden, taken == 2)
    return trial.match()


@dataclass
class _Trial:
    """A run of the module's code in fp64, with few columns."""

    module: nn.Module
    weight: str
    bias: str | None
    buffer: str | None
    experts: int
    hidden: int
    passed: bool  # forward takes the choice's bias

    def match(self) -> RouterMatch | None:
        columns = _HIDDEN if self.hidden != self.experts else self.hidden  # an attribute of that size is of either
        x, weight = randn(_TOKENS, columns), randn(self.experts, columns, seed=2)
        bias, choice_bias = randn(self.experts, seed=3) * (self.bias is not None), randn(self.experts, seed=4) * 0.3
        values = {self.weight: nn.Parameter(weight)} | ({} if self.bias is None else {self.bias: nn.Parameter(bias)})
        buffers = {} if self.buffer is None else {self.buffer: choice_bias}
        sizes = {name: columns for name, value in vars(self.module).items() if type(value) is int and value == self.hidden}
        modes = []
        for training in (True, False):
            made = probe(self.module, {}, _parameters=values, _buffers=buffers, training=training, **sizes)
            found = probe_forward(made, x, *([choice_bias] if self.passed else []))
            if not isinstance(found, tuple) or len(found) != 3 or not all(isinstance(each, Tensor) for each in found):
                return None
            modes.append(found)
        if not all(map(torch.equal, *modes)):
            return None
        logits = x @ weight.t() + bias
        results = self._results(found, logits)
        if results is None:
            return None
        told = dict(zip(results, found, strict=True))
        given = choice_bias if self.passed or self.buffer is not None else None
        for options in self._candidates(told["chosen"].shape[1]):
            scale = _scale_of(told, logits, given, options)
            if scale is not None:
                wide = told["logits"].dtype is torch.float32, told["weights"].dtype is torch.float32
                options = options._replace(scale=scale)
                return RouterMatch(self.module, self.weight, self.bias, self.buffer, results, options, wide)
        return None

    def _results(self, found: tuple[Tensor, ...], logits: Tensor) -> tuple[str, ...] | None:
        """Return which result is which."""
        names = []
        for each in found:
            if not each.is_floating_point():
                names.append("chosen")
            else:
                names.append("logits" if close(each, logits, 1e-5) else "weights")
        shapes = {tuple(each.shape) for name, each in zip(names, found, strict=True) if name != "logits"}
        return tuple(names) if sorted(names) == sorted(_RESULTS) and len(shapes) == 1 else None

    def _candidates(self, k: int) -> Iterator[RouterOptions]:
        numbers = sorted({value for value in vars(self.module).values() if type(value) is int and 1 <= value <= self.experts})
        groups: list[tuple[int, int] | None] = [None]
        for count, top in product(numbers, numbers):
            if count > top and not self.experts % count and self.experts // count > 1 and top * (self.experts // count) >= k:
                groups.append((count, top))
        for score, normalise, grouped in product(("softmax", "sigmoid"), (True, False), groups):
            yield RouterOptions(k, score, normalise, grouped)


def _scale_of(told: dict[str, Tensor], logits: Tensor, bias: Tensor | None, options: RouterOptions) -> float | None:
    """Return the factor of the weights if these options choose and weight as the module's code does, else None."""
    ours = route_reference(logits, bias=bias, **options._asdict())
    (chosen, order), (expected, place) = (each.sort(-1) for each in (told["chosen"], ours.chosen))
    if not torch.equal(chosen, expected):
        return None
    weights, right = told["weights"].gather(1, order), ours.weights.gather(1, place)
    scale = float(f"{float(weights.sum() / right.sum()):.6g}")
    return scale if close(weights, right * scale, 2e-6 * max(1.0, abs(scale))) else None


def replace_routers(model: nn.Module, patches: Patches) -> list[AppliedRow]:
    rows = []
    for name, module in model.named_modules():
        with reads_of(module) as reads:
            match = find_router(module)
        if match is not None:
            match.snapshot = reads.snapshot()
            patches.set_forward(module, _forward, match)
            rows.append(AppliedRow(name, type(module).__name__, "mlp", by=str(match.options), match=match))
    return rows


def _forward(self: Any, hidden_states: Tensor, choice_bias: Tensor | None = None) -> Any:
    """Run the match, or the class's forward: under functorch, with a weight that is sharded or no parameter any more (PEFT's
    is parametrised), and where it was changed since."""
    match: RouterMatch = self._onepass
    weight = self._parameters.get(match.weight)
    if weight is None or has_dtensor(weight) or under_functorch() or not match.snapshot.unchanged(self):
        return type(self).forward(self, hidden_states, *(() if choice_bias is None else (choice_bias,)))
    return match(hidden_states, choice_bias)
