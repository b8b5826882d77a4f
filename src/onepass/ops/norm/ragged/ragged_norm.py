"""ragged_norm: layer_norm or rms_norm of many tensors of different widths, as two operators of graphs.

Formula of each lane's rows, as `onepass.layer_norm` and `onepass.rms_norm`: fp32 all the way (fp64 of fp64), y rounded once.
Shapes xs: L lanes [*lead, w_i] with the same lead, R rows each; weights and biases: one [w_i] a lane, or none at all. y and
dx: packed [*lead, sum of w], lanes side by side; or flat [R * sum of w], lane i contiguous from R * (w_0 + ...). mean (of
layer_norm) and rstd [L, R]; dweight and dbias [sum of w], empty where they are not asked for. Bytes forward reads xs and
writes y; backward reads dys and xs and writes dx, dweight and dbias in the same pass. Kernels ops/norm/ragged/kernels.py;
elsewhere, lane by lane, plain PyTorch. These have no autograd: graphs call them that hold the backward already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.kernels.language import triton_unsupported
from onepass.ops.norm.formula import norm_formula
from onepass.ops.norm.ragged.columns import columns_backward, columns_forward
from onepass.ops.norm.ragged.kernels import ragged_backward, ragged_forward
from onepass.ops.norm.ragged.lanes import Lanes, check_gradients, check_lanes, check_vectors
from onepass.runtime import backend
from onepass.runtime.checks import check_eps
from onepass.runtime.dispatch import registered

NORMS = ("layer_norm", "rms_norm")
_TYPES = (torch.bfloat16, torch.float32, torch.float16)


def ragged_norm_reference(
    xs: Lanes, weights: Lanes, biases: Lanes, *, norm: str, eps: float, native: bool = False
) -> Lanes:
    """The formula, for every type, of each lane."""
    none: list[None] = [None] * len(xs)
    vectors = zip(weights or none, biases or none, strict=True)
    layer = norm == "layer_norm"
    return [
        norm_formula(x, weight, bias, layer=layer, eps=eps, native=native).to(x.dtype)
        for x, (weight, bias) in zip(xs, vectors, strict=True)
    ]


# ---- what the operators run ----


def _forward(xs: Lanes, weights: Lanes, biases: Lanes, norm: str, eps: float, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    layer = _is_layer(norm)
    if xs and _by_kernels(xs[0]):
        return ragged_forward(xs, weights, biases, layer, check_eps(eps), packed)
    _check_forward(xs, weights, biases, eps)
    ys = ragged_norm_reference(xs, weights, biases, norm=norm, eps=eps, native=True)
    wide = _wide(xs[0])
    mean = torch.stack([x.to(wide).mean(-1).reshape(-1) for x in xs]) if layer else xs[0].new_empty(0, dtype=wide)
    rstd = torch.stack([_deviation(x.to(wide), layer, eps).reshape(-1) for x in xs])
    return _joined(ys, packed), mean, rstd


def _deviation(x: Tensor, layer: bool, eps: float) -> Tensor:
    """1 / it, of each row."""
    z = x - x.mean(-1, keepdim=True) if layer else x
    return torch.rsqrt(z.square().mean(-1) + eps)


def _backward(
    dys: Lanes, xs: Lanes, weights: Lanes, mean: Tensor, rstd: Tensor,
    norm: str, packed: bool, weight_gradient: bool, bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    layer = _is_layer(norm)
    if weight_gradient and not weights:
        raise ValueError("weight_gradient is asked for, but there are no weights")
    if xs and dys and _by_kernels(xs[0]):
        return ragged_backward(dys, xs, weights, mean, rstd, layer, packed, weight_gradient, bias_gradient)
    check_gradients(dys, xs, mean, rstd, layer)
    check_vectors(weights, xs, "weights")
    found = []
    for lane, (dy, x) in enumerate(zip(dys, xs, strict=True)):
        weight = weights[lane] if weights else None
        found.append(_lane_backward(dy, x, weight, mean[lane] if layer else None, rstd[lane]))
    dxs, dweights, dbiases = zip(*found, strict=True)
    vector_type = weights[0].dtype if weights else xs[0].dtype
    none = xs[0].new_empty(0, dtype=vector_type)
    dweight = torch.cat(dweights).to(vector_type) if weight_gradient else none
    dbias = torch.cat(dbiases).to(vector_type) if bias_gradient else none.clone()
    return _joined(list(dxs), packed), dweight, dbias


def _lane_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx in x's type, and the sums over rows in the wider of it and fp32."""
    wide, each = _wide(x), (*x.shape[:-1], 1)
    d, z = dy.to(wide), x.to(wide)
    if mean is not None:
        z = z - mean.view(each)
    z = z * rstd.view(each)
    g = d if weight is None else d * weight.to(wide)
    dx = g - z * (g * z).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - g.mean(-1, keepdim=True)
    width = x.shape[-1]
    return (dx * rstd.view(each)).to(x.dtype), (d * z).reshape(-1, width).sum(0), d.reshape(-1, width).sum(0)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _joined(lanes: Lanes, packed: bool) -> Tensor:
    """A tensor of its own, of one lane too."""
    return torch.cat(lanes, -1) if packed else torch.cat([lane.reshape(-1) for lane in lanes])


