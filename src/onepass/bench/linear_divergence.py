"""linear_divergence against its peers: the mean divergence of a student's output layer from a teacher's, and its gradients.

Time      four matrix products dominate, so times are relative to those products by cuBLAS, not to a copy's: both heads' logits,
          and two of the student's gradient. A teacher twice as wide counts twice: five products of the student's size. That floor
          computes no divergence: it is timed and not checked.
Bytes     forward reads both heads' hidden states and weights; backward reads the student's and writes their gradients.
Gradients of the student's hidden states and weight. "main_grad": jsd, the weight's is added to an fp32 main_grad, by .backward().
Peers     eager: F.kl_div of log_softmax of fp32 copies of the logits, as trainers write it; torch.compile: the same.
          TRL: its trainer's function, which also returns the student's entropy.
          Liger: its kernels, whose beta of 0 and 1 are the KLs; in chunks that it chooses.
Errors    of the mean, from exact sums over chunks of rows.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from onepass.bench.model import BenchCase, Call, Contender, Inputs, OpBench
from onepass.bench.peers import compiled, imported
from onepass.bench.products import give_main_grad, random_of
from onepass.ops.loss.linear_divergence import linear_divergence, linear_divergence_reference
from onepass.runtime.backend import explain

OP = "linear_divergence"
Shape = tuple[int, int, int, int]  # tokens, the student's width, the teacher's, vocabulary
_GPU: list[Shape] = [(8192, 2048, 4096, 151936), (16384, 1024, 2048, 32000)]
_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5, "main_grad": 0.5}  # TRL's and Liger's
VARIANTS = tuple(_BETA)


def _case(variant: str, tokens: int, width: int, teacher: int, vocabulary: int, dtype: torch.dtype) -> BenchCase:
    student, size = (tokens + vocabulary) * width, dtype.itemsize
    written = student * size if variant != "main_grad" else (tokens * size + vocabulary * 8) * width  # main_grad is read, too
    read = size * (student + (tokens + vocabulary) * teacher)
    return BenchCase(OP, variant, (tokens, width, teacher, vocabulary), dtype, read, student * size + written)


def _cases(device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
    if device.type == "cuda":
        shapes = [(variant, (1024, 1024, 2048, 32000)) for variant in ("forward_kl", "jsd")] if quick else [
            (variant, shape) for shape in _GPU for variant in VARIANTS
        ]  # fmt: skip
    else:
        shapes = [(variant, (64, 64, 96, 2048)) for variant in (("jsd",) if quick else VARIANTS)]
    return [_case(variant, *shape, dtype) for variant, shape in shapes]


def _tiny(case: BenchCase) -> BenchCase:
    return _case(case.variant, 16, 64, 64, 128, case.dtype)


def _inputs(case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
    tokens, width, teacher, vocabulary = case.shape
    random = random_of(case, device, generator)
    weight = Parameter(random(vocabulary, width).mul_(width**-0.5))
    if case.variant == "main_grad":
        give_main_grad(weight)
    tensors = {
        "student": random(tokens, width).requires_grad_(), "weight": weight, "teacher": random(tokens, teacher),
        "teacher_weight": random(vocabulary, teacher).mul_(teacher**-0.5),
    }  # fmt: skip
    return Inputs(
        tensors, frozenset({"student", "teacher"}), {"loss": torch.ones(1, device=device)}, trained=case.variant == "main_grad",
        summed=frozenset({"loss"}), row_elements=vocabulary,
    )  # fmt: skip


def _kind(case: BenchCase) -> str:
    return "jsd" if case.variant == "main_grad" else case.variant


def _formula(case: BenchCase) -> Call:
    """Return the formula. For some rows it returns their part of the mean over all rows."""
    total = partial(linear_divergence_reference, kind=_kind(case), reduction="sum")
    return lambda *heads: (total(*heads) / case.shape[0]).view(1)


# ---- onepass, the floor and eager code ----


def _ours(case: BenchCase) -> Call:
    return lambda *heads: linear_divergence(*heads, kind=_kind(case)).view(1)


class _HeadProducts(torch.autograd.Function):
    """Run four products: both heads' logits, and in backward the student's with its weight and its hidden states."""

    @staticmethod
    def forward(ctx: Any, *heads: Tensor) -> Tensor:
        student, weight, teacher, teacher_weight = heads
        logits = student @ weight.t()
        teacher @ teacher_weight.t()
        ctx.save_for_backward(student, weight, logits)
        return student.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        student, weight, logits = ctx.saved_tensors
        dstudent, dweight = logits @ weight, logits.t() @ student
        return dstudent, None if hasattr(weight, "main_grad") else dweight, None, None


def _products(case: BenchCase) -> Call:
    def call(*heads: Tensor) -> Tensor:
        y: Tensor = _HeadProducts.apply(*heads)  # type: ignore[no-untyped-call]
        return y

    return call


def _eager_mean(case: BenchCase, *heads: Tensor) -> Tensor:
    """F.kl_div of the logarithms of both heads' probabilities, in fp32."""
    student, weight, teacher, teacher_weight = heads
    s = F.linear(student, weight).float().log_softmax(-1)
    t = F.linear(teacher, teacher_weight).float().log_softmax(-1)
    kl = partial(F.kl_div, reduction="batchmean", log_target=True)  # of its second argument from its first
    if _kind(case) == "forward_kl":
        return kl(s, t)
    if _kind(case) == "reverse_kl":
        return kl(t, s)
    mixture = torch.logsumexp(torch.stack([s + math.log(0.5), t + math.log(0.5)]), dim=0)
    return 0.5 * kl(mixture, t) + 0.5 * kl(mixture, s)


def _eager(case: BenchCase) -> Call:
    return lambda *heads: _eager_mean(case, *heads).view(1)


def _compiled(case: BenchCase) -> Call:
    run = compiled(partial(_eager_mean, case))
    return lambda *heads: run(*heads).view(1)


# ---- peers ----


def _trl(case: BenchCase) -> Call:
    function = imported("trl.trainer.distillation_trainer", "_chunked_divergence_loss")

    def call(*heads: Tensor) -> Tensor:
        student, weight, teacher, teacher_weight = heads
        mask = torch.ones(1, student.shape[0], dtype=torch.int64, device=student.device)
        loss: Tensor = function(student[None], teacher[None], weight, teacher_weight, mask, _BETA[case.variant])[0]
        return loss.view(1)

    return call


def _liger(case: BenchCase) -> Call:
    function = imported("liger_kernel.ops.fused_linear_jsd", "LigerFusedLinearJSDFunction")
    return lambda *heads: function.apply(*heads, None, _BETA[case.variant], -100, 1.0).view(1)


def _contenders(case: BenchCase) -> list[Contender]:
    return [
        Contender("onepass", _ours, ours=True),
        Contender("four products", _products, floor=True),
        Contender("eager", _eager),
        Contender("torch.compile", _compiled, compiles=True),
        Contender("TRL", _trl, package="TRL"),
        Contender("Liger", _liger, package="Liger"),
    ]


def _backend(case: BenchCase, inputs: Inputs) -> str:
    return explain(OP, *inputs.tensors.values()).backend


_APART = "has no divergence of hidden states"
BENCH = OpBench(
    OP, _cases, _inputs, _contenders, _formula, _tiny, _backend,
    without=dict.fromkeys(("CCE", "QuACK", "Apex", "Transformer Engine", "Megatron-core"), _APART),
    baseline=_eager, reference="four products",
)  # fmt: skip
