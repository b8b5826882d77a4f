"""torchtitan's modules by onepass, each by its name on the command line.

    torchrun ... --override.imports onepass.integrations.torchtitan.norm onepass.integrations.torchtitan.loss

`block`, `norm`, `feed_forward`, `experts`, `gqa`, `complex_rope`, `cos_sin_rope`, `attention` and `loss` are factories.
torchtitan calls each with every config of its kind, after it has set their sharding, and builds what they return. Parameters,
their names and their sharding stay, so state dicts and checkpoints do. A config that can't be replaced raises
NotImplementedError and is named.

Under spmd_types, torchtitan's default, modules see plain tensors; under partial_dtensor, where ranks share a weight, DTensors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from onepass.integrations.compiled_mlp import gated_mlp, use_gated_mlp
from onepass.integrations.seams import SeamError
from onepass.integrations.torchtitan_configs import TITAN, VERSION, check, check_seam, make_invariant, new_config, refuse
from onepass.ops.activation.activation_linear import activation_linear
from onepass.ops.attention.attention import attention as attend
from onepass.ops.attention.rope import rope
from onepass.ops.linear.linear import linear
from onepass.ops.norm.compiled_projections import norm_projections, projections, use_compiled_projections
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.norm import rms_norm
from onepass.ops.norm.norm_linear import norm_linear
from onepass.runtime.batch_invariance import refuse as keep_invariant
from onepass.runtime.fp8_recipe import Precision, recipe_of

try:
    from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.config import derive, override
    from torchtitan.models.common.attention import (
        FlexAttention,
        FusedQKVLinear,
        GQAttention,
        QKVLinear,
        ScaledDotProductAttention,
        VarlenAttention,
    )
    from torchtitan.models.common.decoder import TransformerBlock
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE
    from torchtitan.models.llama3.model import Llama3TransformerBlock
    from torchtitan.models.qwen3.model import Qwen3TransformerBlock
    from torchtitan.tools.logging import logger

    from onepass.integrations.torchtitan_attention import DocumentAttention, InnerAttention
    from onepass.integrations.torchtitan_experts import OF_EXPERTS, SortedExperts
    from onepass.integrations.torchtitan_loss import LinearCrossEntropyLoss
except ImportError as error:
    raise SeamError(
        f"torchtitan {VERSION} lacks what onepass replaces or needs ({error}): use a version that onepass was tested with, "
        f"as {TITAN}, or leave onepass's overrides off"
    ) from error

check_seam(FeedForward, "forward", "self", "x")
check_seam(GroupedExperts, "forward", "self", "x_RD", "num_tokens_per_expert_E")
check_seam(RoutedExperts, "forward", "self", "x_BLD", "topk_scores_BLK", "topk_expert_ids_BLK", "num_local_tokens_per_expert_E")
check_seam(Llama3TransformerBlock, "forward", "self", "x", "attention_masks", "positions")
check_seam(Qwen3TransformerBlock, "forward", "self", "x", "attention_masks", "positions")
check_seam(GQAttention, "forward", "self", "x_BLD", "attention_masks", "positions")
check_seam(RoPE, "apply_rotary_emb", "query", "key", "rope_cache")
check_seam(
    VarlenAttention, "forward", "self", "q_BLNH", "k_BLNH", "v_BLNH", "attention_masks", "scale", "out_transform", "kwargs"
)
check_seam(ChunkedLossWrapper, "set_lm_head", "self", "lm_head")
check_seam(ChunkedLossWrapper, "__call__", "self", "pred", "labels", "global_valid_tokens", "loss_inputs")


# ---- norm ----


class Norm(RMSNorm):
    Config = new_config("Norm", RMSNorm)

    def forward(self, input: Tensor) -> Tensor:  # torchtitan's sharding names it so
        return rms_norm(input, self.weight, self.eps)


@override(target=RMSNorm.Config, description="onepass.rms_norm")
def norm(config: Any) -> Any:
    check("norm", config, RMSNorm.Config)
    return derive(config, Norm.Config)


# ---- feed_forward ----


class FP8Linear(Linear):
    """A linear layer with a precision. Of DTensors each rank multiplies its part of the weight."""

    Config = new_config("FP8Linear", Linear, "precision")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.precision = config.precision

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return linear(x, self.weight, self.bias, precision=self.precision)
        weight: Any = self.weight
        by_row = weight.placements == (Shard(1),)
        local = x.to_local() if by_row else x.to_local(grad_placements=[Partial()])
        y = linear(local, weight.to_local(), precision=self.precision)
        y = DTensor.from_local(y, x.device_mesh, [Partial() if by_row else Shard(-1)], run_check=False)
        return y if self.bias is None else y + self.bias


def _with_precision(config: Any, precision: Precision) -> Any:
    return config if recipe_of(precision) is None else derive(config, FP8Linear.Config, precision=precision)


class ActivationLinear(Linear):
    """The activation and the product down, as one op. It keeps what came up, and rebuilds the activation in backward."""

    Config = new_config("ActivationLinear", Linear, "precision")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.precision = config.precision

    def forward(self, packed: Tensor) -> Tensor:
        """packed: gates and values. Of a DTensor each rank has its own columns of both, which no placement of the whole says."""
        if not isinstance(packed, DTensor):
            return activation_linear(packed, self.weight, precision=self.precision)
        weight: Any = self.weight
        y = activation_linear(packed.to_local(), weight.to_local(), precision=self.precision)
        return DTensor.from_local(y, packed.device_mesh, [Partial()], run_check=False)


class GatedFeedForward(FeedForward):
    Config = new_config("GatedFeedForward", FeedForward)

    def forward(self, x: Tensor, *, norm: Any = None, residual: Tensor | None = None) -> Tensor:
        """With a norm: h + w2(...) of norm(h), h being x + residual."""
        weights, biases, precision = _parameters((self.w1, self.w3))
        operands = weights, self.w2.weight, "swiglu", precision
        if norm is not None and weights and not biases and use_gated_mlp(x, norm.weight, *operands):
            y, h = gated_mlp(x, residual, norm.weight, None, NormOptions(False, norm.eps, False), *operands)
            return h + y
        packed, h = _norm_side_by_side(x, residual, norm, self.w1, self.w3)
        return self.w2(packed) if norm is None else h + self.w2(packed)  # type: ignore[no-any-return]


def _side_by_side(x: Tensor, *layers: Any) -> Tensor:
    """Return the layers' results, one after another in each row. Plain layers are one product, which copies their weights."""
    weights, biases, precision = _parameters(layers)
    if weights and not isinstance(x, DTensor) and use_compiled_projections(x, None, weights, biases, precision):
        return projections(x, weights, biases, precision)
    parts: list[Any] = [layer(x) for layer in layers]
    if len(parts) == 1 or not isinstance(parts[0], DTensor):
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    packed = torch.cat([part.to_local() for part in parts], -1)
    return DTensor.from_local(packed, parts[0].device_mesh, parts[0].placements, run_check=False)


