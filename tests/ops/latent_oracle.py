"""The oracle of latent_attention: attention's, of heads that are rotated and joined here, one after another."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from ops import attention_oracle
from ops.oracle import BF16, DEVICE, FP16, NamedCase, broken, heads_laid_out, replaced
from ops.packed_oracle import packed_attention, rotated

from onepass.testing.budget import BudgetReport, compare
from onepass.testing.poison import poisoned, unchanged


@dataclass(frozen=True)
class Case(NamedCase):
    """One call. rotates: there are tables. each: each sequence has its own. small: in tiles so small that there are several."""

    B: int = 2
    S: int = 37
    heads: int = 3
    nope: int = 24
    rope: int = 8
    V: int = 16
    dtype: torch.dtype = BF16
    interleaved: bool = False
    scale: float | None = None
    rotates: bool = True
    each: bool = False
    lengths: tuple[int, ...] = ()  # of documents; B must be 1, and S is their sum
    layout: str = "contiguous"  # of all three tensors
    small: bool = True

    @property
    def options(self):
        plain = {"interleaved": self.interleaved, "scale": self.scale}
        return plain | ({"cu_seqlens": self.boundaries} if self.lengths else {})

    @property
    def boundaries(self):
        return torch.tensor((0, *self.lengths), device=DEVICE).cumsum(0).int()

    @property
    def width(self):
        return self.nope + self.rope

    @property
    def attention(self):
        """The same of heads as wide as the wider part, nothing rotated."""
        return attention_oracle.Case(
            B=self.B, S=self.S, heads=self.heads, groups=self.heads, D=max(self.width, self.V), R=0, dtype=self.dtype,
            scale=self.width**-0.5 if self.scale is None else self.scale, lengths=self.lengths,
        )  # fmt: skip


def packed(lengths, **fields):
    return Case(B=1, S=sum(lengths), lengths=tuple(lengths), **fields)


def draw(case: Case, seed: int = 0):
    """Return q, kv and k_rope, the tables or none, and the gradient of y."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    shapes = (case.heads, case.width), (case.heads, case.nope + case.V), (case.rope,)
    tensors = [randn(case.B, case.S, *shape).to(case.dtype).to(DEVICE) for shape in shapes]
    dy = randn(case.B, case.S, case.heads, case.V).to(case.dtype).to(DEVICE)
    if not case.rotates:
        return tensors, {}, dy
    rows = max(case.lengths) if case.lengths and not case.each else case.S
    angles = 3 * randn(*((case.B,) if case.each else ()), rows, case.rope // 2).to(DEVICE)
    return tensors, {"cos": angles.cos(), "sin": angles.sin()}, dy


def _tables(case: Case, tables, b: int):
    """Of one sequence's tokens."""
    if case.each:
        return [table[b] for table in tables.values()]
    if not case.lengths:
        return list(tables.values())
    at = [t for length in case.lengths for t in range(length)]
    return [table[at] for table in tables.values()]


def _turned(case: Case, x, tables, sign=1):
    """x [B, S, heads, rope], by a sequence's tables; back with a sign of -1."""
    if not case.rotates:
        return x
    each = [[table.to(x.dtype) for table in _tables(case, tables, b)] for b in range(case.B)]
    return torch.stack([rotated(x[b], cos, sign * sin, case.interleaved) for b, (cos, sin) in enumerate(each)])


def joined(case: Case, q, kv, k_rope, tables, rounded=lambda x: x):
    """Return one projection of heads, as attention's oracle takes it."""
    q_rope = rounded(_turned(case, q[..., case.nope :], tables))
    shared = rounded(_turned(case, k_rope[:, :, None], tables)).expand(-1, -1, case.heads, -1)
    parts = (q[..., : case.nope], q_rope), (kv[..., : case.nope], shared), (kv[..., case.nope :],)
    D = case.attention.D
    return torch.cat([F.pad(x, (0, D - x.shape[-1])).flatten(2) for x in (torch.cat(each, -1) for each in parts)], -1)


def exact(case: Case, tensors, tables, dy):
    """In fp64, head by head."""
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    qkv, of = joined(case, *leaves, {name: table.double() for name, table in tables.items()}), case.attention
    given = {"scale": of.scale} | ({"cu_seqlens": of.boundaries} if of.lengths else {})
    y = torch.cat([packed_attention(row[None], of.heads, of.groups, **given) for row in qkv])
    y = y.unflatten(-1, (case.heads, -1))[..., : case.V]
    return as_named(case, y.detach(), *torch.autograd.grad(y, leaves, dy.double()))


def baseline(case: Case, tensors, tables, dy):
    """In fp32, with what is stored and operands of products rounded to the type."""

    def rounded(x):
        return x.to(case.dtype).float()

    of, wide = case.attention, [x.detach().float() for x in tensors]
    qkv = joined(case, *wide, tables, rounded).to(case.dtype)
    padded = F.pad(dy, (0, of.D - case.V)).flatten(2)
    found = attention_oracle.baseline(of, qkv, None, None, padded)
    y = found["y"].unflatten(-1, (case.heads, -1))[..., : case.V]
    dq, dk = (rounded(found[name][..., : case.width]) if name in found else torch.zeros_like(wide[0]) for name in ("dq", "dk"))
    dq_rope, shared = (_turned(case, x[..., case.nope :], tables, -1) for x in (dq, dk))
    dkv = torch.cat([dk[..., : case.nope], found["dv"][..., : case.V]], -1)
    return as_named(case, y, torch.cat([dq[..., : case.nope], dq_rope], -1), dkv, shared.sum(2))


def as_named(case: Case, y, dq, dkv, dk_rope):
    """The softmax over one token is constant, so only v has a gradient then."""
    named = {"y": y, "dq": dq, "dk": dkv[..., : case.nope], "dv": dkv[..., case.nope :], "dk_rope": dk_rope}
    return {name: named[name] for name in ("y", "dv")} if case.S == 1 else named


def computed(module, case: Case, tensors, tables, dy, backend: str = "triton"):
    leaves = [heads_laid_out(x, case.layout).detach().requires_grad_() for x in tensors]
    y = module.latent_attention(*leaves, **tables, **case.options, backend=backend)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def few_heads(module, small: bool):
    """Patch the module to arrange two heads of a token or two at a time."""
    names = module.arrange.__globals__  # a mutant's can't be imported
    return replaced(names, [names["arrange_tiles"], names["_bind"]], **({"_VALUES": 64} if small else {}))


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    """Judge a case. Single rows are not judged: the first query has one key, so its gradient is rounding only."""
    tensors, tables, dy = draw(case)
    with attention_oracle.small_tiles(module, case.small), few_heads(module, case.small):
        try:
            with poisoned(), unchanged(**dict(zip("abc", tensors, strict=True)), **tables, dy=dy):
                found = computed(module, case, tensors, tables, dy, backend)
        except AssertionError as error:
            return broken("memory", str(error))
    assert all(x.dtype == case.dtype for x in found) and found[0].is_contiguous()
    trial = as_named(case, *found), baseline(case, tensors, tables, dy), exact(case, tensors, tables, dy)
    findings = [each for each in compare([trial], case.dtype).findings if each.measure != "worst row"]
    if case.S > 1000:  # the largest of a million errors is less often as small as the baseline's
        findings = [replace(each, allowed=(1.25 if each.measure == "largest error" else 1) * each.allowed) for each in findings]
    if backend == "torch":  # PyTorch's CPU kernels keep what stands between products in 16 bits
        findings = [replace(each, allowed=2 * each.allowed) for each in findings]
    return BudgetReport(findings)


# ---- the cases ----


def small_cases() -> list[Case]:
    """Every feature, in tiles so small that there are several of each kind: for the mutants."""
    case = Case()
    return [
        case,
        replace(case, interleaved=True, heads=5, dtype=FP16, S=70),
        replace(case, nope=10, rope=6, V=32, scale=0.3, S=48),  # values wider than keys, and no powers of two
        replace(case, rotates=False, S=33, heads=1),
        replace(case, each=True, layout="sliced", S=65),
        replace(case, layout="swapped", interleaved=True),
        packed((7, 0, 20, 1, 22), interleaved=True),
        packed((16, 33), each=True, V=32),
        replace(case, B=1, S=1),
        replace(case, layout="part"),
    ]


def real_cases() -> list[Case]:
    """Sizes of DeepSeek V3, GLM 4.7 Flash and MiniCPM 3, in a GPU's tiles."""
    sizes = (128, 64, 128), (192, 64, 256), (64, 32, 64)
    return [Case(B=1, S=130, heads=2, nope=nope, rope=rope, V=V, interleaved=V == 128, small=False) for nope, rope, V in sizes]
