"""linear_cross_entropy as a policy's head: passes without gradients, and rows that are not computed."""

from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ops.calls import backends
from ops.linear_cross_entropy_calls import fresh, outputs, products, tensors
from ops.linear_cross_entropy_oracle import WAYS, op, taken
from ops.oracle import BF16, DEVICE, FP32

import onepass
import onepass.ops.loss.linear_cross_entropy as module
from onepass.ops.loss import row_kernels
from onepass.ops.loss.reduction import check_terms

on_a_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="of tensors on a CPU")

# ---- passes without gradients ----


def ratio_inputs(rows, dtype=BF16, V=900):
    hidden, weight, labels, *_ = tensors((rows,), 24, V, dtype=dtype)
    labels[::3] = -100
    return hidden, weight, labels


@backends
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("budget", (1 << 15, 1 << 20), ids=str)
def test_a_ratio_of_policies_starts_at_1(budget, dtype, backend):
    """log_prob's bits are those of the training call, whether its logits wait or are made again, whatever else it asks for."""
    inputs = ratio_inputs(60, dtype)
    options = {"reduction": "none", "chunk_bytes": budget, "backend": backend}
    with torch.no_grad():
        old = onepass.linear_cross_entropy(*inputs, return_stats=("log_prob",), **options)[1].log_prob
    new = onepass.linear_cross_entropy(*inputs, return_stats=("log_prob", "entropy"), **options)[1].log_prob
    assert new.requires_grad and torch.equal(old, new)


def test_the_ways_that_a_ratio_is_tested_with():
    inputs = ratio_inputs(60)
    variants = [
        onepass.explain("linear_cross_entropy", *inputs, reduction="none", chunk_bytes=budget, backend="torch").variant
        for budget in (1 << 15, 1 << 20)
    ]
    assert "made again in backward" in variants[0] and "logits wait" in variants[1]


@on_a_cpu
@pytest.mark.parametrize("frozen", (False, True))
def test_a_pass_without_gradients_is_one_product_in_little_memory(frozen):
    """Also where inputs require grad, but no_grad is in force; and where they don't."""
    hidden, weight, labels = torch.randn(512, 16), torch.randn(8192, 16), torch.randint(8192, (512,))
    inputs = [hidden.requires_grad_(not frozen), weight.requires_grad_(not frozen), labels]

    def run():
        with torch.set_grad_enabled(frozen):
            return op(reduction="none", return_stats=("log_prob", "entropy"), chunk_bytes=1 << 20)(*inputs)

    found = taken(run)
    assert found.products(inputs) == 1 and found.most <= 512 * 8192 * 4 / 2, found


@pytest.mark.parametrize(("asked", "count"), [("log_prob", 3), ("correct", 3), ("entropy", 3)])
def test_statistics_of_a_mean_take_no_fourth_product(asked, count):
    inputs = tensors((200,), 24, 3000, rest=False)[:3]
    inputs[2][1] = 0
    call = lambda *t: (lambda loss, stats: loss + 0 * getattr(stats, asked).sum())(*op(return_stats=[asked])(*t))  # noqa: E731
    assert products(call, inputs) == count


@on_a_cpu  # a GPU's plan takes blocks of so few rows
def test_statistics_that_nobody_differentiates_leave_gradients_to_forward():
    """Of a long batch, where logits don't fit: of differentiable statistics logits are made again."""
    inputs = tensors((200,), 24, 3000, rest=False)[:3]
    for asked, words in ((["correct"], "gradients in forward"), (["log_prob"], "made again in backward")):
        said = onepass.explain("linear_cross_entropy", *inputs, return_stats=asked, chunk_bytes=2 << 20, backend="torch").variant
        assert words in said, said


# ---- rows that are ignored ----

