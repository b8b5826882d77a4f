"""The case file of delta_gates: every contender is called rightly."""

from __future__ import annotations

from functools import partial

import pytest
from bench import benching
from bench.benching import check_contenders, stand_in, wrong
from torch import Tensor

from onepass.bench import delta_gates
from onepass.ops.delta.delta_gates import delta_gates_reference

given = partial(benching.given, delta_gates, (24, 8))


def _gate(g: Tensor, a_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    assert g.dim() == 2 and dt_bias is not None
    return delta_gates_reference(g, g, a_log, dt_bias)[0]


@pytest.fixture(autouse=True)
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {"fla.ops.gated_delta_rule.gate": {"fused_gdn_gate": _gate}})


@pytest.mark.parametrize("variant", ("plain", "groups"))
def test_every_contender_is_called_rightly(variant: str) -> None:
    case, inputs = given(variant)
    assert [contender.name for contender in delta_gates.BENCH.contenders(case)][3:] == ["FLA"]
    check_contenders(delta_gates, case, inputs)


def test_the_gates_swapped_are_wrong() -> None:
    case, inputs = given("plain")
    assert wrong(delta_gates, case, inputs, lambda a, b, *vectors: delta_gates_reference(b, a, *vectors))
