"""Rotary positions and attention."""

from onepass.ops.attention.attention import attention, attention_reference

__all__ = ["attention", "attention_reference"]
