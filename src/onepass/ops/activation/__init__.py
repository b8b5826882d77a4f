"""Bias and activation, alone and before a linear layer."""
