"""linear_cross_entropy over ranks, against the whole vocabulary in fp64."""

from functools import cache, partial
from unittest import mock

import pytest
import torch
from parallel.meeting import drawn, error_of, formulas_on_cpus
from parallel.worlds import FOURS, PAIRS
from torch import nn

import onepass
from onepass.ops.loss.head import chunks, operands, plan, sums
from onepass.ops.loss.head.plan import HeadPlan
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy_reference, row_loss
from onepass.parallel import DeferredWgrad

WORLDS = [*PAIRS, *FOURS]
rank_context = formulas_on_cpus
of_two = pytest.mark.parametrize("world", PAIRS, indirect=True, scope="module")
sequences = pytest.mark.parametrize("sequence", (False, True), ids=("whole", "divided"))
TIGHT = {"rtol": 1e-5, "atol": 1e-5}
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


def part(whole_of_it, group):
    first = sum(VOCABULARY[group.size()][: group.rank()])
    return whole_of_it[first : first + VOCABULARY[group.size()][group.rank()]]


def inputs(group, sequence, dtype=torch.float32):
    """Return this rank's hidden, weight, bias, labels and token weights. The first three have requires_grad."""
    hidden, weight, bias, labels, weights = whole(dtype)
    rows, ranks = hidden, group.size()
    if sequence and hidden.shape[0] % ranks:
        rows, labels, weights = hidden.reshape(N, D), labels.reshape(N), weights.reshape(N)
    rows = (rows.chunk(ranks)[group.rank()] if sequence else rows).clone().requires_grad_()
    return rows, *(nn.Parameter(part(t, group).clone()) for t in (weight, bias)), labels, weights


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


def call(group, sequence, dtype=torch.float32, **options):
    hidden, weight, bias, labels, weights = inputs(group, sequence, dtype)
    if "class_weight" in options:
        options["class_weight"] = options["class_weight"].to(hidden.device)
        labels = part(probabilities(labels).movedim(-1, 0), group).movedim(0, -1)
    loss = onepass.linear_cross_entropy(
        hidden, weight, labels, group, sequence_parallel=sequence, bias=bias, token_weight=weights, **options
    )
    return loss, hidden, weight, bias


def grads(loss, hidden, weight, bias):
    loss.backward(torch.full_like(loss, UPSTREAM), retain_graph=True)
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}


def exactly(dtype=torch.float32, upstream=UPSTREAM, weighted=True, biased=True, **options):
    """Return the loss and the gradients of the whole, of the same numbers in fp64."""
    hidden, weight, bias, labels, weights = whole(dtype)
    hidden, weight, bias = (t.double().requires_grad_() for t in (hidden, weight, bias))
    more = {"bias": bias} if biased else {}
    if "class_weight" in options:
        options["class_weight"] = options["class_weight"].to(hidden.device)
        labels = probabilities(labels)
    loss = linear_cross_entropy_reference(hidden, weight, labels, token_weight=weights if weighted else None, **more, **options)
    loss.backward(torch.full_like(loss, upstream))
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}


@cache
def exactly_with(option):
    return exactly(**OPTIONS[option])


def compare(group, mine, exact, sequence, tolerance=TIGHT):
    """Compare this rank's values with the whole's."""
    for name, t in mine.items():
        wanted = part(exact[name], group) if name in ("weight", "bias") else exact[name]
        if name == "hidden" and sequence:
            wanted = wanted.reshape(N, D).chunk(group.size())[group.rank()]
        torch.testing.assert_close(t.double().reshape(wanted.shape), wanted, **tolerance)


@sequences
@pytest.mark.parametrize(
    ("way", "option"),
    [(way, name) for way in WAYS for name in OPTIONS if name != "none" or not way.startswith("grad_in_forward")],
)
def test_as_the_whole_vocabulary(group, way, option, sequence):
    more = {"grad_scale": UPSTREAM} if way == "known_grad_scale" else {}
    with forced(way):
        loss, *tensors = call(group, sequence, **OPTIONS[option], **more)
        mine = grads(loss, *tensors)
        compare(group, mine, exactly_with(option), sequence)
        assert loss.dtype == torch.float32
        if way != "known_grad_scale":
            again = torch.autograd.grad(loss, tensors, torch.full_like(loss, UPSTREAM))
            assert all(map(torch.equal, again, (t.grad for t in tensors))), "a second backward has other bits"


