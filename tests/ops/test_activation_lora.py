"""activation_linear of a frozen weight with LoRA: activation's backward makes the gradient of a, and writes no rows."""

import pytest
import torch
from ops.calls import relative
from ops.oracle import DEVICE

import onepass
from onepass.ops.activation import kernels
from onepass.ops.activation.activations import ACTIVATIONS
from onepass.ops.activation.formula import ActivationOptions, activation_formula
from onepass.testing.mutants import copy_package, mutate

BF16 = torch.bfloat16
SHAPES = {  # rows, columns, rank: parts of blocks, one of each, several strips, tiles that are not full
    "small": (7, 24, 4), "one": (1, 16, 1), "several strips": (1100, 16, 9), "odd": (37, 145, 16), "a high rank": (33, 40, 64),
}  # fmt: skip


def numbers(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def is_right(module, name, activation="swiglu", clamp=None, offset=None, weighed=False, biased=False):
    """Whether dx and da are those of the formula in fp64."""
    M, H, R = SHAPES[name]
    x, dy, u = numbers(M, H * ACTIVATIONS[activation].parts, seed=1), numbers(M, H, seed=2), numbers(M, R, seed=3)
    weight = numbers(M, seed=4, dtype=torch.float32) if weighed else None
    bias = numbers(x.shape[1], seed=5) if biased else None
    options = ActivationOptions(activation, clamp, offset)
    dx, da = module.activation_lora_backward(dy, x, bias, weight, u, options)
    wide = x.double().requires_grad_()
    y = activation_formula(wide, *(None if t is None else t.double() for t in (bias, weight)), options)
    (expected,) = torch.autograd.grad(y, wide, dy.double())
    of_a = u.double().t() @ y.detach().to(BF16).double()
    return da.dtype is torch.float32 and relative(dx, expected) < 3e-3 and relative(da, of_a) < 1e-3


def is_infinite(module):
    """Whether da is infinite where y is, and u positive."""
    x, dy, u = torch.full((17, 64), 1e20, device=DEVICE, dtype=BF16), numbers(17, 32, seed=2), numbers(17, 4, seed=3).abs()
    _, da = module.activation_lora_backward(dy, x, None, None, u, ActivationOptions("swiglu", None, None))
    return bool((da == torch.inf).all())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("activation", ("swiglu", "gelu", "relu"))
def test_it_is_the_formula(name, activation):
    gated = ACTIVATIONS[activation].gated
    assert is_right(kernels, name, activation)
    assert is_right(kernels, name, activation, 0.8 if gated else None, 1.0 if gated else None, weighed=True, biased=True)


def test_rows_past_the_end_add_nothing():
    """Blocks that are not full repeat the last row, which may be infinite: times a u of 0 that would be NaN."""
    assert is_infinite(kernels)


@pytest.mark.parametrize("rank", (8, 65))
@pytest.mark.parametrize("frozen", (True, False))
def test_a_layer(frozen, rank, monkeypatch):
    """A rank that is too high, a weight that is trained, and dropout have the rows written."""
    calls = []
    record = lambda *args: calls.append(1) or real(*args)  # noqa: E731
    real = kernels.lora_backward
    monkeypatch.setattr(kernels, "lora_backward", record)
    x, weight = numbers(21, 96, seed=1).requires_grad_(), numbers(24, 48, seed=2).requires_grad_(not frozen)
    a, b = (numbers(*shape, seed=6, dtype=torch.float32).requires_grad_() for shape in ((rank, 48), (24, rank)))
    dy = numbers(21, 24, seed=4)
    y = onepass.activation_linear(x, weight, None, "swiglu", lora=onepass.LoRA(a, b, 0.5), backend="triton")
    found = torch.autograd.grad(y, (x, a, b) if frozen else (x, a, b, weight), dy)[:3]
    assert len(calls) == (frozen and rank == 8)
    lora = onepass.LoRA(a, b, 0.5, dropout=0.5)
    torch.autograd.grad(onepass.activation_linear(x, weight, None, "swiglu", lora=lora, backend="triton"), a, dy)
    assert len(calls) == (frozen and rank == 8)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, a, b)]
    rows = activation_formula(wide[0], None, None, ActivationOptions("swiglu", None, None))
    exact = torch.autograd.grad(rows @ (wide[1] + 0.5 * wide[3] @ wide[2]).t(), (wide[0], *wide[2:]), dy.double())
    assert all(relative(mine, true) < 6e-3 for mine, true in zip(found, exact, strict=True))


MUTANTS = {
    "the last row again": ("_backward_kernel", "tl.where(inside, y, 0.0).to(u.dtype)", "y.to(u.dtype)"),
    "the activation without its linear half": ("_backward_kernel", "y = ACT(z) * linear if GATED", "y = ACT(z) if GATED"),
    "no token weight": ("_backward_kernel", "or u_ptr is not None: y *= weight", ": y *= weight"),
    "one strip's": ("activation_lora_backward", "parts.sum(0)", "parts[0]"),
    "strips over each other": ("_backward_kernel", "da_ptr + strip * R * H", "da_ptr"),
    "u's rows of the first strip": ("_backward_kernel", "u_ptr + rows[:, None]", "u_ptr + (rows - strip * ROWS)[:, None]"),
}  # fmt: skip


def _is_right_everywhere(module):
    return is_infinite(module) and all(is_right(module, name, weighed=True) for name in ("small", "several strips"))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    assert not _is_right_everywhere(mutate(kernels, *MUTANTS[name]))


def test_a_copy_without_a_change_passes():
    assert _is_right_everywhere(copy_package(kernels))
