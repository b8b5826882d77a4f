"""linear_cross_entropy: the loss of hidden states under a language model's head, with no tensor of all logits.

Formula  logits = logit_scale * (hidden @ weight.T + bias), then softcap * tanh(logits / softcap); a row's
         loss as in kernels/cross_entropy_formula.py, times its token_weight; their mean over the rows that are kept, their sum,
         or the rows' own.
Shapes   hidden [..., D], weight [V, D], bias [V], labels and token_weight [...]. N tokens.
Saves    hidden, weight, bias, labels and a few numbers a token; beside them what plan.py says: logits, or finished gradients.
Bytes    N V elements of logits are written by the product, read for the statistics, and read and written as their own gradient,
         a chunk at a time; the weight's gradient is read and written once more a chunk.
Files    plan.py: how a call is divided. head.py: the products. passes.py: what is done between them. autograd.py: which gradients
         are made when. The rows' kernels are cross_entropy's too: kernels/softmax_rows.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.kernels.cross_entropy_formula import Terms, reduced, row_losses
from onepass.kernels.losses import check_labels, check_reduction, check_terms, look_at_labels
from onepass.ops.linear_cross_entropy.autograd import apply
from onepass.ops.linear_cross_entropy.steps import Call, plan_call
from onepass.parallel.collectives import with_others
from onepass.parallel.deferred import DeferredWgrad, check_deferred
from onepass.runtime.autocast import product_type
from onepass.runtime.backend import NATIVE, choose, register_op, run_other
from onepass.runtime.checks import check_floating, check_linear, check_number, check_per_token
from onepass.runtime.dispatch import cast, needs_grad, transformed
from onepass.runtime.lang import no_triton

_STATS_COLUMNS = 1 << 24  # which of them is the largest is an fp32 number


class Stats(NamedTuple):
    """What `return_stats` gives of each token, in fp32 and of labels' shape."""

    logsumexp: Tensor
    log_prob: Tensor  # of the label; 0 where it is ignored
    entropy: Tensor
    correct: Tensor  # bool: whether the label has the largest logit, the first of equals


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    return_stats: bool = False,
) -> Any:
    """The formula, for every type: the loss, or (loss, stats)."""
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap or 0.0, logit_scale)
    rows = row_losses(F.linear(hidden, weight, bias), labels, terms)
    weights = None if token_weight is None else token_weight.reshape(labels.shape)
    loss = reduced(rows.loss, labels, terms, weights, reduction)
    return (loss, Stats(*rows[1:])) if return_stats else loss  # type: ignore[arg-type]


# ---- the public face: say what is wrong, choose who does it, return ----


def unsupported(hidden: Tensor, *args: Any, **options: Any) -> str | None:
    """Why the kernels can't take this call, or None."""
    reason = no_triton(hidden)
    if reason is None and product_type(hidden) is torch.float64:
        reason = "the kernels compute in fp32, and hidden is fp64"
    return None if reason is None else reason.replace("x is", "hidden is")


def variant(hidden: Tensor, weight: Tensor, labels: Tensor, *args: Any, **options: Any) -> str:
    """How the call is divided, whoever does it, and what that is expected to take."""
    call = _call(hidden, *args, native=True, **options)
    needs = needs_grad(hidden), needs_grad(weight) and call.deferred is None, needs_grad(options.get("bias"))
    main_grad = getattr(weight, "main_grad", None)
    return str(plan_call(hidden, weight, labels, call, needs, main_grad if isinstance(main_grad, Tensor) else None))


