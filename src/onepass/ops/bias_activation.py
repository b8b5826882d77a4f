"""bias_activation: y = act(x + bias), or act(x1 + bias1) * (x2 + bias2) for a gated act, times a token's weight.

Order    bias, clamp, linear_offset, activation, token weight; fp32 all the way, rounded once, where y is stored.
Shapes   x [..., W], bias [W], token_weight [...] or [..., 1], y [..., H]; W is H, or 2H for a gated activation (x1 and x2 are
         the halves of a row). M rows.
Saves    x, bias, token_weight: backward rebuilds the rest. x in the store asked for: as it is, in fp8, or on the host.
Bytes    forward reads x and writes y; backward reads dy and x and writes dx. The bias gradient is reduced from registers in
         the same pass: a program owns a strip of rows and BLOCK_H columns, writes one fp32 partial a column, and the last
         program of those columns to arrive sums the partials, always in the same order, and stores the gradient once.
         The token weight's gradient needs whole rows: one fp32 partial a row and column tile, then a column sum of those.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.activations import Activation, activation_of, find_activation
from onepass.kernels.column_sum import column_sum
from onepass.kernels.rows import aligned, known_align, load_rows, load_vector, store_fp8_rows
from onepass.kernels.strips import arrive, sum_strips
from onepass.runtime import saved
from onepass.runtime.backend import NATIVE, choose, register_op, run_other, shorthand
from onepass.runtime.checks import check_floating, check_number, check_per_token, check_vector
from onepass.runtime.dispatch import bare_apply, needs_grad, once, registered, transformed, watched
from onepass.runtime.formula import run_formula
from onepass.runtime.lang import device_function, no_triton, tl
from onepass.runtime.launch import Bound, Grid, grid_of, kernel
from onepass.runtime.layout import as_rows
from onepass.runtime.main_grad import gathered
from onepass.runtime.saved import FP8_RUN, SAVES, fp8_empty
from onepass.runtime.scratch import kept_scratch, new_scratch
from onepass.runtime.sizes import ceil_div, power_of_two, processors
from onepass.runtime.validation import validating


def bias_activation_reference(
    x: Tensor,
    bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    *,
    activation: str | Activation = "gelu",
    clamp: float | None = None,
    linear_offset: float = 0.0,
) -> Tensor:
    """The formula, for every type: fp64 inputs make it the oracle, others the `torch` backend (fp32 inside)."""
    act = activation if isinstance(activation, Activation) else find_activation(activation)
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    if act.gated:
        gate, linear = z.chunk(2, -1)
        if clamp is not None:
            gate, linear = gate.clamp(max=clamp), linear.clamp(-clamp, clamp)
        y = act.formula(gate) * (linear + linear_offset)
    else:
        y = act.formula(z)
    if token_weight is not None:
        y = y * token_weight.to(wide).reshape(*x.shape[:-1], 1)
    return y.to(x.dtype)


# ---- kernels: load, go to fp32 at once, store in the storage type ----


@device_function
def _clamped(gate, linear, clamp):
    return tl.where(gate > clamp, clamp, gate), tl.where(linear > clamp, clamp, tl.where(linear < -clamp, -clamp, linear))


@kernel
def _forward_kernel(
    x_ptr, bias_ptr, weight_ptr, y_ptr, codes_ptr, exponents_ptr, M, H, X_ROW, clamp, offset,
    ACT: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if GATED else 1
    H, X_ROW = aligned(H, ALIGN), aligned(X_ROW, ALIGN)
    tile = tl.program_id(0)
    columns = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < M)[:, None] & (columns < H)[None, :]
    x = load_rows(x_ptr, None, rows, columns, H, X_ROW, inside, 0, PARTS, RUN)
    z = x + load_vector(bias_ptr, columns, columns < H)[None, :]
    if codes_ptr is not None:
        store_fp8_rows(codes_ptr, exponents_ptr, x, rows, columns, tile, M, H, inside, 0, PARTS, RUN, BLOCK_H)
    if GATED:
        x2 = load_rows(x_ptr, None, rows, columns, H, X_ROW, inside, 1, PARTS, RUN)
        linear = x2 + load_vector(bias_ptr, columns + H, columns < H)[None, :]
        if codes_ptr is not None:
            store_fp8_rows(codes_ptr, exponents_ptr, x2, rows, columns, tile, M, H, inside, 1, PARTS, RUN, BLOCK_H)
        if clamp is not None:
            z, linear = _clamped(z, linear, clamp)
        if offset is not None:
            linear += offset
        y = ACT(z) * linear
    else:
        y = ACT(z)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + rows[:, None] * H + columns[None, :], y, mask=inside)


@kernel
def _backward_kernel(
    dy_ptr, x_ptr, exponents_ptr, bias_ptr, weight_ptr, dx_ptr, dbias_ptr, partial_ptr, arrived_ptr, dweight_ptr,
    M, ROWS, H, DY_ROW, X_ROW, clamp, offset,
    ACT: tl.constexpr, DERIVATIVE: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if GATED else 1
    H, DY_ROW, X_ROW = aligned(H, ALIGN), aligned(DY_ROW, ALIGN), aligned(X_ROW, ALIGN)
    tile, strip = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    within = (columns < H)[None, :]
    bias = load_vector(bias_ptr, columns, columns < H)[None, :]
    dbias = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    if GATED:
        bias2 = load_vector(bias_ptr, columns + H, columns < H)[None, :]
        dbias2 = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    for first in tl.range(0, ROWS, BLOCK_M, num_stages=STAGES):
        rows = strip * ROWS + first + tl.arange(0, BLOCK_M)  # ROWS is a multiple of BLOCK_M: strips don't overlap
        real = rows < M
        inside = real[:, None] & within
        rows = tl.minimum(rows, M - 1)  # past the end the last row again, with dy 0: adds nothing, whatever the derivative
        dy = tl.load(dy_ptr + rows[:, None] * DY_ROW + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        z = load_rows(x_ptr, exponents_ptr, rows, columns, H, X_ROW, within, 0, PARTS, RUN) + bias
        if GATED:
            linear = load_rows(x_ptr, exponents_ptr, rows, columns, H, X_ROW, within, 1, PARTS, RUN) + bias2
            if clamp is not None:  # the boundary itself passes gradient
                over, over2 = z > clamp, (linear > clamp) | (linear < -clamp)
                z, linear = _clamped(z, linear, clamp)
            if offset is not None:
                linear += offset
        if dweight_ptr is not None:
            y = ACT(z) * linear if GATED else ACT(z)
            at = dweight_ptr + tile * M.to(tl.int64) + rows
            tl.store(at, tl.sum(tl.where(inside, y * dy, 0.0), 1), mask=real)
        if weight_ptr is not None:
            dy *= tl.load(weight_ptr + rows).to(tl.float32)[:, None]
        dz = dy * DERIVATIVE(z)
        if GATED:
            dz *= linear
            dz2 = dy * ACT(z)
            if clamp is not None:
                dz, dz2 = tl.where(over, 0.0, dz), tl.where(over2, 0.0, dz2)
            if dx_ptr is not None:
                tl.store(dx_ptr + rows[:, None] * (2 * H) + (columns + H)[None, :], dz2, mask=inside)
            dbias2 += dz2
        if dx_ptr is not None:
            tl.store(dx_ptr + rows[:, None] * (PARTS * H) + columns[None, :], dz, mask=inside)
        dbias += dz
    if dbias_ptr is not None:
        at = partial_ptr + strip * (PARTS * H) + columns
        tl.store(at, tl.sum(dbias, 0), mask=columns < H)
        if GATED:
            tl.store(at + H, tl.sum(dbias2, 0), mask=columns < H)
        if arrive(arrived_ptr, tile):
            sum_strips(partial_ptr, dbias_ptr, columns, tl.num_programs(1), PARTS * H, columns < H, BLOCK_S, BLOCK_H)
            if GATED:
                sum_strips(partial_ptr, dbias_ptr, columns + H, tl.num_programs(1), PARTS * H, columns < H, BLOCK_S, BLOCK_H)
            tl.store(arrived_ptr + tile, 0)


# ---- tiles: from the shape and the device, never by trial ----


class _Tiles(NamedTuple):
    block_m: int
    block_h: int
    across: int  # column tiles
    down: int  # blocks of rows in forward, strips of rows in backward
    rows: int  # of a strip, in backward
    num_warps: int
    stages: int = 1


def _forward_tiles(M: int, H: int, fp8: bool) -> _Tiles:
    """Eight values a thread where tiles are full or rows short; sixteen where the last tile of each row is partly idle."""
    block_h = min(power_of_two(H), 512)
    values = 1024 if H <= 64 or H % 512 == 0 or fp8 else 2048
    if fp8 and H <= FP8_RUN:  # encoding takes registers, and whole runs
        block_h, values = FP8_RUN, 512
    return _Tiles(values // block_h, block_h, ceil_div(H, block_h), ceil_div(M, values // block_h), 0, 4)


def _backward_tiles(M: int, H: int, gated: bool, fp8: bool, multiprocessors: int) -> _Tiles:
    """As many strips as the GPU holds programs at a time, each with the loads of three blocks in flight."""
    if H <= 64:
        block_h = FP8_RUN if fp8 else power_of_two(H)
        block_m, num_warps, resident, stages = 2048 // block_h, 8, 2, 4
    elif gated and not fp8 and ceil_div(H, 512) * 512 <= 1.05 * H:
        block_m, block_h, num_warps, resident, stages = 4, 512, 4, 2, 3
    else:
        block_m, block_h, num_warps, resident, stages = 8, 128, 2, 6, 3
    if fp8:  # decoding takes registers: fewer values a thread
        block_m, num_warps, stages = block_m // 2, max(num_warps, 4), 1
    across = ceil_div(H, block_h)
    strips = max(1, min(ceil_div(M, block_m), resident * multiprocessors // across))
    rows = ceil_div(ceil_div(M, strips), block_m) * block_m
    return _Tiles(block_m, block_h, across, ceil_div(M, rows), rows, num_warps, stages)


@lru_cache(1024)
def _bind_forward(
    act: Activation, H: int, x_row: int, clamp: float | None, offset: float | None, block_m: int, block_h: int, num_warps: int
) -> Bound:
    fixed = H, x_row, clamp, offset, act.forward, act.gated, FP8_RUN, known_align(H, x_row), block_m, block_h
    bound: Bound = _forward_kernel.bind(*fixed, num_warps=num_warps)
    return bound


@lru_cache(4096)
def _forward_plan(
    act: Activation, M: int, H: int, x_row: int, fp8: bool, clamp: float | None, offset: float | None
) -> tuple[Grid, Bound]:
    tiles = _forward_tiles(M, H, fp8)
    bound = _bind_forward(act, H, x_row, clamp, offset, tiles.block_m, tiles.block_h, tiles.num_warps)
    return grid_of(tiles.across, tiles.down), bound


@lru_cache(1024)
def _bind_backward(
    act: Activation, H: int, dy_row: int, x_row: int, clamp: float | None, offset: float | None,
    block_m: int, block_h: int, num_warps: int, stages: int,
) -> Bound:  # fmt: skip
    block_s = max(1, 1024 * num_warps // block_h)  # the last program sums 32 values a thread at once
    bound: Bound = _backward_kernel.bind(
        H, dy_row, x_row, clamp, offset, act.forward, act.derivative, act.gated, FP8_RUN, known_align(H, dy_row, x_row),
        block_m, block_h, block_s, stages, num_warps=num_warps,
    )  # fmt: skip
    return bound


@lru_cache(4096)
def _backward_plan(
    act: Activation, M: int, H: int, dy_row: int, x_row: int, fp8: bool,
    clamp: float | None, offset: float | None, device: torch.device,
) -> tuple[_Tiles, Bound]:  # fmt: skip
    t = _backward_tiles(M, H, act.gated, fp8, processors(device))
    return t, _bind_backward(act, H, dy_row, x_row, clamp, offset, t.block_m, t.block_h, t.num_warps, t.stages)


# ---- registered ops: opaque to the compiler, visible to checkpointing, cheap to call ----


def _forward(
    x: Tensor, bias: Tensor | None, weight: Tensor | None, activation: str, clamp: float | None, offset: float | None,
    codes: Tensor | None = None, exponents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    act = activation_of(activation)
    W = x.shape[-1]
    M = x.numel() // W
    H = W // act.parts
    if x.is_contiguous() and not act.gated:
        x_row, y = W, torch.empty_like(x)
    else:
        x, x_row = as_rows(x)
        y = x.new_empty((M, H) if x.dim() == 2 else (*x.shape[:-1], H))
    grid, launch = _forward_plan(act, M, H, x_row, codes is not None, clamp, offset)
    launch(grid, x, bias, weight, y, codes, exponents, M)
    return y


def _forward_fp8(
    x: Tensor, bias: Tensor | None, weight: Tensor | None, activation: str, clamp: float | None, offset: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    codes, exponents = fp8_empty(x, activation_of(activation).parts)
    return _forward(x, bias, weight, activation, clamp, offset, codes, exponents), codes, exponents


def _backward(
    dy: Tensor, x: Tensor, exponents: Tensor | None, bias: Tensor | None, weight: Tensor | None,
    activation: str, clamp: float | None, offset: float | None, need_dx: bool, need_dbias: bool, need_dweight: bool,
    *, keep_scratch: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    act = activation_of(activation)
    dy, dy_row = as_rows(dy)
    x, x_row = as_rows(x)
    W = x.shape[-1]
    H = W // act.parts
    M = x.numel() // W
    device = x.device
    tiles, launch = _backward_plan(act, M, H, dy_row, x_row, exponents is not None, clamp, offset, device)
    dx = dbias = partial = arrived = dweight = row_sums = None
    if need_dx:
        dx = torch.empty_like(x, dtype=dy.dtype, memory_format=torch.contiguous_format)  # x may be fp8 codes
    if need_dbias:
        assert bias is not None
        dbias = torch.empty_like(bias)
        partial, arrived = (kept_scratch if keep_scratch else new_scratch)(tiles.down * W, tiles.across, device)
    if need_dweight:
        assert weight is not None
        dweight = torch.empty_like(weight)
        one = tiles.across == 1  # it sees whole rows
        row_sums = dweight if one else torch.empty((tiles.across, M), dtype=torch.float32, device=device)
    grid = tiles.across, tiles.down, 1
    launch(grid, dy, x, exponents, bias, weight, dx, dbias, partial, arrived, row_sums, M, tiles.rows)
    if dweight is not None and row_sums is not None and row_sums is not dweight:
        column_sum(row_sums, dweight)
    return dx, dbias, dweight


def _backward_all(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """A registered op returns tensors only, empty ones for what was not asked; and graphs want to own what they allocate."""
    grads = _backward(dy, *args, keep_scratch=False)
    return tuple(t if t is not None else dy.new_empty(0) for t in grads)


def _forward_fake(x: Tensor, bias: Tensor | None, weight: Tensor | None, activation: str, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // activation_of(activation).parts))


def _forward_fp8_fake(x: Tensor, bias: Any, weight: Any, activation: str, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _forward_fake(x, bias, weight, activation), *fp8_empty(x, activation_of(activation).parts)


def _backward_fake(
    dy: Tensor, x: Tensor, exponents: Any, bias: Any, weight: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    need_dx, need_dbias, need_dweight = rest[-3:]
    return (
        dy.new_empty(x.shape if need_dx else 0),
        bias.new_empty(bias.shape) if need_dbias else dy.new_empty(0),
        weight.new_empty(weight.shape) if need_dweight else dy.new_empty(0),
    )


_ARGS = "Tensor x, Tensor? bias, Tensor? token_weight, str activation, float? clamp, float? linear_offset"
_forward_op = registered(f"bias_activation({_ARGS}) -> Tensor", _forward, _forward_fake)
_forward_fp8_op = registered(f"bias_activation_fp8({_ARGS}) -> (Tensor, Tensor, Tensor)", _forward_fp8, _forward_fp8_fake)
_backward_op = registered(
    "bias_activation_backward(Tensor dy, Tensor x, Tensor? exponents, Tensor? bias, Tensor? token_weight, str activation, "
    "float? clamp, float? linear_offset, bool need_dx, bool need_dbias, bool need_dweight) -> (Tensor, Tensor, Tensor)",
    _backward_all,
    _backward_fake,
)


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor | None,
        activation: str, clamp: float | None, offset: float | None, save: str,
    ) -> Tensor:  # fmt: skip
        ctx.call = activation, clamp, offset, save, x.device
        seen = watched(x, bias, weight)
        if save == "fp8":
            y, codes, exponents = (_forward_fp8_op if seen else _forward_fp8)(x, bias, weight, activation, clamp, offset)
            ctx.save_for_backward(codes, exponents, bias, weight)
        else:
            y = (_forward_op if seen else _forward)(x, bias, weight, activation, clamp, offset)
            ctx.save_for_backward(saved.offload(x) if save == "offload" else x, None, bias, weight)
        return y

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, exponents, bias, weight = ctx.saved_tensors
        activation, clamp, offset, save, device = ctx.call
        if save == "offload":
            x = saved.fetch(x, device)
        needs = ctx.needs_input_grad[:3]
        backward = _backward_op if watched(dy, x, bias, weight) else _backward
        dx, dbias, dweight = backward(dy, x, exponents, bias, weight, activation, clamp, offset, *needs)
        return dx if needs[0] else None, dbias if needs[1] else None, dweight if needs[2] else None, None, None, None, None


_apply = bare_apply(_BiasActivation)


# ---- the public face: say what is wrong, choose who does it, return ----


def unsupported(x: Tensor, bias: Tensor | None = None, activation: str = "gelu", **options: Any) -> str | None:
    """Why the kernels can't take this call, or None."""
    return _no_kernels(x, find_activation(activation))


