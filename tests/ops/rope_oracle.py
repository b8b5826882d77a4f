"""The oracle of rope (see `oracle`)."""

import contextlib
from dataclasses import dataclass, replace
from functools import partial

import torch
from ops import oracle
from ops.oracle import BF16, DEVICE, FP16, FP32, FP64, NamedCase, judge_call, laid_out, nans, normals, replaced

from onepass.ops.attention import rope as real
from onepass.testing.budget import BudgetReport, run
from onepass.testing.poison import unchanged

LAYOUTS = ("contiguous", "fused", "heads first", "one head", "strided", "sliced", "transposed", "swapped", "unaligned")


@dataclass(frozen=True)
class Case(NamedCase):
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


# ---- adversarial inputs ----


def heads_laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values in another memory layout. "expanded" and "one head" repeat some of the values."""
    if layout == "fused":  # a slice of a wider projection
        wide = nans(x, (*x.shape[:-2], 3 * x.shape[-2], x.shape[-1]))
        return wide[..., x.shape[-2] : 2 * x.shape[-2], :].copy_(x)
    if layout == "one head":
        return x[..., :1, :].contiguous().expand(x.shape)
    return oracle.heads_laid_out(x, layout)


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
    randn = normals(seed)
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
    shares = backward["_shares"]
    few = {"_shares": lambda *shape: shares(*shape)._replace(resident=7)} if small and DEVICE == "cpu" else {}
    with replaced(kernels, caches, **({"_VALUES": 64} if small else {})), replaced(backward, **few):
        yield


# ---- the oracle ----


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    inputs, (cos, sin), dys = draw(case)
    options = {"interleaved": case.interleaved}
    if case.weight is not None:
        options |= {"eps": case.eps, "zero_centered_gamma": case.centered}

    def called(function):
        names = ("q_weight", "k_weight") if case.weight is not None else ()
        return lambda q, k, *weights: function(q, k, cos, sin, **dict(zip(names, weights, strict=True)), **options)

    def judged(q, k, *weights):
        y = called(partial(module.rope, backend=backend))(q, k, *weights)
        for one, x in zip(y, (q, k), strict=True):
            assert one.is_contiguous()
            assert case.weight is not None or one[..., case.R :].equal(x[..., case.R :]), "what is not rotated is another"
        return y

    narrow = min((inputs[x].dtype for x in "qk"), key=lambda dtype: dtype.itemsize)
    with small_tiles(module, case.small), unchanged(cos=cos, sin=sin):
        return judge_call(judged, partial(run, called(real.rope_reference)), lambda _: (inputs, dys), narrow)


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
