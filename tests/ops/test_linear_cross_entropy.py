"""What linear_cross_entropy computes, of inputs of all kinds."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ops.calls import backends, equal, needs_triton
from ops.linear_cross_entropy_calls import INF, NAN, again_and_again, fresh, gradients, reductions, reference, tensors
from ops.linear_cross_entropy_oracle import ALL, op, reductions_of, ways, whole_sums  # noqa: F401
from ops.oracle import DEVICE, FP32, FP64, laid_out

from onepass.ops.loss import reduction as losses
from onepass.ops.loss.formula import STATISTICS
from onepass.ops.loss.head import operands
from onepass.ops.loss.head.operands import LogitsBlock
from onepass.testing.poison import poisoned, unchanged

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


@backends
def test_nan_in_memory_of_before_reaches_no_result(backend):
    """Between rows of logits, where PyTorch's bf16 products read on some CPUs."""
    draw = torch.Generator(DEVICE).manual_seed(0)
    hidden, weight = (torch.randn(rows, 61, device=DEVICE, generator=draw, dtype=torch.bfloat16) for rows in (37, 203))
    labels = torch.arange(37, device=DEVICE)
    with poisoned():
        found = gradients(op(backend=backend), [hidden, weight, labels])
    assert all(each.isfinite().all() for each in found if each is not None)


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
        torch.testing.assert_close(stats.logsumexp, torch.where(kept, logits.logsumexp(-1), 0.0))
        torch.testing.assert_close(stats.log_prob, torch.where(kept, softmax.log_prob(labels.clamp(min=0)), 0.0))
        torch.testing.assert_close(stats.entropy, torch.where(kept, softmax.entropy(), 0.0))
        assert torch.equal(stats.correct, logits.argmax(-1) == labels) and stats.correct.sum() >= 6
        assert [t.dtype for t in stats] == [FP32, FP32, FP32, torch.bool] and not stats.correct.requires_grad
        assert all(t.shape == labels.shape for t in stats) and loss.shape == plain.shape
        named = op(reduction=reduction, return_stats=["mean_logit", "log_sum_sq_probs"], backend=backend)
        _, more = named(hidden, weight, labels, bias)
        squares = logits.double().softmax(-1).square().sum(-1).log().float()
        torch.testing.assert_close(more.log_sum_sq_probs, torch.where(kept, squares, 0.0))
        torch.testing.assert_close(more.mean_logit, torch.where(kept, logits.mean(-1), 0.0))
        assert not more.mean_logit.requires_grad and not more.log_sum_sq_probs.requires_grad


@backends
@pytest.mark.parametrize("names", [*itertools.combinations(STATISTICS, 1), *itertools.combinations(STATISTICS, 2)])
def test_statistics_by_name_are_those_of_all(names, backend):
    """Those that are not named are None; values and gradients have the bits of a call that asks for all."""
    inputs = tensors((6,), 8, 70)
    every = op("keep_logits", reduction="none", return_stats=STATISTICS, backend=backend)(*inputs)[1]
    leaves = fresh(inputs)
    _, some = op("keep_logits", reduction="none", return_stats=names[::-1], backend=backend)(*leaves)
    assert [name for name in STATISTICS if getattr(some, name) is not None] == list(names)
    assert all(torch.equal(getattr(some, name), getattr(every, name)) for name in names)
    both = [(getattr(some, name), getattr(every, name)) for name in names if getattr(some, name).requires_grad]
    assert [name for name in names if getattr(some, name).requires_grad] == [n for n in names if n in STATISTICS[:3]]
    if both:
        ours = torch.autograd.grad([one for one, _ in both], leaves[:2], [torch.ones_like(one) for one, _ in both])
        theirs = torch.autograd.grad([one for _, one in both], inputs[:2], [torch.ones_like(one) for _, one in both])
        assert all(map(torch.equal, ours, theirs))


