"""The oracle of rope: `judge_case` decides whether a module computes a case within the error budget.

The real module must pass every case, and each mutant must fail one.
"""

import contextlib
from dataclasses import dataclass, replace

import torch
from ops.bias_activation_oracle import laid_out

from onepass.ops.attention import rope as real
from onepass.testing.budget import BudgetReport, Finding, compare, run
from onepass.testing.poison import poisoned, unchanged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
LAYOUTS = ("contiguous", "fused", "heads first", "one head", "strided", "sliced", "transposed", "swapped", "unaligned")
TABLES = ("for all", "each", "one lead", "sliced", "unlike", "strided")


@dataclass(frozen=True)
class Case:
    """One call. q has shape [*lead, HQ, D]. `small`: use tiles so small that there are several of each kind."""

    lead: tuple[int, ...] = (2, 7)
    HQ: int = 6
    HK: int = 2
    D: int = 16
    R: int = 16
    dtype: torch.dtype = FP32
    k_dtype: torch.dtype | None = None  # None: q's dtype
    table: torch.dtype = FP32
    interleaved: bool = False
    scale: float = 1.0  # the tables' factor, not 1 in models that scale positions
    layout: str = "contiguous"
    dy_layout: str = "contiguous"
    tables: str = "for all"
    small: bool = False

    def __str__(self) -> str:
        parts = ["small" if self.small else "real", "x".join(map(str, self.lead)), f"{self.HQ}/{self.HK}x{self.D}", f"R={self.R}"]
        parts += [str(self.dtype), *(["interleaved"] if self.interleaved else [])]
        plain = Case()
        for name in ("k_dtype", "table", "scale", "layout", "dy_layout", "tables"):
            parts += [f"{name}={getattr(self, name)}"] if getattr(self, name) != getattr(plain, name) else []
        return "-".join(part.replace("torch.", "") for part in parts)


# ---- adversarial inputs ----


