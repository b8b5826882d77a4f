"""Dropout before an adapter's a: the layer's own product takes all of x, and backward drops what forward dropped."""

from functools import partial

import pytest
import torch
from ops.calls import equal, gradients, relative
from ops.norm_oracle import BF16, DEVICE, FP32
from ops.test_lora_linear import Functions, K, N, adapters_of, exact, numbers, parts
from torch.nn import functional as F

import onepass
from onepass import LoRA
from onepass.kernels.philox import draw_seed, dropout_formula, row_numbers, threshold_of
from onepass.ops.linear.linear import linear_reference
from onepass.ops.linear.lora_linear import lora_linear_reference
from onepass.testing.poison import saved_tensors

FP64 = torch.float64


def seeded(function, *args, seed=5, **options):
    torch.manual_seed(seed)
    return function(*args, **options)


def dropped(x, p, seed=5):
    """What the adapter of a seeded call sees of x, in fp64."""
    torch.manual_seed(seed)
    return dropout_formula(x.detach().double(), draw_seed(x), row_numbers(x), threshold_of("p", p))


def exact_with_dropout(x, weight, a, b, dy, scale, p, rounded=None):
    """y, dx, dweight, da and db: an adapter of dropped rows beside a layer of whole ones."""
    seen = dropped(x, p)
    _, _, _, da, db = exact(seen, weight, a, b, dy, scale, rounded=rounded)
    x, weight, a, b, dy = (t.detach().to(rounded or t.dtype).double() for t in (x, weight, a, b, dy))

    def operand(t):
        return t if rounded is None else t.to(rounded).double()

    t, u = operand(scale * seen @ a.T), operand(scale * dy @ b)
    mask = dropped(torch.ones_like(x), p)
    dx = dy @ weight + mask * (u @ a)
    return x @ weight.T + t @ b.T, dx, dy.flatten(0, -2).T @ x.flatten(0, -2), da, db


@pytest.mark.parametrize("p", (0.05, 0.5))
@pytest.mark.parametrize("rank", (1, 8, 64))
@pytest.mark.parametrize(("dtype", "adapter"), [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP64, FP64)], ids=str)
def test_errors_are_those_of_rounding(rank, p, dtype, adapter):
    x, weight, a, b, dy = parts(rank, dtype, adapter, frozen=False)
    y = seeded(onepass.lora_linear, x, weight, a, b, scale=0.7, dropout=p)
    found = y, *torch.autograd.grad(y, (x, weight, a, b), dy)
    truth = exact_with_dropout(x, weight, a, b, dy, 0.7, p)
    once = exact_with_dropout(x, weight, a, b, dy, 0.7, p, rounded=dtype)
    for name, mine, true, one in zip(("y", "dx", "dweight", "da", "db"), found, truth, once, strict=True):
        times = 1.25 if name not in ("y", "dx") or dtype is not BF16 else 1.25 * 2**0.5
        assert relative(mine, true) < times * relative(one.to(mine.dtype), true) + 1e-6, name


def test_the_share_of_dropped_numbers_is_p_and_kept_ones_are_scaled():
    """Adapters of the identity show the mask. Rows, columns and neighbours are dropped alike often, and independently."""
    n, p = 256, 0.3
    x, eye, nothing = torch.ones(500, n, device=DEVICE), torch.eye(n, device=DEVICE), torch.zeros(n, n, device=DEVICE)
    seen = seeded(onepass.lora_linear, x, nothing, eye, eye, dropout=p)
    torch.testing.assert_close(seen.unique(), torch.tensor([0.0, 1 / (1 - round(p * 65536) / 65536)], device=DEVICE))
    gone = (seen == 0).float()
    deviation = (p * (1 - p)) ** 0.5
    for mean, count in ((gone.mean(), gone.numel()), (gone.mean(0), 500), (gone.mean(1), n)):
        assert ((mean - p).abs() < 5 * deviation / count**0.5).all()
    for shifted in (gone.roll(1, 0), gone.roll(1, 1)):
        correlation = ((gone - p) * (shifted - p)).mean() / deviation**2
        assert correlation.abs() < 5 / gone.numel() ** 0.5
    assert not torch.equal(seen, seeded(onepass.lora_linear, x, nothing, eye, eye, dropout=p, seed=6))


def test_calls_in_turn_drop_other_numbers_and_a_second_backward_the_same():
    x, weight, a, b, dy = parts()
    first, second = (seeded(onepass.lora_linear, x, weight, a, b, dropout=0.5) for _ in range(2))
    third = onepass.lora_linear(x, weight, a, b, dropout=0.5)
    assert torch.equal(first, second) and not torch.equal(second, third)
    once = torch.autograd.grad(third, (x, a, b), dy, retain_graph=True)
    assert equal(once, torch.autograd.grad(third, (x, a, b), dy))


def test_no_dropout_costs_nothing():
    """The same operators, no random number, and the same bits."""
    x, weight, a, b, dy = parts(dtype=BF16)
    state = torch.get_rng_state()
    calls = []
    for options in ({}, {"dropout": 0.0}):
        with Functions() as functions:
            y = onepass.lora_linear(x, weight, a, b, scale=0.7, **options)
            found = y, *torch.autograd.grad(y, (x, a, b), dy)
        calls.append((functions.names, found))
    assert calls[0][0] == calls[1][0] and equal(calls[0][1], calls[1][1])
    assert torch.equal(state, torch.get_rng_state())


def test_all_dropped_is_the_layer_alone():
    x, weight, a, b, dy = parts()
    y = onepass.lora_linear(x, weight, a, b, dropout=1.0)
    torch.testing.assert_close(y, F.linear(x, weight))
    dx, da, db = torch.autograd.grad(y, (x, a, b), dy)
    torch.testing.assert_close(dx, dy @ weight)
    assert not da.any() and not db.any()


