"""Bad input of norm_linear, each with what is said of it."""

import pytest
import torch

import onepass
from onepass.testing.poison import unchanged

x, norm, weight, bias = torch.ones(2, 6), torch.ones(6), torch.ones(3, 6), torch.ones(3)
LAYER = {"norm": "layer_norm"}
BAD = {  # the call's arguments, its error, what is said: the argument, what it was, what it must be
    "integer x": ((x.int(), norm, weight), {}, TypeError, ("x must be", "floating-point", "torch.int32")),
    "no tensor": (([1.0], norm, weight), {}, TypeError, ("x must be", "list")),
    "a scalar": ((torch.tensor(1.0), norm, weight), {}, ValueError, ("x must", "dimension", "()")),
    "hidden size 0": ((torch.ones(3, 0), torch.ones(0), torch.ones(3, 0)), {}, ValueError, ("x must", "(3, 0)")),
    "short norm_weight": ((x, norm[:4], weight), {}, ValueError, ("norm_weight must have shape (6,)", "(4,)")),
    "integer norm_weight": ((x, norm.int(), weight), {}, TypeError, ("norm_weight must be", "torch.int32")),
    "norm_weight elsewhere": ((x, norm.to("meta"), weight), {}, ValueError, ("norm_weight must be on cpu", "meta")),
    "zero-centred nothing": ((x, None, weight), {"zero_centered_gamma": True}, ValueError, ("zero_centered_gamma",)),
    "norm_bias of RMSNorm": ((x, norm, weight), {"norm_bias": norm}, ValueError, ("norm_bias", "layer_norm")),
    "short norm_bias": ((x, norm, weight), {"norm_bias": norm[:1]} | LAYER, ValueError, ("norm_bias must", "(6,)", "(1,)")),
    "weight turned": ((x, norm, weight.T), {}, ValueError, ("weight must have shape (N, 6)", "(6, 3)")),
    "weight a vector": ((x, norm, norm), {}, ValueError, ("weight must have shape (N, 6)", "(6,)")),
    "weight nothing": ((x, norm, None), {}, TypeError, ("weight must be", "NoneType")),
    "weight of another type": ((x, norm, weight.bfloat16()), {}, TypeError, ("weight must", "float32", "bfloat16")),
    "weight elsewhere": ((x, norm, weight.to("meta")), {}, ValueError, ("weight must be on cpu", "meta")),
    "short bias": ((x, norm, weight, bias[:2]), {}, ValueError, ("bias must have shape (3,)", "(2,)")),
    "bias of another type": ((x, norm, weight, bias.half()), {}, TypeError, ("bias must", "float32", "float16")),
    "bias a number": ((x, norm, weight, 1.0), {}, TypeError, ("bias must be", "float")),
    "bias elsewhere": ((x, norm, weight, bias.to("meta")), {}, ValueError, ("bias must be on cpu", "meta")),
    "residual of another shape": ((x, norm, weight), {"residual": x[:1]}, ValueError, ("residual must", "(2, 6)", "(1, 6)")),
    "integer residual": ((x, norm, weight), {"residual": x.int()}, TypeError, ("residual must be", "or None", "torch.int32")),
    "residual a number": ((x, norm, weight), {"residual": 1.0}, TypeError, ("residual must be", "float")),
    "residual elsewhere": ((x, norm, weight), {"residual": x.to("meta")}, ValueError, ("residual must be on cpu", "meta")),
    "another norm": ((x, norm, weight), {"norm": "batch_norm"}, ValueError, ("norm must be one of", "batch_norm")),
    "eps of zero": ((x, norm, weight), {"eps": 0.0}, ValueError, ("eps must be", "above 0", "0.0")),
    "eps a word": ((x, norm, weight), {"eps": "1e-5"}, TypeError, ("eps must be", "number", "'1e-5'")),
    "unknown backend": ((x, norm, weight), {"backend": "cuda"}, ValueError, ("backend must be one of auto", "'cuda'")),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    args, options, error, words = BAD[what]
    with unchanged(x=x, norm=norm, weight=weight, bias=bias), pytest.raises(error) as raised:
        onepass.norm_linear(*args, **options)
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in {str(raised.value)!r}"
