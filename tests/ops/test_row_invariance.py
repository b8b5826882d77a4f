"""Under `batch_invariant()` what mixes rows raises by name, heads in chunks have the bits of whole ones, few rows of many."""

from functools import partial

import pytest
import torch
from ops.calls import needs_triton
from ops.oracle import DEVICE

import onepass
from onepass.ops.loss.head.plan import MachineSpeed, PlanInputs, make_plan
from onepass.ops.norm import formula as norms
from onepass.runtime import formula
from onepass.runtime.op import OPS, Backend
from onepass.testing.row_contract import check_rows, parts_of, row_call

BF16 = torch.bfloat16
on_a_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="of formulas on a CPU")


def numbers(*shape, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype).requires_grad_()


def check(op, *args, rows, **options):
    call = row_call(OPS[op], vars(OPS[op].call(*args, **options)), backend=options.get("backend"))
    check_rows(call, parts_of(rows, (1, 2, 5)))


# ---- what raises ----


def _lora(**options):
    return onepass.LoRA(numbers(4, 64), numbers(64, 4), **options)


MIXED = {
    "dropout": lambda x: onepass.dropout_add(x, x, 0.1),
    "dropout ": lambda x: onepass.bias_activation(x, None, "gelu", dropout=0.1),
    "dropout  ": lambda x: onepass.linear(x, numbers(64, 64), lora=_lora(dropout=0.1)),
    "route with aux": lambda x: onepass.route(x, 2, aux=0.1),
    "precision with delayed scales": lambda x: onepass.linear(x, numbers(64, 64), precision="fp8"),
    "precision with current scales": lambda x: onepass.linear(x, numbers(64, 64), precision=onepass.FP8Recipe(scaling="current")),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_raises_by_name(name):
    x = numbers(16, 64)
    MIXED[name](x)
    with onepass.batch_invariant(), pytest.raises(RuntimeError, match=f"{name.strip()} can't run under onepass.batch_invariant"):
        MIXED[name](x)


def test_a_routers_loss_has_a_value_where_nobody_wants_gradients():
    x = numbers(16, 64)
    with onepass.batch_invariant(), torch.no_grad():
        assert onepass.route(x, 2, aux=0.1).aux_loss > 0
    with onepass.batch_invariant():
        assert onepass.route(x.detach(), 2, aux=0.1).aux_loss > 0


def test_somebody_elses_kernels_raise(monkeypatch):
    monkeypatch.setitem(OPS["softmax"].others, "someone", Backend(lambda x, **_: x, lambda *_, **__: None))
    with onepass.batch_invariant(), pytest.raises(RuntimeError, match="backend 'someone' can't run under"):
        onepass.softmax(numbers(3, 4), backend="someone")


def test_dropout_that_drops_nothing_runs():
    x = numbers(16, 64)
    with onepass.batch_invariant():
        onepass.dropout_add(x, x, 0.0)
        onepass.dropout_add(x, x, 0.5, training=False)
        onepass.bias_activation(x, None, "gelu", dropout=0.0)


# ---- few rows and many ----


@pytest.mark.parametrize("backend", (pytest.param("triton", marks=needs_triton), "torch"))
def test_adapters_share_no_row(backend):
    """Without documents adapters are PyTorch's products, with them a kernel whose programs share few rows' sums."""
    x, w, a, b = numbers(100, 2048), numbers(32, 2048), numbers(1, 4, 2048), numbers(1, 32, 4)
    with onepass.use_backend(backend), onepass.batch_invariant():
        expected = onepass.lora_linear(x, w, a, b, ends=torch.tensor([100], device=DEVICE))
        for rows in (1, 2, 40):
            found = onepass.lora_linear(x[-rows:], w, a, b, ends=torch.tensor([rows], device=DEVICE))
            assert torch.equal(found, expected[-rows:]), rows


@needs_triton
def test_explain_says_which_kernel_keeps_the_promise():
    x, w = numbers(16, 64), numbers(64)
    few = "backward with a program a row"
    explain = partial(onepass.explain, onepass.rms_norm, x, w, backend="triton")
    assert few in explain().variant
    with onepass.batch_invariant():
        assert few not in explain().variant


@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=("fp32", "bf16"))
def test_rows_that_lie_apart(dtype):
    """PyTorch rounds twice where a layer's rows lie apart, and multiplies them by other kernels where nothing asks for grads."""
    x, w, bias = numbers(6, 8, 96, dtype=dtype), numbers(40, 48, dtype=dtype), numbers(40, dtype=dtype)
    with onepass.batch_invariant():
        for added in (bias, None):
            expected = onepass.linear(x[..., :48].contiguous(), w, added)
            with torch.no_grad():
                assert torch.equal(onepass.linear(x[..., :48], w, added), expected)
                assert torch.equal(onepass.linear(x[:, 3:4, :48], w, added), expected[:, 3:4])
                assert torch.equal(onepass.linear(x[1, 2, :48], w, added), expected[1, 2])


