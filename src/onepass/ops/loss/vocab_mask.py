"""Which columns a row's distribution has: bits, the lowest of a byte first, [rows or 1, bytes]."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.runtime.sizes import ceil_div


def check_vocab_mask(mask: Tensor, labels: Tensor, V: int, device: torch.device) -> None:
    """Raise unless the mask is bool or bits, of all rows or of each label's."""
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, torch.uint8):
        kind = f"of {mask.dtype}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise TypeError(f"vocab_mask must be a bool tensor or uint8 of bits, but is {kind}")
    width = V if mask.dtype is torch.bool else ceil_div(V, 8)
    if mask.shape != (width,) and mask.shape != (*labels.shape, width):
        raise ValueError(f"vocab_mask must have shape {(width,)} or {(*labels.shape, width)}, but has {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"vocab_mask must be on {device}, as hidden, but is on {mask.device}")


def packed_mask(mask: Tensor) -> Tensor:
    """Return a mask as bits, [rows or 1, bytes]."""
    rows = mask.unsqueeze(0) if mask.dim() == 1 else mask.flatten(0, -2)
    if mask.dtype is torch.uint8:
        return rows.contiguous()
    rows = torch.nn.functional.pad(rows.to(torch.uint8), (0, -rows.shape[1] % 8))
    bits = rows.view(rows.shape[0], rows.shape[1] // 8, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)


def allowed_columns(mask: Tensor, first: int, columns: int) -> Tensor:
    """Return the bits of some columns as bools, [rows or 1, columns]."""
    at = torch.arange(first, first + columns, device=mask.device)
    return (mask[:, at >> 3] >> (at & 7).to(torch.uint8)) & 1 != 0
