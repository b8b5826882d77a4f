"""The oracle of attention (see `oracle`)."""

import contextlib
import importlib
from dataclasses import dataclass, replace

import torch
from ops.oracle import BF16, DEVICE, FP16, FP32, NamedCase, broken, laid_out, replaced
from ops.packed_oracle import packed_attention, visible

from onepass.ops.attention.formula import parts_of
from onepass.ops.attention.rope_formula import rope_formula
from onepass.runtime.documents import tables_of_documents
from onepass.testing.budget import BudgetReport, Finding, compare
from onepass.testing.poison import poisoned, unchanged

real = importlib.import_module("onepass.ops.attention.attention")

LAYOUTS = ("contiguous", "sliced", "swapped", "unaligned", "strided", "followed")


@dataclass(frozen=True)
class Case(NamedCase):
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
    causal: bool = True
    window: int | tuple | None = None
    softcap: float | None = None
    sinks: bool = False
    lengths: tuple[int, ...] = ()  # of documents; B must be 1, and S is their sum
    each: bool = False  # each sequence has its own tables
    norm: bool | None = None  # of q's and k's heads: whether the weights are zero-centred; None: there is none
    by_group: bool = False  # qkv has for each group its queries, its key and its value
    gated: bool = False  # each head's query is followed by its gate
    overwrite: bool = False
    small: bool = False

    @property
    def options(self):
        plain = {name: getattr(self, name) for name in ("interleaved", "scale", "causal", "window", "softcap")}
        return plain | ({"cu_seqlens": self.boundaries} if self.lengths else {})

    @property
    def norm_options(self):
        return {} if self.norm is None else {"eps": 1e-2, "zero_centered_gamma": self.norm}

    def draw_weights(self):
        """The weights of the norm, as leaves of two types; or none."""
        if self.norm is None:
            return []
        generator = torch.Generator().manual_seed(8)
        types = self.dtype, FP32
        return [torch.randn(self.D, generator=generator).to(t).to(DEVICE).requires_grad_() for t in types]

    @property
    def boundaries(self):
        return torch.tensor((0, *self.lengths), device=DEVICE).cumsum(0).int()

    def draw_sinks(self):
        """A logit a head, around the scores of the case, as a leaf; or None."""
        if not self.sinks:
            return None
        generator = torch.Generator().manual_seed(7)
        return (2 * torch.randn(self.heads, generator=generator)).to(DEVICE).requires_grad_()


def packed(lengths, **fields):
    """A case of documents."""
    return Case(B=1, S=sum(lengths), lengths=tuple(lengths), **fields)


class Made(torch.autograd.Function):
    """A layer's output in a memory layout. It is not a leaf, which could not be overwritten."""

    @staticmethod
    def forward(ctx, x, layout):
        return laid_out(x.clone(), layout)

    @staticmethod
    def backward(ctx, dx):
        return dx, None


def by_group(case: Case, qkv):
    """Return the same columns, as Megatron-core's linear_qkv orders them."""
    q, k, v = parts_of(qkv, case.heads, case.groups)
    return torch.cat([q.unflatten(2, (case.groups, -1)), k.unsqueeze(3), v.unsqueeze(3)], 3).flatten(2)


def draw(case: Case, seed: int = 0):
    """Return contiguous qkv, the tables or None for both, and the gradient of y."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    queries = case.heads * (1 + case.gated)
    qkv = randn(case.B, case.S, queries + 2 * case.groups, case.D)
    qkv[:, :, : queries + case.groups] *= case.spread
    qkv = qkv.flatten(2).to(case.dtype).to(DEVICE)
    dy = randn(case.B, case.S, case.heads * case.D).to(case.dtype).to(DEVICE)
    if not case.R:
        return qkv, None, None, dy
    rows = max(case.lengths) if case.lengths and not case.each else case.S
    angles = 3 * randn(*((case.B,) if case.each else ()), rows, case.R // 2).to(DEVICE)
    return qkv, angles.cos(), angles.sin(), dy


@contextlib.contextmanager
def small_tiles(module, small: bool = True):
    """Patch the module's tiles to 16 and 32 tokens."""
    passes = [each.__globals__ for each in (module.attend, module.attend_backward) if each is not None]  # a test takes one away
    sizes = {"forward_tiles": (32, 16), "dq_tiles": (32, 16), "dk_dv_tiles": (16, 32)} if small else {}
    with contextlib.ExitStack() as stack:
        for names in passes:  # a mutant's can't be imported
            tiles = {name: names["AttentionTiles"](*size, 4, 1) for name, size in sizes.items() if name in names}
            stack.enter_context(replaced(names, **{name: lambda *_, tile=tile: tile for name, tile in tiles.items()}))
        yield


