"""The oracle of layer_norm and rms_norm (see `oracle`)."""

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch
from ops import oracle
from ops.oracle import BF16, DEVICE, FP16, FP32, Counters, NamedCase, heads_laid_out, judge_call, modules_of, normals, replaced

from onepass.ops.norm import norm as real
from onepass.testing import budget
from onepass.testing.budget import BudgetReport, run

LAYOUTS = (*oracle.LAYOUTS, "part", "heads first")


@dataclass(frozen=True)
class Case(NamedCase):
    """One call. `path` names tiles of PATHS that replace the real ones; "" keeps the real ones."""

    layer: bool = False
    path: str = ""
    lead: tuple[int, ...] = (37,)
    H: int = 100
    dtype: torch.dtype = FP32
    weight: torch.dtype | None = FP32
    bias: torch.dtype | None = None
    residual: torch.dtype | None = None
    centered: bool = False
    memory_efficient: bool = False
    eps: float = 1e-5
    mean: float = 0.0  # the mean of x's rows, in standard deviations
    scale: float = 1.0  # the standard deviation of x
    gamma: float = 1.0  # the standard deviation of the weight
    uses: str = "both"  # which of y and h get a gradient
    layout: str = "contiguous"
    dy_layout: str = "contiguous"


def draw(case: Case, seed: int = 0):
    """Return x, weight, bias and residual, and the outputs' gradients. Drawn on the CPU: every machine gets the same values."""
    randn = normals(seed)
    shape = (*case.lead, case.H)
    x = (case.scale * (randn(*shape) + case.mean)).to(case.dtype)
    weight = bias = residual = None
    if case.weight is not None:
        weight = case.gamma * randn(case.H)
        weight = (weight - 0.75 if case.centered else weight).to(case.weight).to(DEVICE)
    if case.bias is not None:
        bias = randn(case.H).to(case.bias).to(DEVICE)
    if case.residual is not None:
        residual = heads_laid_out((case.scale * randn(*shape)).to(case.residual).to(DEVICE), case.dy_layout)
    x = heads_laid_out(x.to(DEVICE), case.layout)
    dy, dh = (heads_laid_out(randn(*shape).to(case.dtype).to(DEVICE), case.dy_layout) for _ in range(2))
    inputs = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    return inputs, dy if case.residual is None else (dy, dh if case.uses == "both" else None)


# ---- tiles so small that there are several of each kind, and the last one is partial ----

# forward: the size of a row's pieces and how many a program holds; (0, 0): several rows a program, in registers
# backward: shared, rows at a time, columns, warps, programs a multiprocessor
PATHS = {
    "rows": ((0, 0), (False, 4, 0, 4, 2)),
    "single": ((0, 0), (False, 1, 0, 1, 7)),  # more programs than one pass over their sums takes
    "chunks": ((32, 2), (False, 2, 64, 4, 1)),
    "reloaded": ((16, 3), (False, 1, 16, 1, 3)),  # weights are reloaded for each row
    "fold": ((128, 1), (False, 2, 256, 1, 1)),
    "shared": ((16, 1), (True, 1, 16, 2, 4)),
    "few": ((0, 0), (False, 4, 0, 4, 2)),
    "crowd": ((16, 3), (True, 1, 16, 1, 16)),  # so many groups that several programs share the last sums
}
MULTIPROCESSORS = 3


@contextlib.contextmanager
def small_tiles(module, path: str):
    """Patch the module to the tiles of a path, on a GPU of three multiprocessors. Yield the counters, which must stay 0.

    A mutant has modules of its own, which are found from its functions.
    """
    modules = modules_of(module)
    backward, forward, few = (modules[f"onepass.ops.norm.{name}"] for name in ("backward", "forward", "few_rows"))
    counters, of_forward, of_few = Counters(), {}, {}
    of_backward = {"stream_scratch": counters.scratch}
    if path:
        (piece, held), (shared, block_m, block_h, warps, resident) = PATHS[path]

        def tiles_on(H, *_):
            width = min(block_h, backward["power_of_two"](H)) or backward["power_of_two"](H)
            return backward["NormBackwardTiles"](
                shared, block_m, width, backward["ceil_div"](H, width), warps, 2, resident, path == "reloaded"
            )

        def forward_tiles(H, *_):
            return forward["NormForwardTiles"](False, 1, piece, 1, min(held, forward["ceil_div"](H, piece)))

        of_backward |= {"_tiles_on": tiles_on, "processors": lambda _: MULTIPROCESSORS}
        of_few = {"few_rows_tiles": lambda H: few["FewRowsTiles"](4, 16, 1)} if path == "few" else {"MOST_ROWS": 0}
        if piece:
            of_forward = {"SHORT": 0, "forward_tiles": forward_tiles}
            of_backward |= {"SHORT": 0}
    caches = backward["_plan"], few["_plan"], forward["_bind"], forward["_forward_plan"]
    with replaced(backward, caches, **of_backward), replaced(few, **of_few), replaced(forward, **of_forward):
        yield counters


