"""linear: x @ weight.T + bias, whose gradients go into main_grad and over the ranks of a group.

Formula  y = x @ weight.T + bias.
Shapes   x [..., K], weight [N, K], bias [N], y [..., N]. Over ranks: distributed/tensor_parallel.py.
Saves    x where the weight needs a gradient, and the weight where x does; nothing that is made here.
Bytes    the product adds into main_grad, which it reads and writes once. Nothing of the gradient's size is allocated, and no
         pass adds it afterwards (read, read, write).
Products cuBLAS, through PyTorch, in x's type, in autocast's where that is on, or in eight bits (product/fp8/product.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.distributed.collectives import group_of_several
from onepass.distributed.tensor_parallel import TPLayout, check_divisible, tp_layout
from onepass.gradients.deferred import DeferredWgrad, check_deferred
from onepass.gradients.main_grad import accumulates_elsewhere
from onepass.product.function import is_plain, multiply_rows
from onepass.product.lora import Adapters, LoRA, adapters_of, add_adapters, check_adapters, describe_adapters
from onepass.product.precision import describe_formula, describe_products, product_for
from onepass.product.product import Product
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_floating, check_linear
from onepass.runtime.dispatch import cast, product_type, under_autocast, under_functorch
from onepass.runtime.fp8_recipe import Precision
from onepass.runtime.op import Call, define_op
from onepass.runtime.sharding import (
    PARTIAL,
    WHOLE,
    Layout,
    Split,
    add_bias_once,
    has_dtensor,
    leading_split,
    refuse,
    run_on_shards,
    split_output,
    sum_over,
)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, lora: Adapters = None) -> Tensor:
    """Return y by the formula, for every type."""
    return add_adapters(F.linear(x, weight, bias), x, adapters_of(lora))


# ---- the public function: say what is wrong, choose who does it, return ----


def _variant(call: Call) -> str:
    """What a call does besides its products."""
    own = accumulates_elsewhere(call.weight) or accumulates_elsewhere(call.bias)
    parts = [describe_products(call.precision, call.x, call.weight, None)]
    parts += ["gradients into main_grad" if own else "gradients to autograd"]
    if (call.allreduce_dgrad or call.sequence_parallel or call.reduce_output) and group_of_several(call.tp_group) is not None:
        parts += ["y summed over tp_group"] if call.reduce_output else ["dx summed over tp_group under the weight's product"]
        parts += ["divided along the first dimension"] if call.sequence_parallel else []
    parts += ["the weight's product in flush()"] if call.deferred is not None else []
    return ", ".join(parts) + describe_adapters(call.lora)


def check_linear_call(given: Mapping[str, Any]) -> tuple[DeferredWgrad | None, TPLayout | None]:
    """Raise where an argument is wrong, else return who defers the weight's gradient, and how ranks divide the product."""
    x, weight = given["x"], given["weight"]
    check_floating("x", x)
    shape = x.shape
    if not shape:
        raise ValueError("x must have at least one dimension, but is a scalar")
    check_linear(x, shape[-1], weight, given["bias"])
    deferred = check_deferred(given["deferred"], weight)
    sequence_parallel, reduce_output = given["sequence_parallel"], given["reduce_output"]
    if given["allreduce_dgrad"]:
        if sequence_parallel:
            raise ValueError(
                "allreduce_dgrad and sequence_parallel exclude each other: under sequence_parallel dx is summed already"
            )
        if reduce_output:
            raise ValueError("allreduce_dgrad and reduce_output exclude each other: where y is summed, each rank has its own dx")
    if sequence_parallel:
        if len(shape) < 2:
            raise ValueError(f"x must have a first dimension for sequence_parallel to divide, but has shape {tuple(shape)}")
        if reduce_output:
            check_divisible(x, given["tp_group"])
    if not (given["allreduce_dgrad"] or sequence_parallel or reduce_output):
        return deferred, None
    return deferred, tp_layout(given["tp_group"], by_row=reduce_output, sequence=sequence_parallel)


