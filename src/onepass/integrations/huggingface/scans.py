"""Mamba 2's scan in a model's code: which function computes it, and one with its arguments that calls onepass's.

The model's function is tried as it is written in PyTorch. With `cu_seq_lens_q` documents are apart, which PyTorch's doesn't know.
In training models first offer the whole mixer to one function of mamba-ssm's, which reads the weights of layers and so passes
adapters, eight bits and documents by: onepass's declines, as PyTorch's does, and the layers run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onepass.integrations.huggingface.documents import as_one_row
from onepass.integrations.huggingface.probe import close, randn
from onepass.ops.scan.mamba_chunk_scan import mamba_chunk_scan, mamba_chunk_scan_reference

SCAN = "mamba2_chunk_scan"
WHOLE_MIXER = "mamba2_split_conv1d_scan_combined"
_OPTIONS = "D", "dt_bias", "dt_softplus", "dt_limit", "initial_states", "return_final_states"


def is_scan(function: Callable[..., Any]) -> bool:
    """Whether this computes onepass's scan, with steps of each kind, and states in and out."""
    x, dt, A = randn(2, 10, 4, 3), randn(2, 10, 4, seed=2), -randn(4, seed=3).abs()
    B, C, states = randn(2, 10, 2, 5, seed=4), randn(2, 10, 2, 5, seed=5), randn(2, 4, 3, 5, seed=6)
    plain = {"D": None, "dt_bias": None, "dt_softplus": False, "dt_limit": (0.0, float("inf"))}
    full = {"D": randn(4, seed=7), "dt_bias": randn(4, seed=8), "dt_softplus": True, "dt_limit": (0.3, 1.0)}
    for given in (plain, full, full | {"initial_states": states, "return_final_states": True}):
        steps = dt if given["dt_softplus"] else F.softplus(dt)
        expected: Any = mamba_chunk_scan_reference(x, steps, A, B, C, **given)
        try:
            with torch.no_grad():
                found = function(x, steps, A, B, C, chunk_size=4, z=None, **given)
        except Exception:
            return False
        pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
        if isinstance(found, tuple) is not isinstance(expected, tuple) or not all(close(y, e, 1e-4) for y, e in pairs):
            return False
    return True


def scan_of(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the model's arguments, which calls the model's where onepass's doesn't know one."""

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **given: Any) -> Any:
        documents = given.get("cu_seq_lens_q")
        known = given.get("z") is None and given.get("seq_idx") is None
        states = given.get("initial_states") is not None, x.shape[0] > 1 and given.get("return_final_states", False)
        if not known or (documents is not None and any(states)):
            return stock(x, dt, A, B, C, chunk_size=chunk_size, **given)
        options = {name: given[name] for name in _OPTIONS if name in given}
        if documents is None:
            return mamba_chunk_scan(x, dt, A, B, C, **options)
        rows, steps, B, C = as_one_row(x, dt, B, C)
        found = mamba_chunk_scan(rows, steps, A, B, C, cu_seqlens=documents.int(), **options)
        if isinstance(found, Tensor):
            return found.view(x.shape)
        y, final = found
        return y, final[-1:]  # what a cache continues

    return scan


def declines(function: Callable[..., Any]) -> bool:
    """Whether this leaves the mixer to the model's code."""
    try:
        return function(*[None] * 7) is None
    except Exception:
        return False


def declining(stock: Callable[..., Any]) -> Callable[..., Any]:
    def decline(*given: Any, **options: Any) -> None:
        return None

    return decline
