"""How calls of linear_cross_entropy are divided: each way is taken somewhere, budgets are kept, and plans cost what they say."""

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.calls import needs_triton
from ops.linear_cross_entropy_oracle import ALL, op, taken
from ops.oracle import BF16, DEVICE, FP32

import onepass
from onepass.ops.loss.head.plan import MachineSpeed, PlanInputs, machine_speed, make_plan
from onepass.ops.loss.row_functions import APART

on_a_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="of tensors on a CPU")
GPU = MachineSpeed(7e14, 4.3e12, 141 << 30, (141 << 30) // 32, (141 << 30) // 10)
CPU = machine_speed(torch.device("cpu"), 4)
HEAD = PlanInputs(8192, 4096, 128256, 2, False, True, True, True, False, False, None, False, None)


def asked(N=HEAD.N, D=HEAD.D, V=HEAD.V, **more):
    return HEAD._replace(N=N, D=D, V=V, **more)


def returned(asked):
    """Bytes of the gradients that the caller gets."""
    weight = asked.V * asked.D if asked.needs_weight and not asked.into_main else 0
    return (asked.N * asked.D * asked.needs_hidden + weight) * asked.size


# ---- which plan ----

TAKEN = {  # of a call: the way, whether tokens are in several chunks, whether the vocabulary is in several blocks
    "one chunk that waits": (asked(), GPU, "keep_logits", False, False),
    "of rows' losses too": (asked(scalar=False), GPU, "keep_logits", False, False),
    "chunks of a long batch": (asked(32768), GPU, "grad_in_forward", True, False),
    "of a large vocabulary": (asked(D=2304, V=256000, N=32768), GPU, "grad_in_forward", True, False),
    "of a frozen head": (asked(32768, needs_weight=False), GPU, "grad_in_forward", True, False),
    "logits that are not rounded": (asked(wide=True), GPU, "grad_in_forward", True, False),
    "a promise": (asked(into_main=True, promised=True), GPU, "known_grad_scale", True, False),
    "blocks of a small budget": (asked(chunk_bytes=256 << 20), GPU, "recompute", False, True),
    "rows' losses of a long batch": (asked(65536, scalar=False), GPU, "recompute", True, True),
    "a million tokens of vocabulary": (asked(V=1 << 20), GPU, "recompute", False, True),
    "of rows of a wide vocabulary": (asked(16384, 2048, 248320, scalar=False), GPU, "keep_logits", False, False),
    "nobody asks for gradients": (asked(needs_hidden=False, needs_weight=False), GPU, "loss_only", True, False),
    "nobody does of a few": (asked(512, needs_hidden=False, needs_weight=False), GPU, "loss_only", False, False),
    "nobody does of a long batch": (asked(65536, needs_hidden=False, needs_weight=False), GPU, "loss_only", True, False),
    "a few tokens": (asked(64, 32, 500, size=4), CPU, "keep_logits", False, False),
    "a head on a CPU": (asked(4096, 768, 50257, size=4), CPU, "grad_in_forward", True, False),
    "a compiled graph": (asked(mode="grad_in_forward"), GPU, "grad_in_forward", False, False),
    "a compiled graph of rows' losses": (asked(mode="recompute", scalar=False), GPU, "recompute", False, True),
}


@pytest.mark.parametrize("name", TAKEN)
def test_each_way_is_the_one_taken_somewhere(name):
    what, machine, way, chunks, blocks = TAKEN[name]
    plan = make_plan(what, machine)
    assert (plan.mode, plan.chunks > 1, plan.blocks > 1) == (way, chunks, blocks), plan


SHAPES = st.tuples(st.integers(0, 1 << 17), st.integers(1, 8192), st.integers(1, 1 << 20))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SHAPES, st.sampled_from((2, 4)), st.sampled_from((None, 1, 1 << 20, 64 << 20, 1 << 30)), st.integers(0, 31), st.booleans())
def test_a_plan_covers_everything_and_fits_what_it_may_take(shape, size, chunk_bytes, flags, small):
    hidden, weight, scalar, main, promised = (bool(flags >> i & 1) for i in range(5))
    what = PlanInputs(*shape, size, False, hidden, weight, scalar, main, promised, None, False, chunk_bytes)
    machine = CPU if small else GPU
    plan = make_plan(what, machine)
    assert plan.rows * plan.chunks >= what.N > plan.rows * (plan.chunks - 1) or what.N == 0
    assert plan.columns * plan.blocks >= what.V > plan.columns * (plan.blocks - 1)
    assert plan.blocks == 1 or plan.columns % APART == 0  # of a padded weight the last block has no more room than the others
    if not hidden and not weight:
        assert plan.mode == "loss_only"
    elif promised:
        assert plan.mode == "known_grad_scale"
    else:
        assert plan.mode in ("keep_logits", "recompute", *(["grad_in_forward"] if scalar else []))
    assert plan.blocks == 1 or plan.mode == "recompute"
    assert plan.chunks == 1 or plan.mode != "keep_logits"
    budget = (machine.budget if scalar else machine.kept) if chunk_bytes is None else chunk_bytes
    accumulator = 4 * what.N * what.D if hidden else 0
    least = max(16, 128 * (what.N >= 1024)) * max(256, what.V if what.promised or plan.mode == "loss_only" else 0) * 2 * size
    waiting = 8 * what.V * what.D if promised and weight else 4 * 256 * what.D
    assert plan.bytes <= returned(what) + accumulator + max(budget, least + waiting, 4 * what.N * 256), (what, plan)