@backends
def test_a_temperature_divides_after_the_softcap(backend):
    def formula(hidden, weight, labels, bias):
        logits = 3.0 * torch.tanh(0.5 * F.linear(hidden, weight, bias) / 3.0) / 0.7
        return F.cross_entropy(logits, labels, reduction="none"), torch.distributions.Categorical(logits=logits).entropy()

    inputs = tensors()[:4]
    call = op("keep_logits", reduction="none", softcap=3.0, logit_scale=0.5, temperature=0.7, backend=backend)
    kept = inputs[2] != -100
    ours = gradients(lambda *t: (lambda loss, stats: (loss, [stats.entropy]))(*call(*t, return_stats=["entropy"])), inputs)
    theirs = gradients(lambda *t: (lambda loss, entropy: (loss, [torch.where(kept, entropy, 0.0)]))(*formula(*t)), inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@backends
def test_of_equal_logits_the_first_is_the_largest(backend):
    hidden, weight = torch.ones(3, 4, device=DEVICE), torch.ones(70, 4, device=DEVICE)
    weight[:5] = 0
    labels = torch.tensor([5, 6, 0], device=DEVICE)
    for way in ("keep_logits", ("loss_only", 2, 16), ("recompute", 2, 3)):
        _, stats = op(way, return_stats=True, backend=backend)(hidden, weight.requires_grad_(), labels)
        assert stats.correct.tolist() == [True, False, False]


@ways
def test_each_stat_can_be_differentiated_alone(way):
    inputs = tensors()
    if way == "known_grad_scale":
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
    kept = inputs[2] != -100
    for name, formula in formulas.items():
        ours = gradients(lambda *t, name=name: getattr(op(way, return_stats=True)(*t)[1], name), inputs, [dy])
        theirs = gradients(lambda *t, formula=formula: torch.where(kept, formula(*t), 0.0), inputs, [dy])
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
    where = {
        "keep_logits": way,
        "grad_in_forward": ("grad_in_forward", 3, ALL),
        "recompute": ("recompute", 3, ALL),
        "blocks": ("recompute", ALL, 3),
    }
    where["both"] = ("recompute", 3, 3)
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0, "logit_scale": 0.5, "backend": backend}

    def call(hidden, weight, bias, token_weight):
        loss, stats = op(where[way], return_stats=True, **options)(hidden, weight, inputs[2], bias, token_weight)
        assert loss.dtype is FP64
        return loss, *stats[:3]

    def loss_alone(*given):
        return call(*given)[0]

    given, again = [inputs[0], inputs[1], inputs[3], inputs[4]], 1e-12 if way == "grad_in_forward" else 0.0
    assert all(torch.autograd.gradcheck(each, given, nondet_tol=again) for each in (call, loss_alone))


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
    for call in (op(way), *([op(grad_scale=1.0), op(return_stats=True)] if way == "known_grad_scale" else [op()])):
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


LAYOUTS = ("transposed", "swapped", "unaligned")


@ways
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
def test_whatever_lies_otherwise_in_memory(backend, way):
    if backend == "triton" and way not in ("grad_in_forward", "both"):
        pytest.skip("two ways stand for the others under the interpreter")
    inputs = tensors((2, 3, 2))
    expected = gradients(op(way, backend=backend), inputs)
    for layout in LAYOUTS if backend == "torch" else LAYOUTS[:2]:
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
    for reduction in ("none",) if way != "grad_in_forward" else ():
        loss = op(way, reduction=reduction)(*fresh(plain))
        loss.backward(torch.ones((), device=DEVICE).expand(6))


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
    monkeypatch.setattr(losses, "can_validate_labels", lambda labels: False)
    inputs = tensors((6,))
    inputs[2][3] = -100
    sound = gradients(op(way, reduction="sum"), inputs)
    for wrong in (-1, 70, 1 << 40):
        inputs[2][3] = wrong
        loss, dhidden, dweight, dbias, _ = gradients(op(way, reduction="sum"), inputs)
        assert loss.isnan() and not dhidden[3].any()
        torch.testing.assert_close([dhidden, dweight, dbias], sound[1:4])  # of another number of rows
        if "none" in reductions_of(way):
            loss = op(way, reduction="none")(*inputs)
            assert loss.isnan().tolist() == [False] * 3 + [True] + [False] * 2


@pytest.mark.parametrize("dtype", (FP32, torch.bfloat16), ids=str)
def test_a_rank_without_columns_has_zeros_as_its_part_of_the_gradient(dtype):
    none = torch.empty(5, 0, device=DEVICE, dtype=dtype)
    rank = SimpleNamespace(weight=torch.empty(0, 4, device=DEVICE, dtype=dtype))
    for kind in (FP32, dtype):
        into = torch.full((5, 4), NAN, device=DEVICE, dtype=kind)
        operands.hidden_gradient(rank, LogitsBlock(none, none, 0, 0), into)
        assert not into.any()


def test_rows_of_logits_have_no_gap_where_a_bias_is_added():
    """On a GPU rows are a multiple of 64 columns apart. There cuBLAS rounds the product and then the sum with the bias."""
    draw = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(*size, generator=draw, dtype=FP64) for size in ((10, 4), (200, 4), (200,)))
    # the last block of columns is narrower, and 64 columns at a time are as far apart as rows without a bias
    for columns in (200, 128, 64):
        for has in (True, False):
            hidden = SimpleNamespace(is_cuda=True, dtype=FP64, new_empty=partial(torch.empty, dtype=FP64))
            given = SimpleNamespace(hidden=hidden, weight=weight, bias=bias if has else None, lora=None, columns=200, logits=FP64)
            buffer = operands.new_logits(given, 10, columns), None
            for first in range(0, 200, columns):
                found = operands.make_logits(given, rows, first, columns, buffer)
                last = first + found.x.shape[1]
                expected = torch.nn.functional.linear(rows, weight[first:last], given.bias if not has else bias[first:last])
                torch.testing.assert_close(found.x, expected)
                assert last == min(first + columns, 200)
                assert found.x.is_contiguous() == (has or (found.x.shape[1] % 64 == 0 and columns == found.x.shape[1]))
