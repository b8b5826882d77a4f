"""The case file of gated_norm_linear: its contenders are called rightly."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from bench import benching
from bench.benching import check_contenders, stand_in, wrong

from onepass.bench import gated_norm_linear
from onepass.ops.norm.gated_norm import gated_rms_norm_reference

given = partial(benching.given, gated_norm_linear, (20, 256, 32))


def _fla(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, bias: None, eps: float) -> torch.Tensor:
    return gated_rms_norm_reference(x, g, weight, eps=eps)  # type: ignore[no-any-return]


def test_every_contender_is_called_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {"fla.modules.fused_norm_gate": {"rms_norm_gated": _fla}})
    case, inputs = given("heads")
    check_contenders(gated_norm_linear, case, inputs)


def test_a_norm_of_whole_rows_is_wrong() -> None:
    case, inputs = given("heads")

    def whole(x: torch.Tensor, z: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(gated_rms_norm_reference(x, z, norm_weight.repeat(2)), weight)

    assert wrong(gated_norm_linear, case, inputs, whole, ours=True)
