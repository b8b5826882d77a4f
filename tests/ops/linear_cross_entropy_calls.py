"""Helpers for tests of linear_cross_entropy: inputs, gradients, and a weight with a main_grad."""

import pytest
import torch
from ops.linear_cross_entropy_oracle import WAYS, taken
from ops.oracle import DEVICE, FP32

import onepass.ops.loss.linear_cross_entropy as module

NAN, INF = float("nan"), float("inf")
reductions = pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
again_and_again = pytest.mark.parametrize("way", [way for way in WAYS if way != "known_grad_scale"])  # more than one backward


def tensors(lead=(20,), D=12, V=70, dtype=FP32, rest=True):
    """Return hidden, weight, labels, bias and token_weight; all but labels have requires_grad. The second label is ignored."""
    hidden, weight = torch.randn(*lead, D, device=DEVICE), torch.randn(V, D, device=DEVICE) / max(D, 1) ** 0.5
    labels = torch.randint(V, lead, device=DEVICE)
    labels.view(-1)[1:2] = -100
    bias, token_weight = torch.randn(V, device=DEVICE), torch.rand(lead, device=DEVICE) + 0.5
    some = hidden.to(dtype), weight.to(dtype), bias.to(dtype), token_weight
    hidden, weight, bias, token_weight = (t.detach().requires_grad_() for t in some)
    return [hidden, weight, labels, *((bias, token_weight) if rest else (None, None))]


def fresh(inputs):
    """Return new leaves with the same values."""
    kept = [t if t is None else t.detach() for t in inputs]
    return [t if t is None or not t.is_floating_point() else t.requires_grad_() for t in kept]


def outputs(returned):
    return [returned] if isinstance(returned, torch.Tensor) else [returned[0], *returned[1][:3]]


def gradients(call, inputs, dys=None):
    """Return the differentiable outputs and the gradients of new leaves."""
    leaves = fresh(inputs)
    outs = outputs(call(*leaves))
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs] if dys is None else dys)
    return [*(out.detach() for out in outs), *(t.grad for t in leaves if t is not None and t.is_floating_point())]


def products(call, inputs):
    """Return how many products of the size of hidden @ weight.T a forward and backward compute."""

    def run():
        loss = call(*inputs)
        if loss.requires_grad:
            loss.backward(torch.ones_like(loss))

    return taken(run).products(inputs)


def reference(hidden, weight, labels, bias=None, token_weight=None, **options):
    return module.linear_cross_entropy_reference(hidden, weight, labels, bias=bias, token_weight=token_weight, **options)


def with_main(weight, dtype=FP32, flag=False):
    weight = torch.nn.Parameter(weight.detach())
    weight.main_grad = torch.randn(weight.shape, device=weight.device).to(dtype)
    if flag:
        weight.grad_added_to_main_grad = False
    return weight
