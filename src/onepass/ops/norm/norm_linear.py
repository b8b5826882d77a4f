"""norm_linear: a norm and the linear layer after it, as one op that keeps the norm's input and no normalised activation.

Formula  h = x + residual, rounded to x's type (without a residual h is x);
         y = norm(h) @ weight.T + bias, norm as in ops/norm/norm.py, its result rounded to x's type as operands of products are.
Shapes   x and residual [..., K], norm_weight and norm_bias [K], weight [N, K], bias [N], y [..., N]; h is x's shape and type.
         M rows.
Saves    h, norm_weight, weight, and for each row 1 / deviation (and the mean) in fp32; nothing of x and residual.
Bytes    beside the products: forward reads x and writes norm(x), which is let go; with a residual it reads that too, and writes
         h. Backward reads d norm(h) and h (and h's own gradient) and writes norm(h) again, for the weight's gradient, and dx,
         which is the residual's gradient too, over d norm(h): one kernel, with the gradients of the norm's own parameters. So
         M K elements fewer are kept than by a norm and a linear one after the other, and no sum is a kernel of its own.
Products cuBLAS, through PyTorch, in x's type, or in autocast's where that is on: norm(h) and weight are rounded to it. The
         gradients of parameters that carry main_grad go there (gradients/main_grad.py).
Eight bits: norm(h) goes from fp32 to codes, in the norm's pass, and backward writes them turned (ops/norm/fp8.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.gradients.deferred import DeferredWgrad, check_deferred
from onepass.gradients.fp8_compiled import CompiledFP8Call
from onepass.gradients.fp8_gradient import takes_fp8_gradient
from onepass.gradients.fp8_linear import fp8_product
from onepass.gradients.fp8_product import FP8Call
from onepass.gradients.fp8_weight import CompiledFP8, FP8Operand, FP8Weight, describe_formula, fp8_state
from onepass.gradients.main_grad import (
    GradRequest,
    accumulates_elsewhere,
    grad_requests,
    main_grads_of,
    name_written,
)
from onepass.gradients.product import (
    graph_break_if_deferred,
    is_deferred,
    linear_gradients,
    linear_product,
)
from onepass.gradients.vectors import (
    KernelTargets,
    VectorGrads,
    accumulates,
    contiguous_param,
    saved_vectors,
    vector_grads,
    with_fp32_grads,
)
from onepass.ops.norm import kernels
from onepass.ops.norm.formula import DEFAULT_EPS, NormOptions, add_rounded, norm_backward_formula, norm_formula
from onepass.ops.norm.fp8_linear import norm_linear_fp8, start_norm_operand
from onepass.ops.norm.sharding import shard_norm_linear
from onepass.parallel.tensor_parallel import (
    TPLayout,
    column_sums,
    rows_of,
    start_gather,
    start_input_gradient,
    start_sum,
    tp_layout,
)
from onepass.runtime.autocast import product_type
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_linear, check_norm, check_same_shape, check_vector
from onepass.runtime.dispatch import cast, fast_apply, needs_grad, not_twice_differentiable, under_functorch, writable
from onepass.runtime.fp8_recipe import Precision
from onepass.runtime.op import define_op
from onepass.runtime.sharding import has_dtensor, run_on_shards

NORMS = tuple(DEFAULT_EPS)


def norm_linear_reference(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = None, norm_bias: Tensor | None = None,
    *, norm: str = "rms_norm", eps: float | None = None, zero_centered_gamma: bool = False, return_norm_output: bool = False,
    residual: Tensor | None = None, return_input: bool = False, stored: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """The formula, for every type: y, or (y, norm(h)), (y, h) or (y, norm(h), h). `stored` is the type that h is rounded to, x's
    own unless said otherwise."""
    options = _options(norm, eps, zero_centered_gamma)
    wide, h = _normed(x, residual, norm_weight, norm_bias, *options, stored or x.dtype)
    normed = wide.to(x.dtype)
    y = F.linear(normed, weight, bias)
    return _returned(y, normed if return_norm_output else None, h if residual is not None or return_input else None)


def _options(norm: str, eps: float | None, zero_centered_gamma: bool) -> NormOptions:
    return NormOptions(norm == "layer_norm", float(DEFAULT_EPS[norm] if eps is None else eps), bool(zero_centered_gamma))


def _normed(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    layer: bool, eps: float, centered: bool, stored: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """norm(h), in fp32 or wider, and h."""
    h = x if residual is None else add_rounded(x, residual, stored)
    return norm_formula(h, norm_weight, norm_bias, layer=layer, eps=eps, zero_centered_gamma=centered), h.to(x.dtype)


def _returned(y: Tensor, normed: Tensor | None, h: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """y, and after it what else is asked for."""
    more = [t for t in (normed, h) if t is not None]
    return (y, *more) if more else y


# ---- the norm by kernels, or by the formula where there are none: both keep h only ----


def _norm_forward(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    options: NormOptions, use_triton: bool, *, keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return norm(h), h and, of the kernels, the rows' statistics where `keep`."""
    if use_triton:
        normed, h, stats = kernels.forward(x, residual, norm_weight, norm_bias, options, keep)
        return normed, x if h is None else h, stats
    h = x if residual is None else cast(x + residual, x.dtype)
    layer, eps, centered = options
    formula = norm_formula(h, norm_weight, norm_bias, layer=layer, eps=eps, zero_centered_gamma=centered, native=True)
    return cast(formula, x.dtype), h, None


