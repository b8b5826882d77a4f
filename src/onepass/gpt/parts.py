"""What a block is made of besides the linear layers: its norms, its activation, and how it meets the residual stream.

Each has two forms, by an op of onepass and by PyTorch's operators, with the same parameters under the same names. A flag of the
configuration says which.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.gpt.config import Config
from onepass.nn.linear import ColumnParallelLinear, RowParallelLinear
from onepass.nn.mlp import MLP
from onepass.nn.norm import LayerNorm, RMSNorm
from onepass.ops.dropout.dropout_add import dropout_add
from onepass.ops.norm.norm_linear import norm_linear
from onepass.runtime.dispatch import cast

Norm = LayerNorm | RMSNorm

# ---- norms (persist_layer_norm) ----


class PlainLayerNorm(LayerNorm):
    """By PyTorch."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        h = x if residual is None else x + residual
        y = F.layer_norm(h, self.normalized_shape, _alike(_factor(self), h), _alike(self.bias, h), self.eps)
        return y if residual is None else (y, h)


class PlainRMSNorm(RMSNorm):
    """By PyTorch."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        h = x if residual is None else x + residual
        y = F.rms_norm(h, self.normalized_shape, _alike(_factor(self), h), self.eps)
        return y if residual is None else (y, h)


def _factor(norm: Norm) -> Tensor | None:
    return norm.weight + 1 if norm.zero_centered_gamma and norm.weight is not None else norm.weight


def _alike(parameter: Tensor | None, h: Tensor) -> Tensor | None:
    """PyTorch's norms want parameters of their input's type, but for autocast, which sees to it."""
    if parameter is None or torch.is_autocast_enabled(h.device.type):
        return parameter
    return cast(parameter, h.dtype)


def make_norm(config: Config, size: int, parts_of_sum: bool, device: Any) -> Norm:
    """parts_of_sum: whether ranks use it on different rows, so that its gradients are to be summed over them."""
    layer, ours = config.normalization == "LayerNorm", config.persist_layer_norm
    kind: Any = (LayerNorm if ours else PlainLayerNorm) if layer else (RMSNorm if ours else PlainRMSNorm)
    made: Norm = kind(
        size,
        config.layernorm_epsilon,
        device=device,
        dtype=config.norm_dtype,
        zero_centered_gamma=config.layernorm_zero_centered_gamma,
        memory_efficient=config.memory_efficient_layer_norm,
        sequence_parallel=parts_of_sum,
    )
    return made


# ---- the MLP's second half (bias_activation_fusion) ----

_PLAIN: dict[str, Any] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_exact": F.gelu,
    "silu": F.silu,
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


def plain_activation(x: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    """What `onepass.bias_activation` does, by PyTorch's operators."""
    act, clamp = _PLAIN[config.activation_func], config.activation_func_clamp_value
    x = x if bias is None else x + bias
    if not config.gated_linear_unit:
        return act(x)  # type: ignore[no-any-return]
    gate, linear = x.chunk(2, -1)
    if clamp is not None:
        gate, linear = gate.clamp(max=clamp), linear.clamp(-clamp, clamp)
    linear = linear + config.glu_linear_offset if config.glu_linear_offset else linear
    return act(gate) * linear  # type: ignore[no-any-return]


class PlainMLP(MLP):
    """With the activation by PyTorch."""

    def __init__(self, config: Config, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.config = config

    def rest(self, h: Tensor, bias: Tensor | None, per_token_scale: Tensor | None = None) -> Any:
        return RowParallelLinear.forward(self.linear_fc2, plain_activation(h, bias, self.config))


# ---- the residual stream (norm_linear_fusion, persist_layer_norm, bias_dropout_fusion) ----


class Residual:
    """How a block takes from the residual stream h and gives back to it. What is one op with what is decided here, and only here.

    - What a block gives is `late`: the next norm adds it to h in its own pass, by persist_layer_norm or norm_linear_fusion.
    - norm_linear_fusion: norm and linear layer are one op, which keeps nothing but the new h: two tensors of h's size a block
      fewer are kept than otherwise. h comes back from it, so that all its gradients are added in the norm's pass too.
    - Where there is a bias or dropout, dropout_add does both with the addition in one pass, and nothing is late. (The bias is
      never the linear layer's to add, which would be a pass of its own after a sum over ranks.)

    Everywhere h is the x, and what is late the residual, of the op that adds them: under autocast h may be the wider.
    """

    def __init__(self, config: Config, tp_group: dist.ProcessGroup | None) -> None:
        self.config = config
        self.spread: dict[str, Any] = {"tp_group": tp_group, "sequence_parallel": config.sequence_parallel}
        self.adds_late = config.persist_layer_norm or config.norm_linear_fusion

    def take(
        self, h: Tensor, late: Tensor | None, norm: Norm, linear: ColumnParallelLinear
    ) -> tuple[tuple[Tensor, Tensor | None], Tensor]:
        """What linear returns of the normalised h, and h."""
        if self.config.norm_linear_fusion:
            return self._at_once(h, late, norm, linear)
        normed, h = self.normed(h, late, norm)
        return linear(normed), h

    def _at_once(
        self, h: Tensor, late: Tensor | None, norm: Norm, linear: ColumnParallelLinear
    ) -> tuple[tuple[Tensor, Tensor | None], Tensor]:
        bias = linear.given(linear.bias)
        y, h = norm_linear(
            h,
            norm.given(norm.weight),
            linear.given(linear.weight),
            None if linear.skip_bias_add else bias,
            residual=late,
            norm="layer_norm" if isinstance(norm, LayerNorm) else "rms_norm",
            norm_bias=norm.given(norm.bias) if isinstance(norm, LayerNorm) else None,
            eps=self.config.layernorm_epsilon,
            zero_centered_gamma=norm.zero_centered_gamma,
            return_input=True,
            deferred=linear.deferred,
            **self.spread,
        )
        return (y, bias if linear.skip_bias_add else None), h

    def normed(self, h: Tensor, late: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """The norm of h, and h, with what is late in both."""
        return (norm(h), h) if late is None else norm(h, late)

    def give(self, h: Tensor, made: tuple[Tensor, Tensor | None], training: bool) -> tuple[Tensor, Tensor | None]:
        """h with what a part made, or h and what is late."""
        (y, bias), p = made, self.config.hidden_dropout
        if bias is None and not (p and training):
            return (h, y) if self.adds_late else (h + y, None)
        if self.config.bias_dropout_fusion:
            return dropout_add(y, h, p, bias=bias, training=training, **self.spread), None
        return h + F.dropout(y if bias is None else y + bias, p, training), None


def settled(h: Tensor, late: Tensor | None) -> Tensor:
    return h if late is None else h + late