def _no_kernels(x: Tensor, act: Activation) -> str | None:
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x is {x.dtype}"
    if act.forward is None:
        return f"activation {act.name!r} was registered without Triton functions"
    if transformed():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    return no_triton(x)


def variant(x: Tensor, bias: Tensor | None = None, activation: str = "gelu", *, save: str = "input", **options: Any) -> str:
    """Which kernels a call runs, and their tiles."""
    act = find_activation(activation)
    H = x.shape[-1] // act.parts
    M = x.numel() // max(x.shape[-1], 1)
    if not M * H:
        return "the PyTorch formula, as there is nothing to do"
    fp8 = save == "fp8"
    forward, backward = _forward_tiles(M, H, fp8), _backward_tiles(M, H, act.gated, fp8, processors(x.device))
    return (
        f"forward in blocks of {forward.block_m} x {forward.block_h}, {forward.down * forward.across} programs; "
        f"backward in {backward.down} strips of {backward.rows} rows x {backward.across} tiles of {backward.block_h} columns, "
        f"{backward.down * backward.across} programs, the bias gradient in the same kernel; x saved as {save!r}"
    )


def _check(
    x: Tensor, bias: Tensor | None = None, activation: str = "gelu", token_weight: Tensor | None = None,
    clamp: float | None = None, linear_offset: float = 0.0, save: str = "input",
) -> Activation:  # fmt: skip
    """Raise where an argument is wrong; the activation where none is."""
    act = find_activation(activation)
    check_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, but is a scalar")
    if act.gated and x.shape[-1] % 2:
        raise ValueError(f"x must have an even last dimension for {act.name!r}, but has {x.shape[-1]}")
    if bias is not None:
        check_vector("bias", bias, x)
    if token_weight is not None:
        check_per_token("token_weight", token_weight, x)
    check_options(act, clamp, linear_offset, save)
    return act


