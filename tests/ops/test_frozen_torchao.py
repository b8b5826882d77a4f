"""Weights of torchao itself, where it is installed: the bits of its decoding."""

import pytest
import torch
from ops.calls import relative
from ops.frozen_calls import BF16, DEVICE, FP32, numbers
from torch.nn import functional as F

import onepass

nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
quantization = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
def test_nf4_has_its_bits(dtype):
    weight = nf4.NF4Tensor.from_tensor(numbers(128, 256, dtype=dtype, scale=0.1), 64, 256)
    frozen = onepass.frozen_weight(weight)
    assert frozen.dtype is dtype and torch.equal(frozen.decoded(dtype), weight.get_original_weight())
    x = numbers(5, 256, dtype=dtype).requires_grad_()
    assert torch.equal(onepass.linear(x, frozen), F.linear(x, frozen.decoded(dtype)))
    with pytest.raises(ValueError, match="weight must not require grad"):
        onepass.frozen_weight(nf4.NF4Tensor.from_tensor(numbers(128, 256), 64, 256).requires_grad_())


def test_nf4_that_is_loaded_or_written_is_seen():
    """Its scales are decoded once, and again after a write."""

    def layer(scale):
        made = torch.nn.Linear(256, 128, bias=False, device=DEVICE, dtype=BF16)
        weight = nf4.NF4Tensor.from_tensor(numbers(128, 256, dtype=BF16, scale=scale), 64, 256)
        made.weight = torch.nn.Parameter(weight, requires_grad=False)
        return made

    other = layer(1.0)
    for write in (
        lambda mine: mine.load_state_dict(other.state_dict()),
        lambda mine: mine.weight.detach().copy_(other.weight),
    ):
        mine = layer(0.1)
        onepass.frozen_weight(mine)
        write(mine)
        assert torch.equal(onepass.frozen_weight(mine).decoded(BF16), other.weight.get_original_weight())


@pytest.mark.parametrize("granularity", ("PerRow", "PerTensor", "PerGroup"))
def test_int8_has_its_bits(granularity):
    kind = getattr(quantization.granularity, granularity)
    granularity = kind(32) if granularity == "PerGroup" else kind()
    layer = torch.nn.Linear(256, 128, bias=False, device=DEVICE, dtype=BF16)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig(granularity=granularity))
    frozen, x = onepass.frozen_weight(layer), numbers(5, 256, dtype=BF16)
    assert torch.equal(frozen.decoded(BF16), layer.weight.dequantize())
    assert onepass.frozen_weight(layer) is frozen
    assert relative(onepass.linear(x, frozen), layer(x)) < 5e-3


def test_what_is_not_decoded_is_refused():
    layer = torch.nn.Linear(256, 128, bias=False, device=DEVICE, dtype=BF16)
    quantization.quantize_(layer, quantization.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(ValueError, match="whose x is quantised or scaled too"):
        onepass.frozen_weight(layer)
    layer.weight.act_quant_kwargs = None
    layer.weight.zero_point = torch.ones(128, 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="that has zero points"):
        onepass.frozen_weight(layer)
    layer = torch.nn.Linear(256, 128, bias=False, device=DEVICE, dtype=BF16)
    quantization.quantize_(layer, quantization.Float8WeightOnlyConfig())
    with pytest.raises(TypeError, match="but one is a Float8Tensor"):
        onepass.frozen_weight(layer)
