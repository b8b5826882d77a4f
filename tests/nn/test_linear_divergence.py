"""nn.LinearDivergence on one rank: torch.nn's parameters and start, every option given to the op, a tied head, main_grad."""

import copy

import pytest
import torch
from torch import nn

import onepass
from onepass.nn import LinearDivergence, sharded_state_dict
from onepass.parallel import MainGrads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {
    "kind": "jsd", "beta": 0.2, "temperature": 2.0, "softcap": 3.0, "teacher_softcap": 2.0, "reduction": "sum", "ignore_index": 3,
    "logits_dtype": torch.float32, "chunk_bytes": 4096,
}  # fmt: skip


def given(rows=77):
    """Return the student's and the teacher's hidden states, the teacher's weight and bias, and labels."""
    student, teacher = torch.randn(3, 5, 12, device=DEVICE), torch.randn(3, 5, 8, device=DEVICE)
    labels = torch.randint(rows, (3, 5), device=DEVICE)
    labels[0, 1] = -100
    return student.requires_grad_(), teacher, torch.randn(rows, 8, device=DEVICE), torch.randn(rows, device=DEVICE), labels


@pytest.mark.parametrize("options", ({}, OPTIONS), ids=("usual", "all"))
def test_it_is_the_op_with_its_options(options):
    torch.manual_seed(5)
    head = LinearDivergence(12, 77, bias=True, device=DEVICE, **options)
    torch.manual_seed(5)
    plain = nn.Linear(12, 77, device=DEVICE)
    assert list(head.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(head.state_dict()[name], t) for name, t in plain.state_dict().items())
    student, teacher, weight, bias, labels = given()
    expected = onepass.linear_divergence(
        student, plain.weight, teacher, weight, labels, student_bias=plain.bias, teacher_bias=bias, **options
    )
    assert torch.equal(head(student, teacher, weight, labels, teacher_bias=bias), expected)
    rows = head(student, teacher, weight, labels, reduction="none")
    assert rows.shape == (3, 5)


def test_repr_says_what_is_not_usual():
    assert repr(LinearDivergence(12, 77)) == "LinearDivergence(12, 77, bias=False, kind='forward_kl')"
    said = repr(LinearDivergence(12, 77, **OPTIONS))
    assert all(f"{name}={value!r}" in said for name, value in OPTIONS.items())


def test_a_students_own_head():
    """Tied, or given with the call."""
    student, teacher, weight, _, labels = given()
    lm_head = nn.Linear(12, 77, bias=False, device=DEVICE)
    tied = LinearDivergence(12, 77, device=DEVICE)
    tied.weight = lm_head.weight
    without = LinearDivergence(12, 77, skip_weight_param_allocation=True)
    assert not list(without.parameters())
    losses = [tied(student, teacher, weight, labels), without(student, teacher, weight, labels, weight=lm_head.weight)]
    assert torch.equal(*losses)
    losses[0].backward()
    assert lm_head.weight.grad is not None and weight.grad is None


def test_main_grads_and_copies():
    student, teacher, weight, _, labels = given()
    head = LinearDivergence(12, 77, bias=True, device=DEVICE)
    twin = copy.deepcopy(head)
    grads = MainGrads(head.parameters())
    head(student, teacher, weight, labels).backward()
    twin(student, teacher, weight, labels).backward()
    for mine, theirs in zip(head.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.main_grad, theirs.grad)
    assert grads is not None
    assert sharded_state_dict(head).keys() == {"weight", "bias"}