def _norm_side_by_side(x: Tensor, residual: Tensor | None, norm: Any, *layers: Any) -> tuple[Tensor, Tensor]:
    """`_side_by_side` of norm(h), and h, which is x + residual. Plain layers keep h alone for backward, and not its norm."""
    if norm is None:
        return _side_by_side(x, *layers), x
    weights, biases, precision = _parameters(layers)
    if len(weights) == 1:
        of_norm = {"eps": norm.eps, "residual": residual, "return_input": True, "precision": precision}
        return norm_linear(x, norm.weight, weights[0], biases[0] if biases else None, **of_norm)  # type: ignore[no-any-return]
    if weights and use_compiled_projections(x, norm.weight, weights, biases, precision):
        return norm_projections(x, residual, norm.weight, None, NormOptions(False, norm.eps, False), weights, biases, precision)
    h = x if residual is None else x + residual
    return _side_by_side(norm(h), *layers), h


def _parameters(layers: Any) -> tuple[list[Tensor], list[Tensor], Precision]:
    """Return the weights, biases and precision of plain layers; no weights if one is another's, or some have no bias."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if any(type(layer) not in (Linear, FP8Linear) for layer in layers) or len(biases) not in (0, len(layers)):
        return [], [], None
    return [layer.weight for layer in layers], biases, getattr(layers[0], "precision", None)


@override(target=FeedForward.Config, description="onepass.activation_linear")
def feed_forward(config: Any, *, precision: Precision = None) -> Any:
    """precision: "fp8" for products in eight bits, as of `onepass.linear`."""
    check("feed_forward", config, FeedForward.Config)
    if type(config.w2) is not Linear.Config or config.w2.bias:
        refuse("feed_forward", config, f"its w2 must be Linear.Config without a bias, but is {config.w2}")
    _check_plain("feed_forward", precision, config, w1=config.w1, w3=config.w3)
    layers = {name: _with_precision(getattr(config, name), precision) for name in ("w1", "w3")}
    layers["w2"] = derive(config.w2, ActivationLinear.Config, precision=precision)
    return derive(config, GatedFeedForward.Config, **layers)


def _check_plain(name: str, precision: Precision, config: Any, **layers: Any) -> None:
    """Refuse to run layers in eight bits that compute something else, or are in eight bits by torchtitan."""
    if recipe_of(precision) is None:
        return
    for layer, found in layers.items():
        if type(found) is not Linear.Config:
            refuse(name, config, f"with a precision its {layer} must be Linear.Config, but is {type(found).__qualname__}")


# ---- experts ----


@override(target=RoutedExperts.Config, description="onepass.experts")
def experts(config: Any, *, precision: Precision = None) -> Any:
    """precision: as in `onepass.experts`."""
    check("experts", config, RoutedExperts.Config)
    inner = config.inner_experts
    check("experts, of its inner_experts,", inner, *OF_EXPERTS)
    return derive(config, SortedExperts.Config, inner_experts=derive(inner, OF_EXPERTS[type(inner)].Config, precision=precision))


# ---- rope ----


class InterleavedRoPE(ComplexRoPE):
    """Rotates neighbours, by a table of complex numbers."""

    Config = new_config("InterleavedRoPE", ComplexRoPE)

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        return rope(query, key, *_complex_tables(rope_cache.squeeze(2)), interleaved=True)


def _complex_tables(cache: Tensor) -> tuple[Tensor, ...]:
    return torch.view_as_real(cache).unbind(-1)


@override(target=ComplexRoPE.Config, description="onepass.rope, of neighbours")
def complex_rope(config: Any) -> Any:
    check("complex_rope", config, ComplexRoPE.Config)
    return derive(config, InterleavedRoPE.Config)


class HalvesRoPE(CosSinRoPE):
    """Rotates the first half of a head with the second, by a table of cosines, twice, then sines, twice."""

    Config = new_config("HalvesRoPE", CosSinRoPE)

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        return rope(query, key, *_cos_sin_tables(rope_cache.squeeze(2)))


def _cos_sin_tables(cache: Tensor) -> tuple[Tensor, ...]:
    return cache.chunk(4, -1)[::2]


@override(target=CosSinRoPE.Config, description="onepass.rope, of halves")
def cos_sin_rope(config: Any) -> Any:
    check("cos_sin_rope", config, CosSinRoPE.Config)
    return derive(config, HalvesRoPE.Config)


# ---- attention ----


@override(target=InnerAttention, description="onepass.attention")
def attention(config: Any, *, flex_as_documents: bool = False) -> Any:
    """flex_as_documents: the promise that each layer's mask is causal, within documents, and has no window.

    PyTorch's attention of whole sequences stays: cuDNN's kernels need no copy of q, k and v into one tensor.
    """
    return _inner("attention", config, flex_as_documents)


def _inner(name: str, config: Any, flex_as_documents: bool) -> Any:
    check(name, config, VarlenAttention.Config, ScaledDotProductAttention.Config, FlexAttention.Config)
    if type(config) is ScaledDotProductAttention.Config:
        return config
    if type(config) is FlexAttention.Config and not flex_as_documents:
        refuse(name, config, f"its masks are functions. Build the model with attn_backend='varlen'; or, {_AS_DOCUMENTS}")
    return derive(config, DocumentAttention.Config)


# ---- gqa ----

_AS_DOCUMENTS = 'if each layer\'s mask is causal, within documents, and has no window, say {"flex_as_documents": true}'


@cache
def _log_flex() -> None:
    logger.info(f"onepass: FlexAttention stays torchtitan's, as its masks are functions; {_AS_DOCUMENTS}")


class PackedAttention(GQAttention):
    """Takes the projection of q, k and v as it is: the rotation, and the norms of heads, are attention's.

    FlexAttention, and SDPA over context-parallel ranks, are torchtitan's, and get what is rotated.
    """

    Config = new_config("PackedAttention", GQAttention)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.by_group = isinstance(self.qkv_linear, FusedQKVLinear)
        self.interleaved, self.over_ranks = isinstance(self.rope, ComplexRoPE), False

    def parallelize(self, parallel_dims: Any) -> None:
        self.over_ranks = parallel_dims.cp > 1
        if self.over_ranks and isinstance(self.inner_attention, DocumentAttention):
            raise NotImplementedError(
                "onepass's attention of documents knows no context parallelism: build the model with attn_backend='flex' and "
                "without flex_as_documents, so that attention is torchtitan's"
            )
        super().parallelize(parallel_dims)

    def _is_inner(self) -> bool:
        """Whether attention is torchtitan's, which under partial_dtensor wraps a module's forward for context parallelism."""
        wrapped = not self._parallelized and "forward" in self.inner_attention.__dict__
        return self.over_ranks or wrapped or isinstance(self.inner_attention, FlexAttention)

    def forward(self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None, *, norm: Any = None) -> Tensor:
        """With a norm: of norm(x)."""
        names = ("wqkv",) if self.by_group else ("wq", "wk", "wv")
        layers = [getattr(self.qkv_linear, name) for name in names]
        qkv, _ = _norm_side_by_side(x_BLD, None, norm, *layers)
        local = qkv.to_local() if isinstance(qkv, DTensor) else qkv
        shared = self.n_heads // self.n_kv_heads
        groups = local.shape[-1] // ((shared + 2) * self.head_dim)  # of this rank
        options = {"scale": self.scaling, "by_group": self.by_group, "interleaved": self.interleaved, "deterministic": False}
        if self.q_norm is not None and self.k_norm is not None:
            q_weight, k_weight = (_of_heads(norm.weight, local, self.head_dim) for norm in (self.q_norm, self.k_norm))
            options |= {"q_weight": q_weight, "k_weight": k_weight, "eps": self.q_norm.eps}
        tables = self._tables(local.shape[1], positions)
        if self._is_inner():
            return self.wo(self._by_inner(qkv, local, tables, groups, attention_masks))  # type: ignore[no-any-return]
        if isinstance(self.inner_attention, DocumentAttention):
            options |= self.inner_attention.sees(attention_masks)
            tables = [table.expand(local.shape[0], -1, -1).flatten(0, 1)[None] for table in tables]
            y = attend(local.flatten(0, 1)[None], shared * groups, groups, cos=tables[0], sin=tables[1], **options)
            y = y.view(*local.shape[:2], -1)
        elif attention_masks is not None:
            raise ValueError("ScaledDotProductAttention takes no attention_masks")
        else:
            y = attend(local, shared * groups, groups, cos=tables[0], sin=tables[1], **options)
        if isinstance(qkv, DTensor):
            y = DTensor.from_local(y, qkv.device_mesh, qkv.placements, run_check=False)
        return self.wo(y)  # type: ignore[no-any-return]

    def _by_inner(self, qkv: Any, local: Tensor, tables: list[Tensor], groups: int, attention_masks: Any) -> Any:
        """Return what torchtitan's attention makes of this rank's q, k and v, with a head after another."""
        keep_invariant("attention of torchtitan", "its sums are torchtitan's own; leave context parallelism off")
        D, shared = self.head_dim, self.n_heads // self.n_kv_heads
        if self.by_group:
            parts: Any = local.unflatten(-1, (groups, -1, D)).split((shared, 1, 1), 3)
        else:
            parts = local.split((shared * groups * D, groups * D, groups * D), -1)
        q, k, v = (part.reshape(*local.shape[:2], -1, D) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (rms_norm(x, _shared(norm.weight), norm.eps) for x, norm in ((q, self.q_norm), (k, self.k_norm)))
        q, k = rope(q, k, *tables, interleaved=self.interleaved)
        heads = [q, k, v]
        if isinstance(qkv, DTensor):
            heads = [DTensor.from_local(x, qkv.device_mesh, [Shard(2)], run_check=False) for x in heads]
        y: Any = self.inner_attention(*heads, attention_masks=attention_masks, scale=self.scaling, enable_gqa=self.enable_gqa)
        return y.contiguous().flatten(2)

    def _tables(self, length: int, positions: Tensor | None) -> list[Tensor]:
        """Return cos and sin of the positions: [length, R/2], or [rows, length, R/2]."""
        cache = self.rope.cache.to_local() if isinstance(self.rope.cache, DTensor) else self.rope.cache
        cache = cache[:length] if positions is None else cache[positions[0] if positions.shape[0] == 1 else positions]
        return list(_complex_tables(cache) if self.interleaved else _cos_sin_tables(cache))


def _shared(weight: Any) -> Tensor:
    """Return a weight that all ranks have, whose gradient is a sum over theirs."""
    return weight.to_local(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight


def _of_heads(weight: Tensor | None, x: Tensor, size: int) -> Tensor:
    """Return a norm's weight, or ones for a norm without one: attention takes None for no norm."""
    return x.new_ones(size) if weight is None else _shared(weight)


