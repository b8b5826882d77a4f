"""Inputs and calls of activation_linear, shared by its tests."""

import torch
from ops.bias_activation_oracle import GATED
from ops.oracle import DEVICE, FP32

import onepass

NAMES = ("x", "weight", "bias", "activation_bias", "token_weight")


def tensors(activation="swiglu", lead=(5, 3), K=40, N=24, dtype=FP32, vector=None, without=()):
    """Return tensors in the order of NAMES, all with requires_grad. `vector` is activation_bias's and token_weight's dtype."""
    wide = 2 * K if activation in GATED else K
    some = {
        "x": torch.randn(*lead, wide, device=DEVICE).to(dtype),
        "weight": (torch.randn(N, K, device=DEVICE) / K**0.5).to(dtype),
        "bias": torch.randn(N, device=DEVICE).to(dtype),
        "activation_bias": torch.randn(wide, device=DEVICE).to(vector or dtype),
        "token_weight": (0.5 + torch.rand(lead, device=DEVICE)).to(vector or dtype),
    }
    return [None if name in without else t.detach().requires_grad_() for name, t in some.items()]


def op(activation="swiglu", function=None, **options):
    def call(x, weight, bias=None, activation_bias=None, token_weight=None):
        more = {"activation_bias": activation_bias, "token_weight": token_weight}
        return (function or onepass.activation_linear)(x, weight, bias, activation=activation, **more, **options)

    return call
