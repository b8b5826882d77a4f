"""Documents that follow each other in one row of tokens: what `cu_seqlens`, their boundaries, says of each token.

Document i has the tokens from `cu_seqlens[i]` up to `cu_seqlens[i + 1]`; it may be empty. On a GPU no host reads the boundaries:
where they are wrong, what is computed of them is NaN.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from onepass.runtime.batch_invariance import refuse
from onepass.runtime.checks import check_device
from onepass.runtime.dispatch import has_address, under_functorch
from onepass.runtime.process_setting import validating


def are_readable(cu_seqlens: Tensor) -> bool:
    """Whether the host may read the boundaries: they are in its memory, and no compiler or transform stands between."""
    return cu_seqlens.device.type == "cpu" and has_address(cu_seqlens) and not under_functorch()


def check_documents(cu_seqlens: object, x: Tensor, tokens: tuple[int, ...], name: str) -> None:
    """Raise unless `cu_seqlens` fits x, called `name`, whose dimensions up to its tokens are `tokens`."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
        kind = f"one of {cu_seqlens.dtype}" if isinstance(cu_seqlens, Tensor) else f"a {type(cu_seqlens).__name__}"
        raise TypeError(f"cu_seqlens must be a tensor of torch.int32, or None, but is {kind}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape [documents + 1], but has {tuple(cu_seqlens.shape)}")
    check_device("cu_seqlens", cu_seqlens, x, name)
    if any(size != 1 for size in tokens[:-1]):
        raise ValueError(
            f"{name} must be one row of tokens where cu_seqlens is given, its dimensions before them 1, but has {tuple(tokens)}"
        )
    if are_readable(cu_seqlens) or (cu_seqlens.is_cuda and has_address(cu_seqlens) and validating()):
        _check_boundaries(cu_seqlens.tolist(), tokens[-1], name)


def _check_boundaries(boundaries: list[int], tokens: int, name: str) -> None:
    if boundaries[0] != 0:
        raise ValueError(f"cu_seqlens must begin with 0, but begins with {boundaries[0]}")
    if boundaries[-1] != tokens:
        raise ValueError(f"cu_seqlens must end with {tokens}, {name}'s tokens, but ends with {boundaries[-1]}")
    for at, (first, end) in enumerate(pairwise(boundaries)):
        if end < first:
            raise ValueError(f"cu_seqlens must not fall, but goes from {first} to {end} at {at + 1}")


def check_longest(cu_seqlens: Tensor, rows: int) -> None:
    """Raise where a table of `rows` positions is too short for the longest document, if the host may know."""
    if are_readable(cu_seqlens) or (cu_seqlens.is_cuda and has_address(cu_seqlens) and validating()):
        longest = int(cu_seqlens.diff().max())
        if longest > rows:
            raise ValueError(f"cos must have a row for each position of the longest document, {longest}, but has {rows}")


def ranges_of(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """Return each document's first token and its end. Only where they `are_readable`."""
    boundaries = cu_seqlens.tolist()
    return list(pairwise(boundaries))


def documents_in_turn(cu_seqlens: Tensor | None, S: int, what: str) -> list[tuple[int, int]]:
    """Return the ranges of S tokens that are computed apart under `batch_invariant()`. what: names who can't, in an error."""
    if cu_seqlens is None:
        return [(0, S)]
    if cu_seqlens.is_meta:  # any ranges give tensors of the right shapes
        return [(0, S), *[(S, S)] * (len(cu_seqlens) - 2)]
    if not are_readable(cu_seqlens):
        refuse(what, "the host can't read where documents begin")
    return ranges_of(cu_seqlens)


def document_of(cu_seqlens: Tensor, T: int) -> Tensor:
    """Return the document of each of T tokens, without reading a boundary."""
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=torch.int32)
    return torch.searchsorted(cu_seqlens.contiguous(), tokens, right=True, out_int32=True) - 1


def are_right(cu_seqlens: Tensor, T: int) -> Tensor:
    """Return a bool on the device: the boundaries begin with 0, end with T and never fall."""
    return (cu_seqlens[0] == 0) & (cu_seqlens[-1] == T) & (cu_seqlens.diff() >= 0).all()


def readable_boundaries(cu_seqlens: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """Return the boundaries, or one document's where they are wrong, by which a kernel would read elsewhere; and whether not."""
    right = are_right(cu_seqlens, T)
    one = torch.arange(cu_seqlens.shape[0], dtype=cu_seqlens.dtype, device=cu_seqlens.device).clamp_(max=1) * T
    return torch.where(right, cu_seqlens, one), right


def tables_of_documents(cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None, T: int) -> tuple[Tensor, Tensor]:
    """Return tables of `[longest, R/2]` looked up by position within the document, as `[1, T, R/2]`; others as they are.

    Angles are NaN where the boundaries are wrong or the tables too short.
    """
    if cu_seqlens is None or cos.dim() > 2:
        return cos, sin
    return tables_at(cos, sin, positions_within(cu_seqlens, T)[None])


def positions_within(cu_seqlens: Tensor, T: int) -> Tensor:
    """Return int32 [T]: each token's position within its document, or -1 where the boundaries are wrong."""
    first = cu_seqlens.index_select(0, document_of(cu_seqlens, T).clamp_(0, cu_seqlens.shape[0] - 2))
    positions = torch.arange(T, device=cu_seqlens.device, dtype=torch.int32) - first
    return torch.where(are_right(cu_seqlens, T), positions, -1)


def tables_at(cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tables' rows at `positions`, of whose shape they are. Angles of positions without a row are NaN."""
    missing = ((positions < 0) | (positions >= cos.shape[0])).unsqueeze(-1)
    rows = positions.clamp(0, cos.shape[0] - 1)
    cos, sin = (table[rows].masked_fill(missing, torch.nan) for table in (cos, sin))
    return cos, sin
