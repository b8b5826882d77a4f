"""Trials of modules that are experts: their products by small weights, and what stands between these, in fp64 on the CPU.

A gated activation is act(min(gate, c)) * (clamp(linear, -c, c) + offset), of halves side by side or column by column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.probe import close, probe, probe_forward, randn, shallow
from onepass.ops.activation.activations import ACTIVATIONS

EXPERTS, HIDDEN = 3, 4
INNER = 6
_SMALL, _LARGE = 2.0**-10, 2.0**20  # a gate below any clamp, and a linear half above


class Gate(NamedTuple):
    """Options of `onepass.experts`."""

    activation: str
    clamp: float | None = None
    linear_offset: float = 0.0
    interleaved: bool = False

    def __str__(self) -> str:
        clamp = "" if self.clamp is None else f", clamped at {self.clamp:g}"
        offset = f", offset {self.linear_offset:g}" if self.linear_offset else ""
        return f"{self.activation}{clamp}{offset}{', interleaved' if self.interleaved else ''}"

    def formula(self, h: Tensor) -> Tensor:
        act = ACTIVATIONS[self.activation]
        if not act.gated:
            return act.formula(h)
        gate, linear = _halves(h, self.interleaved)
        if self.clamp is not None:
            gate, linear = gate.clamp(max=self.clamp), linear.clamp(-self.clamp, self.clamp)
        return act.formula(gate) * (linear + self.linear_offset)


def _halves(h: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    return (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)


def find_gate(run: Callable[[Tensor], Any], gated: bool) -> Gate | None:
    """Return what `run` computes of rows of 2 INNER numbers, or of INNER without a gate. None: nothing that onepass has."""
    for gate in _candidates(run) if gated else (Gate(name) for name, act in ACTIVATIONS.items() if not act.gated):
        rows = randn(8, INNER * (2 if gated else 1))
        h = torch.cat([rows, rows * 4 * (gate.clamp or 8.0)])
        expected = gate.formula(h)
        largest = expected.abs().amax(-1, keepdim=True).clamp(min=1e-3)
        if _same(run(h), expected, largest):
            return gate
    return None


def _same(found: Any, expected: Tensor, largest: Tensor) -> bool:
    return isinstance(found, Tensor) and found.shape == expected.shape and close(found / largest, expected / largest, 1e-6)


def _candidates(run: Callable[[Tensor], Any]) -> Iterator[Gate]:
    """Yield gates, each with the clamp that `run` has if it is this gate: where a linear half grows no more."""
    for interleaved in (False, True):
        h = torch.empty(1, 2 * INNER, dtype=torch.float64, device="cpu")
        for half, value in zip(_halves(h, interleaved), (_SMALL, _LARGE), strict=True):
            half.fill_(value)
        found = run(h)
        if not isinstance(found, Tensor) or found.shape != (1, INNER):
            continue
        for name, act in ACTIVATIONS.items():
            small = float(act.formula(h.new_tensor([_SMALL]))) if act.gated else 0.0
            if not small:
                continue
            most = float(found[0, 0]) / small
            for offset in (0.0, 1.0):
                limit = float(f"{most - offset:.6g}")  # code that rounds to fp32 gives no more digits
                if limit > 0:
                    yield Gate(name, None if limit > _LARGE / 2 else limit, offset, interleaved)


# ---- experts ----


class ExpertsLayout(NamedTuple):
    """Names of a module's parameters, and how its weights lie."""

    up: str
    down: str
    up_bias: str | None
    down_bias: str | None
    gated: bool
    transposed: bool  # up [experts, hidden, 2 x inner], down [experts, inner, hidden]

    @property
    def parts(self) -> int:
        return 2 if self.gated else 1


def layouts_of(module: nn.Module) -> Iterator[ExpertsLayout]:
    """Yield the ways in which the shapes of a module's parameters are those of experts."""
    shapes = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    stacks = [name for name, shape in shapes.items() if len(shape) == 3]
    biases = [name for name, shape in shapes.items() if len(shape) == 2]
    if len(stacks) != 2 or len(stacks) + len(biases) != len(shapes) or len(biases) not in (0, 2):
        return
    for up, down in (stacks, stacks[::-1]):
        for transposed in (False, True):
            (count, wide, hidden), (_, *sizes) = (_sizes(shapes[name], transposed) for name in (up, down))
            for gated in (True, False):
                if shapes[down][0] != count or sizes != [hidden, wide // (2 if gated else 1)]:
                    continue
                if not biases:
                    yield ExpertsLayout(up, down, None, None, gated, transposed)
                for up_bias, down_bias in (biases, biases[::-1]) if biases else ():
                    if (shapes[up_bias], shapes[down_bias]) == ((count, wide), (count, hidden)):
                        yield ExpertsLayout(up, down, up_bias, down_bias, gated, transposed)


def _sizes(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    count, rows, columns = shape
    return (count, columns, rows) if transposed else shape


class TrialExperts(NamedTuple):
    up: Tensor  # [EXPERTS, inner or 2 x inner, hidden]
    down: Tensor  # [EXPERTS, hidden, inner]
    up_bias: Tensor
    down_bias: Tensor

    def formula(self, x: Tensor, gate: Gate) -> Tensor:
        """Return all experts' results of all tokens, [tokens, EXPERTS, hidden]."""
        h = torch.einsum("th,eih->tei", x, self.up) + self.up_bias
        return torch.einsum("tei,ehi->teh", gate.formula(h), self.down) + self.down_bias


def identities(layout: ExpertsLayout) -> TrialExperts:
    """Return experts that give the activation's result in their first INNER columns, and 0 in others."""
    eye = torch.eye(INNER * layout.parts, dtype=torch.float64, device="cpu").expand(EXPERTS, -1, -1)
    none = eye.new_zeros(eye.shape[:2])
    return TrialExperts(eye, eye[..., :INNER], none, none)


def narrow(y: Any, rows: int) -> Any:
    """Return the activation's result, in what identities give."""
    return y[:rows, :INNER] if isinstance(y, Tensor) and y.dim() == 2 else None


def random_experts(layout: ExpertsLayout) -> TrialExperts:
    wide = INNER * layout.parts
    up, down = randn(EXPERTS, wide, HIDDEN, seed=2), randn(EXPERTS, HIDDEN, INNER, seed=3)
    up_bias, down_bias = randn(EXPERTS, wide, seed=5), randn(EXPERTS, HIDDEN, seed=6)
    biased = layout.up_bias is not None
    return TrialExperts(up, down, up_bias * biased, down_bias * biased)


def run_experts(module: Any, layout: ExpertsLayout, trial: TrialExperts, *inputs: Tensor) -> Any:
    """Run the module's code with other parameters."""
    config, hidden = getattr(module, "config", None), trial.down.shape[1]
    attributes = {} if config is None else {"config": shallow(config, _experts_implementation="eager")}
    up, down = (each.mT if layout.transposed else each for each in (trial.up, trial.down))
    values = {layout.up: up, layout.down: down, layout.up_bias: trial.up_bias, layout.down_bias: trial.down_bias}
    parameters = {name: nn.Parameter(value) for name, value in values.items() if name is not None}
    made = probe(module, {}, _parameters=parameters, num_experts=EXPERTS, hidden_size=hidden, **attributes)
    return probe_forward(made, *inputs)