@pytest.mark.parametrize("op", ("linear", "norm_linear", "activation_linear"))
def test_eight_bits_by_row(op):
    x, w, how = numbers(40, 64), numbers(48, 64), {"precision": onepass.FP8Recipe(scaling="row")}
    vectors = {"linear": (), "norm_linear": (numbers(64),), "activation_linear": ()}[op]
    more = {"activation": "gelu"} if op == "activation_linear" else {}
    check(op, x, *vectors, w, rows=40, **how, **more)


# ---- heads ----

GPU = MachineSpeed(7e14, 4.3e12, 141 << 30, (141 << 30) // 32, (141 << 30) // 10)
HEAD = PlanInputs(8192, 4096, 128256, 2, False, True, True, True, False, False, None, False, None, invariant=True)


@pytest.mark.parametrize("low_rank", (0, 16))
@pytest.mark.parametrize("shard", (False, True))
@pytest.mark.parametrize("scalar", (False, True))
def test_a_plan_keeps_to_ways_with_the_same_bits(scalar, shard, low_rank):
    """Whatever the number of tokens and the budget: a row's logits are whole, and where gradients are made is the options'."""
    for tokens in (1, 64, 1000, 8192, 70000):
        for budget in (None, 1, 1 << 20, 256 << 20, 64 << 30):
            what = HEAD._replace(N=tokens, chunk_bytes=budget, scalar=scalar, shard=shard, low_rank=low_rank)
            for needs in (True, False):
                plan = make_plan(what._replace(needs_hidden=needs, needs_weight=needs), GPU)
                modes = ("loss_only",) if not needs else ("grad_in_forward",) if scalar else ("keep_logits", "recompute")
                assert plan.blocks == 1 and plan.mode in modes, (tokens, budget, plan)


@pytest.mark.parametrize("backend", (pytest.param("triton", marks=needs_triton), "torch"))
@pytest.mark.parametrize("lora", (False, True), ids=("", "lora"))
@pytest.mark.parametrize("reduction", ("none", "sum"))
def test_a_head_in_chunks_has_the_bits_of_the_whole(reduction, lora, backend):
    hidden, w = numbers(150, 24, dtype=BF16), numbers(600, 24, dtype=BF16)
    labels = torch.arange(150, device=DEVICE) * 4
    options = {"temperature": 0.7, "return_stats": True, "reduction": reduction, "backend": backend}
    options |= {"lora": onepass.LoRA(numbers(4, 24, dtype=BF16), numbers(600, 4, dtype=BF16))} if lora else {}

    def run(rows=slice(None), **more):
        h = hidden.detach()[rows].requires_grad_()
        loss, stats = onepass.linear_cross_entropy(h, w, labels[rows], **options, **more)
        (gradient,) = torch.autograd.grad(loss.sum(), h)
        return ([] if loss.dim() == 0 else [loss]) + [stats.logsumexp, stats.log_prob, stats.entropy, gradient]

    with onepass.batch_invariant():
        whole = run()
        for mine, theirs in zip(run(chunk_bytes=1 << 14), whole, strict=True):
            assert torch.equal(mine, theirs)
        for rows in (slice(7, 8), slice(100, 133)):
            for mine, theirs in zip(run(rows), whole, strict=True):
                assert torch.equal(mine, theirs[rows])
        with torch.no_grad():
            found = onepass.linear_cross_entropy(hidden, w, labels, **options)[1].log_prob
        assert torch.equal(found, whole[-3])


# ---- without the switch ----


@on_a_cpu
@pytest.mark.parametrize("rows", (3, 40))
def test_small_formulas_run_once_each_way(monkeypatch, rows):
    """A norm that is one block keeps what autograd keeps; a large one, or under the switch, is computed again by blocks."""
    monkeypatch.setattr(formula, "_BLOCK", 64)  # a large input has 32 of these numbers
    calls, norm_formula = [], norms.norm_formula
    monkeypatch.setattr(
        norms, "norm_formula", lambda x, *rest, **options: calls.append(len(x)) or norm_formula(x, *rest, **options)
    )

    def run():
        calls.clear()
        x, weight, w = numbers(rows, 64), numbers(64), numbers(8, 64)
        y = onepass.norm_linear(x, weight, w, backend="torch")
        torch.autograd.grad(y.sum(), (x, weight, w))
        return calls

    assert run() == ([3] * 2 if rows == 3 else [1] * 120)
    with onepass.batch_invariant():
        assert run() == [64] * 3


@on_a_cpu
def test_a_small_routers_sigmoid_is_kept():
    weights = onepass.route(numbers(4, 8), 2, score="sigmoid", normalise=False, backend="torch").weights
    multiplied = weights.grad_fn.next_functions[0][0]
    assert multiplied.next_functions[0][0].name() == "SigmoidBackward0"
