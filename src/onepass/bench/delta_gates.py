"""delta_gates against its peers: what a head of a hybrid layer forgets, and how much it writes.

Bytes     forward reads a and b and writes g, which is fp32, and beta; backward reads dg, dbeta, a and b and writes da and db.
          The vectors are few and are not counted.
Variants  `plain`, a and b by themselves, as in Qwen3.5. `groups`: pairs of heads of both in turn in one projection, as in
          Qwen3-Next.
Shapes    rows x heads.
Peers     eager and torch.compile: as transformers writes it. FLA's gate in a kernel, and the sigmoid after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch
from onepass.bench.model import BenchCase, Call, Contender, Inputs, Result
from onepass.bench.peers import imported

_PAIR = 2
_SHAPES = Shapes(
    gpu={"plain": [(16384, 32), (65536, 64)], "groups": [(16384, 32)]},
    cpu={"plain": [(16384, 32)], "groups": [(16384, 32)]},
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    numbers = math.prod(shape)
    return numbers * (3 * size + 4), numbers * (5 * size + 4)


def _inputs(case: BenchCase, random: Random) -> Inputs:
    M, H = case.shape
    if case.variant == "groups":
        b, a = (t.requires_grad_() for t in random(M, 2 * H).unflatten(-1, (-1, 2 * _PAIR)).chunk(2, -1))
    else:
        a, b = random.input(M, H), random.input(M, H)
    vectors = {name: torch.nn.Parameter(random(H).float()) for name in ("a_log", "dt_bias")}
    return Inputs({"a": a, "b": b, **vectors}, frozenset({"a", "b"}), {"g": random(*a.shape).float(), "beta": random(*b.shape)})


def _in_rows(call: Callable[..., Result]) -> Call:
    """Copy heads in groups to plain rows, as transformers does."""

    def of_any(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Result:
        rows = a.shape[0], a_log.shape[0]
        g, beta = call(a.reshape(rows), b.reshape(rows), a_log, dt_bias)
        return g.view(a.shape), beta.view(b.shape)

    return of_any


def _eager(case: BenchCase, run: Run) -> Call:
    def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Result:
        return -a_log.float().exp() * F.softplus(a.float() + dt_bias), b.sigmoid()

    return run(_in_rows(gates))


def _fla(case: BenchCase) -> Call:
    gate: Callable[..., Any] = imported("fla.ops.gated_delta_rule.gate", "fused_gdn_gate")
    return _in_rows(lambda a, b, a_log, dt_bias: (gate(a, a_log, dt_bias), b.sigmoid()))


def _peers(case: BenchCase) -> list[Contender]:
    return [*by_pytorch(_eager), Contender("FLA", _fla, package="FLA")]


BENCH = OpBench("delta_gates", _SHAPES, (64, 32), _bytes_moved, _inputs, _peers)
