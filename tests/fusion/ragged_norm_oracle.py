"""The oracle of ragged_norm (see `ops.oracle`)."""

import contextlib
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from ops.oracle import BF16, DEVICE, FP16, FP32, LAYOUTS, Counters, NamedCase, broken, laid_out, modules_of, normals, replaced

from onepass.ops.norm.ragged import ragged_norm as real
from onepass.runtime.backend import use_backend
from onepass.testing.budget import BudgetReport, compare
from onepass.testing.poison import poisoned, unchanged


@dataclass(frozen=True)
class Case(NamedCase):
    """One forward and one backward call. `multiprocessors`: of the GPU that the work is divided for."""

    widths: tuple[int, ...] = (5, 16, 40, 100)
    lead: tuple[int, ...] = (37,)
    layer: bool = True
    dtype: torch.dtype = FP32
    vectors: torch.dtype | None = FP32
    biases: bool = True
    strided: bool = False  # weights and biases
    packed: bool = True
    slices: bool = False  # lanes are slices of one tensor
    layout: str = "contiguous"  # mixed: every other lane is unaligned
    dy_layout: str = "contiguous"
    asked: tuple[bool, bool] = (True, True)
    multiprocessors: int = 2
    tile: int = 128  # elements: so few that there are several tiles of each kind; 0 for the real tiles
    eps: float = 1e-5
    mean: float = 0.0

    @property
    def norm(self) -> str:
        return "layer_norm" if self.layer else "rms_norm"


def draw(case: Case, seed: int = 0):
    """Return xs, weights, biases and dys. They are drawn on the CPU, so every machine gets the same values."""
    normal = normals(seed)

    def randn(*shape, dtype=case.dtype):
        return normal(*shape).to(dtype).to(DEVICE)

    def lanes(layout):
        whole = (randn(*case.lead, sum(case.widths), dtype=FP32) + case.mean).to(case.dtype)
        pieces = laid_out(whole, layout).split(case.widths, -1)
        if case.slices:
            return list(pieces)
        layouts = ("contiguous", "unaligned") if layout == "mixed" else (layout,)
        return [laid_out(piece.clone(), layouts[i % len(layouts)]) for i, piece in enumerate(pieces)]

    xs, dys = lanes(case.layout), lanes(case.dy_layout)
    weights, biases = [], []
    if case.vectors is not None:
        weights = [randn(width, dtype=case.vectors) for width in case.widths]
        biases = [randn(width, dtype=case.vectors) for width in case.widths] if case.biases and case.layer else []
    if case.strided:
        weights, biases = ([laid_out(t, "strided") for t in group] for group in (weights, biases))
    return xs, weights, biases, dys


@contextlib.contextmanager
def small(module, case: Case):
    """Patch the module to small tiles on a GPU of a few multiprocessors. Yield the counters, which must stay 0."""
    modules = modules_of(module)
    kernels, lanes = modules["onepass.ops.norm.ragged.kernels"], modules["onepass.ops.norm.ragged.lanes"]
    counters = Counters()
    changes = {"device_zeros": lambda count, device: counters.take(count), "processors": lambda _: case.multiprocessors}
    if case.tile:
        changes |= {"_FORWARD_TILE": case.tile, "_BACKWARD_TILE": case.tile, "_SPAN": 8, "_SHARE_S": 4, "_SHARE_H": 16}
    lanes["_plans"].clear()
    try:
        with replaced(kernels, **changes):
            yield counters
    finally:
        lanes["_plans"].clear()


def run(module, case: Case, xs, weights, biases, dys) -> dict[str, torch.Tensor]:
    """Return all outputs of the forward and the backward operator, lane by lane."""
    y, mean, rstd = module._forward(xs, weights, biases, case.norm, case.eps, case.packed)
    dx, dweight, dbias = module._backward(dys, xs, weights, mean, rstd, case.norm, case.packed, *asked_of(case))
    found = {"rstd": rstd} | ({"mean": mean} if case.layer else {})
    for name, whole in (("y", y), ("dx", dx)):
        assert whole.is_contiguous() and whole.dtype == case.dtype
        lanes = lanes_of(whole, list(case.widths), case.lead, case.packed)
        found |= {f"{name}{i}": lane for i, lane in enumerate(lanes)}
    for name, whole, asked in zip(("dweight", "dbias"), (dweight, dbias), asked_of(case), strict=True):
        assert whole.numel() == (sum(case.widths) if asked else 0) and whole.dtype == (case.vectors or case.dtype)
        found |= {f"{name}{i}": lane for i, lane in enumerate(whole.split(case.widths))} if asked else {}
    return found


def lanes_of(y: torch.Tensor, widths: list[int], lead: tuple[int, ...], packed: bool) -> list[torch.Tensor]:
    """Return views of the lanes of an operator's output."""
    if packed:
        return list(y.split(widths, -1))
    rows = y.numel() // sum(widths)
    starts = [rows * column for column in accumulate(widths, initial=0)]
    return [y[start : start + rows * width].view(*lead, width) for start, width in zip(starts, widths, strict=False)]


