"""The case file of dropout_add: contenders that drop different elements are all judged, and one that errs is caught."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from bench import benching
from bench.benching import check_contenders, stand_in, wrong
from torch import Tensor

from onepass.bench import accuracy, dropout_add

given = partial(benching.given, dropout_add, (40, 96))


def _megatron(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    x, bias = x_with_bias
    return residual + F.dropout(x if bias is None else x + bias, prob)


@pytest.mark.parametrize("variant", ["bias", "plain"])
def test_every_contender_is_right(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {"megatron.core.fusions.fused_bias_dropout": {"bias_dropout_add_fused_train": _megatron}})
    case, inputs = given(variant)
    check_contenders(dropout_add, case, inputs)
    assert dropout_add.BENCH.backend_of(case, inputs) in ("triton", "torch")


def test_one_that_errs_is_caught() -> None:
    case, inputs = given("bias")

    def in_backward_all(x: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
        y = residual + F.dropout(x + bias, dropout_add.P)
        return y.detach() + (x + bias + residual - (x + bias + residual).detach())

    assert wrong(dropout_add, case, inputs, dropout_add._watched(in_backward_all)) == ["dx", "dbias"]
    with pytest.raises(RuntimeError, match=r"0\.\d* of the elements are kept, where 0\.9"):
        accuracy.outputs(dropout_add._watched(lambda x, residual, bias: residual + F.dropout(x + bias, 0.5)), inputs)


def test_cases_fit_everywhere() -> None:
    for device in ("cpu", "cuda"):
        for quick in (True, False):
            cases = dropout_add.BENCH.cases(torch.device(device), torch.bfloat16, quick)
            assert {case.variant for case in cases} == {"bias", "plain"}
            assert all(case.forward_bytes == 3 * case.shape[0] * case.shape[1] * 2 for case in cases)
