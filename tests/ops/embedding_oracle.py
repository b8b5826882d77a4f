"""The oracle of embedding (see `oracle`). y must be exact. The gradient is judged returned, and added to main_grad."""

import contextlib
from dataclasses import dataclass

import torch
from ops.oracle import BF16, DEVICE, FP16, FP32, FP64, NamedCase, broken, replaced

from onepass.testing.budget import Finding, compare
from onepass.testing.poison import poisoned, unchanged


@dataclass(frozen=True)
class Case(NamedCase):
    """One call. `start` and `size` are those of the vocabulary where weight is a part of it; `strange`: ids of no vocabulary."""

    M: int = 150
    rows: int = 40
    H: int = 5
    dtype: torch.dtype = FP32
    main: torch.dtype | None = None  # of main_grad
    draw: str = "uniform"  # how ids are drawn: uniform, zipf, alike, sorted, distinct, halves
    start: int = 0
    size: int | None = None
    padding: int | None = None
    strange: bool = False
    ids: torch.dtype = torch.int64
    layout: str = "contiguous"  # of dy, weight, ids and main_grad; or columns, rows, expanded
    tiles: tuple[int, int] | None = None  # segments of the order, and columns a program of backward
    sorts: bool = True  # in the kernel

    @property
    def options(self):
        return {"padding_idx": self.padding, "vocab_start": self.start, "vocab_size": self.size}


