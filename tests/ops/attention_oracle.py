"""The oracle of attention: `judge_case` decides whether a module computes a case within the error budget.

The real module must pass every case, and each mutant must fail one.
"""

import contextlib
import importlib
from dataclasses import dataclass, replace

import torch
from ops.bias_activation_oracle import laid_out

from onepass.ops.attention.formula import parts_of
from onepass.ops.attention.rope_formula import rope_formula
from onepass.testing.budget import BudgetReport, Finding, compare
from onepass.testing.poison import poisoned, unchanged

real = importlib.import_module("onepass.ops.attention.attention")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
LAYOUTS = ("contiguous", "sliced", "swapped", "unaligned", "strided", "followed")


@dataclass(frozen=True)
class Case:
    """One call.

    R: how many dimensions of a head are rotated, 0 for no tables. spread: the standard deviation of q and k, which scales the
    logits. small: use tiles so small that there are several of each kind.
    """

    B: int = 2
    S: int = 37
    heads: int = 4
    groups: int = 2
    D: int = 16
    R: int = 16
    dtype: torch.dtype = BF16
    interleaved: bool = False
    scale: float | None = None
    spread: float = 1.0
    layout: str = "contiguous"
    each: bool = False  # each sequence has its own tables
    overwrite: bool = False
    small: bool = False

    def __str__(self) -> str:
        parts = [f"{self.B}x{self.S}x{self.heads}/{self.groups}x{self.D}", str(self.dtype).removeprefix("torch.")]
        plain = Case()
        for name in ("R", "scale", "spread", "layout"):
            parts += [f"{name}={getattr(self, name)}"] if getattr(self, name) != getattr(plain, name) else []
        return "-".join(parts + [name for name in ("interleaved", "each", "overwrite", "small") if getattr(self, name)])

    @property
    def options(self):
        return {"interleaved": self.interleaved, "scale": self.scale}


class Made(torch.autograd.Function):
    """A layer's output in a memory layout. It is not a leaf, which could not be overwritten."""

    @staticmethod
    def forward(ctx, x, layout):
        return laid_out(x.clone(), layout)

    @staticmethod
    def backward(ctx, dx):
        return dx, None


def draw(case: Case, seed: int = 0):
    """Return contiguous qkv, the tables or None for both, and the gradient of y."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    every = case.heads + 2 * case.groups
    qkv = randn(case.B, case.S, every, case.D)
    qkv[:, :, : case.heads + case.groups] *= case.spread
    qkv = qkv.flatten(2).to(case.dtype).to(DEVICE)
    dy = randn(case.B, case.S, case.heads * case.D).to(case.dtype).to(DEVICE)
    if not case.R:
        return qkv, None, None, dy
    angles = 3 * randn(*((case.B,) if case.each else ()), case.S, case.R // 2).to(DEVICE)
    return qkv, angles.cos(), angles.sin(), dy


@contextlib.contextmanager
def small_tiles(module, small: bool = True):
    """Patch the module's tiles to 16 and 32 tokens."""
    if not small:
        yield
        return
    forward, backward = module.attend.__globals__, module.attend_backward.__globals__  # a mutant's can't be imported
    tiles = forward["AttentionTiles"]
    places = [(forward, "forward_tiles", (32, 16)), (backward, "dq_tiles", (32, 16)), (backward, "dk_dv_tiles", (16, 32))]
    stock = [(names, name, names[name]) for names, name, _ in places]
    for names, name, sizes in places:
        names[name] = lambda *_, sizes=sizes: tiles(*sizes, 4, 1)
    try:
        yield
    finally:
        for names, name, function in stock:
            names[name] = function


# ---- the oracle ----


def as_parts(case: Case, y: torch.Tensor, dqkv: torch.Tensor):
    """Return the results by name. The softmax over one token is constant, so only v has a gradient then."""
    dq, dk, dv = parts_of(dqkv, case.heads, case.groups)
    return {"y": y, "dv": dv} if case.S == 1 else {"y": y, "dq": dq, "dk": dk, "dv": dv}


def exact(case: Case, qkv, cos, sin, dy):
    leaf = qkv.detach().double().requires_grad_()
    cos, sin = (t if t is None else t.double() for t in (cos, sin))
    y = real.attention_reference(leaf, case.heads, case.groups, cos=cos, sin=sin, **case.options)
    return as_parts(case, y.detach(), *torch.autograd.grad(y, leaf, dy.double()))


