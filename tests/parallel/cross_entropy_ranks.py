"""Ranks of tests/parallel/test_cross_entropy.py: the loss of vocab-parallel logits. Each rank saves its results for the tests."""

import os
from itertools import accumulate

import torch
import torch.distributed as dist
from parallel.meeting import drawn, join

import onepass
from onepass.kernels.language import triton
from onepass.parallel.vocab_shards import vocab_range

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
    "probabilities": {"weight": torch.linspace(0, 2, V), "label_smoothing": 0.1},
}


def run(rank, ranks, folder, backend):
    join(rank, ranks, folder, backend)
    world = dist.group.WORLD
    ways = ["torch", *(["triton"] if triton is not None and (backend == "nccl" or os.environ.get("TRITON_INTERPRET")) else [])]
    found = {}
    for way in ways:
        found[way] = {
            name: loss(world, PARTS[ranks], backend=way, mixed=name == "probabilities", **options)
            for name, options in OPTIONS.items()
        }
        found[way]["bf16"] = loss(world, PARTS[ranks], torch.bfloat16, backend=way, label_smoothing=0.1)
        found[way]["empty"] = loss(world, EMPTY[ranks], backend=way, label_smoothing=0.1)
        found[way]["wide"] = loss(world, WIDE[ranks], backend=way, label_smoothing=0.1)
        found[way]["ignored"] = loss(world, PARTS[ranks], backend=way, labels=torch.full(LEAD, -100), z_loss=0.1)
        found[way]["no rows"] = nothing(world, PARTS[ranks], way)
        if ranks == 2:
            found[way]["compiled"] = compiled(world, PARTS[ranks], backend=way, label_smoothing=0.1)
    pairs = [dist.new_group(those) for those in ([[0], [1]] if ranks == 2 else [[0, 2], [1, 3]])]
    group = pairs[rank % 2]
    found["pair"] = loss(group, PARTS[2] if ranks == 4 else (V,))
    found["place"] = vocab_range(PARTS[ranks][rank], world, torch.empty(0).device)
    found["sent"] = sent(world, PARTS[ranks])
    found["errors"] = errors(world, PARTS[ranks])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


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


def loss(group, parts, dtype=torch.float32, labels=None, mixed=False, **options):
    leaf, logits, all_labels, dy = shard(group, parts, dtype)
    labels = all_labels if labels is None else labels.to(all_labels.device)
    if mixed:
        labels = probabilities(labels)[..., columns(parts, group.rank())]
    if "weight" in options:
        options["weight"] = options["weight"].to(leaf.device)
    y = onepass.cross_entropy(logits, labels, group, **options)
    y.backward(dy if y.dim() else dy[0, 0])
    with torch.no_grad():
        alone = onepass.cross_entropy(leaf, labels, group, **options)
    return {"y": y.detach(), "dlogits": leaf.grad, "again": torch.equal(alone, y)}


def nothing(group, parts, way):
    leaf = torch.ones(0, parts[group.rank()], requires_grad=True)
    y = onepass.cross_entropy(leaf, torch.ones(0, dtype=torch.int64), group, backend=way)
    y.backward()
    return y.detach(), leaf.grad.shape


def compiled(group, parts, **options):
    leaf, _, labels, dy = shard(group, parts)
    torch._dynamo.reset()
    function = torch.compile(
        lambda x, y: onepass.cross_entropy(x * 1, y, group, **options) * 1, backend="aot_eager", fullgraph=True
    )
    y = function(leaf, labels)
    y.backward(dy[0, 0])
    return {"y": y.detach(), "dlogits": leaf.grad, "again": True}


def sent(group, parts):
    """Return the number of elements of each collective, forward and backward."""
    _, logits, labels, _ = shard(group, parts)
    sizes = {"forward": [], "backward": []}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "c10d_functional" in str(function) and "wait" not in str(function):
                sizes[now].append(args[0].numel())
            return function(*args, **(kwargs or {}))

    now = "forward"
    with Watch():
        y = onepass.cross_entropy(logits, labels, group)
    now = "backward"
    with Watch():
        y.backward()
    return sizes


def errors(group, parts):
    _, logits, labels, _ = shard(group, parts)
    said = []

    def attempt(function):
        try:
            function()
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")

    if logits.device.type == "cpu":
        attempt(lambda: onepass.cross_entropy(logits, labels + V, group))
    with onepass.validate():
        attempt(lambda: onepass.cross_entropy(logits, labels + V, group))
    attempt(lambda: torch.func.grad(lambda x: onepass.cross_entropy(x, labels, group))(logits.detach()))
    if logits.device.type == "cpu":
        for smoothing in (0.0, 0.1):
            more = {"weight": torch.ones(V - 1), "label_smoothing": smoothing}
            attempt(lambda more=more: onepass.cross_entropy(logits, labels, group, **more))
    said.append(str(onepass.explain("cross_entropy", logits, labels, group)))
    return said