def shard_linear(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided where the weight is whole. Its rows divide y's columns, its columns make y a sum."""
    refuse(given, "tp_group", "deferred", "precision", "lora")
    x, weight = given["x"], given["weight"]
    last = x.dim() - 1
    if at["weight"] == 0:
        return Layout({"x": WHOLE, "weight": 0, "bias": 0}, {"x": PARTIAL}, (last, weight.shape[0]))
    if at["weight"] == 1:
        return Layout({"x": last, "weight": 1, "bias": WHOLE}, {"bias": PARTIAL}, PARTIAL, adapt=add_bias_once)
    rows = leading_split(at["x"], x)
    inputs: dict[str, Split] = {"x": rows, "weight": WHOLE, "bias": WHOLE}
    return Layout(inputs, {"weight": sum_over(rows), "bias": sum_over(rows)}, split_output(rows, x))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tp_group: dist.ProcessGroup | None = None,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
    reduce_output: bool = False,
    deferred: DeferredWgrad | None = None,
    precision: Precision = None,
    lora: Adapters = None,
    backend: str | None = None,
) -> Tensor:
    """A linear layer. Its products add the gradients of parameters that carry ``main_grad`` there.

    Without a ``tp_group``, or in one of a single rank, nothing is sent, and the options that need a group change nothing.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, of x's type, or an `onepass.FrozenWeight`.
        bias: ``[N]``, of x's type, or None.
        tp_group: the ranks that have parts of one weight. Forward and backward are collective.
        allreduce_dgrad: each rank has some of the weight's rows (column parallel). x's gradient is summed over the group, under
            the product for the weight's gradient.
        sequence_parallel: the tensor that all ranks would otherwise hold alike is divided along the first dimension: y with
            `reduce_output`, else x, which is gathered and whose gradient is summed.
        reduce_output: each rank has some of the weight's columns and of x's (row parallel). y is summed over the group before the
            bias is added. Under sequence_parallel the bias's gradient is a part of a sum over the group.
        deferred: keeps the operands of the weight's gradient until its `flush`. The weight must carry main_grad.
        precision: ``fp8`` or an `onepass.FP8Recipe` runs the products in eight bits; None in x's type, or autocast's. Under
            sequence_parallel rows are gathered in eight bits too, at a scale that the ranks share; sums are in y's type.
        lora: an `onepass.LoRA` of the weight, or a sequence of them, each of which may change some of the weight's rows.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND. The
            first three are the same here: PyTorch's products.

    Returns:
        ``[..., N]`` in x's type, or autocast's.
    """
    given = {
        "x": x, "weight": weight, "bias": bias, "tp_group": tp_group, "allreduce_dgrad": allreduce_dgrad,
        "sequence_parallel": sequence_parallel, "reduce_output": reduce_output, "deferred": deferred, "precision": precision,
        "lora": lora,
    }  # fmt: skip
    if has_dtensor(x, weight):
        return run_on_shards("linear", **given, backend=backend)  # type: ignore[no-any-return]
    deferred, layout = check_linear_call(given)
    chosen = choose("linear", backend, None)
    if chosen not in NATIVE:
        return run_other("linear", chosen, **given)  # type: ignore[no-any-return]
    product = product_for(precision, x, weight, layout, deferred)
    if lora is not None:
        return add_lora(x, weight, bias, product, check_adapters(lora, x, weight))
    if is_plain(product, weight, bias):
        return F.linear(x, weight, bias)  # PyTorch's own does all that remains
    x = cast(x, product_type(x)) if under_autocast(x) else x
    return multiply_rows(x, weight, bias, product, x.dtype)


def add_lora(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, adapters: Sequence[LoRA]) -> Tensor:
    """Return y of a layer with adapters. Compilers and transforms see the formula, where gradients go to autograd."""
    x = cast(x, product_type(x)) if under_autocast(x) else x
    if (torch.compiler.is_compiling() or under_functorch()) and is_plain(product, weight, bias, adapters):
        return add_adapters(F.linear(x, weight, bias), x, adapters)
    return multiply_rows(x, weight, bias, product, x.dtype, adapters)


define_op(
    linear,
    check=lambda call: check_linear_call(vars(call)),
    unsupported=lambda call: None,  # PyTorch's products run everywhere
    variant=_variant,
    sharding=shard_linear,
    formula=describe_formula,
)
