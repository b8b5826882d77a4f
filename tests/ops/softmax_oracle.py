"""The oracle of softmax (see `oracle`).

The exact result is the formula in fp64. The baseline is the formula in fp32; it stores y rounded, as the op does, and computes dx
from the stored y. dx is also judged alone, as the exact gradient of the y that the module stored.
"""

import contextlib
from dataclasses import dataclass, replace

import torch
from ops import oracle
from ops.oracle import BF16, DEVICE, FP16, FP32, FP64, NamedCase, broken, laid_out, replaced

from onepass.ops.softmax import softmax as real
from onepass.testing.budget import BudgetReport, compare, run
from onepass.testing.poison import poisoned, unchanged

INF, NAN = float("inf"), float("nan")
LAYOUTS = (*oracle.LAYOUTS, "followed")
MASKS = ("full", "heads", "columns", "rows", "vector", "one", "transposed", "sliced", "expanded", "alternating", "gaps")


@dataclass(frozen=True)
class Case(NamedCase):
    shape: tuple[int, ...] = (2, 3, 9, 40)
    dtype: torch.dtype = FP32
    scale: float = 0.5
    mask: str = ""
    causal: bool = False
    path: str = ""  # "" for the real tiles
    size: float = 2.0  # the standard deviation of the scores
    odd: bool = False  # some rows have NaN and infinities, masked and not masked, and dy has NaN where it is masked
    low: bool = False  # some rows have only the lowest number of their dtype
    layout: str = "contiguous"
    dy_layout: str = "contiguous"


# ---- inputs ----


