"""linear_cross_entropy against fp64, in every way it is done: no further off than eager code with products as cuBLAS has them."""

from dataclasses import replace

import pytest
import torch
from ops.calls import needs_triton
from ops.linear_cross_entropy_oracle import ALL, WAYS, Case, judge_case, op, reductions_of, ways, whole_sums  # noqa: F401
from ops.oracle import BF16, DEVICE, FP16, FP32, FP64
from torch.nn import functional as F

import onepass.ops.loss.linear_cross_entropy as module

OPTIONS = {  # what a row's loss is made of, and what is asked for beside it
    "plain": {},
    "terms": {"smoothing": 0.1, "z_loss": 1e-2, "bias": True, "ignore_index": 3},
    "wide": {"softcap": 3.0, "scale": 0.5, "wide": True, "weighted": True},
    "capped": {"softcap": 3.0, "scale": 0.75, "smoothing": 0.2, "full": True},
    "stats": {"full": True, "bias": True, "weighted": True},
    "masked": {"masked": True, "softcap": 3.0, "bias": True},
    "kept": {"kept": True, "full": True, "bias": True, "weighted": True},
    "main": {"main": FP32, "bias": True, "weighted": True},
    "narrow main": {"main": BF16},
}
frozen = ("hidden", "weight", "bias", "token_weight", "hidden bias", "weight bias token_weight")


def check(case, backend="torch", seeds=4, worst=True):
    report = judge_case(module, case, seeds, backend)
    if not worst:
        report.findings = [finding for finding in report.findings if finding.measure != "worst row"]
    assert report, f"{case} {backend}\n{report}"


@ways
@pytest.mark.parametrize("options", [*OPTIONS, "plain, fp16", "wide, fp16", "kept, fp16"])
def test_every_way_of_every_reduction(options, way):
    """In fp32 and bf16 in turns: each option in both, and each way."""
    name, _, half = options.partition(", ")
    for i, reduction in enumerate(reductions_of(way)):
        dtype = FP16 if half else (FP32, BF16)[([*OPTIONS].index(name) + [*WAYS].index(way) + i) % 2]
        check(Case(way, reduction, dtype, **OPTIONS[name]))


CLASSES = {  # class weights alone are weights of rows; the others are read column by column
    "weights": {"classes": True, "weighted": True, "z_loss": 1e-2, "kept": True},
    "smoothed": {"classes": True, "weighted": True, "z_loss": 1e-2, "smoothing": 0.2, "full": True, "bias": True},
    "probabilities": {"classes": True, "mixed": True, "weighted": True, "smoothing": 0.1, "softcap": 3.0, "full": True},
    "frozen": {"mixed": True, "main": FP32, "frozen": "hidden"},
}


@ways
@pytest.mark.parametrize("options", CLASSES)
def test_class_weights_and_probabilities(options, way):
    for reduction in reductions_of(way):
        check(Case(way, reduction, BF16 if "frozen" in options else FP32, **CLASSES[options]))


LORAS = {
    "plain": {"lora": 3},
    "frozen": {"lora": 3, "frozen": "weight bias", "bias": True, "weighted": True, "softcap": 3.0},
    "wide": {"lora": 3, "wide": True, "bias": True, "z_loss": 1e-2},
    "main": {"lora": 9, "main": FP32, "masked": True, "frozen": "weight"},
    "kept": {"lora": 1, "kept": True, "full": True, "temperature": 0.7},
}


@ways
@pytest.mark.parametrize("options", LORAS)
def test_lora(options, way):
    """With either type in turns. A few rows, as a's, have errors of much spread: that takes more draws. In fp32 not by the
    worst row: its products sum in another order, as parts of one."""
    reductions, dtype = reductions_of(way), (FP32, BF16)[([*LORAS].index(options) + [*WAYS].index(way)) % 2]
    check(Case(way, reductions[len(options) % len(reductions)], dtype, **LORAS[options]), seeds=10, worst=dtype is not FP32)


@pytest.mark.parametrize("way", ("keep_logits", "known_grad_scale"))
def test_lora_in_fp16(way):
    check(Case(way, dtype=FP16, lora=3, bias=True), seeds=10)


@ways
@pytest.mark.parametrize("left", ("hidden", "lora_a", "lora_b", "hidden lora_a", "hidden lora_b"))
def test_what_is_frozen_beside_lora(left, way):
    check(Case(way, dtype=BF16, lora=3, frozen=f"weight {left}"), seeds=4)


@ways
@pytest.mark.parametrize("left", frozen)
def test_whatever_is_frozen(left, way):
    case = Case(way, dtype=BF16, bias=True, weighted=True, frozen=left, smoothing=0.1)
    check(case)
    check(replace(case, main=FP32, dtype=FP32, full=True))


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_pieces_of_all_sizes(dtype):
    """One token or one column too many or too few, and pieces of one."""
    for rows in (1, 13, 14, 15, ALL):
        for columns in (1, 63, 64, 65, ALL):
            case = Case(("recompute", rows, columns), dtype=dtype, lead=(14,), V=65)
            check(case, seeds=1)
            if columns == ALL:
                for way in ("grad_in_forward", "known_grad_scale", "loss_only"):
                    check(replace(case, mode=(way, rows, ALL), frozen="hidden weight" if way == "loss_only" else ""), seeds=1)


