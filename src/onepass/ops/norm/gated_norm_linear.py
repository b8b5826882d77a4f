"""gated_norm_linear: a gated RMSNorm and the linear layer after it, as one op that keeps the norm's input and its gate.

Formula  y = g @ weight.T + bias, g = rms_norm(x) * act(z), or with norm_before_gate=False rms_norm(x * act(z)), as
         ops/norm/gated_norm.py has it, rounded to x's type as operands of products are. Each group of group_size columns is
         normalised by itself: the heads of a layer of linear attention, whose norm_weight they share.
Shapes   x and z [..., K], norm_weight [K] or [group_size], weight [N, K], bias [N], y [..., N]. M rows.
Saves    x, z, norm_weight and weight.
Bytes    beside the products: forward reads x and z and writes g, which is let go. Backward reads d g, x and z, and writes dx, dz,
         and g again over d g for the weight's gradient: one kernel, with the gradient of norm_weight. M K elements fewer are
         kept than by a norm and a linear layer.
Products as in ops/norm/norm_linear.py. Eight bits: g is cast, by a pass of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.distributed.collectives import group_of_several
from onepass.distributed.tensor_parallel import check_divisible, tp_layout
from onepass.gradients.deferred import DeferredWgrad, check_deferred
from onepass.gradients.places import place_of
from onepass.gradients.vectors import contiguous_param, with_fp32_grad
from onepass.ops.norm import gated_kernels as kernels
from onepass.ops.norm.gated_kernels import GatedNormOptions
from onepass.ops.norm.gated_norm import check_gated_norm, gated_options, gated_rms_norm_reference, unsupported
from onepass.ops.norm.gated_rows import GatedNormRows, gated_by_formula
from onepass.product.function import is_plain, multiply_rows, run_linear
from onepass.product.lora import Adapters, LoRA, adapters_of, add_adapters, check_adapters, describe_adapters
from onepass.product.precision import describe_formula, describe_products, product_for
from onepass.product.product import Product
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_linear
from onepass.runtime.dispatch import product_type, under_functorch
from onepass.runtime.fp8_recipe import Precision
from onepass.runtime.op import Call, define_op
from onepass.runtime.sharding import (
    PARTIAL,
    WHOLE,
    Layout,
    Split,
    add_bias_once,
    all_as,
    by_rows,
    has_dtensor,
    refuse,
    refuse_split,
    run_on_shards,
)


def gated_norm_linear_reference(
    x: Tensor, z: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, lora: Adapters = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Return y by the formula, for every type. `options`: those of `gated_rms_norm`."""
    x_heads, z_heads = (t.unflatten(-1, (-1, _head(x, norm_weight))) for t in (x, z))
    rows = gated_rms_norm_reference(x_heads, z_heads, norm_weight, **options).flatten(-2)
    return add_adapters(F.linear(rows, weight, bias), rows, adapters_of(lora))


def _head(x: Tensor, norm_weight: Tensor | None) -> int:
    """Return the columns of a head: of x, or of a norm_weight that groups share."""
    return x.shape[-1] if norm_weight is None else norm_weight.shape[0]


def _options(
    x: Tensor, norm_weight: Tensor | None, eps: float, zero_centered_gamma: bool, activation: str, norm_before_gate: bool,
    group_size: int | None,
) -> tuple[GatedNormOptions, int]:  # fmt: skip
    """Return the norm's options, and the columns of a head."""
    head = _head(x, norm_weight)
    return gated_options(head, eps, zero_centered_gamma, activation, norm_before_gate, group_size), head


def _traced(
    x: Tensor, z: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None, options: GatedNormOptions, head: int,
    product: Product, adapters: Sequence[LoRA],
) -> Tensor:  # fmt: skip
    """Run the formula for a compiler or a transform: only how gradients get to main_grad and other ranks is opaque to it."""
    x_heads, z_heads = (t.unflatten(-1, (-1, head)) for t in (x, z))
    wide = torch.float32 if product.takes_unrounded else None
    rows, dtype = gated_by_formula(x_heads, norm_weight, z_heads, options, wide).flatten(-2), product_type(x)
    if is_plain(product, weight, bias, adapters):
        return add_adapters(F.linear(rows, weight, bias), rows, adapters)
    return multiply_rows(rows if product.takes_unrounded else rows.to(dtype), weight, bias, product, dtype, adapters)


# ---- the public function: say what is wrong, choose who does it, return ----


def _check(given: Mapping[str, Any]) -> tuple[DeferredWgrad | None, Sequence[LoRA]]:
    """Raise where an argument is wrong, else return who defers the weight's gradient, and the adapters."""
    x = given["x"]
    check_gated_norm(given, "norm_weight", shared=True)
    check_linear(x, x.shape[-1], given["weight"], given["bias"])
    if group_of_several(given["tp_group"]) is not None and given["group_size"] is None:
        raise ValueError("group_size must be given with a tp_group of several ranks: none of them has a row to normalise")
    if given["sequence_parallel"]:
        check_divisible(x, given["tp_group"])
    return check_deferred(given["deferred"], given["weight"]), check_adapters(given["lora"], x, given["weight"])


