"""linear_divergence: how far a student's distribution is from a teacher's, of both hidden states, without a tensor of all logits.

Formula  logits = softcap * tanh((hidden @ weight.T + bias) / softcap) / temperature, of each head; s and t their softmax. A row's
         divergence is KL(t || s), KL(s || t), or beta KL(t || M) + (1 - beta) KL(s || M) with M = beta t + (1 - beta) s; their
         mean over the rows that are kept, their sum, or the rows' own.
         With student_lora the student's weight is student_weight + lora.scale * b @ a.
         The gradient by the student's logits, times the temperature, is s - t; s (log s/t - KL(s || t)); or
         (1 - beta) s (log s/M - KL(s || M)).
Shapes   student [..., D], student_weight [V, D], teacher [..., E], teacher_weight [V, E], biases [V], labels [...]. N tokens.
Saves    these and five numbers a token; beside them, as plan.py decides, finished gradients or logits.
Bytes    2 N V elements of logits are written by two products, and read twice, for jsd three times; N V are written as the
         student's gradient and read by two products. The weight's gradient is read and written once more a chunk.
Files    ops/loss/head has products, loops over chunks and autograd. formula.py has the formula and the options, plan.py divides a
         call, row_loss.py is what is done to rows of logits, by kernels.py or rows.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.distributed.collectives import group_of_several
from onepass.kernels.language import kernels_unsupported
from onepass.ops.loss.formula import reduce_losses
from onepass.ops.loss.head.operands import HeadTensors
from onepass.ops.loss.head.sums import Needs
from onepass.ops.loss.linear_divergence.formula import KINDS, DivergenceOptions, DivergenceTerms, row_divergences
from onepass.ops.loss.linear_divergence.row_loss import apply, plan_call
from onepass.ops.loss.lora import cast_lora, check_lora, head_logits
from onepass.ops.loss.reduction import check_labels, check_logits, check_reduction, check_terms
from onepass.ops.loss.sharding import shard_linear_divergence
from onepass.product.lora import LoRA
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_device, check_floating, check_linear, check_number
from onepass.runtime.dispatch import cast, needs_grad, product_type, under_functorch
from onepass.runtime.op import Call, define_op
from onepass.runtime.sharding import has_dtensor, run_on_shards


class LinearDivergenceCall(NamedTuple):
    """The arguments of a call but its backend, in the order of the public signature."""

    student: Tensor
    student_weight: Tensor
    teacher: Tensor
    teacher_weight: Tensor
    labels: Tensor | None = None
    kind: str = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    softcap: float | None = None
    teacher_softcap: float | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    student_bias: Tensor | None = None
    student_lora: LoRA | None = None
    teacher_bias: Tensor | None = None
    tp_group: dist.ProcessGroup | None = None
    logits_dtype: torch.dtype | None = None
    chunk_bytes: int | None = None

    def terms(self) -> DivergenceTerms:
        last = float(self.softcap or 0.0), float(self.teacher_softcap or 0.0)
        return DivergenceTerms(self.ignore_index, self.kind, float(self.beta), float(self.temperature), *last)

    def lora(self) -> tuple[Tensor | None, Tensor | None]:
        """LoRA's a and b."""
        return (None, None) if self.student_lora is None else self.student_lora[:2]


def linear_divergence_reference(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor, labels: Tensor | None = None, **options: Any
) -> Tensor:
    """Return one rank's divergence by the formula, for every type. It makes both heads' logits.

    options: those of `linear_divergence`. What only says how to compute the divergence has no effect.
    """
    heads = student, student_weight, teacher, teacher_weight
    return _formula(LinearDivergenceCall(*heads, labels, tp_group=None, **options))


def _formula(call: LinearDivergenceCall) -> Tensor:
    labels = _all_kept(call.student, call.ignore_index) if call.labels is None else call.labels
    logits = head_logits(call.student, call.student_weight, call.student_bias, call.student_lora)
    teacher_logits = head_logits(call.teacher, call.teacher_weight, call.teacher_bias, None).detach()
    rows = row_divergences(logits, teacher_logits, labels, call.terms())
    return reduce_losses(rows, labels, call.ignore_index, None, call.reduction)


def _all_kept(student: Tensor, ignore_index: int) -> Tensor:
    """Labels of which none is ignored: only that is asked of them."""
    return torch.full(student.shape[:-1], int(ignore_index == 0), dtype=torch.int64, device=student.device)


# ---- the public function: check, choose a backend, run ----


