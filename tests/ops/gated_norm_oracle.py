"""The oracle of gated_rms_norm (see `oracle`)."""

import contextlib
from dataclasses import dataclass, replace
from functools import partial

import torch
from ops.norm_oracle import LAYOUTS
from ops.oracle import BF16, DEVICE, FP16, FP32, Counters, NamedCase, heads_laid_out, judge_call, modules_of, normals, replaced

from onepass.ops.norm.gated_norm import gated_rms_norm_reference
from onepass.testing.budget import BudgetReport, run


@dataclass(frozen=True)
class Case(NamedCase):
    """One call. `path` names tiles of PATHS that replace the real ones; "" keeps the real ones."""

    path: str = ""
    lead: tuple[int, ...] = (37,)
    H: int = 40
    dtype: torch.dtype = FP32
    z: torch.dtype | None = None  # x's
    weight: torch.dtype | None = FP32
    zero_centered_gamma: bool = False
    activation: str = "silu"
    norm_before_gate: bool = True
    group_size: int | None = None
    eps: float = 1e-5
    scale: float = 1.0  # the standard deviation of x
    gate: float = 2.0  # and of z
    layout: str = "contiguous"
    z_layout: str = "contiguous"
    dy_layout: str = "contiguous"


OPTIONS = "eps", "zero_centered_gamma", "activation", "norm_before_gate", "group_size"


def draw(case: Case, seed: int = 0):
    """Return x, z and weight, and dy. Drawn on the CPU: every machine gets the same values."""
    randn = normals(seed)

    def rows(size, dtype, layout):
        return heads_laid_out((size * randn(*case.lead, case.H)).to(dtype).to(DEVICE), layout)

    x, z = rows(case.scale, case.dtype, case.layout), rows(case.gate, case.z or case.dtype, case.z_layout)
    weight = None if case.weight is None else randn(case.H).to(case.weight).to(DEVICE)
    return {"x": x, "z": z, "weight": weight}, rows(1.0, case.dtype, case.dy_layout)


# ---- tiles so small that there are several of each kind, and the last one is partial ----

# rows a program, and in backward how many of them a multiprocessor has, of three
PATHS = {"rows": (4, 2), "single": (1, 47), "alone": (64, 1)}


@contextlib.contextmanager
def small_tiles(module, path: str):
    """Patch the module to the tiles of a path, on a GPU of three multiprocessors. Yield the counters, which must stay 0."""
    names, counters = modules_of(module)["onepass.ops.norm.gated_kernels"], Counters()
    changes = {"stream_scratch": counters.scratch}
    if path:
        rows, resident = PATHS[path]

        def tiles(H, *_):
            return names["GatedNormTiles"](rows, names["power_of_two"](H), 1, 2, resident)

        changes |= {"gated_forward_tiles": tiles, "gated_backward_tiles": tiles, "processors": lambda _: 3}
    with replaced(names, [names["_forward_plan"], names["_backward_plan"]], **changes):
        yield counters


# ---- the oracle ----


def call(module, case: Case, backend: str = "triton"):
    options = {name: getattr(case, name) for name in OPTIONS}
    return lambda x, z, weight: module.gated_rms_norm(x, z, weight, backend=backend, **options)


def formula(case: Case):
    options = {name: getattr(case, name) for name in OPTIONS}
    return lambda x, z, weight: gated_rms_norm_reference(x, z, weight, **options)


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    with small_tiles(module, case.path) as counters:
        by, exact = call(module, case, backend), partial(run, formula(case))
        return judge_call(by, exact, partial(draw, case), case.dtype, counters, case.H < 32)


# ---- the cases ----


def small_cases() -> list[Case]:
    """Return every option in tiles so small that there are several of each kind: for the mutants."""
    cases = []
    for norm_first in (True, False):
        plain = Case("rows", norm_before_gate=norm_first)
        cases += [
            plain,
            replace(plain, dtype=BF16, weight=BF16, activation="sigmoid", zero_centered_gamma=True),
            replace(plain, H=44, group_size=22, zero_centered_gamma=True, weight=BF16),
            replace(plain, lead=(3, 2, 5), H=24, layout="part", eps=0.5, scale=0.5),
            replace(plain, lead=(3, 2, 5), H=24, z_layout="part", dtype=BF16, weight=FP32),
            replace(plain, lead=(3, 2, 5), H=24, dy_layout="part", z=BF16),
            replace(plain, lead=(19, 2), layout="sliced", z=BF16, activation="sigmoid"),
            replace(plain, lead=(7, 3), z_layout="sliced", dtype=FP16, weight=None),
            replace(plain, lead=(4, 9), dy_layout="sliced", H=64, weight=FP16),
            replace(plain, path="single", lead=(3, 47), H=33),  # more programs than one pass over their sums takes
            replace(plain, path="alone", lead=(43,), dtype=BF16),
            replace(plain, path="alone", lead=(43,), H=48, group_size=16),
        ]
    return cases


def real_cases() -> list[Case]:
    """Return cases with the real tiles. They have few rows, because the interpreter is slow."""
    heads = Case(lead=(3, 2, 4), H=64, dtype=BF16, weight=BF16)
    cases = [
        Case(H=1, lead=(5,), eps=0.25),
        Case(H=3, lead=(2, 3)),
        Case(H=33, lead=()),
        heads,
        replace(heads, H=128, layout="part", z_layout="heads first", dy_layout="part"),
        replace(heads, H=256, z_layout="part", zero_centered_gamma=True),
        Case(H=1000, lead=(5,), dtype=FP16, weight=FP32),
        Case(H=2048, lead=(3,), group_size=512, norm_before_gate=False, dtype=BF16),
        Case(H=5120, lead=(2,), dtype=BF16, weight=BF16, norm_before_gate=False),
        Case(H=8192, lead=(2,)),
        Case(H=8192, lead=(2,), dtype=BF16, norm_before_gate=False),
        Case(H=16384, lead=(2,), group_size=1024),
    ]
    for i, layout in enumerate(LAYOUTS):
        z_layout, dy_layout = LAYOUTS[(i + 2) % len(LAYOUTS)], LAYOUTS[(i + 5) % len(LAYOUTS)]
        cases.append(Case(lead=(4, 3), layout=layout, z_layout=z_layout, dy_layout=dy_layout, norm_before_gate=i % 2 == 0))
    for norm_first in (True, False):  # adversarial values
        plain = Case("rows", lead=(11,), norm_before_gate=norm_first)
        cases += [
            replace(plain, scale=1e-20),
            replace(plain, scale=1e15),
            replace(plain, scale=1e-5, eps=1e-12),
            replace(plain, scale=1e4, dtype=FP16, weight=FP16),
            replace(plain, gate=30.0),
            replace(plain, gate=300.0, eps=0.1),
            replace(plain, gate=30.0, activation="sigmoid", eps=0.1),
        ]
    return cases
