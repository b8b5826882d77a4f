"""Functions of megatron.core.fusions, with their names and arguments there, by onepass ops."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.ops.activation.bias_activation import bias_activation
from onepass.ops.attention.rope import rope
from onepass.ops.dropout.dropout_add import dropout_add
from onepass.ops.loss.cross_entropy import cross_entropy
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy as _linear_cross_entropy

_TABLES, _POSITIONS = "_onepass_tables", "_onepass_positions"  # attributes of freqs, and of cu_seqlens


def _save(fp8: bool, offload: bool = False) -> str:
    if fp8 and offload:
        raise NotImplementedError("activation_func_fp8_input_store must be False with cpu_offload_input")
    return "fp8" if fp8 else "offload" if offload else "input"


# ---- bias and activation ----


def bias_swiglu_impl(
    input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False,
    clamp_value: float | None = None,
) -> Tensor:  # fmt: skip
    return bias_activation(input, bias, "swiglu", save=_save(fp8_input_store, cpu_offload_input), clamp=clamp_value)


def weighted_bias_swiglu_impl(
    input: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False, clamp_value: float | None = None
) -> Tensor:
    return bias_activation(input, bias, "swiglu", token_weight=weights, save=_save(fp8_input_store), clamp=clamp_value)


def bias_gelu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    return bias_activation(input, bias, "gelu")


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    return bias_activation(input, bias, "geglu")


def weighted_bias_quick_geglu_impl(
    input: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False, linear_offset: float = 0.0,
    clamp_value: float | None = None, alpha: float = 1.702,
) -> Tensor:  # fmt: skip
    """Clamp after the bias, as Megatron's unfused path does; its fused function clamps before."""
    if alpha != 1.702:
        raise NotImplementedError(f"alpha must be 1.702, but is {alpha}")
    return bias_activation(
        input, bias, "quick_geglu", token_weight=weights, save=_save(fp8_input_store), linear_offset=float(linear_offset),
        clamp=clamp_value,
    )  # fmt: skip


def weighted_squared_relu_impl(input: Tensor, weights: Tensor) -> Tensor:
    return bias_activation(input, None, "squared_relu", token_weight=weights)


# ---- bias, dropout and residual ----


def bias_dropout_add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, training: bool) -> Tensor:
    """Megatron's _bias_dropout_add_func. Where nothing needs a gradient it adds in x's own memory, as theirs does."""
    x, bias = x_with_bias
    if bias is not None and bias.dim() > 1:  # of x's shape, as Megatron-LM's trainer warms the function up
        x, bias = x + bias, None
    needed = x.requires_grad or residual.requires_grad or (bias is not None and bias.requires_grad)
    if training or needed or x.dtype != residual.dtype:
        return dropout_add(x, residual, prob, bias=bias, training=training)
    if bias is not None:
        x.add_(bias)
    return x.add_(residual)


def get_bias_dropout_add(training: bool, fused: bool) -> Any:
    """One kernel whether `fused` or not."""
    return partial(bias_dropout_add, training=training)


# ---- loss ----


def _several(tp_group: Any) -> Any:
    return tp_group if tp_group is not None and tp_group.size() > 1 else None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, tp_group: Any = None, reduction: str = "mean", ignore_index: int = -100,
    sequence_parallel: bool = False,
) -> Tensor:  # fmt: skip
    """The function behind cross_entropy_fusion_impl="linear": logits are never rounded, and the losses of rows come flat."""
    group = _several(tp_group)
    loss: Tensor = _linear_cross_entropy(
        hidden, weight, labels, group, reduction, ignore_index, sequence_parallel and group is not None,
        logits_dtype=torch.float32,
    )  # fmt: skip
    return loss.reshape(-1) if reduction == "none" else loss


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
    loss: Tensor = cross_entropy(vocab_parallel_logits, target, _several(tp_group), "none")
    return loss


