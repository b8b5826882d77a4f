"""linear: x @ weight.T + bias, whose gradients go where training wants them: into main_grad, and over the ranks of a group.

Formula  y = x @ weight.T + bias.
Shapes   x [..., K], weight [N, K], bias [N], y [..., N]. Spread over ranks: parallel/product.py.
Saves    x where the weight's gradient is wanted, and the weight where x's is; nothing that is made here.
Bytes    the product adds into main_grad, read and written once: nothing of the gradient's size is allocated, and the pass
         that would add it is spared (read, read, write).
Products cuBLAS, through PyTorch, in x's type, or in autocast's where that is on.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.parallel.collectives import with_others
from onepass.parallel.deferred import DeferredWgrad, check_deferred
from onepass.parallel.product import check_divisible, linear_product, spread_over
from onepass.runtime.autocast import product_type
from onepass.runtime.backend import NATIVE, choose, register_op, run_other
from onepass.runtime.checks import check_floating, check_linear
from onepass.runtime.dispatch import cast, transformed
from onepass.runtime.main_grad import has_own_place


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The formula, for every type."""
    return F.linear(x, weight, bias)


# ---- the public face: say what is wrong, choose who does it, return ----


def unsupported(x: Tensor, *args: Any, **options: Any) -> str | None:
    """Why it can't be done natively, or None: PyTorch's own products do it everywhere."""
    return None


def variant(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tp_group: dist.ProcessGroup | None = None,
    allreduce_dgrad: bool = False, sequence_parallel: bool = False, reduce_output: bool = False,
    deferred: DeferredWgrad | None = None, **options: Any,
) -> str:  # fmt: skip
    """What a call does beside its products."""
    own = has_own_place(weight) or has_own_place(bias)
    said = ["products by PyTorch", "gradients into main_grad" if own else "gradients to autograd"]
    if (allreduce_dgrad or sequence_parallel or reduce_output) and with_others(tp_group) is not None:
        said += ["y summed over tp_group"] if reduce_output else ["dx summed over tp_group under the weight's product"]
        said += ["divided along the first dimension"] if sequence_parallel else []
    said += ["the weight's product in flush()"] if deferred is not None else []
    return ", ".join(said)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tp_group: dist.ProcessGroup | None = None,
    allreduce_dgrad: bool = False, sequence_parallel: bool = False, reduce_output: bool = False,
    deferred: DeferredWgrad | None = None,
) -> None:  # fmt: skip
    _check_tensors(x, weight, bias)
    check_deferred(deferred, weight)
    _check_spread(x, tp_group, allreduce_dgrad, sequence_parallel, reduce_output)


def _check_tensors(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, but is a scalar")
    check_linear(x, x.shape[-1], weight, bias)


def _check_spread(
    x: Tensor, tp_group: dist.ProcessGroup | None, allreduce_dgrad: bool, sequence_parallel: bool, reduce_output: bool
) -> None:
    if allreduce_dgrad and sequence_parallel:
        raise ValueError("allreduce_dgrad and sequence_parallel exclude each other: under sequence_parallel dx is summed already")
    if allreduce_dgrad and reduce_output:
        raise ValueError("allreduce_dgrad and reduce_output exclude each other: where y is summed, each rank has its own dx")
    if sequence_parallel and x.dim() < 2:
        raise ValueError(f"x must have a first dimension for sequence_parallel to divide, but has shape {tuple(x.shape)}")
    if sequence_parallel and reduce_output:
        check_divisible(x, tp_group)


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
    backend: str | None = None,
) -> Tensor:
    """A linear layer. The gradients of parameters that carry ``main_grad`` are added there by the product itself.

    Without a ``tp_group``, or in one of a single rank, nothing is sent and the options that speak of it change nothing.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, of x's type.
        bias: ``[N]``, of x's type, or None.
        tp_group: the ranks that have parts of one weight. Forward and backward are collective.
        allreduce_dgrad: each rank has some of the weight's rows (column parallel): x's gradient is summed over the group, under
            the product for the weight's gradient.
        sequence_parallel: the tensor that all ranks would have alike is divided along the first dimension instead. x, which is
            gathered, and its gradient, which is summed; with `reduce_output` y.
        reduce_output: each rank has some of the weight's columns and of x's (row parallel): y is summed over the group, and then
            the bias is added. Under sequence_parallel the bias's gradient is a part of a sum over the group.
        deferred: keeps what the weight's gradient is made of, until its `flush`. The weight must carry main_grad.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND. The
            first three are the same here: PyTorch's products.

    Returns:
        ``[..., N]`` in x's type, or autocast's.
    """
    _check_tensors(x, weight, bias)
    deferred = check_deferred(deferred, weight)
    chosen = choose("linear", backend, None)
    spread = None
    if allreduce_dgrad or sequence_parallel or reduce_output:
        _check_spread(x, tp_group, allreduce_dgrad, sequence_parallel, reduce_output)
        spread = spread_over(tp_group, by_row=reduce_output, sequence=sequence_parallel)
    if chosen not in NATIVE:
        options: dict[str, Any] = {
            "tp_group": tp_group, "allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel,
        }  # fmt: skip
        options |= {} if deferred is None else {"deferred": deferred}
        return run_other("linear", chosen, x, weight, bias, reduce_output=reduce_output, **options)  # type: ignore[no-any-return]
    if spread is None and (transformed() or not (has_own_place(weight) or has_own_place(bias))):
        return F.linear(x, weight, bias)  # PyTorch's own has everything else
    return linear_product(cast(x, product_type(x)), weight, bias, spread, deferred)


register_op(linear, _check, unsupported, variant)
