"""How kernels load rows: aligned, and in fp32."""

from __future__ import annotations

from onepass.kernels.language import PTX, device_function, tl


def known_align(*sizes: int) -> int:
    """Return the multiple at which all rows start, where Triton does not see it itself (it looks for 16)."""
    return 8 if not any(size % 8 for size in sizes) else 1


@device_function
def aligned(size, ALIGN: tl.constexpr):
    """Return size, known to be a multiple of ALIGN: a width of 5000 would otherwise be read two bytes at a time."""
    return size // ALIGN * ALIGN


@device_function
def inside_row(columns, H, WHOLE: tl.constexpr):
    """Return which columns lie in a row of H. WHOLE: all do, and the compiler drops the masks."""
    return tl.full(columns.shape, True, tl.int1) if WHOLE else columns < H


@device_function
def load_vector(vector_ptr, columns, inside):
    """Load a bias in fp32, or where there is none -0.0, which changes nothing that it is added to: 0.0 would change -0.0."""
    if vector_ptr is not None:
        return tl.load(vector_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.full(columns.shape, -2147483648, tl.int32).to(tl.float32, bitcast=True)  # Triton makes 0.0 of a constant -0.0


@device_function
def load_scale(weight_ptr, columns, inside, CENTERED: tl.constexpr):
    """Load a norm's weight in fp32; ones where there is none. CENTERED: it is stored as its distance from 1."""
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        return weight + 1.0 if CENTERED else weight
    else:
        return tl.full(columns.shape, 1.0, tl.float32)


@device_function
def block_offsets(rows, columns, ROW, GAP=None, INNER: tl.constexpr = 0):
    """Return where a block's columns lie. Rows are ROW apart; with INNER, a GAP follows every INNER rows."""
    starts = rows[:, None] * ROW
    if INNER:
        starts += rows[:, None] // INNER * GAP
    return starts + columns[None, :]


@device_function
def load_block(x_ptr, rows, columns, ROW, inside, GAP=None, INNER: tl.constexpr = 0):
    """Load a block of rows in fp32, zeros outside."""
    return tl.load(x_ptr + block_offsets(rows, columns, ROW, GAP, INNER), mask=inside, other=0.0).to(tl.float32)


@device_function
def widen(x):
    """Return x in fp32: bf16 by one instruction a value, where the compiler takes three for two."""
    if PTX and x.dtype == tl.bfloat16:
        ptx: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(ptx, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return x.to(tl.float32)


@device_function
def still_packed(x):
    """Hide x from the compiler, which would otherwise widen held pieces early and keep twice the registers."""
    if PTX and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x
