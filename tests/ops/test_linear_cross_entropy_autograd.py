"""linear_cross_entropy under autograd: what is asked for, one backward and several, and what is kept."""

import itertools
import weakref
from unittest import mock

import pytest
import torch
from ops.calls import equal
from ops.linear_cross_entropy_calls import again_and_again, fresh, gradients, outputs, products, reference, tensors
from ops.linear_cross_entropy_oracle import NAMES, WAYS, op, reductions_of, taken, ways, whole_sums  # noqa: F401
from ops.oracle import BF16, DEVICE, FP16, FP32
from torch.utils.checkpoint import checkpoint

import onepass.ops.loss.linear_cross_entropy as module
from onepass.ops.loss.head import sums
from onepass.ops.loss.head.plan import make_plan
from onepass.testing.poison import bytes_kept, saved_tensors, unchanged

# ---- which gradients are asked for, and what they cost ----


@pytest.mark.skipif(DEVICE == "cuda", reason="there a vocabulary of an odd size is padded, and products are larger")
def test_how_many_products_each_way_takes():
    """A frozen side costs none, and a loss that nobody differentiates one."""
    counts = {"keep_logits": 3, "grad_in_forward": 3, "known_grad_scale": 3, "recompute": 4, "blocks": 4, "both": 4}
    for way, count in counts.items():
        hidden, weight, labels, *_ = tensors((16,), rest=False)
        labels[1] = 0  # a row that is ignored is not computed
        assert products(op(way), [hidden, weight, labels]) == count, way
        assert products(op(way), [hidden.detach(), weight, labels]) == count - 1, way
        assert products(op(way), [hidden, weight.detach(), labels]) == count - 1, way
    for reduction in ("mean", "none"):
        hidden, weight, labels, *_ = tensors((16,), rest=False)
        labels[1] = 0  # a row that is ignored is not computed
        assert products(op(reduction=reduction), [hidden.detach(), weight.detach(), labels]) == 1
        assert products(op(reduction=reduction), [hidden, weight, labels]) == 3
        weight.main_grad = torch.zeros_like(weight)
        with torch.no_grad():
            assert products(op(reduction=reduction), [hidden, weight, labels]) == 1


@ways
def test_evaluation_makes_no_gradients_and_writes_nowhere(way):
    inputs = tensors()
    expected = op(way)(*fresh(inputs)).detach()
    inputs[1].main_grad = torch.zeros_like(inputs[1])
    with unchanged(main_grad=inputs[1].main_grad), saved_tensors() as kept, torch.no_grad():
        loss = op(None, grad_scale=1.0 if way == "known_grad_scale" else None)(*inputs)
    assert not kept and not loss.requires_grad
    torch.testing.assert_close(loss, expected)
    inputs[1].main_grad = torch.zeros(1)  # of a wrong shape
    with torch.no_grad():
        op()(*inputs)


# ---- autograd ----


@again_and_again
def test_twice_over_a_retained_graph(way):
    for dtype, reduction, full in itertools.product((FP32, BF16), reductions_of(way), (False, True)):
        inputs = tensors(dtype=dtype)
        leaves = [t for t in inputs if t.is_floating_point()]
        call = op(way, reduction=reduction, label_smoothing=0.1, return_stats=full)
        outs = outputs(call(*inputs))
        dys = [torch.randn_like(out) for out in outs]
        with unchanged(**{f"out{i}": out for i, out in enumerate([*outs, *dys])}):
            first, second, third = (torch.autograd.grad(outs, leaves, dys, retain_graph=True) for _ in range(3))
        assert equal(first, second) and equal(second, third)
        apart = torch.autograd.grad(outputs(call(*inputs)), leaves, dys)
        assert equal(first, apart)  # called again: bit for bit


@pytest.mark.parametrize("reduction", ("none", "mean"))
def test_logits_that_waited_are_made_again_as_forward_made_them(reduction):
    """The plan for recomputed logits divides tokens and columns otherwise."""
    for dtype, logits_dtype in ((FP32, None), (BF16, FP32)):
        inputs = tensors((300,), 16, 257, dtype=dtype)
        leaves = [t for t in inputs if t.is_floating_point()]
        with mock.patch.object(module.row_loss, "make_plan", _keeping_plan):
            loss = op(reduction=reduction, logits_dtype=logits_dtype)(*inputs)
            first, second = (torch.autograd.grad(loss, leaves, torch.ones_like(loss), retain_graph=True) for _ in range(2))
        assert equal(first, second)


def _keeping_plan(asked, machine):
    budget = asked.N * asked.V * (asked.size + 4 * asked.wide) if asked.mode is None else 1 << 14
    return make_plan(asked._replace(chunk_bytes=budget, mode=asked.mode or "keep_logits"), machine)


