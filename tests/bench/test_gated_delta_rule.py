"""The case file of gated_delta_rule: every contender is called rightly."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from bench import benching
from bench.benching import check_contenders, made, stand_in, wrong
from torch import Tensor

from onepass.bench import gated_delta_rule
from onepass.ops.delta.gated_delta_rule import gated_delta_rule_reference

given = partial(benching.given, gated_delta_rule, (1, 150, 1, 2))


def _rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None) -> Any:
    return gated_delta_rule_reference(q, k, v, g, beta, cu_seqlens=cu_seqlens, output_final_state=True)


@pytest.fixture(autouse=True)
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"chunk_gated_delta_rule": _rule}
    stand_in(monkeypatch, {"flash_qla": named, "fla.ops.gated_delta_rule": named})


@pytest.mark.parametrize("variant", ("plain", "documents"))
def test_every_contender_is_called_rightly(variant: str) -> None:
    case, inputs = given(variant)
    assert [contender.name for contender in gated_delta_rule.BENCH.contenders(case)] == ["onepass", "formula", "FlashQLA", "FLA"]
    check_contenders(gated_delta_rule, case, inputs)


def test_documents_are_looked_at() -> None:
    case, inputs = given("documents")
    whole = made(gated_delta_rule, given("plain")[0])
    assert wrong(gated_delta_rule, case, inputs, lambda *tensors: whole(*tensors[:5]))
