"""dropout_add: y = residual + dropout(x + bias), as a transformer's layer ends.

Formula  y = residual + (x + bias) / (1 - p) where an element is kept, and residual where it is dropped. fp32 all the way, rounded
         once, where y is stored, to the residual's type. The seed, the row's number in the whole sequence and the column decide
         which elements are dropped (kernels/philox.py).
Shapes   x, residual and y [..., H], bias [H]. M rows.
Saves    the seed, which in plain eager mode on a GPU is a number: no tensor at all. Backward makes the mask again.
Bytes    forward reads x and residual and writes y; backward reads dy and writes dx. The residual's gradient is dy itself. The
         pass that makes dx also reduces the bias gradient, as bias_activation's does: a program owns a strip of rows and BLOCK_H
         columns, and the last program to reach those columns sums the partials.
Kernels  ops/dropout/kernels.py.
Ranks    of a tensor-parallel group drop the same elements, by the seed of the first rank: one small all-gather, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.distributed.collectives import group_of_several, start_all_gather
from onepass.gradients.main_grad import grad_requests
from onepass.gradients.vectors import contiguous_param, saved_vectors, vector_grads, with_fp32_grad
from onepass.kernels.language import kernels_unsupported
from onepass.kernels.philox import STEPS, Seed, as_tensor, draw_seed, dropout_formula, threshold_of
from onepass.ops.dropout import kernels
from onepass.ops.dropout.formula import DropoutOptions, backward_formula, global_rows
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_floating, check_same_shape, check_vector
from onepass.runtime.dispatch import cast, fast_apply, needs_grad, not_twice_differentiable, under_functorch
from onepass.runtime.formula import run_formula
from onepass.runtime.op import Call, define_op
from onepass.runtime.sharding import (
    WHOLE,
    Layout,
    Split,
    first_split,
    has_dtensor,
    leading_split,
    refuse,
    run_on_shards,
    split_output,
    sum_over,
)
from onepass.runtime.sizes import processors


def dropout_add_reference(
    x: Tensor, bias: Tensor | None, residual: Tensor, rows: Tensor | None = None, *, seed: Seed = 0, threshold: int = 0
) -> Tensor:
    """Return y by the formula, for every type. `rows` has the number of each row; it is needed where anything is dropped."""
    wide = _wide_type(x, residual)
    z = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    if threshold:
        assert rows is not None
        z = dropout_formula(z, seed, rows, threshold)
    return cast(residual.to(wide) + z, residual.dtype)


def _wide_type(x: Tensor, residual: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)


def _forward_formula(
    x: Tensor, residual: Tensor, bias: Tensor | None, seed: Tensor | None, first_row: Tensor | None, options: DropoutOptions
) -> Tensor:
    threshold, number = options
    drawn: Any = seed if number is None else number
    formula = partial(dropout_add_reference, seed=drawn, threshold=threshold)
    y: Tensor = run_formula(formula, "input", x, shared=(bias,), per_row=(residual, global_rows(x, first_row, threshold)))
    return y


# ---- autograd ----


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, bias: Tensor | None, seed: Tensor | None, first_row: Tensor | None,
        options: DropoutOptions,
    ) -> Tensor:  # fmt: skip
        ctx.call = options, x.dtype, None if bias is None else bias.dtype
        ctx.vectors = saved_vectors(ctx, 2, bias)
        ctx.save_for_backward(seed, first_row)
        y: Tensor = kernels.forward(x, residual, bias, seed, first_row, options)
        return y

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_residual, need_bias = ctx.needs_input_grad[:3]
        backward: Callable[..., Any] = kernels.backward
        if ctx.vectors is not None:
            grads = vector_grads(ctx.vectors, grad_requests(ctx, 3)[2:])
            assert grads is not None
            (need_bias,) = grads.needed()
            backward = partial(kernels.backward_into, grads)
        dx, dbias = _gradients(ctx, backward, dy, need_x, need_bias)
        return dx, dy if need_residual else None, dbias, None, None, None


class _DropoutAddFormula(torch.autograd.Function):
    """The same by PyTorch. It can be differentiated any number of times, and ignores a bias's main_grad."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, bias: Tensor | None, seed: Tensor | None, first_row: Tensor | None,
        options: DropoutOptions,
    ) -> Tensor:  # fmt: skip
        ctx.call = options, x.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(seed, first_row)
        return _forward_formula(x, residual, bias, seed, first_row, options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_residual, need_bias = ctx.needs_input_grad[:3]
        dx, dbias = _gradients(ctx, backward_formula, dy, need_x, need_bias)
        return dx, dy if need_residual else None, dbias, None, None, None


def _gradients(
    ctx: Any, backward: Callable[..., tuple[Tensor | None, Tensor | None]], dy: Tensor, need_x: bool, need_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx and dbias. dx is dy itself where nothing is dropped."""
    options, dx_type, dbias_type = ctx.call
    as_it_is = not options.threshold and dy.dtype == dx_type
    kinds = dx_type if need_x and not as_it_is else None, dbias_type if need_bias else None
    if kinds == (None, None):
        return dy if need_x else None, None
    dx, dbias = backward(dy, *ctx.saved_tensors, options, *kinds)
    return dy if need_x and as_it_is else dx, dbias


_apply = fast_apply(_DropoutAdd)


# ---- one seed for a group of ranks ----


def _group_seed(x: Tensor, seed: Seed, group: dist.ProcessGroup, sequence: bool) -> tuple[Tensor, Tensor | None]:
    """Return the seed of the group's first rank, [1], and under `sequence` the number of this rank's first row, [1].

    The CPU does not wait for the device.
    """
    mine = as_tensor(seed, x.device)
    if not sequence:
        return start_all_gather(mine, group).wait()[:1], None
    rows = torch.full((1,), prod(x.shape[:-1]), dtype=torch.int64, device=x.device)
    gathered = start_all_gather(torch.cat([mine, rows]), group).wait().view(-1, 2)
    return gathered[0, :1], gathered[: group.rank(), 1].sum().view(1)


# ---- the public function: say what is wrong, choose who does it, return ----


def unsupported(x: Tensor, residual: Tensor) -> str | None:
    """Why the kernels can't take this call, or None."""
    for name, t in (("x", x), ("residual", residual)):
        if t.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"{name} is {t.dtype}"
    return kernels_unsupported("x", x)


def _variant(call: Call) -> str:
    """Which kernels a call runs, and their tiles."""
    x = call.x
    if not x.numel():
        return "the PyTorch formula, as there is nothing to do"
    H = x.shape[-1]
    M = x.numel() // H
    forward, backward = kernels.forward_tiles(M, H), kernels.backward_tiles(M, H, processors(x.device))
    threshold = threshold_of("p", call.p) if call.training else 0
    description = f"forward in blocks of {forward.block_m} x {forward.block_h}, {forward.down * forward.across} programs; "
    if call.bias is not None:
        description += (
            f"backward in {backward.down} strips of {backward.rows} rows x {backward.across} tiles of {backward.block_h} "
            "columns, the bias gradient in the same kernel; "
        )
    else:
        description += "backward in the same blocks; " if threshold else "no backward to do; "
    return description + (f"{threshold} of {STEPS} dropped, the seed kept and no mask" if threshold else "nothing dropped")


def _check(given: Mapping[str, Any]) -> tuple[int, dist.ProcessGroup | None]:
    """Raise where an argument is wrong. Return how many of 65536 elements p drops, and the group if there are others in it."""
    x, bias = given["x"], given["bias"]
    check_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, but is a scalar")
    check_same_shape("residual", given["residual"], x)
    if bias is not None:
        check_vector("bias", bias, x)
    if given["sequence_parallel"] and x.dim() < 2:
        raise ValueError(f"x must have at least two dimensions under sequence_parallel, but has shape {tuple(x.shape)}")
    return threshold_of("p", given["p"]), group_of_several(given["tp_group"], "tp_group")


def shard_dropout_add(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided. The first rank's random state decides for all: those with the same rows drop the same elements.

    Where the first dimension is divided, the elements dropped are those of one rank with all rows. Where another is, rows are
    numbered rank by rank, so that no two rows of the whole drop alike.
    """
    refuse(given, "tp_group")
    x = given["x"]
    rows = first_split(leading_split(at["x"], x), leading_split(at["residual"], x))
    inputs: dict[str, Split] = {"x": rows, "residual": rows, "bias": WHOLE}
    random = bool(given["training"] and given["p"])
    return Layout(
        inputs, {"bias": sum_over(rows)}, split_output(rows, x),
        group="tp_group" if random else "", options={"sequence_parallel": rows != WHOLE} if random else {},
    )  # fmt: skip


def dropout_add(
    x: Tensor,
    residual: Tensor,
    p: float,
    *,
    bias: Tensor | None = None,
    training: bool = True,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Return ``residual + dropout(x + bias)``, in one pass, without saving a mask.

    Args:
        x: ``[..., H]``.
        residual: of x's shape, of any floating-point type. Its gradient is y's, uncopied.
        p: the probability of dropping an element, 0 to 1, rounded to a multiple of 2**-16. Kept elements are divided by exactly
            their probability. A dropped element becomes 0, also where it was NaN.
        bias: ``[H]``, of any floating-point type, or None. The gradient of a bias with a ``main_grad`` is added there.
        training: False drops nothing, as p=0 does: y is ``residual + (x + bias)``, and no random state is used.
        tp_group: ranks that drop the same elements whatever their random states: the first rank's decides. Forward is
            collective.
        sequence_parallel: x is this rank's part of the first dimension, in the order of tp_group's ranks; parts may differ in
            length, and be empty. The elements dropped are those that one rank with the whole sequence would drop. The bias's
            gradient is a part of a sum over the group.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        ``[..., H]`` in the residual's type. Arithmetic is in fp32 and rounded once.

    Random numbers come from PyTorch's default generator of x's device. torch.manual_seed repeats them, activation checkpointing
    drops the same elements again, and each replay of a CUDA graph drops others. The seed, the row and the column decide which
    elements are dropped; backend, tiles and strides do not matter.
    """
    given = {
        "x": x, "residual": residual, "p": p, "bias": bias, "training": training, "tp_group": tp_group,
        "sequence_parallel": sequence_parallel,
    }  # fmt: skip
    if has_dtensor(x, residual):
        return run_on_shards("dropout_add", **given, backend=backend)  # type: ignore[no-any-return]
    threshold, group = _check(given)
    if not training:
        threshold = 0
    chosen = choose("dropout_add", backend, unsupported(x, residual))
    if chosen not in NATIVE:
        given |= {"tp_group": group, "sequence_parallel": sequence_parallel and group is not None}
        return run_other("dropout_add", chosen, **given)  # type: ignore[no-any-return]
    seed: Any = None
    first_row = number = None
    if threshold:
        seed = draw_seed(x, residual, bias)
        if group is not None:
            seed, first_row = _group_seed(x, seed, group, sequence_parallel)
        if type(seed) is int:
            seed, number = None, seed
    options = DropoutOptions(threshold, number)
    if chosen == "torch" or x.numel() == 0:
        by_formula: Any = _forward_formula if torch.compiler.is_compiling() or under_functorch() else _DropoutAddFormula.apply
        return by_formula(x, residual, with_fp32_grad(bias), seed, first_row, options)  # type: ignore[no-any-return]
    bias = contiguous_param(bias)
    run = _apply if needs_grad(x, residual, bias) else kernels.forward
    return run(x, residual, bias, seed, first_row, options)  # type: ignore[no-any-return]


define_op(
    dropout_add,
    check=lambda call: _check(vars(call)),
    unsupported=lambda call: unsupported(call.x, call.residual),
    variant=_variant,
    sharding=shard_dropout_add,
)
