"""Transformer Engine's functions behind moe_permute_fusion, with their names and arguments there, by kernels of onepass.

A row map is `order_by_map`'s order. Results have the same bits in each call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.kernels.mapped_rows import order_by_map
from onepass.ops.linear.routing import Routes, gather_tokens_by_map, scatter_tokens, scatter_tokens_by_map


def fused_permute(tokens: Tensor, routing_map: Tensor, num_out_tokens: Any = None) -> tuple[Tensor, Tensor]:
    """Return each token's row for each of its experts, sorted by expert, and the row map.

    Args:
        num_out_tokens: how many entries of routing_map are set: a number that the host knows.
    """
    if num_out_tokens is None or int(num_out_tokens) < 0:
        raise ValueError(f"num_out_tokens must be the number of routing_map's entries that are set, but is {num_out_tokens}")
    if routing_map.numel() >= 1 << 31:
        raise ValueError(f"routing_map must have less than 2^31 entries, but has shape {tuple(routing_map.shape)}")
    row_map = order_by_map(routing_map.bool(), int(num_out_tokens))
    return scatter_tokens_by_map(tokens, row_map), row_map


def fused_permute_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `fused_permute`'s rows, the weight of each, out of probs ``[tokens, experts]``, and the row map."""
    rows, row_map = fused_permute(tokens, routing_map, num_out_tokens)
    return rows, _weights_of_rows(probs, rows, row_map), row_map


def _weights_of_rows(probs: Tensor, rows: Tensor, row_map: Tensor) -> Tensor:
    return probs.reshape(-1).index_select(0, row_map[: rows.shape[0]])


def fused_unpermute(
    permuted_tokens: Tensor, row_id_map: Tensor, merging_probs: Tensor | None = None, restore_shape: Any = None
) -> Tensor:
    """Return the sum of each token's rows, in the order of experts and in fp32 or wider.

    Args:
        merging_probs: ``[tokens, experts]``: they multiply the rows first. Rows times these have the wider of both types.
        restore_shape: ``[tokens, hidden size]``, which the row map knows.
    """
    rows = permuted_tokens
    if merging_probs is not None:
        rows = rows * _weights_of_rows(merging_probs, rows, row_id_map).unsqueeze(-1)
    return gather_tokens_by_map(rows, row_id_map).to(permuted_tokens.dtype)


def fused_sort_chunks_by_index(input: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Return the chunks of rows that split_sizes says, in the order of sorted_index."""
    return scatter_tokens(input, _chunk_routes(input, split_sizes, sorted_index))


def fused_sort_chunks_by_index_with_probs(
    input: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `fused_sort_chunks_by_index` of rows, and of the rows' weights."""
    routes = _chunk_routes(input, split_sizes, sorted_index)
    return scatter_tokens(input, routes), probs.index_select(0, routes.tokens)


def _chunk_routes(x: Tensor, sizes: Tensor, order: Tensor) -> Routes:
    """Return where each of x's rows goes, a token of one row, as chunks change places. Nobody waits to learn their sizes."""
    moved = sizes[order]
    sources = _rows_of(sizes, order, moved, x.shape[0])
    places = _rows_of(moved, order.argsort(), sizes, x.shape[0])
    return Routes(x.new_empty(0), sources, places.unsqueeze(-1), moved.cumsum(0))


def _rows_of(sizes: Tensor, order: Tensor, moved: Tensor, rows: int) -> Tensor:
    """Return which row comes to each place where chunks of these sizes are put in this order, `moved` in size."""
    shift = (sizes.cumsum(0) - sizes)[order] - (moved.cumsum(0) - moved)
    return (torch.arange(rows, device=sizes.device) + shift.repeat_interleave(moved, output_size=rows)).int()


PERMUTATIONS = (
    fused_permute, fused_permute_with_probs, fused_unpermute, fused_sort_chunks_by_index, fused_sort_chunks_by_index_with_probs,
)  # fmt: skip
