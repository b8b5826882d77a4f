"""Ranks of tests/parallel/test_linear_cross_entropy.py: each runs every scenario and saves its results for the tests."""

from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from parallel.meeting import drawn, join
from torch import nn

import onepass
from onepass.ops.loss.head import chunks, operands, plan, sums
from onepass.ops.loss.head.plan import HeadPlan
from onepass.ops.loss.linear_cross_entropy import row_loss
from onepass.parallel import DeferredWgrad

N, D = 24, 16
VOCABULARY = {2: (50, 27), 4: (40, 0, 25, 12)}  # ranks -> rows of each rank's weight
UPSTREAM = 1.7
WAYS = {  # name -> way, tokens at a time, columns at a time
    "keep_logits": ("keep_logits", N, 1000),
    "grad_in_forward": ("grad_in_forward", 8, 1000),
    "grad_in_forward, one chunk": ("grad_in_forward", N, 1000),
    "known_grad_scale": ("known_grad_scale", 8, 1000),
    "recompute": ("recompute", 8, 1000),
    "blocks": ("recompute", N, 16),
    "blocks of chunks": ("recompute", 8, 16),
}
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-2},
    "none": {"reduction": "none", "softcap": 5.0, "logit_scale": 0.5},
    "probabilities": {"label_smoothing": 0.1, "class_weight": torch.linspace(0, 2, sum(VOCABULARY[2]))},
}


