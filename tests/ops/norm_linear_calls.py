"""Inputs and calls of norm_linear, and what they are judged by, shared by its tests."""

import pytest
import torch
from ops.calls import relative
from ops.oracle import DEVICE, FP32

import onepass
from onepass.ops.norm.norm_linear import norm_linear_reference
from onepass.testing.budget import compare, run

kinds = pytest.mark.parametrize("layer", (True, False), ids=("layer", "rms"))
NAMES = ("x", "norm_weight", "weight", "bias", "norm_bias")
ALL = (*NAMES, "residual")
RETURN = ("y", "norm", "h")  # with everything asked for, in this order


def tensors(lead=(3, 5), K=40, N=24, dtype=FP32, layer=True, with_bias=True, params=None):
    """Return x, norm_weight, weight, bias and norm_bias with requires_grad. `params` is the dtype of the norm's parameters."""
    x, norm_weight, bias = (torch.randn(*shape, device=DEVICE) for shape in ((*lead, K), (K,), (N,)))
    weight, norm_bias = torch.randn(N, K, device=DEVICE) / K**0.5, torch.randn(K, device=DEVICE)
    params = dtype if params is None else params
    some = x.to(dtype), norm_weight.to(params), weight.to(dtype), bias.to(dtype), norm_bias.to(params)
    kept = some[0], some[1], some[2], some[3] if with_bias else None, some[4] if layer else None
    return [t if t is None else t.detach().requires_grad_() for t in kept]


def op(layer=True, function=None, **options):
    def call(x, norm_weight, weight, bias=None, norm_bias=None, residual=None):
        kind = {"norm_bias": norm_bias, "norm": "layer_norm" if layer else "rms_norm"}
        return (function or onepass.norm_linear)(x, norm_weight, weight, bias, residual=residual, **kind, **options)

    return call


def given(lead=(3, 5), K=40, N=24, dtype=FP32, layer=True, added=True, residual_type=None, **options):
    """Return the arguments of `op`: `tensors`, and a residual or None."""
    residual = torch.randn(*lead, K, device=DEVICE).to(residual_type or dtype).requires_grad_()
    return [*tensors(lead, K, N, dtype, layer, **options), residual if added else None]


def report_of(
    function, dtype, layer, used, added=None, lead=(3, 11), backend="torch", residual_type=None, centered=False, **drawn
):
    """Judge ours by the formula in fp64; the baseline is the same formula in the inputs' own types.

    `used` are names of RETURN. `added` is whether there is a residual, or None: then x isn't returned either.
    """
    inputs = dict(zip(ALL, given(lead, 70, 48, dtype, layer, added, residual_type, **drawn), strict=True))
    rest = {name: inputs.pop(name) for name in ALL[1:] if not _reached(name, used)}  # no gradient is theirs
    shapes = {"y": (*lead, 48), "norm": (*lead, 70), "h": (*lead, 70)}
    dys = [torch.randn(shapes[name], device=DEVICE).to(dtype) for name in RETURN if name in used]
    returned = {"return_norm_output": True} | ({} if added is None else {"return_input": True})

    def of(f, **options):
        call = op(layer, f, eps=1e-5, zero_centered_gamma=centered, **returned, **options)

        def with_rest(*tensors):
            others = {name: None if t is None else t.detach().to(tensors[0].dtype) for name, t in rest.items()}
            all_of_them = dict(zip(inputs, tensors, strict=True)) | others
            ys = call(*(all_of_them[name] for name in ALL))
            return tuple(t for name, t in zip(RETURN, ys, strict=False) if name in used)

        return with_rest

    reference = of(norm_linear_reference, **({} if added is None else {"stored": dtype}))
    ours, exact = run(of(function, backend=backend), inputs, dys), run(reference, inputs, dys, torch.float64)
    for name in ("x", "residual"):
        assert inputs[name] is None or ours[f"d{name}"].dtype == inputs[name].dtype
    if dtype is FP32:
        return {name: relative(ours[name], exact[name]) for name in exact}
    return compare([(ours, run(reference, inputs, dys), exact)], dtype)


def _reached(name, used):
    if name in ("weight", "bias"):
        return "y" in used
    return name not in ("norm_weight", "norm_bias") or "y" in used or "norm" in used
