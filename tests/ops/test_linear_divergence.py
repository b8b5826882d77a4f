"""linear_divergence: its kinds against PyTorch's and TRL's formulas, plans, memory, products, LoRA, tied weights, main_grad."""

import math

import pytest
import torch
from ops.calls import backends, equal
from ops.linear_cross_entropy_oracle import taken
from ops.linear_divergence_oracle import MODES, STUDENT, Case, call, draw, forced
from torch.nn import functional as F

import onepass
import onepass.ops.loss.linear_divergence as module
from onepass.ops.loss.linear_divergence.formula import KINDS
from onepass.ops.loss.linear_divergence.plan import DivergenceInputs, make_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
kinds = pytest.mark.parametrize("kind", KINDS)
MIB = 1 << 20


def heads(tokens=20, D=12, E=7, V=70, dtype=torch.float32):
    """Return student, student_weight, teacher and teacher_weight; the first two have requires_grad."""
    made = [torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((tokens, D), (V, D), (tokens, E), (V, E))]
    return [t.requires_grad_(i < 2) for i, t in enumerate(made)]


def logs(student, student_weight, teacher, teacher_weight, temperature=1.0):
    """Logarithms of both heads' probabilities."""
    return [(F.linear(*head) / temperature).log_softmax(-1) for head in ((student, student_weight), (teacher, teacher_weight))]


# ---- what it is ----


@backends
def test_kl_is_pytorchs_with_batchmean(backend):
    given = heads()
    s, t = logs(*given, temperature=0.7)
    forward, reverse = (
        onepass.linear_divergence(*given, kind=kind, temperature=0.7, backend=backend) for kind in ("forward_kl", "reverse_kl")
    )
    torch.testing.assert_close(forward, F.kl_div(s, t, reduction="batchmean", log_target=True))
    torch.testing.assert_close(reverse, F.kl_div(t, s, reduction="batchmean", log_target=True))


