"""What attention's kernels share: tokens loaded, where a document's tiles begin and end, which keys a query sees, and softcaps.

Three kinds of blocks of keys, as seen from a tile of queries: INSIDE, all seen by all; LEFT_EDGE, which the window's far end cuts
and nothing else; EDGE, which the diagonal, the window or the end cuts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from onepass.kernels.language import device_function, tl
from onepass.kernels.rows import inside_row
from onepass.ops.attention.formula import AttentionOptions

LOG2E = math.log2(math.e)
INSIDE, LEFT_EDGE, EDGE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@device_function
def load_tokens(head_ptr, first, TOKEN, end, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Load [BLOCK, W] of a head from token `first` on; zeros past the end and past the head's D. WHOLE: no end within."""
    tokens, columns = tl.arange(0, BLOCK), tl.arange(0, W)
    at = head_ptr + tl.cast(first, tl.int64) * TOKEN + tokens[:, None] * TOKEN + columns[None, :]
    if WHOLE:
        if D == W:
            return tl.load(at)
        return tl.load(at, mask=tl.broadcast_to((columns < D)[None, :], at.shape), other=0.0)
    return tl.load(at, mask=(first + tokens < end)[:, None] & inside_row(columns, D, D == W)[None, :], other=0.0)


@device_function
def store_tokens(tile_ptr, x, TOKEN, there, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """Store [BLOCK, W] of a head at a tile's first token; `there`: which of its tokens are."""
    columns = tl.arange(0, W)
    at = tile_ptr + tl.arange(0, BLOCK)[:, None] * TOKEN + columns[None, :]
    if D == W:
        tl.store(at, x, mask=there[:, None])
    else:
        tl.store(at, x, mask=there[:, None] & (columns < D)[None, :])


@device_function
def document_tile(tiles_ptr, place, BLOCK: tl.constexpr, BACKWARDS: tl.constexpr):
    """Return a document's first token and end, a tile's first token, and how far its statistics lie from its tokens' numbers.

    BACKWARDS: the first tile in the last one's place. Statistics of a document begin at a multiple of 16 bytes, as Hopper's copy
    engine wants it: at (begin // 4 + document) * 4.
    """
    begin, end, block = tl.load(tiles_ptr + 4 * place), tl.load(tiles_ptr + 4 * place + 1), tl.load(tiles_ptr + 4 * place + 2)
    if BACKWARDS:
        block = tl.maximum(tl.cdiv(end - begin, BLOCK) - 1 - block, 0)
    document = tl.maximum(tl.load(tiles_ptr + 4 * place + 3), 0)
    return begin, end, begin + block * BLOCK, 4 * document - begin % 4


@device_function
def key_ranges(begin, end, first, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return, for BLOCK_M queries from `first` on, where keys that are INSIDE begin and end, and where the last EDGE ends.

    Blocks are aligned to the document's first token.
    """
    if RIGHT < 0:
        stop = end
        edge = begin + (end - begin) // BLOCK_N * BLOCK_N
    elif RIGHT == 0:  # BLOCK_M is a multiple of BLOCK_N
        stop = tl.minimum(first + BLOCK_M, end)
        edge = first
    else:
        stop = tl.minimum(first + BLOCK_M + RIGHT, end)
        edge = begin + (tl.minimum(first + RIGHT + 1, end) - begin) // BLOCK_N * BLOCK_N
    if LEFT < 0:
        return begin, edge, stop
    inside = begin + tl.cdiv(tl.maximum(first + BLOCK_M - 1 - LEFT - begin, 0), BLOCK_N) * BLOCK_N
    return tl.minimum(inside, edge), edge, stop


@device_function
def query_ranges(begin, end, first, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return, for BLOCK_N keys from `first` on, where the queries that see them begin, where INSIDE does, and both ends.

    The first blocks are EDGE, the last LEFT_EDGE. Blocks are BLOCK_M apart from the first of these queries on, and may go past
    the document's end, where queries, their gradients and their statistics read as zeros.
    """
    if RIGHT < 0:
        start, inside = begin, begin
    elif RIGHT == 0:
        start = first
        inside = first + tl.cdiv(BLOCK_N - 1, BLOCK_M) * BLOCK_M
    else:
        start = begin + tl.maximum(first - RIGHT - begin, 0) // BLOCK_M * BLOCK_M
        inside = start + tl.cdiv(tl.maximum(first + BLOCK_N - 1 - RIGHT - start, 0), BLOCK_M) * BLOCK_M
    if LEFT < 0:
        return start, inside, end, end
    stop = tl.minimum(first + BLOCK_N + LEFT, end)
    whole = tl.maximum(first + LEFT + 1 - inside, 0) // BLOCK_M  # blocks of queries that see all keys
    left = tl.where(first + LEFT + 1 >= end, stop, inside + whole * BLOCK_M)
    return start, inside, tl.minimum(left, stop), stop


@device_function
def sees(queries, keys, end, LEFT: tl.constexpr, RIGHT: tl.constexpr, KIND: tl.constexpr):
    """Return whether queries see keys; one of them is a column, the other a row. For blocks of a KIND that something cuts."""
    if KIND == LEFT_EDGE:
        return queries - keys <= LEFT
    seen = queries >= keys if RIGHT == 0 else keys < end
    if RIGHT > 0:
        seen = seen & (queries + RIGHT >= keys)
    if LEFT >= 0:
        seen = seen & (queries - keys <= LEFT)
    return seen


@device_function
def capped(products, cap_scale, CAPPED: tl.constexpr):
    """Return the hyperbolic tangent of products, of which cap_scale makes exponents to base 2; not CAPPED: products.

    Its absolute error is that of fp32 around 1, which a softcap multiplies. The hardware's tanh has an error of 5e-4.
    """
    if CAPPED:
        return 1.0 - 2.0 / (1.0 + tl.exp2(products * cap_scale))
    return products


class ScoreScales(NamedTuple):
    """What makes scores to base 2 of products, and their kinds: compiled in."""

    score: float  # of a product, or of a tangent
    cap: float  # makes exponents of the tangent
    scale: float  # of dq and dk
    left: int
    right: int
    capped: bool


def scales_of(options: AttentionOptions) -> ScoreScales:
    scale, softcap = options.scale, options.softcap
    score, cap = (softcap * LOG2E, 2 * LOG2E * scale / softcap) if softcap else (scale * LOG2E, 0.0)
    return ScoreScales(score, cap, scale, options.left, options.right, bool(softcap))
