"""The oracle of gated_rms_norm: `judge_case` decides whether a module computes a case within the error budget.

`module` is the real module or a mutant. The real module must pass every case, and each mutant must fail one.
"""

import contextlib
from dataclasses import dataclass, fields, replace

import torch
from ops.norm_oracle import BF16, DEVICE, FP16, FP32, LAYOUTS, Counters, heads_laid_out, modules_of

from onepass.ops.norm.gated_norm import gated_rms_norm_reference
from onepass.testing.budget import BudgetReport, Finding, compare, run
from onepass.testing.poison import poisoned, unchanged


@dataclass(frozen=True)
class Case:
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

    def __str__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return "-".join(said).replace("torch.", "") or "plain"


OPTIONS = "eps", "zero_centered_gamma", "activation", "norm_before_gate", "group_size"


def draw(case: Case, seed: int = 0):
    """Return x, z and weight, and dy. Drawn on the CPU: every machine gets the same values."""
    generator = torch.Generator().manual_seed(seed)

    def rows(size, dtype, layout):
        drawn = size * torch.randn((*case.lead, case.H), generator=generator)
        return heads_laid_out(drawn.to(dtype).to(DEVICE), layout)

    x, z = rows(case.scale, case.dtype, case.layout), rows(case.gate, case.z or case.dtype, case.z_layout)
    weight = None if case.weight is None else torch.randn(case.H, generator=generator).to(case.weight).to(DEVICE)
    return {"x": x, "z": z, "weight": weight}, rows(1.0, case.dtype, case.dy_layout)


# ---- tiles so small that there are several of each kind, and the last one is partial ----

# rows a program, and in backward how many of them a multiprocessor has, of three
PATHS = {"rows": (4, 2), "single": (1, 47), "alone": (64, 1)}


@contextlib.contextmanager
def small_tiles(module, path: str):
    """Patch the module to the tiles of a path, on a GPU of three multiprocessors. Yield the counters, which must stay 0."""
    modules = modules_of(module)
    names = modules["onepass.ops.norm.gated_kernels"]
    if DEVICE == "cpu":  # the interpreter patches only the real grid_sync: a mutant's copy would wait for ever
        from onepass.testing import interpreter

        modules["onepass.kernels.grid_sync"]["yield_to_programs"] = interpreter._yield_to_programs
    counters = Counters()
    changes = {
        "stream_scratch": lambda floats, count, device: (torch.empty(floats, device=device), counters.take(count)),
    }
    if path:
        rows, resident = PATHS[path]

        def tiles(H, *_):
            return names["GatedNormTiles"](rows, names["power_of_two"](H), 1, 2, resident)

        changes |= {"gated_forward_tiles": tiles, "gated_backward_tiles": tiles, "processors": lambda _: 3}
    before = {name: names[name] for name in changes}
    names.update(changes)
    for plan in ("_forward_plan", "_backward_plan"):
        names[plan].cache_clear()
    try:
        yield counters
    finally:
        names.update(before)
        for plan in ("_forward_plan", "_backward_plan"):
            names[plan].cache_clear()


# ---- the oracle ----


def call(module, case: Case, backend: str = "triton"):
    options = {name: getattr(case, name) for name in OPTIONS}
    return lambda x, z, weight: module.gated_rms_norm(x, z, weight, backend=backend, **options)


def formula(case: Case):
    options = {name: getattr(case, name) for name in OPTIONS}
    return lambda x, z, weight: gated_rms_norm_reference(x, z, weight, **options)


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    """Judge a case against the budget, in poisoned memory. Inputs and counters that the module must leave are checked too."""
    trials = []
    seeds = range(4 if case.H < 32 else 1)  # outputs of few elements are pooled over seeds
    with small_tiles(module, case.path) as counters:
        for seed in seeds:
            inputs, dy = draw(case, seed)
            try:
                with poisoned(), unchanged(**inputs, dy=dy):
                    ours = run(call(module, case, backend), inputs, dy)
                    assert counters.clean(), "a counter was not set back, or one past them was set"
            except AssertionError as error:
                return BudgetReport([Finding("memory", str(error), float("nan"), 0.0, 0.0)])
            assert ours["y"].dtype == case.dtype
            assert all(ours[f"d{name}"].dtype == t.dtype for name, t in inputs.items() if t is not None)
            trials.append((ours, *(run(formula(case), inputs, dy, wide) for wide in (FP32, torch.float64))))
    return compare(trials, case.dtype)


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
