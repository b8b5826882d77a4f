"""Calls that launch the kernels of AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from onepass.gradients import adamw_kernels
from onepass.gradients.adamw_formula import AdamWSlice
from onepass.gradients.written_weights import follow_by_kernel
from onepass.runtime.samples import CoveringCall, meta

# ---- calls that launch every kernel, in every form that is shipped ----


def covering_calls() -> Iterator[CoveringCall]:
    yield from _adamw_calls()
    for dtype in (torch.bfloat16, torch.float16):
        yield CoveringCall("follow", dtype, partial(_follow, dtype))


def _adamw_calls() -> Iterator[CoveringCall]:
    """All types of weights, even and odd sizes, with and without clipping and clearing."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in (1 << 20, 12345):
            for option in ("", "clipped, zeros left"):
                yield _adamw_call(size, dtype, option)


def _adamw_call(size: int, dtype: torch.dtype, option: str) -> CoveringCall:
    def run() -> Tensor:
        weight = meta(size, dtype=dtype)
        grad, exp_avg, exp_avg_sq = (meta(size, dtype=torch.float32, requires_grad=False) for _ in range(3))
        beside = {torch.bfloat16: torch.int16, torch.float16: torch.float32}.get(dtype)
        rest = None if beside is None else torch.empty(size, dtype=beside, device="meta")
        numbers = meta(2 * adamw_kernels.OPTIONS + 1, dtype=torch.float64, requires_grad=False)
        steps, scalars = grad[:2], grad[: 2 * adamw_kernels.SCALARS]
        rows = torch.empty(2, 2, dtype=torch.int64, device="meta")
        adamw_kernels.write_scalars(numbers, rows, steps, grad[0] if option else None, scalars)
        for batch in adamw_kernels.batches_of([AdamWSlice(weight.detach(), grad, exp_avg, exp_avg_sq, rest, 0)]):
            adamw_kernels.step_batch(batch, scalars, bool(option))
        return weight

    return CoveringCall(" ".join(filter(None, (f"adamw {size}", option))), dtype, run)


def _follow(dtype: torch.dtype) -> Tensor:
    weight, master = (meta(1 << 20, dtype=each) for each in (dtype, torch.float32))
    follow_by_kernel(weight.detach(), master.detach())
    return weight
