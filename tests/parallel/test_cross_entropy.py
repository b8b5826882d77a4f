"""The loss of logits divided over ranks, against the whole in fp64."""

from contextlib import nullcontext
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from parallel.meeting import SentSizes, drawn, every_other_rank, ways
from parallel.worlds import FOURS, PAIRS

import onepass
from onepass.distributed.collectives import vocab_range
from onepass.ops.loss.cross_entropy import cross_entropy_reference
from onepass.ops.loss.row_functions import PLANES

WORLDS = [*PAIRS, *FOURS]
of_two = pytest.mark.parametrize("world", PAIRS, indirect=True, scope="module")
LEAD, V = (2, 3), 90
PARTS = {2: (57, 33), 4: (13, 0, 70, 7)}  # ranks -> columns of each rank: uneven, and one rank of four has none
WIDE = {2: (4900, 100), 4: (2100, 0, 2100, 800)}  # rows of several tiles
EMPTY = {2: (90, 0), 4: (0, 0, 90, 0)}
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
    "none": {"reduction": "none", "label_smoothing": 0.3, "z_loss": 0.01},
    "over": {"z_loss": 0.1, "inplace_backward": True},
    "weighted": {"weight": torch.linspace(0, 2, V), "z_loss": 0.01, "softcap": 4.0},
    "weighted and smoothed": {"weight": torch.linspace(0, 2, V), "label_smoothing": 0.1, "z_loss": 0.01},
    "probabilities": {"classes": True, "weight": torch.linspace(0, 2, V), "label_smoothing": 0.1},
}


def whole(dtype=torch.float32, size=V):
    """Return the whole logits, labels of which one is ignored, and the loss's gradient. They are the same on all ranks."""
    seeds = torch.Generator().manual_seed(5)
    logits = drawn(torch.randn, (*LEAD, size), generator=seeds).mul(3).to(dtype)
    labels = drawn(torch.randint, size, LEAD, generator=seeds)
    labels[0], labels[1, 0] = torch.tensor([0, 57, size - 1]), -100
    return logits, labels, drawn(torch.rand, LEAD, generator=seeds) + 1


def columns(parts, rank):
    first = [0, *accumulate(parts)][rank]
    return slice(first, first + parts[rank])


def shard(group, parts, dtype=torch.float32):
    """Return this rank's leaf and its logits, which are the output of an op; all labels; and the loss's gradient."""
    logits, labels, dy = whole(dtype, sum(parts))
    leaf = logits[..., columns(parts, group.rank())].clone().requires_grad_()
    return leaf, leaf * 1, labels, dy


def probabilities(labels, size=V):
    """Return [*labels' shape, size], which sum to 1."""
    return drawn(torch.randn, (*labels.shape, size), generator=torch.Generator().manual_seed(7)).softmax(-1)


def compare(group, parts, dtype=torch.float32, compiled=False, classes=False, **options):
    """Compare this rank's loss, which is all ranks' bit for bit, and its part of the gradient with the whole's in fp64."""
    leaf, logits, labels, dy = shard(group, parts, dtype)
    own = columns(parts, group.rank())
    if classes:
        labels = probabilities(labels)
    mine = labels[..., own] if classes else labels
    if "weight" in options:
        options["weight"] = options["weight"].to(leaf.device)
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(
            lambda x, y: onepass.cross_entropy(x * 1, y, group, **options) * 1, backend="aot_eager", fullgraph=True
        )
        y = function(leaf, mine)
    else:
        y = onepass.cross_entropy(logits, mine, group, **options)
        with torch.no_grad():
            assert torch.equal(onepass.cross_entropy(leaf.clone(), mine, group, **options), y)
    y.backward(dy if y.dim() else dy[0, 0])
    exact = whole(dtype, sum(parts))[0].double().requires_grad_()
    options = {name: value for name, value in options.items() if name not in ("inplace_backward", "backend")}
    wanted = cross_entropy_reference(exact, labels, **options)
    wanted.backward((dy if y.dim() else dy[0, 0]).double())
    assert y.dtype == torch.float32 and leaf.grad.dtype == dtype
    dist.broadcast(first := y.detach().clone(), dist.get_global_rank(group, 0), group)
    assert torch.equal(y, first)
    torch.testing.assert_close(y.double(), wanted, rtol=2e-6, atol=1e-6)
    close = {"rtol": 2e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 5e-3, "atol": 1e-5}
    torch.testing.assert_close(leaf.grad.double(), exact.grad[..., own], **close)
    assert classes or not leaf.grad[1, 0].any()


@pytest.mark.parametrize("name", OPTIONS)
def test_as_the_whole(group, name):
    for way in ways():
        compare(group, PARTS[group.size()], backend=way, **OPTIONS[name])


@pytest.mark.parametrize(("parts", "dtype"), [(PARTS, torch.bfloat16), (WIDE, torch.float32), (EMPTY, torch.float32)])
def test_in_16_bits_and_in_several_tiles_and_where_one_rank_has_all(group, parts, dtype):
    for way in ways():
        compare(group, parts[group.size()], dtype, backend=way, label_smoothing=0.1)


def test_a_group_of_every_other_rank(group):
    others = every_other_rank()
    compare(others, PARTS[2] if others.size() == 2 else (V,))


def test_nothing_kept_and_nothing_there(group):
    parts = PARTS[group.size()]
    for way in ways():
        leaf, logits, labels, _ = shard(group, parts)
        loss = onepass.cross_entropy(logits, torch.full_like(labels, -100), group, z_loss=0.1, backend=way)
        loss.backward()
        assert loss == 0 and not leaf.grad.any()
        none = torch.ones(0, parts[group.rank()], requires_grad=True)
        loss = onepass.cross_entropy(none, torch.ones(0, dtype=torch.int64), group, backend=way)
        loss.backward()
        assert loss == 0 and none.grad.shape == none.shape


@of_two
def test_compiled_without_a_break(group):
    for way in ways():
        compare(group, PARTS[2], compiled=True, backend=way, label_smoothing=0.1)


def test_each_rank_finds_its_place(group):
    parts = PARTS[group.size()]
    place = vocab_range(parts[group.rank()], group, torch.empty(0).device)
    assert place.tolist() == [columns(parts, group.rank()).start, V]


def test_what_is_sent_is_a_size_and_the_rows_statistics(group):
    _, logits, labels, _ = shard(group, PARTS[group.size()])
    with SentSizes() as sent:
        loss = onepass.cross_entropy(logits, labels, group)
        assert sent.sizes == [1, PLANES * LEAD[0] * LEAD[1]]
        loss.backward()
    assert len(sent.sizes) == 2


def test_errors_say_what_to_do(group):
    _, logits, labels, _ = shard(group, PARTS[group.size()])
    on_cpu = logits.device.type == "cpu"
    for context in (onepass.validate, nullcontext) if on_cpu else (onepass.validate,):
        with context(), pytest.raises(IndexError, match=f"^labels must be from 0 to {V - 1}"):
            onepass.cross_entropy(logits, labels + V, group)
    for smoothing in (0.0, 0.1) if on_cpu else ():
        with pytest.raises(ValueError, match=rf"^weight must have shape \({V},\)"):
            onepass.cross_entropy(logits, labels, group, weight=torch.ones(V - 1), label_smoothing=smoothing)
    with pytest.raises(RuntimeError, match=r"^cross_entropy over a tp_group can't follow vmap"):
        torch.func.grad(lambda x: onepass.cross_entropy(x, labels, group))(logits.detach())
    assert str(onepass.explain("cross_entropy", logits, labels, group)).startswith("cross_entropy: ")
