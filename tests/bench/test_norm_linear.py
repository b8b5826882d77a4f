"""The case file of norm_linear: its time is set against that of the calls the op replaces, and its errors against a product's."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from bench import benching
from bench.benching import bench, check_contenders, made, only, stand_in, wrong
from torch import Tensor
from torch.nn import Parameter

from onepass.bench import accuracy, command, norm_linear, registry, runner
from onepass.bench.model import BenchCase, Call, Contender

pytestmark = pytest.mark.usefixtures("one_round")


given = partial(benching.given, norm_linear, (20, 48, 32))


class _LayerNormLinear(torch.nn.Module):
    def __init__(self, inner: int, outer: int, eps: float, normalization: str, bias: bool, params_dtype: torch.dtype) -> None:
        super().__init__()
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = Parameter(torch.ones(inner, dtype=params_dtype))
        self.layer_norm_bias = Parameter(torch.zeros(inner, dtype=params_dtype)) if normalization == "LayerNorm" else None
        self.weight = Parameter(torch.zeros(outer, inner, dtype=params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        if self.normalization == "RMSNorm":
            return F.linear(F.rms_norm(x, weight.shape, weight, self.eps), self.weight)
        return F.linear(F.layer_norm(x, weight.shape, weight, bias, self.eps), self.weight)


@pytest.mark.parametrize("variant", ["rms", "layer"])
def test_every_contender_is_called_rightly(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {"transformer_engine.pytorch": {"LayerNormLinear": _LayerNormLinear}})
    case, inputs = given(variant)
    check_contenders(norm_linear, case, inputs)


def test_ours_is_judged_by_a_product_of_what_is_stored() -> None:
    """Its baseline rounds the norm, as a product needs it, and so may ours; twice it may not."""
    case, inputs = given("rms")
    got = accuracy.outputs(made(norm_linear, case), inputs)
    _, allowed = accuracy.judged(norm_linear.BENCH, case, inputs, got, ours=True)
    _, rounded_once = accuracy.errors(norm_linear.BENCH.formula_of(case), inputs, got, with_baseline=True)
    assert allowed["y"] > 1.25 * rounded_once["y"] + 1e-6

    def rounds_twice(x: Tensor, norm_weight: Tensor, weight: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (48,), None, 1e-5) * norm_weight, weight)

    assert wrong(norm_linear, case, inputs, rounds_twice, ours=True)


def test_a_run_is_set_against_the_two_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    only(monkeypatch, norm_linear, norm_linear.BENCH.case("layer", (33, 32, 40), torch.bfloat16))
    data, picture = tmp_path / "run.json", tmp_path / "run.png"
    assert bench("norm_linear", "--json", str(data), "--plot", str(picture)) == 0
    rows = {row["contender"]: row for row in json.loads(data.read_text())["rows"]}
    both = {name: row["forward_ms"] + row["backward_ms"] for name, row in rows.items()}
    assert rows["separate"]["both_of_reference"] == 1
    assert rows["onepass"]["both_of_reference"] == pytest.approx(both["onepass"] / both["separate"], rel=1e-3)
    assert rows["copy"]["both_of_reference"] is None
    assert {row["reference"] for row in rows.values()} == {"separate"}
    said = capsys.readouterr().out
    assert "f+b over separate" in said
    assert "us of copy" not in said
    assert "no picture" in said
    assert not picture.exists()


def test_a_reference_that_fails_leaves_no_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(case: BenchCase) -> Call:
        raise RuntimeError("not today")

    case = norm_linear.BENCH.case("rms", (33, 32, 40), torch.bfloat16)
    contenders = norm_linear.BENCH.contenders
    only(
        monkeypatch, norm_linear, case,
        contenders=lambda case: [contenders(case)[0], Contender("separate", fails)],
    )  # fmt: skip
    assert bench("norm_linear", "--json", str(tmp_path / "run.json")) == 0
    rows = {row["contender"]: row for row in json.loads((tmp_path / "run.json").read_text())["rows"]}
    assert rows["separate"]["status"] == "error"
    assert rows["onepass"]["forward_ms"] > 0
    assert rows["onepass"]["both_of_reference"] is None


def test_packages_without_a_function_are_named_with_the_op() -> None:
    plans = [runner.BenchPlan(registry.load(op), [], lambda _: True) for op in ("bias_activation", "norm", "norm_linear")]
    for plan in plans:
        plan.cases = plan.bench.cases(torch.device("cuda"), torch.bfloat16, True)
    assert command._without(plans[:1], ["Apex"]) == ["bias_activation: Apex (has activations in matrix products only)"]
    of_activation, of_norm, of_product = command._without(plans, ["Liger", "Apex", "Megatron-core", "CCE"])
    assert of_activation == "bias_activation: Apex (has activations in matrix products only); nothing like it in CCE"
    assert of_norm.startswith("norm: Megatron-core (takes its norms from")
    assert of_product.startswith("norm_linear: Liger (has no norm with the product that follows); Apex (")
    assert command._without(plans, ["Liger"])[:1] == [of_product.partition("; ")[0]]  # the others compare with it
