"""Sample calls of linear_divergence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onepass.ops.loss.linear_divergence import kernels, linear_divergence, linear_divergence_reference
from onepass.ops.loss.linear_divergence.formula import KINDS, PLANES, DivergenceTerms
from onepass.ops.loss.linear_divergence.rows import LogitRows
from onepass.ops.loss.samples import lora_floor
from onepass.product.lora_samples import LoRASample, random_lora, with_lora
from onepass.runtime.random_calls import FP32, Draw, RandomCall, RandomTensor
from onepass.runtime.samples import CoveringCall, Sample, give_main_grad, meta, random_tensors
from onepass.runtime.sizes import ceil_div


def _heads(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A student of 61 and a teacher of 45, with logits of about 2, and labels of which one is ignored."""
    labels = torch.arange(11)
    labels[5] = -100
    student, weight, teacher, teacher_weight = random_tensors(((11, 61), (203, 61), (11, 45), (203, 45)), device, dtype)
    return student, weight * 0.25, teacher, teacher_weight * 0.25, labels.to(device)


def _heads_with_lora(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    student, weight, *others = _heads(device, dtype)
    a, b = random_tensors(((5, 61), (203, 5)), device, dtype)
    return student, weight, a * 0.25, b * 0.5, *others


SAMPLES = {
    "linear_divergence": Sample(_heads, linear_divergence_reference, {"temperature": 0.7}, frozen=3),
    "linear_divergence: reverse_kl": Sample(
        _heads, linear_divergence_reference, {"kind": "reverse_kl", "reduction": "sum"}, frozen=3
    ),
    "linear_divergence: jsd of rows": Sample(
        _heads, linear_divergence_reference, {"kind": "jsd", "beta": 0.3, "reduction": "none", "softcap": 5.0}, frozen=3
    ),
    "linear_divergence: lora": LoRASample(
        _heads_with_lora, linear_divergence_reference, {"kind": "jsd"}, frozen=3,
        keywords=("student", "student_weight", "student_lora.a", "student_lora.b", "teacher", "teacher_weight", "labels"),
    ),
}
SHAPES_OF = {
    "linear_divergence": {
        "student_bias": lambda x, given: given["student_weight"][:1],
        "teacher_bias": lambda x, given: given["teacher_weight"][:1],
        "labels": lambda x, given: x.shape[:-1],
    }
}
TYPES_OF = {"labels": torch.int64}


# ---- random calls ----

_ROUNDED = 4e-6  # of a row's divergence, and of its probabilities: logits are rounded to fp32


def _random_divergence(draw: Draw) -> RandomCall:
    vocabulary, lead = draw.width(), draw.lead()
    dtype, widths = draw.dtype(), (draw.choose((8, 1, 17, 64)), draw.choose((8, 1, 33)))
    kind, ignore_index = draw.choose(KINDS), draw.choose((-100, 0))
    options: dict[str, Any] = {
        "kind": kind, "beta": draw.choose((0.5, 0.1)), "temperature": draw.choose((1.0, 2.0)),
        "softcap": draw.choose((None, 5.0)), "teacher_softcap": draw.choose((None, 5.0)),
        "reduction": draw.choose(("mean", "sum", "none")), "ignore_index": ignore_index,
    }  # fmt: skip
    tensors = {}
    for head, width in zip(("student", "teacher"), widths, strict=True):
        tensors[head] = RandomTensor((*lead, width), dtype, "tame")
        tensors[f"{head}_weight"] = RandomTensor((vocabulary, width), dtype, "tame weight", head == "student", width)
        if draw.flag(0.3):
            tensors[f"{head}_bias"] = RandomTensor((vocabulary,), dtype, "tame", head == "student")
    tensors |= random_lora(draw, "student_lora", vocabulary, widths[0], dtype, "tame weight")
    if draw.flag():
        tensors["labels"] = RandomTensor(lead, torch.int64, "labels", False, vocabulary, ignore_index)

    def formula(**given: Any) -> Tensor:
        return linear_divergence_reference(**given, **options)

    more = {"chunk_bytes": draw.choose((None, 1 << 12)), "logits_dtype": draw.choose((None, torch.promote_types(dtype, FP32)))}
    rows = max(1, math.prod(lead))
    scaled = (2.0**12 if options["reduction"] == "mean" else 2.0**3) if dtype is torch.float16 else 1.0

    def floors(given: dict[str, Tensor]) -> dict[str, float]:
        each = _ROUNDED * scaled / (rows if options["reduction"] == "mean" else 1)
        sizes = {name: max(1.0, float(t.detach().float().abs().amax())) if t.numel() else 1.0 for name, t in given.items()}
        return {
            "y0": _ROUNDED * (rows if options["reduction"] == "sum" else 1),
            "dstudent": each * sizes["student_weight"],
            "dstudent_weight": each * rows / vocabulary * sizes["student"],
            "dstudent_bias": each * rows / vocabulary,
            "dstudent_lora.a": rows * lora_floor(dtype) * sizes["student"],
        }

    constants = tuple(name for name in tensors if name.startswith("teacher"))
    return RandomCall(
        tensors, {**options, **more}, formula, True, constants, finite=True, incoming=scaled, floors=floors, arguments=with_lora
    )


RANDOM_CALLS = {"linear_divergence": _random_divergence}

# ---- calls that launch every kernel, in every form that is shipped ----

_ALL_LOGITS = 1 << 40  # bytes
_MODES: dict[str, dict[str, Any]] = {
    "grad_in_forward": {},
    "keep_logits": {"reduction": "none", "chunk_bytes": _ALL_LOGITS},
    "recompute": {"reduction": "none", "chunk_bytes": 1 << 20},
}


def covering_calls() -> Iterator[CoveringCall]:
    """Every kind in every mode at one vocabulary; narrow and odd ones; types, softcaps and temperatures; what ranks exchange."""
    for kind in KINDS:
        for mode in _MODES:
            yield _divergence_call(151936, mode, kind)
        for width in (1000, 32000):
            yield _divergence_call(width, "grad_in_forward", kind)
        for dtype in (torch.float16, torch.float32):
            yield _divergence_call(151936, "grad_in_forward", kind, dtype)
        yield _divergence_call(151936, "grad_in_forward", kind, option="all terms")
        for width in (50257, 151936):
            yield _shared_call(width, kind)
    yield _divergence_call(151936, "grad_in_forward", "forward_kl", option="main_grad")


_OPTIONS: dict[str, dict[str, Any]] = {"all terms": {"softcap": 30.0, "teacher_softcap": 50.0, "temperature": 2.0}}


def _divergence_call(width: int, mode: str, kind: str, dtype: torch.dtype = torch.bfloat16, option: str = "") -> CoveringCall:
    def run() -> Tensor:
        student, weight = meta(2048, 64, dtype=dtype), meta(width, 64, dtype=dtype)
        teacher, teacher_weight = meta(2048, 128, dtype=dtype), meta(width, 128, dtype=dtype)
        labels = torch.empty(2048, dtype=torch.int64, device="meta")
        if option == "main_grad":
            give_main_grad(weight)
        options = _MODES[mode] | _OPTIONS.get(option, {})
        return linear_divergence(student, weight, teacher, teacher_weight, labels, kind=kind, backend="triton", **options)

    return CoveringCall(" ".join(filter(None, (f"linear_divergence 2048x{width}", kind, mode, option))), dtype, run)


def _shared_call(width: int, kind: str) -> CoveringCall:
    """Rows of a rank that shares the vocabulary, whose odd number of columns gets columns of zeros."""

    def run() -> Tensor:
        room, dtype = ceil_div(width, 64) * 64, torch.bfloat16
        x, teacher = (meta(2048, room, dtype=dtype)[:, :width] for _ in range(2))
        labels, terms = torch.empty(2048, dtype=torch.int64, device="meta"), DivergenceTerms(kind=kind)
        numbers, incoming = meta(PLANES, 2048, dtype=torch.float32), meta(2048, dtype=torch.float32)
        logits = LogitRows(x, x, teacher, labels, room)
        kernels.row_statistics(logits, terms)
        if kind == "jsd":
            kernels.mixture_sums(logits, terms, numbers)
        kernels.row_gradients(logits, terms, numbers, incoming)
        kernels.whole_rows(logits, terms, numbers, incoming, True)
        return x

    return CoveringCall(f"linear_divergence rows 2048x{width} {kind}", torch.bfloat16, run)
