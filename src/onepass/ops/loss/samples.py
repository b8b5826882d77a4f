"""Sample calls of cross_entropy and linear_cross_entropy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.ops.loss import row_kernels, whole_row_kernels
from onepass.ops.loss.cross_entropy import cross_entropy, cross_entropy_reference
from onepass.ops.loss.formula import STATISTICS, LossTerms, check_statistics
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from onepass.ops.loss.targets import VocabColumns
from onepass.product.lora_samples import LoRASample, random_lora, with_lora
from onepass.runtime.random_calls import FP32, FP64, Draw, RandomCall, RandomTensor
from onepass.runtime.samples import (
    CoveringCall,
    Sample,
    give_main_grad,
    meta,
    random_tensors,
)
from onepass.runtime.sizes import ceil_div


def _with_labels(shapes: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Logits, or what they are made of, and labels of which one is ignored."""
    labels = torch.arange(11).mul(7).remainder(203)
    labels[5] = -100
    return *random_tensors(shapes, device, dtype), labels.to(device)


def _with_probabilities(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Logits, probabilities and class weights."""
    logits, targets, weight = random_tensors(((11, 203), (11, 203), (203,)), device, dtype)
    return logits, targets.softmax(-1), weight.abs()


def _with_head_and_probabilities(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Hidden states, a head's weight, probabilities and class weights."""
    _, targets, weight = _with_probabilities(device, dtype)
    return *random_tensors(((11, 61), (203, 61)), device, dtype), targets, weight


def lora_floor(dtype: torch.dtype) -> float:
    """An absolute error of a LoRA's a's gradient, for inputs of size 1: logits' gradients times b are rounded to 16 bits."""
    return 2.0**-24 if dtype is torch.float16 else 0.0


SAMPLES = {
    "cross_entropy": Sample(
        partial(_with_labels, ((11, 203),)), cross_entropy_reference, {"label_smoothing": 0.1, "z_loss": 1e-3}
    ),
    "cross_entropy: probabilities": Sample(
        _with_probabilities, cross_entropy_reference, {"label_smoothing": 0.1, "softcap": 3.0}, keywords=("weight",), frozen=2
    ),
    "linear_cross_entropy": Sample(
        partial(_with_labels, ((11, 61), (203, 61))),
        linear_cross_entropy_reference,
        {"reduction": "none", "logit_scale": 0.2},
    ),
    "linear_cross_entropy: probabilities": Sample(
        _with_head_and_probabilities,
        linear_cross_entropy_reference,
        {"label_smoothing": 0.1, "logit_scale": 0.2},
        keywords=("class_weight",),
        frozen=2,
    ),
    "linear_cross_entropy: lora": LoRASample(
        partial(_with_labels, ((11, 61), (203, 61), (5, 61), (203, 5))),
        linear_cross_entropy_reference,
        {"logit_scale": 0.1},
        keywords=("hidden", "weight", "lora.a", "lora.b", "labels"),
    ),
}


SHAPES_OF = {
    "linear_cross_entropy": {
        "token_weight": lambda x, given: x.shape[:-1],
        **dict.fromkeys(("bias", "class_weight"), lambda x, given: given["weight"][:1]),
    }
}
TYPES_OF = {"labels": torch.int64}


# ---- random calls ----


def _random_loss(draw: Draw) -> tuple[dict[str, Any], tuple[int, ...], int, RandomTensor]:
    """Return the options that both losses have, the labels' shape, the vocabulary, and the labels."""
    vocabulary, lead = draw.width(), draw.lead()
    options: dict[str, Any] = {
        "reduction": draw.choose(("mean", "sum", "none")),
        "ignore_index": draw.choose((-100, 0)),
        "label_smoothing": draw.choose((0.0, 0.1 if vocabulary > 1 else 0.0)),  # of one label, all that is left is 0.9 + 0.1 - 1
        "z_loss": draw.choose((0.0, 1e-3)),
    }
    return options, lead, vocabulary, RandomTensor(lead, torch.int64, "labels", False, vocabulary, options["ignore_index"])


def _random_cross_entropy(draw: Draw) -> RandomCall:
    options, lead, vocabulary, labels = _random_loss(draw)
    dtype, over = draw.dtype(), draw.flag(0.2)
    tensors = {"logits": RandomTensor((*lead, vocabulary), dtype), "labels": labels}
    options["softcap"] = draw.choose((None, 5.0))
    options["return_stats"] = draw.choose((False, False, True, STATISTICS, ("entropy",), ("z_loss", "mean_logit")))
    tensors |= _random_targets(draw, options, lead, vocabulary, "weight")

    def formula(**given: Any) -> Any:
        result = cross_entropy_reference(**given, **options)
        return (result[0], *(t for t in result[1] if t is not None)) if options["return_stats"] else result

    written = ("logits",) if over else ()

    def floors(given: dict[str, Tensor]) -> dict[str, float]:
        logits = given["logits"]
        # of 16-bit logits the logsumexp is kept in fp32, and a probability is off by its rounding
        size = _size(logits) if dtype is not FP32 else 1.0
        rows = logits.numel() // vocabulary
        sums = {"y0": _ROUNDED * size * _summed(rows, options), "dlogits": _ROUNDED * size / _averaged(rows, options)}
        return sums | _of_statistics(logits, options)

    return RandomCall(tensors, {**options, "inplace_backward": over}, formula, written=written, finite=True, floors=floors)


def _random_targets(
    draw: Draw, options: dict[str, Any], lead: tuple[int, ...], vocabulary: int, name: str
) -> dict[str, RandomTensor]:  # fmt: skip
    """Return class weights and probabilities, or none. Probabilities change the options to those that they have."""
    tensors = {name: RandomTensor((vocabulary,), FP32, "constant")} if draw.flag(0.3) else {}
    if draw.flag(0.2):
        tensors["labels"] = RandomTensor((*lead, vocabulary), draw.choose((FP32, torch.bfloat16)), "constant")
        options["ignore_index"] = -100
        if options["return_stats"] in (True, STATISTICS):
            options["return_stats"] = ("logsumexp", "entropy", "z_loss")
    return tensors


_ROUNDED = 4e-6  # of a row's loss, and of its probabilities: logits and the logarithm of the vocabulary are rounded to fp32


def _of_statistics(logits: Tensor, options: dict[str, Any]) -> dict[str, float]:
    asked = check_statistics(options["return_stats"])
    floating = [name for name in asked if name != "correct"]  # as results are counted
    # beside fp64 that of one logit alone, whose statistics are exactly 0: it is multiplied by log2(e), and its logarithm rounded
    lost = _error_of_differences(logits, options["softcap"]) if logits.dtype is FP64 else torch.finfo(FP32).eps * _size(logits)
    floor = {"log_prob": lost, "entropy": _ROUNDED + lost, "log_sum_sq_probs": lost}  # an entropy may be almost 0
    return {f"y{i}": floor[name] for i, name in enumerate(floating, 1) if name in floor}


def _error_of_differences(logits: Tensor, softcap: float | None) -> float:
    """Bound the error of statistics that the formula makes as a logsumexp's difference. In fp64 it is the exact result too.

    The entropy is logsumexp - sum(p * logits). Each rounding is an error of eps / 2 times the logits' size. There is one of the
    logsumexp, and three of exp, p and p * logits. That of logits - max, within p, comes to at most the entropy times as much, so
    0.7 log2(V), and the sum over V, in levels, to about 2 log2(V). A softmax on a CPU adds up V / 4 numbers in each lane, in
    turn, and equal ones may all be rounded alike. log_prob has one of these, log_sum_sq_probs four.
    """
    V, size = logits.shape[-1], min(_size(logits), softcap or math.inf)
    roundings = 4 + 3 * math.log2(V) + V / 4
    return roundings / 2 * size * torch.finfo(FP32).eps  # floors are of fp32, and scaled to the type


def _size(t: Tensor) -> float:
    return max(1.0, float(t.detach().float().nan_to_num(0, 0, 0).abs().amax())) if t.numel() else 1.0


def _summed(rows: int, options: dict[str, Any]) -> float:
    return float(max(1, rows)) if options["reduction"] == "sum" else 1.0


def _averaged(rows: int, options: dict[str, Any]) -> float:
    """Return what the gradient of a row is divided by. Gradients of statistics come whole."""
    return float(max(1, rows)) if options["reduction"] == "mean" and not options["return_stats"] else 1.0


def _random_linear_cross_entropy(draw: Draw) -> RandomCall:
    options, lead, vocabulary, labels = _random_loss(draw)
    dtype, width = draw.dtype(), draw.choose((8, 1, 17, 64, 100))
    tensors = {
        "hidden": RandomTensor((*lead, width), dtype, "tame"),
        "weight": RandomTensor((vocabulary, width), dtype, "tame weight", True, width),
        "labels": labels,
    }
    if draw.flag(0.3):
        tensors["bias"] = RandomTensor((vocabulary,), dtype, "tame", True)
    if draw.flag(0.3):
        tensors["token_weight"] = RandomTensor(lead, FP32, "positive")
    tensors |= random_lora(draw, "lora", vocabulary, width, dtype, "tame weight")
    options |= {
        "softcap": draw.choose((None, 5.0)),
        "logit_scale": draw.choose((1.0, 0.25)),
        "temperature": draw.choose((1.0, 0.7)),
        "return_stats": draw.choose((False, False, True, STATISTICS, ("entropy",), ("logsumexp", "mean_logit"))),
    }
    tensors |= _random_targets(draw, options, lead, vocabulary, "class_weight")

    def formula(**given: Any) -> Any:
        result = linear_cross_entropy_reference(**given, **options)
        return (result[0], *result[1]) if options["return_stats"] else result

    more: dict[str, Any] = {"chunk_bytes": draw.choose((None, 1 << 12))}
    more["logits_dtype"] = draw.choose((None, torch.promote_types(dtype, FP32)))
    # of an ignored row with NaN the formula makes 0 * NaN, the op 0; tests/ops/test_nonfinite.py has what both must say
    scaled = (2.0**12 if options["reduction"] == "mean" else 2.0**3) if dtype is torch.float16 else 1.0
    more["grad_scale"] = draw.choose((None, -scaled / 2), (3, 1))

    def floors(given: dict[str, Tensor]) -> dict[str, float]:
        rows = math.prod(lead)
        each = _ROUNDED * scaled / _averaged(rows, options)
        over_rows = each * max(1, rows) / vocabulary
        errors = {"dhidden": each * _size(given["weight"]), "dweight": over_rows * _size(given["hidden"]), "dbias": over_rows}
        errors["dlora.a"] = max(1, rows) * lora_floor(dtype) * _size(given["hidden"])
        errors |= {"y0": _ROUNDED * _summed(rows, options), "dtoken_weight": each}
        if not rows or "lora.a" in given:
            return errors
        logits = given["hidden"].detach() @ given["weight"].detach().T * (options["logit_scale"] / options["temperature"])
        return errors | _of_statistics(logits, options)

    return RandomCall(
        tensors, {**options, **more}, formula, True, finite=True, incoming=scaled, promised=more["grad_scale"], floors=floors,
        can_defer="lora.a" not in tensors, arguments=with_lora,
    )  # fmt: skip


RANDOM_CALLS = {"cross_entropy": _random_cross_entropy, "linear_cross_entropy": _random_linear_cross_entropy}

# ---- calls that launch every kernel, in every form that is shipped ----


def covering_calls() -> Iterator[CoveringCall]:
    yield from _cross_entropy_calls()
    yield from _linear_cross_entropy_calls()


def _cross_entropy_calls() -> Iterator[CoveringCall]:
    """Vocabularies of all alignments, types and options at one; what ranks merge; statistics and gradient at once."""
    for width in (32000, 50257, 128256):
        yield _cross_entropy_call(width)
    for dtype in (torch.float16, torch.float32):
        yield _cross_entropy_call(128256, dtype)
    for option in ("smoothing", "over the logits", "sum", "probabilities"):
        yield _cross_entropy_call(128256, option=option)
    for width in (1000, 50257, 128256):
        for dtype in (torch.bfloat16, torch.float32):
            for terms in (LossTerms(), LossTerms(smoothing=0.1, softcap=30.0)):
                yield _both_call(width, dtype, terms)


def _cross_entropy_call(width: int, dtype: torch.dtype = torch.bfloat16, option: str = "") -> CoveringCall:
    def run() -> Tensor:
        logits, labels = meta(2048, width, dtype=dtype), torch.empty(2048, dtype=torch.int64, device="meta")
        over, smoothing = option == "over the logits", 0.1 if option == "smoothing" else 0.0
        inputs = logits * 1 if over else logits
        reduction, weight = "sum" if option == "sum" else "mean", None
        if option == "probabilities":
            labels, weight = meta(2048, width, dtype=torch.float32).detach(), meta(width, dtype=torch.float32).detach()
        loss: Tensor = cross_entropy(
            inputs, labels, reduction=reduction, weight=weight, label_smoothing=smoothing, inplace_backward=over,
            backend="triton",
        )  # fmt: skip
        return loss

    return CoveringCall(" ".join(filter(None, (f"cross_entropy 2048x{width}", option))), dtype, run)


def _both_call(width: int, dtype: torch.dtype, terms: LossTerms) -> CoveringCall:
    """Of whole rows whose incoming gradient is known, and of their statistics as one rank of several sends them."""

    def run() -> Tensor:
        x, labels = meta(2048, width, dtype=dtype), torch.empty(2048, dtype=torch.int64, device="meta")
        incoming, place = meta(2048, dtype=torch.float32), torch.empty(2, dtype=torch.int64, device="meta")
        whole_row_kernels.row_statistics_and_gradients(x, x, labels, terms, STATISTICS, incoming)
        columns = VocabColumns(0, 0, place)
        parts = row_kernels.merge_statistics(
            row_kernels.row_statistics(x, labels, terms, STATISTICS, columns), terms, STATISTICS
        )
        losses = row_kernels.finish_losses(torch.cat([parts, parts]), labels, terms, STATISTICS, dtype, columns)
        each = row_kernels.RowGradients(*[incoming] * 4)
        row_kernels.row_gradients(x, x, labels, terms, losses.logsumexp, losses.entropy, each, columns)
        return x

    option = "softcap and smoothing" if terms.softcap else ""
    return CoveringCall(" ".join(filter(None, (f"cross_entropy rows 2048x{width}", option))), dtype, run)


_OPTIONS: dict[str, dict[str, Any]] = {
    "smoothing": {"label_smoothing": 0.1},
    "classes": {"label_smoothing": 0.1},
    "all terms": {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 30.0, "logit_scale": 0.5},
}


_WHOLE_ROWS = 1 << 40  # bytes


_MODES: dict[str, dict[str, Any]] = {  # with options that leave the planner no other
    "known_grad_scale": {"grad_scale": 1.0},
    "keep_logits": {"reduction": "none", "chunk_bytes": _WHOLE_ROWS},
    "grad_in_forward": {"logits_dtype": torch.float32, "chunk_bytes": _WHOLE_ROWS},
    "recompute": {"reduction": "none", "logits_dtype": torch.float32, "chunk_bytes": _WHOLE_ROWS},
    "blocks": {"reduction": "none", "chunk_bytes": 1 << 20},
}


def _linear_cross_entropy_calls() -> Iterator[CoveringCall]:
    """Vocabularies that take each kind of tile of whole rows; every mode, all terms, types, statistics and main_grad at one; odd
    vocabularies, whose weight gets rows of zeros on a GPU."""
    for width in (1000, 32000, 50304, 128256):
        for mode in _MODES if width == 128256 else ("known_grad_scale", "grad_in_forward"):
            yield _linear_cross_entropy_call(width, mode)
        for option in ("smoothing", "all terms"):
            yield _linear_cross_entropy_call(width, "known_grad_scale", option=option)
    for mode in _MODES:
        yield _linear_cross_entropy_call(128256, mode, option="all terms")
    for mode in ("known_grad_scale", "keep_logits", "blocks"):
        for dtype in (torch.float16, torch.float32):
            yield _linear_cross_entropy_call(128256, mode, dtype)
        yield _linear_cross_entropy_call(128256, mode, option="main_grad")
    for mode in ("keep_logits", "recompute", "blocks"):
        yield _linear_cross_entropy_call(128256, mode, option="stats")
    for mode in ("known_grad_scale", "keep_logits", "blocks"):
        yield _linear_cross_entropy_call(128256, mode, option="mask")
    yield _linear_cross_entropy_call(128256, "known_grad_scale", option="classes")
    for width in (1001, 50257):
        for dtype in (torch.bfloat16, torch.float32):
            for terms in (LossTerms(), LossTerms(smoothing=0.1, z_loss=1e-3, softcap=30.0)):
                yield _padded_call(width, dtype, terms)


def _linear_cross_entropy_call(width: int, mode: str, dtype: torch.dtype = torch.bfloat16, option: str = "") -> CoveringCall:
    options = _MODES[mode] | _OPTIONS.get(option, {})

    def run() -> Tensor:
        hidden, weight = meta(2048, 64, dtype=dtype), meta(width, 64, dtype=dtype)
        labels = torch.empty(2048, dtype=torch.int64, device="meta")
        if option == "main_grad":
            give_main_grad(weight)
        mask = torch.empty(2048, ceil_div(width, 8), dtype=torch.uint8, device="meta") if option == "mask" else None
        classes = meta(width, dtype=torch.float32).detach() if option == "classes" else None
        asked = option == "stats"
        loss: Any = linear_cross_entropy(
            hidden, weight, labels, return_stats=asked, vocab_mask=mask, class_weight=classes, backend="triton", **options
        )
        return torch.cat([loss[0], *loss[1][:3]]) if asked else loss  # a gradient comes for each

    return CoveringCall(" ".join(filter(None, (f"linear_cross_entropy 2048x{width}", mode, option))), dtype, run)


def _padded_call(width: int, dtype: torch.dtype, terms: LossTerms) -> CoveringCall:
    """Of the logits that a weight with rows of zeros after its last gives; where they are fp32, their gradient lies beside."""

    def run() -> Tensor:
        room = ceil_div(width, 64) * 64
        buffer, labels = meta(2048, room, dtype=dtype), torch.empty(2048, dtype=torch.int64, device="meta")
        x, incoming = buffer[:, :width], meta(2048, dtype=torch.float32)
        out = meta(2048, room, dtype=torch.bfloat16)[:, :width] if dtype is torch.float32 else x
        whole_row_kernels.row_statistics_and_gradients(x, out, labels, terms, (), incoming, room)
        columns = VocabColumns(0, width, room=room)
        row_kernels.row_statistics(x, labels, terms, (), columns)
        each = row_kernels.RowGradients(incoming)
        row_kernels.row_gradients(x, out, labels, terms, incoming, None, each, columns)
        return buffer

    option = "all terms" if terms.softcap else ""
    return CoveringCall(" ".join(filter(None, (f"linear_cross_entropy rows 2048x{width}", option))), dtype, run)
