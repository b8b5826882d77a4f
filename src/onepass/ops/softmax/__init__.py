"""Scaled, masked softmax over the last dimension."""