def draw_mask(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor | None:
    """Return a mask, True for masked scores: a third of them, and all of some rows. `shape` is x's shape."""

    def random(*some: int) -> torch.Tensor:
        found = torch.rand(some, generator=generator) < 1 / 3
        if len(some) > 1 and some[-2] > 1:
            found[..., -1, :] = True
        return found

    if not kind:
        return None
    d = len(shape)
    if kind == "heads" and d > 2:
        return random(*shape[:-3], 1, *shape[-2:])
    if kind == "columns" and d > 1:
        return random(*shape[:1], *[1] * (d - 2), shape[-1])
    if kind == "rows":
        return random(*shape[:-1], 1)
    if kind == "vector":
        return random(shape[-1])
    if kind == "one":
        return torch.rand(1, generator=generator) < 1 / 3
    if kind == "transposed" and d > 1:
        return random(*shape).transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == "sliced":
        return torch.cat([random(*shape), torch.ones(*shape[:-1], 3, dtype=torch.bool)], -1)[..., : shape[-1]]
    if kind == "expanded" and d > 2:
        return random(*shape[:-3], 1, *shape[-2:]).expand(shape)
    if kind == "gaps" and d > 2:  # unused memory after the rows of each matrix, and after the matrices
        return random(*shape[:-3], shape[-3] + 1, shape[-2] + 1, shape[-1])[..., : shape[-3], : shape[-2], :]
    if kind == "alternating":
        return random(*(1 if (d - i) % 2 else size for i, size in enumerate(shape[:-1])), shape[-1])
    return random(*shape)


def draw(case: Case, seed: int = 0):
    """Return x and the mask, and dy. They are drawn on the CPU, so every machine gets the same values."""
    generator = torch.Generator().manual_seed(seed)
    x = case.size * torch.randn(case.shape, generator=generator)
    dy = torch.randn(case.shape, generator=generator)
    if case.odd:
        odd = torch.rand(case.shape, generator=generator)
        for value, part in ((NAN, 0.02), (INF, 0.04), (-INF, 0.2)):
            x[(odd < part) & (odd >= 0)] = value
            odd[odd < part] = 1.0
        rows = x.view(-1, case.shape[-1])
        rows[0] = -INF
        rows[len(rows) // 2, : rows.shape[1] // 2 + 1] = -INF
    if case.low:
        x.view(-1, case.shape[-1])[::2] = torch.finfo(case.dtype).min
    mask = draw_mask(case.mask, case.shape, generator)
    if case.odd and mask is not None and case.dy_layout != "expanded":
        dy.masked_fill_(mask, NAN)
    x, dy = (laid_out(t.to(case.dtype).to(DEVICE), layout) for t, layout in ((x, case.layout), (dy, case.dy_layout)))
    return {"x": x, "mask": None if mask is None else mask.to(DEVICE)}, dy


# ---- tiles so small that there are several of each kind, and the last one is partial ----


@contextlib.contextmanager
def small_tiles(module, path: str):
    """Patch the module's tiles: a few rows a program, or one, as for rows above 1024. A mutant's kernels can't be imported."""
    names = module.softmax_forward.__globals__

    def small(C):
        return names["SoftmaxTiles"](4 if path == "rows" else 1, names["power_of_two"](C) if C > 1 else 2, 1)

    changes = {"softmax_tiles": small} if path else {}
    with replaced(names, [names["_forward_plan"], names["_backward_plan"]], **changes):
        yield


# ---- the oracle ----


def gradient(y: torch.Tensor, dy: torch.Tensor, scale: float) -> torch.Tensor:
    """Return dx for the stored y. It is 0 where y is 0."""
    products = torch.where(y == 0, 0.0, y * dy)
    return torch.where(y == 0, 0.0, scale * y * (dy - products.sum(-1, keepdim=True)))


class _StoredSoftmax(torch.autograd.Function):
    """The formula, with y rounded to the storage dtype for backward."""

    @staticmethod
    def forward(ctx, x, mask, case):
        y = real.softmax_reference(x, mask, scale=case.scale, causal=case.causal)
        ctx.scale = case.scale
        ctx.save_for_backward(y.to(case.dtype).to(y.dtype))
        return y

    @staticmethod
    def backward(ctx, dy):
        return gradient(*ctx.saved_tensors, dy, ctx.scale), None, None


def call(module, case: Case, backend: str = "triton"):
    def op(x, mask):
        return module.softmax(x, scale=case.scale, mask=mask, causal=case.causal, backend=backend)

    return op


def exact(case: Case):
    return lambda x, mask: real.softmax_reference(x, mask, scale=case.scale, causal=case.causal)


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    """Judge a case against the budget, in poisoned memory. Inputs that the module must not write are checked too."""
    trials = []
    seeds = range(4 if case.shape[-1] < 32 else 1)  # outputs of few elements are pooled over seeds
    with small_tiles(module, case.path):
        for seed in seeds:
            inputs, dy = draw(case, seed)
            try:
                with poisoned(), unchanged(**inputs, dy=dy):
                    ours = run(call(module, case, backend), inputs, dy)
            except AssertionError as error:
                return broken("memory", str(error))
            if ours["y"].dtype != case.dtype or ours["dx"].dtype != case.dtype:
                return broken("y and dx", f"types {ours['y'].dtype}, {ours['dx'].dtype}")
            baseline = run(lambda x, mask: _StoredSoftmax.apply(x, mask, case), inputs, dy, FP32)
            wide = run(exact(case), inputs, dy, FP64)
            y = ours["y"].detach()
            again = (
                {"dx of the y stored": ours["dx"]},
                *({"dx of the y stored": gradient(y.to(t), dy.to(t), case.scale)} for t in (FP32, FP64)),
            )
            trials.append(tuple(a | b for a, b in zip((ours, baseline, wide), again, strict=True)))
    return compare(trials, case.dtype)


# ---- the cases ----


def main_cases() -> list[Case]:
    """Return every path with every mask, causal or not, with dtypes and layouts in turn: for the mutants and for a GPU."""
    cases = []
    turn = 0
    for path in ("rows", "single"):
        for mask in ("", *MASKS):
            for causal in (False, True):
                shape = ((2, 3, 9, 40), (3, 2, 7, 33), (2, 2, 5, 16), (2, 3, 2, 5, 24))[turn % 4]
                cases.append(
                    Case(
                        shape, (FP32, BF16, FP16)[turn % 3], (0.5, -1.0, 3.0)[turn % 3], mask, causal, path,
                        odd=turn % 5 == 4, layout=LAYOUTS[turn % 8], dy_layout=LAYOUTS[(turn // 2) % 8],
                    )
                )  # fmt: skip
                turn += 1
    plain = Case()
    cases += [
        replace(plain, shape=(37, 20), causal=True, path="rows", odd=True, mask="full"),
        replace(plain, shape=(37, 20), causal=True, path="single", odd=True, mask="full"),
        replace(plain, shape=(12, 40), causal=True, path="single", dtype=BF16),
        replace(plain, shape=(50, 40), causal=True, path="single", odd=True),
        replace(plain, shape=(2, 3, 2, 2, 5, 24), mask="alternating", path="rows"),
        replace(plain, shape=(3, 2, 2, 3, 5, 24), mask="alternating", path="single", dtype=BF16),
        replace(plain, shape=(2, 3, 2, 5, 24), mask="alternating", path="rows"),
        replace(plain, shape=(5, 32), size=1e4),
        replace(plain, shape=(5, 64), size=1e4, path="single", dtype=BF16),
        replace(plain, shape=(5, 40), size=1e38, scale=2.0, mask="full"),
        replace(plain, shape=(5, 40), size=1e-30, causal=True),
        replace(plain, shape=(5, 40), scale=1.0, low=True, mask="full"),
        replace(plain, shape=(5, 40), scale=1.0, low=True, dtype=BF16, path="rows"),
    ]
    return cases


def real_cases() -> list[Case]:
    """Return cases with the real tiles, narrow and wide. They have few rows, because the interpreter is slow."""
    cases = [
        Case((7, 1), mask="full"),
        Case((1, 1)),
        Case((33,), BF16),
        Case((300, 3), FP16, mask="rows"),
        Case((130, 16), causal=True),
    ]
    for C in (1000, 1024, 1025, 2048, 4096, 5000, 8192, 16384):
        cases += [Case((3, C), BF16, causal=C == 4096), Case((2, 2, C), FP32, mask="heads" if C % 3 else "full")]
    cases += [Case((1, 2, 1500, 1500), BF16, causal=True)] if DEVICE == "cuda" else []
    cases += [Case((2, 3, 5, 40), dtype, layout=layout, dy_layout=layout) for dtype in (FP32, BF16) for layout in LAYOUTS]
    return cases
