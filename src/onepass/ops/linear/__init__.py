"""Linear layers: one weight, or one for each expert."""

from onepass.ops.linear.linear import linear, linear_reference

__all__ = ["linear", "linear_reference"]
