"""The case file of lora_linear: its contenders are called rightly."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from bench import benching
from bench.benching import check_contenders, wrong

from onepass.bench import lora_linear

given = partial(benching.given, lora_linear, (24, 48, 48))


@pytest.mark.parametrize("variant", ["fp32", "bf16", "bf16 fp8", "q, k, v", "8 documents"])
def test_every_contender_is_called_rightly(variant: str) -> None:
    case, inputs = given(variant)
    check_contenders(lora_linear, case, inputs)


def test_an_adapter_without_its_scale_is_wrong() -> None:
    case, inputs = given("bf16")

    def unscaled(x: torch.Tensor, weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) + F.linear(F.linear(x, lora_a), lora_b)

    assert wrong(lora_linear, case, inputs, unscaled, ours=True)
