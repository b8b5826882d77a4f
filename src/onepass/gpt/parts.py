"""Parts of a block other than linear layers: norms, the activation, and the additions to the residual stream.

Each of these has two implementations with the same parameter names: a onepass op, and PyTorch operators. A flag of the
configuration chooses. A weight that no rank divides is beside them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.gpt.config import Config
from onepass.nn.linear import ColumnParallelLinear, RowParallelLinear
from onepass.nn.mlp import MLP
from onepass.nn.norm import LayerNorm, MarkedParameters, RMSNorm
from onepass.ops.dropout.dropout_add import dropout_add
from onepass.ops.norm.norm_linear import norm_linear
from onepass.product.lora import Adapters
from onepass.runtime.dispatch import cast


@dataclass(frozen=True)
class Initializer:
    """Fill a whole weight with normal values of this standard deviation. They depend on the weight's name and the seed only.

    The values are drawn in fp32 on the weight's device, so dtypes differ only by rounding.
    """

    seed: int
    std: float
    name: str = ""

    def of(self, name: str, scale: float = 1.0) -> Initializer:
        """Return the initializer of the child `name`, a module or weight, with the standard deviation times `scale`."""
        return Initializer(self.seed, self.std * scale, f"{self.name}.{name}" if self.name else name)

    def __call__(self, weight: Tensor) -> None:
        if weight.is_meta:
            return
        drawn = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        weight.copy_(drawn.normal_(0.0, self.std, generator=self.generator(weight.device)))

    def generator(self, device: torch.device) -> torch.Generator:
        """Return a generator of this weight's random numbers."""
        digest = hashlib.blake2b(f"{self.seed} {self.name}".encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


Norm = LayerNorm | RMSNorm

# ---- a weight that each rank has whole ----


class WholeWeight(MarkedParameters):
    """The base class of modules whose one weight no rank divides."""

    weight: nn.Parameter
    _marked = ("weight",)

    def __init__(self, config: Config, shape: tuple[int, int], start: Initializer, device: Any) -> None:
        super().__init__()
        self.sequence_parallel, self.start = config.sequence_parallel, start.of("weight")
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=config.dtype))
        self.reset_parameters()
        self.mark_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.start(self.weight)


# ---- a linear layer's adapters (gpt/lora.py) ----


def lora_of(linear: nn.Module) -> Adapters:
    """Return the adapters that `onepass.gpt.add_adapters` has given a layer."""
    adapters: Any = linear._modules.get("adapters")
    return None if adapters is None else [adapter.lora() for adapter in adapters.values()]


# ---- norms (norm_fusion) ----


class PlainLayerNorm(LayerNorm):
    """LayerNorm computed by PyTorch's F.layer_norm."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        h = x if residual is None else x + residual
        y = F.layer_norm(h, self.normalized_shape, _alike(_factor(self), h), _alike(self.bias, h), self.eps)
        return y if residual is None else (y, h)


class PlainRMSNorm(RMSNorm):
    """RMSNorm computed by PyTorch's F.rms_norm."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        h = x if residual is None else x + residual
        y = F.rms_norm(h, self.normalized_shape, _alike(_factor(self), h), self.eps)
        return y if residual is None else (y, h)


def _factor(norm: Norm) -> Tensor | None:
    return norm.weight + 1 if norm.zero_centered_gamma and norm.weight is not None else norm.weight


def _alike(parameter: Tensor | None, h: Tensor) -> Tensor | None:
    """Cast the parameter to h's dtype, which PyTorch's norms require. Under autocast PyTorch casts it itself."""
    if parameter is None or torch.is_autocast_enabled(h.device.type):
        return parameter
    return cast(parameter, h.dtype)


