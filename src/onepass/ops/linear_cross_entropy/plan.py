"""How a call is done: all logits at once, tokens in chunks, or blocks of the vocabulary; by predicted time, within a budget.

    way         logits at a time      products  gradients
    loss        chunk x V             1         none are wanted
    keep        N x V                 3         in backward, where the logits, which waited, become their own gradient
    forward     chunk x V             3         in forward, of a scalar loss; they wait in fp32 for what the loss is multiplied by
    promised    chunk x V             3         in forward, finished: the incoming gradient is known (grad_scale)
    again       chunk x V or a block  4         in backward, of logits that are made again; blocks need next to no memory

Times are of the products at the machine's rate, of the memory moved beside them, and of launches. They need to be right against
each other, not by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from onepass.runtime.sizes import ceil_div

_PARTS = tuple(1 << i for i in range(13))  # equal ones: a last chunk of odd size costs as much as a whole one
_LEAST_ROWS, _LEAST_COLUMNS = 16, 256
_PRICE, _PRICE_PROMISED = 2.0, 5.0  # of all of a device's memory, in times of the time: who promises wants little used
_LAUNCHES = 30e-6  # seconds of a chunk's launches
_SMALL = 32  # tokens' worth of time that each product of a chunk takes longer
_KEPT_ROWS = 16384  # tokens whose logits wait, where ranks share the vocabulary
_SHARED_ROWS = 8192  # tokens of a chunk there; and the bytes of a row of logits, by which a budget decides instead
_SHARED_ROW = 1 << 17
_EXPOSED = 0.8  # of the memory that a product's sum in fp32 costs more, what is not hidden under its arithmetic


@dataclass(frozen=True)
class Plan:
    """How a call is done, and what that is expected to take."""

    way: str
    rows: int  # tokens at a time
    columns: int  # of the vocabulary at a time
    chunks: int
    blocks: int
    seconds: float
    bytes: int  # at most allocated at a time, results included
    short: bool = False  # whether nothing fits in chunk_bytes

    def __str__(self) -> str:
        short = "; nothing takes as little as chunk_bytes" if self.short else ""
        return (
            f"{self._said()}; about {_time(self.seconds)} forward and backward, "
            f"{self.bytes / 2**20:.0f} MiB at most, gradients included{short}"
        )

    def _said(self) -> str:
        chunks = f"{self.chunks} chunks of {self.rows} tokens" if self.chunks > 1 else "one chunk"
        if self.blocks > 1:
            return f"{self.blocks} blocks of {self.columns} columns of the vocabulary, in {chunks}, logits made again in backward"
        return {
            "loss": f"{chunks}, no gradients",
            "keep": "one chunk, its logits become their own gradient in backward",
            "forward": f"{chunks}, gradients in forward, which wait in fp32",
            "promised": f"{chunks}, gradients in forward, scaled as grad_scale says",
            "again": f"{chunks}, logits made again in backward",
        }[self.way]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} us"


class Asked(NamedTuple):
    """All that a plan depends on, but for the machine."""

    N: int  # tokens of the whole sequence
    D: int
    V: int  # of this rank
    size: int  # bytes of an element of the operands
    wide: bool  # whether logits are kept in fp32
    needs_hidden: bool
    needs_weight: bool
    scalar: bool  # whether the loss is one number
    into_main: bool  # whether the weight's gradient is added to an fp32 main_grad
    promised: bool  # whether the incoming gradient is known in forward
    way: str | None  # the only one that will do, as in a compiled graph, or None
    spread: bool  # over ranks: then two chunks' logits are there at a time
    chunk_bytes: int | None


class Machine(NamedTuple):
    flops: float  # a second, of products in the operands' type
    bandwidth: float  # bytes a second
    memory: int  # bytes
    budget: int  # of logits and fp32 sums, where the caller names none


@lru_cache
def machine_of(device: torch.device, size: int) -> Machine:
    """From what the device says of itself. GPUs reach about 0.7 of their arithmetic, and the whole of their memory's speed."""
    if device.type != "cuda":
        return Machine(1e11, 1e10, 16 << 30, 128 << 20)
    properties: Any = torch.cuda.get_device_properties(device)
    each = {8: 2048, 9: 4096, 10: 8192}.get(properties.major, 2048) / (1 if size == 2 else 2 if properties.major >= 9 else 8)
    clock = getattr(properties, "clock_rate", 1_700_000) * 1e3
    bandwidth = getattr(properties, "memory_clock_rate", 2_600_000) * 1e3 * getattr(properties, "memory_bus_width", 5120) / 4
    flops, memory = 0.7 * each * clock * properties.multi_processor_count, properties.total_memory
    return Machine(flops, 0.9 * bandwidth, memory, memory // 32)


@lru_cache(1024)
def plan_of(asked: Asked, machine: Machine) -> Plan:
    """The cheapest in time and memory of those that fit the budget; else the smallest."""
    plans = [_shared(asked, machine)] if asked.spread else list(_candidates(asked, machine))
    budget = machine.budget if asked.chunk_bytes is None else asked.chunk_bytes
    fitting = [plan for plan, working in plans if working <= budget]
    if not fitting:
        least = min(plans, key=lambda each: (each[1], each[0].seconds))[0]
        return replace(least, short=asked.chunk_bytes is not None)
    gradients = asked.needs_hidden or asked.needs_weight  # with none to come there is nothing to spare memory for
    price = (_PRICE_PROMISED if asked.promised else _PRICE if gradients else 0.0) / machine.memory
    return min(fitting, key=lambda plan: plan.seconds * (1 + price * plan.bytes))


def _candidates(asked: Asked, machine: Machine) -> Iterator[tuple[Plan, int]]:
    """With the bytes that each works with, beside its results."""
    gradients = asked.needs_hidden or asked.needs_weight
    if not gradients:
        yield from (_chunked("loss", asked, machine, rows) for rows in _row_counts(asked, few=True))
        return
    if asked.promised:
        yield from (_chunked("promised", asked, machine, rows) for rows in _row_counts(asked, few=True))
        return
    if asked.way in (None, "keep") and not asked.wide:
        yield _kept(asked, machine)
    if asked.way in (None, "forward") and asked.scalar:
        yield from (_chunked("forward", asked, machine, rows) for rows in _row_counts(asked))
    if asked.way in (None, "again"):
        for rows in _row_counts(asked):
            for columns in _column_counts(asked):
                yield _again(asked, machine, rows, columns)


def _shared(asked: Asked, machine: Machine) -> tuple[Plan, int]:
    """Where ranks share the vocabulary they must go the same way by as many chunks, or wait for each other for ever. None knows
    how much the others have, so neither may depend on it; only how a chunk is divided into blocks is each rank's own affair."""
    gradients, chosen = asked.needs_hidden or asked.needs_weight, asked.chunk_bytes is not None
    rows = _SHARED_ROWS if asked.chunk_bytes is None else max(_LEAST_ROWS, asked.chunk_bytes // _SHARED_ROW)
    rows = min(rows, max(1, asked.N))
    if gradients and asked.promised:
        return _chunked("promised", asked, machine, rows)
    if not gradients and not chosen:
        return _chunked("loss", asked, machine, rows)
    if asked.way in (None, "keep") and gradients and not chosen and not asked.wide and asked.N <= _KEPT_ROWS:
        return _kept(asked, machine)
    if asked.way in (None, "forward") and gradients and not chosen and asked.scalar:
        return _chunked("forward", asked, machine, rows)
    budget = machine.budget if asked.chunk_bytes is None else asked.chunk_bytes
    columns = max(_LEAST_COLUMNS, budget // (rows * _logit_bytes(asked, 1, 1)) // 256 * 256)
    plan, working = _again(asked, machine, rows, min(asked.V, columns))
    return (plan if gradients else replace(plan, way="loss")), working


def _row_counts(asked: Asked, few: bool = False) -> Iterator[int]:
    """few: also those that no product is fast of, for ways that have nothing else to do with little memory."""
    yield from _divided(asked.N, 128 if asked.N >= 1024 else 1, _LEAST_ROWS)
    if few and asked.N >= 1024:
        yield from (64, 32, 16)


def _column_counts(asked: Asked) -> Iterator[int]:
    yield from _divided(asked.V, 256 if asked.V >= 1024 else 1, _LEAST_COLUMNS)


def _divided(size: int, multiple: int, least: int) -> Iterator[int]:
    """Sizes of equal parts, of which the last may be smaller."""
    seen = -1
    for parts in _PARTS:
        each = min(size, ceil_div(ceil_div(size, parts), multiple) * multiple)
        if each == seen:
            continue
        if parts > 1 and each < least:
            return
        seen = each
        yield each


# ---- what each costs ----


def _products(asked: Asked, machine: Machine, with_logits: int, chunks: int) -> float:
    count = with_logits + asked.needs_hidden + asked.needs_weight
    return count * 2 * (asked.N + chunks * _SMALL) * asked.D * asked.V / machine.flops


def _logit_bytes(asked: Asked, rows: int, columns: int) -> int:
    """Of a chunk or a block; where logits are wider than the operands, their gradient lies beside them."""
    return rows * columns * (4 + asked.size if asked.wide else asked.size)


def _returned(asked: Asked) -> int:
    hidden = asked.N * asked.D * asked.size if asked.needs_hidden else 0
    return hidden + (asked.V * asked.D * asked.size if asked.needs_weight and not asked.into_main else 0)


def _sums(asked: Asked, parts: int, elements: int) -> float:
    """Seconds' worth of bytes that sums in fp32 over so many parts are read and written for."""
    return _EXPOSED * (2 * parts - 1) * 4 * elements


def _plan(way: str, asked: Asked, rows: int, columns: int, seconds: float, at_most: int) -> tuple[Plan, int]:
    chunks, blocks = max(1, ceil_div(asked.N, max(1, rows))), max(1, ceil_div(asked.V, max(1, columns)))
    plan = Plan(way, rows, columns, chunks, blocks, seconds + chunks * blocks * _LAUNCHES, at_most)
    return plan, at_most - _returned(asked)


def _kept(asked: Asked, machine: Machine) -> tuple[Plan, int]:
    logits = _logit_bytes(asked, asked.N, asked.V)
    seconds = _products(asked, machine, 1, 1) + 3 * logits / machine.bandwidth
    return _plan("keep", asked, asked.N, asked.V, seconds, logits + _returned(asked))


def _chunked(way: str, asked: Asked, machine: Machine, rows: int) -> tuple[Plan, int]:
    chunks = ceil_div(asked.N, max(1, rows))
    weight, hidden = asked.V * asked.D, asked.N * asked.D
    logits = _logit_bytes(asked, rows, asked.V) * (2 if asked.spread and chunks > 1 else 1)
    moved = (1.0 if way == "loss" else 2.75) * _logit_bytes(asked, asked.N, asked.V)
    waiting = 0
    if asked.needs_weight and way != "loss":
        moved += _sums(asked, chunks, weight)
        if way == "forward" or (not asked.into_main and asked.size < 4 and chunks > 1):
            waiting += 4 * weight
    if way == "forward":
        moved += 6 * (weight * asked.needs_weight + hidden * asked.needs_hidden)
        waiting += 4 * hidden * asked.needs_hidden
    seconds = _products(asked, machine, 1, chunks) + moved / machine.bandwidth
    if way == "loss":
        return _plan(way, asked, rows, asked.V, seconds, logits)
    if way == "promised":
        return _plan(way, asked, rows, asked.V, seconds, logits + waiting + _returned(asked))
    finished = _returned(asked) if asked.size < 4 else 0  # what waits in fp32 is returned itself, where that is the type
    return _plan(way, asked, rows, asked.V, seconds, max(logits + waiting, waiting + finished))


def _again(asked: Asked, machine: Machine, rows: int, columns: int) -> tuple[Plan, int]:
    chunks, blocks = ceil_div(asked.N, max(1, rows)), ceil_div(asked.V, max(1, columns))
    logits = _logit_bytes(asked, rows, columns) * (2 if asked.spread and chunks > 1 else 1)
    moved, waiting, hidden = 3.0 * _logit_bytes(asked, asked.N, asked.V), 0, 0
    if asked.needs_weight and chunks > 1:
        moved += _sums(asked, chunks, asked.V * asked.D)
        waiting += 0 if asked.into_main or asked.size >= 4 else 4 * columns * asked.D
    if asked.needs_hidden and blocks > 1:
        moved += _sums(asked, blocks, asked.N * asked.D)
        hidden = 4 * asked.N * asked.D
        waiting += hidden
    seconds = _products(asked, machine, 2, chunks) + moved / machine.bandwidth
    plan, working = _plan("again", asked, rows, columns, seconds, logits + waiting + _returned(asked))
    return plan, working - hidden  # there is no plan without it that needs less

