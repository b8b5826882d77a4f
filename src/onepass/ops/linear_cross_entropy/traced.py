"""linear_cross_entropy where somebody watches: registered ops for compilers, dispatch modes and subclasses.

What they return must be known before sizes are, so the way follows from what is asked for alone: gradients of a scalar loss are
made in forward, those of rows' losses, or beside stats, of logits that are made again. How each is divided is found out when the
op runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from onepass.kernels.cross_entropy_formula import RowLosses, Terms, lse_type
from onepass.kernels.softmax_rows import Incoming
from onepass.ops.linear_cross_entropy.head import wide_type
from onepass.ops.linear_cross_entropy.passes import Gradients
from onepass.ops.linear_cross_entropy.steps import Call, Needs, Rows, first_step, made_again, plan_call
from onepass.runtime.dispatch import registered

_CALL = (
    "int ignore_index, float smoothing, float z_loss, float softcap, float scale, str reduction, bool wide, bool native, "
    "ScalarType product, str group, bool sequence, float? grad_scale, int? chunk_bytes, bool full"
)
_TENSORS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? token_weight, Tensor? mean_scale, Tensor? place"


def traced_way(call: Call, needs: Needs) -> str:
    if not any(needs):
        return "loss"
    if call.grad_scale is not None:
        return "promised"
    return "again" if call.reduction == "none" or call.full else "forward"  # a graph sends zeros to stats, so nothing may wait


def _flat(call: Call) -> tuple[Any, ...]:
    group = "" if call.group is None else call.group.group_name
    return (
        *call.terms, call.reduction, call.wide, call.native, call.product, group, call.sequence, call.grad_scale,
        call.chunk_bytes, call.full,
    )  # fmt: skip


def _call(terms: tuple[Any, ...], rest: tuple[Any, ...]) -> Call:
    reduction, wide, native, product, name, sequence, grad_scale, chunk_bytes, full = rest
    group = _resolve_process_group(name) if name else None
    return Call(Terms(*terms), reduction, wide, native, product, group, sequence, grad_scale, chunk_bytes, full, None)


def _there(t: Tensor | None, like: Tensor) -> Tensor:
    """Ops return tensors: an empty one where there is none."""
    return like.new_empty(0) if t is None else t


def _or_none(t: Tensor, there: bool) -> Tensor | None:
    return t if there else None


# ---- forward ----


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, token_weight: Tensor | None, scale: Tensor | None,
    place: Tensor | None, way: str, needs: list[bool], apart: bool, *flat: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    call, needed = _call(flat[:5], flat[5:]), (needs[0], needs[1], needs[2])
    plan = plan_call(hidden, weight, labels, call, needed, None, way)
    rows = Rows(labels, token_weight, scale, place)
    found, waiting, _ = first_step(hidden, weight, bias, rows, call, plan, needed, None, apart)
    return *(_there(t, labels) for t in found), *(_there(t, hidden) for t in waiting)


def _like_tokens(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, D] with the strides that the op's have."""
    return torch.empty_like(hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1]), dtype=dtype)


def _forward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, token_weight: Tensor | None, scale: Tensor | None,
    place: Tensor | None, way: str, needs: list[bool], apart: bool, *flat: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    wide_logits, product, full = flat[6], flat[8], flat[13]
    made, N, wide = way in ("forward", "promised"), labels.numel(), wide_type(hidden)
    logits = torch.promote_types(product, torch.float32) if wide_logits else product
    rows = [hidden.new_empty(N, dtype=kind) for kind in (wide, lse_type(logits), wide, wide)[: 4 if full else 2]]
    rows += [] if full else [labels.new_empty(0), labels.new_empty(0)]
    correct = hidden.new_empty(N, dtype=torch.bool) if full else labels.new_empty(0)
    promised = way == "promised"
    kinds = product if promised else wide, weight.dtype if promised and not apart else wide_type(weight)
    dhidden = _like_tokens(hidden, kinds[0]) if made and needs[0] else hidden.new_empty(0)
    dweight = torch.empty_like(weight, dtype=kinds[1]) if made and needs[1] else hidden.new_empty(0)
    dbias = hidden.new_empty(weight.shape[0], dtype=wide) if made and needs[2] else hidden.new_empty(0)
    return *rows, correct, dhidden, dweight, dbias


_forward_op = registered(
    f"linear_cross_entropy_forward({_TENSORS}, str way, bool[] needs, bool apart, {_CALL}) -> "
    "(Tensor loss, Tensor lse, Tensor log_prob, Tensor entropy, Tensor correct, Tensor dhidden, Tensor dweight, Tensor dbias)",
    _forward,
    _forward_fake,
)


def traced_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, call: Call, way: str, needs: Needs, apart: bool
) -> tuple[RowLosses, Gradients]:
    found = _forward_op(hidden, weight, bias, *rows, way, list(needs), apart, *_flat(call))
    loss, lse, log_prob, entropy, correct, *waiting = found
    stats = [_or_none(t, call.full) for t in (log_prob, entropy, correct)]
    made = way in ("forward", "promised")
    return RowLosses(loss, lse, *stats), Gradients(*(_or_none(t, made and need) for t, need in zip(waiting, needs, strict=True)))


# ---- backward ----


def _backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, token_weight: Tensor | None, scale: Tensor | None,
    place: Tensor | None, lse: Tensor, entropy: Tensor | None, dloss: Tensor, dlse: Tensor | None, dlog_prob: Tensor | None,
    dentropy: Tensor | None, needs: list[bool], apart: bool, *flat: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, incoming = Rows(labels, token_weight, scale, place), Incoming(dloss, dlse, dlog_prob, dentropy)
    needed = needs[0], needs[1], needs[2]
    grads = made_again(hidden, weight, bias, rows, lse, entropy, incoming, _call(flat[:5], flat[5:]), needed, apart)
    return tuple(_there(t, hidden) for t in grads)


def _backward_fake(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    needs, apart, product = rest[11], rest[12], rest[21]
    return (
        _like_tokens(hidden, product) if needs[0] else hidden.new_empty(0),
        torch.empty_like(weight, dtype=wide_type(weight) if apart else weight.dtype) if needs[1] else hidden.new_empty(0),
        hidden.new_empty(weight.shape[0], dtype=wide_type(hidden)) if needs[2] else hidden.new_empty(0),
    )


_backward_op = registered(
    f"linear_cross_entropy_backward({_TENSORS}, Tensor lse, Tensor? entropy, Tensor dloss, Tensor? dlse, Tensor? dlog_prob, "
    f"Tensor? dentropy, bool[] needs, bool apart, {_CALL}) -> (Tensor dhidden, Tensor dweight, Tensor dbias)",
    _backward,
    _backward_fake,
)


def traced_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, lse: Tensor, entropy: Tensor | None, incoming: Incoming,
    call: Call, needs: Needs, apart: bool,
) -> Gradients:  # fmt: skip
    grads = _backward_op(hidden, weight, bias, *rows, lse, entropy, *incoming, list(needs), apart, *_flat(call))
    return Gradients(*(_or_none(t, need) for t, need in zip(grads, needs, strict=True)))
