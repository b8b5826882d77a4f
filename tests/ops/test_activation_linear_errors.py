"""What is said of a call of activation_linear: bad input, each with its message, and an explanation."""

import pytest
import torch
from ops.activation_linear_calls import tensors
from ops.calls import needs_triton, refused

import onepass

x, weight, bias, wide = torch.ones(2, 12), torch.ones(3, 6), torch.ones(3), torch.ones(12)
BAD = {  # the call's arguments, its error, what is said: the argument, what it was, what it must be
    "half a pair": ((x[:, :11], weight), {}, ValueError, ("x must have an even last dimension", "11")),
    "weight of x's width": ((x, torch.ones(3, 12)), {}, ValueError, ("weight must have shape (N, 6)", "(3, 12)")),
    "weight transposed": ((x, weight.T), {}, ValueError, ("weight must have shape (N, 6)", "(6, 3)")),
    "weight of another type": ((x, weight.bfloat16()), {}, TypeError, ("weight must", "float32", "bfloat16")),
    "bias of another type": ((x, weight, bias.half()), {}, TypeError, ("bias must", "float32", "float16")),
    "no such activation": ((x, weight, None, "mish"), {}, ValueError, ("activation must be one of", "'mish'")),
    "token_weight of columns": ((x, weight), {"token_weight": wide}, ValueError, ("token_weight must", "(2,)", "(12,)")),
    "a clamp of no gate": ((x[:, :6], weight, None, "gelu"), {"clamp": 1.0}, ValueError, ("clamp (1.0) needs a gated", "'gelu'")),
    "an offset of no gate": ((x[:, :6], weight, None, "gelu"), {"linear_offset": 1.0}, ValueError, ("linear_offset", "'gelu'")),
    "no such store": ((x, weight), {"save": "fp4"}, ValueError, ("save must be one of input, fp8, offload", "'fp4'")),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    refused(onepass.activation_linear, *BAD[what])


def test_infinities_and_fp8_under_validate():
    with onepass.validate(), pytest.raises(ValueError, match="x must be finite"):
        onepass.activation_linear(x * float("inf"), weight, save="fp8")


@needs_triton
def test_explain():
    said = onepass.explain("activation_linear", *(t.detach() for t in tensors()[:3]), backend="triton")
    assert all(word in said.variant for word in ("forward in blocks", "products by PyTorch", "rebuilt in backward")), said.variant
