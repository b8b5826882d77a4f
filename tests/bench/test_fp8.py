"""The cases in eight bits: peers are called rightly, each call is the first of a step, and what rounds more is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bench import benching
from bench.benching import bench, only, stand_in, wrong
from torch import Tensor
from torch.nn import Parameter

from onepass.bench import accuracy, activation_linear, command, define, fp8, linear, norm_linear, norm_mlp, registry, runner
from onepass.bench.model import BenchCase, Contender, Inputs
from onepass.runtime.ceilings import Ceilings, clock_for
from onepass.runtime.errors import CommandError

pytestmark = pytest.mark.usefixtures("one_round")
CPU = torch.device("cpu")
MODULES = [linear, norm_linear, activation_linear, norm_mlp]
WEIGHTS = {linear: ["weight"], norm_linear: ["weight"], activation_linear: ["weight"], norm_mlp: ["up", "down"]}
named = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.BENCH.op)


def given(module: ModuleType) -> tuple[BenchCase, Inputs]:
    variant = {linear: "plain fp8", norm_linear: "rms fp8"}.get(module, "swiglu fp8")
    return benching.given(module, (32, 48, 64), variant)


def row(module: ModuleType, case: BenchCase, name: str) -> Contender:
    return next(contender for contender in module.BENCH.contenders(case) if contender.name == name)


# ---- stand-ins for peers: their layers in the case's type, and whether they were asked for eight bits ----


class _Engine:
    """Transformer Engine's module, which computes only under its autocast."""

    def __init__(self, old: bool) -> None:
        self.recipe: Any = None
        engine = self

        class Layer(torch.nn.Module):
            def __init__(self, inner: int, outer: int, *, bias: bool, params_dtype: torch.dtype, **options: Any) -> None:
                super().__init__()
                self.options = options

            def forward(self, x: Tensor) -> Tensor:
                assert engine.recipe == {
                    "margin": 0, "fp8_format": "hybrid", "amax_history_len": 16, "amax_compute_algo": "max"
                }  # fmt: skip
                return self.run(x)

        class Linear(Layer):
            def run(self, x: Tensor) -> Tensor:
                assert self.options == {"fuse_wgrad_accumulation": True}
                return F.linear(x, self.weight)

        class LayerNormLinear(Layer):
            def run(self, x: Tensor) -> Tensor:
                assert self.options == {"eps": 1e-5, "normalization": "RMSNorm"}
                return F.linear(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, 1e-5), self.weight)

        class LayerNormMLP(Layer):
            def run(self, x: Tensor) -> Tensor:
                assert self.options == {"eps": 1e-5, "normalization": "RMSNorm", "activation": "swiglu"}
                normed = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, 1e-5)
                return F.linear(fp8.SwiGLU()(F.linear(normed, self.fc1_weight)), self.fc2_weight)

        self.content = {each.__name__: each for each in (Linear, LayerNormLinear, LayerNormMLP)}
        self.content["fp8_autocast" if old else "autocast"] = self.old_autocast if old else self.autocast

    @contextmanager
    def autocast(self, enabled: bool, recipe: Any) -> Any:
        self.recipe = recipe if enabled else None
        yield
        self.recipe = None

    def old_autocast(self, enabled: bool, fp8_recipe: Any) -> Any:
        return self.autocast(enabled, fp8_recipe)


@pytest.fixture
def _peers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    recipes: list[str] = []

    class Float8LinearConfig:
        from_recipe_name = staticmethod(lambda name: name)

    def convert(module: torch.nn.Module, *, config: str) -> torch.nn.Module:
        recipes.append(config)
        return module

    class Format:
        HYBRID = "hybrid"

    engine = _Engine(getattr(request, "param", False)).content
    stand_in(
        monkeypatch,
        {
            "torchao.float8": {"convert_to_float8_training": convert, "Float8LinearConfig": Float8LinearConfig},
            "transformer_engine.pytorch": engine,
            "transformer_engine.common.recipe": {"DelayedScaling": dict, "Format": Format},
        },
    )
    monkeypatch.setattr(fp8, "compiled", lambda module: lambda x: (recipes.append("ran compiled"), module(x))[1])
    return recipes


