"""The case file of the norms: it judges several outputs, and calls every peer as it is to be called; what a run of it says."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bench import benching
from bench.benching import bench, cute, made, only, stand_in, wrong
from torch import Tensor
from torch.nn import Parameter

from onepass.bench import accuracy, norm, peers, report, runner
from onepass.bench.model import CaseResult, Measured

CPU = torch.device("cpu")
VARIANTS = ("rms", "layer", "rms+residual", "layer+residual", "rms+post_residual")
pytestmark = pytest.mark.usefixtures("one_round")
given = partial(benching.given, norm, (40, 96))


# ---- what is judged ----


@pytest.mark.parametrize("variant", VARIANTS)
def test_ours_and_eager_are_right_in_every_output(variant: str) -> None:
    case, inputs = given(variant)
    expected = {"y", "dx", "dweight"} | ({"dbias"} if "layer" in variant else set())
    more = {"residual": {"h", "dresidual"}, "post_residual": {"dpost_residual"}}.get(variant.partition("+")[2], set())
    assert set(accuracy.outputs(made(norm, case), inputs)) == expected | more
    assert not wrong(norm, case, inputs, made(norm, case), ours=True)
    assert not wrong(norm, case, inputs, made(norm, case, "eager"))


def test_a_gradient_that_is_lost_is_seen() -> None:
    case, inputs = given("rms+residual")

    def forgets_the_sum(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        y, h = made(norm, case)(x, weight, residual)
        return y, h.detach() + 0 * y

    assert wrong(norm, case, inputs, forgets_the_sum) == ["dx", "dresidual"]


def test_outputs_that_are_exchanged_are_seen() -> None:
    case, inputs = given("layer+residual")
    assert {"y", "h"} <= set(wrong(norm, case, inputs, lambda *tensors: made(norm, case)(*tensors)[::-1]))


def test_the_sum_that_is_normalised_is_the_one_that_is_stored() -> None:
    """An unrounded sum gives another norm than ours, which is judged on the rounded one."""
    case, inputs = given("rms+residual")
    unrounded = norm.rms_norm_reference(
        *(tensor.double() for tensor in inputs.tensors.values()), eps=1e-6, zero_centered_gamma=False
    )
    exact = norm.BENCH.formula_of(case)(*(tensor.double() for tensor in inputs.tensors.values()))
    assert torch.equal(exact[1].bfloat16().double(), exact[1])
    assert (unrounded[0] - exact[0]).norm() > 1e-4 * exact[0].norm()


class _InPlace(torch.autograd.Function):
    """Twice its input; writes its gradient over the one it is given, as Liger does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.mul_(2)


def test_a_gradient_written_over_the_incoming_one_spoils_nobody_elses() -> None:
    case, inputs = given("rms")
    before = inputs.grads["y"].clone()
    contender = made(norm, case, "eager")
    in_place: Callable[..., Any] = lambda x, weight: _InPlace.apply(contender(x, weight)) / 2  # noqa: E731
    assert not wrong(norm, case, inputs, in_place)
    lane = runner._lane("in place", lambda x, weight: _InPlace.apply(contender(x, weight)), inputs)
    lane.backward(lane.before_backward())
    lane.both()
    assert torch.equal(inputs.grads["y"], before)


# ---- the cases ----


def test_the_cases_on_a_gpu() -> None:
    cases = norm.BENCH.cases(torch.device("cuda"), torch.bfloat16, False)
    assert len(cases) == 9 + 12 + 3
    assert [case.variant for case in cases] == sorted((case.variant for case in cases), key=VARIANTS.index)
    assert {case.shape[1] for case in cases} >= {64, 5000, 53248, 131072}
    assert {case.shape[0] for case in cases} >= {1, 256, 777, 262144}
    by_name = {case.name: case for case in cases}
    tensor = 16384 * 4096 * 2
    assert (by_name["layer 16384x4096"].forward_bytes, by_name["layer 16384x4096"].backward_bytes) == (2 * tensor, 3 * tensor)
    assert by_name["rms+residual 16384x4096"].forward_bytes == by_name["rms+residual 16384x4096"].backward_bytes == 4 * tensor
    after = by_name["rms+post_residual 16384x4096"]
    assert after.forward_bytes == after.backward_bytes == 3 * tensor


# ---- peers, as they are to be called ----