def asked_of(case: Case) -> tuple[bool, bool]:
    return case.asked[0] and case.vectors is not None, case.asked[1] and case.layer


def exact(case: Case, xs, weights, biases, dys, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Compute the same outputs in `dtype`, by the formula of one norm and autograd."""
    found, stats = {}, []
    for i, (x, dy) in enumerate(zip(xs, dys, strict=True)):
        leaf = x.detach().to(dtype).requires_grad_()
        vectors = [(group[i].to(dtype) if group else None) for group in (weights, biases)]
        weight = torch.ones_like(leaf[(0,) * len(case.lead)]) if vectors[0] is None else vectors[0]
        weight = weight.detach().requires_grad_()
        bias = (torch.zeros_like(weight) if vectors[1] is None else vectors[1]).detach().requires_grad_()
        (y,) = real.ragged_norm_reference([leaf], [weight], [bias], norm=case.norm, eps=case.eps)
        dx, dweight, dbias = torch.autograd.grad(y, (leaf, weight, bias), dy.to(dtype))
        found |= {f"y{i}": y.detach(), f"dx{i}": dx}
        found |= {f"dweight{i}": dweight} if asked_of(case)[0] else {}
        found |= {f"dbias{i}": dbias} if asked_of(case)[1] else {}
        rows = leaf.detach().reshape(-1, leaf.shape[-1])
        mean = rows.mean(-1)
        away = rows - mean[:, None] if case.layer else rows
        stats.append((mean, torch.rsqrt(away.square().mean(-1) + case.eps)))
    found["rstd"] = torch.stack([rstd for _, rstd in stats])
    return found | ({"mean": torch.stack([mean for mean, _ in stats])} if case.layer else {})


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    """Judge a case against the budget, in poisoned memory. Inputs that the module must not write are checked too."""
    trials = []
    switch = use_backend if module is real else modules_of(module)["onepass.runtime.backend"]["use_backend"]
    for seed in range(2 if case.tile else 4):  # outputs of few elements are pooled over seeds
        xs, weights, biases, dys = draw(case, seed)
        named = {f"{name}{i}": t for name, ts in zip("xwbd", (xs, weights, biases, dys), strict=True) for i, t in enumerate(ts)}
        with small(module, case) as counters, switch(backend):
            try:
                with poisoned(), unchanged(**named):
                    ours = run(module, case, xs, weights, biases, dys)
                    assert counters.clean(), "a counter was not set back, or one past them was set"
            except AssertionError as error:
                return broken("memory", str(error))
        trials.append((ours, *(exact(case, xs, weights, biases, dys, wide) for wide in (FP32, torch.float64))))
    return compare(trials, case.dtype)


def small_cases() -> list[Case]:
    """Return every branch with every feature, for the mutants."""
    plain = Case(widths=(20, 100), lead=(19,))
    return [
        plain,
        replace(plain, layer=False, packed=False, slices=True, dtype=BF16),
        replace(plain, widths=(64, 16, 128), slices=True, layout="sliced", dy_layout="sliced"),
        replace(plain, packed=False, lead=(3, 4), dtype=FP16, vectors=FP16, eps=0.5),
        replace(plain, widths=(48,), lead=(41,), multiprocessors=9),
        replace(plain, widths=(16,), lead=(150,), multiprocessors=9),
        replace(plain, widths=(2050, 30), lead=(5,), multiprocessors=1),
        replace(plain, widths=(30, 2100), lead=(5,), layer=False, packed=False, dtype=BF16, multiprocessors=1),
        replace(plain, vectors=None, asked=(False, True)),
        replace(plain, asked=(True, False), mean=3.0),
        replace(plain, widths=(16, 32), layout="mixed"),
        replace(plain, widths=(16, 32), lead=(3, 4), layout="swapped", dy_layout="sliced"),
        replace(plain, strided=True),
        replace(plain, widths=(48,), lead=(5,), multiprocessors=9),  # one program, where others might have been waited for
        replace(plain, widths=(20, 60), lead=(60,), multiprocessors=1),  # as many programs as there can be
    ]


def real_cases() -> list[Case]:
    """Return cases with the real tiles: dtypes, layouts and boundary sizes."""
    plain = Case(tile=0, lead=(9,))
    cases = [
        plain,
        replace(plain, layer=False, dtype=BF16, vectors=BF16),
        replace(plain, widths=(1, 2, 3, 17, 33, 255), packed=False),
        replace(plain, widths=(1,), lead=(1,), eps=0.25),
        replace(plain, widths=(32,) * 6, slices=True, dtype=BF16),
        replace(plain, widths=(16, 2048, 1000), lead=(3,), dtype=FP16),
        replace(plain, widths=(4100, 8), lead=(2, 2), dtype=BF16),
        replace(plain, lead=()),
        replace(plain, lead=(2, 1, 3), layer=False, vectors=None),
        replace(plain, widths=(24, 72), lead=(130,), biases=False),
    ]
    return cases + [
        replace(plain, lead=(4, 3), layout=layout, dy_layout=layout, slices=bool(i % 2), packed=bool(i % 3))
        for i, layout in enumerate(LAYOUTS)
    ]
