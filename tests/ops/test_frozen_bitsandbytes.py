"""Weights of bitsandbytes itself, where it is installed: the bits of its decoding, and its layers' results."""

import pytest
import torch
from ops.calls import relative
from ops.frozen_calls import BF16, DEVICE, FP16, FP32, numbers

import onepass

bnb = pytest.importorskip("bitsandbytes")


def quantised(N, K, dtype, **options):
    weight = numbers(N, K, dtype=dtype, scale=K**-0.5)
    return bnb.nn.Params4bit(weight, requires_grad=False, **options)._quantize(DEVICE)


def dequantised(weight):
    """Return bitsandbytes' own numbers. Its kernel for CPUs takes another block's scale where a row is no multiple of a block."""
    state = weight.quant_state
    if DEVICE.type == "cuda" or state.shape[-1] % state.blocksize == 0:
        return bnb.functional.dequantize_4bit(weight.data, state)
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as formula

    absmax = state.absmax
    if state.nested:
        absmax = bnb.functional.dequantize_blockwise(absmax, state.state2) + state.offset
    return formula.__wrapped__(weight.data.reshape(-1), absmax, state.code, state.blocksize, state.shape, state.dtype)


@pytest.mark.parametrize("nested", (True, False))
@pytest.mark.parametrize("quant_type", ("nf4", "fp4"))
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
def test_decoding_has_its_bits(dtype, quant_type, nested):
    for shape in ((96, 160), (7, 13), (5, 100), (300, 256)):
        for block in (64, 256):
            weight = quantised(*shape, dtype, quant_type=quant_type, compress_statistics=nested, blocksize=block)
            assert torch.equal(onepass.frozen_weight(weight).decoded(dtype), dequantised(weight)), (shape, block)


def test_other_storage():
    weight = quantised(64, 128, BF16, quant_type="nf4", quant_storage=BF16)
    assert weight.dtype is BF16
    assert torch.equal(onepass.frozen_weight(weight).decoded(BF16), dequantised(weight))


def test_a_layer_has_its_results():
    layer = bnb.nn.Linear4bit(128, 64, bias=True, compute_dtype=BF16, quant_type="nf4").to(DEVICE, BF16)
    layer.weight = quantised(64, 128, BF16, quant_type="nf4")
    layer.bias.data = layer.bias.data.to(BF16)
    x, dy = numbers(5, 128, dtype=BF16).requires_grad_(), numbers(5, 64, dtype=BF16)
    theirs, ours = layer(x), onepass.linear(x, onepass.frozen_weight(layer), layer.bias)
    assert relative(ours, theirs) < 5e-3
    assert relative(*(torch.autograd.grad(y, x, dy)[0] for y in (ours, theirs))) < 5e-3


def test_a_layer_that_loads_codes():
    """A copy of its state gives other codes to the same layer."""
    layers = [bnb.nn.Linear4bit(128, 64, bias=False, quant_type="nf4") for _ in range(2)]
    for layer in layers:
        layer.weight = quantised(64, 128, BF16, quant_type="nf4")
    before = onepass.frozen_weight(layers[0])
    layers[1].weight.data.bitwise_xor_(17)
    layers[0].weight.data.copy_(layers[1].weight.data)
    assert onepass.frozen_weight(layers[0]) is before
    assert torch.equal(before.decoded(BF16), dequantised(layers[1].weight))


def test_int8():
    """Before the layer's first forward and after it, which moves the scales."""
    layer = bnb.nn.Linear8bitLt(128, 64, bias=False, has_fp16_weights=False)
    layer.weight.data = numbers(64, 128, dtype=FP16, scale=0.1).cpu()
    layer = layer.to(DEVICE)
    expected = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
    first = onepass.frozen_weight(layer, dtype=BF16)
    assert torch.equal(first.decoded(FP32), expected) and torch.equal(first.decoded(BF16), expected.to(BF16))
    x = numbers(5, 128, dtype=BF16).requires_grad_()
    theirs = layer(x)
    assert onepass.frozen_weight(layer, dtype=BF16) is first
    assert relative(onepass.linear(x, first), theirs) < 2e-2  # they quantise x, too
    with pytest.raises(ValueError, match="SCB must be its rows' largest magnitudes, but is None"):
        onepass.frozen_weight(layer.weight, dtype=FP16)
    with pytest.raises(ValueError, match="dtype must be given"):
        onepass.frozen_weight(layer)
