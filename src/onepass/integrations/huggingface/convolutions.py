"""The causal convolution of a model's code: which function computes it, and one with its arguments that calls onepass's.

The model's function is tried as it is written in PyTorch, also where a package has taken its place: what that package computes is
the same. With `cu_seq_lens_q` documents are apart, which PyTorch's function doesn't know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.integrations.huggingface.documents import as_one_row
from onepass.integrations.huggingface.probe import close, randn
from onepass.ops.convolution.causal_conv1d import WIDTHS, causal_conv1d, causal_conv1d_reference

CONVOLUTION = "causal_conv1d_fn"
_ACTIVATIONS = (None, "silu")


def is_causal_convolution(function: Callable[..., Any]) -> bool:
    """Whether this computes onepass's convolution of columns [B, C, S], with and without a bias and SiLU."""
    x, weight, bias = randn(2, 3, 7), randn(3, 4, seed=2), randn(3, seed=3)
    for activation in _ACTIVATIONS:
        for shift in (None, bias):
            expected = causal_conv1d_reference(x.transpose(1, 2), weight, shift, activation=activation)
            try:
                with torch.no_grad():
                    y = function(x, weight, shift, activation=activation)
            except Exception:
                return False
            if not isinstance(expected, Tensor) or not close(y, expected.transpose(1, 2), 1e-6):
                return False
    return True


def convolution_of(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the model's arguments, which calls the model's where onepass's doesn't know one."""

    def convolve(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
    ) -> Any:
        documents = others.get("cu_seq_lens_q")
        known = weight.shape[-1] in WIDTHS and activation in _ACTIVATIONS and others.get("seq_idx") is None
        if not known:
            return stock(hidden_states, weight, bias, activation=activation, **others)
        x = hidden_states.transpose(1, 2)
        (rows,), documents = ((x,), None) if documents is None else (as_one_row(x), documents.int())
        y: Any = causal_conv1d(rows, weight, bias, activation=activation, cu_seqlens=documents)
        return y.view(x.shape).transpose(1, 2)

    return convolve
