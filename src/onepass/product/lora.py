"""What LoRA is to a layer: its record, what is wrong with one, and its formula, y += scale * dropout(rows) @ a.T @ b.T."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.kernels.philox import draw_seed, dropout_formula, row_numbers, threshold_of
from onepass.runtime.checks import check_device, check_floating, check_number
from onepass.runtime.dispatch import has_address, under_autocast, under_functorch
from onepass.runtime.process_setting import validating

MOST_DOCUMENTS = 1024  # a program of a kernel looks for its rows' documents among all ends at once
Scale = float | Sequence[float] | Tensor


class LoRA(NamedTuple):
    """What LoRA adds to a linear layer of rows x: ``scale * (dropout(x) @ a.T) @ b.T``.

    Of a layer that PEFT has wrapped: ``LoRA(layer.lora_A["default"].weight, layer.lora_B["default"].weight,
    layer.scaling["default"])``, beside ``layer.base_layer.weight``.

    Args:
        a: ``[r, K]``, of x's type or fp32, which is rounded to the product's type. Its gradient has its own type. With a tp_group
            it is whole on every rank, and so is its gradient, or has this rank's columns, as the weight does.
        b: ``[N, r]``, of the same types: this rank's rows, or all of them, as of the weight.
        scale: multiplies the product of both; alpha / r, or alpha / sqrt(r) for rsLoRA. With `ends` one number, or as many as
            documents: a sequence, or a tensor on x's device, which gets no gradient.
        rows: ``(first, last)``, the weight's rows that it changes, where several layers are one weight. b has as many. None: all.
        dropout: the probability that a number of x is dropped before a, as PEFT's ``lora_dropout``; 0 in evaluation. The layer's
            own product takes all of x. Adapters of one call share the mask. Backward makes it again.
        ends: ``[E]``, int32 or int64, on x's device: where the rows of each of E documents, flattened, end. Document i has an
            adapter of its own, ``a[i]`` and ``b[i]`` of ``[E, r, K]`` and ``[E, N, r]``. Rows after the last end have none.
    """

    a: Tensor
    b: Tensor
    scale: Any = 1.0  # a `Scale`
    rows: tuple[int, int] | None = None
    dropout: float = 0.0
    ends: Tensor | None = None


Adapters = LoRA | Sequence[LoRA] | None

# What makes a layer's product with its adapters, and the tensors that it takes. lora_product.py enters it when `onepass` is
# imported, and a layer without adapters reads nothing of it.
WITH_ADAPTERS: dict[type, Callable[[Any, Sequence[LoRA], Tensor, Tensor], tuple[Any, list[Tensor | None]]]] = {}


class LowRankRows:
    """The rows t of a product with adapters, whose b has the gradient dy.T @ t: who makes dy may make that in the same pass.

    The product marks its output with t, and the op that reads it keeps t among its saved tensors. That op's backward marks dy
    with the gradient. Both marks count while their tensor has the version that it was marked at. (A write to `.data` changes
    none.) The object itself holds t only from one function to the next.
    """

    __slots__ = ("t",)

    def __init__(self) -> None:
        self.t: Tensor | None = None

    def take(self) -> Tensor | None:
        t, self.t = self.t, None
        return t

    def mark(self, y: Tensor) -> None:
        y.low_rank_rows = self, self.take(), y._version  # type: ignore[attr-defined]

    def mark_gradient(self, dy: Tensor, db: Tensor) -> None:
        dy.low_rank_gradient = self, db, dy._version  # type: ignore[attr-defined]

    def gradient_beside(self, dy: Tensor) -> Tensor | None:
        """Return dy.T @ t, where it came with dy. A sum of several gradients is another tensor."""
        rows, db, version = getattr(dy, "low_rank_gradient", (None, None, None))
        return db if rows is self and version == dy._version else None


def marked_rows(x: Tensor) -> LowRankRows | None:
    """Return what marks the output of a product with adapters, with its t. A view or a changed x has nothing."""
    if torch.compiler.is_compiling():
        return None
    rows, t, version = getattr(x, "low_rank_rows", (None, None, None))
    if rows is None or t is None or version != x._version:
        return None
    rows.t = t
    return rows  # type: ignore[no-any-return]


def are_masked(adapters: Sequence[LoRA]) -> bool:
    """Whether adapters have documents or dropout, and need more than products of whole matrices."""
    return adapters[0].ends is not None or bool(adapters[0].dropout)


def check_adapter(name: str, lora: object, x: Tensor, weight: Tensor, like: str = "x", prefix: str | None = None) -> LoRA:
    """Return `lora`. Raise unless it goes with the weight and what it multiplies. `prefix` begins the names of a and b."""
    if not isinstance(lora, LoRA):
        raise TypeError(f"{name} must be an onepass.LoRA or None, but is a {type(lora).__name__}")
    of_tensors, of_options = (f"{name}.", f"{name}.") if prefix is None else (prefix, "")
    a, b, scale, rows, dropout, ends = lora
    lead: tuple[int, ...] = ()
    if ends is not None:
        check_ends(f"{of_options}ends", ends, x, like)
        lead = (ends.shape[0],)
    N, K = weight.shape
    if rows is not None:
        if type(rows) is not tuple or len(rows) != 2 or type(rows[0]) is not int or type(rows[1]) is not int:
            raise TypeError(f"{name}.rows must be None or a tuple of two ints, but is {rows!r}")
        first, last = rows
        if not 0 <= first < last <= N:
            raise ValueError(f"{name}.rows must be two of the weight's {N} rows, the first below the last, but is {rows}")
        N = last - first
    rank = a.shape[-2] if isinstance(a, Tensor) and a.dim() > 1 else "r"
    for named, value, shape in ((f"{of_tensors}a", a, (*lead, rank, K)), (f"{of_tensors}b", b, (*lead, N, rank))):
        check_floating(named, value)
        if value.shape != shape:
            raise ValueError(f"{named} must have shape ({', '.join(map(str, shape))}), but has {tuple(value.shape)}")
        if value.dtype not in (x.dtype, torch.float32) and not under_autocast(x):
            other = "" if x.dtype is torch.float32 else " or fp32"
            raise TypeError(f"{named} must have {like}'s type {x.dtype}{other}, but is {value.dtype}")
        check_device(named, value, x, like)
    if rank == 0:
        raise ValueError(f"{of_tensors}a must have at least one row, but has shape {tuple(a.shape)}")
    if type(scale) is not float or not -math.inf < scale < math.inf:
        _check_scale(f"{of_options}scale", scale, ends, x)
    if dropout:
        threshold_of(f"{of_options}dropout", dropout)
    return lora


def _check_scale(name: str, scale: Any, ends: Tensor | None, x: Tensor) -> None:
    if isinstance(scale, Tensor) and ends is not None:
        if scale.shape != ends.shape or not scale.is_floating_point() or scale.requires_grad:
            what = f"floating-point numbers, {tuple(ends.shape)} as ends, which ask for no gradient"
            asks = ", which asks for one" if scale.requires_grad else ""
            raise ValueError(f"{name} must be {what}, but is of {scale.dtype} and has shape {tuple(scale.shape)}{asks}")
        check_device(name, scale, x)
        return
    several = ends is not None and isinstance(scale, Sequence) and not isinstance(scale, str)
    if several and ends is not None and len(scale) != ends.shape[0]:
        raise ValueError(f"{name} must be one number, or one for each of {ends.shape[0]} documents, but has {len(scale)}")
    for number in scale if several else (scale,):
        check_number(name, number)
        if not -math.inf < number < math.inf:
            raise ValueError(f"{name} must be finite, but is {number!r}")


def adapters_of(lora: Adapters) -> Sequence[LoRA]:
    """Return a layer's adapters, none or several."""
    if lora is None:
        return ()
    return [lora] if isinstance(lora, LoRA) else lora