def test_the_working_set_of_a_budget_does_not_grow_with_the_tokens():
    """Beyond what is returned, and one sum in fp32 of the tokens or of the vocabulary."""
    for budget in (64 << 20, 256 << 20, 1 << 30):
        for more in ({}, {"scalar": False}, {"into_main": True, "promised": True}, {"needs_weight": False}):
            sizes = []
            for N in (4096, 16384, 65536, 262144):
                what = asked(N, chunk_bytes=budget, **more)
                plan = make_plan(what, GPU)
                sums = 4 * N * what.D if plan.mode != "known_grad_scale" else 0
                sizes.append(plan.bytes - returned(what) - sums)
            assert max(sizes) <= max(budget, 4096 * 2 * 16 * 64), (budget, more, sizes)


def test_little_memory_is_few_tokens_and_what_is_not_enough_is_said():
    for more in ({"promised": True, "into_main": True}, {"needs_hidden": False, "needs_weight": False}):
        plan = make_plan(asked(chunk_bytes=5 << 20, **more), GPU)
        assert plan.rows == 16 and "nothing takes as little" not in str(plan), plan
        plan = make_plan(asked(chunk_bytes=1 << 20, **more), GPU)
        assert plan.rows == 16 and str(plan).endswith("; nothing takes as little as chunk_bytes"), plan


@pytest.mark.parametrize("shape", [(8192, 4096, 151936), (16384, 2048, 248320), (65536, 8192, 128256), (8192, 768, 50257)])
def test_without_gradients_logits_take_488_mib(shape):
    plan = make_plan(asked(*shape, needs_hidden=False, needs_weight=False), GPU)
    assert plan.mode == "loss_only" and plan.blocks == 1 and plan.rows >= 128 and plan.bytes <= 488 << 20


def test_more_memory_is_never_slower():
    before = None
    for budget in (1 << 20, 16 << 20, 256 << 20, 1 << 30, 4 << 30, 16 << 30):
        plan = make_plan(asked(16384, chunk_bytes=budget), GPU)
        assert before is None or plan.seconds <= 1.1 * before, plan
        before = plan.seconds


# ---- what a plan says it takes ----


