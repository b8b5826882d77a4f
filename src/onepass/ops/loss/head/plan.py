"""How a call is divided: all logits at once, chunks of tokens, or blocks of the vocabulary; by predicted time, within a budget.

    mode              logits at a time      products  gradients
    loss_only         chunk x V             1         none are needed
    keep_logits       N x V                 3         in backward, where the logits, which waited, become their own gradient;
                                                      of fp32 logits beside narrower operands it is a tensor of its own
    grad_in_forward   chunk x V             3         in forward, of a scalar loss; they wait in fp32 for its incoming gradient
    known_grad_scale  chunk x V             3         in forward, finished: the incoming gradient is known (grad_scale)
    recompute         chunk x V or a block  4         in backward, from recomputed logits; blocks need next to no memory

Where each token's own values are returned, forward multiplies and sums as a call without gradients does, so
log_prob has the same bits in both. Where rows' incoming gradients differ, logits that wait are the only way with three products:
they get more room.

A predicted time is that of the products at the machine's rate, of the memory moved beside them, and of launches. Times need to be
right relative to each other only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from onepass.ops.loss.row_functions import APART
from onepass.runtime.sizes import ceil_div

_PARTS = tuple(1 << i for i in range(13))  # equal parts: a smaller last chunk costs as much as a whole one
_LEAST_ROWS, _LEAST_COLUMNS = 16, 256
_PRICE, _PRICE_PROMISED = 2.0, 5.0  # of all of a device's memory, times a plan's time; grad_scale is for those short of memory
_LAUNCHES = 30e-6  # seconds of a chunk's launches
_SMALL = 32  # each product of a chunk takes as much longer as so many tokens more
_KEPT_ROWS = 16384  # most tokens whose logits wait where ranks share the vocabulary
_SHARED_ROWS = 8192  # tokens of a chunk there, without a budget
_SHARED_ROW = 1 << 17  # bytes of a row of logits there, by which a budget is divided
_FORWARD = 488 << 20  # bytes of logits of a pass without gradients: products are as fast in chunks of this size
_SHARED_FORWARD_ROWS = 1024  # tokens of such a chunk where ranks share the vocabulary
_EXPOSED = 0.8  # part of the memory traffic of fp32 sums that the product's arithmetic does not hide


@dataclass(frozen=True)
class HeadPlan:
    """How a call is divided, and the time and memory that this is expected to take."""

    mode: str
    rows: int  # tokens at a time
    columns: int  # of the vocabulary at a time
    chunks: int
    blocks: int
    seconds: float
    bytes: int  # most allocated at a time, results included
    short: bool = False  # nothing fits in chunk_bytes

    def __str__(self) -> str:
        short = "; nothing takes as little as chunk_bytes" if self.short else ""
        ways, included = ("forward", "") if self.mode == "loss_only" else ("forward and backward", ", gradients included")
        return f"{self._said()}; about {_time(self.seconds)} {ways}, {self.bytes / 2**20:.0f} MiB at most{included}{short}"

    def _said(self) -> str:
        chunks = f"{self.chunks} chunks of {self.rows} tokens" if self.chunks > 1 else "one chunk"
        if self.blocks > 1:
            gradients = "no gradients" if self.mode == "loss_only" else "logits made again in backward"
            return f"{self.blocks} blocks of {self.columns} columns of the vocabulary, in {chunks}, {gradients}"
        return {
            "loss_only": f"{chunks}, no gradients",
            "keep_logits": "one chunk, its logits wait for backward",
            "grad_in_forward": f"{chunks}, gradients in forward, which wait in fp32",
            "known_grad_scale": f"{chunks}, gradients in forward, scaled as grad_scale says",
            "recompute": f"{chunks}, logits made again in backward",
        }[self.mode]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} us"


class PlanInputs(NamedTuple):
    """All that a plan depends on, except the machine."""

    N: int  # tokens of the whole sequence
    D: int
    V: int  # of this rank
    size: int  # bytes of an element of the operands
    wide: bool  # logits are wider than the operands
    needs_hidden: bool
    needs_weight: bool
    scalar: bool  # the loss is one number, and nothing else is differentiated
    into_main: bool  # the weight's gradient is added to an fp32 main_grad
    promised: bool  # the incoming gradient is known in forward
    mode: str | None  # the only one that will do, as in a compiled graph, or None
    shard: bool  # ranks share the vocabulary: then two chunks' logits are in memory at a time
    chunk_bytes: int | None
    low_rank: int = 0  # of a LoRA
    invariant: bool = False  # rows' bits may not depend on how many there are: the mode doesn't, and rows of logits are whole


class MachineSpeed(NamedTuple):
    flops: float  # a second, of products in the operands' type
    bandwidth: float  # bytes a second
    memory: int  # bytes
    budget: int  # bytes of logits and fp32 sums, unless the caller gives a budget
    kept: int  # bytes of logits that wait, where there is no other way with three products


@lru_cache
def machine_speed(device: torch.device, size: int) -> MachineSpeed:
    """Estimate from the device's properties. GPUs reach about 0.7 of their arithmetic and 0.9 of their memory's rate."""
    if device.type != "cuda":
        return MachineSpeed(1e11, 1e10, 16 << 30, 128 << 20, 128 << 20)
    properties: Any = torch.cuda.get_device_properties(device)
    each = {8: 2048, 9: 4096, 10: 8192}.get(properties.major, 2048) / (1 if size == 2 else 2 if properties.major >= 9 else 8)
    clock = getattr(properties, "clock_rate", 1_700_000) * 1e3
    bandwidth = getattr(properties, "memory_clock_rate", 2_600_000) * 1e3 * getattr(properties, "memory_bus_width", 5120) / 4
    flops, memory = 0.7 * each * clock * properties.multi_processor_count, properties.total_memory
    return MachineSpeed(flops, 0.9 * bandwidth, memory, memory // 32, memory // 10)


@lru_cache(1024)
def make_plan(inputs: PlanInputs, machine: MachineSpeed) -> HeadPlan:
    """Return the cheapest plan in time and memory that fits the budget; if none does, the smallest."""
    plans = [_shared(inputs, machine)] if inputs.shard else list(_candidates(inputs, machine))
    gradients = inputs.needs_hidden or inputs.needs_weight  # without them no memory is needed later

    def budget(mode: str) -> int:
        if inputs.chunk_bytes is not None:
            return inputs.chunk_bytes
        if mode == "keep_logits" and not inputs.scalar:
            return machine.kept
        return machine.budget if gradients else min(machine.budget, _FORWARD)

    fitting = [plan for plan, working in plans if working <= budget(plan.mode)]
    if not fitting:
        least = min(plans, key=lambda each: (each[1], each[0].seconds))[0]
        return replace(least, short=inputs.chunk_bytes is not None)
    price = (_PRICE_PROMISED if inputs.promised else _PRICE if gradients else 0.0) / machine.memory
    return min(fitting, key=lambda plan: plan.seconds * (1 + price * plan.bytes))


def _candidates(inputs: PlanInputs, machine: MachineSpeed) -> Iterator[tuple[HeadPlan, int]]:
    """Yield plans, and the bytes that each needs beside its results."""
    gradients = inputs.needs_hidden or inputs.needs_weight
    if not gradients:
        for rows in _row_counts(inputs, few=True):
            # with LoRA a chunk copies the weight: more tokens at a time, and blocks of the vocabulary, copy it less often
            for columns in _column_counts(inputs) if inputs.low_rank and not inputs.invariant else (inputs.V,):
                yield _chunked_plan("loss_only", inputs, machine, rows, columns)
        return
    if inputs.promised:
        yield from (_chunked_plan("known_grad_scale", inputs, machine, rows) for rows in _row_counts(inputs, few=True))
        return
    modes = _modes(inputs)
    if "keep_logits" in modes:
        yield _keep_logits_plan(inputs, machine)
    if "grad_in_forward" in modes:
        yield from (_chunked_plan("grad_in_forward", inputs, machine, rows) for rows in _row_counts(inputs))
    if "recompute" in modes:
        for rows in _row_counts(inputs):
            for columns in (inputs.V,) if inputs.invariant else _column_counts(inputs):
                yield _recompute_plan(inputs, machine, rows, columns)


def _modes(inputs: PlanInputs) -> tuple[str, ...]:
    """The modes that may be chosen for gradients. Logits that wait and those made again have the same gradients, bit for bit."""
    if inputs.mode is not None:
        return (inputs.mode,)
    if inputs.scalar and inputs.invariant:
        return ("grad_in_forward",)
    return ("keep_logits", "recompute", *["grad_in_forward"] * inputs.scalar)


def _shared(inputs: PlanInputs, machine: MachineSpeed) -> tuple[HeadPlan, int]:
    """The plan where ranks share the vocabulary: all need one mode and as many chunks, or they wait for each other for ever.

    No rank knows how many columns the others have, so neither may depend on its own. The number of blocks may.
    """
    gradients, chosen = inputs.needs_hidden or inputs.needs_weight, inputs.chunk_bytes is not None
    rows = _SHARED_ROWS if inputs.chunk_bytes is None else max(_LEAST_ROWS, inputs.chunk_bytes // _SHARED_ROW)
    rows = min(rows, max(1, inputs.N))
    if gradients and inputs.promised:
        return _chunked_plan("known_grad_scale", inputs, machine, rows)
    if not gradients and not chosen:
        return _chunked_plan("loss_only", inputs, machine, min(rows, _SHARED_FORWARD_ROWS))
    most = _KEPT_ROWS // 2 if inputs.wide else _KEPT_ROWS
    modes = _modes(inputs) if gradients and (inputs.invariant or not chosen) else ()
    if "keep_logits" in modes and not chosen and most >= inputs.N:
        return _keep_logits_plan(inputs, machine)
    if "grad_in_forward" in modes:
        return _chunked_plan("grad_in_forward", inputs, machine, rows)
    budget = machine.budget if inputs.chunk_bytes is None else inputs.chunk_bytes
    columns = max(_LEAST_COLUMNS, budget // (rows * _logit_bytes(inputs, 1, 1)) // 256 * 256)
    columns = inputs.V if inputs.invariant else columns
    plan, working = _recompute_plan(inputs, machine, rows, min(inputs.V, columns))
    return (plan if gradients else replace(plan, mode="loss_only")), working


def _row_counts(inputs: PlanInputs, few: bool = False) -> Iterator[int]:
    """few: also 64 and fewer, whose products are slow, for modes that have no other way to need little memory."""
    yield from _split(inputs.N, 128 if inputs.N >= 1024 else 1, _LEAST_ROWS)
    if few and inputs.N >= 1024:
        yield from (64, 32, 16)


def _column_counts(inputs: PlanInputs) -> Iterator[int]:
    """Blocks begin at multiples of APART: the last then has no more room, in a padded weight, than the others' memory."""
    yield from _split(inputs.V, 256 if inputs.V >= 1024 else APART, _LEAST_COLUMNS)


