"""Targets that are more than a label a row: probabilities of the classes, and weights of the classes, as in F.cross_entropy.

A row's loss is the sum over columns of mass * (logsumexp - logit). The mass of column c is w_c ((1 - a) q_c + a / V), with class
weights w, probabilities q (of a label, 1 in its column) and label smoothing a. Without smoothing a label's mass is all in its
column: then the class weight is the row's weight, and no kernel reads masses. A vocab_mask says which columns a row's
distribution has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onepass.runtime.checks import check_floating
from onepass.runtime.sizes import ceil_div


class Targets(NamedTuple):
    """What the masses of all columns are made of."""

    probabilities: Tensor | None = None  # [rows, columns] of this rank
    class_weight: Tensor | None = None  # [V] of the whole vocabulary

    @property
    def label_weight(self) -> Tensor | None:
        """The class weights where a row's weight is its label's: z_loss is multiplied by it."""
        return self.class_weight if self.probabilities is None else None


class VocabColumns(NamedTuple):
    """Which columns of the vocabulary a block of logits has, and what is known of its rows in them."""

    first: int  # the block's first, among this rank's
    V: int  # of the whole vocabulary; not read where there is a place
    place: Tensor | None = None  # [2]: this rank's first token, and the number of all
    bits: Tensor | None = None  # the columns that the distribution has, [rows or 1, bytes]
    targets: Targets | None = None
    room: int = 0  # columns that a row of memory has, where they are more than the logits'; for kernels

    def of_rows(self, rows: slice) -> VocabColumns:
        bits, targets = self.bits, self.targets
        if bits is not None and bits.shape[0] > 1:
            bits = bits[rows]
        if targets is not None and targets.probabilities is not None:
            targets = targets._replace(probabilities=targets.probabilities[rows])
        return self._replace(bits=bits, targets=targets)


def as_targets(probabilities: Tensor | None, class_weight: Tensor | None) -> Targets | None:
    return None if probabilities is None and class_weight is None else Targets(probabilities, class_weight)


def split_labels(labels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return labels and no probabilities; of probabilities, a 0 for each row and the probabilities."""
    if not labels.is_floating_point():
        return labels, None
    return labels.new_zeros(labels.shape[:-1], dtype=torch.int64), labels


def has_masses(probabilities: Tensor | None, class_weight: Tensor | None, smoothing: float) -> bool:
    """Whether masses must be read: a row's target is not at its label alone, nor spread evenly."""
    return probabilities is not None or (class_weight is not None and smoothing != 0)


