"""dropout_add: y = residual + dropout(x + bias), as a transformer's layer ends.

Formula  y = residual + (x + bias) / (1 - p) where an element is kept, and residual where it is dropped; fp32 all the way, rounded
         once, where y is stored, to the residual's type. Which are dropped is kernels/random.py's: by a seed, the number of the
         row in the whole sequence and the column.
Shapes   x, residual and y [..., H], bias [H]. M rows.
Saves    the seed, which in plain eager mode is a number: no tensor at all. The mask is made again.
Bytes    forward reads x and residual and writes y; backward reads dy and writes dx. The residual's gradient is dy itself. The
         bias gradient is reduced in the pass that makes dx, as bias_activation's is: a program owns a strip of rows and BLOCK_H
         columns, and the last of those columns to arrive sums the partials.
Kernels  kernels/dropout_add.py.
Ranks    of a tensor-parallel group drop the same elements, by the seed of their first: one small all-gather, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.kernels.dropout_add import backward_tiles, dropout_add_forward, forward_tiles, registered_forward, run_backward
from onepass.kernels.random import STEPS, Seed, dropped_formula, row_numbers, threshold_of
from onepass.parallel.collectives import start_all_gather, with_others
from onepass.runtime.backend import NATIVE, choose, register_op, run_other
from onepass.runtime.checks import check_floating, check_same_shape, check_vector
from onepass.runtime.dispatch import bare_apply, cast, needs_grad, once, transformed, watched
from onepass.runtime.formula import run_formula
from onepass.runtime.lang import no_triton
from onepass.runtime.main_grad import asked
from onepass.runtime.main_grad_vectors import gathered, packed, sums_of, vectors_of
from onepass.runtime.seeds import as_tensor, drawn_seed
from onepass.runtime.sizes import processors

Maybe = Tensor | None


def dropout_add_reference(
    x: Tensor, bias: Tensor | None, residual: Tensor, rows: Tensor | None = None, *, seed: Seed = 0, threshold: int = 0
) -> Tensor:
    """The formula, for every type: rows has the number of each row, where anything is dropped."""
    wide = _wide_type(x, residual)
    z = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    if threshold:
        assert rows is not None
        z = dropped_formula(z, seed, rows, threshold)
    return cast(residual.to(wide) + z, residual.dtype)


def _wide_type(x: Tensor, residual: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)


# ---- by PyTorch, over blocks of rows on a CPU ----

_BLOCK = 1 << 17  # elements


def _numbers(x: Tensor, first: Maybe, threshold: int) -> Maybe:
    """Of the rows, where anything is dropped."""
    if not threshold:
        return None
    return row_numbers(x) if first is None else row_numbers(x) + first.view(())


def _forward_by_formula(x: Tensor, residual: Tensor, bias: Maybe, seed: Seed | None, first: Maybe, threshold: int) -> Tensor:
    formula = partial(dropout_add_reference, seed=0 if seed is None else seed, threshold=threshold)
    y: Tensor = run_formula(formula, "input", x, shared=(bias,), per_row=(residual, _numbers(x, first, threshold)))
    return y


def _pieces(dy: Tensor, rows: Maybe) -> Iterator[tuple[Tensor, Maybe]]:
    """Blocks of dy's rows with their numbers."""
    M, H = prod(dy.shape[:-1]), dy.shape[-1]
    step = max(1, _BLOCK // max(H, 1) if dy.device.type == "cpu" else M)
    dy, rows = dy.reshape(M, H), None if rows is None else rows.view(M)
    for start in range(0, max(M, 1), step):
        yield dy[start : start + step], None if rows is None else rows[start : start + step]


def _backward_by_formula(
    dy: Tensor, seed: Seed | None, first: Maybe, threshold: int, dx_type: torch.dtype | None, dbias_type: torch.dtype | None
) -> tuple[Maybe, Maybe]:
    """`_backward`; where it is asked for, a graph of it comes too."""
    wide = torch.promote_types(dy.dtype, torch.float32)
    pieces, sums = [], dy.new_zeros(dy.shape[-1], dtype=wide)
    for dz, rows in _pieces(dy, _numbers(dy, first, threshold)):
        dz = dz.to(wide)
        if rows is not None:
            dz = dropped_formula(dz, 0 if seed is None else seed, rows, threshold)
        if dx_type is not None:
            pieces.append(dz.to(dx_type))
        if dbias_type is not None:
            sums = sums + dz.sum(0)
    return (
        None if dx_type is None else torch.cat(pieces).view(dy.shape),
        None if dbias_type is None else cast(sums, dbias_type),
    )


# ---- autograd ----


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, bias: Maybe, seed: Seed | None, first: Maybe, threshold: int
    ) -> Tensor:  # fmt: skip
        _keep(ctx, x, bias, seed, first, threshold)
        ctx.vectors = vectors_of(ctx, 2, bias)
        return (registered_forward if watched(x, residual, bias) else dropout_add_forward)(
            x, residual, bias, seed, first, threshold
        )

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Maybe, ...]:
        need_x, need_residual, need_bias = ctx.needs_input_grad[:3]
        sums = None
        if ctx.vectors is not None:
            sums = sums_of(ctx.vectors, asked(ctx, True, True, True)[2:])
            assert sums is not None
            (need_bias,) = sums.needed()
        dx, dbias = _gradients(ctx, partial(run_backward, sums), dy, need_x, need_bias)
        return dx, dy if need_residual else None, dbias, None, None, None


