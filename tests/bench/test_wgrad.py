"""The case file of the weight gradient's product: every contender adds to main_grad, and what doesn't is wrong."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bench import benching
from bench.benching import made, stand_in, wrong
from torch import Tensor

from onepass.bench import wgrad

given = partial(benching.given, wgrad, (40, 24, 32), "plain")


def _added(a: Tensor, b: Tensor, out: Tensor, *, tuned: bool) -> None:
    assert out.dtype == torch.float32 and not tuned
    out.addmm_(a.float(), b.float())


def test_every_contender_is_called_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {"quack.gemm_interface": {"gemm_add_inplace": _added}})
    for contender in wgrad.BENCH.contenders(given()[0]):
        if not (contender.compiles or contender.floor or contender.lacks):
            case, inputs = given()
            call = contender.make(case)
            assert not wrong(wgrad, case, inputs, call, contender.ours), contender.name
            once = inputs.tensors["main_grad"].clone()
            torch.testing.assert_close(call(*inputs.tensors.values()), 2 * once)  # a second call adds to what is there


def test_what_adds_nothing_or_rounds_is_wrong() -> None:
    case, inputs = given()
    assert wrong(wgrad, case, inputs, lambda main_grad, dy, x: main_grad) == ["sum"]
    assert wrong(wgrad, case, inputs, made(wgrad, case, "mm, add_"), ours=True) == ["sum"]
