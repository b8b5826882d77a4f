"""The oracle of causal_conv1d (see `oracle`)."""

import contextlib
from dataclasses import dataclass, replace
from functools import partial

import torch
from ops.oracle import BF16, DEVICE, FP16, FP32, Counters, NamedCase, judge_call, laid_out, modules_of, normals, replaced

from onepass.ops.convolution.causal_conv1d import causal_conv1d_reference
from onepass.testing.budget import BudgetReport, run


@dataclass(frozen=True)
class Case(NamedCase):
    """One call. `small`: in tiles and chunks so small that there are several of each."""

    small: bool = True
    lead: tuple[int, ...] = (1, 45)
    sizes: tuple[int, ...] = (24,)
    W: int = 4
    dtype: torch.dtype = FP32
    weight: torch.dtype = FP32
    bias: torch.dtype | None = FP32
    flat: bool = True  # the weight [C, W], not [C, 1, W]
    activation: str | None = "silu"
    heads: tuple[int | None, ...] = (None,)
    ends: tuple[int, ...] | None = None
    eps: float = 1e-6
    scale: float = 1.0  # the standard deviation of x
    layout: str = "contiguous"
    dy_layout: str = "contiguous"


def options_of(case: Case):
    cu_seqlens = None if case.ends is None else torch.tensor((0, *case.ends), dtype=torch.int32, device=DEVICE)
    return {
        "activation": case.activation, "cu_seqlens": cu_seqlens, "split": case.sizes, "l2_norm": case.heads, "eps": case.eps,
    }  # fmt: skip


def draw(case: Case, seed: int = 0):
    """Return x, weight and bias, and dy of each piece. Drawn on the CPU: every machine gets the same values."""
    randn, C = normals(seed), sum(case.sizes)
    x = laid_out((case.scale * randn(*case.lead, C)).to(case.dtype).to(DEVICE), case.layout)
    weight = (randn(C, case.W) if case.flat else randn(C, 1, case.W)).to(case.weight).to(DEVICE)
    bias = None if case.bias is None else randn(C).to(case.bias).to(DEVICE)
    dys = [laid_out(randn(*case.lead, size).to(case.dtype).to(DEVICE), case.dy_layout) for size in case.sizes]
    return {"x": x, "weight": weight, "bias": bias}, tuple(dys)


@contextlib.contextmanager
def small_tiles(module):
    """Patch the module to narrow tiles and short chunks, on a GPU of five multiprocessors. Yield the counters."""
    modules, counters = modules_of(module), Counters()
    names, tiles = (modules[f"onepass.ops.convolution.{name}"] for name in ("kernels", "tiles"))
    changes = {"FORWARD_COLUMNS": 16, "BACKWARD_COLUMNS": 16, "LEAST_ROWS": 8, "processors": lambda _: 5}
    plans = [names["_forward_plan"], names["_backward_plan"]]
    with replaced(tiles, plans, **changes), replaced(names, plans, stream_scratch=counters.scratch):
        yield counters


def call(module, case: Case, backend: str = "triton"):
    return lambda x, weight, bias: module.causal_conv1d(x, weight, bias, backend=backend, **options_of(case))


def formula(case: Case):
    return lambda x, weight, bias: causal_conv1d_reference(x, weight, bias, **options_of(case))


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    with small_tiles(module) if case.small else contextlib.nullcontext() as counters:
        return judge_call(call(module, case, backend), partial(run, formula(case)), partial(draw, case), case.dtype, counters)


# ---- the cases ----


def small_cases() -> list[Case]:
    """Return every option in small tiles: for the mutants."""
    plain = Case()
    pieces = Case(sizes=(16, 32, 24), heads=(8, 8, None), eps=0.1)
    documents = replace(plain, ends=(1, 1, 3, 20, 22, 30, 45))
    return [
        plain,
        replace(plain, lead=(3, 7), dtype=BF16, weight=BF16, bias=None, flat=False),
        replace(plain, lead=(2, 3, 17), W=2, activation=None, layout="sliced"),
        replace(plain, lead=(5, 3), W=8, dtype=FP16, weight=BF16, dy_layout="strided"),
        replace(plain, lead=(31,), W=3, sizes=(33,), layout="transposed", bias=BF16),
        replace(plain, lead=(9, 1), W=5),
        pieces,
        replace(pieces, lead=(2, 29), sizes=(24, 20, 16), dtype=BF16, weight=BF16, heads=(8, None, 8), bias=None),
        replace(pieces, sizes=(33, 21), heads=(None, 3), lead=(2, 19), W=6, layout="followed"),
        replace(pieces, sizes=(48,), heads=(24,), lead=(40,), dtype=FP16, weight=FP32, dy_layout="expanded"),
        documents,
        replace(documents, sizes=(16, 32, 24), heads=(8, 8, None), eps=0.1, dtype=BF16, bias=None),
        replace(documents, W=7, activation=None, dtype=FP16, ends=(9, 40, 45)),
        replace(documents, ends=(45,), scale=30.0),
        replace(plain, lead=(400,), sizes=(9,)),  # more chunks than one pass over their sums takes
    ]


def real_cases() -> list[Case]:
    """Return cases in the real tiles. They have few rows, because the interpreter is slow."""
    real = Case(small=False)
    return [
        replace(real, lead=(1, 1), sizes=(1,)),
        replace(real, lead=(2, 3), sizes=(3,), W=8),
        replace(real, lead=(2, 40), sizes=(128, 128, 256), heads=(64, 64, None), dtype=BF16, weight=BF16),
        replace(real, lead=(1, 70), sizes=(512,), heads=(256,), bias=None),
        replace(real, lead=(1, 60), sizes=(128, 128, 20), heads=(128, 128, None), ends=(11, 33, 60), dtype=BF16),
        replace(real, lead=(1, 70), sizes=(130, 260), heads=(None, 130), ends=(11, 33, 33, 70), dtype=FP16),
        replace(real, lead=(70,), sizes=(300,), layout="sliced", dtype=BF16, scale=1e4),
        replace(real, lead=(70,), sizes=(64,), heads=(32,), scale=1e-15, eps=1e-12),
        *(replace(real, lead=(3, 20), sizes=(24,), W=W) for W in range(2, 9)),
    ]
