"""linear_cross_entropy into main_grad, by a promise too, and one weight of several calls."""

import pytest
import torch
import torch.nn.functional as F
from ops.calls import equal, nearly_equal
from ops.linear_cross_entropy_calls import NAN, again_and_again, gradients, reductions, reference, tensors, with_main
from ops.linear_cross_entropy_oracle import ALL, UPSTREAM, op, ways, whole_sums  # noqa: F401
from ops.oracle import BF16, DEVICE, FP16, FP32
from torch.utils.checkpoint import checkpoint

from onepass.ops.loss.head import passes
from onepass.testing.poison import unchanged

# ---- main_grad ----


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


# ---- a promise of what comes back ----


@pytest.mark.parametrize("main", (True, False), ids=("main_grad", ""))
@reductions
def test_a_promise_that_is_kept(reduction, main):
    inputs = tensors(dtype=BF16)
    upstream = torch.full(() if reduction != "none" else (20,), UPSTREAM, device=DEVICE)
    plain = gradients(op("recompute", reduction=reduction), inputs, [upstream])
    if main:
        inputs[1] = with_main(inputs[1], flag=True)
        start = inputs[1].main_grad.clone()
    loss = op("known_grad_scale", reduction=reduction, grad_scale=UPSTREAM)(*inputs)
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
    expected = gradients(op("recompute"), [hidden, weight, labels])
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
    expected = gradients(op("recompute"), [hidden, weight, labels])[2]
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
    expected = gradients(op("recompute"), inputs)[2]
    weight = inputs[1] = with_main(inputs[1])
    start, stock, calls = weight.main_grad.clone(), passes.make_logits, []

    def fails(*args):
        calls.append(args)
        if len(calls) > at:
            raise torch.OutOfMemoryError("no room")
        return stock(*args)

    with monkeypatch.context() as patch:
        patch.setattr(passes, "make_logits", fails)
        with pytest.raises((torch.OutOfMemoryError, RuntimeError)) as raised:
            op(("known_grad_scale", 6, ALL), grad_scale=1.0)(*inputs)
    said = [str(raised.value), *getattr(raised.value, "__notes__", [])]
    assert torch.equal(weight.main_grad, start) or any("main_grad" in each for each in said), said
    weight.main_grad.zero_()
    op("known_grad_scale")(*inputs).backward()
    torch.testing.assert_close(weight.main_grad, expected)


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
    more = [{"grad_scale": scale} if way == "known_grad_scale" else {} for scale in scales]
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
