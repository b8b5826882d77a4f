"""rope against its peers: rotary positions on q and k, from tables of cos and sin.

Bytes     forward reads q, k and the tables, which all sequences share, and writes both results. Backward moves as many bytes for
          the gradients.
Shapes    sequences x tokens x heads of q x heads of k x head dimension. The whole head dimension is rotated.
Peers     eager and torch.compile: as models write it, with heads before tokens and tables that hold each number twice, in q's
          dtype. Those tables are made once and not timed. onepass and the formula read fp32 tables with one number a pair.
          Liger: the same tables. It writes over q and k, and over their gradients. It gets copies, made at its first call. Later
          calls find the previous call's results there: the same work on other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.bench.model import BenchCase, Call, Contender, Inputs, OpBench, Result
from onepass.bench.peers import compiled, imported
from onepass.ops.attention.rope import rope, rope_reference
from onepass.runtime.backend import explain

OP = "rope"
_VARIANTS = ("halves", "interleaved")
_SHAPES = {  # notes cite the first three
    "halves": [
        (4, 4096, 32, 8, 128),
        (16, 1024, 12, 12, 64),
        (1, 16384, 32, 32, 128),
        (8, 2048, 32, 32, 80),
        (2, 4096, 64, 8, 256),
    ],
    "interleaved": [(4, 4096, 32, 8, 128), (16, 1024, 12, 12, 64)],
}
_CPU = {"halves": [(1, 1024, 32, 8, 128), (4, 512, 12, 12, 64)], "interleaved": [(1, 1024, 32, 8, 128)]}


def _case(variant: str, shape: tuple[int, ...], dtype: torch.dtype) -> BenchCase:
    sequences, tokens, q_heads, k_heads, width = shape
    moved = 2 * sequences * tokens * (q_heads + k_heads) * width * dtype.itemsize + 2 * tokens * (width // 2) * 4
    return BenchCase(OP, variant, shape, dtype, moved, moved)


def _cases(device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
    shapes = _SHAPES if device.type == "cuda" else _CPU
    return [_case(variant, shape, dtype) for variant in _VARIANTS for shape in shapes[variant][: 1 if quick else None]]


def _tiny(case: BenchCase) -> BenchCase:
    return _case(case.variant, (1, 64, 8, 8, 64), case.dtype)


def _inputs(case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
    sequences, tokens, q_heads, k_heads, width = case.shape

    def random(heads: int) -> Tensor:
        return torch.randn(sequences, tokens, heads, width, generator=generator, device=device, dtype=case.dtype)

    speeds = 10000 ** -torch.arange(0, 1, 2 / width, device=device)
    angles = torch.arange(tokens, device=device)[:, None] * speeds
    tensors = {"q": random(q_heads).requires_grad_(), "k": random(k_heads).requires_grad_()}
    tensors |= {"cos": angles.cos(), "sin": angles.sin()}
    return Inputs(tensors, frozenset({"q", "k"}), {"yq": random(q_heads), "yk": random(k_heads)})


def _formula(case: BenchCase) -> Call:
    return partial(rope_reference, interleaved=case.variant == "interleaved")


# ---- onepass and eager code ----


def _ours(case: BenchCase) -> Call:
    return partial(rope, interleaved=case.variant == "interleaved")


def _written(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Result:
    """Rotate q and k, which have heads before tokens, by tables that hold each number twice."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return turned(q), turned(k)


def _written_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Result:
    def turned(x: Tensor) -> Tensor:
        every_two = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + every_two * sin

    return turned(q), turned(k)


def _as_models_do(case: BenchCase, function: Callable[..., Any]) -> Call:
    """Call a function with tensors as models have them: views with heads before tokens, and double tables, made once."""
    held: list[Tensor] = []
    wide: list[Tensor] = []

    def call(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Result:
        if not held or held[0] is not cos:
            held[:] = cos, sin
            wide[:] = (_twice(table, case).to(case.dtype) for table in (cos, sin))
        q, k = function(q.transpose(1, 2), k.transpose(1, 2), *wide)
        return q.transpose(1, 2), k.transpose(1, 2)

    return call


def _twice(table: Tensor, case: BenchCase) -> Tensor:
    return table.repeat_interleave(2, -1) if case.variant == "interleaved" else torch.cat((table, table), -1)


def _eager(case: BenchCase) -> Call:
    return _as_models_do(case, _written_interleaved if case.variant == "interleaved" else _written)


def _compiled(case: BenchCase) -> Call:
    return _as_models_do(case, compiled(_written_interleaved if case.variant == "interleaved" else _written))


# ---- peers that write over q and k ----


class _ReplacedInputs(torch.autograd.Function):
    """Substitute other tensors for q and k. q and k get the gradients of those."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, others: list[Tensor]) -> Any:
        return tuple(other.detach() for other in others)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None]:
        return dq, dk, None


def _on_copies(call: Call) -> Call:
    copies: dict[int, list[Tensor]] = {}  # by the address of the q that they copy; only the last is kept

    def on_copies(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Result:
        if q.data_ptr() not in copies:
            copies.clear()
            copies[q.data_ptr()] = [x.detach().clone() for x in (q, k)]
        return call(*_ReplacedInputs.apply(q, k, copies[q.data_ptr()]), cos, sin)  # type: ignore[no-untyped-call]

    return on_copies


def _liger(case: BenchCase) -> Call:
    function = imported("liger_kernel.ops.rope", "LigerRopeFunction").apply

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return function(q, k, cos[None], sin[None])

    return _on_copies(_as_models_do(case, turned))


def _contenders(case: BenchCase) -> list[Contender]:
    found = [
        Contender("onepass", _ours, ours=True),
        Contender("eager", _eager),
        Contender("torch.compile", _compiled, compiles=True),
    ]
    if case.variant == "halves":
        found.append(Contender("Liger", _liger, package="Liger"))
    return found


def _backend(case: BenchCase, inputs: Inputs) -> str:
    return explain(OP, *inputs.tensors.values(), interleaved=case.variant == "interleaved").backend


BENCH = OpBench(
    OP, _cases, _inputs, _contenders, _formula, _tiny, _backend,
    without={
        "Apex": "takes one tensor a call, tokens before sequences",
        "Transformer Engine": "takes angles in the place of their cos and sin, and one tensor a call",
        "Megatron-core": "takes Transformer Engine's",
    },
)  # fmt: skip
