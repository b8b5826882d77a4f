"""Dropout before a residual connection."""
