"""Causal convolutions of linear attention, of Mamba and of LFM2: a module's own code runs with another `causal_conv1d_fn`.

The model's function is tried as it is written in PyTorch, also where a package has taken its place: what that package computes is
the same. With `cu_seq_lens_q` documents are apart, which PyTorch's function doesn't know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import close, own_forward, randn
from onepass.integrations.huggingface.rotation import globals_with, with_globals
from onepass.integrations.huggingface.snapshot import CODE_CHANGED, Snapshot
from onepass.ops.convolution.causal_conv1d import causal_conv1d, causal_conv1d_reference

CONVOLUTION = "causal_conv1d_fn"
_WIDTHS = range(2, 9)  # that onepass has
_ACTIVATIONS = (None, "silu")


@dataclass
class ConvolutionMatch:
    """A module whose code calls a causal convolution."""

    module: nn.Module
    original: Callable[..., Any]  # a copy of its class's forward that calls onepass's
    snapshot: Snapshot

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"original": None}  # with_globals' function can't be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.original = _with_ours(type(self.module).forward)

    def change(self) -> str | None:
        return None if self.snapshot.has_code_of(self.module) else CODE_CHANGED


def replace_convolutions(model: nn.Module, patches: Patches) -> list[AppliedRow]:
    rows = []
    for name, module in model.named_modules():
        stock = globals_with(CONVOLUTION, type(module).forward).get(CONVOLUTION)
        if stock is None:
            continue
        if own_forward(module):
            rows.append(AppliedRow(name, type(module).__name__, "qkv", why="it has a forward of its own already"))
        elif not is_causal_convolution(inspect.unwrap(stock)):
            rows.append(AppliedRow(name, type(module).__name__, "qkv", why=f"its {CONVOLUTION} computes something else"))
        else:
            forward = type(module).forward
            match = ConvolutionMatch(module, _with_ours(forward), Snapshot(code=forward))
            patches.set_forward(module, _forward, match)
            rows.append(AppliedRow(name, type(module).__name__, "qkv", by="causal_conv1d", match=match))
    return rows


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


def _with_ours(forward: Callable[..., Any]) -> Callable[..., Any]:
    return with_globals(forward, {CONVOLUTION: convolution_of(globals_with(CONVOLUTION, forward)[CONVOLUTION])})


def convolution_of(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the model's arguments, which calls the model's where onepass's doesn't know one."""

    def convolve(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
    ) -> Any:
        documents = others.get("cu_seq_lens_q")
        known = weight.shape[-1] in _WIDTHS and activation in _ACTIVATIONS and others.get("seq_idx") is None
        if not known or (documents is not None and hidden_states.shape[0] > 1):
            return stock(hidden_states, weight, bias, activation=activation, **others)
        documents = None if documents is None else documents.int()
        y = causal_conv1d(hidden_states.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=documents)
        return y.transpose(1, 2)  # type: ignore[union-attr]

    return convolve


def _forward(self: Any, *args: Any, **options: Any) -> Any:
    match: ConvolutionMatch = self._onepass
    return (match.original if match.change() is None else type(self).forward)(self, *args, **options)
