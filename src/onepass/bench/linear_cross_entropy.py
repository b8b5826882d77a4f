"""linear_cross_entropy against its peers: the mean loss of a language model's output layer, and its gradients.

Time      three matrix products dominate, so times are relative to those products by cuBLAS, not to a copy's. That floor
          computes no loss: it is timed and not checked.
Bytes     forward reads the hidden states and the weight; backward reads them and writes their gradients. No logits are needed.
Gradients of the hidden states and of the weight. "mean": both are returned. "main_grad": the weight's is added to an fp32
          main_grad, by .backward() as in training. "grad_scale": as "main_grad", but onepass knows the incoming gradient, so it
          need not wait for it.
Policy    "log_prob": log_prob and entropy of each token, both differentiated, as a policy's loss has them.
Also      "forward": without gradients. "half": every second label is -100, and those who can compute the other rows alone.
          "frozen": the weight has no gradient. "none": each token's loss. "256 MiB", "fp32 logits", "stats": by chunk_bytes,
          logits_dtype and return_stats of onepass.
Peers     eager: F.cross_entropy of F.linear, with logits in the storage dtype or in fp32; torch.compile: the latter.
          F.linear_cross_entropy: in chunks that PyTorch chooses; without its options it is eager code.
          Liger, CCE and QuACK: with their defaults, but QuACK's products without tuning, which takes minutes for each shape.
          "Liger, fp32 sums" adds the chunks' gradients in fp32, as onepass does.
          Liger's row kernel is the one in the CuTe DSL where that runs. "Liger Hopper": its kernels that write no logits.
          They give each token's loss, and entropy, in bf16, and skip a check of the labels that waits for the GPU.
          TRL: its function of the trainers, which takes rows that are kept; finding them is part of the call, as it is of
          onepass's.
Errors    of the mean, from exact sums over chunks of rows. benchmarks/linear_cross_entropy.py divides the vocabulary over GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, as_written, by_pytorch, give_main_grad, in_a_row, of_each
from onepass.bench.model import BenchCase, Call, Contender, Inputs
from onepass.bench.peers import head_products, imported, needs_cute, since_torch
from onepass.ops.loss.kept_rows import kept_rows
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy

_GPU = [
    (8192, 4096, 128256), (16384, 4096, 32000), (8192, 768, 50257), (4096, 4096, 128256),
    (32768, 4096, 128256), (8192, 2304, 256000),
]  # fmt: skip
_WIDE = [(8192, 4096, 151936), (16384, 2048, 248320)]
_POLICY = "log_prob", "log_prob half", "log_prob forward", "log_prob forward half"
_ALONE: dict[str, dict[str, Any]] = {  # variants of onepass beside eager code alone, and its options
    "mean forward": {},
    "mean frozen": {},
    "mean 256 MiB": {"chunk_bytes": 256 << 20},
    "mean fp32 logits": {"logits_dtype": torch.float32},
    "mean stats": {"return_stats": True},
    "none": {"reduction": "none"},
}
_SHAPES = Shapes(  # tokens, width of the hidden states, vocabulary
    gpu={
        "mean": _GPU, "main_grad": _GPU[:4], "grad_scale": _GPU, "mean half": _GPU[:4],
        **of_each(_ALONE, _GPU[:1]), **of_each(_POLICY, _WIDE),
    },
    gpu_quick=of_each(("mean", "main_grad"), [(4096, 2048, 32000)]),
    cpu={
        "mean": [(128, 64, 4096), (64, 128, 2048)],
        **of_each(("main_grad", "grad_scale", "mean half", *_ALONE, *_POLICY), [(128, 64, 4096)]),
    },
    cpu_quick={"mean": [(256, 16, 4096)], "main_grad": [(64, 64, 1024)]},  # the first: logits are most of its memory
)  # fmt: skip


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, inner, vocabulary = shape
    hidden, weight = tokens * inner * size, vocabulary * inner * size
    if "forward" in variant:
        return hidden + weight, 0
    written = hidden + (0 if "frozen" in variant else weight if _returns(variant) else 8 * vocabulary * inner)  # reads main_grad
    return hidden + weight, hidden + weight + written


def _returns(variant: str) -> bool:
    """Whether the weight's gradient is returned, not added to main_grad."""
    return variant not in ("main_grad", "grad_scale")


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, inner, vocabulary = case.shape
    asking, labels = "forward" not in case.variant, random.integers(vocabulary, tokens)
    weight = random.weight(vocabulary, inner).requires_grad_(asking and "frozen" not in case.variant)
    if not _returns(case.variant):
        give_main_grad(weight)
    if "half" in case.variant:
        labels[::2] = -100
    tensors = {"hidden": random(tokens, inner).requires_grad_(asking), "weight": weight, "labels": labels}
    by_row = frozenset({"hidden", "labels"})
    by_token = ("log_prob", "entropy") if "log_prob" in case.variant else ("loss",) if case.variant == "none" else ()
    if by_token:
        grads = {name: torch.randn(tokens, generator=random.generator, device=random.device) for name in by_token}
        return Inputs(tensors, by_row, grads, row_elements=vocabulary)
    return Inputs(
        tensors, by_row, {"loss": torch.ones(1, device=random.device)}, trained=not _returns(case.variant),
        summed=frozenset({"loss"}), row_elements=vocabulary,
    )  # fmt: skip