@override(target=GQAttention.Config, description="onepass.attention, of the projection as it is")
def gqa(config: Any, *, flex_as_documents: bool = False, precision: Precision = None) -> Any:
    """In the place of `attention`, `complex_rope` and `cos_sin_rope`. The options are `attention`'s and `feed_forward`'s."""
    check("gqa", config, GQAttention.Config)
    known = {
        "qkv_linear": (FusedQKVLinear.Config, QKVLinear.Config),
        "rope": (ComplexRoPE.Config, CosSinRoPE.Config),
        "qk_norm": (RMSNorm.Config, type(None)),
    }
    for name, kinds in known.items():
        found = type(getattr(config, name))
        if found not in kinds:
            wanted = " or ".join(kind.__qualname__ for kind in kinds)
            refuse("gqa", config, f"its {name} must be {wanted}, but is {found.__qualname__}")
    layers = {name: getattr(config.qkv_linear, name) for name in ("wqkv", "wq", "wkv") if hasattr(config.qkv_linear, name)}
    _check_plain("gqa", precision, config, wo=config.wo, **layers)
    layers = {name: _with_precision(layer, precision) for name, layer in layers.items()}
    inner, wo = config.inner_attention, _with_precision(config.wo, precision)
    if type(inner) is FlexAttention.Config and not flex_as_documents:
        _log_flex()
    else:
        inner = _inner("gqa", inner, flex_as_documents)
    qkv_linear = derive(config.qkv_linear, type(config.qkv_linear), **layers)
    return derive(config, PackedAttention.Config, inner_attention=inner, qkv_linear=qkv_linear, wo=wo)


