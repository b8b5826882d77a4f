"""The case file of gated_rms_norm: every contender is called rightly."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from bench import benching
from bench.benching import made, stand_in, wrong
from torch import Tensor

from onepass.bench import gated_norm
from onepass.ops.norm.gated_norm import gated_rms_norm_reference

given = partial(benching.given, gated_norm, (12, 2048))


def _rms_norm_gated(x: Tensor, g: Tensor, weight: Tensor, bias: None, activation: str = "swish", eps: float = 1e-5) -> Tensor:
    assert bias is None and activation == "swish"
    return gated_rms_norm_reference(x, g, weight, eps=eps)


def _rmsnorm_fn(x: Tensor, weight: Tensor, bias: None, z: Tensor, eps: float = 1e-5, **options: Any) -> Tensor:
    assert bias is None
    return gated_rms_norm_reference(x, z, weight, eps=eps, **options)


@pytest.fixture(autouse=True)
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(
        monkeypatch,
        {
            "fla.modules.fused_norm_gate": {"rms_norm_gated": _rms_norm_gated},
            "mamba_ssm.ops.triton.layernorm_gated": {"rmsnorm_fn": _rmsnorm_fn},
        },
    )


@pytest.mark.parametrize("variant", ("heads", "gate first", "groups"))
def test_every_contender_is_called_rightly(variant: str) -> None:
    case, inputs = given(variant)
    contenders = gated_norm.BENCH.contenders(case)
    assert [contender.name for contender in contenders][3:] == ["FLA", "mamba-ssm"]
    assert [contender.name for contender in contenders if contender.lacks] == ([] if variant == "heads" else ["FLA"])
    for contender in contenders:
        if not contender.compiles and not contender.lacks:
            assert not wrong(gated_norm, case, inputs, contender.make(case), contender.ours), contender.name


def test_the_other_order_is_wrong() -> None:
    case, inputs = given("gate first")
    assert wrong(gated_norm, case, inputs, made(gated_norm, given("heads")[0]))
    assert wrong(gated_norm, case, inputs, made(gated_norm, given("groups")[0]))