def test_large_logits_and_rare_tokens():
    """Softmaxes of one token, tokens of no probability, and a vocabulary whose gradients of the others are all small."""
    for way in ("keep_logits", "grad_in_forward", "both"):
        for dtype in (FP32, BF16):
            check(Case(way, "sum", dtype, V=3000, lead=(40,)), seeds=1)
        check(Case(way, "sum", BF16, scale=8.0))


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])
@pytest.mark.parametrize("way", ("keep_logits", "known_grad_scale", ("recompute", 4, 96)), ids=str)
def test_fp32_logits_of_several_hundreds(way, backend):
    """PyTorch's own loss takes the largest logit off first; with a logsumexp rounded to fp32 ours would be 100 times as far off.
    The products are exact: quarters of integers, and a bias of 512."""
    quarters = lambda *shape: torch.randint(-6, 7, shape, device=DEVICE) / 4  # noqa: E731
    given, labels = [quarters(12, 16), quarters(160, 16), quarters(160) + 512], torch.randint(160, (12,), device=DEVICE)

    def computed(loss, dtype):
        hidden, weight, bias = leaves = [t.detach().to(dtype).requires_grad_() for t in given]
        value = loss(hidden, weight, bias)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    ours = computed(lambda h, w, b: op(way, backend=backend, reduction="sum")(h, w, labels, b), FP32)
    theirs, exact = (
        computed(lambda h, w, b: F.cross_entropy(F.linear(h, w, b), labels, reduction="sum"), dtype) for dtype in (FP32, FP64)
    )
    for name, a, b, c in zip(("loss", "dhidden", "dweight", "dbias"), ours, theirs, exact, strict=True):
        far, allowed = ((t - c).norm() / c.norm() for t in (a, b))
        assert far <= 2 * allowed + 2e-7, f"{name}: {far:.2e}, PyTorch's {allowed:.2e}"


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])
def test_a_cap_that_most_logits_reach(backend):
    """Its derivative is small there, and a difference of almost equal numbers if it is made of the capped logits."""
    check(Case("known_grad_scale", "sum", FP32, (12,), softcap=3.0, scale=1.5, smoothing=0.2), backend)


KERNELS = [  # few and fat: a program costs about the same whatever the size of its block
    Case("keep_logits", "none", BF16, (3, 5), smoothing=0.1, z_loss=1e-2, bias=True, full=True),
    Case("keep_logits", "mean", FP16, (12,), V=129, softcap=3.0, weighted=True),
    Case("grad_in_forward", "mean", BF16, (20,), V=161, smoothing=0.1, z_loss=1e-2, full=True),
    Case("grad_in_forward", "sum", FP32, (5,), V=9001, softcap=3.0, scale=0.5, smoothing=0.2),
    Case("known_grad_scale", "mean", BF16, (4,), V=9001, full=True, softcap=3.0),
    Case("known_grad_scale", "none", FP16, (18,), wide=True, bias=True, main=FP32, ignore_index=0),
    Case("known_grad_scale", "mean", BF16, (6,), V=4200, smoothing=0.3, weighted=True),
    Case("known_grad_scale", "sum", BF16, (2,), D=32, V=40003, smoothing=0.1),
    Case("known_grad_scale", "sum", BF16, (2,), D=32, V=70001, z_loss=1e-2),
    Case("both", "none", BF16, (20,), V=130, full=True, smoothing=0.1, main=BF16),
    Case("both", "none", BF16, (20,), V=130, full=True, smoothing=0.1, bias=True, lora=5, frozen="weight"),
    Case("grad_in_forward", "mean", BF16, (20,), V=9001, lora=5, frozen="weight"),
    Case(("recompute", 6, 2500), "mean", FP32, (8,), V=6001, full=True, z_loss=1e-2, bias=True),
    Case("blocks", "sum", FP16, (9,), wide=True, softcap=2.0, scale=1.5),
    Case("known_grad_scale", "mean", BF16, (5,), V=2100, mixed=True, classes=True, smoothing=0.1),
    Case(("recompute", 3, 1000), "none", BF16, (5,), V=2100, mixed=True, full=True),
    Case("both", "mean", FP32, (18,), V=130, classes=True, smoothing=0.2, z_loss=1e-2, weighted=True),
    Case(("loss_only", 8, ALL), "mean", BF16, (11,), V=2100, frozen="hidden weight", full=False, smoothing=0.1),
]


@needs_triton
@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_the_kernels(case):
    check(case, "triton", 1)
