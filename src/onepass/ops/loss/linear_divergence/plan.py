"""How a call is divided: into chunks of tokens, both heads' logits of a chunk at a time, within a budget of memory.

    mode             products  gradients
    loss_only        2         none are needed
    grad_in_forward  4         in forward, of a scalar loss; they wait in fp32 for its incoming gradient
    keep_logits      4         of rows' divergences, in backward: both heads' logits waited
    keep_teacher     5         of rows' divergences: the teacher's logits waited, the student's are made again
    recompute        6         of rows' divergences: both are made again

Fewer chunks are never slower: each is one more addition to the weight's fp32 gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from onepass.runtime.sizes import ceil_div

_LEAST_ROWS = 16
_FORWARD_ONLY = 512 << 20  # bytes of logits where nothing is gained by more: there is no sum over chunks
_SHARED_ROWS = 4096  # tokens of a chunk where ranks share the vocabulary, without a budget
_SHARED_ROW = 1 << 18  # bytes of a row of logits there, by which a budget is divided
PRODUCTS = {"loss_only": 2, "grad_in_forward": 4, "keep_logits": 4, "keep_teacher": 5, "recompute": 6}


class DivergencePlan(NamedTuple):
    mode: str
    rows: int  # tokens at a time
    columns: int  # of the vocabulary at a time: all
    chunks: int
    bytes: int  # most allocated at a time, results included
    short: bool  # nothing fits in chunk_bytes

    def __str__(self) -> str:
        chunks = f"{self.chunks} chunks of {self.rows} tokens" if self.chunks > 1 else "one chunk"
        gradients = {
            "loss_only": "no gradients",
            "grad_in_forward": "gradients in forward, which wait in fp32",
            "keep_logits": "both heads' logits wait for backward",
            "keep_teacher": "the teacher's logits wait for backward, the student's are made again",
            "recompute": "logits made again in backward",
        }[self.mode]
        short = "; nothing takes as little as chunk_bytes" if self.short else ""
        included = "" if self.mode == "loss_only" else ", gradients included"
        mib = f"{self.bytes / 2**20:.0f} MiB at most{included}"
        return f"{chunks}, {gradients}; {PRODUCTS[self.mode]} products; {mib}{short}"


class DivergenceInputs(NamedTuple):
    """All that a plan depends on, except the machine."""

    N: int  # tokens
    D: int  # of the student
    V: int  # of this rank
    size: int  # bytes of a weight's or a hidden state's number
    student_row: int  # bytes of a row of the student's logits, and of their gradient where that lies beside
    teacher_row: int
    needs_hidden: bool
    needs_weight: bool
    scalar: bool  # the loss is one number
    in_graph: bool  # a compiled graph returns what its ops always return: logits don't wait
    shard: bool  # ranks share the vocabulary
    chunk_bytes: int | None


@lru_cache(1024)
def make_plan(inputs: DivergenceInputs, budget: int) -> DivergencePlan:
    budget = budget if inputs.chunk_bytes is None else inputs.chunk_bytes
    row, gradients = inputs.student_row + inputs.teacher_row, inputs.needs_hidden or inputs.needs_weight
    if not gradients:
        budget = budget if inputs.chunk_bytes is not None else min(budget, _FORWARD_ONLY)
        return _divided("loss_only", inputs, row, 0, budget)
    weight, hidden = 4 * inputs.V * inputs.D * inputs.needs_weight, 4 * inputs.N * inputs.D * inputs.needs_hidden
    if inputs.scalar:
        return _divided("grad_in_forward", inputs, row, weight + hidden, budget)
    waiting = {"keep_logits": (inputs.N * row, 0), "keep_teacher": (inputs.N * inputs.teacher_row, inputs.student_row)}
    for mode, (kept, each) in waiting.items():
        if kept + weight + each * min(inputs.N, _LEAST_ROWS) <= budget and not (inputs.in_graph or inputs.shard):
            return _divided(mode, inputs, each, kept + weight, budget)
    return _divided("recompute", inputs, row, weight, budget)


def _divided(mode: str, inputs: DivergenceInputs, row: int, waiting: int, budget: int) -> DivergencePlan:
    """A plan of as few chunks as the budget allows; `waiting` bytes are there besides `row` bytes a token of a chunk."""
    if inputs.shard:  # all ranks need as many chunks, and none knows how many columns the others have
        most = _SHARED_ROWS if inputs.chunk_bytes is None else inputs.chunk_bytes // _SHARED_ROW
    else:
        most = max(0, budget - waiting) // max(1, row)
    rows = max(1, inputs.N) if mode == "keep_logits" else _equal_rows(inputs.N, max(_LEAST_ROWS, most))
    hidden = inputs.size * inputs.D * inputs.N * inputs.needs_hidden
    weight = inputs.size * inputs.D * inputs.V * inputs.needs_weight
    working = waiting + rows * row
    # the weight's gradient is rounded after the last chunk; hidden's, unless it waits in fp32, has its own type from the first on
    at_most = max(working + (hidden if mode != "grad_in_forward" else 0), waiting + hidden + weight)
    return DivergencePlan(
        mode, rows, inputs.V, max(1, ceil_div(inputs.N, rows)), at_most,
        inputs.chunk_bytes is not None and working > inputs.chunk_bytes,
    )  # fmt: skip


def _equal_rows(N: int, most: int) -> int:
    """Tokens of each of as few equal chunks as have at most so many; a multiple of 128 where that fits."""
    if most >= N:
        return max(1, N)
    most = most // 128 * 128 or most
    rows = ceil_div(N, ceil_div(N, most))
    return rows if most < 128 else ceil_div(rows, 128) * 128
