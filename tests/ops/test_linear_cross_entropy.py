"""What linear_cross_entropy is, and how each of its ways behaves under autograd and whatever else people do to an op."""

import itertools
import math
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from ops.bias_activation_oracle import laid_out
from ops.calls import backends, equal, nearly_equal, needs_triton
from ops.linear_cross_entropy_oracle import (  # noqa: F401
    ALL,
    BF16,
    DEVICE,
    FP16,
    FP32,
    FP64,
    NAMES,
    UPSTREAM,
    WAYS,
    op,
    reductions_of,
    taken,
    ways,
    whole_sums,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import onepass
import onepass.ops.linear_cross_entropy as room
from onepass.kernels import losses
from onepass.parallel import DeferredWgrad
from onepass.testing.poison import bytes_kept, saved_tensors, unchanged

NAN, INF = float("nan"), float("inf")
reductions = pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
again_and_again = pytest.mark.parametrize("way", [way for way in WAYS if way != "promised"])  # more than one backward


def tensors(lead=(20,), D=12, V=70, dtype=FP32, rest=True):
    """hidden, weight, labels, bias and token_weight, which all ask for a gradient but for labels; the second is ignored."""
    hidden, weight = torch.randn(*lead, D, device=DEVICE), torch.randn(V, D, device=DEVICE) / max(D, 1) ** 0.5
    labels = torch.randint(V, lead, device=DEVICE)
    labels.view(-1)[1:2] = -100
    bias, token_weight = torch.randn(V, device=DEVICE), torch.rand(lead, device=DEVICE) + 0.5
    some = hidden.to(dtype), weight.to(dtype), bias.to(dtype), token_weight
    hidden, weight, bias, token_weight = (t.detach().requires_grad_() for t in some)
    return [hidden, weight, labels, *((bias, token_weight) if rest else (None, None))]


def fresh(inputs):
    """Leaves of the same numbers."""
    kept = [t if t is None else t.detach() for t in inputs]
    return [t if t is None or not t.is_floating_point() else t.requires_grad_() for t in kept]


def outputs(returned):
    return [returned] if isinstance(returned, torch.Tensor) else [returned[0], *returned[1][:3]]


def gradients(call, inputs, dys=None):
    """The differentiable outputs, and the gradients of fresh leaves."""
    leaves = fresh(inputs)
    outs = outputs(call(*leaves))
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs] if dys is None else dys)
    return [*(out.detach() for out in outs), *(t.grad for t in leaves if t is not None and t.is_floating_point())]


def products(call, inputs):
    """How many times the tokens' product with the head's weight is computed, forward and backward."""

    def run():
        loss = call(*inputs)
        if loss.requires_grad:
            loss.backward(torch.ones_like(loss))

    return taken(run).products(inputs)


def reference(hidden, weight, labels, bias=None, token_weight=None, **options):
    return room.linear_cross_entropy_reference(hidden, weight, labels, bias=bias, token_weight=token_weight, **options)


# ---- what it computes ----


