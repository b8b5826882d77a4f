"""Norm weights and biases that carry main_grad: gathered there in fp32 by every op that has such, in every kind of pass."""

import pytest
import torch
from ops.calls import backends, relative
from ops.norm_oracle import BF16, DEVICE, FP16, FP32

import onepass
from onepass.runtime.main_grad import gathered
from onepass.testing.poison import unchanged

M, H = 300, 40
OPS = {
    "rms_norm": lambda x, a, b, backend: onepass.rms_norm(x, a, backend=backend),
    "layer_norm": lambda x, a, b, backend: onepass.layer_norm(x, a, b, backend=backend),
    "residual": lambda x, a, b, backend: sum(onepass.layer_norm(x, a, b, residual=x.detach(), backend=backend)),
    "norm_linear": lambda x, a, b, backend: onepass.norm_linear(
        x, a, torch.eye(H, device=DEVICE, dtype=x.dtype), norm="layer_norm", norm_bias=b, backend=backend
    ),
    "bias_activation": lambda x, a, b, backend: onepass.bias_activation(x, b, "gelu", backend=backend),
}
ops = pytest.mark.parametrize("name", OPS)


def given(dtype=BF16, main=None):
    x = torch.randn(M, H, device=DEVICE).to(dtype).requires_grad_()
    vectors = [torch.nn.Parameter(torch.randn(H, device=DEVICE).to(dtype)) for _ in range(2)]
    for vector in vectors if main is not None else ():
        vector.main_grad, vector.grad_added_to_main_grad = torch.zeros(H, device=DEVICE, dtype=main), False
    return x, *vectors


def used(name, vectors):
    """Those of a and b that the op has."""
    return {"rms_norm": vectors[:1], "bias_activation": vectors[1:]}.get(name, vectors)


def exact(name, x, vectors):
    """The gradients that fp64 gives."""
    wide = [t.detach().double().requires_grad_() for t in (x, *vectors)]
    OPS[name](*wide, "torch").sum().backward()
    return [t.grad for t in used(name, wide[1:])]


@backends
@ops
@pytest.mark.parametrize("main", (FP32, BF16, FP16), ids=lambda t: f"main {t}")
def test_sums_over_microbatches_are_fp32(name, backend, main):
    x, *vectors = given(BF16, main)
    total = 0
    for _ in range(4):
        x = torch.randn_like(x).requires_grad_()
        OPS[name](x, *vectors, backend).sum().backward()
        total = [a + b for a, b in zip(total or [0, 0], exact(name, x, vectors), strict=False)]
    for vector, expected in zip(used(name, vectors), total, strict=True):
        # norm_linear's incoming gradient and its norm are rounded as operands of products are
        assert relative(vector.main_grad, expected) < (1e-2 if main is not FP32 else 2e-3 if name == "norm_linear" else 1e-5)
        assert vector.grad_added_to_main_grad is True and vector.grad.dtype is BF16 and not vector.grad.any()


@backends
@ops
@pytest.mark.parametrize("mode", ("aot_eager", "inductor"))
def test_compiled(name, backend, mode):
    x, *vectors = given(FP32, FP32)
    expected = exact(name, x, vectors)
    torch._dynamo.reset()
    loss = torch.compile(lambda x: OPS[name](x, *vectors, backend).sum(), fullgraph=True, backend=mode)
    for step in (1, 2):
        loss(x).backward()
        for vector, once in zip(used(name, vectors), expected, strict=True):
            torch.testing.assert_close(vector.main_grad.double(), step * once, rtol=1e-4, atol=1e-4)
            assert vector.grad_added_to_main_grad is True and not vector.grad.any()
    kept = {"a": vectors[0].main_grad, "b": vectors[1].main_grad}
    with unchanged(**kept), pytest.raises(RuntimeError, match="main_grad must be gathered"):
        torch.autograd.grad(loss(x), x)


@backends
@ops
def test_each_kind_of_pass_gets_what_it_asks_for(name, backend):
    x, *vectors = given(FP32)
    plain = torch.autograd.grad(OPS[name](x, *vectors, backend).sum(), (x, *used(name, vectors)))
    for vector in vectors:
        vector.main_grad = torch.zeros(H, device=DEVICE)
    with unchanged(a=vectors[0].main_grad, b=vectors[1].main_grad):
        assert torch.equal(torch.autograd.grad(OPS[name](x, *vectors, backend).sum(), x)[0], plain[0])
        got = torch.autograd.grad(OPS[name](x, *vectors, backend).sum(), used(name, vectors))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, plain[1:], strict=True))
    OPS[name](x, *vectors, backend).sum().backward()
    assert all(torch.equal(v.main_grad, b) and v.grad is None for v, b in zip(used(name, vectors), plain[1:], strict=True))


@backends
@ops
def test_frozen_ones_and_evaluation_write_nothing(name, backend):
    x, *vectors = given(FP32, FP32)
    with torch.no_grad():
        y = OPS[name](x, *vectors, backend)
    for vector in vectors:
        vector.requires_grad_(False)
        vector.main_grad = "not looked at"
    torch.testing.assert_close(OPS[name](x, *vectors, backend), y)  # a kernel that keeps statistics rounds in another order
    OPS[name](x, *vectors, backend).sum().backward()
    assert all(v.grad_added_to_main_grad is False for v in vectors)


def test_others_come_back_as_they_are():
    vector = torch.nn.Parameter(torch.ones(4))
    assert gathered(vector) is vector and gathered(None) is None
    vector.sequence_parallel = True
    assert gathered(vector) is vector
    vector.main_grad = torch.zeros(3)
    with pytest.raises(ValueError, match="main_grad must have"):
        onepass.rms_norm(torch.ones(2, 4), vector, backend="torch")
