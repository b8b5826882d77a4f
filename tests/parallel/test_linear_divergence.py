"""linear_divergence over ranks, against the whole vocabulary in fp64."""

import pytest
import torch
from parallel.meeting import drawn, error_of, formulas_on_cpus
from parallel.worlds import FOURS, PAIRS
from torch import nn

import onepass
from onepass.nn import LinearDivergence
from onepass.ops.loss.linear_divergence import linear_divergence_reference
from onepass.ops.loss.linear_divergence.formula import KINDS

WORLDS = [*PAIRS, *FOURS]
rank_context = formulas_on_cpus
of_two = pytest.mark.parametrize("world", PAIRS, indirect=True, scope="module")
kinds = pytest.mark.parametrize("kind", KINDS)
TIGHT = {"rtol": 1e-5, "atol": 1e-5}
N, D, E = 24, 16, 20
VOCABULARY = {2: (50, 27), 4: (40, 0, 25, 12)}  # ranks -> rows of each rank's weights
EVEN = 78  # the module's vocabulary
UPSTREAM = 1.7
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum", "temperature": 2.0, "chunk_bytes": 8 << 18},
    "none": {"reduction": "none", "softcap": 5.0, "teacher_softcap": 4.0, "chunk_bytes": 8 << 18},
}


def whole(dtype=torch.float32, size=None):
    """Return student, its whole weight and bias, teacher, its whole weight, and labels, one of them ignored."""
    generator = torch.Generator().manual_seed(0)
    size = size or sum(VOCABULARY[2])
    shapes = (N // 4, 4, D), (size, D), (size,), (N // 4, 4, E), (size, E)
    made = [(0.7 * drawn(torch.randn, *shape, generator=generator)).to(dtype) for shape in shapes]
    labels = drawn(torch.randint, 0, size, (N // 4, 4), generator=generator)
    labels[1, 2] = -100
    return *made, labels


def part(whole_of_it, group):
    first = sum(VOCABULARY[group.size()][: group.rank()])
    return whole_of_it[first : first + VOCABULARY[group.size()][group.rank()]]


def inputs(group, dtype=torch.float32):
    """Return this rank's student, weight and bias, which have requires_grad, teacher, its weight, and labels."""
    student, weight, bias, teacher, teacher_weight, labels = whole(dtype)
    parameters = [nn.Parameter(part(t, group).clone()) for t in (weight, bias)]
    return student.clone().requires_grad_(), *parameters, teacher, part(teacher_weight, group).clone(), labels


def call(group, tensors, **options):
    student, weight, bias, teacher, teacher_weight, labels = tensors
    return onepass.linear_divergence(
        student, weight, teacher, teacher_weight, labels, student_bias=bias, tp_group=group, **options
    )


def grads(group, dtype=torch.float32, **options):
    tensors = inputs(group, dtype)
    loss = call(group, tensors, **options)
    first, again = (torch.autograd.grad(loss, tensors[:3], torch.full_like(loss, UPSTREAM), retain_graph=True) for _ in "12")
    assert all(map(torch.equal, first, again)), "a second backward has other bits"
    return {"loss": loss.detach(), **dict(zip(("student", "weight", "bias"), first, strict=True))}


def compare(group, mine, dtype=torch.float32, upstream=UPSTREAM, tolerance=TIGHT, **options):
    """Compare this rank's values with the whole's, of the same numbers in fp64."""
    student, weight, bias, teacher, teacher_weight, labels = whole(dtype)
    student, weight, bias = (t.double().requires_grad_() for t in (student, weight, bias))
    options.pop("chunk_bytes", None)
    loss = linear_divergence_reference(
        student, weight, teacher.double(), teacher_weight.double(), labels, student_bias=bias, **options
    )
    loss.backward(torch.full_like(loss, upstream))
    exact = {"loss": loss.detach(), "student": student.grad, "weight": part(weight.grad, group), "bias": part(bias.grad, group)}
    for name, t in mine.items():
        torch.testing.assert_close(t.double(), exact[name], **tolerance)


@kinds
@pytest.mark.parametrize("option", OPTIONS)
def test_as_the_whole_vocabulary(group, option, kind):
    options = {"kind": kind, "beta": 0.3, **OPTIONS[option]}
    mine = grads(group, **options)
    compare(group, mine, **options)
    assert mine["loss"].dtype == torch.float32 and not mine["student"][1, 2].any()


@kinds
def test_in_bf16(group, kind):
    mine = grads(group, torch.bfloat16, kind=kind)
    compare(group, mine, torch.bfloat16, tolerance={"rtol": 3e-2, "atol": 3e-2}, kind=kind)
    assert mine["student"].dtype == mine["weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_main_grad_gathers_this_ranks_part(group, reduction):
    student, weight, bias, *_ = tensors = inputs(group)
    weight.main_grad, bias.main_grad = torch.zeros_like(weight), torch.zeros_like(bias)
    loss = call(group, tensors, kind="jsd", reduction=reduction)
    loss.backward(torch.full_like(loss, UPSTREAM))
    mine = {"student": student.grad, "weight": weight.main_grad, "bias": bias.main_grad}
    compare(group, mine, kind="jsd", reduction=reduction)
    assert weight.grad is None


@of_two
@kinds
def test_compiled(group, kind):
    torch._dynamo.reset()
    student, weight, bias, *_ = tensors = inputs(group)
    loss = torch.compile(lambda *tensors: call(group, tensors, kind=kind), fullgraph=True, backend="aot_eager")(*tensors)
    loss.backward()
    mine = {"loss": loss.detach(), "student": student.grad, "weight": weight.grad, "bias": bias.grad}
    compare(group, mine, upstream=1.0, kind=kind)


@kinds
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_no_tokens(group, kind, reduction):
    """Without rows, and with all of them ignored, the divergence and its gradients are zeros."""
    student, weight, _, teacher, teacher_weight, labels = inputs(group)
    none = student.flatten(0, 1)[:0], weight, teacher.flatten(0, 1)[:0], teacher_weight, labels.flatten()[:0]
    for tensors in (none, (student, weight, teacher, teacher_weight, torch.full_like(labels, -100))):
        loss = onepass.linear_divergence(*tensors, kind=kind, reduction=reduction, tp_group=group).sum()
        assert not any(t.any() for t in (loss, *torch.autograd.grad(loss, (student, weight))))


def test_the_module_is_the_unsharded_one(group):
    def head(**options):
        torch.manual_seed(5)
        with torch.device("cpu"):  # all ranks draw alike
            made = LinearDivergence(D, EVEN, bias=True, kind="jsd", temperature=0.5, **options)
        return made.to(torch.get_default_device())

    ours, unsharded = head(tp_group=group), head()
    student, _, _, teacher, teacher_weight, labels = whole(size=EVEN)
    rows, students = slice(*ours.vocab_range), [student.clone().requires_grad_() for _ in range(2)]
    loss = ours(students[0], teacher, teacher_weight[rows], labels)
    exact = unsharded(students[1], teacher, teacher_weight, labels)
    for each in (loss, exact):
        each.backward()
    torch.testing.assert_close(loss, exact, **TIGHT)
    torch.testing.assert_close(students[0].grad, students[1].grad, **TIGHT)
    torch.testing.assert_close(ours.weight.grad, unsharded.weight.grad[rows], **TIGHT)
    assert f"vocab_range={ours.vocab_range}, tp={group.size()}" in repr(ours)


def test_errors_raise_before_anything_is_sent(group):
    student, weight, _, teacher, teacher_weight, labels = inputs(group)
    longer = torch.ones(weight.shape[0] + 1, E, device=weight.device)
    said = error_of(onepass.linear_divergence, student, weight, teacher, longer, labels, tp_group=group)
    assert said.startswith("teacher_weight must have as many rows as student_weight")
    said = error_of(onepass.linear_divergence, student, weight, teacher, teacher_weight, labels, tp_group="tp")
    assert said == "tp_group must be None or a torch.distributed.ProcessGroup that has this rank, but is 'tp'"
    said = error_of(onepass.linear_divergence, student, weight, teacher, teacher_weight, labels[:2], tp_group=group)
    assert said.startswith("labels must have shape")


def test_the_parts_make_the_whole():
    assert {sum(sizes) for sizes in VOCABULARY.values()} == {sum(VOCABULARY[2])}