def _unsupported(student: Tensor, teacher: Tensor) -> str | None:
    """Why the kernels can't take this call, or None."""
    for name, x in (("student", student), ("teacher", teacher)):
        reason = kernels_unsupported(name, x)
        if reason is None and product_type(x) is torch.float64:
            reason = f"the kernels compute in fp32, and {name} is fp64"
        if reason is not None:
            return reason
    return None


def _variant(call: Call) -> str:
    """How the call is divided, by either backend, and the memory that this is expected to take."""
    arguments = LinearDivergenceCall(**vars(call))
    (options, _), (a, b) = _checked(arguments), arguments.lora()
    needs = Needs(*(needs_grad(t) for t in (call.student, call.student_weight, call.student_bias, a, b)))
    student = HeadTensors(call.student, call.student_weight, call.student_bias, a, b)
    plan = plan_call(student, call.teacher_weight, options, needs)
    return f"{plan}{'' if a is None else f'; LoRA of rank {a.shape[0]}'}"


def _checked(call: LinearDivergenceCall) -> tuple[DivergenceOptions, dist.ProcessGroup | None]:
    """Raise where an argument is wrong; return the options, and the group if there are others in it."""
    student, student_weight, teacher, teacher_weight, labels = call[:5]
    group = group_of_several(call.tp_group, "tp_group")
    for name, hidden, weight, bias in (
        ("student", student, student_weight, call.student_bias), ("teacher", teacher, teacher_weight, call.teacher_bias)
    ):  # fmt: skip
        check_floating(name, hidden)
        if hidden.dim() == 0:
            raise ValueError(f"{name} must have at least one dimension, but is a scalar")
        check_linear(hidden, hidden.shape[-1], weight, bias, name, f"{name}_")
    check_lora("student_lora", call.student_lora, student, student_weight)
    if teacher.shape[:-1] != student.shape[:-1]:
        raise ValueError(
            f"teacher must have student's tokens {tuple(student.shape[:-1])} before its last dimension, "
            f"but has shape {tuple(teacher.shape)}"
        )
    check_device("teacher", teacher, student, "student")
    if teacher_weight.shape[0] != student_weight.shape[0]:
        raise ValueError(
            f"teacher_weight must have as many rows as student_weight, {student_weight.shape[0]}, one a token of the vocabulary, "
            f"but has {teacher_weight.shape[0]}"
        )
    if student_weight.shape[0] == 0 and group is None:
        raise ValueError(f"student_weight must have at least one row, a token's, but has shape {tuple(student_weight.shape)}")
    check_divergence(call.kind, call.beta, call.temperature, call.softcap, call.teacher_softcap)
    check_reduction(call.reduction)
    check_terms(call.ignore_index, 0.0, 0.0)
    if labels is not None:
        check_labels(labels, student.shape[:-1], student.device, call.ignore_index, "student")
    product, lora = product_type(student), call.student_lora
    check_logits(product, call.logits_dtype, call.chunk_bytes)
    return DivergenceOptions(
        *call.terms(), call.reduction, call.logits_dtype is not None and call.logits_dtype.itemsize >= 4, True, product,
        product_type(teacher), "" if group is None else group.group_name, call.chunk_bytes,
        1.0 if lora is None else float(lora.scale),
    ), group  # fmt: skip


