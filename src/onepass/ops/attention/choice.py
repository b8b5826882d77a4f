"""Whose kernels compute attention: the fastest that are installed, by tables of what was measured, or those that a caller names.

onepass     ours: documents, softcaps, sinks, and whatever the others were not measured to be faster for
cudnn       cuDNN's, for plain causal attention on Hopper (by_cudnn.py)
pytorch     cuDNN's in both passes, the backward in any order, for gated attention where no fixed order is asked for (by_cudnn.py)
flash_attn  flash-attn-4's, for heads of 128 on Hopper, plain or with a window (by_flash.py)

The figures are in docs/notes/0014-attention.md. Who names a backend gets it, or the reason why not. Under
`onepass.batch_invariant()` ours run alone: others choose kernels and splits by sizes, which nobody outside can hold still.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.ops.attention.by_cudnn import all_by_cudnn, backward_by_cudnn, forward_by_cudnn
from onepass.ops.attention.by_flash import has_flash
from onepass.ops.attention.formula import AttentionOptions, is_plain
from onepass.runtime.batch_invariance import invariant

ONEPASS, CUDNN, PYTORCH, FLASH = "onepass", "cudnn", "pytorch", "flash_attn"

# From how many tokens, or keys of a window, flash-attn-4's kernels are faster than all others, by the size of heads. For backward
# also by whether heads share keys, as theirs then sums those gradients in fp32 memory. There it takes twice to three times the
# memory of ours, for which the gain of a fixed order must be a tenth.
_FORWARD_FROM = {64: 2048, 128: 512}
_FORWARD_BEFORE_CUDNN_FROM = {64: 4096, 128: 4096}
_FORWARD_OF_WINDOWS_FROM = {64: 512, 128: 128}
_BACKWARD_FROM = {64: 512, 128: 512}
_BACKWARD_OF_SHARED_FROM = {64: 2048, 128: 1024}
_BACKWARD_OF_SHARED_IN_ORDER_FROM = {64: 4096, 128: 8192}
_BACKWARD_OF_WINDOWS_FROM = {64: 1024, 128: 512}
_BACKWARD_OF_WINDOWS_IN_ORDER_FROM = {128: 4096}
_SHORTEST_WITH_WINDOW = 2048  # tokens


def forward_kernels(
    qkv: Tensor, D: int, options: AttentionOptions, cu_seqlens: Tensor | None = None, sinks: Tensor | None = None
) -> str:
    """Return whose kernels take the forward pass of a call on this projection, whose heads have D columns."""
    if options.kernels:
        return options.kernels
    if _is_ours(options, cu_seqlens, sinks):
        return ONEPASS
    by_cudnn = options.left < 0 and forward_by_cudnn(qkv, D)
    table = _FORWARD_BEFORE_CUDNN_FROM if by_cudnn else _FORWARD_FROM if options.left < 0 else _FORWARD_OF_WINDOWS_FROM
    return FLASH if _by_flash(qkv, D, options, table) else CUDNN if by_cudnn else ONEPASS


def backward_kernels(
    qkv: Tensor, D: int, options: AttentionOptions, cu_seqlens: Tensor | None = None, sinks: Tensor | None = None
) -> str:
    """Return whose kernels take the backward pass."""
    if options.kernels:
        return options.kernels
    if _is_ours(options, cu_seqlens, sinks):
        return ONEPASS
    if _backward_by_flash(qkv, D, options):
        return FLASH
    return CUDNN if options.left < 0 and options.in_order and backward_by_cudnn(qkv, D, options) else ONEPASS


def _is_ours(options: AttentionOptions, cu_seqlens: Tensor | None, sinks: Tensor | None) -> bool:
    """Whether no other kernels come into question: all but causal attention, with a window or not."""
    return invariant() or cu_seqlens is not None or sinks is not None or bool(options.softcap) or options.right != 0


def _backward_by_flash(qkv: Tensor, D: int, options: AttentionOptions) -> bool:
    """Whether flash-attn-4's backward of causal attention is the fastest in the order that is asked for."""
    if options.left >= 0:
        table = _BACKWARD_OF_WINDOWS_IN_ORDER_FROM if options.in_order else _BACKWARD_OF_WINDOWS_FROM
    elif options.heads == options.groups:
        table = _BACKWARD_FROM
    else:
        table = _BACKWARD_OF_SHARED_IN_ORDER_FROM if options.in_order else _BACKWARD_OF_SHARED_FROM
    return _by_flash(qkv, D, options, table)


def _by_flash(qkv: Tensor, D: int, options: AttentionOptions, table: dict[int, int]) -> bool:
    if D not in table or options.right != 0:
        return False
    S = qkv.shape[1]
    if options.left >= 0 and S < _SHORTEST_WITH_WINDOW:
        return False
    return (options.left + 1 or S) >= table[D] and has_flash(qkv)


def pytorch_is_faster(
    qkv: Tensor, D: int, options: AttentionOptions, cu_seqlens: Tensor | None = None, sinks: Tensor | None = None
) -> bool:
    """Whether PyTorch's attention is faster than all of these. Bits may then differ from run to run.

    It takes cuDNN's, from Hopper on: .8 to .9 of our time for wide heads, and a little less than ours in a whole step for narrow
    heads and many tokens. PyTorch's other backends take longer than ours, and in torchtitan's compiled blocks PyTorch chose one
    of those: 309 ms a step where ours took 290.
    """
    if options.in_order or invariant() or torch.compiler.is_compiling() or not is_plain(options, cu_seqlens, sinks):
        return False
    return all_by_cudnn(qkv, D) and not _backward_by_flash(qkv, D, options)


def in_order(deterministic: bool) -> bool:
    """Whether sums have a fixed order: a caller asks for it, or the process does."""
    return bool(deterministic) or torch.are_deterministic_algorithms_enabled()
