"""What backward's norms need of each head, two sums over a warp: those of two rows by one exchange.

A lane has 4 of a head's 128 columns. In the first of five steps each half of the warp gives the other what it has of one row.
After the other four it has the sums of the other row, makes that row's factors once, and all lanes get those of both. That is 14
shuffles for two rows, where reductions, which Triton has, take 20. A row's numbers are added in the same order alone and beside
another.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

from onepass.kernels.language import PTX, device_function, tl

_VALUES = 4  # of a lane: columns of one head


def _factors_ptx(rows: int) -> str:
    """Return PTX that gives r of each row and then k, from s of each row, then g, and eps; all 4 times."""
    n = _VALUES * rows
    lines = [".reg .f32 s0, s1, g0, g1, give, keep, got, r, k; .reg .b32 half; .reg .pred upper;"]
    for i in range(rows):
        s, g = 2 * n + _VALUES * i, 3 * n + _VALUES * i
        for total, other in ((f"s{i}", s), (f"g{i}", g)):
            lines.append(f"mul.f32 {total}, ${other}, ${s};")
            lines += [f"fma.rn.f32 {total}, ${other + v}, ${s + v}, {total};" for v in range(1, _VALUES)]
    steps = [16, 8, 4, 2, 1]
    if rows == 2:
        lines.append("mov.u32 half, %laneid; and.b32 half, half, 16; setp.ne.b32 upper, half, 0;")
        for x in "sg":
            lines.append(f"selp.f32 give, {x}0, {x}1, upper; selp.f32 keep, {x}1, {x}0, upper;")
            lines.append(f"shfl.sync.bfly.b32 got, give, {steps[0]}, 31, -1; add.f32 {x}0, keep, got;")
        steps = steps[1:]
    for step in steps:
        lines += [f"shfl.sync.bfly.b32 got, {x}0, {step}, 31, -1; add.f32 {x}0, {x}0, got;" for x in "sg"]
    lines.append(f"add.f32 s0, s0, ${4 * n}; rsqrt.approx.ftz.f32 r, s0; mul.f32 k, g0, r; mul.f32 k, k, r; neg.f32 k, k;")
    for i in range(rows):
        for first, x in ((0, "r"), (n, "k")):
            at = first + _VALUES * i
            lines.append(f"shfl.sync.idx.b32 ${at}, {x}, {16 * i}, 31, -1;" if rows == 2 else f"mov.f32 ${at}, {x};")
            lines += [f"mov.f32 ${at + v}, ${at};" for v in range(1, _VALUES)]
    return f"{{ {' '.join(lines)} }}"


def _constraints(rows: int) -> str:
    n = _VALUES * rows
    return ",".join(["=&f"] * (2 * n) + ["f"] * (2 * n + _VALUES))


_OF_ONE, _ONE = tl.constexpr(_factors_ptx(1)), tl.constexpr(_constraints(1))
_OF_TWO, _TWO = tl.constexpr(_factors_ptx(2)), tl.constexpr(_constraints(2))


@device_function
def norm_factors(ss, gs, eps, COUNT: tl.constexpr, IN_WARP: tl.constexpr):
    """Return r = 1 / sqrt(sum s^2 + eps) of COUNT rows of heads, and k = -r^2 sum g s.

    IN_WARP: a tile is one head of 128 columns in one warp. Else COUNT is 1.
    """
    if IN_WARP and PTX:
        e = tl.zeros(ss[0].shape, tl.float32) + eps
        if COUNT == 2:
            r0, r1, k0, k1 = tl.inline_asm_elementwise(
                _OF_TWO, _TWO, [ss[0], ss[1], gs[0], gs[1], e], dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=True, pack=4,
            )  # fmt: skip
            return (r0, r1), (k0, k1)
        else:
            r, k = tl.inline_asm_elementwise(
                _OF_ONE, _ONE, [ss[0], gs[0], e], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
            )  # fmt: skip
            return (r,), (k,)
    else:
        rs, ks = (), ()
        for i in tl.static_range(COUNT):
            r = tl.rsqrt(tl.sum(ss[i] * ss[i], 1) + eps)[:, None]
            rs += (r,)
            ks += (-(tl.sum(gs[i] * ss[i], 1)[:, None] * r * r),)
        return rs, ks
