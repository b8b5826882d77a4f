"""The case file of activation_linear: its contenders are called rightly, and its errors are those of a product's operands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from bench.benching import wrong
from torch import Tensor

from onepass.bench import activation_linear
from onepass.bench.model import BenchCase, Inputs


def given(variant: str) -> tuple[BenchCase, Inputs]:
    case = activation_linear._case(variant, 20, 48, 32, torch.bfloat16)
    return case, activation_linear._inputs(case, torch.device("cpu"), torch.Generator())


@pytest.mark.parametrize("variant", ["swiglu", "gelu"])
def test_every_contender_is_called_rightly(variant: str) -> None:
    case, inputs = given(variant)
    for contender in activation_linear.BENCH.contenders(case):
        if not contender.compiles:
            assert not wrong(activation_linear, case, inputs, contender.make(case), contender.ours), contender.name


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
