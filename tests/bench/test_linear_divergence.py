"""The case file of linear_divergence: every contender is called rightly, set against products that nobody judges."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from bench import benching
from bench.benching import check_contenders, made, stand_in, wrong
from torch import Tensor

from onepass.bench import accuracy, linear_divergence
from onepass.ops.loss.linear_divergence import linear_divergence_reference

variants = pytest.mark.parametrize("variant", linear_divergence.VARIANTS)


given = partial(benching.given, linear_divergence, (40, 24, 32, 96))


def _by_beta(heads: tuple[Tensor, ...], beta: float) -> Tensor:
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    return linear_divergence_reference(*heads, kind=kind)


def _trl(
    student: Tensor, teacher: Tensor, weight: Tensor, teacher_weight: Tensor, mask: Tensor, beta: float
) -> tuple[Tensor, None, None]:  # fmt: skip
    assert mask.all() and mask.shape == student.shape[:2]
    return _by_beta((student[0], weight, teacher[0], teacher_weight), beta), None, None


def _liger(*args: object) -> Tensor:
    *heads, labels, beta, ignore_index, temperature = args
    assert (labels, ignore_index, temperature) == (None, -100, 1.0)
    return _by_beta(tuple(heads), beta)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    liger = {"LigerFusedLinearJSDFunction": SimpleNamespace(apply=_liger)}
    trl = {"_chunked_divergence_loss": _trl}
    stand_in(monkeypatch, {"liger_kernel.ops.fused_linear_jsd": liger, "trl.trainer.distillation_trainer": trl})


@variants
def test_every_contender_is_called_rightly(variant: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case, inputs = given(variant, dtype)
        check_contenders(linear_divergence, case, inputs)


def test_errors_are_of_sums_over_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = given("jsd")
    got = accuracy.outputs(made(linear_divergence, case), inputs)
    whole = accuracy.judged(linear_divergence.BENCH, case, inputs, got, True)
    monkeypatch.setitem(accuracy._CHUNK, "cpu", 7 * 96)
    chunked = accuracy.judged(linear_divergence.BENCH, case, inputs, got, True)
    for first, second in zip(whole, chunked, strict=True):
        assert set(first) == {"loss", "dstudent", "dweight"}
        assert second == pytest.approx(first, rel=1e-3)


def test_what_computes_something_else_is_wrong() -> None:
    case, inputs = given("jsd")
    ours = made(linear_divergence, case)
    assert "loss" in wrong(linear_divergence, case, inputs, lambda *heads: ours(*heads) * (1 + 1e-3), ours=True)
    other = made(linear_divergence, given("forward_kl")[0])
    assert wrong(linear_divergence, case, inputs, other)


def test_the_full_cases_are_those_of_a_gpu() -> None:
    cases = linear_divergence.BENCH.cases(torch.device("cuda"), torch.bfloat16, False)
    assert [case.variant for case in cases] == [variant for variant in linear_divergence.VARIANTS for _ in range(2)]
    assert cases[0].shape == (8192, 2048, 4096, 151936)
    student, teacher = (8192 + 151936) * 2048 * 2, (8192 + 151936) * 4096 * 2
    assert (cases[0].forward_bytes, cases[0].backward_bytes) == (student + teacher, 2 * student)
    assert cases[6].backward_bytes == student + 8192 * 2048 * 2 + 151936 * 2048 * 8


def test_a_baseline_comes_in_parts_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = given("forward_kl", torch.float32)
    call = linear_divergence.BENCH.baseline(case)  # type: ignore[misc]
    whole = accuracy._baseline_outputs(call, inputs)
    monkeypatch.setattr(accuracy, "_WHOLE", 7 * 96)

    def share(*heads: Tensor) -> Tensor:
        """A part's share of the mean."""
        return call(*heads) * heads[0].shape[0] / case.shape[0]  # type: ignore[operator,return-value]

    parts = accuracy._baseline_outputs(share, inputs)
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value)