# ---- the oracle ----


def gates_of(case: Case, qkv):
    return qkv[..., : 2 * case.heads * case.D].unflatten(-1, (case.heads, 2, case.D))[..., 1, :]


def as_parts(case: Case, y: torch.Tensor, dqkv: torch.Tensor, *rest: torch.Tensor):
    """Return the results by name. The softmax over one token is constant, so only v has a gradient then."""
    names = [*(["dsinks"] if case.sinks else []), *(["dq_weight", "dk_weight"] if case.norm is not None else [])]
    dq, dk, dv = parts_of(dqkv, case.heads, case.groups, case.gated)
    found = {"y": y, "dv": dv} if case.S == 1 else {"y": y, "dq": dq, "dk": dk, "dv": dv}
    found |= {"dgates": gates_of(case, dqkv)} if case.gated else {}
    return found | dict(zip(names, rest, strict=True))


def normed(x: torch.Tensor, weight: torch.Tensor, centered: bool):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2) * (weight.to(x.dtype) + centered)


def exact(case: Case, qkv, cos, sin, dy):
    """In fp64, by the oracle that shares no code with the op; a sequence at a time."""
    leaf, sinks, weights = qkv.detach().double().requires_grad_(), case.draw_sinks(), case.draw_weights()
    each, rows = [], leaf
    if weights or case.gated:
        q, k, v = parts_of(leaf, case.heads, case.groups, case.gated)
        q, k = (normed(x, weight, case.norm) for x, weight in zip((q, k), weights, strict=True)) if weights else (q, k)
        rows = torch.cat([q, k, v], 2).flatten(2)
    for b in range(case.B):
        tables = {"cos": cos[b] if case.each else cos, "sin": sin[b] if case.each else sin} if case.R else {}
        given = case.options | {name: table.double() for name, table in tables.items()}
        each.append(packed_attention(rows[b : b + 1], case.heads, case.groups, **given, sinks=sinks))
    y = torch.cat(each)
    y = y * gates_of(case, leaf).flatten(2).sigmoid() if case.gated else y
    asked = [leaf, *([] if sinks is None else [sinks]), *weights]
    return as_parts(case, y.detach(), *torch.autograd.grad(y, asked, dy.double()))


