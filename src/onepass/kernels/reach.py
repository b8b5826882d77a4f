"""How far one tensor's memory is from another's: a kernel that is given the first tensor of many reaches the others so."""

from __future__ import annotations

from torch import Tensor


def distance(tensor: Tensor, base: Tensor) -> int:
    """Return the number of values from base's first to tensor's. The interpreter notes which memory a kernel may reach."""
    return (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()