def _liger_rms(
    X: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    return F.rms_norm(X, W.shape, W, eps)


def _liger_layer(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    return F.layer_norm(X, W.shape, W, B, eps)


def _liger_adding(X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    return F.rms_norm(X + R, W.shape, W, eps), X + R


def _quack(
    x: Tensor, weight: Tensor, bias: None = None, residual: Tensor | None = None, eps: float = 1.0, prenorm: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    y = F.rms_norm(x + residual, weight.shape, weight, eps)
    return (y, x + residual) if prenorm else y


def _quack_layer_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1.0, return_rstd: bool = False, return_mean: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    assert weight.dtype == torch.float32 and bias is not None and bias.dtype == torch.float32 and return_rstd and return_mean
    var, mean = torch.var_mean(x.float(), -1, correction=0)
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype), (var + eps).rsqrt(), mean


def _quack_layer_backward(
    x: Tensor, weight: Tensor, dout: Tensor, rstd: Tensor, mean: Tensor, has_bias: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    normed, dy = (x.float() - mean[:, None]) * rstd[:, None], dout.float()
    scaled = dy * weight.float()
    dx = (scaled - scaled.mean(-1, keepdim=True) - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd[:, None]
    return dx.to(x.dtype), (dy * normed).sum(0).to(weight.dtype), dy.sum(0).to(weight.dtype)


def _cudnn_rms(input: Tensor, weight: Tensor, bias: None = None, eps: float = 1.0) -> Tensor:
    assert weight.dtype == input.dtype
    return F.rms_norm(input, weight.shape, weight, eps)


def _cudnn_layer(input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor, bias: Tensor, eps: float = 1.0) -> Tensor:
    assert weight.dtype == bias.dtype == torch.float32
    return F.layer_norm(input.float(), normalized_shape, weight, bias, eps).to(input.dtype)


def _apex_rms(input: Tensor, weight: Tensor, normalized_shape: tuple[int, ...], eps: float = 1.0) -> Tensor:
    return F.rms_norm(input, normalized_shape, weight, eps)


def _apex_layer(input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: tuple[int, ...], eps: float = 1.0) -> Tensor:
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def _apex_fast(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def _function(call: Callable[..., Any]) -> type:
    return type("Function", (), {"apply": staticmethod(call)})


@pytest.fixture
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers' modules as far as we call them, with their arguments' names and order."""
    stand_in(monkeypatch, {
        "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": _function(_liger_rms)},
        "liger_kernel.ops.layer_norm": {"LigerLayerNormFunction": _function(_liger_layer)},
        "liger_kernel.ops.fused_add_rms_norm": {"LigerFusedAddRMSNormFunction": _function(_liger_adding)},
        **cute(rms_norm=_liger_rms, layer_norm=_liger_layer, fused_add_rms_norm=_liger_adding),
        "cudnn.ops.norm": {"rms_norm": _cudnn_rms, "layer_norm": _cudnn_layer},
        "quack": {"rmsnorm": _quack},
        "quack.rmsnorm": {"layernorm_fwd": _quack_layer_forward, "layernorm_bwd": _quack_layer_backward},
        "apex.normalization.fused_layer_norm": {"fused_rms_norm_affine": _apex_rms, "fused_layer_norm_affine": _apex_layer},
        "apex.contrib.layer_norm.layer_norm": {"_fast_layer_norm": _apex_fast},
        "transformer_engine.pytorch": {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm},
    })  # fmt: skip


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_peer_of_the_norms_is_called_rightly(variant: str) -> None:
    case, inputs = given(variant)
    found = {contender.name: contender for contender in norm.BENCH.contenders(case) if contender.package}
    for contender in found.values():
        assert not wrong(norm, case, inputs, contender.make(case)), contender.name
    with_sum, alone = ("QuACK", "Liger CuTe"), ("Apex", "cuDNN frontend")
    assert [name in found for name in with_sum] == [variant not in ("layer+residual", "rms+post_residual")] * 2
    assert [name in found for name in alone] == ["residual" not in variant] * 2
    assert {contender.package for contender in found.values()} <= set(peers.PACKAGES)


def test_a_module_takes_the_parameters_it_is_given() -> None:
    """And others when others are given, without a parameter of its own left behind."""
    call = peers.with_parameters(torch.nn.LayerNorm(8), ("weight", "bias"))
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x, weight, bias = (torch.randn(8, generator=generator) for _ in range(3))
        weight, bias = Parameter(weight), Parameter(bias)
        y = call(x, weight, bias)
        assert torch.equal(y, F.layer_norm(x, (8,), weight, bias))
        assert all(grad is not None for grad in torch.autograd.grad(y.sum(), (weight, bias)))


def test_transformer_engine_is_looked_for_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('no such library')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert peers.find_peers()["Transformer Engine"] == "of unknown version"


def test_a_fallback_of_liger_is_refused_once_and_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger may use Triton for a part of other functions: strictness outlives no call, and no later call is slowed by it."""
    seen: list[str | None] = []

    def norm_of(*_: object, impl: str) -> None:
        seen.append(os.environ.get("LIGER_KERNEL_STRICT"))

    stand_in(monkeypatch, {"liger_kernel.functional": {"rms_norm": norm_of}})
    monkeypatch.delenv("LIGER_KERNEL_STRICT", raising=False)
    function = peers.liger_cute("rms_norm")
    function()
    assert "LIGER_KERNEL_STRICT" not in os.environ
    monkeypatch.setenv("LIGER_KERNEL_STRICT", "0")
    function()
    peers.liger_cute("rms_norm")()
    assert seen == ["1", "0", "1"]
    assert os.environ["LIGER_KERNEL_STRICT"] == "0"


def test_parameters_in_fp32_are_made_once_and_pass_gradients_on() -> None:
    convert, weight = peers.in_fp32(), Parameter(torch.randn(4, dtype=torch.bfloat16))
    (wide,) = convert(weight)
    assert wide.dtype == torch.float32 and torch.equal(wide, weight.float())
    assert convert(weight)[0].data_ptr() == wide.data_ptr()
    (grad,) = torch.autograd.grad((wide * 3).sum(), weight)
    assert grad.dtype == torch.bfloat16 and torch.equal(grad, torch.full_like(weight, 3))
    other = Parameter(torch.randn(4, dtype=torch.bfloat16))
    assert torch.equal(convert(other)[0], other.float())


# ---- what is said ----


def test_a_run_of_the_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only(monkeypatch, norm, *(given(variant)[0] for variant in VARIANTS))
    assert bench("norm", "--case", "40x96", "--json", str(tmp_path / "run.json")) == 0
    found = json.loads((tmp_path / "run.json").read_text())
    rows = {row["variant"]: row for row in found["rows"] if row["ours"]}
    assert list(rows) == list(VARIANTS)
    assert set(rows["layer+residual"]["errors"]) == {"y", "h", "dx", "dweight", "dbias", "dresidual"}
    assert all(row["status"] == "ok" and row["forward_of_copy"] > 0 for row in rows.values())
    assert [times["variant"] for times in found["cpu_time"]] == list(VARIANTS)
    said = capsys.readouterr().out
    assert "norm  layer+residual 40 x 96" in said
    assert "of copy" in said
    assert "f+b vs" not in said


def measured(**more: float) -> CaseResult:
    ours = Measured("onepass", ours=True, forward_ms=1.0, backward_ms=2.0, forward_of_copy=0.9, backward_of_copy=0.8, **more)
    return CaseResult(given("rms")[0], Measured("copy", forward_ms=1.0, backward_ms=1.5), [ours])


def titles(result: CaseResult, width: int) -> list[str]:
    return [column.title for column in report._fitting(report._columns(result), width)]


def test_columns_come_with_figures_and_go_with_room() -> None:
    plain = ["forward us", "of copy", "backward us", "of copy", "CPU us f / f+b", "error"]
    assert titles(measured(), 200) == plain
    on_a_gpu = measured(forward_graph_us=4.0, backward_graph_us=11.0, peak_mib=3.0, kept_mib=0.1)
    all_of_them = [*plain[:4], "graph us f / b", "CPU us f / f+b", "peak MiB", "kept MiB", "error"]
    assert titles(on_a_gpu, report._WIDTH) == all_of_them
    assert titles(on_a_gpu, 110) == [title for title in all_of_them if title != "kept MiB"]
    assert titles(on_a_gpu, 80) == plain


def test_graph_times_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    report.BenchReport().case(measured(forward_graph_us=4.04, backward_graph_us=11.3))
    assert "4.0 / 11.3" in capsys.readouterr().out
