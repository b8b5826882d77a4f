"""cross_entropy of given logits, against its peers: the mean over rows and its gradient.

Bytes     forward reads the logits; backward reads them and writes their gradient.
Peers     eager and torch.compile: F.cross_entropy of the logits in fp32, as models write it.
          Liger: always writes the gradient over the logits, and in forward; others do it in backward. "Liger CuTe" has its
          kernel in the CuTe DSL, which it doesn't choose by itself.
          TRL: log-probabilities of its trainers, whose forward computes the entropies too; without label smoothing.
          QuACK: without label smoothing, which it lacks.
          Megatron-core's fused vocab-parallel loss is not compared. It needs a process group, and casts its gradient to bf16
          whatever the logits' dtype.
In place  the variant "over", and Liger always, overwrite the logits with their gradient. Such a contender gets a copy, made at
          its first call. Later calls find the previous call's results there: the same work on other numbers.
Errors    the mean is one number, so rows are not compared in chunks: the exact gradient takes 8 bytes a logit, several times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.model import BenchCase, Call, Contender, Inputs, OpBench
from onepass.bench.peers import compiled, imported, liger_cute, needs_cute, on_copies
from onepass.ops.loss.cross_entropy import cross_entropy
from onepass.runtime.backend import explain

OP = "cross_entropy"
_SMOOTHING = {"plain": 0.0, "smoothing": 0.1, "over": 0.0}  # over: the gradient overwrites the logits
_SHAPES = [(8192, 128256), (16384, 32000), (4096, 50257)]
Loss = Callable[[Tensor, Tensor], Tensor]


def _case(variant: str, rows: int, columns: int, dtype: torch.dtype) -> BenchCase:
    logits = rows * columns * dtype.itemsize
    return BenchCase(OP, variant, (rows, columns), dtype, logits, 2 * logits)


def _cases(device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
    gpu, cpu = (_SHAPES[1:], [(64, 8192)]) if quick else (_SHAPES, [(512, 50257), (1024, 8192)])
    shapes = gpu if device.type == "cuda" else cpu
    return [_case(variant, *shape, dtype) for variant in _SMOOTHING for shape in shapes]


def _tiny(case: BenchCase) -> BenchCase:
    return _case(case.variant, 64, 1024, case.dtype)


def _inputs(case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
    rows, columns = case.shape
    logits = torch.randn(rows, columns, generator=generator, device=device, dtype=case.dtype).mul_(3)
    labels = torch.randint(columns, (rows,), generator=generator, device=device)
    labels[::16] = -100
    tensors = {"logits": logits.requires_grad_(), "labels": labels}
    return Inputs(tensors, frozenset(), {"loss": torch.ones(1, device=device)})


def _called(loss: Loss) -> Call:
    """Return the loss as shape [1]: results have a dimension."""

    def call(logits: Tensor, labels: Tensor) -> Tensor:
        return loss(logits, labels).view(1)

    return call


def _formula(case: BenchCase) -> Call:
    return _called(partial(F.cross_entropy, label_smoothing=_SMOOTHING[case.variant]))


# ---- onepass and eager code ----


def _ours(case: BenchCase) -> Call:
    loss = partial(cross_entropy, label_smoothing=_SMOOTHING[case.variant])
    return _called(on_copies(partial(loss, inplace_backward=True), 1) if case.variant == "over" else loss)


def _eager_loss(case: BenchCase) -> Loss:
    smoothing = _SMOOTHING[case.variant]
    return lambda logits, labels: F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)


def _eager(case: BenchCase) -> Call:
    return _called(_eager_loss(case))


def _compiled(case: BenchCase) -> Call:
    return _called(compiled(_eager_loss(case)))


# ---- peers that write over the logits ----


def _liger(case: BenchCase) -> Call:
    function = imported("liger_kernel.transformers.functional", "liger_cross_entropy")
    return _called(on_copies(partial(function, label_smoothing=_SMOOTHING[case.variant]), 1))


def _liger_cute(case: BenchCase) -> Call:
    function = liger_cute("cross_entropy")
    return _called(on_copies(lambda logits, labels: function(logits, labels, label_smoothing=_SMOOTHING[case.variant])[0], 1))


def _quack(case: BenchCase) -> Call:
    loss = partial(imported("quack.cross_entropy", "cross_entropy"), reduction="mean")
    return _called(on_copies(partial(loss, inplace_backward=True), 1) if case.variant == "over" else loss)


def _trl(case: BenchCase) -> Call:
    function = imported("trl.kernels", "selective_log_softmax_and_entropy")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        kept = labels >= 0
        total: Tensor = function(logits, labels, row_mask=kept)[0].sum()
        return -total / kept.sum()

    return _called(loss)


def _contenders(case: BenchCase) -> list[Contender]:
    found = [
        Contender("onepass", _ours, ours=True),
        Contender("eager", _eager),
        Contender("torch.compile", _compiled, compiles=True),
        Contender("Liger", _liger, package="Liger"),
        Contender("Liger CuTe", _liger_cute, package="Liger", lacks=needs_cute()),
    ]
    if case.variant != "smoothing":
        found.append(Contender("QuACK", _quack, package="QuACK"))
    if case.variant == "plain":
        found.append(Contender("TRL", _trl, package="TRL"))
    return found


def _backend(case: BenchCase, inputs: Inputs) -> str:
    return explain(OP, *inputs.tensors.values(), label_smoothing=_SMOOTHING[case.variant]).backend


BENCH = OpBench(
    OP, _cases, _inputs, _contenders, _formula, _tiny, _backend,
    without={
        "Megatron-core": "its vocab-parallel loss needs a process group",
        "Apex": "its loss is an extension that is built apart",
        "Transformer Engine": "its loss adapts Liger's kernel",
    },
)  # fmt: skip