@backends
def test_the_formula_by_hand(backend):
    hidden, weight, bias = [1.0, -2.0], [[1.0, 0.5], [0.0, 2.0], [-1.0, 0.25]], [0.5, 0.0, -0.5]
    label, a, z_weight, cap, scale = 2, 0.25, 0.5, 2.0, 0.75
    logits = [scale * (sum(h * w for h, w in zip(hidden, row, strict=True)) + b) for row, b in zip(weight, bias, strict=True)]
    z = [cap * math.tanh(t / cap) for t in logits]
    lse = math.log(sum(map(math.exp, z)))
    expected = (1 - a) * (lse - z[label]) + a * (lse - sum(z) / 3) + z_weight * lse**2
    p = [math.exp(t - lse) for t in z]
    d = [p[i] * (1 + 2 * z_weight * lse) - a / 3 - (1 - a) * (i == label) for i in range(3)]
    d = [scale * (1 - (z[i] / cap) ** 2) * d[i] for i in range(3)]
    given = [torch.tensor(t, device=DEVICE) for t in ([hidden, [9.0, 9.0]], weight, [label, -100], bias)]
    for reduction, factor in (("mean", 1.0), ("sum", 0.5)):
        loss, dhidden, dweight, dbias, dfactor = gradients(
            op(label_smoothing=a, z_loss=z_weight, softcap=cap, logit_scale=scale, reduction=reduction, backend=backend),
            [*given, torch.full((2, 1), factor, device=DEVICE)],
        )
        torch.testing.assert_close(loss.item(), factor * expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(dbias.tolist(), [factor * t for t in d], rtol=1e-5, atol=1e-7)
        exact = [factor * sum(d[i] * weight[i][k] for i in range(3)) for k in range(2)]
        torch.testing.assert_close(dhidden.tolist(), [exact, [0.0, 0.0]], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(dweight.tolist(), [[factor * t * h for h in hidden] for t in d], rtol=1e-5, atol=1e-7)
        exact = expected if reduction == "sum" else 0.0  # a mean of one row is the same whatever its weight
        torch.testing.assert_close(dfactor.flatten().tolist(), [exact, 0.0], rtol=1e-5, atol=1e-6)


def stock(reduction, smoothing=0.0, **options):
    def call(hidden, weight, labels, bias=None, token_weight=None):
        logits = F.linear(hidden, weight, bias).flatten(0, -2)
        loss = F.cross_entropy(logits, labels.flatten(), reduction=reduction, label_smoothing=smoothing, **options)
        return loss.view(labels.shape) if reduction == "none" else loss

    return call


@ways
@reductions
@pytest.mark.parametrize("smoothing", (0, 0.1))
def test_as_pytorchs_own(smoothing, reduction, way):
    if reduction not in reductions_of(way):
        reduction = "mean"
    inputs = [*tensors((4, 5))[:4], None]
    ours = gradients(op(way, reduction=reduction, label_smoothing=smoothing), inputs)
    theirs = gradients(stock(reduction, smoothing), inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    labels = torch.where(inputs[2] == -100, 5, torch.where(inputs[2] == 5, 6, inputs[2])).int()
    ours = gradients(op(way, reduction=reduction, label_smoothing=smoothing, ignore_index=5), [*inputs[:2], labels, inputs[3]])
    theirs = gradients(stock(reduction, smoothing, ignore_index=5), [*inputs[:2], labels.long(), inputs[3]])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@backends
@reductions
def test_token_weights_as_pytorchs_weights_of_classes(reduction, backend):
    """A mean divides by the sum of the weights that are kept."""
    hidden, weight, labels, bias, _ = tensors()
    classes = torch.rand(70, device=DEVICE) + 0.1
    given = [hidden, weight, labels, bias]
    theirs = gradients(stock(reduction, weight=classes), given)
    for shape in ((20,), (20, 1)):
        of_each = classes[labels.clamp(min=0)].view(shape)
        of_each[1] = NAN  # of an ignored token
        ours = gradients(lambda *t, w=of_each: op(reduction=reduction, backend=backend)(*t, token_weight=w), given)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@backends
def test_each_term_by_itself(backend):
    given = [*tensors()[:4], None]
    labels = given[2]
    cross_entropy = lambda z, **more: F.cross_entropy(z, labels, **more)  # noqa: E731
    product = lambda h, w, b: F.linear(h, w, b)  # noqa: E731
    kept = labels != -100
    expected = {
        "logit_scale": (0.3, lambda *t: cross_entropy(product(*t) * 0.3)),
        "softcap": (1.5, lambda *t: cross_entropy(1.5 * torch.tanh(product(*t) / 1.5))),
        "z_loss": (0.2, lambda *t: cross_entropy(product(*t)) + 0.2 * product(*t).logsumexp(-1)[kept].square().mean()),
        "label_smoothing": (1.0, lambda *t: cross_entropy(product(*t), label_smoothing=1.0)),
    }
    for name, (value, formula) in expected.items():
        ours = gradients(op(backend=backend, **{name: value}), given)
        theirs = gradients(lambda h, w, y, b, _, formula=formula: formula(h, w, b), given)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}")


@backends
def test_stats_are_what_they_say(backend):
    hidden, weight, labels, bias, _ = tensors((4, 5))
    labels.view(-1)[::3] = F.linear(hidden, weight, bias).argmax(-1).view(-1)[::3]
    labels.view(-1)[1] = -100
    for reduction in ("mean", "none"):
        plain = op(reduction=reduction, backend=backend)(hidden, weight, labels, bias)
        loss, stats = op(reduction=reduction, return_stats=True, backend=backend)(hidden, weight, labels, bias)
        torch.testing.assert_close(loss, plain)
        logits = F.linear(hidden, weight, bias).detach()
        softmax = torch.distributions.Categorical(logits=logits)
        kept = labels != -100
        torch.testing.assert_close(stats.logsumexp, logits.logsumexp(-1))
        torch.testing.assert_close(stats.log_prob, torch.where(kept, softmax.log_prob(labels.clamp(min=0)), 0.0))
        torch.testing.assert_close(stats.entropy, softmax.entropy())
        assert torch.equal(stats.correct, logits.argmax(-1) == labels) and stats.correct.sum() >= 6
        assert [t.dtype for t in stats] == [FP32, FP32, FP32, torch.bool] and not stats.correct.requires_grad
        assert all(t.shape == labels.shape for t in stats) and loss.shape == plain.shape


@backends
def test_of_equal_logits_the_first_is_the_largest(backend):
    hidden, weight = torch.ones(3, 4, device=DEVICE), torch.ones(70, 4, device=DEVICE)
    weight[:5] = 0
    labels = torch.tensor([5, 6, 0], device=DEVICE)
    for way in ("keep", ("loss", 2, 16), ("again", 2, 3)):
        _, stats = op(way, return_stats=True, backend=backend)(hidden, weight.requires_grad_(), labels)
        assert stats.correct.tolist() == [True, False, False]


@ways
def test_each_stat_can_be_differentiated_alone(way):
    inputs = tensors()
    if way == "promised":
        _, stats = op(way, return_stats=True)(*inputs)
        with pytest.raises(RuntimeError, match="with grad_scale only the loss can be differentiated"):
            stats.entropy.sum().backward()
        return
    logits = lambda h, w, y, b, t: F.linear(h, w, b)  # noqa: E731
    formulas = {
        "logsumexp": lambda *t: logits(*t).logsumexp(-1),
        "log_prob": lambda *t: -F.cross_entropy(logits(*t), t[2], reduction="none"),
        "entropy": lambda *t: torch.distributions.Categorical(logits=logits(*t)).entropy(),
    }
    dy = torch.randn(20, device=DEVICE)
    for name, formula in formulas.items():
        ours = gradients(lambda *t, name=name: getattr(op(way, return_stats=True)(*t)[1], name), inputs, [dy])
        theirs = gradients(formula, inputs, [dy])
        assert ours[-1] is None and theirs[-1] is None  # token_weight has no part in them
        torch.testing.assert_close(ours[:-1], theirs[:-1], rtol=1e-4, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}")


@backends
@again_and_again
def test_fp64(way, backend):
    inputs = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors((4,), 3, 7)]
    if backend == "triton":
        with pytest.raises(RuntimeError, match=r"hidden is fp64"):
            op(way, backend=backend)(*inputs)
        return
    where = {"keep": way, "forward": ("forward", 3, ALL), "again": ("again", 3, ALL), "blocks": ("again", ALL, 3)}
    where["both"] = ("again", 3, 3)
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0, "logit_scale": 0.5, "backend": backend}

    def call(hidden, weight, bias, token_weight):
        loss, stats = op(where[way], return_stats=True, **options)(hidden, weight, inputs[2], bias, token_weight)
        assert loss.dtype is FP64
        return loss, *stats[:3]

    def loss_alone(*given):
        return call(*given)[0]

    given, again = [inputs[0], inputs[1], inputs[3], inputs[4]], 1e-12 if way == "forward" else 0.0
    assert all(torch.autograd.gradcheck(each, given, nondet_tol=again) for each in (call, loss_alone))


