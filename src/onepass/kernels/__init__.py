"""Triton device functions and kernels that several ops share."""
