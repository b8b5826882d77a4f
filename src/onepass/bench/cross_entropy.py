"""cross_entropy of given logits, against its peers: the mean over rows and its gradient.

Bytes     forward reads the logits; backward reads them and writes their gradient.
Peers     eager and torch.compile: F.cross_entropy of the logits in fp32, as models write it.
          Liger: always writes the gradient over the logits, and in forward; others do it in backward. "Liger CuTe" has its
          kernel in the CuTe DSL, which it doesn't choose by itself.
          TRL: log-probabilities of its trainers, whose forward computes the entropies too; without label smoothing.
          QuACK: without label smoothing, which it lacks.
          Transformer Engine: adapts Liger's kernel, and writes the gradient over the logits too.
          Megatron-core's fused vocab-parallel loss is not compared. It needs a process group, and casts its gradient to bf16
          whatever the logits' dtype.
In place  the variant "over", and Liger and Transformer Engine always, overwrite the logits with their gradient. Such a contender
          gets a copy, made at its first call. Later calls find the previous call's results there: the same work on other numbers.
Errors    the mean is one number, so rows are not compared in chunks: the exact gradient takes 8 bytes a logit, several times.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch, in_a_row, of_each
from onepass.bench.model import BenchCase, Call, Contender, Inputs
from onepass.bench.peers import imported, liger_cute, needs_cute, on_copies
from onepass.ops.loss.cross_entropy import cross_entropy

_SMOOTHING = {"plain": 0.0, "smoothing": 0.1, "over": 0.0}  # over: the gradient overwrites the logits
_GPU, _CPU = [(8192, 128256), (16384, 32000), (4096, 50257)], [(512, 50257), (1024, 8192)]
_SHAPES = Shapes(*(of_each(_SMOOTHING, shapes) for shapes in (_GPU, _CPU, _GPU[1:], [(64, 8192)])))


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    logits = shape[0] * shape[1] * size
    return logits, 2 * logits


def _inputs(case: BenchCase, random: Random) -> Inputs:
    rows, columns = case.shape
    labels = random.integers(columns, rows)
    labels[::16] = -100
    tensors = {"logits": random(rows, columns).mul_(3).requires_grad_(), "labels": labels}
    return Inputs(tensors, frozenset(), {"loss": torch.ones(1, device=random.device)})


def _ours(case: BenchCase) -> Call:
    loss = partial(cross_entropy, label_smoothing=_SMOOTHING[case.variant])
    return in_a_row(on_copies(partial(loss, inplace_backward=True), 1) if case.variant == "over" else loss)


def _eager(case: BenchCase, run: Run) -> Call:
    smoothing = _SMOOTHING[case.variant]
    return in_a_row(run(lambda logits, labels: F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)))


# ---- peers that write over the logits ----


def _liger(case: BenchCase) -> Call:
    function = imported("liger_kernel.transformers.functional", "liger_cross_entropy")
    return in_a_row(on_copies(partial(function, label_smoothing=_SMOOTHING[case.variant]), 1))


def _liger_cute(case: BenchCase) -> Call:
    function = liger_cute("cross_entropy")
    return in_a_row(on_copies(lambda logits, labels: function(logits, labels, label_smoothing=_SMOOTHING[case.variant])[0], 1))


def _quack(case: BenchCase) -> Call:
    loss = partial(imported("quack.cross_entropy", "cross_entropy"), reduction="mean")
    return in_a_row(on_copies(partial(loss, inplace_backward=True), 1) if case.variant == "over" else loss)


def _transformer_engine(case: BenchCase) -> Call:
    function, smoothing = imported("transformer_engine.pytorch.cross_entropy", "parallel_cross_entropy"), _SMOOTHING[case.variant]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:  # its own mean is over ignored rows too
        total: Tensor = function(logits[None], labels[None], smoothing, False).sum()
        return total / (labels >= 0).sum()

    return in_a_row(on_copies(loss, 1))


def _trl(case: BenchCase) -> Call:
    function = imported("trl.kernels", "selective_log_softmax_and_entropy")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        has_loss = labels >= 0
        total: Tensor = function(logits, labels, row_mask=has_loss)[0].sum()
        return -total / has_loss.sum()

    return in_a_row(loss)


def _peers(case: BenchCase) -> list[Contender]:
    peers = [*by_pytorch(_eager), Contender("Liger", _liger, package="Liger")]
    peers.append(Contender("Liger CuTe", _liger_cute, package="Liger", lacks=needs_cute()))
    peers.append(Contender("Transformer Engine", _transformer_engine, package="Transformer Engine"))
    if case.variant != "smoothing":
        peers.append(Contender("QuACK", _quack, package="QuACK"))
    if case.variant == "plain":
        peers.append(Contender("TRL", _trl, package="TRL"))
    return peers


BENCH = OpBench(
    "cross_entropy", _SHAPES, (64, 1024), _bytes_moved, _inputs, _peers,
    options=lambda case: {"label_smoothing": _SMOOTHING[case.variant]}, ours=_ours,
    formula=lambda case: in_a_row(partial(F.cross_entropy, label_smoothing=_SMOOTHING[case.variant])),
    without={
        "Megatron-core": "its vocab-parallel loss needs a process group",
        "Apex": "its loss is an extension that is built apart",
    },
)  # fmt: skip
