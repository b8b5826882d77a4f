"""activation_linear of a frozen weight with LoRA: activation's backward makes the gradient of a, and writes no rows.

It makes the gradient of b of the layer before, too, where that has an adapter.
"""

import gc

import pytest
import torch
from ops.calls import relative
from ops.oracle import DEVICE

import onepass
from onepass.ops.activation import activation_rows, kernels, lora_backward
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
    """Whether dx, da and db are those of the formula in fp64."""
    M, H, R = SHAPES[name]
    x, dy, u = numbers(M, H * ACTIVATIONS[activation].parts, seed=1), numbers(M, H, seed=2), numbers(M, R, seed=3)
    weight = numbers(M, seed=4, dtype=torch.float32) if weighed else None
    bias = numbers(x.shape[1], seed=5) if biased else None
    options = ActivationOptions(activation, clamp, offset)
    t = numbers(M, R if R > 16 else 2 * R + 1, seed=6)
    dx, da, db = module.activation_lora_backward(dy, x, bias, weight, u, t, options)
    wide = x.double().requires_grad_()
    y = activation_formula(wide, *(None if t is None else t.double() for t in (bias, weight)), options)
    (expected,) = torch.autograd.grad(y, wide, dy.double())
    of_a, of_b = u.double().t() @ y.detach().to(BF16).double(), dx.double().t() @ t.double()
    wide = da.dtype is db.dtype is torch.float32
    return wide and relative(dx, expected) < 3e-3 and relative(da, of_a) < 1e-3 and relative(db, of_b) < 1e-5


def is_infinite(module):
    """Whether sums of positive and infinite numbers are infinite. Rows past the end that are 0 times the last would make NaN."""
    ones, infinite = torch.ones(17, 32, device=DEVICE, dtype=BF16), torch.full((17, 32), torch.inf, device=DEVICE, dtype=BF16)
    u = numbers(17, 4, seed=3).abs()
    right = []
    for gate, linear in ((ones, infinite), (infinite, ones)):
        options = ActivationOptions("swiglu", None, None)
        _, da, db = module.activation_lora_backward(ones, torch.cat((gate, linear), 1), None, None, u, u, options)
        of_other = db[:32] if linear is infinite else db[32:]
        right += [(da == torch.inf).all(), (of_other == torch.inf).all()]
    return all(right)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("activation", ("swiglu", "gelu", "relu"))
def test_it_is_the_formula(name, activation):
    gated = ACTIVATIONS[activation].gated
    assert is_right(lora_backward, name, activation)
    assert is_right(lora_backward, name, activation, 0.8 if gated else None, 1.0 if gated else None, weighed=True, biased=True)


def test_rows_past_the_end_add_nothing():
    """Blocks that are not full repeat the last row, which may be infinite: times a u of 0 that would be NaN."""
    assert is_infinite(lora_backward)


@pytest.mark.parametrize("rank", (8, 65))
@pytest.mark.parametrize("frozen", (True, False))
def test_a_layer(frozen, rank, monkeypatch):
    """A rank that is too high, a weight that is trained, and dropout have the rows written."""
    calls = []
    record = lambda *args: calls.append(1) or real(*args)  # noqa: E731
    real = activation_rows.lora_backward
    monkeypatch.setattr(activation_rows, "lora_backward", record)
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


def layers(between):
    """Return whether a gradient of b came with h's, and how far all gradients of two layers with adapters are off."""
    x, up, down = numbers(21, 24, seed=1).requires_grad_(), numbers(96, 24, seed=2), numbers(16, 48, seed=3)
    adapters = [
        [numbers(*shape, seed=seed + i, dtype=torch.float32).requires_grad_() for i, shape in enumerate(shapes)]
        for seed, shapes in ((4, ((3, 24), (96, 3))), (6, ((5, 48), (16, 5))))
    ]
    dy, came = numbers(21, 16, seed=9), []
    h = onepass.lora_linear(x, up, *adapters[0], scale=0.5)
    h.register_hook(lambda dh: came.append(hasattr(dh, "low_rank_gradient")))
    y = onepass.activation_linear(between(h), down, None, "swiglu", lora=onepass.LoRA(*adapters[1], 2.0), backend="triton")
    found = torch.autograd.grad(y, (x, *adapters[0], *adapters[1]), dy)
    wide = [t.detach().double().requires_grad_() for t in (x, *adapters[0], *adapters[1])]
    rows = wide[0] @ (up.double() + 0.5 * wide[2] @ wide[1]).t()
    rows = activation_formula(between(rows), None, None, ActivationOptions("swiglu", None, None))
    exact = torch.autograd.grad(rows @ (down.double() + 2.0 * wide[4] @ wide[3]).t(), wide, dy.double())
    return came, [relative(mine, true) for mine, true in zip(found, exact, strict=True)]