def _split(size: int, multiple: int, least: int) -> Iterator[int]:
    """Yield sizes of equal parts, the last of which may be smaller."""
    seen = -1
    for parts in _PARTS:
        each = min(size, ceil_div(ceil_div(size, parts), multiple) * multiple)
        if each == seen:
            continue
        if parts > 1 and each < least:
            return
        seen = each
        yield each


# ---- costs ----


def _products(inputs: PlanInputs, machine: MachineSpeed, with_logits: int, chunks: int) -> float:
    count = with_logits + inputs.needs_hidden + inputs.needs_weight
    return count * 2 * (inputs.N + chunks * _SMALL) * inputs.D * inputs.V / machine.flops


def _logit_bytes(inputs: PlanInputs, rows: int, columns: int, gradient: bool = True) -> int:
    """Bytes of a chunk or a block. The gradient of logits wider than the operands has its own memory."""
    return rows * columns * ((4 + inputs.size * gradient) if inputs.wide else inputs.size)


def _returned_bytes(inputs: PlanInputs) -> int:
    hidden = inputs.N * inputs.D * inputs.size if inputs.needs_hidden else 0
    return hidden + (inputs.V * inputs.D * inputs.size if inputs.needs_weight and not inputs.into_main else 0)


def _sums(parts: int, elements: int) -> float:
    """Bytes that fp32 sums over so many parts read and write, and that arithmetic does not hide."""
    return _EXPOSED * (2 * parts - 1) * 4 * elements