@backends
@pytest.mark.parametrize("beta", (0.1, 0.5, 0.9))
def test_jsd_is_trls(beta, backend):
    """GKDTrainer.generalized_jsd_loss, written out."""
    given = heads()
    s, t = logs(*given, temperature=2.0)
    mixture = torch.logsumexp(torch.stack([s + math.log(1 - beta), t + math.log(beta)]), dim=0)
    kl_teacher = F.kl_div(mixture, t, reduction="none", log_target=True)
    kl_student = F.kl_div(mixture, s, reduction="none", log_target=True)
    expected = (beta * kl_teacher + (1 - beta) * kl_student).sum() / len(s)
    found = onepass.linear_divergence(*given, kind="jsd", beta=beta, temperature=2.0, backend=backend)
    torch.testing.assert_close(found, expected)
    asked = given[:2]
    for ours, theirs in zip(torch.autograd.grad(found, asked), torch.autograd.grad(expected, asked), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@backends
@kinds
def test_rows_that_are_ignored(kind, backend):
    """They have no divergence and no gradient, whatever their logits; the mean is over the others."""
    student, weight, teacher, teacher_weight = heads()
    labels = torch.arange(20, device=DEVICE)
    labels[3::4] = -100
    teacher[3] = math.inf
    given = student, weight, teacher, teacher_weight, labels
    rows = onepass.linear_divergence(*given, kind=kind, reduction="none", backend=backend)
    mean = onepass.linear_divergence(*given, kind=kind, backend=backend)
    kept = labels != -100
    alone = onepass.linear_divergence(student[kept], weight, teacher[kept], teacher_weight, kind=kind, backend=backend)
    assert not rows[~kept].any() and (rows[kept] > 0).all()
    torch.testing.assert_close(mean, alone)
    torch.testing.assert_close(mean, rows.sum() / kept.sum())
    for loss in (mean, rows.sum()):
        assert not torch.autograd.grad(loss, student)[0][~kept].any()


@backends
@kinds
def test_no_row_is_kept_and_no_rows_at_all(kind, backend):
    student, weight, teacher, teacher_weight = heads()
    labels = torch.full((20,), 7, device=DEVICE)
    for tokens in (20, 0):
        for reduction in ("mean", "sum", "none"):
            loss = onepass.linear_divergence(
                student[:tokens], weight, teacher[:tokens], teacher_weight, labels[:tokens], kind=kind, ignore_index=7,
                reduction=reduction, backend=backend,
            )  # fmt: skip
            assert not loss.any()
            assert not any(g.any() for g in torch.autograd.grad(loss.sum(), (student, weight)))


@backends
@kinds
def test_equal_heads_diverge_by_nothing(kind, backend):
    student, weight, *_ = heads()
    loss = onepass.linear_divergence(student, weight, student, weight, kind=kind, backend=backend)
    grads = torch.autograd.grad(loss, (student, weight))
    assert abs(loss) < 1e-6 and all(g.abs().max() < 1e-6 for g in grads)


@backends
@kinds
def test_columns_that_a_bias_leaves_out(kind, backend):
    """-inf in both biases: as without these columns. In the student's alone forward_kl is infinite."""
    student, weight, teacher, teacher_weight = heads()
    bias = torch.zeros(70, device=DEVICE)
    bias[50:] = -math.inf
    loss = onepass.linear_divergence(
        student, weight, teacher, teacher_weight, kind=kind, student_bias=bias, teacher_bias=bias, backend=backend
    )
    expected = onepass.linear_divergence(student, weight[:50], teacher, teacher_weight[:50], kind=kind, backend=backend)
    torch.testing.assert_close(loss, expected)
    grads, theirs = (torch.autograd.grad(each, (student, weight)) for each in (loss, expected))
    torch.testing.assert_close(grads, theirs)
    assert not grads[1][50:].any()
    one = onepass.linear_divergence(student, weight, teacher, teacher_weight, kind=kind, student_bias=bias, backend=backend)
    assert one.isinf() if kind == "forward_kl" else one.isfinite()


def test_the_teacher_gets_no_gradient():
    student, weight, teacher, teacher_weight = heads()
    loss = onepass.linear_divergence(student, weight, teacher.requires_grad_(), teacher_weight.requires_grad_())
    assert torch.autograd.grad(loss, (teacher, teacher_weight), allow_unused=True) == (None, None)
    assert not onepass.linear_divergence(student.detach(), weight.detach(), teacher, teacher_weight).requires_grad


def test_shapes_and_types():
    student, weight, teacher, teacher_weight = heads(24, dtype=BF16)
    lead = student.view(2, 3, 4, 12), weight, teacher.view(2, 3, 4, 7), teacher_weight
    rows = onepass.linear_divergence(*lead, reduction="none")
    assert rows.shape == (2, 3, 4) and rows.dtype == torch.float32
    flat = onepass.linear_divergence(student, weight, teacher, teacher_weight, reduction="none")
    torch.testing.assert_close(rows.flatten(), flat)
    rows.sum().backward()
    assert student.grad.dtype == weight.grad.dtype == BF16
    wide = [t.double() for t in (student, weight, teacher, teacher_weight)]
    assert onepass.linear_divergence(*wide).dtype == torch.float64


# ---- how it is done ----


@pytest.mark.parametrize("mode", MODES)
@kinds
def test_a_second_backward(kind, mode):
    case = Case(mode, kind, "mean" if mode == "grad_in_forward" else "none", bias=True)
    given, labels, dy = draw(case)
    student = STUDENT[:3]
    for name in student:
        given[name].requires_grad_()
    with forced(module, case):
        loss = call(module, case, "torch", given, labels)
        first, second = (
            torch.autograd.grad(loss, [given[name] for name in student], dy, retain_graph=True) for _ in range(2)
        )
    assert equal(first, second)


def test_a_second_backward_divides_a_call_as_the_first():
    given, labels, dy = draw(Case("keep_teacher", reduction="none", lead=(100,), D=16, E=16, V=257))
    student = [given[name].requires_grad_() for name in STUDENT[:2]]
    loss = module.linear_divergence(
        *student, given["teacher"], given["teacher_weight"], labels, reduction="none", chunk_bytes=140_000, backend="torch"
    )
    first, second = (torch.autograd.grad(loss, student, dy, retain_graph=True) for _ in range(2))
    assert equal(first, second)


@pytest.mark.parametrize(("mode", "products"), list(zip(MODES, (4, 4, 5, 6), strict=True)))
@pytest.mark.skipif(DEVICE == "cuda", reason="counts a CPU's operators")
def test_products(mode, products):
    case = Case(mode, reduction="mean" if mode == "grad_in_forward" else "none", lead=(64,), D=32, E=32, V=96, rows=32)
    given, labels, dy = draw(case)
    given["student"].requires_grad_()
    given["student_weight"].requires_grad_()

    def count(backward=True):
        def run():
            loss = call(module, case, "torch", given, labels)
            if backward:
                loss.backward(dy)

        return round(taken(run).products([given["student"], given["student_weight"]]))

    with forced(module, case):
        assert count() == products
        given["student_weight"].requires_grad_(False)
        assert count() == products - 1
        given["student_weight"].requires_grad_()
        given["student"].requires_grad_(False)
        assert count() == products - 1
        with torch.no_grad():
            assert count(False) == 2


@pytest.mark.skipif(DEVICE == "cuda", reason="measures a CPU's memory")
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_memory_is_what_the_plan_says(reduction):
    """N x V is 16 MiB a head in fp32."""
    given = heads(1024, 16, 16, 4096)
    budget = 5 * MIB
    plan = str(onepass.explain(onepass.linear_divergence, *given, reduction=reduction, chunk_bytes=budget, backend="torch"))

    def run():
        loss = onepass.linear_divergence(*given, reduction=reduction, chunk_bytes=budget, backend="torch")
        loss.backward(torch.ones_like(loss))

    run()
    for t in given[:2]:
        t.grad = None
    most = taken(run).most
    said = int(plan.partition(" MiB at most")[0].rpartition(" ")[2])
    assert most <= said * MIB + 6 * MIB  # a block of rows' intermediate results
    assert most < 16 * MIB


def test_plans():
    """One H200's, of the shapes that the note predicts."""
    inputs = DivergenceInputs(8192, 2048, 151936, 2, 303872, 303872, True, True, True, False, False, None)
    budget = 139 * 1024 * MIB // 32
    said = {
        "scalar": make_plan(inputs, budget),
        "rows": make_plan(inputs._replace(scalar=False), budget),
        "rows, little memory": make_plan(inputs._replace(scalar=False), budget // 2),
        "few rows": make_plan(inputs._replace(scalar=False, N=1024), budget),
        "forward": make_plan(inputs._replace(needs_hidden=False, needs_weight=False), budget),
        "frozen head": make_plan(inputs._replace(needs_weight=False), budget),
        "graph": make_plan(inputs._replace(scalar=False, in_graph=True), budget),
    }
    modes = {name: plan.mode for name, plan in said.items()}
    assert modes == {
        "scalar": "grad_in_forward", "rows": "keep_teacher", "rows, little memory": "recompute", "few rows": "keep_logits",
        "forward": "loss_only", "frozen head": "grad_in_forward", "graph": "recompute",
    }  # fmt: skip
    assert said["scalar"].chunks == 2 and said["frozen head"].chunks <= 2
    assert all(plan.bytes <= 4.5 * 1024 * MIB for plan in said.values())
    assert said["forward"].bytes <= 512 * MIB
    assert all(plan.rows % 128 == 0 for plan in said.values())
    shared = [make_plan(inputs._replace(shard=True, V=V), budget) for V in (0, 40000, 151936)]
    assert len({(plan.mode, plan.rows, plan.chunks) for plan in shared}) == 1
    short = make_plan(inputs._replace(chunk_bytes=1), budget)
    assert short.short and short.rows == 16 and "nothing takes as little as chunk_bytes" in str(short)


def test_explain_says_how():
    given = heads()
    said = str(onepass.explain(onepass.linear_divergence, *given))
    assert "one chunk, gradients in forward, which wait in fp32; 4 products" in said
    said = str(onepass.explain(onepass.linear_divergence, *(t.detach() for t in given)))
    assert "no gradients; 2 products" in said


# ---- heads as they come ----


@kinds
def test_lora(kind):
    """On a frozen head: gradients go through the computed weight to its factors. Below one: to hidden states alone."""
    student, weight, teacher, teacher_weight = heads()
    weight = weight.detach()
    A, B = (torch.randn(*shape, device=DEVICE).requires_grad_() for shape in ((3, 12), (70, 3)))
    losses = [
        function(student, weight + 0.5 * B @ A, teacher, teacher_weight, kind=kind)
        for function in (onepass.linear_divergence, module.linear_divergence_reference)
    ]
    for reduced in zip(*(torch.autograd.grad(loss, (student, A, B)) for loss in losses), strict=True):
        torch.testing.assert_close(*reduced, rtol=1e-4, atol=1e-5)
    below = (student @ torch.eye(12, device=DEVICE).requires_grad_()) * 1.0
    loss = onepass.linear_divergence(below, weight, teacher, teacher_weight, kind=kind)
    loss.backward()
    assert weight.grad is None and student.grad is not None


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_a_tied_weight(reduction):
    """The student's embedding is its head, and the teacher's head too."""
    tokens = torch.arange(20, device=DEVICE)
    grads = []
    for function in (onepass.linear_divergence, module.linear_divergence_reference):
        torch.manual_seed(1)
        weight = torch.randn(70, 12, device=DEVICE).requires_grad_()
        student = F.embedding(tokens, weight).tanh()
        function(student, weight, student.detach() + 1, weight, reduction=reduction).sum().backward()
        grads.append(weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
