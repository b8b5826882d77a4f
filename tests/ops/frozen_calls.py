"""Weights in few bits as other packages keep them, made here: bitsandbytes need not be installed."""

import copy
import math
from types import SimpleNamespace

import torch
from torch import nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = [sign * size / 12 for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
TABLES = {"nf4": NF4, "fp4": FP4}


class Params4bit(nn.Parameter):
    """Stands in for bitsandbytes' parameter: bytes of two codes, and a quant_state."""

    def __new__(cls, data, quant_state):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state, made.bnb_quantized = quant_state, True
        return made

    def __deepcopy__(self, memo):
        return Params4bit(self.data.clone(), copy.deepcopy(self.quant_state, memo))


class Int8Params(nn.Parameter):
    """Stands in for bitsandbytes' parameter: codes, and the largest magnitudes of rows."""

    def __new__(cls, data, scale):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.CB, made.SCB, made.has_fp16_weights = data, scale, False
        return made

    def __deepcopy__(self, memo):
        return Int8Params(self.data.clone(), self.SCB.clone())


def numbers(*shape, seed=0, scale=1.0, dtype=FP32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype)


def four_bits(N, K, dtype=FP32, quant_type="nf4", nested=True, block=64, seed=0, device=DEVICE):
    """Quantise drawn numbers as bitsandbytes does, with scales of its own."""
    weight, table = numbers(N, K, seed=seed, scale=K**-0.5).cpu(), torch.tensor(TABLES[quant_type])
    blocks = math.ceil(N * K / block)
    flat = torch.zeros(blocks * block)
    flat[: N * K] = weight.flatten()
    absmax = flat.view(blocks, block).abs().amax(1)
    nearest = (flat.view(blocks, block, 1) / absmax[:, None, None] - table).abs().argmin(-1)
    codes = nearest.flatten()[: N * K + N * K % 2].to(torch.uint8)
    state = SimpleNamespace(absmax=absmax, shape=torch.Size((N, K)), code=table, dtype=dtype, blocksize=block, offset=None)
    state.quant_type, state.state2 = quant_type, None
    if nested:
        offset, scale_of = absmax.mean(), 4  # of so few scales as a test has
        rest = absmax - offset
        sizes = torch.stack([part.abs().max() for part in rest.split(scale_of)])
        nested_table = torch.linspace(-1, 1, 256)
        nearest = (rest / sizes.repeat_interleave(scale_of)[:blocks]).unsqueeze(1) - nested_table
        state.absmax, state.offset = nearest.abs().argmin(1).to(torch.uint8), offset.to(device)
        state.state2 = SimpleNamespace(absmax=sizes.to(device), code=nested_table.to(device), blocksize=scale_of)
    state.absmax, state.code = state.absmax.to(device), table.to(device)
    return Params4bit((codes[::2] << 4 | codes[1::2]).unsqueeze(1).to(device), state)


def int8(N, K, seed=0, device=DEVICE):
    weight = numbers(N, K, seed=seed, scale=K**-0.5).to(device)
    scale = weight.abs().amax(1)
    return Int8Params((weight * (127 / scale[:, None])).round().to(torch.int8), scale)


def decoded(weight, dtype=FP64):
    """Return the numbers of a Params4bit by plain arithmetic: fp32 products and sums, rounded once to its type."""
    state = weight.quant_state
    N, K = state.shape
    codes = weight.data.flatten().int()
    codes = torch.stack((codes // 16, codes % 16), 1).flatten()[: N * K]
    places = torch.arange(N * K, device=codes.device) // state.blocksize
    scale = state.absmax
    if state.state2 is not None:
        groups = torch.arange(len(scale), device=codes.device) // state.state2.blocksize
        scale = state.state2.code[scale.int()] * state.state2.absmax[groups] + state.offset
    return (state.code[codes] * scale[places]).view(N, K).to(state.dtype).to(dtype)