def _formula(case: BenchCase) -> Call:
    """Return the formula. For some rows it returns their part of the mean over all rows."""
    if "log_prob" in case.variant:
        return _logits_policy
    if case.variant == "none":
        return lambda hidden, weight, labels: F.cross_entropy(F.linear(hidden, weight), labels, reduction="none")
    tokens = case.shape[0] // (2 if "half" in case.variant else 1)
    return in_a_row(lambda hidden, weight, labels: F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum") / tokens)


# ---- onepass, the floor and eager code ----


def _ours(case: BenchCase) -> Call:
    if "log_prob" in case.variant:
        return _our_policy
    options = {"grad_scale": 1.0} if case.variant == "grad_scale" else _ALONE.get(case.variant, {})
    loss: Callable[..., Any] = partial(linear_cross_entropy, **options)
    if "half" in case.variant:
        return in_a_row(lambda hidden, weight, labels: loss(hidden, weight, labels, rows=kept_rows(labels)))
    if "stats" in case.variant:
        return in_a_row(lambda *tensors: loss(*tensors)[0])
    return loss if case.variant == "none" else in_a_row(loss)


def _products(case: BenchCase) -> Call:
    by_token = 2 if "log_prob" in case.variant else int(case.variant == "none")
    return lambda hidden, weight, labels: head_products(hidden, weight, by_token=by_token)


def _rounded_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def _wide_loss(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction=reduction)


def _eager(case: BenchCase, run: Run) -> Call:
    if case.variant == "none":
        return run(partial(_wide_loss, reduction="none"))
    return run(_logits_policy) if "log_prob" in case.variant else in_a_row(run(_wide_loss))


def _torch(case: BenchCase) -> Call:
    options = imported("torch.nn", "LinearCrossEntropyOptions")()
    return in_a_row(partial(F.linear_cross_entropy, options=options))  # type: ignore[attr-defined,unused-ignore]


# ---- a policy: log_prob and entropy of each token ----


def _our_policy(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    _, stats = linear_cross_entropy(
        hidden, weight, labels, reduction="none", return_stats=("log_prob", "entropy"), rows=kept_rows(labels)
    )
    return stats.log_prob, stats.entropy


def _logits_policy(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """By logits, as people write it."""
    logits = F.linear(hidden, weight)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    has_loss = labels >= 0
    log_prob = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(has_loss, log_prob, 0.0), torch.where(has_loss, -(log_p.exp() * log_p).sum(-1), 0.0)


def _trl(case: BenchCase) -> Call:
    function = imported("trl.kernels.chunked_logprob", "ChunkedLogProbFunction")
    outputs = ("entropy",) if "log_prob" in case.variant else ()

    def call(hidden: Tensor, weight: Tensor, labels: Tensor) -> Any:
        kept = (labels >= 0).nonzero().squeeze(-1) if "half" in case.variant else None
        rows, targets = (hidden, labels) if kept is None else (hidden[kept], labels[kept])
        log_prob, entropy = function.apply(rows, weight, None, targets, 1.0, 32768, None, 1.0, outputs)[:2]
        if not outputs:
            return -log_prob.mean()
        if kept is None:
            return log_prob, entropy
        return tuple(t.new_zeros(len(labels)).index_copy(0, kept, t) for t in (log_prob, entropy))

    return call if outputs else in_a_row(call)


# ---- peers ----


_FP32_SUMS = (None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)  # all defaults but the last


def _liger(case: BenchCase, options: tuple[Any, ...] = ()) -> Call:
    function = imported("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    return in_a_row(lambda *tensors: function.apply(*tensors, *options)[0])


def _liger_hopper(case: BenchCase) -> Call:
    module = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    function = imported(module, "LigerFusedScaledCrossEntropySM90Function").apply
    os.environ.setdefault("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")

    def policy(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, entropy = function(hidden, weight, labels, 1.0, -100, 1, True)
        return -loss, entropy.float()

    if "log_prob" in case.variant:
        return policy
    return in_a_row(lambda hidden, weight, labels: function(hidden, weight, labels).sum() / (labels >= 0).sum())


def _quack(case: BenchCase) -> Call:
    function = imported("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    return in_a_row(partial(function, use_scaled_exp=False, tuned=False))


def _peers(case: BenchCase) -> list[Contender]:
    too_large = "its logits don't fit beside the others'" if case.shape[0] * case.shape[2] >= 1 << 31 else None
    floor, eager = Contender(_floor(case), _products, floor=True), by_pytorch(_eager, "eager fp32 logits", too_large)
    if case.variant in _ALONE:
        return [floor, *eager]
    lacks = needs_cute() if case.dtype == torch.bfloat16 else "bf16 only"
    hopper = Contender("Liger Hopper", _liger_hopper, package="Liger", lacks=lacks)
    trl = Contender("TRL", _trl, package="TRL")
    if "log_prob" in case.variant:
        return [floor, *eager, hopper, trl]
    return [
        floor,
        Contender("eager", lambda case: in_a_row(_rounded_loss)),
        *eager,
        Contender("F.linear_cross_entropy", _torch, lacks=since_torch("2.13", F, "linear_cross_entropy")),
        Contender("Liger", _liger, package="Liger"),
        Contender("Liger, fp32 sums", partial(_liger, options=_FP32_SUMS), package="Liger"),
        hopper,
        Contender("CCE", lambda case: in_a_row(imported("cut_cross_entropy", "linear_cross_entropy")), package="CCE"),
        Contender("QuACK", _quack, package="QuACK"),
        trl,
    ]


def _floor(case: BenchCase) -> str:
    """Products of all rows, also where half of them are ignored."""
    return "one product" if "forward" in case.variant else "two products" if "frozen" in case.variant else "three products"


_APART = "has no loss of hidden states"
BENCH = OpBench(
    "linear_cross_entropy", _SHAPES, (16, 64, 128), _bytes_moved, _inputs, _peers,
    ours=_ours, formula=_formula, baseline=as_written(_eager), reference=_floor,
    without={
        "Apex": _APART,
        "Transformer Engine": _APART,
        "Megatron-core": "its own is for Blackwell GPUs and a process group",
    },
)  # fmt: skip