def _plan(mode: str, inputs: PlanInputs, rows: int, columns: int, seconds: float, at_most: int) -> tuple[HeadPlan, int]:
    chunks, blocks = max(1, ceil_div(inputs.N, max(1, rows))), max(1, ceil_div(inputs.V, max(1, columns)))
    plan = HeadPlan(mode, rows, columns, chunks, blocks, seconds + chunks * blocks * _LAUNCHES, at_most)
    return plan, at_most - _returned_bytes(inputs)


def _keep_logits_plan(inputs: PlanInputs, machine: MachineSpeed) -> tuple[HeadPlan, int]:
    logits = _logit_bytes(inputs, inputs.N, inputs.V)
    moved, sums = _lora_traffic(inputs, 1, 1), _lora_sums(inputs)
    seconds = _products(inputs, machine, 1, 1) + (3 * logits + moved) / machine.bandwidth
    return _plan("keep_logits", inputs, inputs.N, inputs.V, seconds, logits + sums + _returned_bytes(inputs))


def _lora_traffic(inputs: PlanInputs, chunks: int, passes: int) -> float:
    """Bytes that LoRA moves: the weight's copies, one a chunk and pass, and two reads of the gradient of logits."""
    if not inputs.low_rank:
        return 0.0
    gradient = 2 * inputs.N * inputs.V if inputs.needs_hidden else 0
    return (2.0 * passes * chunks * inputs.V * inputs.D + gradient) * inputs.size