class _ByFormula(torch.autograd.Function):
    """By PyTorch, keeping as little; it can be differentiated as often as one likes, and a bias's main_grad is not its affair."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, bias: Maybe, seed: Seed | None, first: Maybe, threshold: int
    ) -> Tensor:  # fmt: skip
        _keep(ctx, x, bias, seed, first, threshold)
        return _forward_by_formula(x, residual, bias, seed, first, threshold)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Maybe, ...]:
        need_x, need_residual, need_bias = ctx.needs_input_grad[:3]
        dx, dbias = _gradients(ctx, _backward_by_formula, dy, need_x, need_bias)
        return dx, dy if need_residual else None, dbias, None, None, None


def _keep(ctx: Any, x: Tensor, bias: Maybe, seed: Seed | None, first: Maybe, threshold: int) -> None:
    in_memory = isinstance(seed, Tensor)
    ctx.call = threshold, None if in_memory else seed, x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(seed if in_memory else None, first)


def _gradients(
    ctx: Any, backward: Callable[..., tuple[Maybe, Maybe]], dy: Tensor, need_x: bool, need_bias: bool
) -> tuple[Maybe, Maybe]:
    """dx, which is dy itself where nothing is dropped, and dbias."""
    in_memory, first = ctx.saved_tensors
    threshold, number, dx_type, dbias_type = ctx.call
    as_it_is = not threshold and dy.dtype == dx_type
    kinds = dx_type if need_x and not as_it_is else None, dbias_type if need_bias else None
    if kinds == (None, None):
        return dy if need_x else None, None
    dx, dbias = backward(dy, in_memory if number is None else number, first, threshold, *kinds)
    return dy if need_x and as_it_is else dx, dbias


_apply = bare_apply(_DropoutAdd)


# ---- what ranks have in common ----


def _seed_of_all(x: Tensor, seed: Seed, group: dist.ProcessGroup, sequence: bool) -> tuple[Tensor, Maybe]:
    """The seed of the group's first rank and, where each has a part of the rows, the number of this one's first, both [1].

    The CPU waits for nothing.
    """
    mine = as_tensor(seed, x.device)
    if not sequence:
        return start_all_gather(mine, group).wait()[:1], None
    rows = torch.full((1,), prod(x.shape[:-1]), dtype=torch.int64, device=x.device)
    found = start_all_gather(torch.cat([mine, rows]), group).wait().view(-1, 2)
    return found[0, :1], found[: group.rank(), 1].sum().view(1)


# ---- the public face: say what is wrong, choose who does it, return ----


def unsupported(x: Tensor, residual: Tensor, p: float = 0.0, **options: Any) -> str | None:
    """Why the kernels can't take this call, or None."""
    for name, t in (("x", x), ("residual", residual)):
        if t.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"{name} is {t.dtype}"
    if transformed():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    return no_triton(x)


