"""Ranks of tests/parallel/test_linear_divergence.py: each runs every scenario and saves its results for the tests."""

import torch
import torch.distributed as dist
from parallel.meeting import drawn, join
from torch import nn

import onepass
from onepass.nn import LinearDivergence
from onepass.ops.loss.linear_divergence.formula import KINDS

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


def run(rank, ranks, folder, backend):
    """Run every scenario, in the same order on all ranks."""
    join(rank, ranks, folder, backend)
    group, found = dist.group.WORLD, {}
    with onepass.use_backend("torch" if backend == "gloo" else "triton"):
        for scenario in (plans, half_precision, main_grad, compiled, no_tokens, module, bad):
            found[scenario.__name__] = scenario(rank, ranks, group)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def part(whole_of_it, rank, ranks):
    first = sum(VOCABULARY[ranks][:rank])
    return whole_of_it[first : first + VOCABULARY[ranks][rank]]


def inputs(rank, ranks, dtype=torch.float32):
    """Return this rank's student, weight and bias, which have requires_grad, teacher, its weight, and labels."""
    student, weight, bias, teacher, teacher_weight, labels = whole(dtype)
    parameters = [nn.Parameter(part(t, rank, ranks).clone()) for t in (weight, bias)]
    return student.clone().requires_grad_(), *parameters, teacher, part(teacher_weight, rank, ranks).clone(), labels


def call(rank, ranks, group, dtype=torch.float32, main=None, **options):
    student, weight, bias, teacher, teacher_weight, labels = inputs(rank, ranks, dtype)
    for parameter in (weight, bias):
        if main is not None:
            parameter.main_grad = torch.zeros(parameter.shape, dtype=main, device=parameter.device)
    loss = onepass.linear_divergence(
        student, weight, teacher, teacher_weight, labels, student_bias=bias, tp_group=group, **options
    )
    return loss, student, weight, bias


def grads(loss, student, weight, bias):
    found = torch.autograd.grad(loss, (student, weight, bias), torch.full_like(loss, UPSTREAM), retain_graph=True)
    again = torch.autograd.grad(loss, (student, weight, bias), torch.full_like(loss, UPSTREAM))
    same = all(map(torch.equal, found, again))
    return {"loss": loss.detach(), "same": same, **dict(zip(("student", "weight", "bias"), found, strict=True))}


def plans(rank, ranks, group):
    """Run each kind with each reduction, in one chunk and in three, and backward twice."""
    return {
        (kind, name): grads(*call(rank, ranks, group, kind=kind, beta=0.3, **options))
        for kind in KINDS
        for name, options in OPTIONS.items()
    }


def half_precision(rank, ranks, group):
    return {kind: grads(*call(rank, ranks, group, torch.bfloat16, kind=kind)) for kind in KINDS}


def main_grad(rank, ranks, group):
    found = {}
    for reduction in ("mean", "none"):
        loss, student, weight, bias = call(rank, ranks, group, main=torch.float32, kind="jsd", reduction=reduction)
        loss.backward(torch.full_like(loss, UPSTREAM))
        found[reduction] = {"student": student.grad, "weight": weight.main_grad, "bias": bias.main_grad, "own": weight.grad}
    return found


def compiled(rank, ranks, group):
    if ranks == 4:
        return {}
    found = {}
    for kind in KINDS:
        torch._dynamo.reset()
        student, weight, bias, teacher, teacher_weight, labels = inputs(rank, ranks)

        def function(student, weight, bias, teacher, teacher_weight, labels, kind=kind):
            return onepass.linear_divergence(
                student, weight, teacher, teacher_weight, labels, student_bias=bias, tp_group=group, kind=kind
            )

        run = torch.compile(function, fullgraph=True, backend="aot_eager")
        loss = run(student, weight, bias, teacher, teacher_weight, labels)
        loss.backward()
        found[kind] = {"loss": loss.detach(), "student": student.grad, "weight": weight.grad, "bias": bias.grad}
    return found


def no_tokens(rank, ranks, group):
    """Return divergences without tokens, and with all of them ignored, and their gradients, which are zeros."""
    student, weight, _, teacher, teacher_weight, labels = inputs(rank, ranks)
    found = []
    for kind in KINDS:
        for reduction in ("mean", "none"):
            options = {"kind": kind, "reduction": reduction, "tp_group": group}
            none = student.flatten(0, 1)[:0], weight, teacher.flatten(0, 1)[:0], teacher_weight, labels.flatten()[:0]
            for given in (none, (student, weight, teacher, teacher_weight, torch.full_like(labels, -100))):
                loss = onepass.linear_divergence(*given, **options).sum()
                found += [loss.detach(), *torch.autograd.grad(loss, (student, weight))]
    return found


def module(rank, ranks, group):
    """Return the module's divergence and gradients, of parameters that all ranks initialise alike."""
    torch.manual_seed(5)
    with torch.device("cpu"):
        head = LinearDivergence(D, EVEN, bias=True, kind="jsd", temperature=0.5, tp_group=group)
    head.to(torch.get_default_device())
    student, _, _, teacher, teacher_weight, labels = whole(size=EVEN)
    student.requires_grad_()
    loss = head(student, teacher, teacher_weight[slice(*head.vocab_range)], labels)
    loss.backward()
    found = {"loss": loss.detach(), "student": student.grad, "weight": head.weight.grad}
    return found | {"range": head.vocab_range, "said": repr(head)}


def bad(rank, ranks, group):
    """Return the errors of wrong calls, which raise before anything is sent."""
    student, weight, _, teacher, teacher_weight, labels = inputs(rank, ranks)
    said = []
    for args, options in (
        ((student, weight, teacher, torch.ones(weight.shape[0] + 1, E, device=weight.device), labels), {"tp_group": group}),
        ((student, weight, teacher, teacher_weight, labels), {"tp_group": "tp"}),
        ((student, weight, teacher, teacher_weight, labels[:2]), {"tp_group": group}),
    ):
        try:
            onepass.linear_divergence(*args, **options)
            said.append("")
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said
