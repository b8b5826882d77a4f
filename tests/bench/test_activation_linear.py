"""The case file of activation_linear: its contenders are called rightly, and its errors are those of a product's operands."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bench import benching
from bench.benching import check_contenders, stand_in, wrong
from torch import Tensor

from onepass.bench import activation_linear

given = partial(benching.given, activation_linear, (20, 48, 32))


class _ActLinear(torch.autograd.Function):
    """As QuACK's: multiply an activation that is made already, and differentiate it."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(z, weight, y)
        return F.linear(y, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        z, weight, y = ctx.saved_tensors
        with torch.enable_grad():
            given = z.detach().float().requires_grad_()
            (dz,) = torch.autograd.grad(F.gelu(given, approximate="tanh"), given, (dy @ weight).float())
        return dz.to(z.dtype), dy.t() @ y, None


def _quack(preact: Tensor, weight: Tensor, x: Tensor, activation: str, tuned: bool) -> Tensor:
    assert activation == "gelu_tanh_approx" and not tuned and not x.requires_grad
    y: Tensor = _ActLinear.apply(preact, weight, x)  # type: ignore[no-untyped-call]
    return y


@pytest.mark.parametrize("variant", ["swiglu", "gelu"])
def test_every_contender_is_called_rightly(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {"quack.linear": {"act_linear_func": _quack}})
    case, inputs = given(variant)
    contenders = activation_linear.BENCH.contenders(case)
    assert [contender.name for contender in contenders if contender.lacks] == (["QuACK"] if variant == "swiglu" else [])
    check_contenders(activation_linear, case, inputs)


def test_ours_may_round_once_and_not_twice() -> None:
    case, inputs = given("swiglu")

    def rounds_twice(x: Tensor, weight: Tensor) -> Tensor:
        gate, linear = x.chunk(2, -1)
        return F.linear(F.silu(gate) * linear, weight)

    assert wrong(activation_linear, case, inputs, rounds_twice, ours=True)


def test_the_full_cases_are_those_of_a_gpu() -> None:
    cases = activation_linear.BENCH.cases(torch.device("cuda"), torch.bfloat16, quick=False)
    shapes = [(case.variant, *case.shape) for case in cases]
    assert shapes == [
        ("swiglu", 16384, 8192, 2048),
        ("swiglu", 16384, 14336, 4096),
        ("gelu", 16384, 16384, 4096),
        ("swiglu fp8", 16384, 8192, 2048),
        ("swiglu fp8", 8192, 14336, 4096),
    ]
