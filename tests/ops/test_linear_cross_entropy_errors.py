"""Bad input: an error that names the argument, what it was and what it must be; and nothing changed."""

import pytest
import torch
from ops.calls import refused

import onepass
from onepass.parallel import DeferredWgrad
from onepass.testing.poison import unchanged

LORA = onepass.LoRA
x, w, y = torch.ones(3, 4), torch.ones(6, 4), torch.tensor([0, 5, -100])
bias, rows, p = torch.ones(6), torch.ones(3), torch.ones(3, 6)
NAN, INF = float("nan"), float("inf")
FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

BAD = {  # the call's arguments, its error, what is said: the argument, what it was, what it must be
    "weight of another size": ((x, w[:, :3], y), {}, ValueError, ("weight must have shape", "4", "hidden", "(6, 3)")),
    "weight transposed": ((x, w.t(), y), {}, ValueError, ("weight must have shape", "4", "(4, 6)")),
    "weight a vector": ((x, w[0], y), {}, ValueError, ("weight must have shape", "(4,)")),
    "weight of another type": ((x, w.to(BF16), y), {}, TypeError, ("weight must have hidden's type", "float32", "bfloat16")),
    "no vocabulary": ((x, w[:0], y), {}, ValueError, ("weight must have at least one row", "(0, 4)")),
    "lora no LoRA": ((x, w, y), {"lora": (w[:2], w[:, :2])}, TypeError, ("lora must be an onepass.LoRA", "tuple")),
    "lora.a of another size": (
        (x, w, y), {"lora": LORA(w[:2, :3], w[:, :2])}, ValueError, ("lora.a must have shape (2, 4)", "(2, 3)"),
    ),
    "lora.b of another vocabulary": (
        (x, w, y), {"lora": LORA(w[:2], w[:5, :2])}, ValueError, ("lora.b must have shape (6, 2)", "(5, 2)"),
    ),
    "lora.b of another rank": ((x, w, y), {"lora": LORA(w[:2], w)}, ValueError, ("lora.b must have shape (6, 2)", "(6, 4)")),
    "lora.a a vector": ((x, w, y), {"lora": LORA(w[0], w)}, ValueError, ("lora.a must have shape", "(4,)")),
    "lora.a of another type": (
        (x, w, y), {"lora": LORA(w[:2].to(BF16), w[:, :2])}, TypeError, ("lora.a must have hidden's type", "float32", "bfloat16"),
    ),
    "lora.b elsewhere": (
        (x, w, y), {"lora": LORA(w[:2], w[:, :2].to("meta"))}, ValueError, ("lora.b must be on cpu", "hidden", "meta"),
    ),
    "lora.b no tensor": ((x, w, y), {"lora": LORA(w[:2], None)}, TypeError, ("lora.b must be", "NoneType")),
    "lora of rank 0": ((x, w, y), {"lora": LORA(w[:0], w[:, :0])}, ValueError, ("lora.a must have at least one row", "(0, 4)")),
    "lora.scale a tensor": (
        (x, w, y), {"lora": LORA(w[:2], w[:, :2], torch.tensor(1.0))}, TypeError, ("lora.scale must be a number", "Tensor"),
    ),
    "lora.scale infinite": (
        (x, w, y), {"lora": LORA(w[:2], w[:, :2], INF)}, ValueError, ("lora.scale must be finite", "inf"),
    ),
    "labels of floats": ((x, w, y.float()), {}, ValueError, ("labels of torch.float32 are probabilities", "(3, 6)", "hidden")),
    "probabilities of hidden's shape": ((x, w, x), {}, ValueError, ("labels of torch.float32 are prob", "(3, 6)", "(3, 4)")),
    "probabilities and a mask": (
        (x, w, p), {"vocab_mask": bias > 0}, ValueError, ("vocab_mask and labels that are probabilities exclude each other",),
    ),
    "probabilities and rows": (
        (x, w, p), {"rows": onepass.kept_rows(y)}, ValueError, ("rows and labels that are probabilities exclude each other",),
    ),
    "probabilities' label": ((x, w, p), {"return_stats": ["correct"]}, ValueError, ("return_stats can't have correct",)),
    "short labels": ((x, w, y[:2]), {}, ValueError, ("labels must have shape (3,)", "hidden", "(2,)")),
    "labels of hidden's shape": ((x, w, x.long()), {}, ValueError, ("labels must have shape (3,)", "(3, 4)")),
    "labels of a scalar": ((x[0], w, y[:1]), {}, ValueError, ("labels must have shape ()", "(1,)")),
    "label too large": ((x, w, y + 1), {}, IndexError, ("labels must be from 0 to 5", "-100", "2 of them", "one is 6")),
    "label below": ((x, w, y, None, "mean", 5), {}, IndexError, ("labels must be from 0 to 5", "ignore_index 5", "one is -100")),
    "reduction": ((x, w, y, None, "average"), {}, ValueError, ("reduction must be one of none, mean, sum", "'average'")),
    "a statistic by itself": ((x, w, y), {"return_stats": "entropy"}, TypeError, ("return_stats must", "sequence", "'entropy'")),
    "unknown statistic": (
        (x, w, y),
        {"return_stats": ["entropy", "kl"]},
        ValueError,
        ("logsumexp, log_prob, entropy, correct, log_sum_sq_probs, mean_logit", "'kl'"),
    ),
    "temperature": ((x, w, y), {"temperature": 0.0}, ValueError, ("temperature must be finite and above 0", "0.0")),
    "negative temperature": ((x, w, y), {"temperature": -1.0}, ValueError, ("temperature must be finite and above 0", "-1.0")),
    "temperature of a word": ((x, w, y), {"temperature": "cold"}, TypeError, ("temperature must be a number", "'cold'")),
    "stats of too many columns": (
        (x[:, :1], w[:1, :1].expand((1 << 24) + 1, 1), y),
        {"return_stats": True},
        ValueError,
        ("return_stats", str(1 << 24), str((1 << 24) + 1)),
    ),
    "ignore_index past int32 labels": (
        (x, w, y.int(), None, "mean", 1 << 31),
        {},
        ValueError,
        ("ignore_index must be", "int32 labels", str(1 << 31)),
    ),
    "group a word": ((x, w, y, "tp"), {}, TypeError, ("tp_group must be None or", "ProcessGroup", "'tp'")),
    "bias of another type": ((x, w, y), {"bias": bias.to(FP16)}, TypeError, ("bias must have hidden's type", "float16")),
    "token_weight of classes": ((x, w, y), {"token_weight": bias}, ValueError, ("token_weight must have shape (3,)", "(6,)")),
    "smoothing above": ((x, w, y), {"label_smoothing": 1.1}, ValueError, ("label_smoothing must be from 0 to 1", "1.1")),
    "softcap of zero": ((x, w, y), {"softcap": 0.0}, ValueError, ("softcap must be", "above 0", "0.0")),
    "logits of fp64": ((x, w, y), {"logits_dtype": FP64}, ValueError, ("logits_dtype must be torch.float32", "torch.float64")),
    "narrower logits": ((x, w, y), {"logits_dtype": BF16}, ValueError, ("logits_dtype must be torch.float32", "torch.bfloat16")),
    "logits of another 16 bits": (
        (x.to(BF16), w.to(BF16), y),
        {"logits_dtype": FP16},
        ValueError,
        ("logits_dtype must be torch.float32", "torch.bfloat16", "torch.float16"),
    ),
    "logits of a word": ((x, w, y), {"logits_dtype": "fp32"}, ValueError, ("logits_dtype must be torch.float32", "fp32")),
    "wide logits of fp64": (
        (x.double(), w.double(), y),
        {"logits_dtype": FP32},
        ValueError,
        ("logits_dtype must be torch.float64, or None", "is torch.float32"),
    ),
    "grad_scale a word": ((x, w, y), {"grad_scale": "1"}, TypeError, ("grad_scale must be a number or None", "'1'")),
    "grad_scale a tensor": ((x, w, y), {"grad_scale": torch.tensor(1.0)}, TypeError, ("grad_scale must be a number", "Tensor")),
    "grad_scale NaN": ((x, w, y), {"grad_scale": NAN}, ValueError, ("grad_scale must be finite", "nan")),
    "chunk_bytes of zero": ((x, w, y), {"chunk_bytes": 0}, ValueError, ("chunk_bytes must be", "at least 1", "0")),
    "chunk_bytes a float": ((x, w, y), {"chunk_bytes": 2.0**28}, ValueError, ("chunk_bytes must be", "bytes", "268435456.0")),
    "chunk_bytes True": ((x, w, y), {"chunk_bytes": True}, ValueError, ("chunk_bytes must be", "bytes", "True")),
    "deferred a word": ((x, w, y), {"deferred": "later"}, TypeError, ("deferred must be", "DeferredWgrad", "str")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    refused(onepass.linear_cross_entropy, *BAD[name])


def test_grad_scale_and_deferred_exclude_each_other():
    weight = torch.nn.Parameter(w.clone())
    weight.main_grad = torch.zeros(6, 4)
    with unchanged(main_grad=weight.main_grad), pytest.raises(ValueError, match="grad_scale and deferred"):
        onepass.linear_cross_entropy(x, weight, y, grad_scale=1.0, deferred=DeferredWgrad())


def test_options_after_the_group_come_by_name():
    with pytest.raises(TypeError, match="positional"):
        onepass.linear_cross_entropy(x, w, y, None, "mean", -100, False, bias)


def test_a_bad_label_writes_nothing():
    weight = torch.nn.Parameter(w.clone())
    weight.main_grad = torch.ones(6, 4)
    with unchanged(main_grad=weight.main_grad), pytest.raises(IndexError, match="labels must be from 0 to 5"):
        onepass.linear_cross_entropy(x, weight, y + 1, grad_scale=1.0)
    assert onepass.linear_cross_entropy(x, weight, y).item() == pytest.approx(torch.tensor(6.0).log().item())
