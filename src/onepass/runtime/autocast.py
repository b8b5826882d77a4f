"""What autocast makes of a product's operands."""

from __future__ import annotations

import torch
from torch import Tensor


def under_autocast(x: Tensor) -> bool:
    """Whether autocast rounds the operands of x's product; it leaves fp64 alone."""
    if not torch._C._is_any_autocast_enabled():  # the usual case, at a third of the time
        return False
    return not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64


def product_type(x: Tensor) -> torch.dtype:
    """What the operands of x's product are rounded to: x's type, or autocast's where that is on."""
    return torch.get_autocast_dtype(x.device.type) if under_autocast(x) else x.dtype