def test_the_reference_can_be_differentiated_often():
    inputs = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors((3,), 3, 5)]
    call = lambda h, w, b, t: room.linear_cross_entropy_reference(  # noqa: E731
        h, w, inputs[2], bias=b, token_weight=t, label_smoothing=0.1, z_loss=0.1, softcap=3.0
    )
    given = [inputs[0], inputs[1], inputs[3], inputs[4]]
    assert torch.autograd.gradcheck(call, given) and torch.autograd.gradgradcheck(call, given)


# ---- inputs of all kinds ----


@ways
def test_one_token_and_no_leading_dimension(way):
    hidden, weight, labels, bias, token_weight = tensors((1,))
    labels[:] = 69
    for reduction in reductions_of(way):
        one = gradients(op(way, reduction=reduction), [hidden, weight, labels, bias, token_weight])
        bare = [hidden[0], weight, labels[0], bias, token_weight[0]]
        none = gradients(op(way, reduction=reduction), bare)
        assert none[0].shape == () and none[1].shape == (12,)
        assert equal([t.flatten() for t in one], [t.flatten() for t in none])


@ways
@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_no_tokens(lead, way):
    inputs = tensors(lead)
    for call in (op(way), *([op(grad_scale=1.0), op(return_stats=True)] if way == "promised" else [op()])):
        loss, *rest = gradients(call, inputs)
        assert loss.item() == 0 and loss.dtype is FP32
        grads = [t for t in rest[-4:] if t is not None]
        assert [t.shape for t in grads[:3]] == [(*lead, 12), (70, 12), (70,)] and not any(t.any() for t in grads)
    with torch.no_grad():
        for reduction in ("mean", "none"):
            loss = op(reduction=reduction)(*inputs)
            assert loss.shape == (() if reduction == "mean" else lead) and not loss.any()


@ways
def test_one_hidden_number_or_none(way):
    for D in (1, 0):
        inputs = tensors((5,), D)
        ours = gradients(op(way), inputs)
        assert ours[1].shape == (5, D) and ours[2].shape == (70, D)
        torch.testing.assert_close(ours, gradients(reference, inputs), rtol=1e-5, atol=1e-6)


@ways
@pytest.mark.parametrize("V", (1, 2))
def test_a_vocabulary_of_next_to_nothing(V, way):
    inputs = tensors(V=V)
    ours = gradients(op(way), inputs)
    torch.testing.assert_close(ours, gradients(reference, inputs), rtol=1e-5, atol=1e-6)


LAYOUTS = ("strided", "sliced", "transposed", "swapped", "unaligned")


@ways
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
def test_whatever_lies_otherwise_in_memory(backend, way):
    if backend == "triton" and way not in ("forward", "both"):
        pytest.skip("two ways stand for the others under the interpreter")
    inputs = tensors((2, 3, 2))
    expected = gradients(op(way, backend=backend), inputs)
    for layout in LAYOUTS if backend == "torch" else LAYOUTS[2:4]:
        other = [laid_out(t.detach(), layout) if t.is_floating_point() else torch.stack([t, t * 0], -1)[..., 0] for t in inputs]
        with unchanged(**dict(zip("hwlbt", other, strict=True))):
            torch.testing.assert_close(gradients(op(way, backend=backend), other), expected, rtol=1e-5, atol=1e-6)


@ways
def test_expanded_inputs(way):
    one = tensors((1,))
    one[2][:] = 3
    wide = [one[0].expand(6, 12), one[1][:1].expand(70, 12), one[2].expand(6), one[3][:1].expand(70), one[4].expand(6)]
    plain = [t.detach().clone() for t in wide]
    torch.testing.assert_close(gradients(op(way), wide), gradients(op(way), plain))
    for reduction in ("none",) if way != "forward" else ():
        loss = op(way, reduction=reduction)(*fresh(plain))
        loss.backward(torch.ones((), device=DEVICE).expand(6))


@ways
def test_labels_of_32_bits(way):
    inputs = tensors((4, 5))
    narrow = [*inputs[:2], inputs[2].int(), *inputs[3:]]
    assert equal(gradients(op(way), inputs), gradients(op(way), narrow))


