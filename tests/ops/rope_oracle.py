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
    tables: str = "for all"  # or "each", "one lead", "sliced", "unlike", "strided"
    weight: torch.dtype | None = None  # of a norm of each head; None: there is none
    centered: bool = False
    eps: float = 1e-6
    small: bool = False

    def __str__(self) -> str:
        parts = ["small" if self.small else "real", "x".join(map(str, self.lead)), f"{self.HQ}/{self.HK}x{self.D}", f"R={self.R}"]
        parts += [str(self.dtype), *(["interleaved"] if self.interleaved else []), *(["centered"] if self.centered else [])]
        plain = Case()
        for name in ("k_dtype", "table", "scale", "layout", "dy_layout", "tables", "weight", "eps"):
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
    inputs = {"q": q, "k": k}
    if case.weight is not None:  # heads of all sizes, and of so small ones that eps has a say
        inputs = {name: (x * 10.0 ** randn(*x.shape[:-1], 1).to(DEVICE)).to(x.dtype) for name, x in inputs.items()}
        inputs = {name: heads_laid_out(x, case.layout) for name, x in inputs.items()}
        inputs |= {f"{name}_weight": (randn(case.D) + (not case.centered)).to(case.weight).to(DEVICE) for name in "qk"}
    return inputs, tables_laid_out(cos, sin, case.tables), dys


@contextlib.contextmanager
def small_tiles(module, small: bool = True):
    """Patch the module's tiles to 64 elements, and its backward with a norm to several programs."""
    kernels = module.rotate.__globals__  # a mutant's kernels can't be imported
    backward = module.normed_rope.__globals__["rotate_back"].__globals__
    caches = kernels["rope_tiles"], kernels["_plan"], kernels["_bind"], backward["_backward_plan"], backward["_bind_backward"]
    before = kernels["_VALUES"], backward["_RESIDENT"]
    if small:
        kernels["_VALUES"], backward["_RESIDENT"] = 64, 7 if DEVICE == "cpu" else before[1]
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        kernels["_VALUES"], backward["_RESIDENT"] = before
        for cache in caches:
            cache.cache_clear()


# ---- the oracle ----


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    """Judge a case against the budget, in poisoned memory. Inputs that the module must not write are checked too."""
    inputs, (cos, sin), dys = draw(case)
    options = {"interleaved": case.interleaved}
    if case.weight is not None:
        options |= {"eps": case.eps, "zero_centered_gamma": case.centered}

    def called(function, **more):
        def call(q, k, q_weight=None, k_weight=None):
            return function(q, k, cos, sin, q_weight=q_weight, k_weight=k_weight, **options, **more)

        return call

    with small_tiles(module, case.small):
        try:
            with poisoned(), unchanged(**inputs, cos=cos, sin=sin, dq=dys[0], dk=dys[1]):
                ours = run(called(module.rope, backend=backend), inputs, dys)
        except AssertionError as error:
            return BudgetReport([Finding("memory", str(error), float("nan"), 0.0, 0.0)])
    for y, x in (("y0", "q"), ("y1", "k")):
        assert ours[y].dtype == ours[f"d{x}"].dtype == inputs[x].dtype
        assert ours[y].is_contiguous()
        if case.weight is None and case.R < case.D and not ours[y][..., case.R :].equal(inputs[x][..., case.R :]):
            return BudgetReport([Finding(y, "what is not rotated", float("nan"), 0.0, 0.0)])
    formula = called(real.rope_reference)
    narrow = min((inputs[x].dtype for x in "qk"), key=lambda dtype: dtype.itemsize)
    return compare([(ours, *(run(formula, inputs, dys, wide) for wide in (FP32, FP64)))], narrow)


# ---- the cases ----


def small_cases() -> list[Case]:
    """Every feature, in tiles so small that there are several of each kind: what the mutants are tried on."""
    plain = Case(small=True)
    variants = [
        {},
        {"R": 10, "D": 21, "HQ": 5, "HK": 3, "scale": 1.5},  # odd sizes, partly rotated
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


def small_normed_cases() -> list[Case]:
    """Every feature with a norm of each head, in small tiles."""
    plain = Case(small=True, weight=FP32)
    variants = [
        {},
        {"R": 10, "D": 21, "HQ": 5, "HK": 3, "scale": 1.5, "centered": True},
        {"HQ": 1, "HK": 7, "D": 6, "R": 6, "lead": (3, 1, 5), "tables": "each", "eps": 0.1},
        {"dtype": BF16, "weight": BF16, "R": 8, "tables": "each", "dy_layout": "heads first", "eps": 1e-2},
        {"dtype": FP16, "k_dtype": FP32, "table": FP16, "tables": "unlike", "weight": BF16, "centered": True},
        {"layout": "fused", "dy_layout": "one head", "tables": "one lead"},
        {"layout": "swapped", "lead": (2, 3, 5), "dy_layout": "swapped", "tables": "each"},  # three that do not merge
        {"layout": "strided", "D": 40, "R": 40, "weight": FP16},
        {"lead": (1, 3), "HQ": 1, "HK": 1},  # fewer tiles than programs
    ]
    return [replace(plain, interleaved=interleaved, **variant) for variant in variants for interleaved in (False, True)]


def normed_cases() -> list[Case]:
    """The widths of models, in the tiles that are shipped."""
    qwen = Case(lead=(2, 5), HQ=16, HK=8, D=128, R=128, dtype=BF16, weight=BF16)
    return [
        qwen,
        replace(qwen, weight=FP32, interleaved=True, layout="fused", tables="each"),
        replace(qwen, dtype=FP16, weight=FP16, layout="heads first", dy_layout="heads first", table=FP16),
        replace(qwen, HQ=4, HK=1, D=256, R=256, centered=True),
        replace(qwen, HQ=16, HK=2, D=256, R=64, centered=True, interleaved=True),
        replace(qwen, HQ=12, HK=12, D=64, R=64, dtype=FP32, weight=FP32),
        *(replace(qwen, lead=(3,), HQ=6, HK=2, D=D, R=R) for D, R in ((80, 80), (80, 32), (96, 96), (192, 192), (2, 2))),
        replace(qwen, lead=(2,), HQ=1, HK=1, D=4096, R=4096),
        replace(qwen, lead=(1, 300), HQ=1, HK=1, D=64, R=64, table=FP64, dtype=FP32),
    ]


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
