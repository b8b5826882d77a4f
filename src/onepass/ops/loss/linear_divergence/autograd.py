"""The gradients of linear_divergence: of a scalar made in forward, where they wait; of rows' divergences made in backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.gradients.main_grad import (
    GradRequest,
    accumulates_elsewhere,
    grad_requests,
    main_grads_of,
    vector_gradients,
)
from onepass.ops.loss.linear_cross_entropy.passes import Gradients
from onepass.ops.loss.linear_cross_entropy.steps import Needs
from onepass.ops.loss.linear_divergence import steps
from onepass.ops.loss.linear_divergence.formula import DivergenceOptions
from onepass.ops.loss.linear_divergence.passes import WaitingLogits
from onepass.ops.loss.reduction import reduce_rows, row_gradient
from onepass.ops.loss.scale import scale_into
from onepass.parallel.vocab_shards import vocab_range
from onepass.runtime.dispatch import cast, fast_apply, needs_dispatcher, not_twice_differentiable


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, student_weight: Tensor, student_bias: Tensor | None, lora_a: Tensor | None,
        lora_b: Tensor | None, teacher: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None, labels: Tensor,
        options: DivergenceOptions, group: dist.ProcessGroup | None,
    ) -> Tensor:  # fmt: skip
        needs, parameters = Needs(*ctx.needs_input_grad[:5]), (student_weight, student_bias, lora_a, lora_b)
        ctx.main_grads = main_grads_of(needs[1:], *parameters)
        # Where a compiler or a mode sees the call, PyTorch reduces: it sees operators, which it may fuse, but no kernel.
        by_kernel = options.use_triton and not needs_dispatcher(student, student_weight, student_bias)
        shape, labels = labels.shape, labels.reshape(-1).contiguous()
        place = None if group is None else vocab_range(student_weight.shape[0], group, student_weight.device)
        heads = student, *parameters, teacher, teacher_weight, teacher_bias
        losses, numbers, *made, waiting, teacher_waiting = steps.forward(*heads, labels, place, options, needs)
        loss, scale = reduce_rows(losses, labels, options.ignore_index, options.reduction, None, by_kernel)
        if options.reduction == "none":
            loss = torch.ops.aten._unsafe_view(losses.clone(), shape)  # not a view, as autograd sees it: it may be written to
        if not needs.need_bias:
            made = [*made[:2], None, *made[3:]]  # to PyTorch 2.11's compiler it is a tuple
        ctx.options, ctx.held = options, [_retained(t) for t in parameters]
        ctx.used = False
        ctx.save_for_backward(*heads, labels, place, scale, numbers, *made, waiting, teacher_waiting)
        return loss

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        saved = _SavedDivergence(*ctx.saved_tensors)
        fresh, ctx.used = not ctx.used, True  # used even if this pass fails halfway
        requests = grad_requests(ctx, True, True, *(t is not None for t in saved[2:5]))
        needs = Needs(*[request is not GradRequest.SKIP for request in requests])
        if ctx.options.reduction == "none":
            found = _from_logits(saved, ctx.options, dloss, needs, used=not fresh)
        else:
            found = _from_made(ctx, saved, dloss, needs, requests)
        parameters = [t if held is None else held for held, t in zip(ctx.held, saved[1:5], strict=True)]
        put = [
            None if sums is None or parameter is None else (sums, parameter, main_grad, request)
            for sums, parameter, main_grad, request in zip(found[1:], parameters, ctx.main_grads, requests[1:], strict=True)
        ]
        hidden = None if found.hidden is None else cast(found.hidden, saved.student.dtype).view(saved.student.shape)
        return hidden, *vector_gradients(put)[0], None, None, None, None, None, None


class _SavedDivergence(NamedTuple):
    student: Tensor
    student_weight: Tensor
    student_bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    teacher: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    labels: Tensor
    place: Tensor | None
    scale: Tensor | None  # the factor of a mean
    numbers: Tensor
    hidden_made: Tensor | None
    weight_made: Tensor | None
    bias_made: Tensor | None
    lora_a_made: Tensor | None
    lora_b_made: Tensor | None
    waiting: Tensor | None
    teacher_waiting: Tensor | None


def _retained(t: Tensor | None) -> Tensor | None:
    """A parameter itself, whose attributes backward reads. For a computed weight the saved tensor will do."""
    return t if t is not None and (t.is_leaf or accumulates_elsewhere(t)) else None


def _from_made(
    ctx: Any, saved: _SavedDivergence, dloss: Tensor, needs: Needs, requests: list[GradRequest]
) -> Gradients:
    """Multiply what forward made by the incoming gradient, and round it once. It stays: a second backward finds it again."""
    factor = dloss if saved.scale is None else dloss * saved.scale
    moved = accumulates_elsewhere(ctx.held[0]) and requests[1] is not GradRequest.RETURN
    wide = saved.numbers.dtype
    types = ctx.options.product, wide if moved else saved.student_weight.dtype, wide, wide, wide
    made = saved.hidden_made, saved.weight_made, saved.bias_made, saved.lora_a_made, saved.lora_b_made
    each = [
        None if t is None or not need else _scaled(t, factor, dtype, ctx.options.use_triton)
        for t, dtype, need in zip(made, types, needs, strict=True)
    ]
    return Gradients(*each)


def _scaled(made: Tensor, factor: Tensor, dtype: torch.dtype, use_triton: bool) -> Tensor:
    if torch.compiler.is_compiling():
        return cast(made * factor, dtype)
    into = torch.empty_like(made, dtype=dtype)
    if use_triton and not needs_dispatcher(made, factor):  # a mode sees PyTorch's product, as in a graph
        return scale_into(made, factor, into)
    return torch.mul(made, factor, out=into)


def _from_logits(
    saved: _SavedDivergence, options: DivergenceOptions, dloss: Tensor, needs: Needs, used: bool
) -> Gradients:
    """Make gradients from the logits that waited, unless an earlier pass has `used` the student's; else from new ones."""
    waiting = WaitingLogits(saved.waiting, saved.teacher_waiting)
    incoming = row_gradient(dloss.to(saved.numbers.dtype), "none", saved.labels.shape[0])
    if not torch.compiler.is_compiling():  # a version counter of its own: a second backward does not read what is written here
        waiting = WaitingLogits(*(None if t is None else t.data for t in waiting))
    made = Gradients(*steps.backward(*saved[:10], saved.numbers, incoming, options, needs, waiting=waiting, used=used))
    return made if needs.need_bias else made._replace(bias=None)


apply = fast_apply(_LinearDivergence)