PEOPLE = {  # what is ignored
    "half": lambda labels: labels.masked_fill(torch.arange(len(labels), device=labels.device) % 2 == 0, -100),
    "the first": lambda labels: labels.masked_fill(torch.arange(len(labels), device=labels.device) < len(labels) // 3, -100),
    "all but one": lambda labels: torch.full_like(labels, -100).index_copy(0, labels.new_tensor([7]), labels[7:8]),
    "all": lambda labels: torch.full_like(labels, -100),
}
ignored = pytest.mark.parametrize("ignored", PEOPLE)


def step(inputs, call, incoming, main=False):
    """Outputs and gradients of fresh leaves; with `main`, of a weight and a bias that carry main_grad."""
    hidden, weight, labels, bias, token_weight = fresh(inputs)
    hidden.retain_grad()
    if main:
        weight, bias = (torch.nn.Parameter(t.detach()) for t in (weight, bias))
        weight.main_grad, bias.main_grad = torch.ones_like(weight, dtype=FP32), torch.ones_like(bias, dtype=FP32)
    outs = outputs(call(hidden, weight, labels, bias, token_weight))
    torch.autograd.backward(outs, [dy.expand_as(out) if dy.dim() == 0 else dy for dy, out in zip(incoming, outs, strict=False)])
    grads = [t.main_grad if main else t.grad for t in (weight, bias)]
    return [*(out.detach() for out in outs), hidden.grad, *grads, token_weight.grad]


@backends
@ignored
@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
@pytest.mark.parametrize("stats", (False, True))
def test_rows_alone_are_as_all_rows(stats, reduction, ignored, backend, monkeypatch):
    """The same values and gradients as of computing all; those of ignored rows are zeros, whatever comes back to them."""
    inputs = tensors((24,), 12, 70)
    inputs[2] = PEOPLE[ignored](inputs[2])
    gone = inputs[2] == -100
    dy = torch.randn(24, device=DEVICE)
    incoming = [dy if reduction == "none" else dy[0].abs(), *([dy * 2, dy * 3, dy * 4] if stats else [])]
    for main in (False, True):
        call = op(reduction=reduction, return_stats=stats, backend=backend)
        rows = onepass.kept_rows(inputs[2])
        found = step(inputs, lambda *t, call=call, rows=rows: call(*t, rows=rows), incoming, main)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_rows_to_compute", lambda *_: None)
            every = step(inputs, call, incoming, main)
        torch.testing.assert_close(found, every, rtol=1e-4, atol=1e-5)
        assert not found[-4][gone].any() and not found[-1][gone].any()
        if reduction == "none":
            assert not found[0][gone].any()
        if stats:
            assert not any(t[gone].any() for t in found[1:4])


@on_a_cpu
@backends
@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_is_ignored_is_not_read(way, backend):
    """NaN in it goes nowhere, and its gradient is 0. A GPU's products take some such rows along, up to a round number."""
    if backend == "triton" and way not in ("keep_logits", "known_grad_scale"):
        pytest.skip("two ways stand for the others under the interpreter")
    inputs = tensors((24,), 12, 70)
    inputs[2] = PEOPLE["half"](inputs[2])
    with torch.no_grad():
        inputs[0][::2] = float("nan")
    loss, dhidden, *rest = step(inputs, op(way, reduction="sum", backend=backend), [torch.tensor(1.0, device=DEVICE)])
    assert loss.isfinite() and not dhidden[::2].any() and dhidden[1::2].any() and all(t.isfinite().all() for t in rest)


@on_a_cpu
@pytest.mark.parametrize(
    ("count", "way"), [(3, "keep_logits"), (3, "grad_in_forward"), (3, "known_grad_scale"), (4, "recompute")]
)
def test_products_of_rows_that_are_kept_alone(way, count):
    hidden, weight, labels, *_ = tensors((32,), 12, 70, rest=False)
    labels[:] = 3
    assert products(op(way), [hidden, weight, labels]) == count
    labels[8:] = -100
    assert products(op(way), [hidden, weight, labels]) == count / 4
    labels[:] = -100
    assert products(op(way), [hidden, weight, labels]) == 0


def test_rows_may_be_found_before_labels_move_or_get_their_shape():
    hidden, weight, labels, *_ = tensors((4, 6), rest=False)
    labels[1:3], labels[0, 1] = -100, 3
    expected = op(reduction="none")(hidden, weight, labels)
    for known in (labels, labels.flatten(), labels.clone(), labels.cpu(), labels.t().contiguous().t()):
        assert torch.equal(op(reduction="none")(hidden, weight, labels, rows=onepass.kept_rows(known)), expected)
    assert repr(onepass.kept_rows(labels)) == "KeptRows(12 of 24)"


@on_a_cpu
def test_rows_of_other_labels_are_refused():
    hidden, weight, labels, *_ = tensors((24,), rest=False)
    labels[::2], labels[1] = -100, 3
    rows = onepass.kept_rows(labels)
    labels.copy_(labels.roll(1))
    with pytest.raises(ValueError, match=r"rows must be those of these labels.*KeptRows\(12 of 24\)"):
        op()(hidden, weight, labels, rows=rows)
    with pytest.raises(ValueError, match="rows must be those of these 24 labels, but is of 20"):
        op()(hidden, weight, labels, rows=onepass.kept_rows(labels[:20]))
    with pytest.raises(ValueError, match="rows must be made with ignore_index -100, but is with 0"):
        op()(hidden, weight, labels, rows=onepass.kept_rows(labels, 0))
    with pytest.raises(TypeError, match="rows must be what kept_rows returned, but is a Tensor"):
        op()(hidden, weight, labels, rows=labels)
    with pytest.raises(TypeError, match=r"labels must be an int32 or int64 tensor, but is of torch\.float32"):
        onepass.kept_rows(hidden)


def test_explain_says_which_rows_are_computed():
    hidden, weight, labels, *_ = tensors((24,), rest=False)
    labels[::2], labels[1] = -100, 3
    explain = lambda **more: onepass.explain("linear_cross_entropy", hidden, weight, labels, **more).variant  # noqa: E731
    assert explain(rows=onepass.kept_rows(labels)).startswith("12 of 24 rows; " if DEVICE == "cpu" else "all rows; ")
    if DEVICE == "cpu":
        assert explain().startswith("12 of 24 rows; ")
    with mock.patch.object(module, "_rows_to_compute", return_value=None):  # as on a GPU
        assert explain().startswith("all rows, 12 of 24 ignored: rows=onepass.kept_rows(labels) leaves those out; ")
        labels = labels.clamp_min(0)
        assert explain().startswith("all rows; ")


def test_compiled_all_rows_are_computed():
    hidden, weight, labels, *_ = tensors((24,), rest=False)
    labels[::2] = -100

    def loss(hidden, weight, labels):
        return op()(hidden, weight, labels, rows=onepass.kept_rows(labels))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, weight, labels), op()(hidden, weight, labels))


