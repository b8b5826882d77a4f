"""rope against its peers: rotary positions on q and k, from tables of cos and sin, alone or after a norm of each head.

Bytes     forward reads q, k and the tables, which all sequences share, and writes both results. Backward moves as many bytes for
          the gradients; with a norm it reads q and k too.
Shapes    sequences x tokens x heads of q x heads of k x head dimension. The whole head dimension is rotated.
Peers     eager and torch.compile: as models write it, with heads before tokens and tables that hold each number twice, in q's
          dtype. Those tables are made once and not timed. onepass and the formula read fp32 tables with one number a pair.
          rms_norm, then rope: onepass's own ops, one after the other.
          Liger: the same tables. It writes over q and k, and over their gradients. It gets copies, made at its first call. Later
          calls find the previous call's results there: the same work on other numbers. With a norm: its two kernels a tensor.
          "Liger CuTe" has its kernels in the CuTe DSL, also where Liger itself would choose those in Triton.
          QuACK: onepass's tables; one tensor a call. With a norm: its two kernels a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch
from onepass.bench.model import BenchCase, Call, Contender, Inputs, Result
from onepass.bench.peers import imported, liger_cute, needs_cute, on_copies, once
from onepass.ops.attention.rope import rope
from onepass.ops.norm.norm import rms_norm

_NORMS = ("qk-norm", "qk-norm zero-centred")  # Qwen 3's and Gemma 3's, in halves
_EPS = 1e-6
_SHAPES = Shapes(  # notes cite the first three
    gpu={
        "halves": [
            (4, 4096, 32, 8, 128),
            (16, 1024, 12, 12, 64),
            (1, 16384, 32, 32, 128),
            (8, 2048, 32, 32, 80),
            (2, 4096, 64, 8, 256),
        ],
        "interleaved": [(4, 4096, 32, 8, 128), (16, 1024, 12, 12, 64)],
        "qk-norm": [(4, 4096, 16, 8, 128), (4, 4096, 32, 8, 128)],
        "qk-norm zero-centred": [(4, 4096, 4, 1, 256)],
    },
    cpu={
        "halves": [(1, 1024, 32, 8, 128), (4, 512, 12, 12, 64)],
        "interleaved": [(1, 1024, 32, 8, 128)],
        "qk-norm": [(1, 1024, 16, 8, 128)],
        "qk-norm zero-centred": [(1, 1024, 4, 1, 256)],
    },
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    sequences, tokens, q_heads, k_heads, width = shape
    once = sequences * tokens * (q_heads + k_heads) * width * size
    tables = 2 * tokens * (width // 2) * 4
    return 2 * once + tables, (3 if variant in _NORMS else 2) * once + tables


def _inputs(case: BenchCase, random: Random) -> Inputs:
    *rows, q_heads, k_heads, width = case.shape
    tensors = {"q": random.input(*rows, q_heads, width), "k": random.input(*rows, k_heads, width)}
    tensors |= random.rotations(rows[1], width)
    if case.variant in _NORMS:
        tensors |= {name: (random(width) * 0.1 + (not _is_centered(case))).requires_grad_() for name in ("q_weight", "k_weight")}
    return Inputs(tensors, frozenset({"q", "k"}), {"yq": random(*rows, q_heads, width), "yk": random(*rows, k_heads, width)})


def _is_centered(case: BenchCase) -> bool:
    return case.variant.endswith("zero-centred")


def _options(case: BenchCase) -> dict[str, Any]:
    if case.variant in _NORMS:
        return {"eps": _EPS, "zero_centered_gamma": _is_centered(case)}
    return {"interleaved": case.variant == "interleaved"}


# ---- onepass's own ops, and eager code ----


def _after_norms(rotated: Callable[..., Any], norm: Callable[..., Tensor]) -> Call:
    return lambda q, k, cos, sin, q_weight, k_weight: rotated(norm(q, q_weight), norm(k, k_weight), cos, sin)


def _written_norm(case: BenchCase) -> Callable[..., Tensor]:
    """A norm as models write it: Qwen rounds before it multiplies, Gemma after."""

    def of(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)
        return (normed * (1.0 + weight.float())).to(x.dtype) if _is_centered(case) else weight * normed.to(x.dtype)

    return of


def _written(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Result:
    """Rotate q and k, which have heads before tokens, by tables that hold each number twice."""

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return rotated(q), rotated(k)


def _written_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Result:
    def rotated(x: Tensor) -> Tensor:
        every_two = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + every_two * sin

    return rotated(q), rotated(k)


def _as_models_do(case: BenchCase, function: Callable[..., Any], views: bool = True) -> Call:
    """Call a function with tensors as models have them: double tables, made once, and views with heads before tokens.

    Its results have heads before tokens. Without `views` it gets q and k with tokens before heads.
    """
    tables = once(lambda *tables: [_twice(table, case).to(case.dtype) for table in tables])

    def call(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> Result:
        if views:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = function(q, k, *tables(cos, sin), *weights)
        return q.transpose(1, 2), k.transpose(1, 2)

    return call


def _twice(table: Tensor, case: BenchCase) -> Tensor:
    return table.repeat_interleave(2, -1) if case.variant == "interleaved" else torch.cat((table, table), -1)


def _eager(case: BenchCase, run: Run) -> Call:
    if case.variant in _NORMS:
        heads_first = _after_norms(
            lambda q, k, *tables: _written(q.transpose(1, 2), k.transpose(1, 2), *tables), _written_norm(case)
        )
        return _as_models_do(case, run(heads_first), views=False)
    return _as_models_do(case, run(_written_interleaved if case.variant == "interleaved" else _written))


# ---- peers that write over q and k ----


def _liger(case: BenchCase) -> Call:
    rms = imported("liger_kernel.ops.rms_norm", "LigerRMSNormFunction").apply
    return _by_liger(case, "ops", lambda x, weight, offset, mode: rms(x, weight, _EPS, offset, mode))


def _liger_cute(case: BenchCase) -> Call:
    rms = liger_cute("rms_norm")
    return _by_liger(
        case, "ops.cutedsl.ops", lambda x, weight, offset, mode: rms(x, weight, _EPS, offset=offset, casting_mode=mode)
    )


def _by_liger(case: BenchCase, package: str, norm: Callable[[Tensor, Tensor, float, str], Tensor]) -> Call:
    function = imported(f"liger_kernel.{package}.rope", "LigerRopeFunction").apply
    rotated = _as_models_do(case, lambda q, k, cos, sin: function(q, k, cos[None], sin[None]))
    if case.variant in _NORMS:  # it writes over the norms' results
        how = (1.0, "gemma") if _is_centered(case) else (0.0, "llama")
        return _after_norms(rotated, lambda x, weight: norm(x, weight, *how))
    return on_copies(rotated, 2)


# ---- a peer that takes onepass's tables ----


def _quack(case: BenchCase) -> Call:
    function = partial(imported("quack.rotary", "apply_rotary_emb"), interleaved=case.variant == "interleaved")

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Result:
        return function(q, cos, sin), function(k, cos, sin)

    if case.variant in _NORMS:
        return _after_norms(rotated, partial(imported("quack", "rmsnorm"), eps=_EPS, weight_offset=float(_is_centered(case))))
    return rotated


def _peers(case: BenchCase) -> list[Contender]:
    peers = by_pytorch(_eager)
    if case.variant in _NORMS:
        norm = partial(rms_norm, eps=_EPS, zero_centered_gamma=_is_centered(case))
        peers.append(Contender("rms_norm, then rope", lambda case: _after_norms(rope, norm)))
    if case.variant != "interleaved":
        peers.append(Contender("Liger", _liger, package="Liger"))
        peers.append(Contender("Liger CuTe", _liger_cute, package="Liger", lacks=needs_cute()))
    return [*peers, Contender("QuACK", _quack, package="QuACK")]


BENCH = OpBench(
    "rope", _SHAPES, (1, 64, 8, 8, 64), _bytes_moved, _inputs, _peers,
    options=_options, keywords=lambda case: ("q_weight", "k_weight") if case.variant in _NORMS else (),
    without={
        "Apex": "takes one tensor a call, tokens before sequences",
        "Transformer Engine": "takes angles in the place of their cos and sin, and one tensor a call",
        "Megatron-core": "takes Transformer Engine's",
    },
)  # fmt: skip
