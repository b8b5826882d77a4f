"""What only a GPU shows of linear_cross_entropy as a policy's head: cuBLAS's bits, memory, and counts that are fetched."""

import pytest
import torch
from gpu.calls import other_stream, taken

import onepass

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
BF16 = torch.bfloat16
SHAPES = [(8192, 4096, 151936), (16384, 2048, 248320), (5000, 768, 50257), (3001, 1024, 32000)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def policy(N, D, V, dtype=BF16):
    """hidden, weight and labels, of which half are ignored."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(N, D, device="cuda", generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, D, device="cuda", generator=generator) / D**0.5).to(dtype).requires_grad_()
    labels = torch.randint(V, (N,), device="cuda", generator=generator)
    labels[torch.rand(N, device="cuda", generator=generator) < 0.5] = -100
    return hidden, weight, labels


@shapes
@pytest.mark.parametrize("budget", (None, 256 << 20), ids=str)
def test_a_ratio_of_policies_starts_at_1(shape, budget):
    """A budget of 256 MiB makes logits again, in blocks; none lets them wait."""
    inputs = policy(*shape)
    options = {"reduction": "none", "chunk_bytes": budget}
    for asked in (("log_prob",), ("log_prob", "entropy")):
        with torch.no_grad():
            old = onepass.linear_cross_entropy(*inputs, return_stats=asked, **options)[1].log_prob
        new = onepass.linear_cross_entropy(*inputs, return_stats=("log_prob", "entropy"), **options)[1].log_prob
        assert new.requires_grad and torch.equal(old, new)


def test_rows_are_counted_where_a_gpu_is_the_default_device():
    labels = policy(5000, 8, 16)[2]
    with torch.device("cuda"):
        assert sum(onepass.kept_rows(labels).counts()) == int((labels >= 0).sum())


@shapes
def test_a_pass_without_gradients_takes_half_a_gib(shape):
    """An odd vocabulary's copy of the weight comes on top."""
    hidden, weight, labels = policy(*shape)
    with torch.no_grad():
        peak, _ = taken(
            lambda: onepass.linear_cross_entropy(hidden, weight, labels, reduction="none", return_stats=("log_prob", "entropy"))
        )
    copy = weight.numel() * 2 if weight.shape[0] % 8 else 0
    assert peak <= (512 << 20) + 1.01 * copy


@shapes
def test_a_mask_restricts_the_distribution(shape):
    """As of a head that has the other columns left out: its columns are every third."""
    hidden, weight, labels = policy(*shape)
    labels = torch.where(labels < 0, labels, labels // 3 * 3)
    mask = torch.arange(shape[2], device="cuda") % 3 == 0
    asked = {"reduction": "none", "return_stats": ("log_prob", "entropy")}
    loss, stats = onepass.linear_cross_entropy(hidden, weight, labels, vocab_mask=mask, **asked)
    found = torch.autograd.grad((loss, stats.entropy), (hidden, weight), (torch.ones_like(loss),) * 2)
    fewer = torch.where(labels < 0, labels, labels // 3)
    loss, theirs = onepass.linear_cross_entropy(hidden, weight[mask], fewer, **asked)
    wanted = torch.autograd.grad((loss, theirs.entropy), (hidden, weight), (torch.ones_like(loss),) * 2)
    for one, other in zip((stats.log_prob, stats.entropy, *found), (theirs.log_prob, theirs.entropy, *wanted), strict=True):
        assert (one.float() - other.float()).norm() <= 4e-3 * other.float().norm()


# ---- rows that are ignored ----


def backward_of(inputs, rows, **options):
    """Outputs and gradients of fresh leaves, of a policy's loss."""
    hidden, weight = (t.detach().requires_grad_() for t in inputs[:2])
    _, stats = onepass.linear_cross_entropy(
        hidden, weight, inputs[2], reduction="none", return_stats=("log_prob", "entropy"), rows=rows, **options
    )
    (-2 * stats.log_prob - 0.1 * stats.entropy).sum().backward()
    return stats.log_prob.detach(), stats.entropy.detach(), hidden.grad, weight.grad


@shapes
def test_rows_alone_are_as_all_rows(shape):
    inputs = policy(*shape)
    found, every = (backward_of(inputs, rows) for rows in (onepass.kept_rows(inputs[2]), None))
    gone = inputs[2] == -100
    for ours, theirs in zip(found, every, strict=True):
        assert (ours.float() - theirs.float()).norm() <= 2e-3 * theirs.float().norm()
    assert not any(t[gone].any() for t in found[:3])
    assert all(map(torch.equal, found, backward_of(inputs, onepass.kept_rows(inputs[2]))))


@shapes
@pytest.mark.parametrize("main", (False, True))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_all_rows_ignored(shape, main, reduction):
    hidden, weight, labels = policy(*shape)
    weight, labels = torch.nn.Parameter(weight.detach()), torch.full_like(labels, -100)
    if main:
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    loss = onepass.linear_cross_entropy(hidden, weight, labels, reduction=reduction, rows=onepass.kept_rows(labels))
    loss.sum().backward()
    assert not loss.any() and not hidden.grad.any()
    assert (weight.main_grad == 1).all() if main else not weight.grad.any()


def test_rows_of_other_labels_give_nan():
    hidden, weight, labels = policy(2000, 256, 5000)
    rows = onepass.kept_rows(labels)
    ignored = (labels == -100).nonzero()[0]
    for wrong in (labels.roll(1), labels.index_fill(0, ignored, 3)):
        for reduction in ("mean", "none"):
            loss, stats = onepass.linear_cross_entropy(hidden, weight, wrong, reduction=reduction, return_stats=True, rows=rows)
            assert loss.isnan().all() and stats.log_prob.isnan().all()
        with onepass.validate(), pytest.raises(ValueError, match="rows must be those of these labels"):
            onepass.linear_cross_entropy(hidden, weight, wrong, rows=rows)
    labels.copy_(labels.roll(1))  # the same memory
    assert onepass.linear_cross_entropy(hidden, weight, labels, rows=rows).isnan()


def test_the_number_of_rows_waits_for_nothing_but_the_labels():
    """A GPU that is busy for long after the labels has told their number long before it is done."""
    _, _, labels = policy(4096, 64, 1000)
    a = torch.randn(8192, 8192, device="cuda", dtype=BF16)
    torch.cuda.synchronize()
    rows = onepass.kept_rows(labels)
    for _ in range(200):
        a @ a
    done = torch.cuda.Event()
    done.record()
    found, waits = sum(rows.counts()), not done.query()
    assert waits and found == int((labels != -100).sum())


def test_a_graph_computes_all_rows():
    inputs = policy(2000, 256, 5000)
    expected = backward_of(inputs, None)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        backward_of(inputs, onepass.kept_rows(inputs[2]))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert onepass.kept_rows(inputs[2]) is None
        found = backward_of(inputs, onepass.kept_rows(inputs[2]))
    graph.replay()
    assert all(map(torch.equal, found, expected))