@named
@pytest.mark.parametrize("_peers", [False, True], indirect=True, ids=["", "before autocast"])
def test_every_contender_is_called_rightly(module: ModuleType, _peers: list[str]) -> None:
    case, inputs = given(module)
    contenders = module.BENCH.contenders(case)
    for contender in contenders:
        call = contender.make(case)
        assert not wrong(module, case, inputs, call, contender.ours), contender.name
        if not contender.ours:  # as they are in 16 bits here
            found, _ = accuracy.judged(module.BENCH, case, inputs, accuracy.outputs(call, inputs), ours=False)
            assert max(found.values()) < 0.02, contender.name
    assert list(dict.fromkeys(_peers)) == ["tensorwise", "ran compiled", "rowwise"]
    packages = {contender.package for contender in contenders if not contender.ours}
    assert packages == {"torchao"} | ({"Transformer Engine"} if module is not activation_linear else set())


# ---- updates ----


@named
def test_each_call_is_a_steps_first(module: ModuleType) -> None:
    case, inputs = given(module)
    weights = [inputs.tensors[name] for name in WEIGHTS[module]]
    for name in ("onepass", "onepass current", "onepass row"):
        call = row(module, case, name).make(case)
        versions = []
        for _ in range(2):
            call(*inputs.tensors.values())
            versions.append([weight.fp8.version for weight in weights])
        assert all(a != b for a, b in zip(*versions, strict=True)), name
        assert weights[0].fp8.recipe.scaling == {"onepass current": "current", "onepass row": "row"}.get(name, "delayed")
    for weight in weights:
        del weight.fp8
    row(module, case, "onepass bf16").make(case)(*inputs.tensors.values())
    assert not any(hasattr(weight, "fp8") for weight in weights)


def have_a_history(weights: Sequence[Tensor]) -> bool:
    return all(weight.fp8.scales.stands(role) for weight in weights for role in ("input", "gradient"))


def test_what_is_checked_has_the_scales_of_a_step_before() -> None:
    """As most of a run's steps. Transformer Engine's scales are 1 before."""
    case, _ = given(norm_mlp)
    known: list[bool] = []

    def make(case: BenchCase) -> Any:
        call = row(norm_mlp, case, "onepass").make(case)

        def watched(*tensors: Tensor) -> Any:
            y = call(*tensors)
            known.append(have_a_history(tensors[2:]))
            return y

        return watched

    plan = runner.BenchPlan(norm_mlp.BENCH, [case], lambda _: True)
    session = runner.Session(plan, clock_for(CPU), Ceilings(1.0, 1, None), lambda _: None, torch.Generator())
    found, _ = runner._check(session, Contender("onepass", make, ours=True), case)
    assert found.status == "ok"
    assert known == [False, True]


