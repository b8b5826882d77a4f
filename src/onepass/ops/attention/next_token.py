"""Attention of each sequence's last token to a cache of keys and values: the row that `attention` gives it, bit for bit.

The kernel is attention's own, whose tile of queries has one that is read and written. Blocks of keys begin at the sequence's
first token, as in training, and are added in their order: no sum is split. Where kernels can't, the formula's tiles do the same.
Bytes: a sequence's keys and values once for each group, from memory or, for the group's other heads, from the GPU's cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass.kernels.launch import grid_of
from onepass.ops.attention.attention import unsupported
from onepass.ops.attention.formula import TILE, AttentionOptions, attend_tile, in_tiles
from onepass.ops.attention.forward import HeadSizes, bind_attend, forward_tiles, head_block
from onepass.ops.attention.scores import scales_of
from onepass.runtime.backend import choose
from onepass.runtime.sizes import shared_memory


def last_tiles(rows: Tensor, ends: Tensor, longest: int, options: AttentionOptions) -> Tensor | None:
    """Return the tile of each sequence's last token, as documents' tiles are listed; None where kernels don't take the call.

    rows: a projection [B, 1, (heads + 2 groups) D]. ends: int32 [B], how many tokens sequences have, on the same device, of
    `longest` that have room.
    """
    reason = unsupported(rows, options.heads, options.groups, ends)
    if choose("attention", None if reason is None else "torch", reason) == "torch":
        return None
    tiles = forward_tiles(head_block(rows.shape[-1] // options.every), shared_memory(rows.device))
    begins = torch.arange(0, len(ends) * longest, longest, dtype=torch.int32, device=ends.device)
    blocks = (ends - 1).div(tiles.block_m, rounding_mode="floor")
    return torch.stack([begins, begins + ends, blocks, torch.zeros_like(ends)], 1)


def attend_last(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Sequence[int], tiles: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Return y [B, heads, D] of q [B, heads, D], which is rotated as the keys are.

    keys, values: contiguous [B, longest, groups, D], of which sequences have `lengths`, q's own tokens among them.
    """
    if tiles is None:
        each = zip(q, keys, values, lengths, strict=True)
        return torch.stack([_by_tiles(x, k[:length], v[:length], options) for x, k, v, length in each])
    (B, H, D), G = q.shape, options.groups
    q, y = q.contiguous(), torch.empty_like(q)
    in_cache = 0, G * D, D
    launch = bind_attend(
        (H * D, 0, D, *in_cache, *in_cache, None), HeadSizes(H, G, D, D), scales_of(options),
        forward_tiles(head_block(D), shared_memory(q.device)), True,
    )  # fmt: skip
    launch(grid_of(H, B), q, keys, values, y, None, None, tiles, keys.shape[0] * keys.shape[1], 0)
    return y


def _by_tiles(q: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Return y [heads, D] of the last token's q, at its place in the tile that it has in a whole sequence."""
    at, place = divmod(len(keys) - 1, TILE)
    tile = q.new_zeros(TILE, *q.shape)
    tile[place] = q
    (queries,), k, v = (in_tiles(x, options.groups) for x in (tile, keys, values))
    y: Tensor = attend_tile(queries, at, k, v, options, None, len(keys)).unflatten(1, (-1, TILE))
    return y[:, :, place].flatten(0, 1).to(q.dtype)