@again_and_again
def test_one_gradient_after_the_other(way):
    inputs = tensors()
    leaves = [t for t in inputs if t.is_floating_point()]
    expected = torch.autograd.grad(op(way)(*inputs), leaves)
    loss = op(way)(*inputs)
    for leaf, grad in zip(leaves, expected, strict=True):
        (found,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        torch.testing.assert_close(found, grad, rtol=1e-5, atol=1e-7)
        assert torch.equal(found, grad) or way in ("recompute", "blocks", "both")  # those divide a call by what is asked for


@pytest.mark.skipif(DEVICE == "cuda", reason="there a vocabulary of an odd size is padded, and products are larger")
def test_what_forward_made_is_made_again_only_where_it_was_multiplied_in_place():
    for dtype, expected in ((FP32, [0, 0, 3]), (BF16, [0, 0, 0])):
        hidden, weight, labels, *_ = tensors((16,), dtype=dtype, rest=False)
        labels[1] = 0  # a row that is ignored is not computed
        loss = op("grad_in_forward")(hidden, weight, labels)
        for leaves, count in zip(((hidden,), (weight,), (hidden, weight)), expected, strict=True):
            found = taken(lambda leaves=leaves, loss=loss: torch.autograd.grad(loss, leaves, retain_graph=True))
            assert found.products([hidden, weight, labels]) == count


@ways
def test_whatever_comes_back_is_exact(way):
    inputs = tensors()
    exact = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    reference(*exact).backward()
    for factor in (1.0, -3.0, 1e-4, 1e6, 1 / 3, 0.0):
        leaves = fresh(inputs)
        more = {"grad_scale": factor} if way == "known_grad_scale" else {}
        (op(way, **more)(*leaves) * factor).backward()
        for got, true in zip(leaves, exact, strict=True):
            if got.is_floating_point():
                torch.testing.assert_close(got.grad.double(), true.grad * factor, rtol=1e-5, atol=1e-6 * abs(factor))


def test_a_loss_scale_of_fp16_overflows_no_earlier_than_eager_code():
    """What comes back is multiplied in before rounding where it is known, and after it where it waits."""
    hidden, weight, labels, *_ = tensors((32,), dtype=FP16, rest=False)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    (reference(*exact, labels) * 65536.0).backward()
    for way in WAYS:
        leaves = fresh([hidden, weight])
        more = {"grad_scale": 65536.0} if way == "known_grad_scale" else {}
        (op(way, **more)(*leaves, labels) * 65536.0).backward()
        for got, true in zip(leaves, exact, strict=True):
            torch.testing.assert_close(got.grad.double(), true.grad, rtol=1e-2, atol=1e-2 * true.grad.abs().max().item())


@again_and_again
def test_a_loss_of_each_row_can_be_masked_in_place(way):
    if way == "grad_in_forward":
        return
    inputs = tensors()
    mask = torch.rand(20, device=DEVICE)
    expected = gradients(op(way, reduction="none"), inputs, [mask])
    for full in (False, True):
        leaves = fresh(inputs)
        returned = op(way, reduction="none", return_stats=full)(*leaves)
        loss = returned[0] if full else returned
        loss *= mask
        loss.sum().backward()
        torch.testing.assert_close(leaves[0].grad, expected[1])


@again_and_again
def test_a_backward_that_fails_leaves_a_graph_that_works(way, monkeypatch):
    inputs = tensors(rest=False)
    expected = gradients(op(way), inputs)
    loss = op(way)(*inputs)

    def fails(*_, **__):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(sums.HiddenSum, "add", fails)
        patch.setattr(module.autograd, "scaled", fails)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close([loss.detach(), inputs[0].grad, inputs[1].grad], expected[:3], rtol=1e-5, atol=1e-6)


# ---- what is kept ----


def test_what_each_way_keeps():
    """Beside the inputs a few numbers a token, and what the way is named after."""
    N, D, V = 64, 16, 300
    few = N * 4 * 6 + 8
    sizes = {
        "keep_logits": N * (320 if DEVICE == "cuda" else V) * 2,
        "grad_in_forward": (N * D + V * D) * 4,
        "known_grad_scale": (N * D + V * D) * 2,
        "recompute": 0,
        "both": 0,
    }
    for way, size in sizes.items():
        inputs = tensors((N,), D, V, BF16, rest=False)
        with saved_tensors() as kept:
            op(way)(*inputs)
        assert size <= bytes_kept(kept, *inputs) <= size + few, way
        inputs = [inputs[0].detach(), *inputs[1:]]
        with saved_tensors() as kept:
            op(way)(*inputs)
        size -= {"grad_in_forward": N * D * 4, "known_grad_scale": N * D * 2}.get(way, 0)
        assert size <= bytes_kept(kept, *inputs) <= size + few, way


def test_logits_that_wait_may_be_kept_elsewhere():
    inputs = tensors()
    expected = gradients(op("keep_logits"), inputs)
    with torch.autograd.graph.save_on_cpu():
        found = gradients(op("keep_logits"), inputs)
    assert equal(expected, found)


def test_a_head_that_was_computed_does_not_outlive_its_backward():
    hidden, base, labels, *_ = tensors()
    low = torch.nn.Parameter(torch.randn(base.shape[0], 2, device=DEVICE))
    high = torch.nn.Parameter(torch.randn(2, base.shape[1], device=DEVICE))

    def loss_of(hidden):
        weight = base.detach() + low @ high
        alive.append(weakref.ref(weight))
        return op()(hidden, weight, labels)

    alive = []
    loss = loss_of(hidden)
    loss.backward()
    grads = low.grad, high.grad
    assert alive[0]() is None
    low.grad = high.grad = None
    loss = checkpoint(loss_of, hidden, use_reentrant=False)
    assert alive[1]() is None  # until backward makes it again
    loss.backward()
    torch.testing.assert_close([low.grad, high.grad], list(grads))