# ---- masks of the vocabulary ----


def masks(rows, V):
    """Of all rows, and of each: bools, and the same as bits."""
    generator = torch.Generator().manual_seed(3)
    some = torch.rand(rows, V, generator=generator) < 0.4
    some[:, 0] = True
    for mask in (some[0], some):
        bits = torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little"))
        yield mask.to(DEVICE), mask.to(DEVICE)
        yield mask.to(DEVICE), bits.to(DEVICE)


@backends
@pytest.mark.parametrize("way", WAYS)
def test_a_mask_restricts_the_distribution(way, backend):
    """As of logits that are -inf elsewhere; rows that are ignored are left out of masks too."""
    if backend == "triton" and DEVICE == "cpu" and way in ("grad_in_forward", "recompute"):
        pytest.skip("others stand for them under the interpreter")
    inputs = tensors((24,), 12, 150)
    inputs[2][3:9] = -100
    promised = way == "known_grad_scale"
    names = () if promised or way == "grad_in_forward" else ("logsumexp", "log_prob", "entropy")
    kept = inputs[2] != -100
    for mask, given in masks(24, 150):
        inputs[2] = torch.where(kept, mask.expand(24, 150).float().argmax(-1), -100)

        def formula(hidden, weight, labels, bias, token_weight, mask=mask):
            logits = F.linear(hidden, weight, bias).masked_fill(~mask, float("-inf"))
            log_p = logits.log_softmax(-1)
            log_prob = torch.where(kept, log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
            loss = -(log_prob * token_weight).sum()
            entropy = -(log_p.exp() * log_p.masked_fill(~mask, 0.0)).sum(-1)
            stats = torch.where(kept, logits.logsumexp(-1), 0.0), log_prob, torch.where(kept, entropy, 0.0)
            return (loss, stats) if names else loss

        call = op(way, reduction="sum", return_stats=names, backend=backend, vocab_mask=given)
        incoming = [torch.tensor(1.0, device=DEVICE), *([torch.randn(24, device=DEVICE) for _ in range(3)] if names else [])]
        torch.testing.assert_close(step(inputs, call, incoming), step(inputs, formula, incoming), rtol=1e-4, atol=1e-5)


@backends
def test_labels_outside_and_masks_of_nothing(backend):
    inputs = tensors((4,), 12, 70)
    inputs[2][:] = torch.tensor([3, 5, 3, 3])
    mask = torch.zeros(4, 70, dtype=torch.bool, device=DEVICE)
    mask[:, 3] = mask[:2, 8] = True
    mask[2] = False
    loss, stats = op(reduction="none", return_stats=("log_prob", "entropy"), backend=backend, vocab_mask=mask)(*inputs[:3])
    assert loss.isinf().tolist() == [False, True, False, False] and loss.isnan().tolist() == [False, False, True, False]
    assert stats.log_prob[1] == float("-inf") and stats.log_prob[3] == 0 and stats.entropy[3] == 0 and stats.entropy[2].isnan()


def test_what_is_said_of_bad_masks():
    hidden, weight, labels, *_ = tensors((4,), 12, 70)
    ones = torch.ones(70, dtype=torch.bool, device=DEVICE)
    for mask, error, words in (
        (ones.float(), TypeError, "vocab_mask must be a bool tensor or uint8 of bits, but is of torch.float32"),
        (ones[1:], ValueError, r"vocab_mask must have shape \(70,\) or \(4, 70\), but has \(69,\)"),
        (ones.byte(), ValueError, r"vocab_mask must have shape \(9,\) or \(4, 9\), but has \(70,\)"),
        (ones.to("meta"), ValueError, "vocab_mask must be on .*, as hidden, but is on meta"),
    ):
        with pytest.raises(error, match=words):
            op(vocab_mask=mask)(hidden, weight, labels)
    for more in ({"label_smoothing": 0.1}, {"return_stats": ["mean_logit"]}):
        with pytest.raises(ValueError, match="exclude each other"):
            op(vocab_mask=ones, **more)(hidden, weight, labels)


def test_a_mask_compiled_and_under_transforms():
    hidden, weight, labels, *_ = tensors((24,), 12, 70, rest=False)
    mask, _ = list(masks(24, 70))[2]
    labels[:] = 0
    expected = op(vocab_mask=mask)(hidden, weight, labels)
    compiled = torch.compile(lambda h, w, m: op(vocab_mask=m)(h, w, labels), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, weight, mask), expected)
    grad = torch.func.grad(lambda h: op(vocab_mask=mask)(h, weight, labels))(hidden)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, hidden)[0])
    formula = module.linear_cross_entropy_reference(hidden, weight, labels, vocab_mask=mask)
    torch.testing.assert_close(formula, expected)


def test_a_loss_has_the_tiles_of_statistics_under_batch_invariant():
    """A thread's columns say in which order a row's exponentials are added."""
    terms = check_terms(-100, 0.0, 0.0, None, 1.0, 1.0)

    def tiles(stats, invariant):
        given = 4096, 4096, 4096, 4096, terms, stats, 0, row_kernels.PLANES, (0, 0)
        return row_kernels._statistics_plan(*given, invariant)[0]

    assert tiles((), False) != tiles(("log_prob",), False)
    assert tiles((), True) == tiles(("log_prob",), True) == tiles(("log_prob",), False)
