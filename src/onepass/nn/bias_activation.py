"""BiasActivation: the bias of a linear layer and the activation after it, as one module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onepass.kernels.philox import threshold_of
from onepass.nn.fp8_state import shown
from onepass.ops.activation.activations import find_activation
from onepass.ops.activation.bias_activation import bias_activation
from onepass.ops.activation.formula import check_options


class BiasActivation(nn.Module):
    """`bias_activation` with its bias as a parameter. Put it after a linear layer without a bias.

        nn.Sequential(nn.Linear(1024, 8192, bias=False), onepass.nn.BiasActivation(8192, "swiglu"), nn.Linear(4096, 1024))

    Args:
        features: the size of x's last dimension. A gated activation takes 2H and returns H.
        activation, clamp, linear_offset, save: as in `onepass.bias_activation`.
        bias: False omits the bias.
        dropout: as in `onepass.bias_activation`, in training mode. Nothing is dropped after `eval()`.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        activation: str = "gelu",
        *,
        bias: bool = True,
        clamp: float | None = None,
        linear_offset: float = 0.0,
        dropout: float = 0.0,
        save: str = "input",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        act = find_activation(activation)
        check_options(act, clamp, linear_offset, save)
        threshold_of("dropout", dropout)
        if not isinstance(features, int) or features < 0:
            raise ValueError(f"features must be a size, but is {features!r}")
        if act.gated and features % 2:
            raise ValueError(f"features must be even for {activation!r}, but is {features}")
        self.features, self.activation = features, activation
        self.clamp, self.linear_offset, self.dropout, self.save = clamp, linear_offset, dropout, save
        self.register_parameter("bias", nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, token_weight: Tensor | None = None) -> Tensor:
        return bias_activation(
            x,
            self.bias,
            self.activation,
            token_weight=token_weight,
            clamp=self.clamp,
            linear_offset=self.linear_offset,
            dropout=self.dropout if self.training else 0.0,
            save=self.save,
        )

    def extra_repr(self) -> str:
        parts = [f"{self.features}", f"activation={self.activation!r}", f"bias={self.bias is not None}"]
        return ", ".join(parts + shown(self, clamp=None, linear_offset=0.0, dropout=0.0, save="input"))