def baseline(case: Case, qkv, cos, sin, dy):
    """Compute in fp32, but round stored tensors and operands of products to qkv's dtype, as flash attention does."""

    def rounded(x):
        return x.to(qkv.dtype).float()

    def rotated(x, sign):
        return x if cos is None else rounded(rope_formula(x, cos.float(), sign * sin.float(), case.interleaved))

    def into(x, weight):
        """Normalise and turn, and keep what that gradient needs."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = normed(x, weight, case.norm)
            return x, y if cos is None else rope_formula(y, cos.float(), sin.float(), case.interleaved)

    def heads_first(x):
        x = x.transpose(1, 2)
        return x.repeat_interleave(case.heads // x.shape[1], 1)

    def back(x, heads):
        """Sum over the query heads that share a key and value head."""
        return x.unflatten(1, (heads, -1)).sum(2).transpose(1, 2)

    if cos is not None:
        cos, sin = tables_of_documents(cos, sin, case.boundaries if case.lengths else None, case.S)
    q, k, v = parts_of(qkv.detach().float(), case.heads, case.groups, case.gated)
    weights = case.draw_weights()
    if weights:
        (q_leaf, q), (k_leaf, k) = into(q, weights[0]), into(k, weights[1])
        of_norm = (q, q_leaf, weights[0]), (k, k_leaf, weights[1])
        q, k, v = heads_first(rounded(q.detach())), heads_first(rounded(k.detach())), heads_first(v)
    else:
        q, k, v = heads_first(rotated(q, 1)), heads_first(rotated(k, 1)), heads_first(v)
    scale = case.D**-0.5 if case.scale is None else case.scale
    boundaries = [*case.boundaries.tolist()] if case.lengths else [0, case.S]
    hidden = ~visible(case.S, boundaries, case.causal, case.window).to(qkv.device)
    scores, slope = q @ k.mT * scale, 1.0
    if case.softcap is not None:
        slope = 1 - torch.tanh(scores / case.softcap) ** 2
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores, sinks = scores.masked_fill(hidden, float("-inf")), case.draw_sinks()
    highest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.detach()[:, None, None]
        highest = torch.maximum(highest, sinks)
    p = (scores - highest).exp()
    total = p.sum(-1, keepdim=True) + (0 if sinks is None else (sinks - highest).exp())
    y = rounded(rounded(p) @ v / total)
    p, dy, out = p / total, heads_first(dy.float().unflatten(-1, (case.heads, -1))), y
    if case.gated:
        s = heads_first(gates_of(case, qkv.float()).sigmoid())
        out, dy, dgates = y * s, rounded(dy * s), (dy * y * s * (1 - s)).transpose(1, 2)
    delta = (dy * y).sum(-1, keepdim=True)
    ds = rounded(p * (dy @ v.mT - delta) * slope)
    dq, dk, dv = rounded(ds @ k * scale), ds.mT @ q * scale, rounded(p).mT @ dy
    dq, dk, dv = back(dq, case.heads), rounded(back(dk, case.groups)), back(dv, case.groups)
    dweights = []
    if weights:
        pairs = [torch.autograd.grad(y, (x, w), dx) for (y, x, w), dx in zip(of_norm, (dq, dk), strict=True)]
        (dq, dk), dweights = (dx for dx, _ in pairs), [dw for _, dw in pairs]
    else:
        dq, dk = rotated(dq, -1), rotated(dk, -1)
    dqkv = torch.cat([torch.stack([dq, dgates], 3).flatten(2, 3) if case.gated else dq, dk, dv], 2).flatten(2)
    dsinks = None if sinks is None else -((sinks - highest).exp() / total * delta).sum((0, 2, 3))
    return as_parts(case, out.transpose(1, 2).flatten(2), dqkv, *([] if dsinks is None else [dsinks]), *dweights)


def computed(module, case: Case, qkv, cos, sin, dy, backend: str = "triton"):
    """Return y, qkv's gradient, qkv afterwards and, where there are sinks, their gradient. qkv is another operator's output."""
    leaf, sinks, weights = qkv.detach().requires_grad_(), case.draw_sinks(), case.draw_weights()
    made = Made.apply(by_group(case, leaf) if case.by_group else leaf, case.layout)
    options = case.options | {"cos": cos, "sin": sin, "sinks": sinks, "overwrite": case.overwrite, "backend": backend}
    options |= {name: True for name in ("by_group", "gated") if getattr(case, name)}
    options |= case.norm_options | dict(zip(("q_weight", "k_weight"), weights, strict=False))
    y = module.attention(made, case.heads, case.groups, **options)
    dqkv, *rest = torch.autograd.grad(y, [leaf, *([] if sinks is None else [sinks]), *weights], dy)
    return y.detach(), dqkv, made.detach(), *rest


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    """Judge a case.

    Single rows are not judged: the first query has one key, so its gradient is rounding only. The sinks are few numbers, so their
    error is judged as one, and more loosely.
    """
    qkv, cos, sin, dy = draw(case)
    with small_tiles(module, case.small):
        try:
            with poisoned(), unchanged(qkv=qkv, cos=cos, sin=sin, dy=dy):
                y, dqkv, made, *rest = computed(module, case, qkv, cos, sin, dy, backend)
        except AssertionError as error:
            return broken("memory", str(error))
    assert y.dtype == dqkv.dtype == case.dtype
    assert (y.transpose(0, 1) if case.by_group and case.layout == "swapped" else y).is_contiguous()
    given = by_group(case, qkv) if case.by_group else qkv
    if not (case.overwrite and case.R and case.norm is None and not case.by_group) and not made.equal(given):
        return broken("qkv", "overwritten")
    wanted, rounded = exact(case, qkv, cos, sin, dy), baseline(case, qkv, cos, sin, dy)
    found, ours = [], as_parts(case, y, dqkv, *rest)
    for name in ("dsinks", "dq_weight", "dk_weight"):
        if name in ours:
            own, right, plain = (each.pop(name) for each in (ours, wanted, rounded))
            error, its = ((x.double() - right).norm().item() for x in (own, plain))
            found.append(Finding(name, "error", error, its, 1.5 * its + 2e-3 * right.norm().item()))
    trial = ours, rounded, wanted
    found += [finding for finding in compare([trial], case.dtype).findings if finding.measure != "worst row"]
    if case.window == 1:  # the only key has all of the softmax: dq and dk are nothing but rounding
        found = [replace(each, allowed=(4 if each.output in ("dq", "dk") else 1) * each.allowed) for each in found]
    if case.S > 1000:  # the largest of a million errors is less often as small as the baseline's
        found = [replace(each, allowed=(1.25 if each.measure == "largest error" else 1) * each.allowed) for each in found]
    if backend in ("torch", "varlen_attn"):  # it rounds each head's gradients before it sums over the heads that share a group
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
        *normed_cases(),
        *grouped_cases(),
        *packed_cases(),
        *gated_cases(),
    ]


def normed_cases() -> list[Case]:
    """Return a norm of q's and k's heads, by itself and with what else attention has, in small tiles."""
    case = Case(small=True, norm=False, overwrite=True)  # which has no effect
    return [
        replace(case, heads=4, groups=1, R=8, interleaved=True),
        replace(case, S=40, D=80, R=80, norm=True, layout="sliced", dtype=FP16),
        packed((33, 0, 20), heads=2, groups=1, norm=True, window=9, sinks=True, small=True),
    ]


def grouped_cases() -> list[Case]:
    """Return qkv by group, sequences or tokens first, by itself and with what else attention has, in small tiles."""
    case = Case(small=True, by_group=True, layout="swapped")
    return [
        replace(case, heads=6, groups=2, R=8, interleaved=True, overwrite=True),
        replace(case, heads=4, groups=2, D=32, R=20, each=True, dtype=FP16),
        replace(case, heads=2, groups=2, layout="contiguous"),
        replace(case, B=4, S=5, heads=16, groups=4, D=64, R=64),
        replace(case, S=33, heads=3, groups=1, R=0),
        replace(case, heads=6, groups=3, norm=True, R=12, causal=False),
        replace(case, heads=4, groups=2, layout="sliced", norm=False),
        packed((33, 0, 20), heads=4, groups=2, R=8, sinks=True, window=9, small=True, by_group=True),
    ]


def gated_cases() -> list[Case]:
    """Return gates beside the queries, by themselves and with what else attention has, in small tiles."""
    case = Case(small=True, gated=True)
    return [
        replace(case, heads=4, groups=2, D=32, R=8, norm=True),
        replace(case, S=40, heads=3, groups=1, D=80, R=0, layout="sliced", dtype=FP16),
        replace(case, heads=6, groups=2, R=8, interleaved=True, overwrite=True, layout="swapped"),
        replace(case, heads=2, groups=2, R=12, layout="strided"),
        packed((33, 0, 20), heads=4, groups=1, norm=False, window=9, sinks=True, small=True, gated=True),
    ]


def packed_cases() -> list[Case]:
    """Return documents, windows, softcaps and sinks, by themselves and together, in small tiles."""
    case, full = Case(B=1, heads=2, groups=1, small=True), {"heads": 2, "groups": 1, "causal": False, "small": True}
    few = {"heads": 2, "groups": 1, "small": True}
    return [
        packed((33, 0, 70, 1, 17, 64), R=8, overwrite=True, **few),
        packed((5, 40), R=16, each=True, interleaved=True, layout="sliced", **few),
        replace(case, S=100, window=1),
        replace(case, S=100, window=17, R=0),
        replace(case, B=2, S=120, window=40, heads=2, groups=2),
        packed((50, 90), window=33, sinks=True, R=0, **few),
        replace(case, S=70, softcap=1.5, R=0, spread=2.0),
        replace(case, S=70, sinks=True, B=2, R=0),
        packed((40, 3, 66), softcap=4.0, sinks=True, scale=1.0, **few),
        replace(case, S=70, causal=False),
        replace(case, S=100, causal=False, window=(20, 7), R=0),
        replace(case, S=100, causal=False, window=(0, 45), R=0),
        packed((70, 30, 45), window=(None, 20), R=0, **full),
        packed((70, 30, 2), sinks=True, **full),
        replace(case, S=50, D=80, R=80),
        packed((50, 17), D=96, R=0, window=20, dtype=FP16, **few),
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
        *(replace(case, B=1, S=70, heads=2, groups=1, D=D, R=D // 2) for D in (80, 96, 192, 256, 512)),
        packed((130, 7, 200), heads=2, groups=1, D=64, R=64, window=100),
        packed((1, 66), heads=2, groups=1, D=128, R=0, softcap=2.0, sinks=True),
        packed((5, 90), heads=2, groups=1, D=256, R=32, causal=False),
    ]
