"""linear_divergence against fp64, in every way it is done: no further off than eager code with products as cuBLAS has them."""

import pytest
from ops.calls import backends
from ops.linear_cross_entropy_oracle import whole_sums  # noqa: F401
from ops.linear_divergence_oracle import MODES, Case, _ours, _theirs, draw, judge_case
from ops.oracle import BF16, FP16, FP32, FP64

import onepass.ops.loss.linear_divergence as module
from onepass.ops.loss.linear_divergence.formula import KINDS

OPTIONS = {
    "plain": {},
    "terms": {"softcap": 3.0, "teacher_softcap": 5.0, "temperature": 0.7, "bias": True, "ignore_index": 3},
    "wide": {"wide": True, "temperature": 2.0, "softcap": 4.0},
    "main": {"main": FP32, "bias": True},
    "narrow main": {"main": BF16},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def check(case, backend="torch", seeds=2, worst=True):
    report = judge_case(module, case, seeds, backend)
    if not worst:
        report.findings = [finding for finding in report.findings if finding.measure != "worst row"]
    assert report, f"{case} {backend}\n{report}"


@kinds
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_plan(options, mode, kind):
    """Each option, mode and kind with each type."""
    dtype = (FP32, BF16, FP16)[([*OPTIONS].index(options) + MODES.index(mode) + KINDS.index(kind)) % 3]
    for reduction in ("mean", "sum") if mode == "grad_in_forward" else ("none",):
        check(Case(mode, kind, reduction, dtype, **OPTIONS[options]))


LORAS = {
    "plain": {"lora": 3},
    "frozen": {"lora": 3, "frozen": "student_weight student_bias", "bias": True},
    "wide": {"lora": 3, "wide": True, "temperature": 2.0, "softcap": 4.0},
    "main": {"lora": 9, "main": FP32, "frozen": "student_weight"},
    "a alone": {"lora": 3, "frozen": "student student_weight lora_b"},
    "b alone": {"lora": 3, "frozen": "student student_weight lora_a"},
}


@kinds
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", LORAS)
def test_lora(options, mode, kind):
    """All options in all modes, and each with either type. A few rows, as a's, have errors of much spread: that takes more draws.
    In fp32 not by the worst row: its products sum in another order, as parts of one."""
    reduction = "mean" if mode == "grad_in_forward" else "none"
    dtype = (FP32, BF16)[([*LORAS].index(options) + MODES.index(mode) + KINDS.index(kind)) % 2]
    check(Case(mode, kind, reduction, dtype, **LORAS[options]), seeds=8, worst=dtype is not FP32)


@backends
@kinds
def test_pieces_of_rows(kind, backend):
    """Rows of one piece, of several, and of several and a part, by one launch and by two."""
    for V, block in ((64, 64), (64, 32), (150, 32), (33, 32), (1, 32)):
        for mode, reduction in (("grad_in_forward", "sum"), ("recompute", "none")):
            check(Case(mode, kind, reduction, FP32, (20,), V=V, block=block, rows=9), backend, 1 if V > 32 else 4)


@backends
@kinds
@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
def test_kernels(dtype, kind, backend):
    for options in ({}, {"softcap": 3.0, "temperature": 2.0}, {"wide": True, "teacher_softcap": 3.0}):
        check(Case("grad_in_forward", kind, "sum", dtype, (20,), block=64, rows=9, **options), backend)


@backends
@kinds
def test_heads_that_nearly_agree(kind, backend):
    """A divergence is then a small difference of large numbers, and its gradient too."""
    for size in (2.0, 20.0):
        check(Case(kind=kind, near=True, size=size, reduction="sum", lead=(20,), block=64), backend, 4)


@kinds
@pytest.mark.parametrize("frozen", ("student", "student_weight", "student_weight student_bias", "student student_bias"))
def test_whatever_is_frozen(frozen, kind):
    for mode, reduction in (("grad_in_forward", "mean"), ("keep_teacher", "none")):
        check(Case(mode, kind, reduction, BF16, bias=True, frozen=frozen))
        check(Case(mode, kind, reduction, bias=True, frozen=frozen, main=FP32))


@kinds
def test_heads_of_different_types(kind):
    check(Case(kind=kind, dtype=FP32, teacher_dtype=BF16))
    check(Case("keep_logits", kind, "none", BF16, teacher_dtype=FP16))


@backends
@kinds
@pytest.mark.parametrize("beta", (0.01, 0.5, 0.99))
def test_far_apart(beta, kind, backend):
    """Not by the worst row: its gradient is what is left of numbers that cancel."""
    case = Case(kind=kind, beta=beta, size=5.0, reduction="sum", lead=(20,), block=64)
    report = judge_case(module, case, 4, backend)
    report.findings = [finding for finding in report.findings if finding.measure != "worst row"]
    assert report, report


@backends
@kinds
def test_probabilities_that_vanish(kind, backend):
    """Where one probability is 1 in fp32 a row's gradients cancel to nothing: what is left has the size of a rounding."""
    case = Case(kind=kind, beta=0.99, size=60.0, reduction="sum", lead=(20,), block=64)
    given, labels, dy = draw(case)
    ours = _ours(module, case, given, labels, dy, backend)
    baseline, exact = (_theirs(case, given, labels, dy, dtype) for dtype in (FP32, FP64))
    for name, expected in exact.items():
        off, allowed = ((each[name] - expected).abs().max() for each in (ours, baseline))
        assert off <= 2 * allowed + 1e-6 * expected.abs().max(), name
