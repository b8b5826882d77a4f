"""Bad input: an error that names the argument, what it was and what it must be; and nothing changed."""

import pytest
import torch
from ops.calls import refused, says

import onepass
from onepass.nn import LinearDivergence

x, w, t, v = torch.ones(3, 4), torch.ones(6, 4), torch.ones(3, 5), torch.ones(6, 5)
y = torch.tensor([0, 5, -100])
NAN, INF = float("nan"), float("inf")
BF16 = torch.bfloat16

GIVEN = {"student": x, "student_weight": w, "teacher": t, "teacher_weight": v}
BAD = {  # what is given instead, the error, what is said: the argument, what it was, what it must be
    "student_weight of another size": (
        {"student_weight": w[:, :3]}, ValueError,
        ("student_weight must have shape", "4", "(6, 3)"),
    ),
    "teacher_weight of another size": (
        {"teacher_weight": w}, ValueError,
        ("teacher_weight must have shape", "5", "teacher", "(6, 4)"),
    ),
    "student_weight of another type": (
        {"student_weight": w.to(BF16)}, TypeError,
        ("student_weight must have student's type", "bfloat16"),
    ),
    "teacher_weight of another type": (
        {"teacher_weight": v.to(BF16)}, TypeError,
        ("teacher_weight must have teacher's type", "bfloat16"),
    ),
    "student_lora of another vocabulary": (
        {"student_lora": onepass.LoRA(w[:2], w[:5, :2])}, ValueError,
        ("student_lora.b must have shape (6, 2)", "(5, 2)"),
    ),
    "another vocabulary": (
        {"teacher_weight": v[:5]}, ValueError,
        ("teacher_weight must have as many rows as student_weight, 6", "5"),
    ),
    "no vocabulary": (
        {"student_weight": w[:0], "teacher_weight": v[:0]}, ValueError,
        ("student_weight must have at least one row", "(0, 4)"),
    ),
    "other tokens": ({"teacher": t[:2]}, ValueError, ("teacher must have student's tokens (3,)", "(2, 5)")),
    "labels of floats": ({"labels": y.float()}, TypeError, ("labels must be", "int32 or int64", "torch.float32")),
    "short labels": ({"labels": y[:2]}, ValueError, ("labels must have shape (3,)", "student", "(2,)")),
    "kind": ({"kind": "kl"}, ValueError, ("kind must be one of forward_kl, reverse_kl, jsd", "'kl'")),
    "no kind": ({"kind": None}, ValueError, ("kind must be one of forward_kl, reverse_kl, jsd", "None")),
    "beta of TRL's forward_kl": ({"kind": "jsd", "beta": 0.0}, ValueError, ("beta must be above 0", "0.0", "'forward_kl'")),
    "beta of TRL's reverse_kl": ({"kind": "jsd", "beta": 1}, ValueError, ("beta must be", "below 1", "'reverse_kl'")),
    "beta NaN": ({"beta": NAN}, ValueError, ("beta must be above 0 and below 1", "nan")),
    "beta a word": ({"beta": "half"}, TypeError, ("beta must be a number", "'half'")),
    "temperature 0": ({"temperature": 0}, ValueError, ("temperature must be finite and above 0", "0")),
    "temperature below": ({"temperature": -1.0}, ValueError, ("temperature must be finite and above 0", "-1.0")),
    "temperature infinite": ({"temperature": INF}, ValueError, ("temperature must be finite", "inf")),
    "no temperature": ({"temperature": None}, TypeError, ("temperature must be a number", "None")),
    "softcap 0": ({"softcap": 0.0}, ValueError, ("softcap must be finite and above 0, or None", "0.0")),
    "teacher_softcap": ({"teacher_softcap": -2}, ValueError, ("teacher_softcap must be finite and above 0", "-2")),
    "reduction": ({"reduction": "batchmean"}, ValueError, ("reduction must be one of none, mean, sum", "'batchmean'")),
    "ignore_index half": ({"ignore_index": 0.5}, TypeError, ("ignore_index must be an integer", "0.5", "float")),
    "ignore_index huge": ({"ignore_index": 1 << 63}, ValueError, ("ignore_index must be", "int64", str(1 << 63))),
    "teacher_bias's type": ({"teacher_bias": w[:, 0].to(BF16)}, TypeError, ("teacher_bias must have teacher's type",)),
    "group a word": ({"tp_group": "tp"}, TypeError, ("tp_group must be None or", "ProcessGroup", "'tp'")),
    "logits_dtype": ({"logits_dtype": BF16}, ValueError, ("logits_dtype must be", "float32", "bfloat16")),
    "chunk_bytes 0": ({"chunk_bytes": 0}, ValueError, ("chunk_bytes must be", "at least 1", "0")),
}


@pytest.mark.parametrize("name", BAD)
def test_an_error_names_the_argument(name):
    change, error, words = BAD[name]
    refused(onepass.linear_divergence, (), GIVEN | change, error, words)


MODULES = {
    "kind": ({"kind": "kl"}, ValueError, ("kind must be one of",)),
    "beta": ({"beta": 1.0}, ValueError, ("beta must be",)),
    "temperature": ({"temperature": 0.0}, ValueError, ("temperature must be",)),
    "reduction": ({"reduction": "batchmean"}, ValueError, ("reduction must be one of",)),
    "init_method": ({"init_method": 1}, TypeError, ("init_method must be",)),
    "tp_group": ({"tp_group": "tp"}, TypeError, ("tp_group must be",)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_says_so_when_it_is_made(name):
    options, error, words = MODULES[name]
    with pytest.raises(error) as raised:
        LinearDivergence(4, 6, **options)
    says(words, raised)


def test_a_module_without_a_weight_asks_for_one():
    with pytest.raises(ValueError, match="weight must be given"):
        LinearDivergence(4, 6, skip_weight_param_allocation=True)(x, t, v)
    with pytest.raises(ValueError, match="student's last dimension must be 4, hidden_size"):
        LinearDivergence(4, 6)(t, t, v)
