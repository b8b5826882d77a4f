"""The case file of softmax: every contender is called rightly, those that neither scale nor mask on scores that are prepared."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bench import benching
from bench.benching import check_contenders, cute, made, stand_in, wrong
from torch import Tensor

from onepass.bench import softmax

given = partial(benching.given, softmax, (2, 3, 12, 16))


def _of_rows(x: Tensor) -> Tensor:
    assert x.dim() == 2
    return x.float().softmax(-1).to(x.dtype)


@pytest.fixture(autouse=True)
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    function = type("Function", (), {"apply": staticmethod(_of_rows)})
    liger = {"liger_kernel.ops.softmax": {"LigerSoftmaxFunction": function}, **cute(softmax=_of_rows)}
    stand_in(monkeypatch, liger | {"quack": {"softmax": _of_rows}})


@pytest.mark.parametrize("variant", softmax._VARIANTS)
def test_every_contender_is_called_rightly_and_leaves_its_inputs(variant: str) -> None:
    case, inputs = given(variant)
    contenders = softmax.BENCH.contenders(case)
    assert [contender.name for contender in contenders][3:] == ["Liger", "Liger CuTe", "QuACK"]
    check_contenders(softmax, case, inputs)


def test_what_computes_something_else_is_wrong() -> None:
    case, inputs = given("causal")
    assert wrong(softmax, case, inputs, made(softmax, given("plain")[0]))


def test_who_needs_more_memory_than_there_is_says_so() -> None:
    widest = softmax.BENCH.case("plain", softmax._GPU[0], torch.bfloat16)
    lacking = {contender.name for contender in softmax.BENCH.contenders(widest) if contender.lacks}
    assert lacking == {"eager", "Liger", "Liger CuTe", "QuACK"}
    lacking = {contender.name: contender.lacks for contender in softmax.BENCH.contenders(given("plain")[0]) if contender.lacks}
    assert lacking in ({}, {"Liger CuTe": "needs nvidia-cutlass-dsl"})
