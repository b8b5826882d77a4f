"""Heads with LoRA: what a call costs, types, what is asked of a and b, and the modules. Numbers are in the budgets' tests."""

from itertools import product

import pytest
import torch
from ops.calls import equal
from ops.linear_cross_entropy_oracle import forced, real, taken, ways
from ops.oracle import DEVICE
from torch import nn

import onepass
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy_reference
from onepass.ops.loss.linear_divergence import linear_divergence_reference
from onepass.parallel import DeferredWgrad

BF16, FP32 = torch.bfloat16, torch.float32
N, D, V, E, RANK, SCALE = 24, 16, 70, 12, 3, 0.7
heads = pytest.mark.parametrize("head", ("cross_entropy", "divergence"))


def drawn(dtype=FP32, adapters=None, seed=0, **sizes):
    """Return hidden, a frozen weight, a and b, labels, the teacher's hidden states and its weight."""
    n, d, v = (sizes.get(name, usual) for name, usual in (("N", N), ("D", D), ("V", V)))
    generator = torch.Generator().manual_seed(seed)
    shapes = (n, d), (v, d), (RANK, d), (v, RANK), (n, E), (v, E)
    hidden, weight, a, b, teacher, teacher_weight = (
        0.5 * torch.randn(*shape, generator=generator).to(DEVICE) for shape in shapes
    )
    labels = torch.randint(v, (n,), generator=generator).to(DEVICE)
    labels[::5] = -100
    a, b = (nn.Parameter(t.to(adapters or dtype)) for t in (a, b))
    return hidden.to(dtype).requires_grad_(), weight.to(dtype), a, b, labels, teacher.to(dtype), teacher_weight.to(dtype)


def call(head, given, formula=False, scale=SCALE, **options):
    hidden, weight, a, b, labels, *teacher = given
    lora = onepass.LoRA(a, b, scale)
    if head == "cross_entropy":
        function = linear_cross_entropy_reference if formula else onepass.linear_cross_entropy
        return function(hidden, weight, labels, lora=lora, **options)
    function = linear_divergence_reference if formula else onepass.linear_divergence
    return function(hidden, weight, *teacher, labels, student_lora=lora, **options)


@pytest.mark.skipif(DEVICE != "cpu", reason="a CPU's allocations are counted")
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_the_weight_is_neither_made_nor_copied(reduction):
    """Of a weight much larger than all else, parts of a few thousand rows are copied. No product is made for its gradient."""
    given = drawn(N=16, D=128, V=40_000)
    hidden, weight, _, _, labels, *_ = given
    labels.clamp_(min=0)  # none is ignored

    def step():
        call("cross_entropy", given, reduction=reduction, chunk_bytes=1 << 22).sum().backward()

    step()  # what is kept from call to call
    found = taken(step)
    copied = 4224 * 136 * 4
    logits, of_b = 16 * 40_000 * 4, 40_000 * RANK * 4
    assert found.most < copied + 2 * logits + 3 * of_b < weight.nbytes
    forward, thin = (128 + 8) / 128, 3 * RANK / 128  # those with b, and for b's gradient; a's are of N and D alone
    assert found.products((hidden, weight)) == pytest.approx(forward + 1 + thin, abs=0.05)


@heads
@ways
def test_a_second_backward(head, way):
    """Over a retained graph it gives the same bits, from logits made again where those that waited are used up."""
    given = drawn(BF16)
    if way == "known_grad_scale":
        pytest.skip("its gradients are made in forward, once")
    options = {"chunk_bytes": forced(real, way)} if head == "cross_entropy" else {"chunk_bytes": 1 << 13}
    loss = call(head, given, reduction="sum", **options)
    first = torch.autograd.grad(loss, (given[0], *given[2:4]), retain_graph=True)
    again = torch.autograd.grad(loss, (given[0], *given[2:4]))
    assert equal(first, again)


@heads
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_adapters_in_fp32_beside_bf16(head, reduction):
    """PEFT keeps them so. They are rounded for the products, and their gradients are not."""
    given = drawn(BF16, FP32)
    call(head, given, reduction=reduction).sum().backward()
    exact = [t.detach().to(FP32).requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in given]
    call(head, exact, formula=True, reduction=reduction).sum().backward()
    for mine, theirs in zip(given[2:4], exact[2:4], strict=True):
        assert mine.grad.dtype is FP32
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=5e-2, atol=2e-2 * float(theirs.grad.abs().max()))
        assert mine.grad.to(BF16).to(FP32).ne(mine.grad).any()


