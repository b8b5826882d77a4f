"""activation_linear: an MLP's activation and its down projection, as one op that keeps the activation's input and not its output.

Formula  y = act(x + activation_bias) @ weight.T + bias, with clamp, linear_offset and token_weight as in
         ops/activation/bias_activation.py. The activation is computed in fp32 and rounded once, to the product's type.
Shapes   x [..., K] or, gated, [..., 2K], activation_bias of x's last dimension, token_weight [...] or [..., 1], weight [N, K],
         bias [N], y [..., N]. M rows.
Saves    activation_bias, token_weight, weight, and x as `save` says: as it is, in fp8, or on the host. Backward rebuilds the
         activation from the x that was kept, so with save="fp8" the weight's gradient, too, is that of the kept x.
Bytes    beside the products: forward reads x and writes the activation, which is freed after the product. Backward is one
         kernel: it reads d activation and x, writes dx, and writes the activation again over d activation for the weight's
         gradient; it also reduces the gradients of activation_bias and token_weight. M K elements fewer are kept than by an
         activation and a linear layer.
Products cuBLAS, through PyTorch, in x's type, or in autocast's where that is on: weight and bias are rounded to it.
         Gradients of parameters that carry main_grad are added there (gradients/main_grad.py).
Eight bits: the activation goes from fp32 to codes, in its own pass, and backward writes them transposed (ops/activation/fp8.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.distributed.tensor_parallel import check_divisible, tp_layout, tp_product
from onepass.gradients.deferred import DeferredWgrad, check_deferred
from onepass.gradients.vectors import contiguous_param, with_fp32_grad
from onepass.ops.activation import kernels
from onepass.ops.activation.activation_rows import ActivationRows, activation_by_formula
from onepass.ops.activation.activations import Activation, find_activation
from onepass.ops.activation.formula import ActivationOptions, activation_formula, check_activation, check_finite
from onepass.ops.activation.sharding import shard_activation_linear
from onepass.product.fp8.gradient import gradient_consumer
from onepass.product.function import is_plain, multiply_rows, run_linear
from onepass.product.lora import Adapters, LoRA, adapters_of, add_adapters, check_adapters, describe_adapters, marked_rows
from onepass.product.precision import describe_formula, describe_products, product_for
from onepass.product.product import Product
from onepass.runtime import saved
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_linear
from onepass.runtime.dispatch import product_type, under_functorch
from onepass.runtime.fp8_recipe import Precision
from onepass.runtime.op import Call, define_op
from onepass.runtime.sharding import has_dtensor, run_on_shards


def activation_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation_bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    *,
    activation: str = "swiglu",
    clamp: float | None = None,
    linear_offset: float = 0.0,
    lora: Adapters = None,
) -> Tensor:
    """Return y by the formula."""
    options = ActivationOptions(find_activation(activation).key, clamp, linear_offset)
    rows = activation_formula(x, activation_bias, token_weight, options).to(x.dtype)
    return add_adapters(F.linear(rows, weight, bias), rows, adapters_of(lora))


def _traced(
    x: Tensor, activation_bias: Tensor | None, token_weight: Tensor | None, weight: Tensor, bias: Tensor | None,
    options: ActivationOptions, save: str, product: Product, adapters: Sequence[LoRA],
) -> Tensor:  # fmt: skip
    """Run the formula for a compiler or a transform: only how gradients get to main_grad and other ranks is opaque to it.

    A product in eight bits is opaque too. It takes the activation in fp32, which is rounded once.
    """
    dtype = product_type(x)
    rows = activation_by_formula(
        x, activation_bias, token_weight, options, torch.float32 if product.takes_unrounded else dtype, save
    )  # fmt: skip
    if is_plain(product, weight, bias, adapters):
        return add_adapters(tp_product(rows, weight, bias, None), rows, adapters)
    return multiply_rows(rows, weight, bias, product, dtype, adapters)


# ---- the public function: say what is wrong, choose who does it, return ----


def _check(given: Mapping[str, Any]) -> tuple[Activation, DeferredWgrad | None, Sequence[LoRA]]:
    """Raise where an argument is wrong, else return the activation, who defers the weight's gradient, and the adapters."""
    x = given["x"]
    act = check_activation(given, given["activation_bias"], "activation_bias")
    check_linear(x, x.shape[-1] // act.parts, given["weight"], given["bias"])
    if given["sequence_parallel"]:
        check_divisible(x, given["tp_group"])
    return act, check_deferred(given["deferred"], given["weight"]), check_adapters(given["lora"], x, given["weight"])


def _variant(call: Call) -> str:
    """Describe the kernels of a call and their tiles."""
    description = kernels.activation_variant(call.x, find_activation(call.activation), call.save)
    products = describe_products(call.precision, call.x, call.weight, call.deferred) + describe_adapters(call.lora)
    return f"{description}; {products}; the activation is rebuilt in backward"


def activation_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "swiglu",
    *,
    activation_bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    clamp: float | None = None,
    linear_offset: float = 0.0,
    save: str = "input",
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    deferred: DeferredWgrad | None = None,
    precision: Precision = None,
    lora: Adapters = None,
    backend: str | None = None,
) -> Tensor:
    """Apply an activation and the linear layer after it; only x is kept for backward, which rebuilds the activation.

    Args:
        x: ``[..., K]``, or ``[..., 2K]`` for a gated activation: the first half is the gate, the second the linear part.
        weight: ``[N, K]``, of x's type, or an `onepass.FrozenWeight`. The gradient of any parameter here that has a
            ``main_grad`` is added there.
        bias: ``[N]``, of x's type, or None.
        activation: as in `bias_activation`; the default is ``swiglu``.
        activation_bias: added to x: as long as its last dimension, of any floating-point type, or None.
        token_weight: ``[...]`` or ``[..., 1]``, multiplied into each row of the activation (a router's weight).
        clamp, linear_offset: for gated activations, as in `bias_activation`.
        save: how x is kept for backward: ``input`` as it is, ``fp8`` in about half of bf16's bytes with a bounded error,
            ``offload`` in the host's memory. With ``fp8`` the weight's gradient is made from the codes too.
        tp_group: each rank has some columns of the weight and of the activation. y is summed over the ranks before the bias is
            added. Forward is collective, and with sequence_parallel backward is too.
        sequence_parallel: y is this rank's part along the first dimension; the bias's gradient is a part of a sum over tp_group.
        deferred: keeps the rebuilt activation and y's gradient until its `flush`, which makes the weight's gradient. The weight
            must carry main_grad.
        precision: ``fp8`` or an `onepass.FP8Recipe` runs the products in eight bits; None in x's type, or autocast's. Under
            sequence_parallel y's gradient is gathered in eight bits too, at a scale that the ranks share.
        lora: an `onepass.LoRA` of the weight, or a sequence of them, each of which may change some of the weight's rows.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        ``[..., N]`` in x's type. The activation is computed in fp32 and rounded once, as an operand of the product.
    """
    given = {
        "x": x, "weight": weight, "bias": bias, "activation": activation, "activation_bias": activation_bias,
        "token_weight": token_weight, "clamp": clamp, "linear_offset": linear_offset, "save": save, "tp_group": tp_group,
        "sequence_parallel": sequence_parallel, "deferred": deferred, "precision": precision, "lora": lora,
    }  # fmt: skip
    if has_dtensor(x, weight):
        return run_on_shards("activation_linear", **given, backend=backend)  # type: ignore[no-any-return]
    act, deferred, adapters = _check(given)
    clamp = None if clamp is None else float(clamp)
    if save == "fp8":
        check_finite(x)
    layout = tp_layout(tp_group, by_row=True, sequence=sequence_parallel)
    chosen = choose("activation_linear", backend, kernels.activation_unsupported(x, act))
    if chosen not in NATIVE:
        return run_other("activation_linear", chosen, **given)  # type: ignore[no-any-return]
    use_triton = chosen == "triton" and x.numel() > 0
    product = product_for(precision, x, weight, layout, deferred)
    options = ActivationOptions(act.key, clamp, float(linear_offset) if linear_offset else None)
    if chosen == "torch" and (torch.compiler.is_compiling() or under_functorch()):  # these choose by themselves what to keep
        return _traced(x, with_fp32_grad(activation_bias), token_weight, weight, bias, options, save, product, adapters)
    stored = saved.saved_format(x, save, act.parts)
    consumer = gradient_consumer(x) if product.takes_unrounded else None
    low_rank = marked_rows(x) if adapters and use_triton and stored.save == "input" else None
    prologue = ActivationRows(options, use_triton, stored, product_type(x), consumer, low_rank)
    inputs = x, contiguous_param(activation_bias), None if token_weight is None else token_weight.contiguous()
    return run_linear(prologue, product, inputs, weight, bias, adapters)  # type: ignore[no-any-return]


define_op(
    activation_linear,
    check=lambda call: _check(vars(call)),
    unsupported=lambda call: kernels.activation_unsupported(call.x, find_activation(call.activation)),
    variant=_variant,
    sharding=shard_activation_linear,
    formula=describe_formula,
)