def _call(
    hidden: Tensor, tp_group: dist.ProcessGroup | None = None, reduction: str = "mean", ignore_index: int = -100,
    sequence_parallel: bool = False, *, native: bool, bias: Tensor | None = None, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0, token_weight: Tensor | None = None,
    logits_dtype: torch.dtype | None = None, grad_scale: float | None = None, chunk_bytes: int | None = None,
    return_stats: bool = False, deferred: DeferredWgrad | None = None,
) -> Call:  # fmt: skip
    """The options, checked."""
    check_floating("hidden", hidden)
    check_reduction(reduction)
    terms = check_terms(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    product = product_type(hidden)
    if logits_dtype not in (None, product, _wide_type(product)):
        narrow = "" if product == _wide_type(product) else f" or the operands' {product}"
        raise ValueError(f"logits_dtype must be {_wide_type(product)}{narrow}, or None, but is {logits_dtype}")
    if grad_scale is not None:
        check_number("grad_scale", grad_scale, optional=True)
        if not -math.inf < grad_scale < math.inf:  # isfinite would break a compiled graph
            raise ValueError(f"grad_scale must be finite, but is {grad_scale!r}")
        if deferred is not None:
            raise ValueError("grad_scale and deferred exclude each other: the gradient is made in forward, or in flush()")
    if chunk_bytes is not None and (type(chunk_bytes) is not int or chunk_bytes < 1):
        raise ValueError(f"chunk_bytes must be a number of bytes of at least 1, or None, but is {chunk_bytes!r}")
    group = with_others(tp_group, "tp_group")
    wide = logits_dtype is not None and logits_dtype != product
    return Call(
        terms, reduction, wide, native, product, group, sequence_parallel and group is not None,
        None if grad_scale is None else float(grad_scale), chunk_bytes, return_stats, deferred,
    )  # fmt: skip


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, *args: Any, **options: Any) -> None:
    call = _call(hidden, *args, native=True, **options)
    _check_tensors(hidden, weight, labels, options.get("bias"), options.get("token_weight"), call)
    check_deferred(options.get("deferred"), weight)