def _lora_sums(inputs: PlanInputs) -> int:
    """Bytes of hidden's fp32 gradient, to which two products are added before it is rounded."""
    return 4 * inputs.N * inputs.D if inputs.low_rank and inputs.needs_hidden and inputs.size < 4 else 0


def _chunked_plan(
    mode: str, inputs: PlanInputs, machine: MachineSpeed, rows: int, columns: int | None = None
) -> tuple[HeadPlan, int]:
    chunks, columns = ceil_div(inputs.N, max(1, rows)), inputs.V if columns is None else columns
    weight, hidden = inputs.V * inputs.D, inputs.N * inputs.D
    gradient = mode != "loss_only"
    logits = _logit_bytes(inputs, rows, columns, gradient) * (2 if inputs.shard and chunks > 1 else 1)
    moved = (2.75 if gradient else 1.0) * _logit_bytes(inputs, inputs.N, inputs.V, gradient)
    moved += _lora_traffic(inputs, chunks, 1)
    waiting = 0
    if inputs.needs_weight and mode != "loss_only":
        moved += _sums(chunks, weight)
        if mode == "grad_in_forward" or (not inputs.into_main and inputs.size < 4 and chunks > 1):
            waiting += 4 * weight
    if mode == "grad_in_forward":
        moved += 6 * (weight * inputs.needs_weight + hidden * inputs.needs_hidden)
        waiting += 4 * hidden * inputs.needs_hidden
    seconds = _products(inputs, machine, 1, chunks) + moved / machine.bandwidth
    if mode == "loss_only":
        return _plan(mode, inputs, rows, columns, seconds, logits)
    if mode == "known_grad_scale":
        waiting += _lora_sums(inputs)
        return _plan(mode, inputs, rows, inputs.V, seconds, logits + waiting + _returned_bytes(inputs))
    finished = _returned_bytes(inputs) if inputs.size < 4 else 0  # fp32 gradients that wait are returned themselves
    return _plan(mode, inputs, rows, inputs.V, seconds, max(logits + waiting, waiting + finished))


def _recompute_plan(inputs: PlanInputs, machine: MachineSpeed, rows: int, columns: int) -> tuple[HeadPlan, int]:
    chunks, blocks = ceil_div(inputs.N, max(1, rows)), ceil_div(inputs.V, max(1, columns))
    logits = _logit_bytes(inputs, rows, columns) * (2 if inputs.shard and chunks > 1 else 1)
    moved, waiting, hidden = 3.0 * _logit_bytes(inputs, inputs.N, inputs.V), 0, 0
    if inputs.needs_weight and chunks > 1:
        moved += _sums(chunks, inputs.V * inputs.D)
        waiting += 0 if inputs.into_main or inputs.size >= 4 else 4 * columns * inputs.D
    moved += _lora_traffic(inputs, chunks, 2)
    if inputs.needs_hidden and (blocks > 1 or inputs.low_rank):
        moved += _sums(blocks, inputs.N * inputs.D)
        hidden = 4 * inputs.N * inputs.D
        waiting += hidden
    seconds = _products(inputs, machine, 2, chunks) + moved / machine.bandwidth
    plan, working = _plan("recompute", inputs, rows, columns, seconds, logits + waiting + _returned_bytes(inputs))
    return plan, working - hidden  # no plan avoids hidden's fp32 sum and needs less
