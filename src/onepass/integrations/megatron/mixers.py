"""Megatron's mixers of hybrid stacks by a few ops of onepass: gated delta nets and Mamba 2.

The convolution, and the gates of a rule, read in_proj's output where it lies, and the gated norm runs inside of out_proj. What
backward keeps has no norm's output. Other cases go to Megatron's own forward.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.integrations.delta_net import DeltaNet
from onepass.integrations.megatron.attention import Fused
from onepass.integrations.megatron.norms import HeadNorm
from onepass.ops.convolution.causal_conv1d import WIDTHS, causal_conv1d
from onepass.ops.norm.gated_norm_linear import gated_norm_linear
from onepass.ops.scan.mamba_chunk_scan import mamba_chunk_scan


@cache
def gated_norm_row_parallel_linear() -> Any:
    """Return the class of an out_proj that takes a mixer's rows and their gate, and applies the gated norm itself."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    class GatedNormRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
        def forward(self, input_: Tensor, gate: Tensor | None = None, norm_weight: Tensor | None = None, **norm: Any) -> Any:
            if gate is None:  # of Megatron's own forward, which has applied the norm
                return super().forward(input_)
            y = gated_norm_linear(
                input_,
                gate,
                norm_weight,
                self.weight,
                None if self.skip_bias_add else self.bias,
                tp_group=self.tp_group if self.tp_group.size() > 1 else None,
                sequence_parallel=self.sequence_parallel,
                **norm,
            )
            return y, self.bias if self.skip_bias_add else None

    return GatedNormRowParallelLinear


@cache
def fused_gated_delta_net() -> Any:
    """Return a GatedDeltaNet by onepass's ops. Its modules and checkpoints are stock's."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    class FusedGatedDeltaNet(GatedDeltaNet, Fused):  # type: ignore[misc]
        part, by = "gated delta net", "causal_conv1d, delta_gates, gated_delta_rule, gated_norm_linear"

        def why_left(self) -> str | None:
            if self.act_fn is not F.silu:
                return f"activation_func is {self.activation}"
            if not isinstance(self.out_norm, HeadNorm):
                return f"out_norm is {type(self.out_norm).__name__}"
            return _why_left(self.out_proj, self.conv_kernel_dim, self.cp_size)

        def forward(
            self, hidden_states: Tensor, attention_mask: Tensor | None = None, inference_context: Any = None,
            packed_seq_params: Any = None, *args: Any, inference_params: Any = None, **others: Any,
        ) -> Any:  # fmt: skip
            if inference_context is not None or inference_params is not None or self.why_left():
                given = hidden_states, attention_mask, inference_context, packed_seq_params, *args
                return super().forward(*given, inference_params=inference_params, **others)
            keys, values, heads = self.qk_dim_local_tp, self.v_dim_local_tp, self.num_v_heads_local_tp
            made, _ = self.in_proj(hidden_states)
            qkv, gate, b, a = made.split((2 * keys + values, values, heads, heads), -1)
            split, key_heads = (keys, keys, values), keys // self.key_head_dim
            net = DeltaNet(self.conv1d.weight, self.conv1d.bias, self.A_log, self.dt_bias, split, key_heads, self.use_qk_l2norm)
            qkv, b, a = (x.transpose(0, 1) for x in (qkv, b, a))
            y = net(qkv, b, a, documents_of(packed_seq_params, made))
            norm = {name: getattr(self.out_norm, name) for name in ("eps", "zero_centered_gamma")}
            norm["group_size"] = self.value_head_dim
            return self.out_proj(y.flatten(2).transpose(0, 1), gate, self.out_norm(None), **norm)

    return FusedGatedDeltaNet


@cache
def fused_mamba_mixer() -> Any:
    """Return a MambaMixer whose training is by onepass's ops. Its modules and checkpoints are stock's."""
    from megatron.core.ssm.mamba_mixer import MambaMixer

    class FusedMambaMixer(MambaMixer, Fused):  # type: ignore[misc]
        part, by = "mamba mixer", "causal_conv1d, mamba_chunk_scan, gated_norm_linear"

        def why_left(self) -> str | None:
            if self.D_has_hdim or not self.rmsnorm:
                return f"D_has_hdim is {self.D_has_hdim}, and rmsnorm {self.rmsnorm}"
            dtype = getattr(self.config, "mamba_training_ssm_states_dtype", None)
            if dtype is not None:
                return f"mamba_training_ssm_states_dtype is {dtype}"
            return _why_left(self.out_proj, self.d_conv, self.cp.cp_size)

        def forward(
            self, hidden_states: Tensor, inference_context: Any = None, *, inference_params: Any = None,
            packed_seq_params: Any = None,
        ) -> Any:  # fmt: skip
            if inference_context is not None or inference_params is not None or self.why_left():
                options = {"inference_params": inference_params, "packed_seq_params": packed_seq_params}
                return super().forward(hidden_states, inference_context, **options)
            inner, states, heads = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state, self.nheads_local_tp
            made, _ = self.in_proj(hidden_states)
            documents = documents_of(packed_seq_params, made)
            gate, xbc, dt = made.split((inner, inner + 2 * states, heads), -1)
            weight, bias = self.cp.get_conv1d_weight(), self.cp.get_conv1d_bias()
            split = inner, states, states
            x, B, C = causal_conv1d(xbc.transpose(0, 1), weight, bias, cu_seqlens=documents, split=split)
            y: Any = mamba_chunk_scan(
                x.unflatten(-1, (heads, -1)),
                dt.transpose(0, 1),
                -self.A_log.float().exp(),
                B.unflatten(-1, (self.ngroups_local_tp, -1)),
                C.unflatten(-1, (self.ngroups_local_tp, -1)),
                D=self.D,
                dt_bias=self.dt_bias,
                dt_softplus=True,
                cu_seqlens=documents,
            )
            norm = {"eps": self.norm.eps, "group_size": self.norm.group_size, "norm_before_gate": False}
            return self.out_proj(y.flatten(2).transpose(0, 1), gate, self.norm.weight, **norm)

    return FusedMambaMixer


def _why_left(out_proj: Any, width: int, cp_size: int) -> str | None:
    if type(out_proj) is not gated_norm_row_parallel_linear():  # such as an adapter around it, which wants its input
        return f"out_proj is {type(out_proj).__name__}"
    if width not in WIDTHS:
        return f"the convolution's width is {width}"
    return f"context_parallel_size is {cp_size}" if cp_size > 1 else None


def documents_of(packed: Any, rows: Tensor) -> Tensor | None:
    """Return the boundaries of packed documents, each with the padding after it. Rows after the last are one more."""
    if packed is None or packed.qkv_format != "thd":
        return None
    padded = packed.cu_seqlens_q_padded
    ends = (packed.cu_seqlens_q if padded is None else padded).to(torch.int32)
    return torch.cat([ends, ends.new_full((1,), rows.shape[0])])
