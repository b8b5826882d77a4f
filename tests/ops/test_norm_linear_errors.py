"""Bad input of norm_linear, each with what is said of it."""

import pytest
import torch
from ops.calls import refused

import onepass

x, norm, weight, bias = torch.ones(2, 6), torch.ones(6), torch.ones(3, 6), torch.ones(3)
BAD = {  # the call's arguments, its error, what is said: the argument, what it was, what it must be
    "hidden size 0": ((torch.ones(3, 0), torch.ones(0), torch.ones(3, 0)), {}, ValueError, ("x must", "(3, 0)")),
    "zero-centred nothing": ((x, None, weight), {"zero_centered_gamma": True}, ValueError, ("zero_centered_gamma",)),
    "norm_bias of RMSNorm": ((x, norm, weight), {"norm_bias": norm}, ValueError, ("norm_bias", "layer_norm")),
    "weight transposed": ((x, norm, weight.T), {}, ValueError, ("weight must have shape (N, 6)", "(6, 3)")),
    "weight a vector": ((x, norm, norm), {}, ValueError, ("weight must have shape (N, 6)", "(6,)")),
    "weight of another type": ((x, norm, weight.bfloat16()), {}, TypeError, ("weight must", "float32", "bfloat16")),
    "bias of another type": ((x, norm, weight, bias.half()), {}, TypeError, ("bias must", "float32", "float16")),
    "residual of another shape": ((x, norm, weight), {"residual": x[:1]}, ValueError, ("residual must", "(2, 6)", "(1, 6)")),
    "another norm": ((x, norm, weight), {"norm": "batch_norm"}, ValueError, ("norm must be one of", "batch_norm")),
    "eps of zero": ((x, norm, weight), {"eps": 0.0}, ValueError, ("eps must be", "above 0", "0.0")),
    "eps a word": ((x, norm, weight), {"eps": "1e-5"}, TypeError, ("eps must be", "number", "'1e-5'")),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    refused(onepass.norm_linear, *BAD[what])
