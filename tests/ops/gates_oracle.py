"""The oracle of delta_gates (see `oracle`)."""

import contextlib
from dataclasses import dataclass, replace
from functools import partial

import torch
from ops.oracle import BF16, DEVICE, FP16, FP32, Counters, NamedCase, judge_call, laid_out, modules_of, nans, normals, replaced

from onepass.ops.delta.delta_gates import delta_gates_reference
from onepass.testing.budget import BudgetReport, run


@dataclass(frozen=True)
class Case(NamedCase):
    """One call. `small`: in tiles and strips so small that there are several of each."""

    small: bool = True
    lead: tuple[int, ...] = (61,)
    groups: int | None = None  # None: plain rows
    width: int = 24  # of a group
    dtype: torch.dtype = FP32
    b: torch.dtype = FP32
    a_log: torch.dtype = FP32
    dt_bias: torch.dtype = FP32
    layout: str = "contiguous"  # or "joined": as in one projection of both, or "joined, followed": and of more
    dg_layout: str = "contiguous"
    scale: float = 1.0  # the standard deviation of a and b
    shift: float = 0.0  # of a


def draw(case: Case, seed: int = 0):
    """Return a, b, a_log and dt_bias, and dg and dbeta. Drawn on the CPU: every machine gets the same values."""
    randn, H = normals(seed), case.width * (case.groups or 1)
    shape = (*case.lead, case.width) if case.groups is None else (*case.lead, case.groups, case.width)
    a, b = (case.scale * randn(*shape) for _ in range(2))
    a, b = (a + case.shift).to(case.dtype).to(DEVICE), b.to(case.b).to(DEVICE)
    if case.layout.startswith("joined"):
        more = 5 if "followed" in case.layout else 0
        whole = nans(a, (*case.lead, 2 * H + more))[..., : 2 * H].unflatten(-1, (case.groups or 1, -1))
        whole = whole.chunk(2, -1) if case.groups is not None else [t.squeeze(-2) for t in whole.chunk(2, -1)]
        b, a = (there.copy_(t) for there, t in zip(whole, (b, a), strict=True))
    else:
        a, b = laid_out(a, case.layout), laid_out(b, case.layout)
    vectors = {name: randn(H).to(getattr(case, name)).to(DEVICE) for name in ("a_log", "dt_bias")}
    dys = laid_out(randn(*shape).to(DEVICE), case.dg_layout), randn(*shape).to(case.b).to(DEVICE)
    return {"a": a, "b": b} | vectors, dys


@contextlib.contextmanager
def small_tiles(module):
    """Patch the module to small tiles, on a GPU of three multiprocessors. Yield the counters."""
    names, counters = modules_of(module)["onepass.ops.delta.gate_kernels"], Counters()
    plans = [names["_forward_plan"], names["_backward_plan"]]
    with replaced(names, plans, stream_scratch=counters.scratch, TILE=128, processors=lambda _: 3):
        yield counters


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    with small_tiles(module) if case.small else contextlib.nullcontext() as counters:
        call = partial(module.delta_gates, backend=backend)
        few = case.width * (case.groups or 1) < 32
        return judge_call(call, partial(run, delta_gates_reference), partial(draw, case), case.dtype, counters, few)


# ---- the cases ----


def small_cases() -> list[Case]:
    """Return every option in small tiles: for the mutants."""
    plain = Case()
    groups = Case(groups=16, width=2, layout="joined")
    return [
        plain,
        replace(plain, lead=(3, 17), width=32, dtype=BF16, b=BF16),
        replace(plain, width=40, dtype=FP16, b=BF16, a_log=BF16, dt_bias=FP16, layout="sliced"),
        replace(plain, lead=(2, 3, 5), layout="joined, followed", b=FP32),
        groups,
        replace(groups, lead=(2, 29), dtype=BF16, b=BF16),
        replace(groups, lead=(2, 29), groups=5, width=3, layout="joined, followed", dg_layout="transposed"),
        replace(groups, groups=7, width=1),
        replace(groups, groups=1, width=33),
        replace(groups, layout="contiguous", lead=(1,)),
        replace(plain, layout="transposed", dg_layout="expanded"),
        replace(plain, layout="expanded"),
        replace(plain, scale=30.0),
        replace(plain, shift=-12.0, width=48),
        replace(plain, shift=18.0),
    ]


def real_cases() -> list[Case]:
    """Return cases in the real tiles. They have few rows, because the interpreter is slow."""
    real = Case(small=False)
    return [
        replace(real, lead=(), width=1),
        replace(real, lead=(130,), groups=16, width=2, dtype=BF16, b=BF16, layout="joined, followed"),
        replace(real, lead=(3,), width=4096),
        replace(real, lead=(700,), width=9),
    ]
