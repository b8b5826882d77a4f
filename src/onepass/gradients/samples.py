"""Calls that launch the kernels of AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from onepass.gradients import adamw_kernels
from onepass.gradients.adamw_formula import AdamWSlice
from onepass.gradients.eight_bits import BLOCK
from onepass.gradients.written_weights import follow_by_kernel
from onepass.runtime.samples import CoveringCall, meta

# ---- calls that launch every kernel, in every form that is shipped ----


def covering_calls() -> Iterator[CoveringCall]:
    yield from _adamw_calls()
    for dtype in (torch.bfloat16, torch.float16):
        yield CoveringCall("follow", dtype, partial(_follow, dtype))


def _adamw_calls() -> Iterator[CoveringCall]:
    """All types of weights, even and odd sizes: gradients of fp32, clipped and cleared or neither, and those in `.grad`."""
    wide, narrow = torch.float32, torch.bfloat16
    beside = {torch.bfloat16: torch.int16, torch.float16: torch.float32, torch.float32: None}
    for dtype, rest in beside.items():
        for size in (1 << 20, 12345):
            yield _adamw_call(size, (dtype, wide, wide, rest), "")
            yield _adamw_call(size, (dtype, wide, wide, rest), "clipped, zeros left")
    for size in (1 << 20, 12345):
        for moments, rest in product((narrow, wide, torch.int8), (None, torch.int16)):
            if moments is torch.int8 and size % BLOCK:
                continue
            kept = ", ".join(
                f"{name} {str(each).removeprefix('torch.')}" for name, each in (("moments", moments), ("rest", rest))
            )
            yield _adamw_call(size, (narrow, narrow, moments, rest), f"of grad, {kept}")
    for dtype, rest in beside.items():
        yield _adamw_call(1 << 20, (dtype, wide, torch.int8, rest), "moments int8")


def _adamw_call(size: int, types: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None], option: str) -> CoveringCall:
    """types: of the weight, the gradient, both moments, and what is kept beside the weight."""

    def run() -> Tensor:
        weight = meta(size, dtype=types[0])
        grad = meta(size, dtype=types[1], requires_grad=False)
        coded = types[2] is torch.int8
        exp_avg, exp_avg_sq = (
            torch.empty(size, dtype=each, device="meta") for each in (types[2], torch.uint8 if coded else types[2])
        )
        scales = (torch.empty(size // BLOCK, device="meta"),) * 2 if coded else ()
        rest = None if types[3] is None else torch.empty(size, dtype=types[3], device="meta")
        numbers = meta(2 * adamw_kernels.OPTIONS + 1, dtype=torch.float64, requires_grad=False)
        steps, scalars = (meta(count, dtype=torch.float32, requires_grad=False) for count in (2, 2 * adamw_kernels.SCALARS))
        rows = torch.empty(2, 2, dtype=torch.int64, device="meta")
        adamw_kernels.write_scalars(numbers, rows, steps, steps[0] if option else None, scalars)
        for batch in adamw_kernels.batches_of([AdamWSlice(weight.detach(), grad, exp_avg, exp_avg_sq, rest, 0, *scales)]):
            adamw_kernels.step_batch(batch, scalars, option.startswith("clipped"))
        return weight

    return CoveringCall(" ".join(filter(None, (f"adamw {size}", option))), types[0], run)


def _follow(dtype: torch.dtype) -> Tensor:
    weight, master = (meta(1 << 20, dtype=each) for each in (dtype, torch.float32))
    follow_by_kernel(weight.detach(), master.detach())
    return weight
