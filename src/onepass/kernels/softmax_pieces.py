"""What the kernels of rows of logits share: finished logits, exponentials, labels, statistics and the gradient."""

from __future__ import annotations

from onepass.kernels.cross_entropy_formula import Terms
from onepass.runtime.lang import device_function, tl

LOG2_E = tl.constexpr(1.4426950408889634)
PLANES = 6  # of a row's statistics: largest, sum of exponentials, label's logit, sum of logits, entropy's sum, first largest


@device_function
def _tanh(u):
    """To fp32's last bits near 0 too, where a quotient of exponentials would lose them."""
    square = u * u
    series = -0.33333298 + square * (0.13331924 + square * (-0.05378384 + square * (0.02079601 + square * -0.0058952)))
    e = tl.exp2(tl.abs(u) * (-2.0 * LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(u) < 0.6, u + u * square * series, tl.where(u < 0, -far, far))


@device_function
def finished_logit(x, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """What the softmax is taken of, in fp32."""
    if CAPPED:
        return cap * _tanh(_scaled(x, scale, SCALED) / cap)
    else:
        return _scaled(x, scale, SCALED)


@device_function
def _scaled(x, scale, SCALED: tl.constexpr):
    return x.to(tl.float32) * scale if SCALED else x.to(tl.float32)


@device_function
def exp_above(z, base, EXACT: tl.constexpr):
    """exp(z - base). For logits that were rounded to 16 bits in one instruction less, at the cost of bits they don't have."""
    return tl.exp2((z - base) * LOG2_E) if EXACT else tl.exp2(z * LOG2_E - base * LOG2_E)


@device_function
def label_of(labels_ptr, rows, there, ignore, begin, V):
    """A row's label as a column of these logits, or of others; and whether it counts: not ignored, and any token's."""
    label = tl.load(labels_ptr + rows, mask=there, other=0).to(tl.int64)
    return label - begin, there & (label != ignore) & (label >= 0) & (label < V)


@device_function
def store_statistics(
    parts_ptr, row, there, tile, M, largest, total, target, logits, surprise, first,
    PLANES: tl.constexpr, SMOOTHED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    far = M.to(tl.int64)
    at = parts_ptr + tile * PLANES * far + row
    tl.store(at, largest, mask=there)
    tl.store(at + far, total, mask=there)
    tl.store(at + 2 * far, target, mask=there)
    if SMOOTHED:
        tl.store(at + 3 * far, logits, mask=there)
    if FULL:
        tl.store(at + 4 * far, surprise, mask=there)
        tl.store(at + 5 * far, first.to(tl.float32), mask=there)


@device_function
def worth_under(m, largest):
    """What sums of exponentials under m are worth under the largest; nothing where there are none."""
    return tl.where(m == float("-inf"), 0.0, tl.exp2((m - largest) * LOG2_E))


@device_function
def two_numbers(largest, log_total, EXACT: tl.constexpr):
    """Their sum, the logsumexp, in fp32, and what exponentials above it are to be multiplied by for what was rounded away."""
    lse = largest + log_total
    if EXACT:
        return lse, less_of(largest.to(tl.float64) + log_total.to(tl.float64), lse)
    else:
        return lse, 1.0


@device_function
def less_of(exact, lse):
    return tl.exp2((lse.to(tl.float64) - exact).to(tl.float32) * LOG2_E)


@device_function
def gradient_of(
    x, above, p, a, b, s, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr, SURPRISE: tl.constexpr, ADDED: tl.constexpr
):  # fmt: skip
    """Of the product x, whose logit is so much above the logsumexp. ADDED: whether s is anything."""
    d = p * a
    if SURPRISE:
        d += tl.where(p > 0, p * b * above, 0.0)
    if ADDED:
        d += s
    if CAPPED:
        e = tl.exp2(tl.abs(_scaled(x, scale, SCALED) / cap) * (-2.0 * LOG2_E))
        d *= 4.0 * e / ((1.0 + e) * (1.0 + e))  # 1 - tanh^2, near the cap too
    return d * scale if SCALED else d


# ---- what kernels are given of the terms ----


def numbers_of(terms: Terms) -> tuple[float, float]:
    """The scale, and the cap."""
    return terms.scale, terms.softcap or 1.0


def flags_of(terms: Terms) -> tuple[bool, bool, bool]:
    """Whether logits are scaled, whether they are capped, and whether labels are smoothed."""
    return terms.scale != 1, bool(terms.softcap), bool(terms.smoothing)
