"""lora_linear: a linear layer and what LoRA adds to it, y = x @ weight.T + bias + scale * (x @ lora_a.T) @ lora_b.T.

Formula  as above. x @ lora_a.T, scaled, is rounded to x's type, as operands of products are. With dropout it is dropout(x) there,
         and with `ends` each document's rows have an adapter of their own.
Shapes   x [..., K], weight [N, K], lora_a [r, K], lora_b [N, r], bias [N], y [..., N]. M rows. Of E documents: lora_a
         [E, r, K], lora_b [E, N, r].
Saves    x where lora_a needs a gradient, scale * x @ lora_a.T, the weight where x needs one, and lora_a and lora_b in x's type.
Bytes    beside the products of the weight, which may be frozen: forward reads x once more, and writes and reads y once more;
         backward reads dy twice and x once more, and writes and reads dx once more. Nothing of the weight's size is made.
Products cuBLAS, through PyTorch, in x's type, in autocast's where that is on; the weight's in eight bits where precision says so.
         Gradients of lora_a and lora_b are fp32 until they are stored (product/lora_product.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.distributed.tensor_parallel import TPLayout
from onepass.gradients.deferred import DeferredWgrad
from onepass.ops.linear.linear import add_lora, check_linear_call
from onepass.product.lora import LoRA, Scale, add_adapters, check_adapter, describe_adapters
from onepass.product.precision import describe_formula, describe_products, product_for
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.fp8_recipe import Precision
from onepass.runtime.op import Call, define_op
from onepass.runtime.sharding import Layout, Split, by_rows, has_dtensor, refuse, run_on_shards


def lora_linear_reference(
    x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, bias: Tensor | None = None, *, scale: Scale = 1.0,
    dropout: float = 0.0, ends: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return y by the formula, for every type."""
    return add_adapters(F.linear(x, weight, bias), x, [LoRA(lora_a, lora_b, scale, None, dropout, ends)])


# ---- the public function: say what is wrong, choose who does it, return ----


def _check(given: Mapping[str, Any]) -> tuple[LoRA, DeferredWgrad | None, TPLayout | None]:
    """Raise where an argument is wrong, else return the adapter, and what `check_linear_call` returns."""
    deferred, layout = check_linear_call(given)
    adapter = LoRA(given["lora_a"], given["lora_b"], given["scale"], None, given["dropout"], given["ends"])
    check_adapter("lora", adapter, given["x"], given["weight"], prefix="lora_")
    return adapter, deferred, layout


def _variant(call: Call) -> str:
    """Describe the products of a call."""
    adapter = LoRA(call.lora_a, call.lora_b, call.scale, None, call.dropout, call.ends)
    return describe_products(call.precision, call.x, call.weight, call.deferred) + describe_adapters(adapter)


def shard_lora_linear(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided, and all else is whole."""
    refuse(given, "tp_group", "deferred", "precision", "ends", *(("dropout",) if given["dropout"] else ()))
    return by_rows(given, at, ("x",), ("weight", "lora_a", "lora_b", "bias"))


def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Scale = 1.0,
    dropout: float = 0.0,
    ends: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
    reduce_output: bool = False,
    deferred: DeferredWgrad | None = None,
    precision: Precision = None,
    backend: str | None = None,
) -> Tensor:
    """Apply a linear layer and its LoRA adapter, ``x @ weight.T + bias + scale * (x @ lora_a.T) @ lora_b.T``.

    A weight that asks for no gradient costs none: backward makes the products of x's gradient and of the adapter alone.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, of x's type, frozen or trained, or an `onepass.FrozenWeight`. The gradient of any parameter with a
            ``main_grad`` is added there.
        lora_a: ``[r, K]``, of x's type or fp32. Products are in x's type; the gradient is fp32 where lora_a is.
        lora_b: ``[N, r]``, of the same types.
        bias: ``[N]``, of x's type, or None.
        scale: alpha / r, or alpha / sqrt(r) for rsLoRA. With `ends` one number, or one a document.
        dropout: the probability that the adapter drops a number of x, as PEFT's ``lora_dropout``; 0 in evaluation. The weight's
            product takes all of x. No mask is kept: random numbers are those of `dropout_add`.
        ends: ``[E]``, int32 or int64: where the rows of each of E documents, flattened, end. Document i has the adapter
            ``lora_a[i]``, ``lora_b[i]`` of ``[E, r, K]`` and ``[E, N, r]``. Rows after the last end have none. Wrong ends raise
            on a CPU and under `validate`; on a GPU results are NaN.
        tp_group, allreduce_dgrad, sequence_parallel, reduce_output: as in `linear`. lora_b has this rank's rows, and lora_a is
            whole; with `reduce_output` lora_a has this rank's columns, and lora_b is whole. What is whole has a whole gradient.
        deferred: keeps the operands of the weight's gradient until its `flush`. The weight must carry main_grad.
        precision: ``fp8`` or an `onepass.FP8Recipe` runs the weight's products in eight bits, the adapter's in x's type.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND. The
            first three are the same here: PyTorch's products.

    Returns:
        ``[..., N]`` in x's type, or autocast's.
    """
    given = {
        "x": x, "weight": weight, "lora_a": lora_a, "lora_b": lora_b, "bias": bias, "scale": scale, "dropout": dropout,
        "ends": ends, "tp_group": tp_group, "allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel,
        "reduce_output": reduce_output, "deferred": deferred, "precision": precision,
    }  # fmt: skip
    if has_dtensor(x, weight, lora_a, lora_b):
        return run_on_shards("lora_linear", **given, backend=backend)  # type: ignore[no-any-return]
    adapter, deferred, layout = _check(given)
    chosen = choose("lora_linear", backend, None)
    if chosen not in NATIVE:
        return run_other("lora_linear", chosen, **given)  # type: ignore[no-any-return]
    return add_lora(x, weight, bias, product_for(precision, x, weight, layout, deferred), [adapter])


define_op(
    lora_linear,
    check=lambda call: _check(vars(call)),
    unsupported=lambda call: None,  # PyTorch's products run everywhere
    variant=_variant,
    sharding=shard_lora_linear,
    formula=describe_formula,
)
