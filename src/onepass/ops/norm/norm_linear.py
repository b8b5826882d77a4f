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
Eight bits: norm(h) goes from fp32 to codes, in the norm's pass, and backward writes them transposed (ops/norm/fp8.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.distributed.tensor_parallel import tp_layout
from onepass.gradients.deferred import DeferredWgrad, check_deferred
from onepass.gradients.vectors import contiguous_param, with_fp32_grads
from onepass.ops.norm import kernels
from onepass.ops.norm.formula import DEFAULT_EPS, NormOptions, add_rounded, norm_formula
from onepass.ops.norm.norm_rows import norm_rows
from onepass.product.function import is_plain, multiply_rows, run_linear
from onepass.product.lora import Adapters, LoRA, adapters_of, add_adapters, check_adapters, describe_adapters
from onepass.product.precision import describe_formula, describe_products, product_for
from onepass.product.product import Product
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_linear, check_norm, check_same_shape, check_vector
from onepass.runtime.dispatch import product_type, under_functorch
from onepass.runtime.fp8_recipe import Precision
from onepass.runtime.op import Call, define_op
from onepass.runtime.sharding import (
    WHOLE,
    Layout,
    Output,
    Split,
    all_as,
    by_rows,
    has_dtensor,
    refuse,
    refuse_split,
    rows_split,
    run_on_shards,
    split_output,
    sum_over,
)

NORMS = tuple(DEFAULT_EPS)