# ---- block ----


class _FoldedNorms:
    """x + attention(norm(x)), then h + mlp(norm(h)), each norm within the product that reads it."""

    divided = False  # over tensor-parallel ranks, which gather what comes between a norm and its product

    def parallelize(self, parallel_dims: Any) -> None:
        self.divided = parallel_dims.tp > 1
        super().parallelize(parallel_dims)  # type: ignore[misc]

    def forward(self: Any, x: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        if self.divided:
            return super().forward(x, attention_masks, positions)  # type: ignore[misc,no-any-return]
        attended = self.attention(x, attention_masks, positions, norm=self.attention_norm)
        if hasattr(self, "feed_forward"):
            return self.feed_forward(attended, norm=self.ffn_norm, residual=x)  # type: ignore[no-any-return]
        h = attended + x
        return h + self.moe(self.ffn_norm(h))  # type: ignore[no-any-return]


class Llama3Block(_FoldedNorms, Llama3TransformerBlock):
    Config = new_config("Llama3Block", Llama3TransformerBlock)


class Qwen3Block(_FoldedNorms, Qwen3TransformerBlock):
    Config = new_config("Qwen3Block", Qwen3TransformerBlock)


_BLOCKS: dict[Any, Any] = {Llama3TransformerBlock.Config: Llama3Block, Qwen3TransformerBlock.Config: Qwen3Block}


@override(target=TransformerBlock.Config, description="onepass's attention and products, the norms in them")
def block(config: Any, *, flex_as_documents: bool = False, precision: Precision = None, batch_invariant: bool = False) -> Any:
    """In the place of all other overrides of a block's parts. The options are theirs.

    batch_invariant: turn `onepass.batch_invariant()` on, for the whole process.
    """
    check("block", config, *_BLOCKS)
    if batch_invariant:
        if type(config.attention.inner_attention) is FlexAttention.Config and not flex_as_documents:
            refuse("block", config, 'with batch_invariant attention must be "varlen" or flex_as_documents, but is FlexAttention')
        make_invariant("block", config, precision)
    for name in ("attention_norm", "ffn_norm"):
        check(f"block, of its {name},", getattr(config, name), RMSNorm.Config)
    parts = {"attention": gqa(config.attention, flex_as_documents=flex_as_documents, precision=precision)}
    if config.feed_forward is not None:
        parts["feed_forward"] = feed_forward(config.feed_forward, precision=precision)
    if config.moe is not None:
        parts["moe"] = _moe(config.moe, precision)
    return derive(config, _BLOCKS[type(config)].Config, **parts)


def _moe(config: Any, precision: Precision) -> Any:
    parts = {"routed_experts": experts(config.routed_experts, precision=precision)}
    if config.shared_experts is not None:
        parts["shared_experts"] = feed_forward(config.shared_experts, precision=precision)
    return derive(config, type(config), **parts)


# ---- loss ----


@override(target=BaseLoss.Config, description="onepass.linear_cross_entropy")
def loss(config: Any) -> Any:
    check("loss", config, ChunkedLossWrapper.Config, CrossEntropyLoss.Config)
    if type(config) is CrossEntropyLoss.Config:
        return LinearCrossEntropyLoss.Config(loss_fn=config)
    check("loss, within ChunkedLossWrapper,", config.loss_fn, CrossEntropyLoss.Config)
    return derive(config, LinearCrossEntropyLoss.Config)
