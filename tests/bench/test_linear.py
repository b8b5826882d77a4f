"""The case file of linear: every contender is called rightly, and adds the weight's gradient to main_grad once."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bench import benching
from bench.benching import check_contenders, stand_in
from torch import Tensor

from onepass.bench import linear

given = partial(benching.given, linear, (20, 48, 32))


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None, *, tuned: bool, dynamic_scheduler: bool = False) -> Tensor:
    assert not tuned
    return a @ b if bias is None else torch.addmm(bias, a, b)


def _added(a: Tensor, b: Tensor, out: Tensor, *, tuned: bool, dynamic_scheduler: bool) -> None:
    assert out.dtype == torch.float32
    assert not tuned
    out.addmm_(a.float(), b.float())


@pytest.mark.parametrize("variant", ["plain", "bias"])
def test_every_contender_is_called_rightly(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {"quack.gemm_interface": {"gemm": _product, "gemm_add_inplace": _added}})
    case, inputs = given(variant)
    contenders = linear.BENCH.contenders(case)
    assert [contender.name for contender in contenders] == ["onepass", "F.linear + add_", "torch.compile", "QuACK"]
    check_contenders(linear, case, inputs)
