"""The gradients of a row loss: of a scalar made in forward, where they wait; of rows' losses made in backward.

linear_cross_entropy has a Function of its own, which also knows statistics, promises, token weights and what is deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.distributed.collectives import vocab_range
from onepass.gradients.main_grad import (
    GradRequest,
    accumulates_elsewhere,
    grad_requests,
    main_grads_of,
    vector_gradients,
)
from onepass.kernels.language import tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.rows import aligned, known_align
from onepass.ops.loss.head.operands import HeadTensors, wide_type
from onepass.ops.loss.head.steps import HeadOps
from onepass.ops.loss.head.sums import Gradients, Needs
from onepass.ops.loss.reduction import reduce_rows, row_gradient
from onepass.runtime.dispatch import cast, fast_apply, needs_dispatcher, not_twice_differentiable
from onepass.runtime.sizes import ceil_div

_FIRST = 1  # arguments before the tensors


class RowLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: HeadOps, hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None,
        lora_b: Tensor | None, options: Any, group: dist.ProcessGroup | None, labels: Tensor, *given: Tensor | None,
    ) -> Tensor:  # fmt: skip
        needs, parameters = Needs(*ctx.needs_input_grad[_FIRST : _FIRST + 5]), (weight, bias, lora_a, lora_b)
        ctx.main_grads = main_grads_of(needs[1:], *parameters)
        # Where a compiler or a mode sees the call, PyTorch reduces: it sees operators, which it may fuse, but no kernel.
        by_kernel = options.use_triton and not needs_dispatcher(hidden, weight, bias)
        shape, labels = labels.shape, labels.reshape(-1).contiguous()
        place = None if group is None else vocab_range(weight.shape[0], group, weight.device)
        tensors, rows = HeadTensors(hidden, *parameters), ops.rows(*given, labels, place)
        losses, *kept_and_made, logits = ops.forward(tensors, rows, options, needs, True)
        loss, scale = reduce_rows(losses, labels, options.ignore_index, options.reduction, None, by_kernel)
        if options.reduction == "none":
            loss = torch.ops.aten._unsafe_view(losses.clone(), shape)  # not a view, as autograd sees it: it may be written to
        kept, made = kept_and_made[:-5], kept_and_made[-5:]
        if not needs.need_bias:
            made = [*made[:2], None, *made[3:]]  # to PyTorch 2.11's compiler it is a tuple
        ctx.ops, ctx.options, ctx.held, ctx.used = ops, options, [retained(t) for t in parameters], False
        ctx.save_for_backward(*tensors, *made, scale, logits, *rows, *kept)
        return loss

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        ops, saved = ctx.ops, ctx.saved_tensors
        tensors, made, (scale, logits) = HeadTensors(*saved[:5]), Gradients(*saved[5:10]), saved[10:12]
        fresh, ctx.used = not ctx.used, True  # used even if this pass fails halfway
        requests = grad_requests(ctx, len(tensors), first=_FIRST)
        needs, options = Needs(*[request is not GradRequest.SKIP for request in requests]), ctx.options
        if options.reduction == "none":
            count = 12 + len(ops.rows._fields)
            rows, kept = ops.rows(*saved[12:count]), ops.kept(*saved[count:])
            incoming = row_gradient(dloss.to(wide_type(tensors.hidden)), "none", rows.labels.shape[0])
            if logits is not None and not torch.compiler.is_compiling():
                logits = logits.data  # a version counter of its own: a second backward does not read what is written here
            made = Gradients(*ops.backward(
                tensors, rows, kept, ops.incoming(incoming), options, needs, True, logits=logits, used=not fresh
            ))  # fmt: skip
            made = made if needs.need_bias else made._replace(bias=None)
        else:
            factor = dloss if scale is None else dloss * scale
            moved = accumulates_elsewhere(ctx.held[0]) and requests[1] is not GradRequest.RETURN
            made = _finished(made, factor, tensors.weight, moved, options, needs)
        parameters = [t if held is None else held for held, t in zip(ctx.held, tensors[1:], strict=True)]
        put = [
            None if sums is None or parameter is None else (sums, parameter, main_grad, request)
            for sums, parameter, main_grad, request in zip(made[1:], parameters, ctx.main_grads, requests[1:], strict=True)
        ]
        hidden = None if made.hidden is None else cast(made.hidden, tensors.hidden.dtype).view(tensors.hidden.shape)
        return None, hidden, *vector_gradients(put)[0], *(None,) * (len(ops.rows._fields) + 1)


_apply = fast_apply(RowLossFunction)


def head_function(ops: HeadOps) -> Callable[..., Tensor]:
    """Return the differentiable function of a row loss: of `HeadTensors`, options, a group, labels and the record's other rows.

    Its record `rows` ends with labels [N] and place; its record `found` is losses and `kept`; `incoming` has one field.
    """
    return partial(_apply, ops)  # PyTorch 2.9's compiler takes no such object from a closure


def retained(t: Tensor | None) -> Tensor | None:
    """A parameter itself, whose attributes backward reads. For a computed weight the saved tensor will do: it is freed when
    backward has run, or before under checkpointing."""
    return t if t is not None and (t.is_leaf or accumulates_elsewhere(t)) else None


def _finished(made: Gradients, factor: Tensor, weight: Tensor, moved: bool, options: Any, needs: Needs) -> Gradients:
    """Multiply what forward made by the incoming gradient, and round it once. It stays: a second backward finds it again.

    moved: the weight's gradient goes to main_grad, and is rounded there.
    """
    wide = wide_type(weight)
    types = options.product, wide if moved else weight.dtype, wide, wide, wide
    each = [
        None if t is None or not need else scaled(t, factor, dtype, options.use_triton)
        for t, dtype, need in zip(made, types, needs, strict=True)
    ]
    return Gradients(*each)


def scaled(made: Tensor, factor: Tensor, dtype: torch.dtype, use_triton: bool, over: bool = False) -> Tensor:
    """Multiply and round once. over: into the same memory where that has the type, as `made` is not needed again."""
    if torch.compiler.is_compiling():
        return cast(made * factor, dtype)
    into = made if over and made.dtype == dtype else torch.empty_like(made, dtype=dtype)
    if use_triton and not needs_dispatcher(made, factor):  # a mode sees PyTorch's product, as in a graph
        return scale_into(made, factor, into)
    return torch.mul(made, factor, out=into)


# ---- a product by one number in memory ----

_BLOCK = 2048  # 16 values a thread


@kernel
def _scaled_kernel(values_ptr, factor_ptr, out_ptr, M, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < aligned(M, ALIGN)
    values = tl.load(values_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, values * tl.load(factor_ptr).to(tl.float32), mask=inside)


@lru_cache
def _bound(align: int) -> Bound:
    bound: Bound = _scaled_kernel.bind(align, _BLOCK)
    return bound


def scale_into(values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """Write values * factor, computed in fp32 and rounded once, to out, which may be values. Both have the same strides and no
    gaps. For a head of 128256 x 2048 PyTorch's product takes 1.3 ms of an H200; its bytes need 0.4 ms."""
    size = values.numel()
    if size:
        _bound(known_align(size))((ceil_div(size, _BLOCK), 1, 1), values, factor, out, size)
    return out