def heads_laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values in another memory layout. "expanded" and "one head" repeat some of the values."""
    if layout == "fused":  # a slice of a wider projection
        wide = torch.full((*x.shape[:-2], 3 * x.shape[-2], x.shape[-1]), float("nan"), dtype=x.dtype, device=x.device)
        return wide[..., x.shape[-2] : 2 * x.shape[-2], :].copy_(x)
    if layout == "heads first":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "one head":
        return x[..., :1, :].contiguous().expand(x.shape)
    return laid_out(x, layout)


def tables_laid_out(cos: torch.Tensor, sin: torch.Tensor, kind: str):
    """Return both tables in a layout. The given tables have values for every token."""
    if kind == "for all" or (kind == "one lead" and cos.dim() == 2):
        return [t.reshape(-1, *t.shape[-2:])[0] for t in (cos, sin)]
    if kind == "one lead":
        return [t[:1].contiguous() for t in (cos, sin)]
    if kind == "unlike":  # the two tables have different strides
        return [laid_out(cos, "sliced"), sin]
    return [laid_out(t, kind) for t in (cos, sin)]


def draw(case: Case, seed: int = 0):
    """Return q and k, the tables, and the outputs' gradients. Drawn on the CPU: every machine gets the same values."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    types = case.dtype, case.k_dtype or case.dtype
    shapes = [(*case.lead, H, case.D) for H in (case.HQ, case.HK)]
    q, k = (heads_laid_out(randn(*s).to(t).to(DEVICE), case.layout) for s, t in zip(shapes, types, strict=True))
    dys = tuple(heads_laid_out(randn(*s).to(t).to(DEVICE), case.dy_layout) for s, t in zip(shapes, types, strict=True))
    angles = 3 * randn(*case.lead, case.R // 2)
    cos, sin = ((case.scale * f(angles)).to(case.table).to(DEVICE) for f in (torch.cos, torch.sin))
    return {"q": q, "k": k}, tables_laid_out(cos, sin, case.tables), dys


@contextlib.contextmanager
def small_tiles(module, small: bool = True):
    """Patch the module's tiles to 64 elements."""
    kernels = module.rotate.__globals__  # a mutant's kernels can't be imported
    caches = kernels["rope_tiles"], kernels["_plan"], kernels["_bind"]
    before = kernels["_VALUES"]
    kernels["_VALUES"] = 64 if small else before
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        kernels["_VALUES"] = before
        for cache in caches:
            cache.cache_clear()


# ---- the oracle ----


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    """Judge a case against the budget, in poisoned memory. Inputs that the module must not write are checked too."""
    inputs, (cos, sin), dys = draw(case)
    with small_tiles(module, case.small):
        try:
            with poisoned(), unchanged(**inputs, cos=cos, sin=sin, dq=dys[0], dk=dys[1]):
                ours = run(lambda q, k: module.rope(q, k, cos, sin, interleaved=case.interleaved, backend=backend), inputs, dys)
        except AssertionError as error:
            return BudgetReport([Finding("memory", str(error), float("nan"), 0.0, 0.0)])
    for y, x in (("y0", "q"), ("y1", "k")):
        assert ours[y].dtype == ours[f"d{x}"].dtype == inputs[x].dtype
        assert ours[y].is_contiguous()
        if case.R < case.D and not ours[y][..., case.R :].equal(inputs[x][..., case.R :]):
            return BudgetReport([Finding(y, "what is not turned", float("nan"), 0.0, 0.0)])

    def formula(q, k):
        return real.rope_reference(q, k, cos, sin, interleaved=case.interleaved)

    narrow = min((x.dtype for x in inputs.values()), key=lambda dtype: dtype.itemsize)
    return compare([(ours, *(run(formula, inputs, dys, wide) for wide in (FP32, FP64)))], narrow)


# ---- the cases ----


def small_cases() -> list[Case]:
    """Every feature, in tiles so small that there are several of each kind: what the mutants are tried on."""
    plain = Case(small=True)
    variants = [
        {},
        {"R": 10, "D": 21, "HQ": 5, "HK": 3, "scale": 1.5},  # odd sizes, partly turned
        {"HQ": 1, "HK": 7, "D": 6, "R": 6, "lead": (3, 1, 5), "tables": "each"},
        {"dtype": BF16, "R": 8, "tables": "each", "dy_layout": "heads first"},
        {"dtype": FP16, "k_dtype": FP32, "table": FP16, "tables": "unlike"},
        {"layout": "fused", "dy_layout": "one head", "tables": "one lead"},
        {"layout": "heads first", "dy_layout": "fused", "tables": "sliced", "scale": 0.5},
        {"layout": "swapped", "lead": (2, 3, 5), "dy_layout": "swapped", "tables": "each"},  # three that do not merge
        {"layout": "strided"},
        {"tables": "strided", "table": BF16, "layout": "heads first"},
        {"HQ": 1, "HK": 1, "D": 8, "R": 6, "lead": (3, 11)},  # several tokens a program
    ]
    return [replace(plain, interleaved=interleaved, **variant) for variant in variants for interleaved in (False, True)]


def real_cases() -> list[Case]:
    llama = Case(lead=(2, 3), HQ=32, HK=8, D=128, R=128, dtype=BF16)
    cases = [
        llama,
        replace(llama, layout="heads first", dy_layout="heads first", table=BF16),
        replace(llama, layout="fused", tables="each", interleaved=True),
        Case(lead=(3, 5), HQ=12, HK=12, D=64, R=64, dtype=BF16),
        Case(lead=(3,), HQ=71, HK=1, D=64, R=64, dtype=FP16, interleaved=True),
        Case(lead=(5,), HQ=5, HK=5, D=80, R=32, dtype=BF16),
        Case(lead=(5,), HQ=10, HK=2, D=80, R=80, dtype=BF16, tables="sliced"),
        Case(lead=(2, 2), HQ=3, HK=3, D=96, R=96, interleaved=True),
        Case(lead=(4,), HQ=8, HK=4, D=256, R=256, dtype=BF16),
        Case(lead=(4,), HQ=8, HK=1, D=256, R=64, dtype=BF16, interleaved=True, scale=1.3),
        Case(lead=(9, 1), HQ=1, HK=1, D=2, R=2, tables="each"),
        Case(lead=(1, 300), HQ=1, HK=1, D=64, R=64, table=FP64),
        Case(lead=(2,), HQ=1, HK=1, D=4096, R=4096, dtype=BF16),
        Case(lead=(2, 3, 4), HQ=2, HK=1, D=24, R=12, dtype=BF16),
        Case(lead=(2, 3, 4), HQ=2, HK=1, D=24, R=12, layout="transposed", dy_layout="expanded"),
        Case(lead=(11,), HQ=4, HK=4, D=40, R=40, dtype=BF16, layout="unaligned", dy_layout="unaligned"),
    ]
    return cases