BETWEEN = {  # what is done with h, and whether its gradient still is what activation's backward made
    "nothing": (lambda h: h, True),
    "a view": (lambda h: h.view(h.shape), False),
    "a sum": (lambda h: h + 0.5 * h, False),
    "in place": (lambda h: h.mul_(2.0) if h.dtype is BF16 else h * 2.0, False),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_the_layer_before(name):
    between, comes = BETWEEN[name]
    came, errors = layers(between)
    assert all(error < 1e-2 for error in errors)
    assert came == [comes]


def test_a_gradient_of_two_ops():
    """h is read twice: autograd adds both gradients, one of which came with a product."""
    x, up, down = numbers(21, 24, seed=1), numbers(96, 24, seed=2), numbers(16, 48, seed=3)
    shapes = (3, 24), (96, 3), (5, 48), (16, 5)
    a, b, c, d = (numbers(*shape, seed=i, dtype=torch.float32).requires_grad_() for i, shape in enumerate(shapes))
    h = onepass.lora_linear(x, up, a, b)
    y = onepass.activation_linear(h, down, None, "swiglu", lora=onepass.LoRA(c, d), backend="triton")
    for first, second in ((y, h), (h, y)):
        both = torch.autograd.grad(first.float().sum() + second.float().sum(), b, retain_graph=True)[0]
        of_each = [torch.autograd.grad(part.float().sum(), b, retain_graph=True)[0] for part in (y, h)]
        assert relative(both, of_each[0].double() + of_each[1].double()) < 1e-2


MUTANTS = {
    "db of dx past the end": (kernels, "_backward_kernel", "tl.where(inside, dz, 0.0).to(t.dtype)", "dz.to(t.dtype)"),
    "db of dx's half past the end": (kernels, "_backward_kernel", "tl.where(inside, dz2, 0.0).to(t.dtype)", "dz2.to(t.dtype)"),
    "both halves are the gate's": (kernels, "_backward_kernel", "dz2, 0.0).to(t.dtype)", "dz, 0.0).to(t.dtype)"),
    "b's strips over each other": (kernels, "_backward_kernel", "db_ptr + (strip * (PARTS * H) +", "db_ptr + (0 * strip +"),
    "the last row again": (kernels, "_backward_kernel", "tl.where(inside, y, 0.0).to(u.dtype)", "y.to(u.dtype)"),
    "the activation alone": (kernels, "_backward_kernel", "y = ACT(z) * linear if GATED", "y = ACT(z) if GATED"),
    "no token weight": (kernels, "_backward_kernel", "or u_ptr is not None: y *= weight", ": y *= weight"),
    "one strip's": (lora_backward, "_sum_of_strips", "parts.sum(0)", "parts[0]"),
    "strips over each other": (kernels, "_backward_kernel", "da_ptr + strip * R * H", "da_ptr"),
    "u's rows of one strip": (kernels, "_backward_kernel", "u_ptr + rows[:, None]", "u_ptr + (rows - strip * ROWS)[:, None]"),
}  # fmt: skip


def _is_right_everywhere(module):
    return is_infinite(module) and all(is_right(module, name, weighed=True) for name in ("small", "several strips"))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    assert not _is_right_everywhere(mutate(*MUTANTS[name], entry=lora_backward))


def test_a_copy_without_a_change_passes():
    assert _is_right_everywhere(copy_package(lora_backward))


def test_what_is_kept_is_autograds():
    """Nothing of a layer outlasts its backward, though the loss does."""
    x, up, down = numbers(21, 24, seed=1), numbers(96, 24, seed=2), numbers(16, 48, seed=3)
    shapes = (3, 24), (96, 3), (5, 48), (16, 5)
    a, b, c, d = (numbers(*shape, seed=i, dtype=torch.float32).requires_grad_() for i, shape in enumerate(shapes))

    def step():
        h = onepass.lora_linear(x, up, a, b)
        return onepass.activation_linear(h, down, None, "swiglu", lora=onepass.LoRA(c, d), backend="triton").float().sum()

    gc.collect()
    before = len([one for one in gc.get_objects() if isinstance(one, torch.Tensor)])
    losses = [step() for _ in range(3)]
    for loss in losses:
        loss.backward()
    a.grad = b.grad = c.grad = d.grad = None
    gc.collect()
    assert len([one for one in gc.get_objects() if isinstance(one, torch.Tensor)]) == before + len(losses)