def measured(what, backend, reduction="mean", main=False, **options):
    """The plan that `explain` tells of a call, and what the call takes on a CPU, gradients included."""
    dtype, labels = FP32 if what.size == 4 else BF16, torch.randint(what.V, (what.N,))
    hidden = torch.randn(what.N, what.D, dtype=dtype, requires_grad=what.needs_hidden)
    weight = torch.nn.Parameter(torch.randn(what.V, what.D, dtype=dtype), requires_grad=what.needs_weight)
    if main:
        weight.main_grad = torch.zeros_like(weight, dtype=FP32)

    def run():
        loss = op(reduction=reduction, backend=backend, chunk_bytes=what.chunk_bytes, **options)(hidden, weight, labels)
        if loss.requires_grad:
            loss.backward(torch.ones_like(loss))
        return loss, hidden.grad, weight.grad

    return make_plan(what, CPU), taken(run), (hidden, weight)


SMALL = asked(32, 64, 8192, size=4)
MEASURED = {  # a call, the way that is taken, how it is asked for
    "loss_only": (SMALL._replace(needs_hidden=False, needs_weight=False, chunk_bytes=1 << 19), "loss_only", {}),
    "keep_logits": (SMALL, "keep_logits", {}),
    "known_grad_scale": (
        SMALL._replace(into_main=True, promised=True, chunk_bytes=1 << 19),
        "known_grad_scale",
        {"grad_scale": 1.0, "main": True},
    ),
    "promised, not into main_grad": (SMALL._replace(promised=True, chunk_bytes=1 << 19), "known_grad_scale", {"grad_scale": 1.0}),
    "blocks": (SMALL._replace(V=2048, chunk_bytes=1 << 17), "recompute", {}),
    "blocks into main_grad": (SMALL._replace(V=2048, into_main=True, chunk_bytes=1 << 17), "recompute", {"main": True}),
    "frozen head": (SMALL._replace(needs_weight=False, chunk_bytes=1 << 19), "grad_in_forward", {}),
}


@needs_triton
@on_a_cpu
@pytest.mark.parametrize("name", MEASURED)
def test_what_is_predicted_is_what_is_allocated(name):
    what, way, options = MEASURED[name]
    plan, found, _ = measured(what, "triton", **options)
    assert plan.mode == way, plan
    few = 100 * what.N + 512  # what is known of each token
    assert abs(found.most - plan.bytes) <= 0.03 * plan.bytes + few, (found.most, plan)


@on_a_cpu
@pytest.mark.parametrize("name", ["loss_only", "known_grad_scale", "blocks", "blocks into main_grad", "frozen head"])
def test_a_budget_is_kept_on_a_cpu(name):
    what, _, options = MEASURED[name]
    what = what._replace(N=1024, chunk_bytes=8 << 20)
    _, found, _ = measured(what, "torch", **options)
    sums = 4 * what.N * what.D if what.needs_hidden else 0
    assert found.most <= returned(what) + sums + 1.25 * what.chunk_bytes + 100 * what.N, found


@on_a_cpu
def test_sums_of_16_bits_widen_some_columns_at_a_time():
    """A CPU has no product of 16 bits with fp32 sums."""
    what = SMALL._replace(N=512, V=32768, size=2, into_main=True, promised=True, chunk_bytes=32 << 20)
    _, found, _ = measured(what, "torch", grad_scale=1.0, main=True)
    assert found.most <= returned(what) + 1.5 * what.chunk_bytes, found


@on_a_cpu
def test_four_times_the_tokens_take_no_more_but_for_what_is_returned():
    for options in ({}, {"reduction": "none"}, {"grad_scale": 1.0, "main": True}):
        sizes = []
        for N in (256, 1024):
            more = {"scalar": "reduction" not in options, "promised": "main" in options, "into_main": "main" in options}
            what = asked(N, 32, 4096, size=4, chunk_bytes=2 << 20, **more)
            sizes.append(measured(what, "torch", **options)[1].most - 2 * 4 * what.N * what.D)
        assert sizes[1] <= 1.1 * sizes[0] + 100 * 1024, (options, sizes)


