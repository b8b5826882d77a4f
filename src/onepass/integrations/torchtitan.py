"""torchtitan's modules by onepass, each by its name on the command line.

    torchrun ... --override.imports onepass.integrations.torchtitan.norm onepass.integrations.torchtitan.loss

`norm`, `feed_forward`, `complex_rope`, `cos_sin_rope`, `attention` and `loss` are factories. torchtitan calls each with every
config of its kind, after it has set their sharding, and builds what they return. Parameters, their names and their sharding stay,
so state dicts and checkpoints do. A config that can't be replaced raises NotImplementedError, which names it.

Under spmd_types, torchtitan's default, modules see plain tensors; under partial_dtensor, where ranks share a weight, DTensors.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from dataclasses import make_dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from onepass.integrations.seams import SeamError, Seams
from onepass.integrations.tested import TESTED
from onepass.ops.activation.activation_linear import activation_linear
from onepass.ops.attention.attention import attention as attend
from onepass.ops.attention.rope import rope
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy
from onepass.ops.norm.norm import rms_norm

_TESTED = TESTED["torchtitan"][-1]
_VERSION = Seams("torchtitan", _TESTED).version  # warns of a newer one

try:
    import spmd_types as spmd
    from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.config import derive, override
    from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
    from torchtitan.distributed.utils import get_spmd_backend
    from torchtitan.models.common.attention import (
        FlexAttention,
        ScaledDotProductAttention,
        VarlenAttention,
        VarlenMetadata,
    )
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise SeamError(
        f"torchtitan {_VERSION} lacks what onepass replaces or needs ({error}): use a version that onepass was tested with, "
        f"as {_TESTED}, or leave onepass's overrides off"
    ) from error


def _refuse(name: str, config: Any, why: str) -> NoReturn:
    raise NotImplementedError(f"{name} can't replace {type(config).__qualname__} of torchtitan {_VERSION}: {why}")


def _check(name: str, config: Any, *known: Any) -> None:
    """Refuse subclasses, which compute something else, and full_dtensor, under which FSDP2 would sum a second time what ops have
    summed over data-parallel ranks."""
    if get_spmd_backend() == "full_dtensor":
        _refuse(name, config, 'parallelism.spmd_backend must be "spmd_types" or "partial_dtensor", but is "full_dtensor"')
    if type(config) not in known:
        _refuse(name, config, f"it takes {' or '.join(each.__qualname__ for each in known)} alone, and no subclass")


def _config(owner: str, stock: Any) -> Any:
    """Return a config with stock's fields, of which torchtitan builds the owner."""
    own = {"__module__": __name__}
    return make_dataclass(f"{owner}.Config", (), bases=(stock.Config,), namespace=own, kw_only=True, slots=True)


def _check_seam(stock: Any, name: str, *arguments: str) -> None:
    """A method that was renamed upstream would be overridden in vain."""
    found = getattr(stock, name, None)
    taken = None if found is None else tuple(inspect.signature(found).parameters)
    if taken != arguments:
        has = "is not there" if taken is None else f"takes ({', '.join(taken)})"
        raise SeamError(
            f"{stock.__module__}.{stock.__qualname__}.{name} of torchtitan {_VERSION} {has}, and onepass overrides one that "
            f"takes ({', '.join(arguments)}), as in {_TESTED}: use such a version, or leave onepass's overrides off"
        )


_check_seam(FeedForward, "forward", "self", "x")
_check_seam(RoPE, "apply_rotary_emb", "query", "key", "rope_cache")
_check_seam(
    VarlenAttention, "forward", "self", "q_BLNH", "k_BLNH", "v_BLNH", "attention_masks", "scale", "out_transform", "kwargs"
)
_check_seam(ChunkedLossWrapper, "set_lm_head", "self", "lm_head")
_check_seam(ChunkedLossWrapper, "__call__", "self", "pred", "labels", "global_valid_tokens", "loss_inputs")


# ---- norm ----