def whole(dtype=torch.float32):
    """Return hidden, the whole weight and bias, labels (some of every rank's part ignored) and token weights."""
    generator = torch.Generator().manual_seed(0)
    size = sum(VOCABULARY[2])
    hidden = drawn(torch.randn, N // 4, 4, D, generator=generator).to(dtype)
    weight = (0.5 * drawn(torch.randn, size, D, generator=generator)).to(dtype)
    bias = drawn(torch.randn, size, generator=generator).to(dtype)
    labels = drawn(torch.randint, 0, size, (N // 4, 4), generator=generator)
    labels.view(-1)[[0, 6, 8, 9, 14, 15, 16, 20, 23]] = -100
    return hidden, weight, bias, labels, drawn(torch.rand, N // 4, 4, generator=generator)


def run(rank, ranks, folder, backend):
    """Run every scenario, in the same order on all ranks."""
    join(rank, ranks, folder, backend)
    group, found = dist.group.WORLD, {}
    with onepass.use_backend("torch" if backend == "gloo" else "triton"):
        for scenario in (
            ways, half_precision, main_grad, stats, policy, deferred, compiled, told_apart, no_tokens, overlapped, bad,
        ):  # fmt: skip
            found[scenario.__name__] = scenario(rank, ranks, group)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def part(whole_of_it, rank, ranks):
    first = sum(VOCABULARY[ranks][:rank])
    return whole_of_it[first : first + VOCABULARY[ranks][rank]]


def inputs(rank, ranks, sequence, dtype=torch.float32):
    """Return this rank's hidden, weight, bias, labels and token weights. The first three have requires_grad."""
    hidden, weight, bias, labels, weights = whole(dtype)
    rows = hidden.chunk(ranks)[rank] if sequence and hidden.shape[0] % ranks == 0 else hidden
    if sequence and hidden.shape[0] % ranks:
        rows = hidden.reshape(N, D).chunk(ranks)[rank]
        labels, weights = labels.reshape(N), weights.reshape(N)
    rows = rows.clone().requires_grad_()
    return rows, nn.Parameter(part(weight, rank, ranks).clone()), nn.Parameter(part(bias, rank, ranks).clone()), labels, weights


def probabilities(labels):
    """Return [*labels' shape, V], which sum to 1."""
    generator = torch.Generator().manual_seed(7)
    return drawn(torch.randn, labels.numel(), sum(VOCABULARY[2]), generator=generator).softmax(-1).view(*labels.shape, -1)


def forced(way):
    """Patch the planner to return the plan of a way."""

    def plan(asked, machine):
        name, rows, columns = WAYS[way]
        return HeadPlan(name, min(rows, asked.N), min(columns, asked.V), 1, 1, 0.0, 0)

    return mock.patch.object(row_loss, "make_plan", plan)


def call(rank, ranks, group, sequence, dtype=torch.float32, main=None, **options):
    hidden, weight, bias, labels, weights = inputs(rank, ranks, sequence, dtype)
    if "class_weight" in options:
        options["class_weight"] = options["class_weight"].to(hidden.device)
        labels = part(probabilities(labels).movedim(-1, 0), rank, ranks).movedim(0, -1)
    for parameter in (weight, bias):
        if main is not None:
            parameter.main_grad = torch.zeros(parameter.shape, dtype=main, device=parameter.device)
    loss = onepass.linear_cross_entropy(
        hidden, weight, labels, group, sequence_parallel=sequence, bias=bias, token_weight=weights, **options
    )
    return loss, hidden, weight, bias


def grads(loss, hidden, weight, bias):
    loss.backward(torch.full_like(loss, UPSTREAM), retain_graph=True)
    return {"loss": loss.detach(), "hidden": hidden.grad.clone(), "weight": weight.grad.clone(), "bias": bias.grad.clone()}


def ways(rank, ranks, group):
    """Run each way with each reduction, with the sequence divided or not, and backward twice."""
    found = {}
    for way in WAYS:
        for name, options in OPTIONS.items():
            for sequence in (False, True):
                if way.startswith("grad_in_forward") and name == "none":
                    continue
                more = {"grad_scale": UPSTREAM} if way == "known_grad_scale" else {}
                with forced(way):
                    made = call(rank, ranks, group, sequence, **options, **more)
                    found[way, name, sequence] = grads(*made)
                    if way != "known_grad_scale":
                        again = torch.autograd.grad(made[0], made[1:], torch.full_like(made[0], UPSTREAM))
                        same = all(torch.equal(t.grad, other) for t, other in zip(made[1:], again, strict=True))
                        found[way, name, sequence]["again"] = same
    return found


def half_precision(rank, ranks, group):
    return {
        (sequence, logits): grads(*call(rank, ranks, group, sequence, torch.bfloat16, logits_dtype=logits))
        for sequence in (False, True)
        for logits in (None, torch.float32)
    }


def main_grad(rank, ranks, group):
    """Train two microbatches, the second with grad_scale."""
    _, *made = call(rank, ranks, group, True, main=torch.float32)
    hidden, weight, bias = made
    labels, weights = inputs(rank, ranks, True)[3:]
    for more in ({}, {"grad_scale": 1.0}):
        loss = onepass.linear_cross_entropy(
            hidden, weight, labels, group, sequence_parallel=True, bias=bias, token_weight=weights, **more
        )
        loss.backward()
    return {"hidden": hidden.grad / 2, "weight": weight.main_grad / 2, "bias": bias.main_grad / 2, "own": weight.grad}


def stats(rank, ranks, group):
    """Return all statistics, and the gradients through them."""
    hidden, weight, bias, labels, _ = inputs(rank, ranks, False)
    loss, known = onepass.linear_cross_entropy(hidden, weight, labels, group, "none", bias=bias, return_stats=True)
    generator = torch.Generator().manual_seed(1)
    incoming = [drawn(torch.randn, labels.shape, generator=generator) for _ in range(4)]
    torch.autograd.backward((loss, *known[:3]), incoming)
    known = [loss.detach(), *(t.detach() for t in known)]
    return {"known": known, "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}


def mask():
    """Return which tokens of the whole vocabulary each row's distribution has, [N, V]: its label, and others."""
    labels = whole()[3].view(-1)
    columns = torch.arange(sum(VOCABULARY[2]), device=labels.device)
    return (columns == labels[:, None]) | ((columns + torch.arange(N, device=labels.device)[:, None]) % 3 > 0)


def policy(rank, ranks, group):
    """Return log_prob without and with gradients, of chunks of a few rows, and the gradients; rows are found before."""
    found = {}
    with mock.patch.object(plan, "_SHARED_FORWARD_ROWS", 8):
        plan.make_plan.cache_clear()
        for sequence in (False, True):
            hidden, weight, bias, labels, _ = inputs(rank, ranks, sequence)
            rows = onepass.kept_rows(labels, tp_group=group, sequence_parallel=sequence)
            allowed = part(mask().t(), rank, ranks).t().reshape(*labels.shape, len(weight))
            options = {"sequence_parallel": sequence, "bias": bias, "rows": rows, "vocab_mask": allowed}
            asked = partial(onepass.linear_cross_entropy, hidden, weight, labels, group, "none", **options)
            with torch.no_grad():
                old = asked(return_stats=["log_prob"])[1].log_prob
            new = asked(return_stats=["log_prob", "entropy"])[1].log_prob
            (UPSTREAM * new).sum().neg().backward()
            grads = {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
            found[sequence] = {"old": old, "new": new.detach(), **grads}
    plan.make_plan.cache_clear()
    return found


def deferred(rank, ranks, group):
    found = {}
    for sequence in (False, True):
        hidden, weight, _, labels, _ = inputs(rank, ranks, sequence)
        weight.main_grad, later = torch.zeros_like(weight), DeferredWgrad()
        loss = onepass.linear_cross_entropy(hidden, weight, labels, group, sequence_parallel=sequence, deferred=later)
        loss.backward()
        empty = not weight.main_grad.any()
        later.flush()
        found[sequence] = {"hidden": hidden.grad, "weight": weight.main_grad, "empty": empty}
    return found


def compiled(rank, ranks, group):
    if ranks == 4:
        return {}
    found = {}
    for sequence in (False, True):
        torch._dynamo.reset()
        hidden, weight, bias, labels, _ = inputs(rank, ranks, sequence)
        function = partial(onepass.linear_cross_entropy, tp_group=group, sequence_parallel=sequence, bias=bias)
        loss = torch.compile(function, fullgraph=True, backend="aot_eager")(hidden, weight, labels)
        loss.backward()
        found[sequence] = {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
    return found


def told_apart(rank, ranks, group):
    """Use a label outside the vocabulary. On all ranks alike, the call raises, or the row's loss is NaN without a gradient.

    With all labels ignored, the loss is 0.
    """
    hidden, weight, _, labels, _ = inputs(rank, ranks, False)
    labels[0, 0] = 10**6
    try:
        wrong = onepass.linear_cross_entropy(hidden, weight, labels, group, "none")
        wrong.sum().backward()
        wrong, row = wrong.detach(), hidden.grad[0, 0].clone()
    except IndexError as error:
        wrong, row = str(error), None
    ignored = onepass.linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), group)
    hidden.grad = weight.grad = None
    ignored.backward()
    none = not (hidden.grad.any() or weight.grad.any())
    return {"wrong": wrong, "row": row, "ignored": ignored.detach(), "none": none}


def no_tokens(rank, ranks, group):
    """Return losses without tokens, and their gradients, which are zeros."""
    (hidden, weight, _, _, _), labels = inputs(rank, ranks, False), drawn(torch.randint, 0, 2, (0,))
    hidden, found = hidden.detach().flatten(0, 1)[:0].requires_grad_(), {}
    for options in ({}, {"chunk_bytes": 1 << 20}, {"reduction": "none", "chunk_bytes": 1}):
        with torch.no_grad():
            onepass.linear_cross_entropy(hidden, weight, labels, group, **options)
        loss = onepass.linear_cross_entropy(hidden, weight, labels, group, **options).sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        found[str(options)] = [loss.detach(), hidden.grad, weight.grad]
    weight.main_grad, later = torch.zeros_like(weight), DeferredWgrad()
    onepass.linear_cross_entropy(hidden, weight, labels, group, deferred=later).backward()
    later.flush()
    return found | {"deferred": [weight.main_grad]}


def overlapped(rank, ranks, group):
    """Return the order of chunks' products, and of the collectives of rows' statistics and gradients."""
    happened = []

    class Watched:
        def __init__(self, pending, name):
            self.pending, self.name = pending, name

        def wait(self):
            happened.append(f"wait {self.name}")
            return self.pending.wait()

    def watch(name, start):
        def started(*args):
            happened.append(f"start {name}")
            return Watched(start(*args), name)

        return started

    def product(*args):
        happened.append("product")
        return real(*args)

    real = operands._product
    with (
        mock.patch.object(row_loss, "start_gather_parts", watch("statistics", row_loss.start_gather_parts)),
        mock.patch.object(chunks, "start_all_gather", watch("hidden", chunks.start_all_gather)),
        mock.patch.object(sums, "start_reduce_scatter", watch("gradient", sums.start_reduce_scatter)),
        mock.patch.object(operands, "_product", product),
        mock.patch("onepass.ops.loss.linear_cross_entropy._rows_to_compute", return_value=None),  # three chunks of all
        forced("grad_in_forward"),
    ):
        call(rank, ranks, group, True)
    return happened


def bad(rank, ranks, group):
    """Return the errors of wrong calls, which raise before anything is sent."""
    hidden, weight, _, labels, _ = inputs(rank, ranks, True)
    said = []

    def attempt(*args, **options):
        try:
            onepass.linear_cross_entropy(*args, **options)
            said.append("")
        except (TypeError, ValueError) as error:
            said.append(str(error))

    attempt(hidden, weight, labels[:2], group, sequence_parallel=True)
    attempt(hidden, weight, labels, "tp")
    attempt(hidden[..., :4], weight, labels, group, sequence_parallel=True)
    return said
