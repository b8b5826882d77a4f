"""The oracle of dropout_add (see `oracle`). It computes the mask again, word by word as in Philox's paper."""

import contextlib
import itertools
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy
import torch
from ops.oracle import BF16, DEVICE, FP16, FP32, LAYOUTS, Counters, NamedCase, judge_call, laid_out, normals, replaced

from onepass.testing.budget import BudgetReport, run

SEED = 0x5DEECE66D1234567


@dataclass(frozen=True)
class Case(NamedCase):
    """One call. `p` of "low" or "high" is a threshold equal to the random number of an element.

    That element takes the low or the high half of a word.
    """

    lead: tuple[int, ...] = (3, 7)
    H: int = 72
    dtype: torch.dtype = FP32
    residual: torch.dtype = FP32
    bias: torch.dtype | None = FP32
    p: float | str = 0.25
    first: int | None = None  # the index of the first row, if ranks have shards of the rows
    in_memory: bool = True  # whether the seed is a tensor
    layout: str = "contiguous"
    dy_layout: str = "contiguous"

    @property
    def rows(self) -> int:
        return prod(self.lead)


# ---- Philox 4x32 with seven rounds, on words of 32 bits ----


def philox(counter, key, rounds=7):
    """Return the four output words. Counter, key and result are uint64 arrays that hold 32-bit words."""
    low = numpy.uint64(0xFFFFFFFF)
    c, k = list(counter), list(key)
    for _ in range(rounds):
        a, b = c[0] * numpy.uint64(0xD2511F53), c[2] * numpy.uint64(0xCD9E8D57)
        c = [(b >> numpy.uint64(32)) ^ c[1] ^ k[0], b & low, (a >> numpy.uint64(32)) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + numpy.uint64(0x9E3779B9)) & low, (k[1] + numpy.uint64(0xBB67AE85)) & low]
    return c


def halves(seed, first, rows, H):
    """Return the 16-bit random number of each element, [rows, H]."""
    numbers = numpy.arange(first, first + rows, dtype=numpy.uint64)[:, None]
    columns = numpy.arange(H, dtype=numpy.uint64)[None, :]
    low, high = (numpy.uint64(n) for n in (0xFFFFFFFF, 32))
    counter = columns // numpy.uint64(8) + 0 * numbers, (numbers & low) + 0 * columns, (numbers >> high) + 0 * columns
    key = [numpy.full((rows, H), n, dtype=numpy.uint64) for n in (seed & 0xFFFFFFFF, seed >> 32)]
    words = numpy.stack(philox([*counter, numpy.zeros((rows, H), dtype=numpy.uint64)], key))
    lane = (columns % numpy.uint64(8)).astype(int) + numpy.zeros((rows, 1), dtype=int)
    word = numpy.take_along_axis(words, (lane // 2)[None], 0)[0]
    return torch.from_numpy(((word >> (16 * (lane % 2)).astype(numpy.uint64)) & numpy.uint64(0xFFFF)).astype(numpy.int64))


def probability(case):
    """Return p, and the threshold: how many of 65536 random numbers it drops."""
    if isinstance(case.p, str):
        threshold = int(halves(SEED, case.first or 0, case.rows, case.H)[0, 0 if case.p == "low" else 1])
        return threshold / 65536, threshold
    return case.p, 65536 if case.p == 1 else min(round(case.p * 65536), 65535)


def kept(case):
    _, threshold = probability(case)
    return (halves(SEED, case.first or 0, case.rows, case.H) >= threshold).view(*case.lead, case.H).to(DEVICE)


# ---- inputs ----


def draw(case, seed=0):
    randn = normals(seed)
    x, residual, dy = (randn(*case.lead, case.H) for _ in range(3))
    bias = None if case.bias is None else randn(case.H).to(case.bias).to(DEVICE)
    x = laid_out(x.to(case.dtype).to(DEVICE), case.layout)
    residual = laid_out(residual.to(case.residual).to(DEVICE), case.dy_layout)
    return {"x": x, "residual": residual, "bias": bias}, laid_out(dy.to(case.residual).to(DEVICE), case.dy_layout)


# ---- tiles so small that there are several of each kind, and the last one is partial; a known seed ----


@contextlib.contextmanager
def small_tiles(module):
    names, counters = module.kernels.dropout_add_forward.__globals__, Counters()
    ceil_div, Tiles = names["ceil_div"], names["ColumnTiles"]

    def width(H):
        return max(8, min(names["power_of_two"](H), 32))

    def forward(M, H):
        return Tiles(16, width(H), ceil_div(H, width(H)), ceil_div(M, 16), 0, 4)

    def backward(M, H, _):
        rows = 12 if M > 12 else ceil_div(M, 4) * 4  # three blocks of 4
        return Tiles(4, width(H), ceil_div(H, width(H)), ceil_div(M, rows), rows, 4)

    caches = names["_forward_plan"], names["_backward_plan"]
    with replaced(names, caches, forward_tiles=forward, backward_tiles=backward, stream_scratch=counters.scratch):
        yield counters


@contextlib.contextmanager
def known_seed(module, case):
    seed = torch.tensor([SEED], device=DEVICE) if case.in_memory else SEED
    changes = {"draw_seed": lambda *_: seed}
    if case.first is not None:
        first = torch.tensor([case.first], device=DEVICE)
        changes |= {"group_of_several": lambda *_: object(), "_group_seed": lambda *_: (seed, first)}
    with replaced(vars(module), **changes):
        yield


# ---- the oracle ----


def formula(case):
    mask, (_, threshold) = kept(case), probability(case)

    def reference(x, residual, bias):
        z = x if bias is None else x + bias
        scale = 1.0 if threshold == 65536 else 65536 / (65536 - threshold)
        return residual + torch.where(mask, z * scale, 0.0)

    return reference


def call(module, case, backend):
    def op(x, residual, bias):
        return module.dropout_add(x, residual, probability(case)[0], bias=bias, backend=backend)

    return op


def judge_case(module, case, backend="triton") -> BudgetReport:
    with small_tiles(module) as counters, known_seed(module, case):
        by, exact, few = call(module, case, backend), partial(run, formula(case)), case.H * len(case.lead) < 32
        return judge_call(by, exact, partial(draw, case), case.dtype, counters, few)


# ---- the cases ----

SHAPES = (((3, 7), 72), ((37,), 65), ((), 33), ((2, 1, 3, 2), 130), ((5, 4), 1), ((300,), 40))


def main_cases():
    """Return every shape with every dtype, with layouts and the other features in turn: for the mutants and for a GPU."""
    cases = []
    for i, (dtype, (lead, H)) in enumerate(itertools.product((FP32, BF16, FP16), SHAPES)):
        cases.append(
            Case(
                lead, H, dtype, (dtype, FP32)[i % 4 == 1], (dtype, FP32, None)[i % 3], (0.1, 0.5, 0.9)[i % 3],
                (None, None, 5, 2**32 - 3)[i % 4], i % 2 == 0, LAYOUTS[i % 7], LAYOUTS[(i // 3) % 7],
            )
        )  # fmt: skip
    base = Case((37,), 130, BF16, BF16, BF16)
    cases += [Case((37,), 72, p=p, in_memory=False) for p in (0.0, 1.0, 1e-4, 1 - 1e-6, "low", "high")]
    cases += [Case((37,), 130, p=0.3, first=2**33 + 5), base, Case((37,), 40, p=0.0, bias=None), Case((3,), 40, BF16, p=0.0)]
    return cases
