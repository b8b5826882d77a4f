"""The error budget of one random case, of any size and any numbers.

`budget` judges chosen cases, with spread enough to compare. Here an output may have one element, cancel, or lie where its type
ends. So the error allowed is a multiple of the largest of several baselines: the formula in fp32, and the same of inputs a
rounding away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MARGIN = 8.0  # times the baselines' error: chosen cases have a strict budget, and ten thousand drawn ones their extremes
PRODUCTS = 3.0  # times those, where operands inside are rounded: a baseline rounds inputs only
SLACK = 1e-6  # of fp32 arithmetic
VANISHED = 1e-13  # of gradients, whose incoming ones are about 1: fp64 has 1 + tanh(x) = 0 where the tail is 1e-16 yet
MANY = 256  # numbers from which on what keeps less than x is judged: of few, one that turns the other way at a clamp is all
SMALL = 32  # outputs and rows of fewer elements have too little spread
RARE = 8.0  # more is allowed of outputs of fewer than MANY, where one row's extreme is all

_FP32 = torch.finfo(torch.float32).eps

Results = Mapping[str, Tensor]


def judge(
    ours: Results,
    references: Sequence[Results],
    types: Mapping[str, torch.dtype],
    results: float = 0.0,
    gradients: float = 0.0,
    factor: float = 1.0,
    floors: Mapping[str, float] | None = None,
    eps: float = _FP32,
) -> list[str]:
    """Return what is wrong with our results, in words.

    Args:
        references: the exact results, then the baselines.
        types: the dtypes that results must have.
        results: a relative error that all results may have beside.
        gradients: the same of gradients alone.
        factor: multiplies what the baselines allow.
        floors: absolute errors that results of these names may have where arithmetic is fp32.
        eps: of the arithmetic.
    """
    exact, *baselines = references
    if ours.keys() != exact.keys():
        return [f"results {', '.join(ours)}, but must be {', '.join(exact)}"]
    found = []
    for name, result in ours.items():
        wide, gradient = [baseline[name] for baseline in baselines], name.startswith("d")
        kept = max(eps, min(_FP32, torch.finfo(result.dtype).eps))  # a gradient of fp32 beside x in fp64 has terms in fp32
        floor = max((floors or {}).get(name, 0.0) * kept / _FP32, VANISHED if gradient else 0.0)
        beside = max(results, gradients) if gradient else results
        allowed = Allowed(beside, factor, floor, gradient or factor > 1, SLACK * eps / _FP32)
        found += [f"{name} {words}" for words in _judge_one(result, exact[name], wide, types.get(name, result.dtype), allowed)]
    return found


class Allowed(NamedTuple):
    """How far one result may be from the exact one."""

    relative: float  # beside what the baselines allow
    factor: float  # of what the baselines allow
    floor: float
    either: bool  # NaN or infinite: sums of infinities are either by the order of their terms
    slack: float  # relative, where the result has many numbers


def _judge_one(ours: Tensor, exact: Tensor, baselines: list[Tensor], dtype: torch.dtype, allowed: Allowed) -> Iterator[str]:
    extra, factor, floor, either, least = allowed
    if ours.shape != exact.shape or ours.dtype != dtype:
        yield f"is {ours.dtype}{list(ours.shape)}, but must be {dtype}{list(exact.shape)}"
        return
    if not exact.numel():
        return
    kind = torch.finfo(dtype)
    got, exact, rounded = ours.double(), exact.double(), [b.to(dtype).double() for b in baselines]
    infinite = ~exact.isfinite() & ((rounded[0] == exact) | (rounded[0].isnan() & exact.isnan()))
    alike = ~got.isfinite() if either else (got == exact) | (got.isnan() & exact.isnan())
    other = infinite & ~alike
    if count := int(other.sum()):
        yield f"NaN and infinities: {count} of {exact.numel()} are others"
    keep = exact.isfinite() & (exact.abs() < kind.max / 2)
    for baseline in rounded:
        keep = keep & baseline.isfinite()
    if count := int((keep & ~got.isfinite()).sum()):
        yield f"{count} of {exact.numel()} are NaN or infinite, but must be finite"
        return
    zero = exact.new_zeros(())
    if extra and exact.numel() < MANY:
        return
    size, error = torch.where(keep, exact, zero).abs(), torch.where(keep, (got - exact).abs(), zero)
    noise = torch.stack([torch.where(keep, (baseline - exact).abs(), zero) for baseline in rounded]).amax(0)
    # products may take what fp32 holds as subnormal for 0
    floor = max(floor, 2 * kind.tiny * (kind.eps if dtype is torch.float16 else 1.0))
    among = 2 * kind.eps * _rms(size) if factor > 1 else zero  # a row's operands are rounded, which meet in another row
    factor *= RARE if exact.numel() < MANY else 1.0
    slack = extra + (least if exact.numel() >= SMALL else max(least, 2 * kind.eps))
    measures = [
        ("relative RMS", _rms(error), factor * MARGIN * _rms(noise) + slack * _rms(size)),
        ("largest error", error.amax(), factor * MARGIN * noise.amax() + slack * size.amax()),
    ]
    if exact.dim() > 1 and exact.shape[-1] >= SMALL:
        excess = _rms(error, -1) - factor * MARGIN * _rms(noise, -1) - (2 * slack) * _rms(size, -1) - among - extra * size.amax()
        worst = excess.argmax()
        measures.append(("worst row", _rms(error, -1).flatten()[worst], (_rms(error, -1) - excess).flatten()[worst]))
    for measure, is_, may in measures:
        if not float(is_) <= float(may) + floor:
            yield f"{measure} {float(is_):.3g}, but must be at most {float(may):.3g} (values of {float(_rms(size)):.3g})"


def _rms(t: Tensor, *dim: int) -> Tensor:
    """Return the root of the mean square, scaled so that squares neither overflow nor vanish."""
    top = t.amax().clamp_min(1e-300)
    return (t / top).square().mean(*dim).sqrt() * top