def check_adapters(lora: Adapters, x: Tensor, weight: Tensor) -> Sequence[LoRA]:
    """Return a layer's adapters. Raise where one doesn't go with the layer."""
    if lora is None:
        return ()
    if isinstance(lora, LoRA) or not isinstance(lora, Sequence):
        return [check_adapter("lora", lora, x, weight)]
    adapters = [check_adapter(f"lora[{i}]", one, x, weight) for i, one in enumerate(lora)]
    if len(adapters) > 1:
        N = weight.shape[0]
        for rows, after in pairwise(sorted([one.rows or (0, N) for one in adapters])):
            if rows != after and after[0] < rows[1]:
                raise ValueError(f"lora must change the same rows of the weight or others, but {rows} and {after} overlap")
        first = adapters[0]
        for i, one in enumerate(adapters):
            if one.ends is not first.ends:
                raise ValueError(f"lora[{i}].ends must be lora[0].ends itself: adapters of one call have the same documents")
            if one.dropout != first.dropout:
                what = f"{first.dropout}, as lora[0]'s, as adapters of one call share a mask"
                raise ValueError(f"lora[{i}].dropout must be {what}, but is {one.dropout}")
    return adapters


# ---- documents ----


def check_ends(name: str, ends: object, x: Tensor, like: str = "x") -> None:
    if not isinstance(ends, Tensor) or ends.dtype not in (torch.int32, torch.int64):
        kind = f"one of {ends.dtype}" if isinstance(ends, Tensor) else f"a {type(ends).__name__}"
        raise TypeError(f"{name} must be a tensor of torch.int32 or torch.int64, or None, but is {kind}")
    if ends.dim() != 1 or not 1 <= ends.shape[0] <= MOST_DOCUMENTS:
        raise ValueError(f"{name} must have shape [E], of 1 to {MOST_DOCUMENTS} documents, but has {tuple(ends.shape)}")
    check_device(name, ends, x, like)