@sequences
@pytest.mark.parametrize("logits", (None, torch.float32))
def test_in_bf16(group, sequence, logits):
    mine, exact = grads(*call(group, sequence, torch.bfloat16, logits_dtype=logits)), exactly(torch.bfloat16)
    compare(group, mine, exact, sequence, {"rtol": 3e-2, "atol": 3e-2})
    if logits is not None:
        torch.testing.assert_close(mine["loss"].double(), exact["loss"], rtol=2e-6, atol=2e-6)
    assert mine["hidden"].dtype == mine["weight"].dtype == torch.bfloat16


def test_main_grad_gathers_this_ranks_part(group):
    """Of two microbatches, the second with grad_scale."""
    hidden, weight, bias, labels, weights = inputs(group, True)
    for parameter in (weight, bias):
        parameter.main_grad = torch.zeros_like(parameter)
    for more in ({}, {"grad_scale": 1.0}):
        loss = onepass.linear_cross_entropy(
            hidden, weight, labels, group, sequence_parallel=True, bias=bias, token_weight=weights, **more
        )
        loss.backward()
    halves = {"hidden": hidden.grad / 2, "weight": weight.main_grad / 2, "bias": bias.main_grad / 2}
    compare(group, halves, exactly(upstream=1.0), True)
    assert weight.grad is None