def check_divergence(
    kind: str, beta: float, temperature: float, softcap: float | None, teacher_softcap: float | None
) -> None:  # fmt: skip
    """Raise unless these say what a row's divergence is."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, but is {kind!r}")
    check_number("beta", beta)
    if not 0 < beta < 1:
        ends = "; TRL's 0 is kind 'forward_kl', its 1 'reverse_kl'"
        raise ValueError(f"beta must be above 0 and below 1, but is {beta!r}{ends}")
    check_number("temperature", temperature)
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be finite and above 0, but is {temperature!r}")
    for name, cap in (("softcap", softcap), ("teacher_softcap", teacher_softcap)):
        if cap is not None:
            check_number(name, cap, optional=True)
            if not 0 < cap < math.inf:
                raise ValueError(f"{name} must be finite and above 0, or None, but is {cap!r}")


def linear_divergence(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None = None,
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    student_bias: Tensor | None = None,
    student_lora: LoRA | None = None,
    teacher_bias: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    logits_dtype: torch.dtype | None = None,
    chunk_bytes: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """The divergence of a student's next-token distribution from a teacher's, as distillation trains on, from both hidden states.

    Gradients go to student, student_weight, student_bias and student_lora, as far as these ask for one; the teacher gets none.
    It is differentiable once; `linear_divergence_reference`, a plain formula, can be differentiated again.

    Args:
        student: ``[..., D]``, hidden states.
        student_weight: ``[V, D]``, of student's type. With a tp_group, this rank's rows, any number of them.
        teacher: ``[..., E]``, hidden states of the same tokens.
        teacher_weight: ``[V, E]``, of teacher's type, with as many rows as student_weight.
        labels: ``[...]``, int32 or int64, or None. Rows whose label is `ignore_index` have no divergence and a gradient of
            exactly 0; the labels' other values don't matter.
        kind: ``forward_kl`` is KL(teacher || student), ``reverse_kl`` KL(student || teacher), ``jsd`` the generalised
            Jensen-Shannon divergence: beta KL(teacher || M) + (1 - beta) KL(student || M), M = beta teacher + (1 - beta) student.
        beta: above 0 and below 1; only jsd reads it. TRL's 0 is ``forward_kl``, its 1 ``reverse_kl``.
        temperature: divides both heads' logits, after the softcaps. The result gets no factor for it.
        softcap, teacher_softcap: bound the size of a head's logits; None leaves them.
        reduction: ``mean`` is the sum over the vocabulary, then the mean over the rows that are kept, 0 if there are none: of all
            rows it is F.kl_div's ``batchmean`` over flattened tokens. ``sum`` sums rows, ``none`` returns each row's.
        ignore_index: rows with this label have no divergence.
        student_bias, teacher_bias: ``[V]``, of their weight's type, or None. -inf for both leaves a column out.
        student_lora: an `onepass.LoRA` ``(a, b, scale)``: the student's weight is ``student_weight + scale * b @ a``, which is
            never made.
        tp_group: the ranks that share the vocabulary, both heads alike. student's gradient is summed over them.
        logits_dtype: ``torch.float32`` never rounds a logit; None keeps them in the operands' types, as eager code does.
        chunk_bytes: a budget for logits and fp32 sums; None takes a part of the GPU's memory. vmap and functional derivatives
            follow the plain formula, which makes all logits at once.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        The divergence in fp32 (of a student in fp64 in fp64), a scalar or of the tokens' shape.
    """
    call = LinearDivergenceCall(
        student, student_weight, teacher, teacher_weight, labels, kind, beta, temperature, softcap, teacher_softcap, reduction,
        ignore_index, student_bias, student_lora, teacher_bias, tp_group, logits_dtype, chunk_bytes,
    )  # fmt: skip
    if has_dtensor(student, student_weight):
        return run_on_shards("linear_divergence", **call._asdict(), backend=backend)  # type: ignore[no-any-return]
    options, group = _checked(call)
    chosen = choose("linear_divergence", backend, _unsupported(student, teacher))
    if chosen not in NATIVE:
        return run_other("linear_divergence", chosen, **call._asdict())  # type: ignore[no-any-return]
    if chosen != "triton":
        options = options._replace(use_triton=False)
    if under_functorch():
        if group is not None:
            raise RuntimeError(
                "linear_divergence with tp_group can't follow vmap, functional derivatives or forward-mode differentiation"
            )
        return _by_formula(call, options)
    labels = _all_kept(student, ignore_index) if labels is None else labels
    teacher, teacher_weight = teacher.detach(), teacher_weight.detach()
    teacher_bias = None if teacher_bias is None else teacher_bias.detach()
    a, b = call.lora()
    if not needs_grad(student, student_weight, student_bias, a, b):  # a Function can't tell, and makes gradients in forward
        student, student_weight = student.detach(), student_weight.detach()
        student_bias, a, b = (None if t is None else t.detach() for t in (student_bias, a, b))
    return apply(
        student, student_weight, student_bias, a, b, options, group, labels, teacher, teacher_weight, teacher_bias
    )


def _by_formula(call: LinearDivergenceCall, options: DivergenceOptions) -> Tensor:
    """Run the plain formula for transforms, which have to see every step."""
    operands: dict[str, Any] = {}
    for head, product in (("student", options.product), ("teacher", options.teacher_product)):
        dtype = torch.promote_types(product, torch.float32) if options.wide else product
        for name in (head, f"{head}_weight", f"{head}_bias"):
            t = getattr(call, name)
            operands[name] = None if t is None else cast(cast(t, product), dtype)
        if head == "student":
            operands["student_lora"] = cast_lora(call.student_lora, product, dtype)
    with torch.autocast(call.student.device.type, enabled=False):
        return _formula(call._replace(**operands))


define_op(
    linear_divergence,
    check=lambda call: _checked(LinearDivergenceCall(**vars(call))),
    unsupported=lambda call: _unsupported(call.student, call.teacher),
    variant=_variant,
    sharding=shard_linear_divergence,
    formula=_variant,
    samples_module="onepass.ops.loss.linear_divergence.samples",
)