def _forward(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    options: NormOptions, use_triton: bool, product: torch.dtype, layout: TPLayout | None, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """y, norm(h), h and, where backward will want them, the rows' statistics."""
    normed, h, stats = _norm_forward(x, residual, norm_weight, norm_bias, options, use_triton, keep=keep)
    normed = cast(normed, product)
    whole = start_gather(normed, layout).wait()
    return F.linear(whole, weight.to(product), None if bias is None else bias.to(product)), normed, h, stats


def _forward_fp8(
    state: FP8Weight | CompiledFP8, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor,
    bias: Tensor | None, residual: Tensor | None, options: NormOptions, use_triton: bool, product: torch.dtype,
    layout: TPLayout | None, keep: bool, returns_norm: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, FP8Call | CompiledFP8Call]:  # fmt: skip
    """y by a product in eight bits, norm(h) if it is asked for, h, the rows' statistics, and what backward needs of the state.

    norm(h) is written by a pass of its own, before: codes are those of the fp32 norm, whether it is returned or not.
    """
    normed = None
    if returns_norm:
        normed, x, _ = _norm_forward(x, residual, norm_weight, norm_bias, options, use_triton, keep=False)
        normed, residual = cast(normed, product), None
    y, h, stats, call = norm_linear_fp8(
        state, x, norm_weight, norm_bias, weight, bias, residual, options, use_triton, product, layout, keep
    )
    return y, normed, h, stats, call


def _traced(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    options: NormOptions, returns: tuple[bool, bool], layout: TPLayout | None, deferred: DeferredWgrad | None,
    state: FP8Weight | CompiledFP8 | None,
) -> Any:  # fmt: skip
    """The formula for a compiler or a transform, which sees all of it but how gradients get to main_grad and to other ranks.

    A product in eight bits is opaque too. It takes the norm in fp32, which is rounded once.
    """
    wide, h = _normed(x, residual, norm_weight, norm_bias, *options, x.dtype)
    normed = wide.to(x.dtype)
    if state is not None:
        y = fp8_product(wide, weight, bias, state, layout, deferred, product_type(x))
    elif layout is None and (under_functorch() or not (accumulates_elsewhere(weight) or accumulates_elsewhere(bias))):
        y = F.linear(normed, weight, bias)
    else:
        y = linear_product(normed.to(product_type(x)), weight, bias, layout, deferred)
    return _returned(y, normed if returns[0] else None, h if returns[1] else None)


# ---- autograd ----


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
        residual: Tensor | None, options: NormOptions, use_triton: bool, returns: tuple[bool, bool],
        product: torch.dtype, layout: TPLayout | None, deferred: DeferredWgrad | None, state: FP8Weight | CompiledFP8 | None,
    ) -> Any:  # fmt: skip
        """`returns`: norm(h), h."""
        graph_break_if_deferred(deferred)
        tensors, normed, ctx.fp8 = (x, norm_weight, norm_bias, weight, bias, residual), None, None
        if state is None:
            y, normed, h, stats = _forward(*tensors, options, use_triton, product, layout, True)
        else:
            found = _forward_fp8(state, *tensors, options, use_triton, product, layout, True, returns[0])
            y, normed, h, stats, ctx.fp8 = found
        ctx.options, ctx.use_triton, ctx.returns, ctx.product = options, use_triton, returns, product
        ctx.layout, ctx.deferred = layout, deferred
        ctx.types = x.dtype, None if residual is None else residual.dtype
        ctx.parameters, ctx.main_grads = (weight, bias), main_grads_of(ctx.needs_input_grad[3:], weight, bias)
        ctx.vectors = saved_vectors(ctx, 1, norm_weight, norm_bias)
        ctx.set_materialize_grads(False)
        if returns[1] and not (ctx.needs_input_grad[0] or ctx.needs_input_grad[5]):
            ctx.mark_non_differentiable(h)
        ctx.save_for_backward(h, norm_weight, norm_bias, weight, stats)
        return _returned(writable(y), normed if returns[0] else None, h if returns[1] else None)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor | None, *more: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        given = True, saved[1] is not None, saved[2] is not None, True, ctx.parameters[1] is not None, ctx.types[1] is not None
        requests = grad_requests(ctx, *given)
        incoming = dy, more[0] if ctx.returns[0] else None, more[-1] if ctx.returns[1] else None
        backward = _backward_single if ctx.layout is None or dy is None else _backward_parallel
        sums = None if dy is None or requests[4] is GradRequest.SKIP else column_sums(dy)
        return *backward(ctx, saved, incoming, requests, sums), None, None, None, None, None, None, None


