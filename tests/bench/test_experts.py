"""The case file of experts: every contender is called rightly, and what computes something else is wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from bench import benching
from bench.benching import check_contenders, made, stand_in, wrong
from torch import Tensor

import onepass
from onepass.bench import experts, peers
from onepass.bench.model import Contender

SHAPE = (40, 32, 8, 48, 3)
given = partial(benching.given, experts, SHAPE)


class _Fused:
    """As Liger's: experts as int32, gates first."""

    @staticmethod
    def apply(x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        assert chosen.dtype is torch.int32
        return made(experts, given("swiglu")[0], "eager")(x, up, down, chosen.long(), weights)  # type: ignore[return-value]


def _gemm(A: Tensor, B: Tensor, *, tuned: bool, cu_seqlens_m: Tensor | None = None, cu_seqlens_k: Tensor | None = None) -> Tensor:
    """As QuACK's: boundaries begin with 0, and those of the summed rows are named otherwise."""
    starts = cu_seqlens_m if cu_seqlens_k is None else cu_seqlens_k
    assert starts is not None and not tuned and starts[0] == 0 and (A.ndim == B.ndim == 2) == (cu_seqlens_m is None)
    return torch.nn.functional.grouped_mm(A, B, offs=starts[1:])


@pytest.mark.parametrize("variant", ["swiglu", "swiglu main_grad", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_contender_is_called_rightly(variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    stand_in(
        monkeypatch, {"liger_kernel.ops.fused_moe": {"LigerFusedMoEFunction": _Fused}, "quack.gemm_interface": {"gemm": _gemm}}
    )
    monkeypatch.setattr(experts, "needs_gpu", lambda: None)
    case, inputs = given(variant, dtype)
    names = [contender.name for contender in experts.BENCH.contenders(case) if contender.lacks]
    assert names == ["products", "products by QuACK"] * (dtype is torch.float32) + ["Liger"] * (variant == "gpt-oss")
    check_contenders(experts, case, inputs)


def test_onepass_may_not_round_as_often_as_eager_code() -> None:
    case, inputs = given("gpt-oss")
    assert {"dx", "dup"} <= set(wrong(experts, case, inputs, made(experts, case, "eager"), ours=True))


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("gpt-oss", {"interleaved": False}),
        ("gpt-oss", {"clamp": None}),
        ("gpt-oss", {"linear_offset": 0.0}),
        ("swiglu", {"activation": "geglu"}),
    ],
)
def test_another_option_is_wrong(variant: str, options: dict[str, Any]) -> None:
    case, inputs = given(variant)
    if variant == "gpt-oss":
        inputs.tensors["x"].data.mul_(8)  # so that clamps have an effect
        call = partial(onepass.experts, **experts._options(case) | options)
        assert "y" in wrong(experts, case, inputs, lambda *t: call(*t[:5], up_bias=t[5], down_bias=t[6]))
    else:
        assert "y" in wrong(experts, case, inputs, partial(onepass.experts, **options))


@pytest.mark.parametrize("name", ["products", "products by QuACK"])
@pytest.mark.parametrize("variant", ["swiglu", "gpt-oss"])
def test_a_floor_has_six_products_of_the_experts_sizes(variant: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if peers.since_torch("2.10", torch.nn.functional, "grouped_mm"):
        pytest.skip("PyTorch has no grouped product")
    case, inputs = given(variant)
    tokens, hidden, _, inner, k = SHAPE
    found = []
    product = torch.nn.functional.grouped_mm

    def counted(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        y = product(a, b, offs=offs)
        found.append((a.shape[-2] * a.shape[-1] * (1 if b.ndim == 2 else b.shape[-1]), tuple(y.shape)))
        return y

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    stand_in(monkeypatch, {"quack.gemm_interface": {"gemm": _gemm}})
    y = made(experts, case, name)(*inputs.tensors.values())
    grads = torch.autograd.grad(y, [inputs.tensors[name] for name in ("x", "up", "down", "weights")], inputs.grads["y"])
    rows = tokens * k
    in_order = [(rows, 2 * inner), (rows, hidden), (rows, inner), (rows, hidden)]
    assert [shape for _, shape in found[:4]] == in_order
    assert [shape for _, shape in found[4:]] == [tuple(inputs.tensors[name].shape) for name in ("up", "down")]
    assert len(found) == 6 and [grad.shape for grad in grads[1:3]] == [shape for _, shape in found[4:]]


def test_main_grad_is_where_gradients_are() -> None:
    case, inputs = given("swiglu main_grad")
    assert all(inputs.tensors[name].main_grad.dtype is torch.float32 for name in ("up", "down"))  # type: ignore[attr-defined]
    skips = Contender("skips", lambda case: lambda x, up, *rest: made(experts, case)(x, up.detach(), *rest))
    assert wrong(experts, case, inputs, skips.make(case)) == ["dup"]


def test_bytes() -> None:
    case = experts.BENCH.case("swiglu", (16384, 2048, 128, 768, 8), torch.bfloat16)
    rows, choices, weights = 16384 * 2048 * 2, 16384 * 8 * 12, 128 * 3 * 768 * 2048
    assert case.forward_bytes == 2 * rows + choices + 2 * weights
    assert case.backward_bytes == 3 * rows + choices + 16384 * 8 * 4 + 4 * weights
    added = experts.BENCH.case("swiglu main_grad", case.shape, torch.bfloat16)
    assert added.backward_bytes - case.backward_bytes == 6 * weights