def check_ends_of(ends: Tensor | None, M: int) -> None:
    """Raise where ends are wrong, if the host may know: on a GPU only under `validate()`, as results are NaN otherwise."""
    if ends is None or not has_address(ends) or under_functorch() or not (ends.device.type == "cpu" or validating()):
        return
    numbers = ends.tolist()
    for before, end in pairwise((0, *numbers)):
        if end < before:
            raise ValueError(f"ends must not fall, nor be below 0, but go from {before} to {end}")
    if numbers[-1] > M:
        raise ValueError(f"ends must be at most {M}, the number of rows, but the last is {numbers[-1]}")


# ---- the formula ----


def add_adapters(y: Tensor, rows: Tensor, adapters: Sequence[LoRA]) -> Tensor:
    """Return y and what adapters add to it, by the formula, for every type."""
    if not adapters:
        return y
    if adapters[0].dropout:
        wide, threshold = torch.promote_types(rows.dtype, torch.float32), threshold_of("dropout", adapters[0].dropout)
        rows = dropout_formula(rows.to(wide), draw_seed(rows), row_numbers(rows), threshold).to(rows.dtype)
    for lora in adapters:
        added = lora.scale * _both(rows, lora.a, lora.b) if lora.ends is None else _by_document(rows, lora, lora.ends)
        y = y + (added if lora.rows is None else F.pad(added, (lora.rows[0], y.shape[-1] - lora.rows[1])))
    return y


def _both(rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.linear(rows, a.to(rows.dtype)), b.to(rows.dtype))


def _by_document(rows: Tensor, lora: LoRA, ends: Tensor) -> Tensor:
    """All rows meet all adapters, and each keeps its own's."""
    check_ends_of(ends, rows.shape[:-1].numel())
    documents = torch.searchsorted(ends, row_numbers(rows), right=True).unsqueeze(-1)
    added = rows.new_zeros(*rows.shape[:-1], lora.b.shape[-2])
    for e in range(ends.shape[0]):
        scale: Any = lora.scale if isinstance(lora.scale, (int, float)) else lora.scale[e]
        added = torch.where(documents == e, scale * _both(rows, lora.a[e], lora.b[e]), added)
    return added


def describe_adapters(lora: Adapters) -> str:
    """Return what `explain` says of them after the products."""
    adapters = adapters_of(lora)
    if not adapters:
        return ""
    ranks, first = ", ".join([str(one.a.shape[-2]) for one in adapters]), adapters[0]
    documents = "" if first.ends is None else f" for each of {first.ends.shape[0]} documents"
    return f", LoRA of rank {ranks}{documents}{' with dropout' if first.dropout else ''} around them"