def target_mass(
    targets: Targets, labels: Tensor, smoothing: float, columns: Tensor, V: int | Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Return the masses [..., columns] of some columns, probabilities by their numbers in the whole vocabulary of size V."""
    probabilities = targets.probabilities
    q = (labels.unsqueeze(-1) == columns).to(dtype) if probabilities is None else probabilities.to(dtype)
    mass = q * (1 - smoothing)
    if smoothing:
        mass = mass + q.new_full((), smoothing) / V
    return mass if targets.class_weight is None else mass * weights_at(targets.class_weight, columns).to(dtype)


def weights_at(class_weight: Tensor, classes: Tensor) -> Tensor:
    """Return the weights of some classes, in fp32 or wider; NaN for those that there are not."""
    inside = classes.clamp(0, class_weight.shape[0] - 1)
    weights = class_weight[inside.long()].to(torch.promote_types(class_weight.dtype, torch.float32))
    return torch.where(inside == classes, weights, torch.nan)


class RowWeights(NamedTuple):
    """Weights of the rows, [rows]; None for ones."""

    of_losses: Tensor | None  # multiplies rows' losses
    of_mean: Tensor | None = None  # a mean divides by their sum, where that is not the first's

    def divisor(self) -> Tensor | None:
        """What a mean divides by the sum of."""
        return self.of_losses if self.of_mean is None else self.of_mean


def row_weights(
    labels: Tensor, ignore_index: int, probabilities: Tensor | None, class_weight: Tensor | None, smoothing: float,
    token_weight: Tensor | None = None,
) -> RowWeights:  # fmt: skip
    """Return the rows' weights: a token's times its label's. The losses made of masses have the label's already."""
    if class_weight is None or probabilities is not None:
        return RowWeights(token_weight)
    both = torch.where(labels != ignore_index, weights_at(class_weight, labels), 0.0)
    if token_weight is not None:
        both = both * token_weight
    return RowWeights(token_weight, both) if smoothing else RowWeights(both)


# ---- masks of columns: bits, the lowest of a byte first, [rows or 1, bytes] ----


def packed_mask(mask: Tensor) -> Tensor:
    """Return a mask as bits, [rows or 1, bytes]."""
    rows = mask.unsqueeze(0) if mask.dim() == 1 else mask.flatten(0, -2)
    if mask.dtype is torch.uint8:
        return rows.contiguous()
    rows = torch.nn.functional.pad(rows.to(torch.uint8), (0, -rows.shape[1] % 8))
    bits = rows.view(rows.shape[0], rows.shape[1] // 8, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)


def allowed_columns(mask: Tensor, first: int, columns: int) -> Tensor:
    """Return the bits of some columns as bools, [rows or 1, columns]."""
    at = torch.arange(first, first + columns, device=mask.device)
    return (mask[:, at >> 3] >> (at & 7).to(torch.uint8)) & 1 != 0


# ---- checks ----


def check_probabilities(
    labels: Tensor, shape: torch.Size, columns: int, device: torch.device, ignore_index: int, like: str
) -> None:  # fmt: skip
    """Raise unless labels of a floating type are a probability of each column for each row of the argument named `like`."""
    expected = (*shape, columns)
    if labels.shape != expected:
        raise ValueError(
            f"labels of {labels.dtype} are probabilities and must have shape {expected}, {like}'s rows by the vocabulary, but "
            f"has {tuple(labels.shape)}; tokens are of int32 or int64"
        )
    if labels.device != device:
        raise ValueError(f"labels must be on {device}, as {like}, but is on {labels.device}")
    if labels.requires_grad and torch.is_grad_enabled():
        raise ValueError("labels that are probabilities must be detached, as they get no gradient, but requires grad")
    if ignore_index != -100:
        raise ValueError(
            f"ignore_index must be left out where labels are probabilities, as no row is ignored, but is {ignore_index}"
        )


def check_class_weight(name: str, class_weight: Tensor | None, V: int | None, device: torch.device | None) -> None:
    """Raise unless each of V classes has a weight. V is None where ranks share the vocabulary: its size is on the device.

    device: None for any.
    """
    if class_weight is None:
        return
    check_floating(name, class_weight, True)
    if class_weight.dim() != 1 or class_weight.shape[0] != (max(1, class_weight.shape[0]) if V is None else V):
        expected = "one dimension, the whole vocabulary's" if V is None else f"shape {(V,)}"
        raise ValueError(f"{name} must have {expected}, a number for each class, but has shape {tuple(class_weight.shape)}")
    if device is not None and class_weight.device != device:
        raise ValueError(f"{name} must be on {device}, as the labels, but is on {class_weight.device}")
    if class_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must be detached, as it gets no gradient, but requires grad")


def check_vocab_mask(mask: Tensor, labels: Tensor, V: int, device: torch.device) -> None:
    """Raise unless the mask is bool or bits, of all rows or of each label's."""
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, torch.uint8):
        kind = f"of {mask.dtype}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise TypeError(f"vocab_mask must be a bool tensor or uint8 of bits, but is {kind}")
    width = V if mask.dtype is torch.bool else ceil_div(V, 8)
    if mask.shape != (width,) and mask.shape != (*labels.shape, width):
        raise ValueError(f"vocab_mask must have shape {(width,)} or {(*labels.shape, width)}, but has {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"vocab_mask must be on {device}, as hidden, but is on {mask.device}")