def test_a_promised_gradient():
    given = drawn()
    hidden, _, a, b, *_ = given
    a.main_grad = torch.zeros_like(a, requires_grad=False)
    (3.0 * call("cross_entropy", given, grad_scale=3.0)).backward()
    theirs = drawn()
    (3.0 * call("cross_entropy", theirs, formula=True)).backward()
    assert a.grad is None
    for mine, exact in ((a.main_grad, theirs[2]), (b.grad, theirs[3]), (hidden.grad, theirs[0])):
        torch.testing.assert_close(mine, exact.grad, rtol=1e-4, atol=1e-6)
    given = drawn()
    broken = 2.0 * call("cross_entropy", given, grad_scale=3.0)
    if DEVICE == "cuda":  # nobody waits to raise
        broken.backward()
        hidden, _, a, b, labels, *_ = given
        assert all(t.isnan().all() for t in (hidden.grad[labels >= 0], a.grad, b.grad))
        return
    with pytest.raises(RuntimeError, match="grad_scale promised"):
        broken.backward()


@heads
def test_computed_factors_and_scales(head):
    """a and b may be results, as of a gate; a scale is any finite number."""
    for scale in (0, 1, -2.5):
        given, theirs = drawn(), drawn()
        for tensors, formula in ((given, False), (theirs, True)):
            gates = torch.tensor([1.5, 0.5], device=DEVICE, requires_grad=True)
            tensors = [*tensors[:2], tensors[2] * gates[0], tensors[3] * gates[1], *tensors[4:]]
            call(head, tensors, formula, scale).backward()
        for mine, exact in zip(given[:4], theirs[:4], strict=True):
            if exact.requires_grad:
                torch.testing.assert_close(mine.grad, exact.grad, rtol=1e-4, atol=1e-6)


def test_statistics_without_gradients_have_the_bits_of_those_with():
    """In blocks of the vocabulary too, by which a call without gradients copies the weight once."""
    given = drawn(N=64, V=9000)
    for budget, names in product((None, 1 << 19), (("log_prob",), ("log_prob", "entropy"))):
        options = {"reduction": "none", "return_stats": names, "chunk_bytes": budget}
        trained = call("cross_entropy", given, **options)[1].log_prob
        with torch.no_grad():
            alone = call("cross_entropy", given, **options)[1].log_prob
        assert torch.equal(trained, alone)


def test_rows_that_are_kept():
    given = drawn()
    call("cross_entropy", given, rows=onepass.kept_rows(given[4])).backward()
    theirs = drawn()
    call("cross_entropy", theirs, formula=True).backward()
    for mine, exact in ((given[i].grad, theirs[i].grad) for i in (0, 2, 3)):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-6)
    assert not given[0].grad[::5].any()


def test_a_deferred_gradient_excludes_it():
    given = list(drawn())
    given[1] = nn.Parameter(given[1])
    given[1].main_grad = torch.zeros_like(given[1], requires_grad=False)
    with pytest.raises(ValueError, match="lora and deferred exclude each other"):
        call("cross_entropy", given, deferred=DeferredWgrad())


def test_what_explain_says():
    hidden, weight, a, b, labels, *_ = drawn()
    said = str(onepass.explain("linear_cross_entropy", hidden, weight, labels, lora=onepass.LoRA(a, b)))
    assert "LoRA of rank 3" in said


@heads
def test_modules(head):
    """A module's frozen weight, with the adapters of a call."""
    given = drawn()
    hidden, weight, a, b, labels, *teacher = given
    kind = onepass.nn.LinearCrossEntropy if head == "cross_entropy" else onepass.nn.LinearDivergence
    module = kind(D, V, device=DEVICE)
    module.weight = nn.Parameter(weight, requires_grad=False)
    more = (labels,) if head == "cross_entropy" else (*teacher, labels)
    module(hidden, *more, lora=onepass.LoRA(a, b, SCALE)).backward()
    theirs = drawn()
    call(head, theirs, formula=True).backward()
    assert module.weight.grad is None
    for mine, exact in ((given[i].grad, theirs[i].grad) for i in (0, 2, 3)):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_a_tied_weight_of_a_divergence_with_main_grad(reduction):
    """The student's embedding is its head: both gradients are in main_grad."""
    hidden, weight, _, _, labels, *teacher = drawn()
    tokens, grads = torch.arange(N, device=DEVICE), []
    for function, main in ((onepass.linear_divergence, True), (linear_divergence_reference, False)):
        tied = nn.Parameter(weight.clone())
        if main:
            tied.main_grad = torch.zeros_like(tied, requires_grad=False)
            student = onepass.embedding(tokens, tied)
        else:
            student = nn.functional.embedding(tokens, tied)
        function(student.tanh(), tied, *teacher, labels, reduction=reduction).sum().backward()
        grads.append(tied.main_grad if main else tied.grad)
        assert not main or tied.grad is None
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
    assert hidden.grad is None
