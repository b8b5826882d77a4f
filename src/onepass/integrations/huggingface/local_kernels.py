"""onepass's layers for transformers' `use_kernels`. They are local: nothing is downloaded.

    from onepass.integrations import huggingface

    model = AutoModelForCausalLM.from_pretrained(name, use_kernels=True, kernel_config=huggingface.OnepassKernels())
    print(model.kernel_config)  # what was replaced, what was not, and why
    ...                         # train, evaluate, generate, save: as before
    model.kernel_config.undo(model)

transformers gives names to layers ("RMSNorm"), and the `kernels` package gives modules of such a name another forward.
`huggingface.apply` replaces more, fuses what lies side by side, and needs no such package: use one or the other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from transformers import KernelConfig

from onepass.integrations.huggingface.convolutions import convolution_of
from onepass.integrations.huggingface.delta_rules import delta_rule_of
from onepass.integrations.huggingface.rotation import HALVES, tables_are_read
from onepass.ops.activation.bias_activation import bias_activation
from onepass.ops.norm.gated_norm import gated_rms_norm
from onepass.ops.norm.norm import rms_norm

_ROTATION = "rotary_pos_emb"
_DEVICES = ("cuda", "cpu")
_rotate = HALVES.function  # looked up here, as a compiler warns of caches


# `kernels` binds these forwards to modules of other classes. It wants no constructor and no other members here.


class _Layer(nn.Module):
    can_torch_compile, has_backward = True, True


class OnepassRMSNorm(_Layer):
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class OnepassRMSNormZeroCentered(_Layer):
    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, zero_centered_gamma=True)


class OnepassRotaryPosEmb(_Layer):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """cos and sin [B, S, D]; other tables, and tensors of other than four dimensions, are left to the model's function."""
        if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape[-1] != q.shape[-1] or unsqueeze_dim not in (1, 2):
            stock: tuple[Tensor, Tensor] = type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
            return stock
        return _rotate(q, k, cos, sin, unsqueeze_dim)  # type: ignore[no-any-return]


class OnepassRMSNormGated(_Layer):
    weight: Tensor
    variance_epsilon: float
    activation: Literal["silu", "sigmoid"]

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(hidden_states, gate, self.weight, eps=self.variance_epsilon, activation=self.activation)


class OnepassCausalConv1d(_Layer):
    def forward(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
    ) -> Tensor:
        """What onepass's convolution doesn't know is left to the model's function."""
        made: Tensor = convolution_of(partial(type(self).forward, self))(hidden_states, weight, bias, activation, **others)
        return made


class OnepassGatedDeltaRule(_Layer):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """What onepass's rule doesn't know is left to the model's function. Kernels have chunks of their own sizes."""
        others |= {"initial_state": initial_state, "output_final_state": output_final_state}
        stock = partial(type(self).forward, self, chunk_size=chunk_size)
        made: tuple[Tensor, Tensor | None] = delta_rule_of(stock)(
            query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **others
        )
        return made


class OnepassTanhGELU(_Layer):
    def forward(self, input: Tensor) -> Tensor:
        return bias_activation(input, None, "gelu")


class OnepassQuickGELU(_Layer):
    def forward(self, input: Tensor) -> Tensor:
        return bias_activation(input, None, "quick_gelu")


_LAYERS: dict[str, type[nn.Module]] = {  # transformers' names. SiLU, GeLU and GeluTanh are one kernel of PyTorch's already
    "RMSNorm": OnepassRMSNorm, "RMSNormZeroCentered": OnepassRMSNormZeroCentered, "RMSNormGated": OnepassRMSNormGated,
    _ROTATION: OnepassRotaryPosEmb, "causal_conv1d_fn": OnepassCausalConv1d, "chunk_gated_delta_rule": OnepassGatedDeltaRule,
    "NewGELU": OnepassTanhGELU, "FastGELU": OnepassTanhGELU, "QuickGELU": OnepassQuickGELU,
}  # fmt: skip


@dataclass(frozen=True)
class LocalLayer:
    """A layer in the form that the `kernels` package wants: a repository, which `load` returns the layer of."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer

    def __str__(self) -> str:
        return f"onepass, layer `{self.layer.__name__}`"


def kernel_mapping() -> dict[str, dict[str, LocalLayer]]:
    """Return a mapping for `kernels.use_kernel_mapping` and `kernels.register_kernel_mapping`, for every mode."""
    return {name: {device: LocalLayer(layer) for device in _DEVICES} for name, layer in _LAYERS.items()}


class OnepassKernels(KernelConfig):
    """A `kernel_config` for `from_pretrained` and `set_use_kernels`. `str` says what was replaced, and what was not and why."""

    def __init__(self) -> None:
        super().__init__(use_local_kernel=True)  # type: ignore[no-untyped-call]  # transformers' own mapping downloads
        self._left: dict[str, str] = {}

    def sanitize_kernel_mapping(self, model: Any) -> None:
        """Map the model's layers. transformers calls this when it has the model, and again when training starts or ends."""
        self.registered_layer_names.clear()
        self.store_registered_layer_names(model)  # type: ignore[no-untyped-call]
        names = set(self.registered_layer_names.values())
        ours = {name: devices for name, devices in kernel_mapping().items() if name in names}
        self._left = dict.fromkeys(sorted(names - ours.keys()), "onepass has no such layer, or none that is faster")
        if _ROTATION in ours and not tables_are_read(model, HALVES):
            del ours[_ROTATION]
            self._left[_ROTATION] = "the model's tables of positions are none that onepass can read"
        if not ours:
            raise ValueError(f"there is nothing to replace in this {type(model).__name__}: it has none of {', '.join(_LAYERS)}")
        others: dict[str, Any] = {name: {} for name in names}  # without a device a layer keeps its forward, without a warning
        self.kernel_mapping = others | ours

    def create_compatible_mapping(self, model: Any, compile: bool = False) -> None:
        """The mapping is in the package's form already."""

    def undo(self, model: Any) -> None:
        """Give a model's layers their own forwards back. Its rotation is a function, which all models of its family share."""
        if getattr(model, "kernel_config", None) is not self:
            raise ValueError(f"this kernel_config must be the model's, but that has {getattr(model, 'kernel_config', None)}")
        for module in model.modules():
            for layer in (module, *getattr(module, "_kernel_funcs", {}).values()):
                if hasattr(type(layer), "kernel_layer_name"):
                    vars(layer).pop("forward", None)
        model.set_use_kernels(False)
        model.kernel_config = None

    def __str__(self) -> str:
        layers = Counter(self.registered_layer_names.values())
        lines = [f"onepass by transformers' use_kernels{'' if layers else ': no model has it yet'}"]
        lines += [f"  {name}: {self._by(name)} ({count})" for name, count in sorted(layers.items()) if name not in self._left]
        lines += [f"  left: {name}: {why}" for name, why in self._left.items()]
        return "\n".join(lines)

    def _by(self, name: str) -> str:
        layer = _LAYERS[name]
        return f"{layer.__module__}.{layer.__name__}"
