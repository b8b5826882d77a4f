"""Convolutions over time, as the hybrid layers of language models have them."""
