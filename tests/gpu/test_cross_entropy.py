"""What only a GPU shows of cross_entropy: real tiles, sizes past 32 bits and a grid, who waits, graphs, and memory."""

import contextlib

import pytest
import torch
from gpu.calls import (  # noqa: F401
    captured,
    deterministic_algorithms,
    memory_goes_back,
    needs_60_gib,
    nobody_waits,
    other_stream,
    taken,
)
from ops.calls import equal
from ops.cross_entropy_oracle import Case, judge_case, made
from torch.nn import functional as F

import onepass
import onepass.ops.loss.cross_entropy as module
from onepass.testing.budget import compare

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TERMS = {"label_smoothing": 0.1, "z_loss": 1e-2}
reductions = pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
places = pytest.mark.parametrize("over", (False, True), ids=("", "over"))


# ---- calls ----


def inputs(n=512, v=5003, dtype=BF16, seed=0):
    """Logits and labels, of which every fifth is ignored."""
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.empty(n, v, device="cuda", dtype=dtype).normal_(0, 2, generator=generator)
    labels = torch.randint(v, (n,), device="cuda", generator=generator)
    labels[0], labels[-1] = v - 1, 0
    labels[1::5] = -100
    return [logits, labels]


def incoming(loss):
    """For the loss: a number, or one for each row, no two of them the same."""
    return torch.linspace(0.5, 2.5, loss.numel(), device=loss.device).view(loss.shape)


def step(logits, labels, over=False, **options):
    """The loss and the gradient, over the logits given if that is asked for."""
    leaf = logits.detach().requires_grad_()
    loss = onepass.cross_entropy(made(leaf) if over else leaf, labels, inplace_backward=over, backend="triton", **options)
    (dlogits,) = torch.autograd.grad(loss, leaf, incoming(loss))
    return [loss.detach(), dlogits]


def both(logits, labels, dtype, dy):
    """The rows' losses and their gradient, as PyTorch makes them in a type."""
    leaf = logits.detach().to(dtype).requires_grad_()
    loss = F.cross_entropy(leaf, labels, reduction="none")
    (dlogits,) = torch.autograd.grad(loss, leaf, dy.to(dtype))
    return {"loss": loss.detach(), "dlogits": dlogits}


def check(ours, logits, labels, rows=None):
    """No further from fp64 than PyTorch in fp32, whose gradient is rounded once."""
    rows = slice(None) if rows is None else rows
    dy = incoming(ours[0])[rows]
    theirs = (both(logits[rows], labels[rows], dtype, dy) for dtype in (FP32, torch.float64))
    report = compare([({"loss": ours[0][rows], "dlogits": ours[1][rows]}, *theirs)], logits.dtype)
    assert report, f"{rows}\n{report}"


# ---- against fp64 ----

