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

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, as_written, by_pytorch, give_main_grad, in_a_row, of_each
from onepass.bench.model import BenchCase, Call, Contender, Inputs
from onepass.bench.peers import head_products, imported
from onepass.ops.loss.linear_divergence import linear_divergence, linear_divergence_reference

_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5, "main_grad": 0.5}  # TRL's and Liger's
VARIANTS = tuple(_BETA)
_SHAPES = Shapes(  # tokens, the student's width, the teacher's, vocabulary
    gpu=of_each(VARIANTS, [(8192, 2048, 4096, 151936), (16384, 1024, 2048, 32000)]),
    gpu_quick=of_each(("forward_kl", "jsd"), [(1024, 1024, 2048, 32000)]),
    cpu=of_each(VARIANTS, [(64, 64, 96, 2048)]),
    cpu_quick={"jsd": [(64, 64, 96, 2048)]},
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, width, teacher, vocabulary = shape
    student = (tokens + vocabulary) * width * size
    written = student if variant != "main_grad" else (tokens * size + vocabulary * 8) * width  # main_grad is read, too
    return student + (tokens + vocabulary) * teacher * size, student + written


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, width, teacher, vocabulary = case.shape
    tensors = {
        "student": random.input(tokens, width), "weight": random.weight(vocabulary, width), "teacher": random(tokens, teacher),
        "teacher_weight": random.weight(vocabulary, teacher).detach(),
    }  # fmt: skip
    if case.variant == "main_grad":
        give_main_grad(tensors["weight"])
    return Inputs(
        tensors, frozenset({"student", "teacher"}), {"loss": torch.ones(1, device=random.device)},
        trained=case.variant == "main_grad", summed=frozenset({"loss"}), row_elements=vocabulary,
    )  # fmt: skip


def _kind(case: BenchCase) -> str:
    return "jsd" if case.variant == "main_grad" else case.variant


def _formula(case: BenchCase) -> Call:
    """Return the formula. For some rows it returns their part of the mean over all rows."""
    total = partial(linear_divergence_reference, kind=_kind(case), reduction="sum")
    return lambda *heads: (total(*heads) / case.shape[0]).view(1)


# ---- the floor and eager code ----


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


def _eager(case: BenchCase, run: Run) -> Call:
    return in_a_row(run(partial(_eager_mean, case)))


# ---- peers ----


def _trl(case: BenchCase) -> Call:
    function = imported("trl.trainer.distillation_trainer", "_chunked_divergence_loss")

    def call(*heads: Tensor) -> Tensor:
        student, weight, teacher, teacher_weight = heads
        mask = torch.ones(1, student.shape[0], dtype=torch.int64, device=student.device)
        loss: Tensor = function(student[None], teacher[None], weight, teacher_weight, mask, _BETA[case.variant])[0]
        return loss

    return in_a_row(call)


def _liger(case: BenchCase) -> Call:
    function = imported("liger_kernel.ops.fused_linear_jsd", "LigerFusedLinearJSDFunction")
    return in_a_row(lambda *heads: function.apply(*heads, None, _BETA[case.variant], -100, 1.0))


def _peers(case: BenchCase) -> list[Contender]:
    return [
        Contender("four products", lambda case: head_products, floor=True),
        *by_pytorch(_eager),
        Contender("TRL", _trl, package="TRL"),
        Contender("Liger", _liger, package="Liger"),
    ]


_APART = "has no divergence of hidden states"
BENCH = OpBench(
    "linear_divergence", _SHAPES, (16, 64, 64, 128), _bytes_moved, _inputs, _peers,
    ours=lambda case: in_a_row(partial(linear_divergence, kind=_kind(case))), formula=_formula,
    baseline=as_written(_eager), reference="four products",
    without=dict.fromkeys(("CCE", "QuACK", "Apex", "Transformer Engine", "Megatron-core"), _APART),
)  # fmt: skip