# ---- the oracle ----


def call(module, case: Case, backend: str = "triton"):
    options = {"zero_centered_gamma": case.centered, "memory_efficient": case.memory_efficient, "backend": backend}

    def op(x, weight, bias, residual):
        if case.layer:
            return module.layer_norm(x, weight, bias, case.eps, residual=residual, **options)
        return module.rms_norm(x, weight, case.eps, residual=residual, **options)

    return op


def formula(case: Case):
    options = {"eps": case.eps, "zero_centered_gamma": case.centered, "stored": case.dtype}

    def reference(x, weight, bias, residual):
        if case.layer:
            return real.layer_norm_reference(x, weight, bias, residual, **options)
        return real.rms_norm_reference(x, weight, residual, **options)

    return reference


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    # a row's mean may be rounded either way, in the baseline too: allow half an ulp of it, as rows have a deviation of about 1
    slack = budget.SLACK + (abs(case.mean) * 2**-24 if case.layer else 0.0)
    with small_tiles(module, case.path) as counters, mock.patch.object(budget, "SLACK", slack):
        by, exact = call(module, case, backend), partial(run, formula(case))
        return judge_call(by, exact, partial(draw, case), case.dtype, counters, case.H < 32)


# ---- the cases ----


def small_cases() -> list[Case]:
    """Return every kernel with every feature, in tiles so small that there are several of each kind: for the mutants."""
    layer = Case(True, bias=FP32)
    rms = Case()
    mixed = {"dtype": BF16, "weight": FP32, "residual": BF16}
    cases = []
    for path, M, H in (("rows", 37, 100), ("chunks", 13, 100), ("fold", 13, 300), ("shared", 21, 45), ("few", 14, 45)):
        few = M * 2 // 3
        cases += [
            replace(layer, path=path, lead=(M,), H=H, residual=FP32),
            replace(rms, path=path, lead=(M,), H=H, centered=True),
            replace(rms, path=path, lead=(M,), H=H, residual=FP32, memory_efficient=True, layout="sliced"),
            replace(layer, path=path, lead=(M,), H=H, memory_efficient=True, mean=3.0, weight=FP16, dy_layout="sliced"),
            replace(layer, path=path, lead=(M,), H=H, **mixed, centered=True, uses="y"),
            replace(rms, path=path, lead=(M,), H=H, **mixed, layout="transposed"),
            replace(layer, path=path, lead=(few,), H=H, weight=None, bias=BF16),
            replace(rms, path=path, lead=(2, few // 2), H=H, weight=None, dtype=FP16),
        ]
    cases += [
        replace(layer, path="single", lead=(43,)),
        replace(rms, path="single", lead=(30,), H=500),  # more tiles of columns than helpers
        replace(layer, path="single", lead=(3,), H=600),
        replace(rms, path="single", lead=(43,), dtype=BF16, weight=BF16),
        replace(layer, path="reloaded", lead=(10,), H=92, centered=True, residual=FP32),
        replace(rms, path="reloaded", lead=(10,), H=92, dtype=BF16),
        replace(layer, path="few", lead=(9,), H=64, dtype=BF16, weight=None),
        replace(rms, path="few", lead=(2,), H=1),
        replace(layer, path="few", lead=(7,), H=40, layout="sliced"),
        replace(rms, path="few", lead=(7,), H=40, dy_layout="sliced", residual=FP32),
        replace(layer, path="crowd", lead=(18,), H=45),
        replace(rms, path="crowd", lead=(19,), H=45, dtype=BF16, weight=BF16),
        replace(layer, path="shared", H=64, eps=0.5, scale=0.5, lead=(25,)),
        replace(rms, path="shared", H=64, eps=0.5, scale=0.5, lead=(25,), memory_efficient=True),
        replace(rms, path="chunks", lead=(11,), H=128, eps=0.5, scale=0.5, memory_efficient=True),
        replace(layer, path="chunks", H=100, lead=(2,)),  # one program
        replace(layer, path="chunks", H=100, lead=(3,)),  # two
        replace(rms, path="fold", H=300, lead=(1,), dtype=BF16, weight=BF16),
        replace(layer, path="rows", H=64, lead=(2, 3, 4), layout="swapped", eps=0.5, scale=0.5),
        replace(layer, path="rows", H=24, lead=(3, 2, 5), layout="part", residual=FP32),
        replace(rms, path="rows", H=24, lead=(3, 2, 5), layout="part", memory_efficient=True),
        replace(rms, path="rows", H=24, lead=(2, 3, 5), layout="contiguous", dy_layout="part"),
        replace(rms, path="rows", H=24, lead=(1, 4, 5), layout="heads first", dy_layout="part"),
    ]
    return cases


def real_cases() -> list[Case]:
    """Return cases with the real tiles, short and long. They have few rows, because the interpreter is slow."""
    layer = Case(True, weight=FP32, bias=FP32)
    heads = Case(lead=(3, 2, 4), H=64, dtype=BF16, weight=BF16)
    cases = [
        Case(H=1, lead=(5,), eps=0.25),
        Case(True, H=1, lead=(5,), bias=FP32),
        Case(H=1, lead=(1,), eps=0.25),
        Case(H=2),
        Case(H=33, lead=()),
        Case(True, H=3, lead=(2, 3), bias=FP32),
        Case(H=1000, lead=(5,), dtype=FP16, weight=FP32),
        replace(layer, H=1024, lead=(3,)),
        heads,
        replace(heads, H=128, layer=True, bias=BF16),
        replace(heads, layout="swapped"),
        replace(heads, layout="sliced"),
        replace(heads, layout="part", dy_layout="heads first"),
        replace(layer, H=1500, lead=(3,)),
        Case(H=1025, lead=(3,), dtype=BF16, weight=BF16, memory_efficient=True),
        Case(H=4097, lead=(2,), residual=FP32),
        replace(layer, H=8191, lead=(2,), dtype=BF16, residual=BF16),
        replace(layer, H=11000, lead=(3,), dtype=BF16),
        Case(H=12300, lead=(5,), dtype=BF16, weight=BF16),
        replace(layer, path="shared", H=512, lead=(6,), mean=100.0),
        Case(H=12300, lead=(3,), residual=FP32, memory_efficient=True),
    ]
    for layout in LAYOUTS:
        cases.append(replace(layer, H=40, lead=(4, 3), layout=layout, dy_layout=layout, residual=FP32))
    # adversarial values
    for path in ("rows", "chunks", "fold"):
        M, H = (9, 300) if path == "fold" else (11, 100)
        cases += [
            replace(layer, path=path, lead=(M,), H=H, mean=100.0),
            replace(layer, path=path, lead=(M,), H=H, mean=100.0, memory_efficient=True),
            replace(layer, path=path, lead=(M,), H=H, mean=100.0, scale=1e18),  # the squares of x overflow
            Case(path=path, lead=(M,), H=H, scale=1e-20),
            Case(path=path, lead=(M,), H=H, scale=1e15),
            replace(layer, path=path, lead=(M,), H=H, scale=1e15),
            Case(path=path, lead=(M,), H=H, gamma=1e-7, memory_efficient=True),
            replace(layer, path=path, lead=(M,), H=H, gamma=1e-7, memory_efficient=True),
            Case(path=path, lead=(M,), H=H, dtype=FP16, weight=FP16, scale=1e4),
            Case(path=path, lead=(M,), H=H, eps=1e-12, scale=1e-5),
        ]
    cases += [
        Case(path="shared", H=40, lead=(18,), scale=1e15),
        Case(path="shared", H=40, lead=(18,), gamma=1e-7, memory_efficient=True),
        Case(path="shared", H=40, lead=(18,), scale=1e-20),
        replace(layer, path="shared", H=40, lead=(18,), gamma=1e-7, memory_efficient=True),
        replace(layer, path="shared", H=40, lead=(18,), scale=1e15, memory_efficient=True),
        replace(layer, path="shared", H=40, lead=(18,), mean=3.0, dtype=BF16),
        Case(path="shared", H=40, lead=(1,)),
        Case(path="shared", H=33, lead=(2,)),
        replace(layer, path="shared", H=32, lead=(9,)),
        Case(dtype=BF16, weight=FP16, residual=FP32),
        Case(dtype=FP32, weight=BF16, residual=BF16),
        replace(layer, dtype=FP16, residual=FP32, path="chunks", lead=(9,)),
    ]
    return cases