@backends
@ways
def test_all_ignored_is_zero(way, backend):
    inputs = tensors((3,))
    inputs[2][:] = -100
    for reduction in reductions_of(way):
        call = op(way, reduction=reduction, label_smoothing=0.3, z_loss=0.1, backend=backend)
        assert all(not t.any() for t in gradients(call, inputs))
    token_weight = torch.zeros(3, device=DEVICE)
    inputs[2][:] = 1
    found = gradients(op(way, backend=backend), [*inputs[:4], token_weight])
    assert all(not t.any() for t in found)


@ways
@reductions
def test_nan_and_infinities_are_where_pytorch_has_them(reduction, way):
    if reduction not in reductions_of(way):
        reduction = "sum"
    hidden, weight, labels, bias, _ = (None if t is None else t.detach() for t in tensors((7,)))
    for place, value in (((2, 3), NAN), ((3, 3), INF), ((4, 3), -INF)):
        bad = hidden.clone()
        bad[place] = value
        ours, theirs = (gradients(call, [bad, weight, labels, bias]) for call in (op(way, reduction=reduction), stock(reduction)))
        assert [t.isfinite().tolist() for t in ours] == [t.isfinite().tolist() for t in theirs], (place, value)
    masked = bias.clone()
    masked[[4, 9]] = -INF  # tokens that can't be
    labels[(labels == 4) | (labels == 9)] = 5
    ours = gradients(op(way, reduction=reduction), [hidden, weight, labels, masked])
    torch.testing.assert_close(ours, gradients(stock(reduction), [hidden, weight, labels, masked]), rtol=1e-4, atol=1e-6)


@ways
def test_labels_of_no_token_are_nan_where_nobody_looks(way, monkeypatch):
    monkeypatch.setattr(losses, "can_look", lambda labels: False)
    inputs = tensors((6,))
    inputs[2][3] = -100
    sound = gradients(op(way, reduction="sum"), inputs)
    for wrong in (-1, 70, 1 << 40):
        inputs[2][3] = wrong
        loss, dhidden, dweight, dbias, _ = gradients(op(way, reduction="sum"), inputs)
        assert loss.isnan() and not dhidden[3].any()
        assert equal([dhidden, dweight, dbias], sound[1:4])
        if "none" in reductions_of(way):
            loss = op(way, reduction="none")(*inputs)
            assert loss.isnan().tolist() == [False] * 3 + [True] + [False] * 2


# ---- which gradients are asked for, and what they cost ----


