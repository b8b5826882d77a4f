"""Device functions of both files of row kernels: finished logits, exponentials, labels, statistics and the gradient."""

from __future__ import annotations

from onepass.kernels.language import device_function, tl
from onepass.ops.loss.formula import LossTerms
from onepass.ops.loss.targets import Targets

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
def finished_logit(x, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """The logit that the softmax is of, in fp32."""
    if CAPPED:
        return cap * _tanh(_scaled(x, scale, SCALED) / cap)
    else:
        return _scaled(x, scale, SCALED)


@device_function
def _scaled(x, scale, SCALED: tl.constexpr):
    return x.to(tl.float32) * scale if SCALED else x.to(tl.float32)


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
    targets_ptr, weights_ptr, row, first, columns, begin, label, there, smoothing, V,
    TARGETS_ROW: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """A row's masses in these columns, 0 where none are `there`: see ops/loss/targets.py. A row of `targets_ptr` begins at this
    rank's first column, of `weights_ptr`, which has CLASSES, at the vocabulary's."""
    if targets_ptr is not None:
        q = tl.load(targets_ptr + row * TARGETS_ROW + first + columns, mask=there, other=0.0).to(tl.float32)
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


@device_function
def store_statistics(
    parts_ptr, row, there, tile, M, largest, total, target, logits, surprise, first, squares,
    PLANES: tl.constexpr, LOGITS: tl.constexpr, ENTROPY: tl.constexpr, FIRSTS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    far = M.to(tl.int64)
    at = parts_ptr + tile * PLANES * far + row
    tl.store(at, largest, mask=there)
    tl.store(at + far, total, mask=there)
    tl.store(at + 2 * far, target, mask=there)
    if LOGITS:
        tl.store(at + 3 * far, logits, mask=there)
    if ENTROPY:
        tl.store(at + 4 * far, surprise, mask=there)
    if FIRSTS:
        tl.store(at + 5 * far, first.to(tl.float32), mask=there)
    if SQUARES:
        tl.store(at + 6 * far, squares, mask=there)


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
def gradient_of(
    x, above, p, a, b, s, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr, SURPRISE: tl.constexpr, ADDED: tl.constexpr
):  # fmt: skip
    """Gradient of the product x, whose logit is `above` the logsumexp. ADDED: s is not 0."""
    d = p * a
    if SURPRISE:
        d += tl.where(p > 0, p * b * above, 0.0)
    if ADDED:
        d += s
    if CAPPED:
        e = tl.exp2(tl.abs(_scaled(x, scale, SCALED) / cap) * (-2.0 * LOG2_E))
        d *= 4.0 * e / ((1.0 + e) * (1.0 + e))  # 1 - tanh^2, near the cap too
    return d * scale if SCALED else d


# ---- the terms as kernels' arguments ----


def numbers_of(terms: LossTerms) -> tuple[float, float]:
    """scale and cap."""
    return terms.scale, terms.softcap or 1.0


def flags_of(terms: LossTerms) -> tuple[bool, bool, bool]:
    """SCALED, CAPPED and SMOOTHED."""
    return terms.scale != 1, bool(terms.softcap), bool(terms.smoothing)


def planes_of(targets: Targets | None) -> int:
    return PLANES if targets is None else MASS_PLANES


def sums_of(terms: LossTerms, stats: tuple[str, ...], planes: int = PLANES) -> tuple[bool, bool, bool, bool]:
    """LOGITS, ENTROPY, FIRSTS and SQUARES: which sums over a row the terms and the statistics need."""
    names = "mean_logit", "entropy", "correct", "log_sum_sq_probs"
    logits, *rest = (name in stats for name in names)
    return (bool(terms.smoothing) and planes == PLANES) or logits, *rest  # type: ignore[return-value]
