"""Inputs and calls of norm_linear, shared by its tests."""

import pytest
import torch
from ops.oracle import DEVICE, FP32

import onepass

kinds = pytest.mark.parametrize("layer", (True, False), ids=("layer", "rms"))
NAMES = ("x", "norm_weight", "weight", "bias", "norm_bias")
USES = ("y", "norm", "both")


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