def variant(
    x: Tensor, residual: Tensor, p: float, *, bias: Maybe = None, training: bool = True, **options: Any
) -> str:  # fmt: skip
    """Which kernels a call runs, and their tiles."""
    if not x.numel():
        return "the PyTorch formula, as there is nothing to do"
    H = x.shape[-1]
    forward, backward = forward_tiles(x.numel() // H, H), backward_tiles(x.numel() // H, H, processors(x.device))
    threshold = threshold_of("p", p) if training else 0
    said = f"forward in blocks of {forward.block_m} x {forward.block_h}, {forward.down * forward.across} programs; "
    if bias is not None:
        said += (
            f"backward in {backward.down} strips of {backward.rows} rows x {backward.across} tiles of {backward.block_h} "
            "columns, the bias gradient in the same kernel; "
        )
    else:
        said += "backward in the same blocks; " if threshold else "no backward to do; "
    return said + (f"{threshold} of {STEPS} dropped, the seed kept and no mask" if threshold else "nothing dropped")


def _check(
    x: Tensor, residual: Tensor, p: float, *, bias: Maybe = None, training: bool = True,
    tp_group: dist.ProcessGroup | None = None, sequence_parallel: bool = False,
) -> int:  # fmt: skip
    """Raise where an argument is wrong; of how many of 65536 are to be dropped where none is."""
    check_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, but is a scalar")
    check_same_shape("residual", residual, x)
    if bias is not None:
        check_vector("bias", bias, x)
    if sequence_parallel and x.dim() < 2:
        raise ValueError(f"x must have at least two dimensions under sequence_parallel, but has shape {tuple(x.shape)}")
    return threshold_of("p", p)


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
    """``residual + dropout(x + bias)``, in one pass; no mask is kept.

    Args:
        x: ``[..., H]``.
        residual: of x's shape, of any floating-point type. Its gradient is y's, uncopied.
        p: how probably an element is dropped, 0 to 1, taken to the next multiple of 2**-16; what is kept is divided by exactly
            how probably that is. What is dropped is 0, whatever it was.
        bias: as long as x's last dimension, of any floating-point type, or None. The gradient of one with a ``main_grad`` is
            added there.
        training: False drops nothing, as p=0 does: y is ``residual + (x + bias)``, and no random state is used.
        tp_group: ranks that drop the same elements, whichever random states they come with: the first one's counts. Forward is
            collective.
        sequence_parallel: x is this rank's part of the first dimension, in the order of tp_group's ranks; parts may differ in
            length, and be empty. What is dropped is what would be of the whole. The bias's gradient is a part of a sum.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        ``[..., H]`` in the residual's type. Arithmetic is in fp32 and rounded once.

    Random numbers are those of PyTorch's default generator of x's device: torch.manual_seed repeats them, activation
    checkpointing drops the same again, a CUDA graph's replays each drop others. Which elements are dropped depends on the seed,
    the row and the column, not on backend, tiles or strides.
    """
    threshold = _check(x, residual, p, bias=bias, sequence_parallel=sequence_parallel)
    if not training:
        threshold = 0
    group = with_others(tp_group, "tp_group")
    chosen = choose("dropout_add", backend, unsupported(x, residual))
    if chosen not in NATIVE:
        options: dict[str, Any] = {"bias": bias, "training": training}
        options |= {} if group is None else {"tp_group": tp_group, "sequence_parallel": sequence_parallel}
        return run_other("dropout_add", chosen, x, residual, p, **options)  # type: ignore[no-any-return]
    seed: Seed | None = None
    first = None
    if threshold:
        seed = drawn_seed(x, residual, bias)
        if group is not None:
            seed, first = _seed_of_all(x, seed, group, sequence_parallel)
    if chosen == "torch" or x.numel() == 0:
        by_formula: Any = _forward_by_formula if torch.compiler.is_compiling() or transformed() else _ByFormula.apply
        return by_formula(x, residual, gathered(bias), seed, first, threshold)  # type: ignore[no-any-return]
    bias = packed(bias)
    if not needs_grad(x, residual, bias):
        forward = registered_forward if watched(x, residual, bias) else dropout_add_forward
        return forward(x, residual, bias, seed, first, threshold)
    return _apply(x, residual, bias, seed, first, threshold)  # type: ignore[no-any-return]


register_op(dropout_add, _check, unsupported, variant)
