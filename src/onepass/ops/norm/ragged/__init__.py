"""Norms of many tensors of different widths in one launch."""
