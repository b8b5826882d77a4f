"""A call that runs out of memory leaves main_grad alone, or says what it wrote: what the contract's samples don't reach."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from ops.calls import backends
from torch import nn

import onepass
from onepass.ops.linear.grouped import grouped_linear
from onepass.runtime.op import OPS
from onepass.runtime.samples import Sample, random_tensors
from onepass.testing.contract import Subject, leaves_main_grad_alone_where_it_fails
from onepass.testing.faults import MemorySteps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def labelled(device, dtype):
    hidden, weight, bias = random_tensors(((7, 6), (11, 6), (11,)), device, dtype)
    return hidden, weight, torch.arange(7, device=device), bias


def with_wide_residual(device, dtype):
    x, weight, residual = random_tensors(((5, 8), (8,), (5, 8)), device, dtype)
    return x, weight, residual.float()


HEAD = Sample(labelled, None, keywords=("bias",))
GATED = Sample(
    partial(random_tensors, ((5, 16), (3, 8), (3,), (16,), (5,))), None, keywords=("bias", "activation_bias", "token_weight")
)
NORM = Sample(partial(random_tensors, ((5, 8), (8,), (3, 8), (3,))), None, keywords=("bias",))
CASES = {
    "activation_linear": GATED,
    "activation_linear: fp8": replace(GATED, options={"save": "fp8"}),
    "norm_linear: bias": NORM,
    "rms_norm: residual of another type": Sample(with_wide_residual, None, keywords=("residual",)),
    "linear_cross_entropy: mean": HEAD,
    "linear_cross_entropy: kept logits": replace(HEAD, options={"reduction": "none"}),
    "linear_cross_entropy: chunks": replace(HEAD, options={"reduction": "none", "chunk_bytes": 256}),
}


@backends
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_failed_backward_can_be_repeated(case, backend, dtype):
    sample = replace(CASES[case], dtype=dtype)
    leaves_main_grad_alone_where_it_fails(Subject(OPS[case.partition(":")[0]], backend, DEVICE, sample))


def with_main_grad(*shape, dtype=BF16):
    weight = nn.Parameter(torch.randn(*shape, device=DEVICE, dtype=dtype))
    weight.main_grad = torch.zeros_like(weight, dtype=FP32)
    return weight


@pytest.mark.parametrize("chunk_bytes", (None, 256))
def test_a_failed_forward_with_grad_scale_says_what_it_wrote(chunk_bytes):
    weight, labels = with_main_grad(11, 6), torch.arange(7, device=DEVICE)

    def loss(steps):
        hidden = torch.randn(7, 6, device=DEVICE, dtype=BF16, requires_grad=True)
        with steps:
            onepass.linear_cross_entropy(hidden, weight, labels, grad_scale=1.0, chunk_bytes=chunk_bytes)

    noted = MemorySteps()
    loss(noted)
    written = 0
    for step in noted.steps:
        weight.main_grad.zero_()
        with pytest.raises(torch.OutOfMemoryError) as error:
            loss(MemorySteps(step))
        if weight.main_grad.any():
            written += 1
            assert "weight.main_grad" in str(error.value)
    assert written


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU makes all experts' products at once")
def test_grouped_linear_says_when_some_experts_have_their_gradient():
    weight = with_main_grad(3, 8, 16)
    x, ends = torch.randn(12, 16, dtype=BF16), torch.tensor([4, 8, 12], dtype=torch.int32)
    noted = MemorySteps()
    noted.backward(grouped_linear(x, weight, ends).sum())
    written = 0
    for step in noted.steps:
        weight.main_grad.zero_()
        with pytest.raises(torch.OutOfMemoryError) as error:
            MemorySteps(step).backward(grouped_linear(x, weight, ends).sum())
        assert bool(weight.main_grad.any()) is ("weight.main_grad" in str(error.value))
        written += bool(weight.main_grad.any())
    assert written
