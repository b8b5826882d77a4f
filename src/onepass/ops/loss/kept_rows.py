"""Rows that have a loss: found when labels appear, so that an op later computes these alone and nobody waits for their number.

A GPU's host has to know how many rows a product has. `kept_rows` puts the question at the start of a step, behind nothing but the
labels; the answer lies in pinned memory long before the head begins, under the model's own work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onepass.distributed.collectives import group_of_several
from onepass.runtime.dispatch import under_functorch
from onepass.runtime.sizes import ceil_div

_GRAIN = 128  # rows by which a GPU's products grow: few sizes, and memory that fits again


class RowSelection(NamedTuple):
    """The rows that are computed, in their order: all that are kept and, up to a round number, some that are not."""

    whole: Tensor  # of all ranks' parts, one after the other; numbers of labels' rows
    own: Tensor  # of this rank's part; numbers of hidden's rows

    def take(self, values: Tensor) -> Tensor:
        """Return these rows of `values`, one a label."""
        return values.index_select(0, self.whole)

    def put(self, values: Tensor, rows: int) -> Tensor:
        """Return `rows` values, one a label: these, and zeros."""
        return values.new_zeros(rows).index_copy_(0, self.whole, values)

    def put_own(self, values: Tensor, rows: int) -> Tensor:
        """Return `rows` of hidden's rows: these, and zeros."""
        return values.new_zeros(rows, *values.shape[1:]).index_copy_(0, self.own, values)


class KeptRows:
    """Which rows of some labels have a loss. `kept_rows` makes it."""

    def __init__(self, labels: Tensor, ignore_index: int, parts: int) -> None:
        """parts: of labels' rows, one a rank, where ranks divide the sequence."""
        self.labels, self.ignore_index, self.parts = labels.detach(), ignore_index, parts  # held, or its address is another's
        self._version = None if labels.is_inference() else labels._version
        kept = labels.reshape(parts, -1) != ignore_index
        self._order = kept.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)  # those that are kept first
        self._counts = self._known = kept.sum(-1)
        self._event: torch.cuda.Event | None = None
        if labels.is_cuda:
            with torch.cuda.device(labels.device):
                self._known = torch.empty(parts, dtype=torch.int64, device="cpu", pin_memory=True)
                self._known.copy_(self._counts, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()

    def counts(self) -> list[int]:
        """The number of kept rows of each part. It waits for the labels, and for nothing that came after them."""
        if self._event is not None:
            self._event.synchronize()
        return self._known.tolist()

    def __repr__(self) -> str:
        return f"KeptRows({sum(self.counts())} of {self.labels.numel()})"

    def selection(self, rank: int, device: torch.device) -> RowSelection | None:
        """Return the rows that are computed, or None for all. Every rank computes as many of its part."""
        own = self._order.shape[1]
        grain = _GRAIN if device.type == "cuda" else 1
        rows = min(own, ceil_div(max(self.counts()), grain) * grain)
        if rows == own:
            return None
        order = self._order[:, :rows].to(device, non_blocking=True)
        if self.parts == 1:
            return RowSelection(order[0], order[0])
        first = torch.arange(0, self.parts * own, own, device=device).unsqueeze(-1)
        return RowSelection((order + first).reshape(-1), order[rank])

    def mismatch(self, labels: Tensor) -> Tensor | None:
        """Return whether these rows are other labels', as a tensor: reading it may wait. None if they are certainly not."""
        ours = self.labels
        seen = labels.dtype, labels.device, labels.data_ptr(), None if labels.is_inference() else labels._version
        same = seen == (ours.dtype, ours.device, ours.data_ptr(), self._version) and seen[-1] is not None
        if same and labels.is_contiguous() and ours.is_contiguous():
            return None
        kept = labels.reshape(self.parts, -1) != self.ignore_index
        order, counts = (t.to(labels.device, non_blocking=True) for t in (self._order, self._counts))
        first = torch.arange(order.shape[1], device=labels.device) < counts.unsqueeze(-1)
        return (kept.gather(1, order) != first).any()


def kept_rows(
    labels: Tensor, ignore_index: int = -100, *, tp_group: dist.ProcessGroup | None = None, sequence_parallel: bool = False
) -> KeptRows | None:
    """Find the rows of labels that have a loss, for ``linear_cross_entropy(..., rows=)``. Call it when labels appear.

        rows = onepass.kept_rows(labels)            # the step's first line
        hidden = model(tokens)
        loss = onepass.linear_cross_entropy(hidden, weight, labels, rows=rows)

    On a GPU their number is copied to pinned memory behind the labels, and the op reads it when it begins: by then the GPU is
    busy with the model. Labels may also still be on a CPU. The op refuses rows of labels that have changed since.

    Args:
        labels: ``[...]``, int32 or int64, as the op gets them: of the whole sequence.
        ignore_index: rows with this label have no loss.
        tp_group, sequence_parallel: the op's.

    Returns:
        KeptRows; None, for all rows, where numbers can't be read: under compile, graph capture and transforms.
    """
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int32, torch.int64):
        kind = f"of {labels.dtype}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise TypeError(f"labels must be an int32 or int64 tensor, but is {kind}")
    if not can_count(labels):
        return None
    group = group_of_several(tp_group, "tp_group")
    parts = group.size() if sequence_parallel and group is not None else 1
    if labels.numel() % parts:
        raise ValueError(f"labels must have as many rows for each of {parts} ranks, but has {labels.numel()}")
    return KeptRows(labels, ignore_index, parts)


def can_count(labels: Tensor) -> bool:
    """Whether labels have values that a host may read some time."""
    if torch.compiler.is_compiling() or labels.is_meta or isinstance(labels, FakeTensor) or under_functorch():
        return False
    return not (labels.is_cuda and torch.cuda.is_current_stream_capturing())