SIZES = (37, 1000, 2048, 2049, 4096, 4097, 32000, 50257, 65537, 128256)
ASKED = {
    "plain": {"reduction": "none"},
    "terms": {"smoothing": 0.1, "z_loss": 1e-2, "layout": "sliced", "over": True},
    "weights": {"weighted": True, "smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0},
    "probabilities": {"weighted": True, "mixed": True, "smoothing": 0.1, "stats": True},
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("size", SIZES)
def test_every_kind_of_tile(size, dtype, asked):
    report = judge_case(module, Case((9,), size, dtype, **ASKED[asked]))
    assert report, report


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=("bf16", "fp16", "fp32"))
@pytest.mark.parametrize("size", (50257, 256000))
def test_real_sizes(size, dtype):
    logits, labels = inputs(512, size, dtype)
    ours = step(logits, labels, reduction="none")
    for first in range(0, 512, 128):
        check(ours, logits, labels, slice(first, first + 128))


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
def test_a_vocabulary_of_a_million(dtype):
    logits, labels = inputs(64, 1_000_003, dtype)
    check(step(logits, labels, reduction="none"), logits, labels)


@pytest.mark.parametrize("offset", (0.0, 600.0, -600.0))
def test_fp32_logits_of_several_hundreds(offset):
    """A logsumexp rounded to fp32 would be further off than PyTorch's own is."""
    logits, labels = inputs(dtype=FP32)
    large = logits + offset
    check(step(large, labels, reduction="none"), large, labels)
    apart = logits * 60 + offset
    labels = torch.where(labels == -100, labels, apart.argmin(-1))  # one with all of the probability has no gradient
    check(step(apart, labels, reduction="none"), apart, labels)


# ---- sizes past what 32 bits and a grid hold ----


@needs_60_gib
def test_more_logits_than_31_bits_count_in_more_rows_than_a_grid_dimension():
    logits, labels = inputs(70001, 33000)
    n, block = len(logits), 500
    ours = step(logits, labels, reduction="none")
    for first in range(0, n, block):
        check(ours, logits, labels, slice(first, first + block))
    loss = onepass.cross_entropy(logits, labels, backend="triton")
    torch.testing.assert_close(loss.double(), ours[0].double().sum() / (labels != -100).sum(), rtol=1e-6, atol=0)
    found = step(logits, labels, over=True, reduction="none")
    assert equal(found, ours) and found[1].data_ptr() == logits.data_ptr()


# ---- the CPU waits for nothing ----


@places
@reductions
def test_no_call_waits_for_the_gpu(reduction, over):
    for n, v in ((512, 5003), (70001, 64)):  # of so many rows PyTorch makes the mean
        for options in ({}, TERMS):
            logits, labels = inputs(n, v)
            step(logits.clone(), labels, over, reduction=reduction, **options)  # compiled
            with nobody_waits():
                step(logits, labels, over, reduction=reduction, **options)
                onepass.cross_entropy(logits, labels, reduction=reduction, backend="triton", **options)


@pytest.mark.parametrize("smoothing", (0.0, 0.1))
@pytest.mark.parametrize("mixed", (False, True), ids=("labels", "probabilities"))
def test_no_call_waits_with_class_weights(mixed, smoothing):
    logits, labels = inputs()
    if mixed:
        labels = torch.randn(512, 5003, device="cuda").softmax(-1)
    options = {"weight": torch.rand(5003, device="cuda"), "label_smoothing": smoothing, "return_stats": ["logsumexp", "z_loss"]}
    leaf = logits.clone().requires_grad_()
    for watch in (contextlib.nullcontext(), nobody_waits()):  # compiled first
        with watch:
            loss, stats = onepass.cross_entropy(leaf, labels, backend="triton", **options)
            (loss + stats.logsumexp.mean()).backward()


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
def test_probabilities_of_many_rows(dtype):
    """As the weighted loss of PyTorch in fp64, in rows past a grid's dimension."""
    logits, _ = inputs(70001, 250, dtype)
    mixed, weight = torch.randn(70001, 250, device="cuda").softmax(-1), torch.rand(250, device="cuda")
    ours = step(logits, mixed, weight=weight, reduction="none")

    def theirs(kind):
        leaf = logits.to(kind).requires_grad_()
        loss = F.cross_entropy(leaf, mixed.to(kind), weight.to(kind), reduction="none")
        return {"loss": loss.detach(), "dlogits": torch.autograd.grad(loss, leaf, incoming(loss).to(kind))[0]}

    report = compare([({"loss": ours[0], "dlogits": ours[1]}, theirs(FP32), theirs(torch.float64))], dtype)
    assert report, report


# ---- CUDA graphs ----


@places
@reductions
def test_graphs_replay_with_other_inputs(reduction, over):
    static, labels = inputs()

    def whole():
        """Logits are made, and overwritten, in the graph."""
        leaf = static.detach().requires_grad_()
        loss = onepass.cross_entropy(leaf * 1, labels, reduction=reduction, inplace_backward=over, backend="triton", **TERMS)
        return [loss.detach(), *torch.autograd.grad(loss, leaf, incoming(loss))]

    results, graph = captured(whole)
    for seed in (1, 2):
        other = inputs(seed=seed)
        static.copy_(other[0])
        labels.copy_(other[1])
        expected = step(*other, reduction=reduction, **TERMS)
        for _ in range(2):
            for t in results:
                t.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert equal(results, expected)
        assert torch.equal(static, other[0])


# ---- the same, every time ----


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
@reductions
def test_repeated_calls_are_bitwise_equal(reduction, dtype):
    for n, v in ((2048, 32003), (70001, 64)):
        logits, labels = inputs(n, v, dtype)
        first = step(logits, labels, reduction=reduction, **TERMS)
        assert all(equal(first, step(logits, labels, reduction=reduction, **TERMS)) for _ in range(20))
        with deterministic_algorithms():  # where memory starts as NaN, too
            assert equal(first, step(logits, labels, reduction=reduction, **TERMS))
        assert equal(first, step(logits.clone(), labels, True, reduction=reduction, **TERMS))


# ---- labels that are no token's ----


@places
def test_labels_of_no_token(over):
    """Their rows' losses are NaN, and no gradient comes of them: as if they were ignored."""
    logits, labels = inputs()
    labels[7] = -100
    sound = step(logits, labels, reduction="none")
    for wrong in (-1, -101, 5003, 1 << 40):
        for kind in (torch.int64, torch.int32):
            if wrong >= 1 << 31 and kind is torch.int32:
                continue
            labels[7] = wrong
            loss, dlogits = step(logits.clone(), labels.to(kind), over, reduction="none")
            assert loss.isnan().nonzero().tolist() == [[7]] and not dlogits[7].any()
            loss[7] = 0
            assert equal([loss, dlogits], sound)
            assert step(logits.clone(), labels.to(kind), over, reduction="mean")[0].isnan()
    with onepass.validate(), pytest.raises(IndexError, match=f"labels must be from 0 to 5002.*one is {1 << 40}"):
        onepass.cross_entropy(logits, labels, backend="triton")
    labels[7] = -100
    torch.cuda.synchronize()  # nothing on the device has failed
    assert equal(step(logits, labels, reduction="none"), sound)


# ---- memory ----


@places
@reductions
def test_nothing_of_the_logits_size_is_made_but_the_gradient(reduction, over):
    logits, labels = inputs(4096, 32003)
    step(logits.clone(), labels, over, reduction=reduction)  # compiled
    leaf = logits.requires_grad_()
    given = made(leaf) if over else leaf
    few = 4 << 20  # of each row, six numbers a tile and a few more, in blocks of 2 MiB; the logits are 250
    ahead, loss = taken(
        lambda: onepass.cross_entropy(given, labels, reduction=reduction, inplace_backward=over, backend="triton")
    )
    assert ahead <= few, ahead
    back, (dlogits,) = taken(lambda: torch.autograd.grad(loss, leaf, incoming(loss)))
    assert back <= few + (0 if over else logits.nbytes), back
    assert (dlogits.data_ptr() == logits.data_ptr()) == over