def test_statistics_are_of_the_whole_vocabulary_and_can_be_differentiated(group):
    generator = torch.Generator().manual_seed(1)
    incoming = [drawn(torch.randn, (N // 4, 4), generator=generator) for _ in range(4)]
    hidden, weight, bias, labels, _ = inputs(group, False)
    loss, known = onepass.linear_cross_entropy(hidden, weight, labels, group, "none", bias=bias, return_stats=True)
    torch.autograd.backward((loss, *known[:3]), incoming)
    exact = dict(zip(("hidden", "weight", "bias"), (t.double().requires_grad_() for t in whole()[:3]), strict=True))
    wanted, stats = linear_cross_entropy_reference(
        exact["hidden"], exact["weight"], labels, "none", bias=exact["bias"], return_stats=True
    )
    torch.autograd.backward((wanted, *stats[:3]), [t.double() for t in incoming])
    for mine, other in zip((loss, *known[:3]), (wanted, *stats[:3]), strict=True):
        torch.testing.assert_close(mine.double(), other, **TIGHT)
    assert torch.equal(known.correct, stats.correct)
    mine = {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
    compare(group, mine, {name: t.grad for name, t in exact.items()}, False)


def mask():
    """Return which tokens of the whole vocabulary each row's distribution has, [N, V]: its label, and others."""
    labels = whole()[3].view(-1)
    columns = torch.arange(sum(VOCABULARY[2]), device=labels.device)
    return (columns == labels[:, None]) | ((columns + torch.arange(N, device=labels.device)[:, None]) % 3 > 0)


@sequences
def test_a_ratio_of_policies_starts_at_1(group, sequence):
    """log_prob without and with gradients, of chunks of a few rows, has the same bits. Rows are found before."""
    hidden, weight, bias, labels, _ = inputs(group, sequence)
    rows = onepass.kept_rows(labels, tp_group=group, sequence_parallel=sequence)
    allowed = part(mask().t(), group).t().reshape(*labels.shape, len(weight))
    options = {"sequence_parallel": sequence, "bias": bias, "rows": rows, "vocab_mask": allowed}
    asked = partial(onepass.linear_cross_entropy, hidden, weight, labels, group, "none", **options)
    plan.make_plan.cache_clear()
    with mock.patch.object(plan, "_SHARED_FORWARD_ROWS", 8):
        with torch.no_grad():
            old = asked(return_stats=["log_prob"])[1].log_prob
        new = asked(return_stats=["log_prob", "entropy"])[1].log_prob
        (UPSTREAM * new).sum().neg().backward()
    plan.make_plan.cache_clear()
    assert torch.equal(old, new) and old.count_nonzero() == 15
    exact = exactly(weighted=False, reduction="sum", vocab_mask=mask().view(N // 4, 4, -1))
    compare(group, {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}, exact, sequence)


@sequences
def test_a_deferred_gradient(group, sequence):
    hidden, weight, _, labels, _ = inputs(group, sequence)
    weight.main_grad, later = torch.zeros_like(weight), DeferredWgrad()
    loss = onepass.linear_cross_entropy(hidden, weight, labels, group, sequence_parallel=sequence, deferred=later)
    loss.backward()
    assert not weight.main_grad.any()
    later.flush()
    exact = exactly(upstream=1.0, weighted=False, biased=False)
    compare(group, {"hidden": hidden.grad, "weight": weight.main_grad}, exact, sequence)


@of_two
@sequences
def test_compiled_without_a_break(group, sequence):
    torch._dynamo.reset()
    hidden, weight, bias, labels, _ = inputs(group, sequence)
    function = partial(onepass.linear_cross_entropy, tp_group=group, sequence_parallel=sequence, bias=bias)
    loss = torch.compile(function, fullgraph=True, backend="aot_eager")(hidden, weight, labels)
    loss.backward()
    mine = {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
    compare(group, mine, exactly(upstream=1.0, weighted=False), sequence)


def test_labels_that_are_no_tokens(group):
    """CPUs raise, on all ranks alike. On GPUs the row's loss is NaN, without a gradient."""
    hidden, weight, _, labels, _ = inputs(group, False)
    labels[0, 0] = 10**6
    if labels.is_cuda:
        loss = onepass.linear_cross_entropy(hidden, weight, labels, group, "none")
        loss.sum().backward()
        assert loss.flatten().isnan().tolist() == [True] + [False] * (N - 1) and not hidden.grad[0, 0].any()
    else:
        with pytest.raises(IndexError, match=f"^labels must be from 0 to {sum(VOCABULARY[2]) - 1}"):
            onepass.linear_cross_entropy(hidden, weight, labels, group, "none")
    hidden.grad = weight.grad = None
    ignored = onepass.linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), group)
    ignored.backward()
    assert ignored == 0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("options", ({}, {"chunk_bytes": 1 << 20}, {"reduction": "none", "chunk_bytes": 1}), ids=str)
def test_no_tokens_at_all(group, options):
    (hidden, weight, _, _, _), labels = inputs(group, False), drawn(torch.randint, 0, 2, (0,))
    hidden = hidden.detach().flatten(0, 1)[:0].requires_grad_()
    with torch.no_grad():
        onepass.linear_cross_entropy(hidden, weight, labels, group, **options)
    loss = onepass.linear_cross_entropy(hidden, weight, labels, group, **options).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert not loss and not hidden.grad.any() and not weight.grad.any()
    weight.main_grad, later = torch.zeros_like(weight), DeferredWgrad()
    onepass.linear_cross_entropy(hidden, weight, labels, group, deferred=later).backward()
    later.flush()
    assert not weight.main_grad.any()


def test_what_is_sent_is_under_way_during_a_product(group):
    """Hidden states and statistics under the next product; the gradient's sum under the weight's product, and longer."""
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
        mock.patch.object(row_loss, "start_all_gather", watch("statistics", row_loss.start_all_gather)),
        mock.patch.object(chunks, "start_all_gather", watch("hidden", chunks.start_all_gather)),
        mock.patch.object(sums, "start_reduce_scatter", watch("gradient", sums.start_reduce_scatter)),
        mock.patch.object(operands, "_product", product),
        mock.patch("onepass.ops.loss.linear_cross_entropy._rows_to_compute", return_value=None),  # three chunks of all
        forced("grad_in_forward"),
    ):
        call(group, True)
    assert happened.count("product") == 3
    for name in ("statistics", "hidden"):
        starts = [at for at, what in enumerate(happened) if what == f"start {name}"]
        waits = [at for at, what in enumerate(happened) if what == f"wait {name}"]
        assert len(starts) == len(waits) == 3
        pairs = list(zip(starts, waits, strict=True))
        alone = pairs[-1] if name == "statistics" else pairs[0]  # nothing is left to do under it
        assert all("product" in happened[start:wait] for start, wait in pairs if (start, wait) != alone), happened
    assert happened[-3:] == ["wait gradient"] * 3


def test_errors_raise_before_anything_is_sent(group):
    hidden, weight, _, labels, _ = inputs(group, True)
    call = partial(error_of, onepass.linear_cross_entropy)
    assert call(hidden, weight, labels[:2], group, sequence_parallel=True).startswith("labels must have shape")
    said = call(hidden, weight, labels, "tp")
    assert said == "tp_group must be None or a torch.distributed.ProcessGroup that has this rank, but is 'tp'"
    said = call(hidden[..., :4], weight, labels, group, sequence_parallel=True)
    assert said.startswith("weight must have shape (N, 4)")


def test_the_parts_make_the_whole():
    assert {sum(sizes) for sizes in VOCABULARY.values()} == {sum(VOCABULARY[2])}
