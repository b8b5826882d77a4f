"""The model that tests of MainGrads and of its optimizers train, and its gradients in fp64."""

import functools

import torch
from parallel.meeting import drawn
from torch import nn
from torch.nn import functional as F

import onepass

FP32, BF16 = torch.float32, torch.bfloat16
BYTES = 2048  # bucket_bytes, with which the model has several buckets
MICROBATCHES = 2


class Mixed(nn.Module):
    """PyTorch and onepass layers that are used twice, a tied weight, an unused and a frozen parameter.

    The tied weight is used by one operator of PyTorch and one of onepass.
    """

    def __init__(self, dtype=FP32, norms=None):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embedding = nn.Embedding(11, 20)
        self.first = onepass.nn.NormLinear(20, 36)
        self.norm = onepass.nn.RMSNorm(36)
        self.second = nn.Linear(36, 20)
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(20), requires_grad=False)
        self.last_norm = nn.Parameter(torch.ones(20))
        for parameter in self.parameters():
            parameter.data = drawn(torch.randn, parameter.shape, generator=generator) * 0.3
        self.to(dtype)
        if norms is not None:
            for parameter in (self.first.layer_norm_weight, self.norm.weight, self.last_norm):
                parameter.data = parameter.data.to(norms)

    def forward(self, tokens):
        x = self.embedding(tokens) * self.frozen
        for _ in range(2):
            x = x + self.second(self.norm(F.gelu(self.first(x))))
        return onepass.norm_linear(x, self.last_norm, self.embedding.weight)

    def plain(self, tokens):
        """Run the same model by PyTorch alone."""
        x = self.embedding(tokens) * self.frozen
        for _ in range(2):
            h = F.linear(rms(x, self.first.layer_norm_weight), self.first.weight, self.first.bias)
            x = x + self.second(rms(F.gelu(h), self.norm.weight))
        return F.linear(rms(x, self.last_norm), self.embedding.weight)


def rms(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def loss(model, place, microbatch, plain=False):
    generator = torch.Generator().manual_seed(100 * place + microbatch)
    tokens, labels = drawn(torch.randint, 11, (2, 6, 4), generator=generator)
    logits = (model.plain if plain else model)(tokens)
    return F.cross_entropy(logits.flatten(0, 1).to(torch.promote_types(logits.dtype, FP32)), labels.flatten())


def exact(places, microbatches=MICROBATCHES, average=True):
    """Return name -> the fp64 gradient of these ranks' microbatches."""
    scale = len(places) if average else 1
    return {name: None if grad is None else grad / scale for name, grad in _exact(tuple(places), microbatches).items()}


@functools.cache
def _exact(places, microbatches):
    model = Mixed(torch.float64)
    for place in places:
        for microbatch in range(microbatches):
            loss(model, place, microbatch, plain=True).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def backwards(main_grads, model, place, first=0):
    """Run the backwards of all microbatches of a step."""
    with main_grads.accumulate():
        for microbatch in range(first, first + MICROBATCHES - 1):
            loss(model, place, microbatch).backward()
    loss(model, place, first + MICROBATCHES - 1).backward()


def close(got, expected):
    """Assert that gradients agree to fp32 rounding. A parameter without a gradient has zeros."""
    for name, grad in expected.items():
        if name in got:
            right = torch.zeros_like(got[name]) if grad is None else grad.float()
            torch.testing.assert_close(got[name], right, rtol=2e-5, atol=2e-6, msg=lambda words, name=name: f"{name}: {words}")


def main_grads_by_name(model):
    return {name: p.main_grad for name, p in model.named_parameters() if p.requires_grad}
