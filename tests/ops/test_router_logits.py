"""router_logits in parts of bf16: as precise as fp32's product, both ways."""

import pytest
import torch
from torch import nn

import onepass
from onepass.ops.routing import logits as module
from onepass.ops.routing.logits import router_logits
from onepass.testing.mutants import mutate

BF16, FP32 = torch.bfloat16, torch.float32


def errors(copy, dtype, tokens=70, hidden=96, experts=12):
    """The relative RMS errors of logits, dx and dweight, of parts and of fp32's product, by fp64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(BF16)
    weight, dy = (torch.randn(*shape, generator=generator) for shape in ((experts, hidden), (tokens, experts)))
    weight = weight.to(dtype)
    found = []
    for run, wide in ((copy._apply, False), (lambda x, w: x.float() @ w.float().t(), False), (lambda x, w: x @ w.t(), True)):
        inputs = [each.double() if wide else each.clone() for each in (x, weight)]
        y = run(*(each.requires_grad_() for each in inputs))
        y.backward(dy.to(y.dtype))
        found.append([y.detach(), *(each.grad for each in inputs)])
    *rows, exact = found
    return [[float((a.double() - b).norm() / b.norm()) for a, b in zip(row, exact, strict=True)] for row in rows]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_parts_are_as_precise_as_fp32(dtype):
    parts, plain = errors(module, dtype)
    assert parts[0] < 3e-7 and parts[0] < 2 * plain[0] + 1e-7
    assert parts[1] < 1.01 * plain[1]  # rounded to bf16
    assert parts[2] < (2e-6 if dtype is FP32 else 1.01 * plain[2])


MUTANTS = {
    "a part less": ("_parts", "range(1, _PARTS)", "range(1, _PARTS - 1)"),
    "parts of the first": ("_parts", "rest = rest - found[-1]", "rest = x - found[-1]"),
    "dx of the weight's first part": ("_RouterLogits.backward", "w[1] if len(w) > 1", "0 * w[0] if len(w) > 1"),
    "dx of another part": ("_RouterLogits.backward", "[*d, d[0]]", "[*d, d[1]]"),
    "dweight of one part": ("_RouterLogits.backward", ".view(_PARTS, experts, -1).sum(0)", "[:experts]"),
    "a weight of bf16 twice": ("_RouterLogits.backward", "torch.zeros_like(w[0])", "w[0]"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    copy = mutate(module, *MUTANTS[name])
    wrong = []
    for dtype in (FP32, BF16):
        try:
            parts, plain = errors(copy, dtype)
        except RuntimeError:  # shapes
            return
        wrong.append(parts[0] >= 3e-7 or parts[1] >= 1.01 * plain[1] or parts[2] >= (2e-6 if dtype is FP32 else 1.01 * plain[2]))
    assert any(wrong)


@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float64, torch.float16], ids=str)
def test_logits_are_wide_whatever_the_types_and_autocast(dtype):
    x, weight = torch.randn(2, 3, 8).to(dtype), torch.randn(5, 8)
    with torch.autocast("cpu", dtype=BF16):
        y = router_logits(x, weight)
    assert y.dtype is torch.promote_types(dtype, FP32) and y.shape == (2, 3, 5)
    torch.testing.assert_close(y, x.to(y.dtype) @ weight.to(y.dtype).t())


def test_a_frozen_weight_and_tokens_without_gradients():
    x, weight = torch.randn(4, 8, dtype=BF16, requires_grad=True), torch.randn(3, 8)
    module._apply(x, weight).sum().backward()
    assert x.grad is not None
    trained = nn.Parameter(weight)
    module._apply(x.detach(), trained).sum().backward()
    assert trained.grad is not None


def test_the_router_has_it():
    with onepass.use_backend("torch"):
        routing = onepass.nn.Router(8, 5, 2)(torch.randn(3, 8, dtype=BF16))
    assert routing.weights.dtype is FP32
