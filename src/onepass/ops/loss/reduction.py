"""Checks of labels and options, and the reduction of rows' losses with its gradient: shared by both ops."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onepass.kernels.language import tl
from onepass.kernels.launch import Bound, kernel
from onepass.ops.loss.formula import (
    REDUCTIONS,
    LossTerms,
    inverse_count,
    kept_weight,
    reduce_losses,
)
from onepass.ops.loss.targets import check_probabilities
from onepass.runtime.checks import check_number, value_range
from onepass.runtime.dispatch import under_functorch
from onepass.runtime.process_setting import validating

_INT32, _INT64 = 1 << 31, 1 << 63
_REDUCED_AT_ONCE = 4096  # rows, whose losses one program reduces
_MOST_ROWS = 1 << 16  # that it does sooner than PyTorch's many


def check_labels(
    labels: Tensor, shape: torch.Size, device: torch.device, ignore_index: int, like: str = "logits", columns: int | None = None
) -> None:  # fmt: skip
    """Raise unless there is an integer label, or a probability of each of the columns, for each row of the argument `like`.

    columns: None where the op takes no probabilities.
    """
    if columns is not None and isinstance(labels, Tensor) and labels.is_floating_point():
        check_probabilities(labels, shape, columns, device, ignore_index, like)
        return
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int32, torch.int64):
        kind = f"of {labels.dtype}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        others = "" if columns is None else ", or probabilities of a floating type"
        raise TypeError(f"labels must be an int32 or int64 tensor{others}, but is {kind}")
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
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None = None, logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> LossTerms:  # fmt: skip
    """Check the terms of a loss and make numbers floats: kernels are compiled for their types.

    A temperature divides the scale and the cap: c tanh(s x / c) / T is c/T tanh((s/T) x / (c/T)).
    """
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
    check_number("temperature", temperature)
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be finite and above 0, but is {temperature!r}")
    cap, scale = float(softcap or 0.0) / temperature, float(logit_scale) / temperature
    return LossTerms(ignore_index, float(label_smoothing), float(z_loss), cap, scale)


def check_logits(product: torch.dtype, logits_dtype: torch.dtype | None, chunk_bytes: int | None) -> None:
    """Check of which type a head of products of a type keeps logits, and how many bytes of them."""
    wide = torch.promote_types(product, torch.float32)
    if logits_dtype is not None and logits_dtype not in (product, wide):
        narrow = "" if product == wide else f" or the operands' {product}"
        raise ValueError(f"logits_dtype must be {wide}{narrow}, or None, but is {logits_dtype}")
    if chunk_bytes is not None and (type(chunk_bytes) is not int or chunk_bytes < 1):
        raise ValueError(f"chunk_bytes must be a number of bytes of at least 1, or None, but is {chunk_bytes!r}")


def can_validate_labels(labels: Tensor) -> bool:
    """Whether the labels have values, and reading them is cheap (on a CPU) or was asked for by `validate`."""
    if labels.device.type != "cpu" and not validating():
        return False
    return not (torch.compiler.is_compiling() or labels.is_meta or isinstance(labels, FakeTensor) or under_functorch())


def validate_labels(labels: Tensor, V: int, ignore_index: int) -> None:
    """On a CPU and under validate(), raise if a label is out of range. Elsewhere such a row's loss is NaN."""
    if not can_validate_labels(labels) or not labels.numel():
        return
    least, most = value_range(labels)
    if least >= 0 and most < V:  # the usual case, in one pass
        return
    wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= V))]
    if wrong.numel():
        raise IndexError(
            f"labels must be from 0 to {V - 1}, the tokens of the vocabulary, or ignore_index {ignore_index}, "
            f"but {wrong.numel()} of them are not: one is {wrong[0].item()}"
        )


def mean_scale(
    labels: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype, token_weight: Tensor | None = None,
    use_triton: bool = False,
) -> Tensor | None:  # fmt: skip
    """The factor of a mean, for the sum of losses and for the incoming gradient: 1 / `kept_weight`. None if there is no mean."""
    if reduction != "mean":
        return None
    if use_triton and labels.shape[0] <= _MOST_ROWS:
        return _reduce_by_kernel(None, labels, ignore_index, reduction, token_weight)[1]
    return inverse_count(kept_weight(labels, ignore_index, token_weight, dtype))


def reduce_rows(
    losses: Tensor, labels: Tensor, ignore_index: int, reduction: str, token_weight: Tensor | None = None,
    use_triton: bool = False, scale: Tensor | None = None, of_mean: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return losses [rows] reduced, by one kernel where PyTorch takes eight, and `mean_scale`.

    `scale` is the mean's factor if it is known already. The kernel ignores it and computes its own on the way. `of_mean`: weights
    by whose sum a mean divides, if they aren't the losses'.
    """
    if use_triton and reduction != "none" and of_mean is None and losses.shape[0] <= _MOST_ROWS:
        return _reduce_by_kernel(losses, labels, ignore_index, reduction, token_weight)
    if scale is None:
        divisor = token_weight if of_mean is None else of_mean
        scale = mean_scale(labels, ignore_index, reduction, losses.dtype, divisor)
    if scale is None:
        return reduce_losses(losses, labels, ignore_index, token_weight, reduction), None
    return reduce_losses(losses, labels, ignore_index, token_weight, "sum") * scale, scale


@kernel
def _reduce_kernel(labels_ptr, loss_ptr, weight_ptr, reduced_ptr, scale_ptr, M, ignore, BLOCK: tl.constexpr):
    """One program sums all rows, so the order is always the same. A mean passes `scale_ptr`; without losses only its scale is
    computed."""
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


def _reduce_by_kernel(
    losses: Tensor | None, labels: Tensor, ignore_index: int, reduction: str, token_weight: Tensor | None
) -> tuple[Any, Tensor | None]:
    result = None if losses is None else losses.new_empty(())
    scale = labels.new_empty((), dtype=torch.float32) if reduction == "mean" else None
    weight = None if token_weight is None else token_weight.reshape(labels.shape).contiguous()
    _reduce_plan(ignore_index)((1, 1, 1), labels, losses, weight, result, scale, labels.shape[0])
    return result, scale


def row_gradient(
    incoming: Tensor, reduction: str, rows: int, scale: Tensor | None = None, token_weight: Tensor | None = None
) -> Tensor:
    """Gradients [rows] of each row's own loss, from the incoming gradient of their reduction."""
    g = incoming.reshape(rows) if reduction == "none" else incoming.expand(rows)
    if scale is not None:
        g = g * scale
    if token_weight is not None:
        g = g * token_weight.reshape(rows).to(g.dtype)
    return g.contiguous()
