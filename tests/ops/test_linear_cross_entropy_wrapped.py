"""linear_cross_entropy under what people wrap around it: checkpointing, autocast, transforms, compilers and dispatch modes."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from ops.calls import equal, nearly_equal, needs_triton
from ops.linear_cross_entropy_calls import INF, again_and_again, gradients, tensors, with_main
from ops.linear_cross_entropy_oracle import NAMES, op, ways, whole_sums  # noqa: F401
from ops.oracle import BF16, DEVICE, FP16, FP32, FP64
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import onepass
import onepass.ops.loss.linear_cross_entropy as module
from onepass.parallel import DeferredWgrad

# ---- what people wrap around it ----


@again_and_again
@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointing_adds_to_main_grad_once(reentrant, way):
    hidden, weight, labels, *_ = tensors()
    plain = gradients(lambda h, w, y: op(way)(h * 2, w, y), [hidden, weight, labels])
    main = with_main(weight)
    start = main.main_grad.clone()
    checkpoint(lambda x: op(way)(x * 2, main, labels), hidden, use_reentrant=reentrant).backward()
    torch.testing.assert_close(main.main_grad, start + plain[2], rtol=1e-5, atol=1e-6)


@ways
@pytest.mark.parametrize("wide", (False, True), ids=("", "wide"))
def test_autocast_rounds_the_operands_and_nothing_else(wide, way):
    inputs = tensors((32,), 24)
    logits_dtype = FP32 if wide else None
    narrow = [t.detach().to(BF16) if i in (0, 1, 3) else t.detach() for i, t in enumerate(inputs)]
    expected = gradients(op(way, logits_dtype=logits_dtype), narrow)

    def call(*given):
        with torch.autocast(DEVICE, BF16):
            return op(way, logits_dtype=logits_dtype)(*given)

    found = gradients(call, inputs)
    assert all(t.dtype is FP32 for t in found)
    for name, a, b in zip(("loss", *NAMES[:4]), found, expected, strict=True):
        torch.testing.assert_close(
            a.to(b.dtype), b, rtol=1e-5 if b.dtype is FP32 else 8e-3, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}"
        )
    weight = inputs[1] = with_main(inputs[1])
    start = weight.main_grad.clone()
    call(*inputs).backward()
    torch.testing.assert_close(weight.main_grad - start, found[2], rtol=1e-4, atol=1e-5)


@needs_triton
def test_autocast_leaves_fp64_alone():
    inputs = [t.double() if t.is_floating_point() else t for t in tensors()]
    with torch.autocast(DEVICE, BF16):
        assert op(backend="torch")(*inputs).dtype is FP64


def test_transforms_take_the_formula_or_raise():
    hidden, weight, labels, bias, token_weight = (t.detach() for t in tensors((6,)))
    given = {"bias": bias, "token_weight": token_weight, "label_smoothing": 0.1}
    ours, theirs = (
        lambda x, y=labels, f=f: f(x, weight, y, **given)
        for f in (onepass.linear_cross_entropy, module.linear_cross_entropy_reference)
    )
    tangent = torch.randn_like(hidden)
    torch.testing.assert_close(torch.func.jvp(ours, (hidden,), (tangent,)), torch.func.jvp(theirs, (hidden,), (tangent,)))
    torch.testing.assert_close(torch.func.grad(ours)(hidden), torch.func.grad(theirs)(hidden))
    each = lambda x, y: onepass.linear_cross_entropy(x, weight, y)  # noqa: E731
    found = torch.func.vmap(each)(hidden, labels)
    torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.t(), labels, reduction="none"))
    narrow, head = hidden.to(BF16), torch.nn.Parameter(weight.to(BF16))
    wide = torch.func.grad(lambda x: onepass.linear_cross_entropy(x, head, labels, logits_dtype=FP32))(narrow)
    exact = torch.func.grad(lambda x: module.linear_cross_entropy_reference(x, head.detach().double(), labels))(narrow.double())
    assert wide.dtype is BF16
    torch.testing.assert_close(wide, exact.to(BF16), rtol=8e-3, atol=1e-6)  # of logits that were rounded it would be 1e-2 off
    head.main_grad = torch.zeros(head.shape)
    for option in ({"grad_scale": 1.0}, {"deferred": DeferredWgrad()}):
        with pytest.raises(RuntimeError, match=f"{next(iter(option))} can't follow vmap"):
            torch.func.grad(lambda x, option=option: onepass.linear_cross_entropy(x, head, labels, **option))(narrow)


def test_the_formula_of_logits_that_are_minus_infinity():
    """They have no probability, and no part in the entropy."""
    hidden, weight, labels = torch.eye(2)[:, :1] + 1, torch.tensor([[1.0], [-INF], [2.0]]), torch.tensor([0, 2])
    _, stats = module.linear_cross_entropy_reference(hidden, weight, labels, return_stats=True)
    rest = torch.distributions.Categorical(logits=hidden @ weight[::2].t())
    torch.testing.assert_close(stats.entropy, rest.entropy())


@pytest.mark.parametrize("way", ("grad_in_forward", "known_grad_scale", "recompute"))
def test_what_a_watched_call_adds_to_main_grad_was_not_rounded_before(way):
    hidden, weight, labels, *_ = tensors(dtype=BF16)
    found = []
    for watching in (False, True):
        weight = with_main(weight)
        weight.main_grad.zero_()
        with FlopCounterMode(display=False) if watching else nullcontext():
            op(way, reduction="none" if way == "recompute" else "mean")(hidden, weight, labels).sum().backward()
        found.append(weight.main_grad)
    assert (found[1] != found[1].to(BF16)).any()
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)


@ways
def test_parameters_and_dispatch_modes(way):
    inputs = tensors()
    plain = gradients(op(way), inputs)
    with FlopCounterMode(display=False):
        watched = gradients(op(way), inputs)
    torch.testing.assert_close(watched, plain, rtol=1e-5, atol=1e-6)
    weight = with_main(inputs[1], flag=True)
    start = weight.main_grad.clone()
    with FlopCounterMode(display=False):
        op(way)(inputs[0], weight, *inputs[2:]).backward()
    torch.testing.assert_close(weight.main_grad, start + plain[2], rtol=1e-5, atol=1e-6)
    assert weight.grad_added_to_main_grad is True


@again_and_again
def test_fake_tensors_have_no_values_to_look_at(way):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        inputs = tensors()
        op(way, backend="torch")(*inputs).backward()
    assert inputs[0].grad.shape == (20, 12) and inputs[1].grad.shape == (70, 12)


def test_compiled_with_strides_of_their_own():
    """What the compiler is told of the gradients' strides is so: inductor looks."""
    hidden, weight, labels, *_ = tensors((16,), 8, 50)

    def loss(hidden, weight):
        rows = hidden.t(), weight.t(), labels
        of_each = [onepass.linear_cross_entropy(*rows, reduction=of, backend="torch") for of in ("mean", "none")]
        return of_each[0] + of_each[1].sum()

    transposed = [t.detach().t().contiguous().requires_grad_() for t in (hidden, weight)]
    torch._dynamo.reset()
    plain = torch.autograd.grad(loss(*transposed), transposed)
    torch.testing.assert_close(torch.autograd.grad(torch.compile(loss, fullgraph=True)(*transposed), transposed), plain)