def check_options(act: Activation, clamp: float | None, linear_offset: float, save: str) -> None:
    """What can be said of the options before there is an x."""
    if clamp is not None:
        check_number("clamp", clamp, optional=True)
        if not act.gated:
            raise ValueError(f"clamp ({clamp!r}) needs a gated activation, but activation is {act.name!r}")
        if not clamp > 0:
            raise ValueError(f"clamp must be a positive number or None, but is {clamp!r}")
    if type(linear_offset) is not float or linear_offset != 0.0:
        check_number("linear_offset", linear_offset)
        if linear_offset != linear_offset or (linear_offset and not act.gated):
            raise ValueError(f"linear_offset must be a number, and 0 if not gated, but is {linear_offset!r} for {act.name!r}")
    if save not in SAVES:
        raise ValueError(f"save must be one of {', '.join(SAVES)}, but is {save!r}")


def bias_activation(
    x: Tensor,
    bias: Tensor | None = None,
    activation: str = "gelu",
    *,
    token_weight: Tensor | None = None,
    clamp: float | None = None,
    linear_offset: float = 0.0,
    save: str = "input",
    backend: str | None = None,
) -> Tensor:
    """Add a bias and apply an activation in one pass; the backward gives the bias gradient in one pass too.

    Args:
        x: ``[..., H]``, or ``[..., 2H]`` for a gated activation, whose halves are the gate and the linear part.
        bias: as long as x's last dimension, of any floating-point type.
        activation: ``gelu`` (tanh), ``gelu_exact``, ``quick_gelu``, ``silu``, ``relu``, ``squared_relu``: ``act(x + bias)``;
            ``swiglu``, ``geglu``, ``quick_geglu``, ``reglu``: ``act(x1) * (x2 + linear_offset)``; or a registered one.
        token_weight: ``[...]`` or ``[..., 1]``, multiplied into each row of the result (a router's weight).
        clamp: for gated ones, x1 to at most this and x2 to within plus and minus this, after the bias.
        linear_offset: for gated ones, added to x2 after the clamp.
        save: how x is kept for backward: ``input`` as it is, ``fp8`` in about half of bf16's bytes with a bounded error,
            ``offload`` in the host's memory.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        ``[..., H]`` in x's type. Arithmetic is in fp32 and rounded once.
    """
    act = _check(x, bias, activation, token_weight, clamp, linear_offset, save)
    clamp = None if clamp is None else float(clamp)
    if save == "fp8" and validating() and not torch.compiler.is_compiling() and not bool(x.isfinite().all()):
        raise ValueError("x must be finite for save='fp8', which can't hold infinities, but is not")
    chosen = choose("bias_activation", backend, _no_kernels(x, act))
    if chosen not in NATIVE:
        options = {"token_weight": token_weight, "clamp": clamp, "linear_offset": linear_offset, "save": save}
        return run_other("bias_activation", chosen, x, bias, activation, **options)  # type: ignore[no-any-return]
    bias = gathered(bias)
    if chosen == "torch" or x.numel() == 0:
        formula = partial(bias_activation_reference, activation=act, clamp=clamp, linear_offset=linear_offset)
        result: Tensor = run_formula(formula, save, x, shared=(bias,), per_row=(token_weight,), parts=act.parts)
        return result
    offset = float(linear_offset) if linear_offset else None
    bias = None if bias is None else bias.contiguous()
    token_weight = None if token_weight is None else token_weight.contiguous()
    if not needs_grad(x, bias, token_weight):
        forward = _forward_op if watched(x, bias, token_weight) else _forward
        return forward(x, bias, token_weight, act.key, clamp, offset)
    return _apply(x, bias, token_weight, act.key, clamp, offset, save)  # type: ignore[no-any-return]


register_op(bias_activation, _check, unsupported, variant)


bias_gelu = shorthand("bias_gelu", bias_activation, activation="gelu")
bias_swiglu = shorthand("bias_swiglu", bias_activation, activation="swiglu")
bias_geglu = shorthand("bias_geglu", bias_activation, activation="geglu")
bias_quick_geglu = shorthand("bias_quick_geglu", bias_activation, activation="quick_geglu")