def norm_linear_reference(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = None, norm_bias: Tensor | None = None,
    *, return_norm_output: bool = False, residual: Tensor | None = None, return_input: bool = False, lora: Adapters = None,
    stored: torch.dtype | None = None, **of_norm: Any,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """The formula, for every type: y, or (y, norm(h)), (y, h) or (y, norm(h), h). `stored` is the type that h is rounded to, x's
    own unless said otherwise."""
    options = _options(**({"norm": "rms_norm", "eps": None, "zero_centered_gamma": False} | of_norm))
    wide, h = _normed(x, residual, norm_weight, norm_bias, *options, stored or x.dtype)
    normed = wide.to(x.dtype)
    y = add_adapters(F.linear(normed, weight, bias), normed, adapters_of(lora))
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


def _traced(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, residual: Tensor | None, weight: Tensor, bias: Tensor | None,
    options: NormOptions, returns: tuple[bool, bool], product: Product, adapters: Sequence[LoRA],
) -> Any:  # fmt: skip
    """The formula for a compiler or a transform, which sees all of it but how gradients get to main_grad and to other ranks.

    A product in eight bits is opaque too. It takes the norm in fp32, which is rounded once.
    """
    wide, h = _normed(x, residual, norm_weight, norm_bias, *options, x.dtype)
    normed = wide.to(x.dtype)
    if product.takes_unrounded:
        y = multiply_rows(wide, weight, bias, product, product_type(x), adapters)
    elif is_plain(product, weight, bias, adapters):
        y = add_adapters(F.linear(normed, weight, bias), normed, adapters)
    else:
        y = multiply_rows(normed.to(product_type(x)), weight, bias, product, product_type(x), adapters)
    return _returned(y, normed if returns[0] else None, h if returns[1] else None)


# ---- the public face: say what is wrong, choose who does it, return ----


def _variant(call: Call) -> str:
    """Which kernels a call runs, and their tiles."""
    layer = call.norm == "layer_norm"
    description = kernels.norm_variant(call.x, call.residual, call.norm_weight, call.norm_bias, layer, False, rebuilds=True)
    rebuilt = "norm(x)" if call.residual is None else "norm(h)"
    products = describe_products(call.precision, call.x, call.weight, call.deferred) + describe_adapters(call.lora)
    return f"{description}; {products}; {rebuilt} is rebuilt in backward"


def _check(given: Mapping[str, Any]) -> tuple[DeferredWgrad | None, Sequence[LoRA]]:
    """Raise where an argument is wrong, else return who defers the weight's gradient, and the adapters."""
    x, norm, eps = given["x"], given["norm"], given["eps"]
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, but is {norm!r}")
    check_norm(x, DEFAULT_EPS[norm] if eps is None else eps)
    if given["residual"] is not None:
        check_same_shape("residual", given["residual"], x)
    if given["norm_weight"] is not None:
        check_vector("norm_weight", given["norm_weight"], x)
    elif given["zero_centered_gamma"]:
        raise ValueError("zero_centered_gamma says how norm_weight is kept, but there is no norm_weight")
    if given["norm_bias"] is not None:
        if norm == "rms_norm":
            raise ValueError("norm_bias needs norm='layer_norm': an RMSNorm has no bias")
        check_vector("norm_bias", given["norm_bias"], x)
    check_linear(x, x.shape[-1], given["weight"], given["bias"])
    return check_deferred(given["deferred"], given["weight"]), check_adapters(given["lora"], x, given["weight"])


def shard_norm_linear(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided where the weight is whole; a weight divided by rows is Megatron's column-parallel one."""
    refuse(given, "tp_group", "deferred", "precision", "lora")
    x, weight, rows = given["x"], given["weight"], rows_split(given, at, "x", "residual")
    if at["weight"] == WHOLE:
        return by_rows(given, at, ("x", "residual"), ("norm_weight", "norm_bias", "weight", "bias"))
    if at["weight"] != 0:
        refuse_split("weight", at["weight"], "Shard(0) or Replicate, as a norm needs whole rows")
    more = int(given["return_norm_output"]) + int(given["return_input"] or given["residual"] is not None)
    y = (x.dim() - 1, weight.shape[0])
    vectors: dict[str, Split] = all_as(WHOLE, "norm_weight", "norm_bias")
    inputs: dict[str, Split]
    outputs: list[Output]
    if rows == 0 and x.shape[0] % ranks == 0:  # sequence parallel: norm(h) is gathered, under products
        inputs = {"x": 0, "residual": 0, **vectors, "weight": 0, "bias": 0}
        outputs = [y, *[split_output(0, x)] * more]
        return Layout(inputs, {name: sum_over(0) for name in vectors}, outputs, "tp_group", {"sequence_parallel": True})
    if rows == WHOLE or more:  # dx is summed in the op, before what comes back through h and norm(h) is added
        inputs = {"x": WHOLE, "residual": WHOLE, **vectors, "weight": 0, "bias": 0}
        return Layout(inputs, outputs=[y, *[WHOLE] * more], group="tp_group", options={"sequence_parallel": False})
    inputs = {"x": WHOLE, **vectors, "weight": 0, "bias": 0}  # dx is summed by the reduce-scatter that divides it
    return Layout(inputs, {name: sum_over(0) for name in ("x", *vectors)}, outputs=y)


# What comes back depends on these three: type checkers are told.
@overload
def norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = ..., *, residual: None = ...,
    norm: str = ..., norm_bias: Tensor | None = ..., eps: float | None = ..., zero_centered_gamma: bool = ...,
    return_norm_output: Literal[False] = ..., return_input: Literal[False] = ...,
    tp_group: dist.ProcessGroup | None = ..., sequence_parallel: bool = ..., deferred: DeferredWgrad | None = ...,
    precision: Precision = ..., lora: Adapters = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = ..., *, residual: None = ...,
    norm: str = ..., norm_bias: Tensor | None = ..., eps: float | None = ..., zero_centered_gamma: bool = ...,
    return_norm_output: Literal[True], return_input: Literal[False] = ...,
    tp_group: dist.ProcessGroup | None = ..., sequence_parallel: bool = ..., deferred: DeferredWgrad | None = ...,
    precision: Precision = ..., lora: Adapters = ..., backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = ..., *, residual: Tensor,
    norm: str = ..., norm_bias: Tensor | None = ..., eps: float | None = ..., zero_centered_gamma: bool = ...,
    return_norm_output: Literal[False] = ..., return_input: bool = ...,
    tp_group: dist.ProcessGroup | None = ..., sequence_parallel: bool = ..., deferred: DeferredWgrad | None = ...,
    precision: Precision = ..., lora: Adapters = ..., backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = ..., *, residual: Tensor | None = ...,
    norm: str = ..., norm_bias: Tensor | None = ..., eps: float | None = ..., zero_centered_gamma: bool = ...,
    return_norm_output: Literal[False] = ..., return_input: Literal[True],
    tp_group: dist.ProcessGroup | None = ..., sequence_parallel: bool = ..., deferred: DeferredWgrad | None = ...,
    precision: Precision = ..., lora: Adapters = ..., backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = ..., *, residual: Tensor,
    norm: str = ..., norm_bias: Tensor | None = ..., eps: float | None = ..., zero_centered_gamma: bool = ...,
    return_norm_output: Literal[True], return_input: bool = ...,
    tp_group: dist.ProcessGroup | None = ..., sequence_parallel: bool = ..., deferred: DeferredWgrad | None = ...,
    precision: Precision = ..., lora: Adapters = ..., backend: str | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = ..., *, residual: Tensor | None = ...,
    norm: str = ..., norm_bias: Tensor | None = ..., eps: float | None = ..., zero_centered_gamma: bool = ...,
    return_norm_output: Literal[True], return_input: Literal[True],
    tp_group: dist.ProcessGroup | None = ..., sequence_parallel: bool = ..., deferred: DeferredWgrad | None = ...,
    precision: Precision = ..., lora: Adapters = ..., backend: str | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = ..., *, residual: Tensor | None = ...,
    norm: str = ..., norm_bias: Tensor | None = ..., eps: float | None = ..., zero_centered_gamma: bool = ...,
    return_norm_output: bool = ..., return_input: bool = ...,
    tp_group: dist.ProcessGroup | None = ..., sequence_parallel: bool = ..., deferred: DeferredWgrad | None = ...,
    precision: Precision = ..., lora: Adapters = ..., backend: str | None = ...,
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
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
    lora: Adapters = None,
    backend: str | None = None,
) -> Any:
    """A norm and the linear layer after it, of x or of its sum with a residual; only the norm's input, h, is kept for backward,
    which rebuilds the normalised rows.

    Args:
        x: ``[..., K]``.
        norm_weight: ``[K]``, of any floating-point type, or None.
        weight: ``[N, K]``, of x's type, or an `onepass.FrozenWeight`. The gradient of a parameter with a ``main_grad``,
            any of these, is added there.
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
        lora: an `onepass.LoRA` of the weight, or a sequence of them, each of which may change some of the weight's rows.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        y ``[..., N]`` in x's type, then norm(h) with `return_norm_output`, then h, of x's shape and type, with a residual or
        `return_input`: (y, norm(h), h) with all.
    """
    given = {
        "x": x, "norm_weight": norm_weight, "weight": weight, "bias": bias, "residual": residual, "norm": norm,
        "norm_bias": norm_bias, "eps": eps, "zero_centered_gamma": zero_centered_gamma, "return_norm_output": return_norm_output,
        "return_input": return_input, "tp_group": tp_group, "sequence_parallel": sequence_parallel, "deferred": deferred,
        "precision": precision, "lora": lora,
    }  # fmt: skip
    if has_dtensor(x, weight):
        return run_on_shards("norm_linear", **given, backend=backend)
    deferred, adapters = _check(given)
    chosen = choose("norm_linear", backend, kernels.norm_unsupported(x))
    options = _options(norm, eps, zero_centered_gamma)
    if chosen not in NATIVE:
        return run_other("norm_linear", chosen, **given | {"eps": options.eps})
    returns = return_norm_output, return_input or residual is not None
    layout = tp_layout(tp_group, by_row=False, sequence=sequence_parallel)
    use_triton = chosen == "triton" and x.numel() > 0
    product = product_for(precision, x, weight, layout, deferred)
    if not use_triton and (torch.compiler.is_compiling() or under_functorch()):  # these choose by themselves what to keep
        norm_weight, norm_bias = with_fp32_grads(norm_weight, norm_bias)
        return _traced(x, norm_weight, norm_bias, residual, weight, bias, options, returns, product, adapters)
    prologue = norm_rows(x, residual, options, product_type(x), use_triton, returns)
    inputs = x, contiguous_param(norm_weight), contiguous_param(norm_bias), residual
    return run_linear(prologue, product, inputs, weight, bias, adapters)


define_op(
    norm_linear,
    check=lambda call: _check(vars(call)),
    unsupported=lambda call: kernels.norm_unsupported(call.x),
    variant=_variant,
    sharding=shard_norm_linear,
    formula=describe_formula,
)
