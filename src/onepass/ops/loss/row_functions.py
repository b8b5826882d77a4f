"""Device functions of both files of row kernels: finished logits, exponentials, labels, statistics and the gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

from onepass.kernels.language import device_function, tl
from onepass.ops.loss.formula import LossTerms
from onepass.ops.loss.targets import Targets

APART = 64  # rows of logits are a multiple of this many columns apart: the least that a piece of a row has
LOG2_E = tl.constexpr(1.4426950408889634)
# numbers a row: largest logit, sum of exponentials, label's logit, sum of logits, entropy's sum, first largest, sum of squares
PLANES = 7
# and where targets have masses: the sum of masses times logits, and of masses
MASS_PLANES = 9


@device_function
def _tanh(u):
    """Exact to fp32's last bits near 0 too, where a quotient of exponentials loses them."""
    square = u * u
    series = -0.33333298 + square * (0.13331924 + square * (-0.05378384 + square * (0.02079601 + square * -0.0058952)))
    e = tl.exp2(tl.abs(u) * (-2.0 * LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(u) < 0.6, u + u * square * series, tl.where(u < 0, -far, far))


@device_function
def finished_logit(x, scale, cap):
    """The logit that the softmax is of, in fp32. A scale of 1, or no cap, is None."""
    if cap is not None:
        return cap * _tanh(_scaled(x, scale) / cap)
    else:
        return _scaled(x, scale)


@device_function
def _scaled(x, scale):
    return x.to(tl.float32) * scale if scale is not None else x.to(tl.float32)


@device_function
def exp_above(z, base, EXACT: tl.constexpr):
    """exp(z - base). 16-bit logits save an instruction, at the cost of bits that they don't have."""
    return tl.exp2((z - base) * LOG2_E) if EXACT else tl.exp2(z * LOG2_E - base * LOG2_E)


@device_function
def label_of(labels_ptr, rows, there, ignore, begin, V):
    """Return a row's label, counted from `begin`, whether the row is kept, and whether it counts: its label is in range too."""
    label = tl.load(labels_ptr + rows, mask=there, other=0).to(tl.int64)
    kept = there & (label != ignore)
    return label - begin, kept, kept & (label >= 0) & (label < V)


@device_function
def target_mass(
    targets_ptr, weights_ptr, first, columns, begin, label, there, smoothing, V, CLASSES: tl.constexpr
):  # fmt: skip
    """A row's masses in these columns, 0 where none are `there`: see ops/loss/targets.py. `first` is where its columns begin in
    `targets_ptr`, and `begin` where they do in `weights_ptr`, which has CLASSES."""
    if targets_ptr is not None:
        q = tl.load(targets_ptr + first + columns, mask=there, other=0.0).to(tl.float32)
    else:
        q = tl.where(columns == label, 1.0, 0.0)
    mass = q * (1.0 - smoothing) + smoothing / V
    if weights_ptr is not None:
        mass *= class_weight_at(weights_ptr, begin + columns, there, CLASSES)
    return tl.where(there, mass, 0.0)


@device_function
def class_weight_at(weights_ptr, at, there, CLASSES: tl.constexpr):
    """The weights of some classes; NaN for those that there are not."""
    return tl.load(weights_ptr + at, mask=there & (at < CLASSES), other=float("nan")).to(tl.float32)


class RowSums(NamedTuple):
    """A kernel's statistics of logits: all but the first two are 0 where nobody asks for them."""

    largest: Any
    total: Any  # of exponentials under the largest
    logits: Any
    surprise: Any  # the entropy's sum
    first: Any  # column of the largest
    squares: Any  # of the exponentials


@device_function
def store_statistics(
    part_ptr, far, there, sums, target,
    LOGITS: tl.constexpr, ENTROPY: tl.constexpr, FIRSTS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Store a part's planes, which are `far` apart."""
    tl.store(part_ptr, sums.largest, mask=there)
    tl.store(part_ptr + far, sums.total, mask=there)
    tl.store(part_ptr + 2 * far, target, mask=there)
    if LOGITS:
        tl.store(part_ptr + 3 * far, sums.logits, mask=there)
    if ENTROPY:
        tl.store(part_ptr + 4 * far, sums.surprise, mask=there)
    if FIRSTS:
        tl.store(part_ptr + 5 * far, sums.first.to(tl.float32), mask=there)
    if SQUARES:
        tl.store(part_ptr + 6 * far, sums.squares, mask=there)


@device_function
def probability_under(m, largest):
    """The factor by which a sum of exponentials under m counts under `largest`; 0 where there are none."""
    return tl.where(m == float("-inf"), 0.0, tl.exp2((m - largest) * LOG2_E))


@device_function
def rounded_lse(largest, log_total, EXACT: tl.constexpr):
    """Return the logsumexp in fp32, and the factor that corrects exponentials above it for its rounding."""
    lse = largest + log_total
    if EXACT:
        return lse, rounding_factor(largest.to(tl.float64) + log_total.to(tl.float64), lse)
    else:
        return lse, 1.0


@device_function
def rounding_factor(exact, lse):
    """exp(lse - exact), of an fp32 lse and the exact one."""
    return tl.exp2((lse.to(tl.float64) - exact).to(tl.float32) * LOG2_E)


@device_function
def gradient_of(x, above, p, a, b, s, scale, cap):
    """Gradient of the product x, whose logit is `above` the logsumexp. Where b or s is 0 for all logits, it is None."""
    d = p * a
    if b is not None:
        d += tl.where(p > 0, p * b * above, 0.0)
    if s is not None:
        d += s
    if cap is not None:
        e = tl.exp2(tl.abs(_scaled(x, scale) / cap) * (-2.0 * LOG2_E))
        d *= 4.0 * e / ((1.0 + e) * (1.0 + e))  # 1 - tanh^2, near the cap too
    return d * scale if scale is not None else d


@device_function
def store_gradients(out_ptr, columns, d, W: tl.constexpr, ROOM: tl.constexpr, MASKED: tl.constexpr):
    """Store a piece of a row, with zeros from W to ROOM. Nobody reads it soon: it should not drive logits from the caches."""
    if MASKED:
        tl.store(out_ptr + columns, tl.where(columns < W, d, 0.0), mask=columns < ROOM, cache_modifier=".cs")
    else:
        tl.store(out_ptr + columns, d, cache_modifier=".cs")


# ---- the terms as kernels' arguments ----


def numbers_of(terms: LossTerms) -> tuple[float | None, float | None]:
    """scale and cap."""
    return None if terms.scale == 1 else terms.scale, terms.softcap or None


def planes_of(targets: Targets | None) -> int:
    return PLANES if targets is None else MASS_PLANES


def sums_of(terms: LossTerms, stats: tuple[str, ...], planes: int = PLANES) -> tuple[bool, bool, bool, bool]:
    """LOGITS, ENTROPY, FIRSTS and SQUARES: which sums over a row the terms and the statistics need."""
    names = "mean_logit", "entropy", "correct", "log_sum_sq_probs"
    logits, *rest = (name in stats for name in names)
    return (bool(terms.smoothing) and planes == PLANES) or logits, *rest  # type: ignore[return-value]
