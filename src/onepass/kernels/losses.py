"""What the losses of rows of logits share: what they ask of labels and options, and how rows become one loss and back."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onepass.kernels.cross_entropy_formula import REDUCTIONS, Terms, inverse, kept_weight, reduced
from onepass.runtime.checks import check_number
from onepass.runtime.dispatch import transformed
from onepass.runtime.lang import tl
from onepass.runtime.launch import Bound, kernel
from onepass.runtime.validation import validating

_INT32, _INT64 = 1 << 31, 1 << 63
_REDUCED_AT_ONCE = 4096  # rows, whose losses one program reduces
_MOST_ROWS = 1 << 16  # that it does sooner than PyTorch's many


def check_labels(
    labels: Tensor, shape: torch.Size, device: torch.device, ignore_index: int, like: str = "logits"
) -> None:  # fmt: skip
    """One a row of what is `like`, and a token's number."""
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int32, torch.int64):
        kind = f"of {labels.dtype}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise TypeError(f"labels must be an int32 or int64 tensor, but is {kind}")
    if labels.shape != shape:
        raise ValueError(
            f"labels must have shape {tuple(shape)}, as {like} without its last dimension, but has {tuple(labels.shape)}"
        )
    if labels.device != device:
        raise ValueError(f"labels must be on {device}, as {like}, but is on {labels.device}")
    if labels.dtype is torch.int32 and type(ignore_index) is int and not -_INT32 <= ignore_index < _INT32:
        raise ValueError(f"ignore_index must be a number that int32 labels can hold, but is {ignore_index}")


def check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, but is {reduction!r}")


def check_terms(
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None = None, logit_scale: float = 1.0
) -> Terms:
    """What a row's loss is made of. Numbers become floats: kernels are compiled for their types."""
    if type(ignore_index) is not int:
        raise TypeError(f"ignore_index must be an integer, but is {ignore_index!r}, a {type(ignore_index).__name__}")
    if not -_INT64 <= ignore_index < _INT64:
        raise ValueError(f"ignore_index must be an integer that int64 holds, but is {ignore_index}")
    check_number("label_smoothing", label_smoothing)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, but is {label_smoothing!r}")
    check_number("z_loss", z_loss)
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss must be finite and at least 0, but is {z_loss!r}")
    if softcap is not None:
        check_number("softcap", softcap, optional=True)
        if not 0 < softcap < math.inf:
            raise ValueError(f"softcap must be finite and above 0, or None, but is {softcap!r}")
    check_number("logit_scale", logit_scale)
    if not -math.inf < logit_scale < math.inf:  # isfinite would break a compiled graph
        raise ValueError(f"logit_scale must be finite, but is {logit_scale!r}")
    return Terms(ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0), float(logit_scale))


def can_look(labels: Tensor) -> bool:
    """Whether the values of labels can be looked at, and at no cost to speak of or because that was asked for."""
    if labels.device.type != "cpu" and not validating():
        return False
    return not (torch.compiler.is_compiling() or labels.is_meta or isinstance(labels, FakeTensor) or transformed())


def look_at_labels(labels: Tensor, V: int, ignore_index: int) -> None:
    """Raise where a label is no token's, on a CPU and under validate(). Elsewhere such a row's loss is NaN."""
    if not can_look(labels) or not labels.numel():
        return
    least, most = labels.aminmax()
    if least >= 0 and most < V:  # the usual case, in one pass
        return
    wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= V))]
    if wrong.numel():
        raise IndexError(
            f"labels must be from 0 to {V - 1}, the tokens of the vocabulary, or ignore_index {ignore_index}, "
            f"but {wrong.numel()} of them are not: one is {wrong[0].item()}"
        )


def mean_scale(
    labels: Tensor, terms: Terms, reduction: str, dtype: torch.dtype, token_weight: Tensor | None = None, native: bool = False
) -> Tensor | None:
    """What a mean multiplies the sum by, and its incoming gradient too: 1 over what is kept, 0 where nothing is. Else None."""
    if reduction != "mean":
        return None
    if native and labels.shape[0] <= _MOST_ROWS:
        return _reduced_natively(None, labels, terms, reduction, token_weight)[1]
    return inverse(kept_weight(labels, terms, token_weight, dtype))


def reduced_rows(
    losses: Tensor, labels: Tensor, terms: Terms, reduction: str, token_weight: Tensor | None = None, native: bool = False,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The losses [rows], their sum or their mean, by one kernel where PyTorch takes eight; and a mean's `mean_scale`, which is
    the one given where it is known: the kernel makes it on the way."""
    if native and reduction != "none" and losses.shape[0] <= _MOST_ROWS:
        return _reduced_natively(losses, labels, terms, reduction, token_weight)
    if scale is None:
        scale = mean_scale(labels, terms, reduction, losses.dtype, token_weight)
    if scale is None:
        return reduced(losses, labels, terms, token_weight, reduction), None
    return reduced(losses, labels, terms, token_weight, "sum") * scale, scale


@kernel
def _reduce_kernel(labels_ptr, loss_ptr, weight_ptr, reduced_ptr, scale_ptr, M, ignore, BLOCK: tl.constexpr):
    """By one program, as there are few rows: always in the same order. A mean is asked for where its scale has a place, and
    only that scale where there are no losses."""
    total = tl.zeros([BLOCK], tl.float32)
    kept = tl.zeros([BLOCK], tl.float32)
    for first in range(0, M, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        counts = (rows < M) & (tl.load(labels_ptr + rows, mask=rows < M, other=0).to(tl.int64) != ignore)
        weight = tl.where(counts, 1.0, 0.0)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + rows, mask=counts, other=0.0).to(tl.float32)
        kept += weight
        if loss_ptr is not None:
            total += tl.load(loss_ptr + rows, mask=counts, other=0.0) * weight
    scale = 1.0
    if scale_ptr is not None:
        divisor = tl.sum(kept, 0)
        scale = tl.where(divisor == 0, 0.0, 1.0 / divisor)
        tl.store(scale_ptr, scale)
    if loss_ptr is not None:
        tl.store(reduced_ptr, tl.sum(total, 0) * scale)


@lru_cache(64)
def _reduce_plan(ignore_index: int) -> Bound:
    bound: Bound = _reduce_kernel.bind(ignore_index, _REDUCED_AT_ONCE, num_warps=16)
    return bound


def _reduced_natively(
    losses: Tensor | None, labels: Tensor, terms: Terms, reduction: str, token_weight: Tensor | None
) -> tuple[Any, Tensor | None]:
    result = None if losses is None else losses.new_empty(())
    scale = labels.new_empty((), dtype=torch.float32) if reduction == "mean" else None
    weight = None if token_weight is None else token_weight.reshape(labels.shape).contiguous()
    _reduce_plan(terms.ignore_index)((1, 1, 1), labels, losses, weight, result, scale, labels.shape[0])
    return result, scale


def row_gradient(
    incoming: Tensor, reduction: str, rows: int, scale: Tensor | None = None, token_weight: Tensor | None = None
) -> Tensor:
    """[rows]: what comes back for each row's own loss, of the incoming gradient of what they were reduced to."""
    g = incoming.reshape(rows) if reduction == "none" else incoming.expand(rows)
    if scale is not None:
        g = g * scale
    if token_weight is not None:
        g = g * token_weight.reshape(rows).to(g.dtype)
    return g.contiguous()