def test_compiled_with_promises_and_stats():
    """A promise may be another each step; a graph sends zeros back to stats that leave it."""
    hidden, weight, labels, *_ = tensors()

    def both(hidden, weight, scale):
        loss, stats = onepass.linear_cross_entropy(
            hidden, weight, labels, grad_scale=scale, return_stats=True, reduction="sum", backend="torch"
        )
        return loss, stats.entropy

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for scale in (1.0, 2.0, 4.0):
        loss, _ = compiled(hidden, weight, scale)
        plain = torch.autograd.grad(F.cross_entropy(hidden @ weight.t(), labels, reduction="sum") * scale, (hidden, weight))
        assert nearly_equal(torch.autograd.grad(loss * scale, (hidden, weight)), plain)
    torch._dynamo.reset()
    stats = torch.compile(lambda h, w: op(return_stats=True, reduction="sum")(h, w, labels), backend="aot_eager")
    (loss, seen), plain = stats(hidden, weight), op(return_stats=True, reduction="sum")(hidden, weight, labels)
    assert nearly_equal(
        torch.autograd.grad(loss + seen.entropy.sum(), (hidden, weight)),
        torch.autograd.grad(plain[0] + plain[1].entropy.sum(), (hidden, weight)),
    )


@pytest.mark.parametrize("mixed", (False, True), ids=("labels", "probabilities"))
def test_class_weights_and_probabilities_wrapped(mixed):
    """Deferred, in a second backward, under transforms and compiled: as PyTorch's loss of all logits."""
    hidden, weight, labels, *_ = tensors()
    classes = torch.rand(weight.shape[0], device=DEVICE)
    targets = torch.randn(*labels.shape, len(classes), device=DEVICE).softmax(-1) if mixed else labels
    flat = targets.flatten(0, -2) if mixed else targets.flatten()
    options = {"class_weight": classes, "label_smoothing": 0.1}

    def theirs(hidden, weight):
        return F.cross_entropy((hidden @ weight.t()).flatten(0, -2), flat, classes, label_smoothing=0.1)

    def ours(hidden, weight, **more):
        return onepass.linear_cross_entropy(hidden, weight, targets, **options, **more)

    expected = torch.autograd.grad(theirs(hidden, weight), (hidden, weight))
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for function in (ours, compiled):
        loss = function(hidden, weight)
        found = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        assert nearly_equal(found, expected)
        if function is ours:
            assert equal(found, torch.autograd.grad(loss, (hidden, weight)))
    assert nearly_equal(torch.func.grad(ours, argnums=(0, 1))(hidden.detach(), weight.detach()), expected)
    later, own = DeferredWgrad(), torch.nn.Parameter(weight.detach().clone())
    own.main_grad = torch.zeros_like(own)
    ours(hidden, own, deferred=later).backward()
    later.flush()
    assert nearly_equal([hidden.grad, own.main_grad], expected)


@pytest.mark.parametrize("main", (None, FP16), ids=str)
def test_autocast_around_backward_rounds_nothing(main):
    hidden, weight, labels, *_ = tensors(dtype=BF16)
    found = []
    for around in (False, True):
        weight = weight.detach().requires_grad_() if main is None else with_main(weight, main)
        if main is not None:
            weight.main_grad.zero_()
        hidden.grad = None
        with torch.autocast(DEVICE, BF16, enabled=around):
            op("blocks")(hidden, weight, labels).backward()
        found.append([hidden.grad, weight.grad if main is None else weight.main_grad])
    assert equal(*found)