def drawn_ids(case, generator):
    V = case.size or case.rows
    made = {
        "uniform": lambda: torch.randint(V, (case.M,), generator=generator),
        "zipf": lambda: (V * torch.rand(case.M, generator=generator) ** 6).long(),
        "alike": lambda: torch.full((case.M,), V - 1),
        "sorted": lambda: torch.arange(case.M) * V // max(case.M, 1),
        "distinct": lambda: torch.randperm(V, generator=generator)[: case.M],
        "halves": lambda: torch.where(torch.arange(case.M) % 3 == 0, V // 2, torch.randint(V, (case.M,), generator=generator)),
    }
    ids = made[case.draw]()
    if case.strange:
        ids[::7], ids[1::7] = V, -1
        ids[2::14] = 1 << 30
    return ids.to(case.ids)


def laid_out(t, layout):
    """Return t with a gap after each row or each element, which holds NaN, or for ids a row of their own."""
    nan = float("nan") if t.is_floating_point() else 0
    if layout == "columns":
        return t.new_full((*t.shape, 2), nan)[..., 0].copy_(t)
    if layout == "rows" and t.dim() > 1:
        return t.new_full((*t.shape[:-1], t.shape[-1] + 3), nan)[..., 1:-2].copy_(t)
    return t


def draw(case, seed=0):
    """Return ids, weight, dy and main_grad before. They are drawn on the CPU, so every machine gets the same values."""
    generator = torch.Generator().manual_seed(seed)
    ids = drawn_ids(case, generator).to(DEVICE)
    weight = torch.randn(case.rows, case.H, generator=generator).to(DEVICE, case.dtype)
    dy = (torch.randn(case.M, case.H, generator=generator) + 0.5).to(DEVICE, case.dtype)
    before = torch.randn(case.rows, case.H, generator=generator).to(DEVICE, case.main or case.dtype)
    if case.layout == "expanded":
        return ids, weight, dy[:1].expand(case.M, case.H), before
    return tuple(laid_out(t, case.layout) for t in (ids, weight, dy, before))


def local_rows(case, ids):
    """Return the row that each id's gradient goes to, -1 for none, and whether the id is of the vocabulary."""
    V = case.size or case.rows
    ids = ids.long()
    known = (ids >= 0) & (ids < V)
    local = ids - case.start
    trained = known & (local >= 0) & (local < case.rows)
    padded = ids == (case.padding % V if case.padding is not None else -1)
    return torch.where(trained & ~padded, local, -1), known


def expected_y(case, ids, weight):
    _, known = local_rows(case, ids)
    local = ids.long() - case.start
    here = known & (local >= 0) & (local < case.rows)
    y = torch.where(here.unsqueeze(-1), weight[torch.where(here, local, 0)], 0.0)
    return torch.where(known.unsqueeze(-1), y, float("nan")).to(weight.dtype)


def expected_gradient(case, ids, dy, before, dtype):
    """Sum in dtype, row by row; `before` is None where the gradient is returned."""
    rows, _ = local_rows(case, ids)
    keep = rows >= 0
    total = torch.zeros(case.rows, case.H, dtype=dtype, device=dy.device)
    total.index_add_(0, rows[keep], dy[keep].to(dtype))
    return total if before is None else total + before.to(dtype)


@contextlib.contextmanager
def small_tiles(module, case):
    """In the block the kernels of `module` have the case's tiles. Yield the counters, which all calls share, as on a GPU."""
    forward, backward = module.look_up.__globals__, module.rows_gradient.__globals__["sum_rows"].__globals__
    segments, block_h = (forward["_ORDER"].segments, backward["_BLOCK_H"]) if case.tiles is None else case.tiles
    order = forward["_ORDER"]._replace(segments=segments)
    rows = forward["_MOST_ROWS"] if case.sorts else 0
    plans = forward["_plan"], backward["_plan"]
    counters = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    kept = {} if DEVICE == "cuda" else {"stream_scratch": lambda *_: (None, counters)}
    with replaced(forward, plans, _ORDER=order, _MOST_ROWS=rows, **kept), replaced(backward, _BLOCK_H=block_h, **kept):
        yield counters


def results(module, case, ids, weight, dy, before, backend):
    """Return y and the gradient, twice, of which the second call's must be the same bits."""
    found = []
    for _ in range(2):
        leaf = weight.detach().requires_grad_()
        if case.main is not None:
            leaf.main_grad = laid_out(before.clone(), case.layout)
        # ids are not read, as on a GPU
        with replaced(module.embedding.__globals__, _ids_are_sound=lambda *_: not case.strange and DEVICE == "cpu"):
            y = module.embedding(ids, leaf, backend=backend, **case.options)
        y.backward(dy)
        found.append((y.detach(), leaf.grad if case.main is None else leaf.main_grad))
    return found


def judge_case(module, case, seed=0, backend="triton"):
    """Judge `module.embedding` on a case. Tensors and memory that it must not write are checked too."""
    ids, weight, dy, before = draw(case, seed)
    try:
        with small_tiles(module, case) as counters, poisoned(), unchanged(ids=ids, weight=weight, dy=dy, before=before):
            (y, grad), (y_again, grad_again) = results(module, case, ids, weight, dy, before, backend)
    except AssertionError as error:
        return broken("memory", str(error))
    target = None if case.main is None else before
    base, exact = (expected_gradient(case, ids, dy, target, dtype) for dtype in (FP32, FP64))
    kind = case.main or case.dtype
    untouched = torch.ones(case.rows, dtype=torch.bool, device=DEVICE)
    rows, _ = local_rows(case, ids)
    untouched[rows[rows >= 0]] = False
    left = torch.zeros_like(before) if case.main is None else before
    report = compare([({"grad": grad}, {"grad": base}, {"grad": exact})], kind)
    same = torch.equal(y.nan_to_num(7), y_again.nan_to_num(7)) and torch.equal(grad, grad_again)
    around = getattr(grad, "_base", None) if case.layout in ("columns", "rows") and case.main is not None else None
    report.findings += [
        Finding("y", "differs", float(not _equal(y, expected_y(case, ids, weight))), 0, 0),
        Finding("types", "differ", float(y.dtype is not case.dtype or grad.dtype is not kind), 0, 0),
        Finding("rows nobody looked up", "differ", float((grad[untouched] != left[untouched]).sum()), 0, 0),
        Finding("calls", "differ", float(not same), 0, 0),
        Finding("counters", "left", float(counters.count_nonzero()), 0, 0),
        Finding("memory between rows", "written", 0.0 if around is None else float((~around.isnan()).sum() - grad.numel()), 0, 0),
    ]
    return report


def _equal(a, b):
    return a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def main_cases():
    """Return every path: for the mutants, and for a GPU."""
    return [
        Case(),
        Case(7, 11, 6, BF16),
        Case(300, 9, 20, draw="alike", main=FP32),
        Case(333, 1000, 9, BF16, FP32, "zipf", tiles=(2, 1024)),
        Case(500, 300, 40, FP16, draw="halves", tiles=(4, 16)),
        Case(200, 7, 33, BF16, BF16, "sorted", tiles=(2, 16)),
        Case(129, 1, 3, FP32, FP16, "alike"),
        Case(130, 13, 10, FP32, FP32, start=11, size=40, padding=-18, strange=True, tiles=(2, 1024)),
        Case(90, 40, 8, padding=3, strange=True, ids=torch.int32),
        Case(128, 2, 4, draw="sorted", main=FP32),
        Case(192, 3, 4, draw="sorted", main=BF16),
        Case(100, 50, 6, FP32, FP32, layout="columns"),
        Case(100, 50, 6, BF16, FP32, layout="rows"),
        Case(200, 70, 12, BF16, draw="zipf", layout="expanded"),
        Case(180, 31, 7, draw="zipf", sorts=False, size=50, start=10, padding=12, strange=True),
        Case(64, 5000, 2, draw="distinct", main=FP32),
    ]