def make_norm(config: Config, size: int, parts_of_sum: bool, device: Any) -> Norm:
    """Return the norm of this configuration.

    `parts_of_sum`: ranks apply it to different rows, so its gradients must be summed over the ranks.
    """
    layer, ours = config.normalization == "LayerNorm", config.norm_fusion
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
    """Compute `onepass.bias_activation` by PyTorch operators."""
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
    """An MLP whose activation is computed by PyTorch operators."""

    def __init__(self, config: Config, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.config = config

    def rest(self, h: Tensor, bias: Tensor | None, per_token_scale: Tensor | None = None, *, lora: Adapters = None) -> Any:
        return RowParallelLinear.forward(self.linear_fc2, plain_activation(h, bias, self.config), lora=lora)


# ---- the residual stream (norm_linear_fusion, norm_fusion, bias_dropout_fusion) ----


class Residual:
    """Reads a block's input from the residual stream h and adds its output to h. Only this class decides what is one op.

    - `pending` is a block's output that is not in h yet. With norm_fusion or norm_linear_fusion, the next norm adds it to
      h in its own pass.
    - norm_linear_fusion runs a norm and the linear layer after it as one op, which saves only the new h. A block then saves two
      tensors of h's size fewer. The op also returns h, so that the norm's backward pass adds all gradients of h.
    - With a bias or dropout, dropout_add applies both and adds the result to h in one pass, and nothing is pending. The linear
      layer never adds the bias: after a sum over ranks that would be another pass.

    The op that adds `pending` gets h as x and `pending` as the residual. Under autocast h may have the wider dtype, and the op
    returns x's dtype.
    """

    def __init__(self, config: Config, tp_group: dist.ProcessGroup | None) -> None:
        self.config = config
        self.spread: dict[str, Any] = {"tp_group": tp_group, "sequence_parallel": config.sequence_parallel}
        self.adds_pending = config.norm_fusion or config.norm_linear_fusion

    def take(
        self, h: Tensor, pending: Tensor | None, norm: Norm, linear: ColumnParallelLinear
    ) -> tuple[tuple[Tensor, Tensor | None], Tensor]:
        """Return (linear(norm(h + pending)), h + pending)."""
        if self.config.norm_linear_fusion:
            return self._at_once(h, pending, norm, linear)
        normed, h = self.normed(h, pending, norm)
        return linear(normed, lora=lora_of(linear)), h

    def again(self, h: Tensor, norm: Norm, linear: ColumnParallelLinear) -> Callable[[], Tensor] | None:
        """Return what makes `take`'s result again of the new h, or None where it is kept."""
        if not makes_products_again(self.config):
            return None
        h = h.detach()
        return lambda: self.take(h, None, norm, linear)[0][0]

    def _at_once(
        self, h: Tensor, pending: Tensor | None, norm: Norm, linear: ColumnParallelLinear
    ) -> tuple[tuple[Tensor, Tensor | None], Tensor]:
        bias = linear.given(linear.bias)
        y, h = norm_linear(
            h,
            norm.given(norm.weight),
            linear.given(linear.weight),
            None if linear.skip_bias_add else bias,
            residual=pending,
            norm="layer_norm" if isinstance(norm, LayerNorm) else "rms_norm",
            norm_bias=norm.given(norm.bias) if isinstance(norm, LayerNorm) else None,
            eps=self.config.layernorm_epsilon,
            zero_centered_gamma=norm.zero_centered_gamma,
            return_input=True,
            deferred=linear.deferred,
            precision=linear.precision,
            lora=lora_of(linear),
            **self.spread,
        )
        return (y, bias if linear.skip_bias_add else None), h

    def normed(self, h: Tensor, pending: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return (norm(h + pending), h + pending)."""
        return (norm(h), h) if pending is None else norm(h, pending)

    def give(self, h: Tensor, made: tuple[Tensor, Tensor | None], training: bool) -> tuple[Tensor, Tensor | None]:
        """Add (y, bias), the output of attention or an MLP: return (new h, None), or (h, y) where y is left pending."""
        (y, bias), p = made, self.config.hidden_dropout
        if bias is None and not (p and training):
            return (h, y) if self.adds_pending else (h + y, None)
        if self.config.bias_dropout_fusion:
            return dropout_add(y, h, p, bias=bias, training=training, **self.spread), None
        return h + F.dropout(y if bias is None else y + bias, p, training), None


def makes_products_again(config: Config) -> bool:
    """Whether backward is to make products again (`onepass.runtime.recomputed`). A compiler chooses by itself what it keeps."""
    return config.recompute_granularity == "selective" and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def settled(h: Tensor, pending: Tensor | None) -> Tensor:
    return h if pending is None else h + pending
