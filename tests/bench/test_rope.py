"""The case file of rope: every contender is called rightly, and one that writes over its inputs gets its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from bench import benching
from bench.benching import check_contenders, cute, made, stand_in, wrong
from torch import Tensor

from onepass.bench import rope
from onepass.ops.attention.rope import rope_reference

given = partial(benching.given, rope, (2, 5, 4, 2, 16))


class _OverInputs(torch.autograd.Function):
    """As Liger does it: over q and k, and over their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        assert cos.shape == sin.shape == (1, q.shape[2], q.shape[3])
        ctx.save_for_backward(cos, sin)
        return tuple(x.copy_(y) for x, y in zip((q, k), rope._written(q, k, cos, sin), strict=True))

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        turned = rope._written(dq, dk, cos, -sin)
        return *(x.copy_(y) for x, y in zip((dq, dk), turned, strict=True)), None, None


class _Norm:
    @staticmethod
    def apply(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> Tensor:
        assert (offset, casting) in ((0.0, "llama"), (1.0, "gemma"))
        return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)


def _cute_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float, casting_mode: str) -> Tensor:
    return _Norm.apply(x, weight, eps, offset, casting_mode)


def _quack_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    assert x.shape[1] == cos.shape[0] and x.shape[-1] == 2 * cos.shape[1]
    return rope_reference(x, x, cos, sin, interleaved=interleaved)[0]


def _quack_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float() + weight_offset, eps).to(x.dtype)


@pytest.fixture(autouse=True)
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        **cute(rms_norm=_cute_norm),
        "liger_kernel.ops.cutedsl.ops.rope": {"LigerRopeFunction": _OverInputs},
        "quack": {"rmsnorm": _quack_norm},
        "quack.rotary": {"apply_rotary_emb": _quack_rope},
        "liger_kernel.ops.rope": {"LigerRopeFunction": _OverInputs},
        "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": _Norm},
    }
    stand_in(monkeypatch, modules)


@pytest.mark.parametrize("variant", ["halves", "interleaved", "qk-norm", "qk-norm zero-centred"])
def test_every_contender_is_called_rightly_and_leaves_its_inputs(variant: str) -> None:
    case, inputs = given(variant)
    contenders = rope.BENCH.contenders(case)
    liger = ["Liger", "Liger CuTe"]
    expected = [*{"halves": liger, "interleaved": []}.get(variant, ["rms_norm, then rope", *liger]), "QuACK"]
    assert [contender.name for contender in contenders][3:] == expected
    check_contenders(rope, case, inputs)


def test_what_computes_something_else_is_wrong() -> None:
    case, inputs = given("halves")
    assert set(wrong(rope, case, inputs, made(rope, given("interleaved")[0]))) == {"yq", "yk", "dq", "dk"}
    assert wrong(rope, case, inputs, lambda q, k, cos, sin: (made(rope, case)(q, k, cos, sin)[0], k * 1)) == ["yk", "dk"]


def test_the_full_cases_are_those_of_a_gpu() -> None:
    cases = rope.BENCH.cases(torch.device("cuda"), torch.bfloat16, False)
    assert [case.name for case in cases[:3]] == [
        "halves 4x4096x32x8x128",
        "halves 16x1024x12x12x64",
        "halves 1x16384x32x32x128",
    ]
    assert len(cases) == 10
    once = 16384 * 24 * 128 * 2
    assert cases[7].backward_bytes - cases[7].forward_bytes == once
    assert cases[0].forward_bytes == cases[0].backward_bytes == 2 * 16384 * 40 * 128 * 2 + 4096 * 128 * 4