def _by_kernels(x: Tensor) -> bool:
    """Who is chosen for both norms; another package's kernels know no lanes, so to choose those says nothing here."""
    if not x.is_floating_point():
        return False  # which is told by the checks
    reason = f"xs are {x.dtype}" if x.dtype not in _TYPES else triton_unsupported(x)
    named = backend.current_backend()
    return backend.choose("ragged_norm", named if named in backend.NATIVE else "auto", reason) == "triton"


def _is_layer(norm: str) -> bool:
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, but is {norm!r}")
    return norm == "layer_norm"


def _check_forward(xs: Lanes, weights: Lanes, biases: Lanes, eps: float) -> None:
    check_eps(eps)
    check_lanes(xs)
    check_vectors(weights, xs, "weights")
    check_vectors(biases, xs, "biases")


# ---- registered: opaque to the compiler ----


def _forward_fake(xs: Lanes, weights: Lanes, biases: Lanes, norm: str, eps: float, packed: bool) -> tuple[Tensor, ...]:
    layer = _is_layer(norm)
    _check_forward(xs, weights, biases, eps)
    rows = xs[0].numel() // xs[0].shape[-1]
    stats = xs[0].new_empty((len(xs), rows), dtype=_wide(xs[0]))
    return _joined_fake(xs, packed), torch.empty_like(stats) if layer else stats.new_empty(0), stats


def _backward_fake(
    dys: Lanes, xs: Lanes, weights: Lanes, mean: Tensor, rstd: Tensor,
    norm: str, packed: bool, weight_gradient: bool, bias_gradient: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    layer = _is_layer(norm)
    check_gradients(dys, xs, mean, rstd, layer)
    check_vectors(weights, xs, "weights")
    vectors = (weights or xs)[0]
    total = sum(x.shape[-1] for x in xs)
    dweight, dbias = (vectors.new_empty(total if asked else 0) for asked in (weight_gradient, bias_gradient))
    return _joined_fake(xs, packed), dweight, dbias


def _joined_fake(xs: Lanes, packed: bool) -> Tensor:
    total = sum(x.shape[-1] for x in xs)
    return xs[0].new_empty((*xs[0].shape[:-1], total) if packed else xs[0].numel() // xs[0].shape[-1] * total)


ragged_norm_forward: Any = registered(
    "ragged_norm_forward(Tensor[] xs, Tensor[] weights, Tensor[] biases, str norm, float eps, bool packed) "
    "-> (Tensor y, Tensor mean, Tensor rstd)",
    _forward,
    _forward_fake,
)
ragged_norm_backward: Any = registered(
    "ragged_norm_backward(Tensor[] dys, Tensor[] xs, Tensor[] weights, Tensor mean, Tensor rstd, str norm, bool packed, "
    "bool weight_gradient, bool bias_gradient) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _backward,
    _backward_fake,
)


# ---- lanes that are columns of one tensor ----


def _columns_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, widths: list[int], norm: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    layer = _is_layer(norm)
    if _by_kernels(x):
        return columns_forward(x, weight, bias, tuple(widths), layer, check_eps(eps))
    xs, weights, biases = (_columns(whole, widths) for whole in (x, weight, bias))
    return _forward(xs, weights, biases, norm, eps, True)


def _columns_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, widths: list[int],
    norm: str, weight_gradient: bool, bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    layer = _is_layer(norm)
    if _by_kernels(x):
        return columns_backward(dy, x, weight, mean, rstd, tuple(widths), layer, weight_gradient, bias_gradient)
    dys, xs, weights = (_columns(whole, widths) for whole in (dy, x, weight))
    return _backward(dys, xs, weights, mean, rstd, norm, True, weight_gradient, bias_gradient)


def _columns(whole: Tensor | None, widths: list[int]) -> Lanes:
    return [] if whole is None else list(whole.split(widths, -1))


def _columns_forward_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, widths: list[int], norm: str, eps: float
) -> tuple[Tensor, ...]:
    layer = _is_layer(norm)
    for name, vector in (("weight", weight), ("bias", bias)):
        _check_columns(name, vector, x, widths)
    stats = x.new_empty((len(widths), x.numel() // x.shape[-1]), dtype=_wide(x))
    return x.new_empty(x.shape), torch.empty_like(stats) if layer else stats.new_empty(0), stats


def _columns_backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, widths: list[int],
    norm: str, weight_gradient: bool, bias_gradient: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_columns("weight", weight, x, widths)
    vector = x if weight is None else weight
    dweight, dbias = (vector.new_empty(x.shape[-1] if asked else 0) for asked in (weight_gradient, bias_gradient))
    return x.new_empty(x.shape), dweight, dbias


def _check_columns(name: str, vector: Tensor | None, x: Tensor, widths: list[int]) -> None:
    if sum(widths) != x.shape[-1] or min(widths, default=0) < 1:
        raise ValueError(f"widths must be at least 1 and add up to x's last dimension {x.shape[-1]}, but are {widths}")
    if vector is not None and vector.shape != x.shape[-1:]:
        raise ValueError(f"{name} must have shape {tuple(x.shape[-1:])}, as x's last dimension, but has {tuple(vector.shape)}")


columns_norm_forward: Any = registered(
    "columns_norm_forward(Tensor x, Tensor? weight, Tensor? bias, int[] widths, str norm, float eps) "
    "-> (Tensor y, Tensor mean, Tensor rstd)",
    _columns_forward,
    _columns_forward_fake,
)
columns_norm_backward: Any = registered(
    "columns_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, int[] widths, str norm, "
    "bool weight_gradient, bool bias_gradient) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _columns_backward,
    _columns_backward_fake,
)