def test_what_is_timed_has_the_scales_of_a_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever recipe the weights had before: contenders share them."""
    case, _ = given(norm_mlp)
    weights: list[Any] = []
    known: list[bool] = []
    clock = clock_for(CPU)

    stock = norm_mlp.BENCH.inputs

    def inputs(*options: Any) -> Inputs:
        found = stock(*options)
        weights[:] = found.tensors["up"], found.tensors["down"]
        return found

    def times(*options: Any, **more: Any) -> list[float]:
        if getattr(weights[0], "fp8", None) and weights[0].fp8.recipe.scaling == "delayed":
            known.append(have_a_history(weights))
        return [1.0]

    monkeypatch.setattr(clock, "times", times)
    contenders = [row(norm_mlp, case, name) for name in ("onepass row", "onepass")]
    only(monkeypatch, norm_mlp, case, contenders=lambda case: contenders, inputs=inputs)
    plan = runner.BenchPlan(norm_mlp.BENCH, [case], lambda _: True)
    list(runner.measure(plan, clock, Ceilings(1.0, 1, None), lambda _: None))
    assert known == [True] * len(known) and len(known) >= 2 * plan.rounds


# ---- errors ----


@named
def test_more_rounding_than_eight_bits_is_wrong(module: ModuleType) -> None:
    case, inputs = given(module)
    call = row(module, case, "onepass").make(case)
    allowed = accuracy.judged(module.BENCH, case, inputs, accuracy.outputs(call, inputs), ours=True)[1]
    assert all(0.01 < error < 0.16 for error in allowed.values())

    def coarse(*tensors: Tensor) -> Any:
        rounded = [tensor.detach().to(torch.float8_e5m2).to(tensor.dtype) - tensor.detach() for tensor in tensors]
        return call(*(tensor + error for tensor, error in zip(tensors, rounded, strict=True)))

    if module is not linear:  # whose main_grad is the parameter's own
        assert "y" in wrong(module, case, inputs, coarse, ours=True)

    def scaled(*tensors: Tensor) -> Any:
        y = call(*tensors)
        return y * 1.2

    assert wrong(module, case, inputs, scaled, ours=True)
    assert wrong(module, case, inputs, scaled)  # a peer


def test_the_baseline_rounds_each_operand_once() -> None:
    x, weight, dy = torch.randn(64, 48, requires_grad=True), Parameter(torch.randn(32, 48)), torch.randn(64, 32)
    dx, dweight = torch.autograd.grad(fp8.rounded_linear(x, weight), (x, weight), dy)
    y = fp8.rounded_linear(x, weight)
    for got, exact, least, most in (
        (y, x @ weight.t(), 0.03, 0.045),
        (dx, dy @ weight, 0.05, 0.075),
        (dweight, dy.t() @ x, 0.05, 0.075),
    ):
        assert least < ((got - exact).norm() / exact.norm()).item() < most


# ---- runs ----


def test_a_run_is_set_against_onepass_in_its_own_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, linear, given(linear)[0])
    data = tmp_path / "run.json"
    assert bench("linear", "--json", str(data)) == 0
    rows = {each["contender"]: each for each in json.loads(data.read_text())["rows"]}
    assert set(rows) == {"copy", "onepass", "onepass current", "onepass row", "onepass bf16"}
    assert {each["reference"] for each in rows.values()} == {"onepass bf16"}
    assert linear.BENCH.reference_of(linear.BENCH.case("plain", (32, 48, 64), torch.bfloat16)) == "F.linear + add_"
    assert rows["onepass bf16"]["both_of_reference"] == 1
    both = {name: each["forward_ms"] + each["backward_ms"] for name, each in rows.items()}
    assert rows["onepass"]["both_of_reference"] == pytest.approx(both["onepass"] / both["onepass bf16"], rel=1e-3)
    assert 0.03 < max(rows["onepass"]["errors"].values()) < 0.1
    said = capsys.readouterr().out
    assert "f+b over onepass bf16" in said
    assert "linear  plain fp8: CPU time of a call, 64 x 128 x 128, microseconds\n" in said
    assert "not installed" in said and "torchao" in said


def test_a_row_in_eight_bits_that_is_wrong_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case, _ = given(linear)
    good = row(linear, case, "onepass")
    off = Contender("onepass row", lambda case: lambda x, weight: good.make(case)(x * 1.5, weight), ours=True)
    only(monkeypatch, linear, case, contenders=lambda case: [good, off])
    assert bench("linear") == 1


def test_a_gpu_without_eight_bits_has_no_such_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(define, "unfit_gpu", lambda device: "this one has 8.0")
    found = {
        op: registry.load(op).cases(torch.device("cuda"), torch.bfloat16, False) for op in ("linear", "norm_mlp", "fp8_passes")
    }
    assert not any(case.fp8 for cases in found.values() for case in cases)
    assert found["linear"] and not found["norm_mlp"] and not found["fp8_passes"]
    plans = [runner.BenchPlan(registry.load(op), found[op], lambda _: True) for op in ("norm_mlp", "fp8_passes")]
    with pytest.raises(CommandError, match="all in eight bits"):
        command._chosen(plans, command.argparse.Namespace(peer=None, case=None))