def _check_tensors(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, token_weight: Tensor | None, call: Call
) -> None:
    if hidden.dim() == 0:
        raise ValueError("hidden must have at least one dimension, but is a scalar")
    check_linear(hidden, hidden.shape[-1], weight, bias, "hidden")
    if weight.shape[0] == 0 and call.group is None:
        raise ValueError(f"weight must have at least one row, a token's, but has shape {tuple(weight.shape)}")
    tokens = hidden.shape[:-1]
    if call.sequence:
        assert call.group is not None
        if not tokens:
            raise ValueError(f"hidden must have a first dimension that the ranks share, but has shape {tuple(hidden.shape)}")
        tokens = torch.Size([tokens[0] * call.group.size(), *tokens[1:]])
    if call.full and weight.shape[0] > _STATS_COLUMNS:
        raise ValueError(f"return_stats knows columns up to {_STATS_COLUMNS}, but weight has {weight.shape[0]} rows")
    check_labels(labels, tokens, hidden.device, call.terms.ignore_index, "hidden")
    if token_weight is not None:
        check_per_token("token_weight", token_weight, labels.unsqueeze(-1))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    grad_scale: float | None = None,
    chunk_bytes: int | None = None,
    return_stats: bool = False,
    deferred: DeferredWgrad | None = None,
    backend: str | None = None,
) -> Any:
    """The cross-entropy of a language model's head: of ``softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)``,
    with no tensor of all logits unless there is room for it.

    Args:
        hidden: ``[..., D]``. With sequence_parallel this rank's part of the first dimension.
        weight: ``[V, D]``, of hidden's type; with a tp_group this rank's rows, as many as it has.
        labels: ``[...]``, int32 or int64: of the whole sequence, and of the whole vocabulary. One that is no token's raises on a
            CPU and under `validate`; on a GPU its row's loss is NaN, and it contributes no gradient.
        tp_group: the ranks that share the vocabulary. hidden's gradient is summed over them.
        reduction: ``none``, ``sum``, or ``mean``: over the rows that are kept, or by the sum of their token weights; 0 where
            there is none.
        ignore_index: a label whose row has no loss.
        sequence_parallel: hidden and its gradient are divided along the first dimension; labels and the loss are whole.
        bias: ``[V]``, of hidden's type, or None.
        label_smoothing: as F.cross_entropy has it, over the whole vocabulary.
        z_loss: times logsumexp squared is added to a row's loss, before its weight and the reduction.
        softcap: a cap of the logits' size, or None.
        logit_scale: what products are multiplied by.
        token_weight: ``[...]`` or ``[..., 1]``: what each row's loss is multiplied by.
        logits_dtype: ``torch.float32`` never rounds a logit; None keeps them in the operands' type, as eager code does.
        grad_scale: the caller's promise that the loss's incoming gradient will be this number. Gradients are then finished in
            forward, the weight's straight in ``weight.main_grad`` where there is one. A CPU raises where the promise is broken, a
            GPU answers with NaN in hidden's gradient.
        chunk_bytes: how much memory may be used for logits and for what is added up in fp32. None: a part of the GPU's memory.
            Under vmap and functional derivatives, which follow the plain formula, all logits are there at once.
        return_stats: also return (logsumexp, log_prob, entropy, correct) of each token, the first three differentiable.
        deferred: keeps what the weight's gradient is made of, until its `flush`. The weight must carry main_grad.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        The loss in fp32 (of fp64 operands in fp64), a scalar or of labels' shape; with return_stats, (loss, stats).
    """
    call = _call(
        hidden, tp_group, reduction, ignore_index, sequence_parallel, native=True, bias=bias, label_smoothing=label_smoothing,
        z_loss=z_loss, softcap=softcap, logit_scale=logit_scale, token_weight=token_weight, logits_dtype=logits_dtype,
        grad_scale=grad_scale, chunk_bytes=chunk_bytes, return_stats=return_stats, deferred=deferred,
    )  # fmt: skip
    _check_tensors(hidden, weight, labels, bias, token_weight, call)
    deferred = check_deferred(deferred, weight)
    chosen = choose("linear_cross_entropy", backend, unsupported(hidden))
    if chosen not in NATIVE:
        return run_other(
            "linear_cross_entropy", chosen, hidden, weight, labels, tp_group, reduction, ignore_index, sequence_parallel,
            bias=bias, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, logit_scale=logit_scale,
            token_weight=token_weight, logits_dtype=logits_dtype, grad_scale=grad_scale, chunk_bytes=chunk_bytes,
            return_stats=return_stats, deferred=deferred,
        )  # fmt: skip
    if call.group is None:
        look_at_labels(labels, weight.shape[0], ignore_index)
    call = call._replace(native=chosen == "triton", deferred=deferred)
    if transformed():
        return _by_formula(hidden, weight, labels, bias, token_weight, call)
    if not needs_grad(hidden, weight, bias, token_weight):  # a Function can't tell, and would make gradients in forward
        hidden, weight = hidden.detach(), weight.detach()
        bias, token_weight = (None if t is None else t.detach() for t in (bias, token_weight))
    found = apply(hidden, weight, bias, token_weight, labels, call)
    return (found[0], Stats(*found[1:])) if return_stats else found


def _by_formula(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, token_weight: Tensor | None, call: Call
) -> Any:
    """For transforms, which have to see every step."""
    for name, given in (("tp_group", call.group), ("grad_scale", call.grad_scale), ("deferred", call.deferred)):
        if given is not None:
            raise RuntimeError(
                f"linear_cross_entropy with {name} can't follow vmap, functional derivatives or forward-mode differentiation"
            )
    dtype = _wide_type(call.product) if call.wide else call.product
    hidden, weight = (cast(cast(t, call.product), dtype) for t in (hidden, weight))
    bias = None if bias is None else cast(cast(bias, call.product), dtype)
    terms = call.terms
    with torch.autocast(hidden.device.type, enabled=False):
        return linear_cross_entropy_reference(
            hidden, weight, labels, call.reduction, terms.ignore_index, bias=bias, label_smoothing=terms.smoothing,
            z_loss=terms.z_loss, softcap=terms.softcap or None, logit_scale=terms.scale, token_weight=token_weight,
            return_stats=call.full,
        )  # fmt: skip


register_op(linear_cross_entropy, _check, unsupported, variant, variant)