class Norm(RMSNorm):
    Config = _config("Norm", RMSNorm)

    def forward(self, input: Tensor) -> Tensor:  # torchtitan's sharding names it so
        return rms_norm(input, self.weight, self.eps)


@override(target=RMSNorm.Config, description="onepass.rms_norm")
def norm(config: Any) -> Any:
    _check("norm", config, RMSNorm.Config)
    return derive(config, Norm.Config)


# ---- feed_forward ----


class ActivationLinear(Linear):
    """The activation and the product down, as one op. It keeps what came up, and rebuilds the activation in backward."""

    Config = _config("ActivationLinear", Linear)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if not isinstance(gate, DTensor):
            return activation_linear(torch.cat([gate, up], -1), self.weight)
        # each rank packs its own columns of both, which no placement of the whole says
        parts: list[Any] = [gate, up, self.weight]
        gate, up, weight = (part.to_local() for part in parts)
        y = activation_linear(torch.cat([gate, up], -1), weight)
        return DTensor.from_local(y, parts[2].device_mesh, [Partial()], run_check=False)


class GatedFeedForward(FeedForward):
    Config = _config("GatedFeedForward", FeedForward)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w1(x), self.w3(x))  # type: ignore[no-any-return]


@override(target=FeedForward.Config, description="onepass.activation_linear")
def feed_forward(config: Any) -> Any:
    _check("feed_forward", config, FeedForward.Config)
    if type(config.w2) is not Linear.Config or config.w2.bias:
        _refuse("feed_forward", config, f"its w2 must be Linear.Config without a bias, but is {config.w2}")
    return derive(config, GatedFeedForward.Config, w2=derive(config.w2, ActivationLinear.Config))


# ---- rope ----


class InterleavedRoPE(ComplexRoPE):
    """Turns neighbours, by a table of complex numbers."""

    Config = _config("InterleavedRoPE", ComplexRoPE)

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = torch.view_as_real(rope_cache.squeeze(2)).unbind(-1)
        return rope(query, key, cos, sin, interleaved=True)


@override(target=ComplexRoPE.Config, description="onepass.rope, of neighbours")
def complex_rope(config: Any) -> Any:
    _check("complex_rope", config, ComplexRoPE.Config)
    return derive(config, InterleavedRoPE.Config)


class HalvesRoPE(CosSinRoPE):
    """Turns the first half of a head with the second, by a table of cosines, twice, then sines, twice."""

    Config = _config("HalvesRoPE", CosSinRoPE)

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        cos, _, sin, _ = rope_cache.squeeze(2).chunk(4, -1)
        return rope(query, key, cos, sin)


@override(target=CosSinRoPE.Config, description="onepass.rope, of halves")
def cos_sin_rope(config: Any) -> Any:
    _check("cos_sin_rope", config, CosSinRoPE.Config)
    return derive(config, HalvesRoPE.Config)


# ---- attention ----


class DocumentAttention(VarlenAttention):
    """Attention within documents, in a window or not."""

    Config = _config("DocumentAttention", VarlenAttention)

    def __init__(self, config: Any) -> None:
        super(VarlenAttention, self).__init__()  # VarlenAttention's own chooses a FlashAttention
        before, after = (None if keys < 0 else keys for keys in config.window_size)
        self.causal = after == 0
        self.window = (None if before is None else before + 1) if self.causal else (before, after)

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, scale: float | None = None, **options: Any
    ) -> Tensor:  # fmt: skip
        if not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(f"attention_masks must be VarlenMetadata, but is {type(attention_masks).__qualname__}")
        documents = attention_masks.cu_seq_q
        return _attend(q_BLNH, k_BLNH, v_BLNH, options, scale=scale, causal=self.causal, cu_seqlens=documents, window=self.window)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, others: dict[str, Any], *, cu_seqlens: Tensor | None = None, **options: Any
) -> Tensor:  # fmt: skip
    """Return y [B, L, heads, D]. q, k and v are copied into one tensor: a read and a write of each."""
    others = {name: value for name, value in others.items() if name != "enable_gqa" and value is not None}
    if others:
        raise NotImplementedError(f"onepass's attention knows no {', '.join(others)}: leave the override `attention` off")
    if isinstance(q, DTensor) or q.shape[1] != k.shape[1]:
        raise NotImplementedError("onepass's attention knows no context parallelism: leave the override `attention` off")
    if q.shape[-1] != v.shape[-1]:
        raise NotImplementedError(
            f"onepass's attention needs heads of one size, but q's have {q.shape[-1]} and v's {v.shape[-1]}: leave the override "
            "`attention` off"
        )
    heads, groups, qkv = q.shape[2], k.shape[2], torch.cat([q, k, v], 2).flatten(2)
    if cu_seqlens is not None:
        qkv = qkv.flatten(0, 1)[None]
    y = attend(qkv, heads, groups, cu_seqlens=cu_seqlens, deterministic=False, **options)
    return y.view(q.shape)


