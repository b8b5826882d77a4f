"""Megatron's dense MLP with its activation in the product after it, which keeps fc1's output and not the activation."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from onepass.ops.activation.activation_linear import activation_linear


def fused_activation(config: Any) -> str | None:
    """Return activation_linear's name for the config's activation, or None where Megatron's own MLP has to compute it."""
    from megatron.core.activations import quick_gelu, squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu as quick_gelu_of_geglu  # the same formula

    if config.cpu_offloading or getattr(config, "gtp_weight_remat_size", 1) > 1:
        return None
    if config.gated_linear_unit:
        gated = {F.silu: "swiglu", F.relu: "reglu", F.gelu: "geglu_exact"}
        gated |= {quick_gelu: "quick_geglu", quick_gelu_of_geglu: "quick_geglu"}
        return "geglu" if _tanh_gelu(config) else gated.get(config.activation_func)
    plain = {F.silu: "silu", F.relu: "relu", squared_relu: "squared_relu", F.gelu: "gelu_exact"}
    plain |= {quick_gelu: "quick_gelu", quick_gelu_of_geglu: "quick_gelu"}
    return "gelu" if _tanh_gelu(config) else plain.get(config.activation_func)


def _tanh_gelu(config: Any) -> bool:
    """Megatron's fused GELU is the tanh formula, and its unfused one exact."""
    return config.bias_activation_fusion and config.activation_func is F.gelu


@cache
def activation_row_parallel_linear() -> Any:
    """Return the class of a fc2 that takes fc1's output and bias, and applies the activation itself."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    class MegatronActivationLinear(RowParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
            super().__init__(input_size, output_size, **options)
            self.activation: Any = fused_activation(self.config)  # there is one, or Megatron's own fc2 would stand here
            fused, gated = self.config.bias_activation_fusion, self.config.gated_linear_unit
            self.options: dict[str, Any] = {"save": "fp8" if fused and self.config.activation_func_fp8_input_store else "input"}
            if gated and (not fused or self.activation == "quick_geglu"):  # stock's fused functions take neither of a dense MLP
                self.options |= {
                    "clamp": self.config.activation_func_clamp_value,
                    "linear_offset": self.config.glu_linear_offset,
                }

        def forward(self, input_: Tensor, activation_bias: Tensor | None = None) -> Any:
            y = activation_linear(
                input_,
                self.weight,
                None if self.skip_bias_add else self.bias,
                self.activation,
                activation_bias=activation_bias,
                tp_group=self.tp_group if self.tp_group.size() > 1 else None,
                sequence_parallel=self.sequence_parallel,
                **self.options,
            )
            return y, self.bias if self.skip_bias_add else None

    return MegatronActivationLinear


@cache
def activation_mlp() -> Any:
    """Return an MLP whose fc2 is an `activation_row_parallel_linear`. Names of modules, and so checkpoints, are Megatron's."""
    from megatron.core.transformer.mlp import MLP

    class ActivationMLP(MLP):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> Any:
            if per_token_scale is not None:
                raise NotImplementedError("per_token_scale must be None for a dense MLP: only experts have one")
            return self.linear_fc2(*self.linear_fc1(hidden_states))

    return ActivationMLP