def taken_with(way, N, D, V, asking):
    """What the gradient of one side takes."""
    sides, labels = {"hidden": torch.randn(N, D), "weight": torch.randn(V, D)}, torch.randint(V, (N,))
    sides[asking].requires_grad_()
    more = {"grad_scale": 1.0} if "known_grad_scale" in way else {}
    return taken(lambda: op(way, **more)(*sides.values(), labels).backward())


@on_a_cpu
def test_what_is_frozen_takes_no_memory():
    """Nothing of the frozen side's size is allocated, whichever way it is done."""
    for way in ("keep_logits", "grad_in_forward", "known_grad_scale", "recompute"):
        found = taken_with((way, 2, 16 if way == "recompute" else ALL), 4, 4096, 64, "hidden")
        assert found.most < 64 * 4096 * 4 / 2, (way, found)
        found = taken_with((way, 256, ALL), 512, 1024, 8, "weight")
        assert found.most < 512 * 1024 * 4 / 2, (way, found)


@on_a_cpu
def test_a_promise_takes_no_buffer_of_the_weights_size():
    hidden, labels = torch.randn(64, 512, requires_grad=True), torch.randint(2048, (64,))
    weight = torch.nn.Parameter(torch.randn(2048, 512))  # 4 MiB
    weight.main_grad = torch.zeros_like(weight)
    way = ("known_grad_scale", 16, ALL)
    found = taken(lambda: op(way, grad_scale=1.0)(hidden, weight, labels).backward())
    assert found.most < 2048 * 512 * 4 / 4, found
    del weight.main_grad
    assert taken(lambda: op(way, grad_scale=1.0)(hidden, weight, labels).backward()).most >= 2048 * 512 * 4


@on_a_cpu
@pytest.mark.slow
def test_a_cpus_peak_is_a_fifth_of_eagers():
    N, V, D = 1024, 50257, 64
    hidden, labels = torch.randn(N, D, requires_grad=True), torch.randint(V, (N,))
    weight = torch.nn.Parameter(torch.randn(V, D) / D**0.5)
    ours = taken(lambda: op()(hidden, weight, labels).backward())
    hidden.grad = weight.grad = None
    eager = taken(lambda: F.cross_entropy(F.linear(hidden, weight), labels).backward())
    assert ours.most <= eager.most / 5, (ours, eager)


# ---- what is said of it ----


@on_a_cpu
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])
def test_explain_tells_the_plan_its_time_and_its_bytes(backend):
    hidden, labels = torch.empty(1024, 64, requires_grad=True), torch.zeros(1024, dtype=torch.int64)
    weight = torch.nn.Parameter(torch.empty(8192, 64))
    said = {
        "its logits wait for backward": {"reduction": "none"},
        r"\d+ chunks of \d+ tokens, gradients in forward, which wait": {"chunk_bytes": 16 << 20},
        "scaled as grad_scale says": {"grad_scale": 1.0},
        r"\d+ blocks of \d+ columns of the vocabulary": {"chunk_bytes": 1 << 20},
    }
    for words, options in said.items():
        variant = onepass.explain("linear_cross_entropy", hidden, weight, labels, backend=backend, **options).variant
        assert re.search(words, variant), variant
        assert re.search(r"about [\d.]+ (ms|us) forward and backward, \d+ MiB at most, gradients included", variant), variant
    with torch.no_grad():
        explained = onepass.explain("linear_cross_entropy", hidden, weight, labels, backend=backend)
    assert "no gradients" in str(explained)


@on_a_cpu
def test_a_policys_fp32_logits_wait():
    """Made again they would take a fourth product. Their gradient is of 16 bits, and can't take their place: 6 bytes a logit."""
    policy = asked(8192, 4096, 151936, scalar=False, wide=True)
    plan, narrow = make_plan(policy, GPU), make_plan(policy._replace(wide=False), GPU)
    assert plan.mode == narrow.mode == "keep_logits" and plan.seconds <= 1.15 * narrow.seconds
    assert plan.bytes - narrow.bytes == 4 * policy.N * policy.V
    assert make_plan(policy._replace(N=32768), GPU).mode == "recompute"