# ---- rotary positions ----


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False, start_positions: Any = None
) -> Tensor:
    """Rotate t ``[s, b, heads, d]`` by freqs ``[s, 1, 1, r]``, which have each angle twice; d - r numbers pass.

    The result is contiguous, as stock's, whose attention views it; or with transpose_output_memory its transpose (0, 1) is.
    """
    if start_positions is not None:
        raise NotImplementedError("start_positions must not be given: onepass's rope does not take it")
    cos, sin = table_pair(freqs, interleaved, t.shape[0])
    if transpose_output_memory:
        t = t.transpose(0, 1)
    else:
        cos, sin = (table[:, None].expand(-1, t.shape[1], -1) for table in (cos, sin))
    rotated, _ = rope(t, t[:, :, :0], cos, sin, interleaved=interleaved)
    return rotated.transpose(0, 1) if transpose_output_memory else rotated


def fused_apply_rotary_pos_emb_thd(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0, interleaved: bool = False,
    start_positions: Any = None,
) -> Tensor:  # fmt: skip
    """Rotate packed t ``[tokens, heads, d]``: positions begin anew with each document.

    Over context-parallel ranks t has two parts of each document of cu_seqlens, which counts whole ones.
    """
    if start_positions is not None:
        raise NotImplementedError("start_positions must not be given: onepass's rope does not take it")
    cos, sin = table_pair(freqs, interleaved, freqs.shape[0])
    ends: Tensor | None = cu_seqlens.to(torch.int32)
    if cp_size > 1:
        at, wrong = _positions_of_parts(cu_seqlens, t.shape[0], cp_size, cp_rank)
        cos, sin, ends = cos[at], sin[at].masked_fill(wrong, torch.nan), None
    rotated, _ = rope(t[None], t[None, :, :0], cos, sin, interleaved=interleaved, cu_seqlens=ends)
    return rotated[0]


def _positions_of_parts(ends: Tensor, tokens: int, cp_size: int, cp_rank: int) -> tuple[Tensor, Tensor]:
    """Return each token's position in its document, of whose 2 cp_size parts this rank has one, and its mirror image.

    Also whether the document's length is no multiple of 2 cp_size. Nothing is read by the host. cu_seqlens carries both to the
    next call, unless nobody can tell whether it has been written to since: in inference mode.
    """
    key = tokens, cp_size, cp_rank, None if ends.is_inference() else ends._version
    known: tuple[Any, tuple[Tensor, Tensor]] | None = vars(ends).get(_POSITIONS)
    if known is not None and known[0] == key:
        return known[1]
    token = torch.arange(tokens, device=ends.device)
    document = torch.searchsorted(ends[1:] // cp_size, token, right=True).clamp_(max=ends.shape[0] - 2)
    length, offset = ends.diff()[document], token - ends[document] // cp_size
    part, wrong = length // (2 * cp_size), (length % (2 * cp_size) != 0) | (token >= ends[-1] // cp_size)
    at = offset + torch.where(offset >= part, 2 * cp_size - 2 - cp_rank, cp_rank) * part
    found = at.masked_fill(wrong, 0), wrong[:, None]
    if not ends.is_inference() and not (ends.is_cuda and torch.cuda.is_current_stream_capturing()):
        vars(ends)[_POSITIONS] = key, found
    return found


def table_pair(freqs: Tensor, interleaved: bool, length: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin. freqs carries them to the next layer, which saves launches and a copy of them for each backward."""
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1):
        raise NotImplementedError(f"freqs must be [s, 1, 1, r], but has shape {tuple(freqs.shape)}: switch apply_rope_fusion off")
    made: dict[Any, tuple[Tensor, Tensor]] = vars(freqs).setdefault(_TABLES, {})
    key = interleaved, length, None if freqs.is_inference() else freqs._version
    if key in made:
        return made[key]
    angles = freqs[:length, 0, 0]
    angles = angles[:, ::2] if interleaved else angles[:, : angles.shape[-1] // 2]
    tables = angles.cos(), angles.sin()
    if not (freqs.is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph's memory is nobody else's
        made[key] = tables
    return tables


ACTIVATIONS = {  # by the module that defines it
    "megatron.core.fusions.fused_bias_swiglu": (bias_swiglu_impl, weighted_bias_swiglu_impl),
    "megatron.core.fusions.fused_bias_geglu": (bias_geglu_impl, weighted_bias_quick_geglu_impl),
    "megatron.core.fusions.fused_bias_gelu": (bias_gelu_impl,),
    "megatron.core.fusions.fused_weighted_squared_relu": (weighted_squared_relu_impl,),
}