def test_keeps_no_mask():
    x, weight, a, b, _ = parts(rank=3, dtype=BF16)
    with saved_tensors() as without:
        onepass.lora_linear(x, weight, a, b)
    with saved_tensors() as kept:
        onepass.lora_linear(x, weight, a, b, dropout=0.1)
    assert sum(t.numel() for t in kept) <= sum(t.numel() for t in without) + 1  # the seed


OPS = {  # with the rows that its product takes
    "linear": (onepass.linear, lambda x: x),
    "norm_linear": (lambda x, w, **more: onepass.norm_linear(x, None, w, **more), lambda x: F.rms_norm(x, (K,), eps=1e-6)),
    "activation_linear": (partial(onepass.activation_linear, activation="silu"), F.silu),
}


@pytest.mark.parametrize("by_document", (False, True))
@pytest.mark.parametrize("name", OPS)
def test_several_adapters_share_a_mask(name, by_document):
    """In fp64, of the rows that the product takes, with scales of their own."""
    op, rows = OPS[name]
    x, weight = numbers(7, 10, K, seed=1).double().requires_grad_(), numbers(N, K, seed=2).double().requires_grad_()
    adapters = [lora._replace(dropout=0.4) for lora in adapters_of("q and v")]
    adapters[0] = adapters[0]._replace(scale=1.5)
    if by_document:
        ends = torch.tensor([20, 20, 66], device=DEVICE)
        adapters = [
            lora._replace(a=torch.stack([lora.a.detach() * e for e in (1, 2, 3)]).requires_grad_(),
                          b=torch.stack([lora.b.detach() * e for e in (1, 2, 3)]).requires_grad_(), ends=ends)
            for lora in adapters
        ]  # fmt: skip
    asked = [x, weight, *[t for lora in adapters for t in lora[:2]]]
    y, expected = seeded(op, x, weight, lora=adapters), seeded(linear_reference, rows(x), weight, lora=adapters)
    torch.testing.assert_close(y, expected)
    dy = numbers(7, 10, N, seed=4).double()
    for mine, other in zip(torch.autograd.grad(y, asked, dy), torch.autograd.grad(expected, asked, dy), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointed(reentrant):
    x, weight, a, b, _ = parts(dtype=BF16)

    def call(x, a, b):
        return onepass.norm_linear(x, None, weight, lora=LoRA(a, b, 0.7, dropout=0.3))

    def checkpointed(*tensors):
        return torch.utils.checkpoint.checkpoint(call, *tensors, use_reentrant=reentrant)

    torch.manual_seed(3)
    plain = gradients(call, (x, a, b))
    torch.manual_seed(3)
    assert equal(plain, gradients(checkpointed, (x, a, b)))


def test_compiled_whole():
    x, weight, a, b, dy = parts()

    def call(x, a, b):
        return onepass.lora_linear(x, weight, a, b, scale=0.7, dropout=0.3)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    y, z = seeded(compiled, x, a, b), seeded(call, x, a, b)
    torch.testing.assert_close(y, z)
    for mine, other in zip(torch.autograd.grad(y, (x, a, b), dy), torch.autograd.grad(z, (x, a, b), dy), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert not torch.equal(compiled(x, a, b), compiled(x, a, b))


def test_under_transforms_the_formula_drops_the_same():
    x, weight, a, b, _ = parts()
    t = numbers(7, 10, K, seed=8)
    y, tangent = seeded(torch.func.jvp, lambda x: onepass.lora_linear(x, weight, a, b, dropout=0.3), (x.detach(),), (t,))
    torch.testing.assert_close(y, seeded(onepass.lora_linear, x, weight, a, b, dropout=0.3))
    torch.testing.assert_close(tangent, seeded(lora_linear_reference, t, weight, a, b, dropout=0.3))


def test_the_weight_in_eight_bits():
    x, weight, a, b, dy = parts(dtype=BF16)
    y = seeded(onepass.lora_linear, x, weight, a, b, precision="fp8", dropout=0.3)
    added = y.double() - onepass.linear(x, weight, precision="fp8").double()
    truth = exact_with_dropout(x, weight, a, b, dy, 1.0, 0.3)
    assert relative(added, truth[0] - x.double() @ weight.double().T) < 2e-2
    for mine, true in zip(torch.autograd.grad(y, (a, b), dy), truth[3:], strict=True):
        assert relative(mine, true) < 6e-3


@pytest.mark.parametrize(
    ("p", "error", "words"),
    [
        (1.5, ValueError, "lora.dropout must be a probability, from 0 to 1, but is 1.5"),
        ("a", TypeError, "lora.dropout must be a number"),
    ],
)
def test_errors_name_dropout(p, error, words):
    x, weight, a, b, _ = parts()
    with pytest.raises(error, match=words):
        onepass.linear(x, weight, lora=LoRA(a, b, dropout=p))


def test_adapters_of_one_call_have_the_same_dropout():
    x, weight, a, b, _ = parts()
    adapters = [LoRA(a, b[:50], rows=(0, 50), dropout=0.1), LoRA(a, b[50:], rows=(50, N))]
    with pytest.raises(ValueError, match=r"lora\[1\].dropout must be 0.1, as lora\[0\]'s, as .* share a mask, but is 0.0"):
        onepass.linear(x, weight, lora=adapters)


def test_explain_says_dropout():
    x, weight, a, b, _ = parts()
    assert "LoRA of rank 8 with dropout around them" in str(onepass.explain("lora_linear", x, weight, a, b, dropout=0.1))