def _variant(call: Call) -> str:
    """Describe the kernels of a call and their tiles."""
    x, z = call.x, call.z
    if not x.numel():
        return "the PyTorch formula, as there is nothing to do"
    options, head = _options(
        x, call.norm_weight, call.eps, call.zero_centered_gamma, call.activation, call.norm_before_gate, call.group_size
    )
    H = head // options.groups
    ahead = kernels.gated_forward_tiles(H, x.element_size())
    back = kernels.backward_tiles_for(x, z, options._replace(groups=x.shape[-1] // H))
    products = describe_products(call.precision, x, call.weight, call.deferred) + describe_adapters(call.lora)
    return (
        f"forward with {ahead.block_m} rows a program, in registers; backward with {back.block_m} at a time; {products}; "
        "the gated rows are rebuilt in backward"
    )


def shard_gated_norm_linear(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided where the weight is whole. Its rows divide y's columns; its columns divide groups and make y a sum."""
    refuse(given, "tp_group", "deferred", "precision", "lora")
    x, weight, norm_weight, width = given["x"], given["weight"], given["norm_weight"], given["group_size"]
    last = x.dim() - 1
    if at["weight"] == 0:
        alike = "x", "z", "norm_weight"
        inputs: dict[str, Split] = all_as(WHOLE, *alike) | {"weight": 0, "bias": 0}
        return Layout(inputs, all_as(PARTIAL, *alike), (last, weight.shape[0]))
    if at["weight"] == 1:
        if width is None or x.shape[-1] % (ranks * width):
            refuse_split("weight", 1, "Shard(0) or Replicate, as each rank needs whole groups of x")
        shared = norm_weight is not None and norm_weight.shape[0] == width
        inputs = {"x": last, "z": last, "norm_weight": WHOLE if shared else 0, "weight": 1, "bias": WHOLE}
        sums = ("bias", "norm_weight") if shared else ("bias",)
        return Layout(inputs, all_as(PARTIAL, *sums), PARTIAL, adapt=add_bias_once)
    return by_rows(given, at, ("x", "z"), ("norm_weight", "weight", "bias"))


def gated_norm_linear(
    x: Tensor,
    z: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    zero_centered_gamma: bool = False,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    deferred: DeferredWgrad | None = None,
    precision: Precision = None,
    lora: Adapters = None,
    backend: str | None = None,
) -> Tensor:
    """Apply RMSNorm, a gate and a linear layer, ``linear(rms_norm(x) * norm_weight * silu(z))``; x and z are kept for backward.

    Args:
        x: ``[..., K]``: the rows of all heads.
        z: the gate before its activation, of x's shape and any floating-point type.
        norm_weight: ``[K]``, or ``[group_size]`` where groups share it; of any floating-point type, or None.
        weight: ``[N, K]``, of x's type, or an `onepass.FrozenWeight`. The gradient of any parameter here that has a
            ``main_grad`` is added there.
        bias: ``[N]``, of x's type, or None.
        eps, zero_centered_gamma, activation, norm_before_gate: as in `gated_rms_norm`.
        group_size: normalise each group of so many columns by itself, as heads are. It divides K.
        tp_group: each rank has some heads of x, z and the weight. y is summed over the ranks before the bias is added, and the
            gradient of a shared norm_weight is a part of a sum over them. It needs a group_size.
        sequence_parallel: y is this rank's part along the first dimension; the bias's gradient is a part of a sum over tp_group.
        deferred: keeps the rebuilt rows and y's gradient until its `flush`, which makes the weight's gradient. The weight must
            carry main_grad.
        precision: ``fp8`` or an `onepass.FP8Recipe` runs the products in eight bits; None in x's type, or autocast's.
        lora: an `onepass.LoRA` of the weight, or a sequence of them, each of which may change some of the weight's rows.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        ``[..., N]`` in x's type. The gated norm is computed in fp32 and rounded once, as an operand of the product.
    """
    given = {
        "x": x, "z": z, "norm_weight": norm_weight, "weight": weight, "bias": bias, "eps": eps,
        "zero_centered_gamma": zero_centered_gamma, "activation": activation, "norm_before_gate": norm_before_gate,
        "group_size": group_size, "tp_group": tp_group, "sequence_parallel": sequence_parallel, "deferred": deferred,
        "precision": precision, "lora": lora,
    }  # fmt: skip
    if has_dtensor(x, z, weight):
        return run_on_shards("gated_norm_linear", **given, backend=backend)  # type: ignore[no-any-return]
    deferred, adapters = _check(given)
    chosen = choose("gated_norm_linear", backend, unsupported(x, group_size))
    if chosen not in NATIVE:
        return run_other("gated_norm_linear", chosen, **given)  # type: ignore[no-any-return]
    layout = tp_layout(tp_group, by_row=True, sequence=sequence_parallel)
    product = product_for(precision, x, weight, layout, deferred)
    options, head = _options(x, norm_weight, eps, zero_centered_gamma, activation, norm_before_gate, group_size)
    if chosen == "torch" and (torch.compiler.is_compiling() or under_functorch()):  # these choose by themselves what to keep
        return _traced(x, z, with_fp32_grad(norm_weight), weight, bias, options, head, product, adapters)
    prologue = GatedNormRows(options, head, chosen == "triton" and x.numel() > 0, product_type(x), place_of(z))
    return run_linear(prologue, product, (x, contiguous_param(norm_weight), z), weight, bias, adapters)  # type: ignore[no-any-return]


define_op(
    gated_norm_linear,
    check=lambda call: _check(vars(call)),
    unsupported=lambda call: unsupported(call.x, call.group_size),
    variant=_variant,
    sharding=shard_gated_norm_linear,
    formula=describe_formula,
)