@ways
def test_every_choice_of_what_is_frozen(way):
    inputs = tensors()
    expected = dict(zip(NAMES, gradients(op(way), inputs)[1:], strict=True))
    at = {"hidden": 0, "weight": 1, "bias": 3, "token_weight": 4}
    for count in (1, 2, 3):
        for asking in itertools.combinations(NAMES, count):
            some = [t.detach() for t in inputs]
            for name in asking:
                some[at[name]].requires_grad_()
            op(way)(*some).backward()
            for name, i in at.items():
                assert (some[i].grad is not None) == (name in asking), (asking, name)
                if name in asking:
                    torch.testing.assert_close(some[i].grad, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(DEVICE == "cuda", reason="there a vocabulary of an odd size is padded, and products are larger")
def test_how_many_products_each_way_takes():
    """A frozen side costs none, and a loss that nobody differentiates one."""
    counts = {"keep": 3, "forward": 3, "promised": 3, "again": 4, "blocks": 4, "both": 4}
    for way, count in counts.items():
        hidden, weight, labels, *_ = tensors((16,), rest=False)
        assert products(op(way), [hidden, weight, labels]) == count, way
        assert products(op(way), [hidden.detach(), weight, labels]) == count - 1, way
        assert products(op(way), [hidden, weight.detach(), labels]) == count - 1, way
    for reduction in ("mean", "none"):
        hidden, weight, labels, *_ = tensors((16,), rest=False)
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
        loss = op(None, grad_scale=1.0 if way == "promised" else None)(*inputs)
    assert not kept and not loss.requires_grad
    torch.testing.assert_close(loss, expected)
    with torch.inference_mode():
        torch.testing.assert_close(op()(*inputs), expected)
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
        assert equal(second, third)
        for a, b in zip(first, second, strict=True):  # forward's were rounded before they were multiplied
            torch.testing.assert_close(a, b, rtol=1e-5 if dtype is FP32 else 2e-2, atol=1e-6 if dtype is FP32 else 2e-2)
        assert way == "forward" or equal(first, second)
        apart = torch.autograd.grad(outputs(call(*inputs)), leaves, dys)
        assert equal(first, apart)  # called again: bit for bit


@again_and_again
def test_one_gradient_after_the_other(way):
    inputs = tensors()
    leaves = [t for t in inputs if t.is_floating_point()]
    expected = torch.autograd.grad(op(way)(*inputs), leaves)
    loss = op(way)(*inputs)
    for leaf, grad in zip(leaves, expected, strict=True):
        torch.testing.assert_close(torch.autograd.grad(loss, leaf, retain_graph=True)[0], grad, rtol=1e-5, atol=1e-7)


@ways
def test_whatever_comes_back_is_exact(way):
    inputs = tensors()
    exact = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    reference(*exact).backward()
    for factor in (1.0, -3.0, 1e-4, 1e6, 1 / 3, 0.0):
        leaves = fresh(inputs)
        more = {"grad_scale": factor} if way == "promised" else {}
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
        more = {"grad_scale": 65536.0} if way == "promised" else {}
        (op(way, **more)(*leaves, labels) * 65536.0).backward()
        for got, true in zip(leaves, exact, strict=True):
            torch.testing.assert_close(got.grad.double(), true.grad, rtol=1e-2, atol=1e-2 * true.grad.abs().max().item())


@backends
@pytest.mark.parametrize("constant", (True, False))
def test_a_second_derivative_raises(constant, backend):
    for way in ("keep", "forward", "again") if backend == "torch" else ("keep",):
        inputs = tensors()
        loss = op(way, backend=backend)(*inputs)
        upstream = torch.ones_like(loss, requires_grad=not constant)
        (dx,) = torch.autograd.grad(loss, inputs[0], upstream, create_graph=True)
        with pytest.raises(RuntimeError, match="once"):
            dx.square().sum().backward()


@again_and_again
def test_a_loss_of_each_row_can_be_masked_in_place(way):
    if way == "forward":
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

    def fails(*_):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(room.passes._HiddenSum, "add", fails)
        patch.setattr(room.autograd, "_times", fails)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close([loss.detach(), inputs[0].grad, inputs[1].grad], expected[:3], rtol=1e-5, atol=1e-6)


# ---- what is kept ----


def test_what_each_way_keeps():
    """Beside the inputs a few numbers a token, and what the way is named after."""
    N, D, V = 64, 16, 300
    few = N * 4 * 4 + 8
    sizes = {"keep": N * 320 * 2, "forward": (N * D + V * D) * 4, "promised": (N * D + V * D) * 2, "again": 0, "both": 0}
    for way, size in sizes.items():
        inputs = tensors((N,), D, V, BF16, rest=False)
        with saved_tensors() as kept:
            op(way)(*inputs)
        assert size <= bytes_kept(kept, *inputs) <= size + few, way
        inputs = [inputs[0].detach(), *inputs[1:]]
        with saved_tensors() as kept:
            op(way)(*inputs)
        size -= {"forward": N * D * 4, "promised": N * D * 2}.get(way, 0)
        assert size <= bytes_kept(kept, *inputs) <= size + few, way


def test_logits_that_wait_may_be_kept_elsewhere():
    inputs = tensors()
    expected = gradients(op("keep"), inputs)
    with torch.autograd.graph.save_on_cpu():
        found = gradients(op("keep"), inputs)
    assert equal(expected, found)


# ---- main_grad ----


def with_main(weight, dtype=FP32, flag=False):
    weight = torch.nn.Parameter(weight.detach())
    weight.main_grad = torch.randn(weight.shape, device=weight.device).to(dtype)
    if flag:
        weight.grad_added_to_main_grad = False
    return weight


@ways
@pytest.mark.parametrize("flag", (True, False), ids=("flag", ""))
@pytest.mark.parametrize("main", (FP32, BF16, FP16), ids=str)
def test_main_grad_over_two_microbatches(main, flag, way):
    for dtype in (FP32, BF16):
        hidden, weight, labels, bias, token_weight = tensors(dtype=dtype)
        plain = gradients(op(way), [hidden, weight, labels, bias, token_weight])
        weight, bias = with_main(weight, main, flag), with_main(bias, main, flag)
        start = [t.main_grad.double() for t in (weight, bias)]
        places = [t.main_grad.data_ptr() for t in (weight, bias)]
        seen = []
        weight.register_hook(lambda grad, seen=seen: seen.append(grad))
        for step in (1, 2):
            hidden.grad = token_weight.grad = None
            loss = op(way)(hidden, weight, labels, bias, token_weight)
            loss.backward()
            torch.testing.assert_close([loss.detach(), hidden.grad, token_weight.grad], [*plain[:2], plain[4]])
            for t, grad, before in zip((weight, bias), plain[2:4], start, strict=True):
                exact = before + step * grad.double()
                error = (t.main_grad.double() - exact).abs().max() / exact.abs().max()
                assert error <= {FP32: 1e-6 if dtype is FP32 else 4e-3, BF16: 8e-3, FP16: 4e-3}[main], (dtype, step)
        assert [t.main_grad.data_ptr() for t in (weight, bias)] == places
        if flag:
            assert weight.grad_added_to_main_grad is True and bias.grad_added_to_main_grad is True
            assert not weight.grad.any() and weight.grad.dtype is dtype and len(seen) == 2
        else:
            assert weight.grad is None and bias.grad is None and seen == [None, None]


@again_and_again
def test_main_grad_in_each_kind_of_pass(way):
    hidden, weight, labels, *_ = tensors(rest=False)
    expected = gradients(op(way), [hidden, weight, labels])
    weight = with_main(weight, flag=True)
    with unchanged(main_grad=weight.main_grad):
        loss = op(way)(hidden, weight, labels)
        found = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
        torch.testing.assert_close(list(found), expected[1:3], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(torch.autograd.grad(loss, [weight], retain_graph=True)[0], expected[2], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(torch.autograd.grad(loss, [hidden], retain_graph=True)[0], expected[1], rtol=1e-5, atol=1e-7)
        assert weight.grad_added_to_main_grad is False and weight.grad is None
    start = weight.main_grad.clone()
    for times in (1, 2):
        loss.backward(retain_graph=True)
        torch.testing.assert_close(weight.main_grad, start + times * expected[2], rtol=1e-5, atol=1e-6)
    weight.requires_grad_(False)
    with unchanged(main_grad=weight.main_grad):
        op(way)(hidden, weight, labels).backward()


@ways
def test_megatron_fsdps_main_grad_is_overwritten_and_not_rounded_before(way):
    hidden, weight, labels, bias, token_weight = tensors((64,), dtype=BF16)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    reference(*exact, labels, bias.double(), token_weight).backward()
    gathered = torch.full(weight.shape, NAN, device=DEVICE)
    weight.__fsdp_param__, weight.get_main_grad = True, lambda: gathered
    op(way)(hidden, weight, labels, bias, token_weight).backward()
    assert weight.main_grad is gathered and not weight.grad.any()
    assert ((gathered.double() - exact[1].grad).norm() / exact[1].grad.norm()) < 1e-2
    assert not torch.equal(gathered, gathered.to(BF16).float())


BAD_MAIN = {
    "shape": (lambda w: torch.zeros(w.shape[1], w.shape[0]), ValueError, ("(70, 12)", "(12, 70)")),
    "fp64": (lambda w: torch.zeros(w.shape, dtype=FP64), TypeError, ("float64",)),
    "device": (lambda w: torch.zeros(w.shape, device="meta"), ValueError, ("meta",)),
    "no tensor": (lambda w: [0.0], TypeError, ("list",)),
}


@ways
@pytest.mark.parametrize("what", BAD_MAIN)
def test_a_wrong_main_grad_raises_before_anything_is_written(what, way):
    inputs = tensors()
    make, error, words = BAD_MAIN[what]
    inputs[1].main_grad = make(inputs[1])
    inputs[1].grad_added_to_main_grad = False
    with unchanged(**dict(zip("hwlbt", inputs, strict=True))), pytest.raises(error, match="main_grad") as raised:
        op(way)(*inputs)
    assert all(word in str(raised.value) for word in words), raised.value
    assert inputs[1].grad_added_to_main_grad is False and inputs[1].grad is None


# ---- a promise of what comes back ----


@pytest.mark.parametrize("main", (True, False), ids=("main_grad", ""))
@reductions
def test_a_promise_that_is_kept(reduction, main):
    inputs = tensors(dtype=BF16)
    upstream = torch.full(() if reduction != "none" else (20,), UPSTREAM, device=DEVICE)
    plain = gradients(op("again", reduction=reduction), inputs, [upstream])
    if main:
        inputs[1] = with_main(inputs[1], flag=True)
        start = inputs[1].main_grad.clone()
    loss = op("promised", reduction=reduction, grad_scale=UPSTREAM)(*inputs)
    if main:
        written = inputs[1].main_grad - start
        torch.testing.assert_close(written, plain[2].float(), rtol=2e-2, atol=2e-3)  # in forward already
        assert inputs[1].grad_added_to_main_grad is False
    loss.backward(upstream)
    if main:
        assert torch.equal(inputs[1].main_grad - start, written)
        assert inputs[1].grad_added_to_main_grad is True and not inputs[1].grad.any()
    else:
        torch.testing.assert_close(inputs[1].grad, plain[2], rtol=2e-2, atol=2e-3)
    for t, grad in zip((inputs[0], *inputs[3:]), (plain[1], *plain[3:]), strict=True):
        torch.testing.assert_close(t.grad, grad, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("main", (True, False), ids=("main_grad", ""))
def test_a_promise_that_is_broken(main):
    for reduction, wrong in (("mean", torch.tensor(2.0)), ("none", torch.ones(20).index_fill(0, torch.tensor([7]), 1.5))):
        inputs = tensors()
        if main:
            inputs[1] = with_main(inputs[1])
        loss = op(grad_scale=1.0, reduction=reduction)(*inputs)
        if DEVICE == "cuda":
            loss.backward(wrong.to(DEVICE))
            assert inputs[0].grad.isnan().all() and (main or inputs[1].grad.isnan().all())
            continue
        rest = ".*main_grad is wrong, clear it" if main else "$"
        said = rf"grad_scale promised .* would be 1\.0, but it is {wrong.max()}{rest}"
        with pytest.raises(RuntimeError, match=said):
            loss.backward(wrong)
        assert all(t.grad is None for t in inputs if t.is_floating_point())


def test_a_second_backward_after_a_promise_raises():
    for main in (True, False):
        inputs = tensors()
        if main:
            inputs[1] = with_main(inputs[1])
        loss = op(grad_scale=1.0)(*inputs)
        loss.backward(retain_graph=True)
        before = [t.grad.clone() for t in (inputs[0], inputs[3], inputs[4])]
        with pytest.raises(RuntimeError, match=r"grad_scale.*a second backward needs a call without it"):
            loss.backward()
        assert equal(before, [t.grad for t in (inputs[0], inputs[3], inputs[4])])


def test_autograd_grad_after_a_promise():
    """main_grad has the gradient already: a pass that would leave it alone comes too late."""
    hidden, weight, labels, *_ = tensors(rest=False)
    expected = gradients(op("again"), [hidden, weight, labels])
    found = torch.autograd.grad(op(grad_scale=1.0)(hidden, weight, labels), [hidden, weight])
    torch.testing.assert_close(list(found), expected[1:3], rtol=1e-5, atol=1e-7)
    main = with_main(weight)
    for asked in ([hidden], [main], [hidden, main]):
        loss = op(grad_scale=1.0)(hidden, main, labels)
        with pytest.raises(RuntimeError, match=r"grad_scale.*in main_grad already.*torch\.autograd\.grad"):
            torch.autograd.grad(loss, asked)


@pytest.mark.parametrize("reentrant", (True, False))
def test_a_promise_under_checkpointing_is_refused(reentrant):
    """Forward would write twice. But the reentrant one's first is without gradients: it is refused, or right."""
    hidden, weight, labels, *_ = tensors(rest=False)
    expected = gradients(op("again"), [hidden, weight, labels])[2]
    weight = with_main(weight)
    start, said = weight.main_grad.clone(), ""
    try:
        checkpoint(lambda x: op(grad_scale=1.0)(x, weight, labels), hidden, use_reentrant=reentrant).backward()
    except RuntimeError as error:
        said = str(error)
    if reentrant and not said:
        torch.testing.assert_close(weight.main_grad, start + expected)
    else:
        assert "grad_scale" in said and "checkpoint" in said and torch.equal(weight.main_grad, start)


@pytest.mark.parametrize("at", (1, 2))
def test_running_out_of_memory_amid_the_chunks(at, monkeypatch):
    """main_grad is as it was, or the error says that it is not; and a call after that works."""
    inputs = tensors(rest=False)
    expected = gradients(op("again"), inputs)[2]
    weight = inputs[1] = with_main(inputs[1])
    start, stock, calls = weight.main_grad.clone(), room.passes.make_logits, []

    def fails(*args):
        calls.append(args)
        if len(calls) > at:
            raise torch.OutOfMemoryError("no room")
        return stock(*args)

    with monkeypatch.context() as patch:
        patch.setattr(room.passes, "make_logits", fails)
        with pytest.raises((torch.OutOfMemoryError, RuntimeError)) as raised:
            op(("promised", 6, ALL), grad_scale=1.0)(*inputs)
    said = [str(raised.value), *getattr(raised.value, "__notes__", [])]
    assert torch.equal(weight.main_grad, start) or any("main_grad" in each for each in said), said
    weight.main_grad.zero_()
    op("promised")(*inputs).backward()
    torch.testing.assert_close(weight.main_grad, expected)


# ---- one weight of several calls ----


@ways
@pytest.mark.parametrize("main", (None, FP32), ids=("", "main_grad"))
def test_three_heads_of_one_weight(main, way):
    """Multi-token prediction: the sum is exact."""
    batches = [tensors(rest=False) for _ in range(3)]
    plain = batches[0][1]
    exact = plain.detach().double().requires_grad_()
    sum(reference(h.detach().double(), exact, y) * (0.5 if i else 1) for i, (h, _, y, *_) in enumerate(batches)).backward()
    weight = torch.nn.Parameter(plain.detach())
    if main is not None:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=main), False
    scales = [1.0, 0.5, 0.5]
    more = [{"grad_scale": scale} if way == "promised" else {} for scale in scales]
    total = sum(op(way, **more[i])(h, weight, y) * scales[i] for i, (h, _, y, *_) in enumerate(batches))
    total.backward()
    found = weight.grad if main is None else weight.main_grad
    torch.testing.assert_close(found.double(), exact.grad, rtol=1e-5, atol=1e-7)
    assert main is None or not weight.grad.any()


@ways
@pytest.mark.parametrize("main", (False, True), ids=("", "main_grad"))
def test_a_head_tied_to_the_embedding(main, way):
    ids, labels = torch.randint(70, (2, 20), device=DEVICE)
    first = torch.randn(70, 12, device=DEVICE)

    def run(call, weight, embed):
        loss = call(torch.tanh(embed(ids, weight)), weight, labels)
        loss.backward()

    exact = first.double().requires_grad_()
    run(reference, exact, F.embedding)
    weight = torch.nn.Parameter(first)
    if not main:
        run(op(way), weight, F.embedding)
        torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
        return
    for flag in (True, False):
        weight.main_grad, weight.grad = torch.zeros_like(weight), None
        if flag:
            weight.grad_added_to_main_grad = False
        else:
            del weight.grad_added_to_main_grad
        run(op(way), weight, F.embedding)
        torch.testing.assert_close((weight.main_grad + weight.grad).double(), exact.grad, rtol=1e-5, atol=1e-6)


# ---- what people wrap around it ----


@again_and_again
@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointing_gives_the_same(reentrant, way):
    hidden, weight, labels, bias, token_weight = tensors()

    def block(hidden, weight, labels, bias, token_weight):
        loss, stats = op(way, return_stats=True)(hidden * 2, weight, labels, bias, token_weight)
        return loss, *stats[:3]

    def again(*given):
        loss, *stats = checkpoint(block, *given, use_reentrant=reentrant)
        return loss, stats

    expected = gradients(
        lambda *given: (lambda loss, *stats: (loss, stats))(*block(*given)), [hidden, weight, labels, bias, token_weight]
    )
    found = gradients(again, [hidden, weight, labels, bias, token_weight])
    assert nearly_equal(found, expected)
    main = with_main(weight)
    start = main.main_grad.clone()
    checkpoint(lambda x: op(way)(x * 2, main, labels), hidden, use_reentrant=reentrant).backward()
    plain = gradients(lambda h, w, y: op(way)(h * 2, w, y), [hidden, weight, labels])
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
    for name, a, b in zip(("loss", *NAMES), found, expected, strict=True):
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


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # PyTorch's own way to some derivatives
def test_transforms_take_the_formula_or_raise():
    hidden, weight, labels, bias, token_weight = (t.detach() for t in tensors((6,)))
    given = {"bias": bias, "token_weight": token_weight, "label_smoothing": 0.1}
    ours, theirs = (
        lambda x, y=labels, f=f: f(x, weight, y, **given)
        for f in (onepass.linear_cross_entropy, room.linear_cross_entropy_reference)
    )
    tangent = torch.randn_like(hidden)
    torch.testing.assert_close(torch.func.jvp(ours, (hidden,), (tangent,)), torch.func.jvp(theirs, (hidden,), (tangent,)))
    torch.testing.assert_close(torch.func.grad(ours)(hidden), torch.func.grad(theirs)(hidden))
    each = lambda x, y: onepass.linear_cross_entropy(x, weight, y)  # noqa: E731
    found = torch.func.vmap(each)(hidden, labels)
    torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.t(), labels, reduction="none"))
    narrow, head = hidden.to(BF16), torch.nn.Parameter(weight.to(BF16))
    wide = torch.func.grad(lambda x: onepass.linear_cross_entropy(x, head, labels, logits_dtype=FP32))(narrow)
    exact = torch.func.grad(lambda x: room.linear_cross_entropy_reference(x, head.detach().double(), labels))(narrow.double())
    assert wide.dtype is BF16
    torch.testing.assert_close(wide, exact.to(BF16), rtol=8e-3, atol=1e-6)  # of logits that were rounded it would be 1e-2 off
    head.main_grad = torch.zeros(head.shape)
    for option in ({"grad_scale": 1.0}, {"deferred": DeferredWgrad()}):
        with pytest.raises(RuntimeError, match=f"{next(iter(option))} can't follow vmap"):
            torch.func.grad(lambda x, option=option: onepass.linear_cross_entropy(x, head, labels, **option))(narrow)


def test_the_formula_of_logits_that_are_minus_infinity():
    """They have no probability, and no part in the entropy."""
    hidden, weight, labels = torch.eye(2)[:, :1] + 1, torch.tensor([[1.0], [-INF], [2.0]]), torch.tensor([0, 2])
    _, stats = room.linear_cross_entropy_reference(hidden, weight, labels, return_stats=True)
    rest = torch.distributions.Categorical(logits=hidden @ weight[::2].t())
    torch.testing.assert_close(stats.entropy, rest.entropy())


@pytest.mark.parametrize("way", ("forward", "promised", "again"))
def test_what_a_watched_call_adds_to_main_grad_was_not_rounded_before(way):
    hidden, weight, labels, *_ = tensors(dtype=BF16)
    found = []
    for watching in (False, True):
        weight = with_main(weight)
        weight.main_grad.zero_()
        with FlopCounterMode(display=False) if watching else nullcontext():
            op(way, reduction="none" if way == "again" else "mean")(hidden, weight, labels).sum().backward()
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


def test_another_packages_backend_gets_what_was_asked(monkeypatch):
    from onepass.runtime import backend

    monkeypatch.setattr(backend.OPS["linear_cross_entropy"], "others", {})
    seen = []

    def run(*args, **options):
        seen.append((args, options))
        return "done"

    onepass.register_backend("linear_cross_entropy", "somebody", run)
    inputs = tensors()
    options = {"softcap": 3.0, "chunk_bytes": 7, "return_stats": True, "label_smoothing": 0.1, "z_loss": 0.2, "logit_scale": 2.0}
    assert op(**options, backend="somebody", reduction="sum")(*inputs) == "done"
    ((args, given),) = seen
    assert args[:3] == tuple(inputs[:3]) and args[3:] == (None, "sum", -100, False)
    assert {name: given[name] for name in options} == options and given["bias"] is inputs[3]
    assert given["token_weight"] is inputs[4]


def test_a_promise_is_kept_to_a_millionth():
    """What loss * 0.1 / 5 sends back is not 0.02 to the last bit."""
    hidden, weight, labels, *_ = tensors()
    for scale, send in ((0.1 / 5, lambda loss: loss * 0.1 / 5), (1 / 77, lambda loss: loss / 11 / 7)):
        plain = gradients(lambda h, w, y, send=send: send(op()(h, w, y)), [hidden, weight, labels])
        found = gradients(lambda h, w, y, s=scale, send=send: send(op(grad_scale=s)(h, w, y)), [hidden, weight, labels])
        assert nearly_equal(found, plain)
    if DEVICE == "cpu":
        with pytest.raises(RuntimeError, match=r"would be 0\.02, but it is 0\.0200"):
            (op(grad_scale=0.02)(hidden, weight, labels) * 0.020001).backward()


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


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_compiled_with_strides_of_their_own(reduction):
    """What the compiler is told of the gradients' strides is so: inductor looks."""
    hidden, weight, labels, *_ = tensors((16,), 8, 50)

    def loss(hidden, weight):
        return onepass.linear_cross_entropy(hidden.t(), weight.t(), labels, reduction=reduction, backend="torch").sum()

    turned = [t.detach().t().contiguous().requires_grad_() for t in (hidden, weight)]
    torch._dynamo.reset()
    plain = torch.autograd.grad(loss(*turned), turned)
    torch.testing.assert_close(torch.autograd.grad(torch.compile(loss, fullgraph=True)(*turned), turned), plain)


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
