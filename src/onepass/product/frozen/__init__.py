"""Frozen weights in few bits: their kinds, and what they are made of."""