Incoming = tuple[Tensor | None, Tensor | None, Tensor | None]  # the gradients of y, norm(h) and h itself
Grads = tuple[Tensor | None, ...]  # of x, the norm's weight, its bias, the weight, its bias and the residual


def _needs(requests: list[GradRequest]) -> list[bool]:
    """Which gradients of the norm: of h, which is x's and the residual's, of its weight and of its bias."""
    of_h, of_weight, of_bias, _, _, of_residual = (each is not GradRequest.SKIP for each in requests)
    return [of_h or of_residual, of_weight, of_bias]


def _through_norm(
    ctx: Any, vectors: VectorGrads | None, saved: tuple[Any, ...], dnormed: Tensor, dh: Tensor | None,
    requests: list[GradRequest], rebuild: bool, ours: bool,
) -> tuple[KernelTargets | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return what the kernel added to, the gradients of h and of the norm's parameters, and norm(h) where it is to be rebuilt.

    `ours`: dnormed may be written.
    """
    h, norm_weight, norm_bias, _, stats = saved
    x_type, residual_type = ctx.types
    dx_type = x_type if residual_type is None else torch.promote_types(x_type, residual_type)
    needs = _needs(requests)
    backward: Callable[..., Any] = kernels.backward_into if ctx.use_triton else norm_backward_formula
    into_dy = ours and dx_type == ctx.product
    dh = dh if needs[0] else None
    return backward(  # type: ignore[no-any-return]
        vectors, dnormed, dh, h, norm_weight, norm_bias, stats, ctx.options, *needs, dx_type, rebuild, into_dy=into_dy
    )


def _backward_single(
    ctx: Any, saved: tuple[Any, ...], incoming: Incoming, requests: list[GradRequest], sums: Tensor | None
) -> Grads:  # fmt: skip
    """One kernel for the norm's gradients and norm(h), which the weight's gradient needs. `sums`: the bias's gradient."""
    h, norm_weight, norm_bias, weight, _ = saved
    dy, dnormed, dh = incoming
    needs = _needs(requests)
    need_dweight = requests[3] is not GradRequest.SKIP and dy is not None
    vectors, into = vector_grads(ctx.vectors, requests[1:3]), None
    dh_whole, dnorm_weight, dnorm_bias, normed, operand = dh if needs[0] else None, None, None, None, None
    later = is_deferred(ctx.deferred, ctx.parameters[0], requests[3])
    if ctx.fp8 is not None and dy is not None:
        through, operand, _ = ctx.fp8.output_gradient(dy, weight, any(needs), need_dweight, later=later)
        dnormed = through if through is None or dnormed is None else through.add_(dnormed)
    elif any(needs):
        dnormed = _through_linear(None if dy is None else rows_of(dy), weight.to(ctx.product), dnormed, h)
    rebuild = need_dweight and operand is None
    if dnormed is not None and (any(needs) or need_dweight):
        into, dh_whole, dnorm_weight, dnorm_bias, normed = _through_norm(
            ctx, vectors, saved, dnormed, dh, requests, rebuild, ours=dy is not None
        )
    elif rebuild:
        normed = _rebuilt(ctx, h, norm_weight, norm_bias)
    pending = () if vectors is None else vectors.pending(into, dnorm_weight, dnorm_bias)
    with name_written(_written_by_norm(vectors, into)):
        dx, dresidual = _split(ctx, dh_whole, requests)
        keep = operands = None
        if operand is not None:
            start = start_norm_operand(ctx.fp8, saved, ctx.options, ctx.use_triton, later)
            keep = _fp8_weight_gradient(ctx, operand, start, requests[3], later)
        elif need_dweight:
            assert dy is not None and normed is not None
            operands = rows_of(dy), rows_of(normed.to(ctx.product))
        if operands is not None and later:
            keep = partial(ctx.deferred.keep, *operands, ctx.parameters[0], ctx.main_grads[0], None)
        dweight, dbias, *put = linear_gradients(ctx.parameters, ctx.main_grads, requests[3:5], sums, operands, keep, pending)
    if vectors is not None:
        dnorm_weight, dnorm_bias = vectors.autograd_grads(into, put)
    return dx, dnorm_weight, dnorm_bias, dweight, dbias, dresidual


def _backward_parallel(
    ctx: Any, saved: tuple[Any, ...], incoming: Incoming, requests: list[GradRequest], sums: Tensor | None
) -> Grads:  # fmt: skip
    """norm(h) comes from all ranks under the product for d norm(h), whose sum comes under the product for the weight."""
    h, norm_weight, norm_bias, weight, _ = saved
    dy, dnormed, dh = incoming
    assert dy is not None
    gathering = summing = keep = rows = start = None
    need_dweight, later = requests[3] is not GradRequest.SKIP, is_deferred(ctx.deferred, ctx.parameters[0], requests[3])
    if need_dweight and ctx.fp8 is not None and ctx.fp8.has_wgrad:
        start = start_norm_operand(ctx.fp8, saved, ctx.options, ctx.use_triton, later)
    elif need_dweight:
        normed = _rebuilt(ctx, h, norm_weight, norm_bias)
        if later:
            keep = partial(ctx.deferred.keep, dy, normed, ctx.parameters[0], ctx.main_grads[0], ctx.layout)
        else:
            gathering = start_gather(normed, ctx.layout)
    if ctx.fp8 is not None:
        through, operand, _ = ctx.fp8.output_gradient(dy, weight, any(_needs(requests)), need_dweight, later=later)
        summing = None if through is None else start_sum(through, ctx.layout)
        if start is not None:
            keep = _fp8_weight_gradient(ctx, operand, start, requests[3], later)
    elif any(_needs(requests)):
        summing = start_input_gradient(dy, weight.to(ctx.product), ctx.layout)
    if gathering is not None:
        rows = rows_of(dy), rows_of(gathering.wait())
    dweight, dbias = linear_gradients(ctx.parameters, ctx.main_grads, requests[3:5], sums, rows, keep)
    if summing is None:
        return None, None, None, dweight, dbias, None
    written = [name for name, *each in zip(("weight", "bias"), ctx.parameters, requests[3:5], strict=True) if accumulates(*each)]
    vectors = vector_grads(ctx.vectors, requests[1:3])
    with name_written(written):
        through = summing.wait()
        dnormed = through if dnormed is None else through + dnormed
        into, dh, *grads, _ = _through_norm(ctx, vectors, saved, dnormed, dh, requests, False, ours=True)
    with name_written([*written, *_written_by_norm(vectors, into)]):
        dx, dresidual = _split(ctx, dh, requests)
        if vectors is not None:
            grads = vectors.put(into, *grads)
    return dx, *grads, dweight, dbias, dresidual


def _fp8_weight_gradient(
    ctx: Any, dy: FP8Operand | None, normed: Callable[[], FP8Operand], request: GradRequest, later: bool
) -> partial[Any]:
    """Return what puts an eight-bit gradient of the weight where it belongs."""
    place = ctx.parameters[0], ctx.main_grads[0], request, ctx.deferred if later else None
    return partial(ctx.fp8.weight_gradient, dy, normed, *place)


def _written_by_norm(vectors: VectorGrads | None, into: KernelTargets | None) -> list[str]:
    """The names of the parameters whose main_grad the norm's kernel has written."""
    return [] if vectors is None or into is None else vectors.accumulated("norm_weight", "norm_bias")


def _split(ctx: Any, dh: Tensor | None, requests: list[GradRequest]) -> tuple[Tensor | None, Tensor | None]:
    """x's gradient and the residual's."""
    x_type, residual_type = ctx.types
    if residual_type is None or dh is None:
        return dh, None
    dx = dh.to(x_type) if requests[0] is not GradRequest.SKIP else None
    return dx, dh.to(residual_type) if requests[5] is not GradRequest.SKIP else None


def _rebuilt(ctx: Any, h: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None) -> Tensor:
    normed, _, _ = _norm_forward(h, None, norm_weight, norm_bias, ctx.options, ctx.use_triton, keep=False)
    return normed.to(ctx.product)


def _through_linear(rows: Tensor | None, weight: Tensor, dnormed: Tensor | None, h: Tensor) -> Tensor | None:
    """The whole gradient of norm(h): what comes through the linear layer, and what came for norm(h) itself."""
    if rows is None:
        return dnormed
    if dnormed is None:
        return (rows @ weight).view(h.shape)
    return torch.addmm(dnormed.reshape(rows.shape[0], weight.shape[1]), rows, weight).view(h.shape)  # one rounding for both


_apply = fast_apply(_NormLinear)


# ---- the public face: say what is wrong, choose who does it, return ----


def _check(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
    norm: str, eps: float | None, zero_centered_gamma: bool,
) -> None:  # fmt: skip
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, but is {norm!r}")
    check_norm(x, DEFAULT_EPS[norm] if eps is None else eps)
    if residual is not None:
        check_same_shape("residual", residual, x)
    if norm_weight is not None:
        check_vector("norm_weight", norm_weight, x)
    elif zero_centered_gamma:
        raise ValueError("zero_centered_gamma says how norm_weight is kept, but there is no norm_weight")
    if norm_bias is not None:
        if norm == "rms_norm":
            raise ValueError("norm_bias needs norm='layer_norm': an RMSNorm has no bias")
        check_vector("norm_bias", norm_bias, x)
    check_linear(x, x.shape[-1], weight, bias)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    norm: str = "rms_norm",
    norm_bias: Tensor | None = None,
    eps: float | None = None,
    zero_centered_gamma: bool = False,
    return_norm_output: bool = False,
    return_input: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    deferred: DeferredWgrad | None = None,
    precision: Precision = None,
    backend: str | None = None,
) -> Any:
    """A norm and the linear layer after it, of x or of its sum with a residual; only the norm's input, h, is kept for backward,
    which rebuilds the normalised rows.

    Args:
        x: ``[..., K]``.
        norm_weight: ``[K]``, of any floating-point type, or None.
        weight: ``[N, K]``, of x's type. The gradient of a parameter with a ``main_grad``, any of these, is added there.
        bias: ``[N]``, of x's type, or None.
        residual: of x's shape: added to x before, in the norm's pass. h is returned too, and is kept in the place of both.
        norm: ``rms_norm`` or ``layer_norm``.
        norm_bias: ``[K]``, for ``layer_norm``.
        eps, zero_centered_gamma: the norm's, as in `rms_norm` and `layer_norm`. None is that norm's own eps: 1e-6 or 1e-5.
        return_norm_output: return norm(h) as well, of the x that is given; it can be differentiated too.
        return_input: return h without a residual too. It is x itself, and what uses it in the place of x has its gradient added
            to x's in the norm's own pass; autograd would add the two by a kernel more.
        tp_group: the ranks that each have some rows of the weight and of the bias, and get as many columns of y: x's gradient is
            summed over them, under the product for the weight's. Forward and backward are collective.
        sequence_parallel: x is this rank's part along the first dimension, and norm(h) is gathered for the product, y that of all
            parts; so is x's gradient this rank's part, and those of the norm's parameters are parts of a sum over tp_group
            (`onepass.parallel.reduce_sequence_parallel_grads`).
        deferred: keeps norm(h), made again, and y's gradient for the weight's, until its `flush`. The weight must carry
            main_grad.
        precision: ``fp8`` or an `onepass.FP8Recipe` runs the products in eight bits; None in x's type, or autocast's. Under
            sequence_parallel norm(h) is gathered in eight bits too, at a scale that the ranks share.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        y ``[..., N]`` in x's type, then norm(h) with `return_norm_output`, then h, of x's shape and type, with a residual or
        `return_input`: (y, norm(h), h) with all.
    """
    if has_dtensor(x, weight):
        return run_on_shards(
            "norm_linear", x=x, norm_weight=norm_weight, weight=weight, bias=bias, residual=residual, norm=norm,
            norm_bias=norm_bias, eps=eps, zero_centered_gamma=zero_centered_gamma, return_norm_output=return_norm_output,
            return_input=return_input, tp_group=tp_group, sequence_parallel=sequence_parallel, deferred=deferred,
            precision=precision, backend=backend,
        )  # fmt: skip
    _check(x, residual, norm_weight, norm_bias, weight, bias, norm, eps, zero_centered_gamma)
    deferred = check_deferred(deferred, weight)
    chosen = choose("norm_linear", backend, kernels.norm_unsupported(x))
    options = _options(norm, eps, zero_centered_gamma)
    if chosen not in NATIVE:
        return run_other(
            "norm_linear", chosen, x, norm_weight, weight, bias,
            residual=residual, norm=norm, norm_bias=norm_bias, eps=options.eps, zero_centered_gamma=zero_centered_gamma,
            return_norm_output=return_norm_output, return_input=return_input, tp_group=tp_group,
            sequence_parallel=sequence_parallel, deferred=deferred, precision=precision,
        )  # fmt: skip
    returns = return_norm_output, return_input or residual is not None
    layout = tp_layout(tp_group, by_row=False, sequence=sequence_parallel)
    use_triton = chosen == "triton" and x.numel() > 0
    state = fp8_state(precision, x, weight, layout)
    traced = not use_triton and (torch.compiler.is_compiling() or under_functorch())  # these choose by themselves what to keep
    if traced:
        norm_weight, norm_bias = with_fp32_grads(norm_weight, norm_bias)
    else:
        norm_weight, norm_bias = contiguous_param(norm_weight), contiguous_param(norm_bias)
    tensors = x, norm_weight, norm_bias, weight, bias, residual
    if traced:
        return _traced(*tensors, options, returns, layout, deferred, state)
    product = product_type(x)
    if not needs_grad(*tensors):
        if state is not None:
            y, normed, h, *_ = _forward_fp8(state, *tensors, options, use_triton, product, layout, False, returns[0])
            return _returned(y, normed, h if returns[1] else None)
        y, normed, h, _ = _forward(*tensors, options, use_triton, product, layout, False)
        return _returned(y, normed if returns[0] else None, h if returns[1] else None)
    found = _apply(*tensors, options, use_triton, returns, product, layout, deferred, state)
    if state is not None:
        takes_fp8_gradient(found[0] if isinstance(found, tuple) else found, state, bias, layout)
    return found


define_op(
    norm_linear,
    check=lambda call: _check(
        call.x, call.residual, call.norm_weight, call.norm_bias, call.weight, call.bias,
        call.norm, call.eps, call.zero_centered_gamma,
    ),
    unsupported=lambda call: kernels.norm_unsupported(call.x),
    variant=kernels.norm_linear_variant,
    sharding=shard_norm_linear,
    formula=describe_formula,
)  # fmt: skip