def baseline(case: Case, qkv, cos, sin, dy):
    """Compute in fp32, but round stored tensors and operands of products to qkv's dtype, as flash attention does."""

    def rounded(x):
        return x.to(qkv.dtype).float()

    def turned(x, sign):
        return x if cos is None else rounded(rope_formula(x, cos.float(), sign * sin.float(), case.interleaved))

    def heads_first(x):
        x = x.transpose(1, 2)
        return x.repeat_interleave(case.heads // x.shape[1], 1)

    def back(x, heads):
        """Sum over the query heads that share a key and value head."""
        return x.unflatten(1, (heads, -1)).sum(2).transpose(1, 2)

    q, k, v = parts_of(qkv.detach().float(), case.heads, case.groups)
    q, k, v = heads_first(turned(q, 1)), heads_first(turned(k, 1)), heads_first(v)
    scale = case.D**-0.5 if case.scale is None else case.scale
    later = torch.ones(case.S, case.S, dtype=torch.bool, device=qkv.device).triu(1)
    scores = (q @ k.mT * scale).masked_fill(later, float("-inf"))
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    total = p.sum(-1, keepdim=True)
    y = rounded(rounded(p) @ v / total)
    p, dy = p / total, heads_first(dy.float().unflatten(-1, (case.heads, -1)))
    ds = rounded(p * (dy @ v.mT - (dy * y).sum(-1, keepdim=True)))
    dq, dk, dv = rounded(ds @ k * scale), ds.mT @ q * scale, rounded(p).mT @ dy
    dq, dk, dv = back(dq, case.heads), rounded(back(dk, case.groups)), back(dv, case.groups)
    dqkv = torch.cat([turned(dq, -1), turned(dk, -1), dv], 2).flatten(2)
    return as_parts(case, y.transpose(1, 2).flatten(2), dqkv)


def computed(module, case: Case, qkv, cos, sin, dy, backend: str = "triton"):
    """Return y, qkv's gradient, and qkv afterwards. qkv is the output of another operator."""
    leaf = qkv.detach().requires_grad_()
    made = Made.apply(leaf, case.layout)
    options = case.options | {"cos": cos, "sin": sin, "overwrite": case.overwrite, "backend": backend}
    y = module.attention(made, case.heads, case.groups, **options)
    (dqkv,) = torch.autograd.grad(y, leaf, dy)
    return y.detach(), dqkv, made.detach()


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    """Judge a case against the budget, in poisoned memory. Inputs that the module must not write are checked too.

    Single rows are not judged: the first query has one key, so its gradient is rounding only.
    """
    qkv, cos, sin, dy = draw(case)
    with small_tiles(module, case.small):
        try:
            with poisoned(), unchanged(qkv=qkv, cos=cos, sin=sin, dy=dy):
                y, dqkv, made = computed(module, case, qkv, cos, sin, dy, backend)
        except AssertionError as error:
            return BudgetReport([Finding("memory", str(error), float("nan"), 0.0, 0.0)])
    assert y.dtype == dqkv.dtype == case.dtype
    assert y.is_contiguous()
    if not (case.overwrite and case.R) and not made.equal(qkv):
        return BudgetReport([Finding("qkv", "overwritten", float("nan"), 0.0, 0.0)])
    trial = as_parts(case, y, dqkv), baseline(case, qkv, cos, sin, dy), exact(case, qkv, cos, sin, dy)
    found = [finding for finding in compare([trial], case.dtype).findings if finding.measure != "worst row"]
    if backend == "torch":  # it rounds each head's gradients before it sums over the heads that share a group
        found = [replace(finding, allowed=2 * finding.allowed) for finding in found]
    return BudgetReport(found)


# ---- the cases ----


def small_cases() -> list[Case]:
    """Return every feature, in tiles so small that there are several of each kind: for the mutants."""
    case = Case(small=True)
    return [
        case,
        replace(case, S=70, heads=6, groups=3, R=0, dtype=FP16, layout="followed"),
        replace(case, S=65, heads=3, groups=1, R=8, interleaved=True, overwrite=True, layout="sliced"),
        replace(case, S=33, D=32, R=12, scale=0.5, overwrite=True, each=True),
        replace(case, S=96, heads=2, groups=2, R=0, layout="swapped", spread=8.0),
        replace(case, S=48, R=6, interleaved=True, layout="unaligned"),
    ]


def real_cases() -> list[Case]:
    """Return cases with the real tiles, at sizes that are not multiples of them."""
    case = Case()
    return [
        *(replace(case, S=S, overwrite=bool(S % 2)) for S in (1, 17, 130)),
        replace(case, B=1, S=257, heads=2, groups=1, R=0),
        replace(case, B=1, S=130, heads=2, groups=1, D=32, R=20, dtype=FP16, overwrite=True),
        replace(case, B=1, S=140, heads=2, groups=2, D=64, R=64, overwrite=True),
        replace(case, B=1, S=20, heads=2, groups=1, D=128, R=64, interleaved=True),
        replace(case, heads=7, groups=1, S=5),
        replace(case, S=130, heads=3, groups=3, spread=40.0, R=0),
        replace(case, scale=3.0, layout="strided", overwrite=True),
    ]
