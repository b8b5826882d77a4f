"""A transformer block: attention and an MLP. Each reads the normalised residual stream and adds its output to the stream."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.gpt.cache import LayerCache
from onepass.gpt.config import Config
from onepass.gpt.moe import MoE
from onepass.gpt.packing import nan_if_wrong, visible_keys
from onepass.gpt.parts import Initializer, PlainMLP, Residual, lora_of, make_norm
from onepass.gpt.positions import Tables, rotated
from onepass.nn.linear import ColumnParallelLinear, RowParallelLinear
from onepass.nn.mlp import MLP
from onepass.nn.precision import set_precision
from onepass.ops.attention.attention import SIZES, attention, unsupported
from onepass.ops.attention.by_pytorch import rotate_again
from onepass.ops.attention.formula import parts_of
from onepass.ops.attention.rope import rope
from onepass.runtime.backend import choose
from onepass.runtime.batch_invariance import invariant, refuse
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.recomputed import recomputed


class SelfAttention(nn.Module):
    """Causal self-attention with grouped queries. linear_qkv's output is all queries, then all keys, then all values."""

    def __init__(self, config: Config, tp_group: dist.ProcessGroup | None, start: Initializer, device: Any) -> None:
        super().__init__()
        self.config = config
        size, ranks = config.head_size, config.tensor_model_parallel_size
        sizes = [heads * size for heads in (config.num_attention_heads, config.query_groups, config.query_groups)]
        self.heads = config.num_attention_heads // ranks, config.query_groups // ranks  # this rank's: query heads, key heads
        spread: dict[str, Any] = {"tp_group": tp_group, "sequence_parallel": config.sequence_parallel}
        options = spread | {"device": device, "dtype": config.dtype}
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            sum(sizes),
            bias=config.qkv_bias,
            stride=sizes,
            init_method=start.of("linear_qkv.weight"),
            **options,
        )
        self.linear_proj = RowParallelLinear(
            sizes[0],
            config.hidden_size,
            bias=config.add_bias_linear,
            skip_bias_add=True,
            init_method=start.of("linear_proj.weight", 1 / math.sqrt(2 * config.num_layers)),
            **options,
        )
        self.q_layernorm = make_norm(config, size, ranks > 1, device) if config.qk_layernorm else None
        self.k_layernorm = make_norm(config, size, ranks > 1, device) if config.qk_layernorm else None

    def forward(
        self,
        qkv: Tensor,
        tables: Tables | None,
        boundaries: Tensor | None = None,
        again: Callable[[], Tensor] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (y, linear_proj's bias). `qkv` is linear_qkv's output, and `again` makes it in backward, where it is not kept.
        `boundaries` are as gpt/packing.py joins them. The tokens follow those in `cache`, where there is one."""
        if cache is not None:
            mixed = cache.attend(*self._parts_as_one_op(qkv, tables))
            return self.linear_proj(mixed, lora=lora_of(self.linear_proj))  # type: ignore[no-any-return]
        mixed = self.mixed(qkv, tables, boundaries, again)
        return self.linear_proj(mixed, lora=lora_of(self.linear_proj))  # type: ignore[no-any-return]

    def mixed(
        self, qkv: Tensor, tables: Tables | None, boundaries: Tensor | None = None, again: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Return the attention output of this rank's heads. It has qkv's shape, except for the last dimension."""
        rows = sequences(qkv, self.config)
        normed = self.q_layernorm is None or self.config.norms_in_attention
        as_one = self.config.attention_fusion and not self._drops()
        if invariant():
            if not as_one:
                refuse("attention by PyTorch's operators", "it chooses kernels by the batch: leave attention_fusion on")
        elif boundaries is None:
            # of other sizes: rope's kernel, F.sdpa
            as_one = as_one and normed and (not rows.is_cuda or self.config.head_size in SIZES)
        elif rows.is_cuda:  # without kernels the op has a mask of all tokens, and `_by_pytorch` one of each row's
            as_one = as_one and unsupported(rows, *self.heads, boundaries) is None
        y = self._as_one_op(rows, tables, boundaries, again) if as_one else self._by_pytorch(rows, tables, boundaries)
        return y.reshape(*qkv.shape[:-1], -1)

    def _drops(self) -> bool:
        return self.training and self.config.attention_dropout > 0

    def _as_one_op(
        self, rows: Tensor, tables: Tables | None, boundaries: Tensor | None, again: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Run norms of heads, rotation and attention as one op.

        The op writes the rotated q and k into `rows`, linear_qkv's output, which no other op reads. So does backward, where
        `again` makes it.
        """
        c = self.config
        norms = self._norms_of_heads()
        if (self.q_layernorm is not None and not norms) or (tables is not None and not c.apply_rope_fusion):
            rows, tables, again = torch.cat(self._rotated_parts(rows, tables), 2).flatten(2), None, None
        cos, sin = tables or (None, None)
        if boundaries is not None:  # the op takes documents in a single row
            rows = rows.reshape(1, -1, rows.shape[-1])
            cos, sin = (None if table is None else table.reshape(1, -1, table.shape[-1]) for table in (cos, sin))
        reason = unsupported(rows, *self.heads, boundaries)
        backend = None if reason is None else "torch"  # even where "triton" is selected globally
        shape, (heads, groups) = rows.shape, self.heads
        before = None if again is None else rows._version

        def rows_again() -> Tensor:
            made = again().view(shape)  # type: ignore[misc]  # called where it is there
            if overwritten and cos is not None and sin is not None:
                by_kernel = choose("attention", backend, reason) != "torch"
                rotate_again(made, heads, groups, cos, sin, boundaries, c.rotary_interleaved, by_kernel)
            return made

        with nullcontext() if again is None else recomputed(rows, rows_again):
            y = attention(
                rows,
                heads,
                groups,
                cos=cos,
                sin=sin,
                interleaved=c.rotary_interleaved,
                cu_seqlens=boundaries,
                **norms,
                overwrite=True,
                deterministic=False,
                backend=backend,
            )
        overwritten = before is not None and rows._version != before
        return y

    def _parts_as_one_op(self, rows: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normalised and rotated to the bits that `_as_one_op` gives them, and values."""
        norms, c = self._norms_of_heads(), self.config
        if tables is None or not c.apply_rope_fusion or (self.q_layernorm is not None and not norms):
            return self._rotated_parts(rows, tables)
        q, k, v = parts_of(rows, *self.heads)
        backend = None if unsupported(rows, *self.heads) is None else "torch"  # attention's
        return *rope(q, k, *tables, interleaved=c.rotary_interleaved, **norms, backend=backend), v

    def _norms_of_heads(self) -> dict[str, Any]:
        """Return the norms' weights and options, where attention's rotation has them."""
        c = self.config
        if self.q_layernorm is None or self.k_layernorm is None or not c.norms_in_attention:
            return {}
        weights = (norm.given(norm.weight) for norm in (self.q_layernorm, self.k_layernorm))
        options = {"eps": c.layernorm_epsilon, "zero_centered_gamma": c.layernorm_zero_centered_gamma}
        return options | dict(zip(("q_weight", "k_weight"), weights, strict=True))

    def _by_pytorch(self, rows: Tensor, tables: Tables | None, boundaries: Tensor | None) -> Tensor:
        c = self.config
        q, k, v = (x.transpose(1, 2) for x in self._rotated_parts(rows, tables))
        mask, several = None, c.num_attention_heads // c.query_groups
        if boundaries is not None:
            mask = visible_keys(boundaries, *rows.shape[:2])
            k, v = (x.repeat_interleave(several, 1) for x in (k, v))  # on a GPU only scores in full go with both mask and groups
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            dropout_p=c.attention_dropout if self._drops() else 0.0,
            is_causal=mask is None,
            enable_gqa=mask is None and several > 1,
        ).transpose(1, 2)
        return y if boundaries is None else nan_if_wrong(y, boundaries, rows.shape[0] * rows.shape[1])

    def _rotated_parts(self, rows: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normalised and rotated, and values."""
        q, k, v = parts_of(rows, *self.heads)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        return (q, k, v) if tables is None else (*rotated(q, k, tables, self.config), v)


def sequences(x: Tensor, config: Config) -> Tensor:
    """Return a column-parallel layer's output as [B, S, ...].

    Under sequence parallelism the layer returns [B * ranks, S / ranks, ...]: the ranks' shards along the first dimension.
    """
    ranks = config.sequence_ranks
    return x if ranks == 1 else x.reshape(x.shape[0] // ranks, x.shape[1] * ranks, *x.shape[2:])


class Block(nn.Module):
    """A transformer layer. forward takes (h, pending) and returns (h, pending, auxiliary loss).

    h is the residual stream. `pending` is a block's output that the next norm still has to add to h, or None. The auxiliary loss
    is an MoE's, or None.
    """

    def __init__(
        self, config: Config, tp_group: dist.ProcessGroup | None, start: Initializer, device: Any, precision: FP8Recipe | None
    ) -> None:
        super().__init__()
        self.residual = Residual(config, tp_group)
        self.input_layernorm = make_norm(config, config.hidden_size, config.sequence_parallel, device)
        self.self_attention = SelfAttention(config, tp_group, start.of("self_attention"), device)
        self.pre_mlp_layernorm = make_norm(config, config.hidden_size, config.sequence_parallel, device)
        self.mlp: MLP | MoE = (MoE if config.num_moe_experts else make_mlp)(config, tp_group, start.of("mlp"), device)
        set_precision(self, precision)

    def forward(
        self,
        h: Tensor,
        pending: Tensor | None = None,
        tables: Tables | None = None,
        boundaries: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        attention, mlp, give = self.self_attention, self.mlp, self.residual.give
        (qkv, _), h = self.residual.take(h, pending, self.input_layernorm, attention.linear_qkv)
        again = self.residual.again(h, self.input_layernorm, attention.linear_qkv)
        h, pending = give(h, attention(qkv, tables, boundaries, again, cache), self.training)
        if isinstance(mlp, MoE):
            normed, h = self.residual.normed(h, pending, self.pre_mlp_layernorm)
            y, aux_loss = mlp(normed)
            return *give(h, (y, None), self.training), aux_loss
        up, h = self.residual.take(h, pending, self.pre_mlp_layernorm, mlp.linear_fc1)
        again = self.residual.again(h, self.pre_mlp_layernorm, mlp.linear_fc1)
        with nullcontext() if again is None else recomputed(up[0], again):
            y = mlp.rest(*up, lora=lora_of(mlp.linear_fc2))
        return *give(h, y, self.training), None


def make_mlp(config: Config, tp_group: dist.ProcessGroup | None, start: Initializer, device: Any) -> MLP:
    sizes = config.hidden_size, config.ffn_size, config.activation
    options: dict[str, Any] = {
        "bias": config.add_bias_linear,
        "clamp": config.activation_func_clamp_value,
        "linear_offset": config.glu_linear_offset,
        "save": config.activation_save,
        "skip_bias_add": True,
        "init_method": start.of("linear_fc1.weight"),
        "output_layer_init_method": start.of("linear_fc2.weight", 1 / math.sqrt(2 * config.num_layers)),
        "tp_group": tp_group,
        "sequence_parallel": config.sequence_parallel,
        "device": device,
        "dtype": config.dtype,
    }
    return MLP(*sizes, **options) if config.bias_activation_fusion else PlainMLP(config, *sizes, **options)