class InnerAttention(Module.Config, metaclass=ABCMeta):
    """All of torchtitan's, for `attention` to take or refuse."""


for _stock in (VarlenAttention, ScaledDotProductAttention, FlexAttention):
    InnerAttention.register(_stock.Config)


@override(target=InnerAttention, description="onepass.attention")
def attention(config: Any, *, flex_as_documents: bool = False) -> Any:
    """flex_as_documents: the promise that each layer's mask is causal, within documents, and has no window.

    PyTorch's attention of whole sequences stays: cuDNN's kernels need no copy of q, k and v into one tensor.
    """
    _check("attention", config, VarlenAttention.Config, ScaledDotProductAttention.Config, FlexAttention.Config)
    if type(config) is ScaledDotProductAttention.Config:
        return config
    if type(config) is FlexAttention.Config and not flex_as_documents:
        why = "its masks are functions. Build the model with attn_backend='varlen'; or, if each layer's mask is causal, within "
        _refuse("attention", config, f'{why}documents, and has no window, say attention={{"flex_as_documents": true}}')
    return derive(config, DocumentAttention.Config)


# ---- loss ----


class LinearCrossEntropyLoss(ChunkedLossWrapper):
    """The head and the loss as one op, in one call of lm_head, whose weight FSDP2 then gathers and reduces once."""

    Config = _config("LinearCrossEntropyLoss", ChunkedLossWrapper)

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        super().__init__(config)

    def set_lm_head(self, lm_head: nn.Module) -> None:
        if type(lm_head).forward is not nn.Linear.forward:
            raise NotImplementedError(f"onepass's loss needs an lm_head that is a Linear, but it is {type(lm_head).__qualname__}")
        lm_head.forward = partial(_head, lm_head, lm_head.forward)
        super().set_lm_head(lm_head)

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """As CrossEntropyLoss has it, loss_inputs have no effect."""
        assert self.lm_head is not None
        loss = self.lm_head(pred, labels)
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}


def _head(head: Any, stock: Any, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
    """Stands in for lm_head's forward: the summed loss where there are labels, else logits."""
    if labels is None:
        return stock(hidden)  # type: ignore[no-any-return]
    group = None
    if spmd_mesh_size("tp") > 1:
        group = current_spmd_mesh().get_group("tp")
        hidden = spmd.redistribute(hidden, group, src=spmd.R, dst=spmd.I)  # what comes back is summed over the ranks already
    return linear_cross_entropy(hidden, head.weight, labels, group, "sum", IGNORE_INDEX, bias=head.bias)  # type: ignore[no-any-return]


@override(target=BaseLoss.Config, description="onepass.linear_cross_entropy")
def loss(config: Any) -> Any:
    _check("loss", config, ChunkedLossWrapper.Config, CrossEntropyLoss.Config)
    if type(config) is CrossEntropyLoss.Config:
        return LinearCrossEntropyLoss.Config(loss_fn=config)
    _check("loss, within ChunkedLossWrapper,", config.loss_fn, CrossEntropyLoss.Config)
    return derive(config, LinearCrossEntropyLoss.Config)
