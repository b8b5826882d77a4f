"""CausalConv1d: torch.nn's depthwise convolution over time, with `onepass.causal_conv1d`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onepass.ops.convolution.causal_conv1d import causal_conv1d, check_options


class CausalConv1d(nn.Conv1d):
    """A depthwise causal convolution of rows ``[..., S, channels]``, and what follows it. Its state dict is torch.nn.Conv1d's.

        conv = CausalConv1d(8192, split=(2048, 2048, 4096), l2_norm=(128, 128, None))
        q, k, v = conv(x)                       # x [B, S, 8192]

    Args:
        channels: the size of x's last dimension.
        kernel_size: how many rows one sees, itself among them: 2 to 8.
        bias, device, dtype: as in torch.nn.Conv1d.
        activation, split, l2_norm, eps: as in `onepass.causal_conv1d`.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int = 4,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = "silu",
        split: Sequence[int] | None = None,
        l2_norm: int | Sequence[int | None] | None = None,
        eps: float = 1e-6,
    ) -> None:
        check_options("channels", channels, "kernel_size", kernel_size, activation, split, l2_norm, eps)
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias, device=device, dtype=dtype)
        self.activation, self.split, self.l2_norm, self.eps = activation, split, l2_norm, eps

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:  # type: ignore[override]
        """Return y, or its pieces. cu_seqlens: the boundaries of documents, as in `onepass.causal_conv1d`."""
        options = {"activation": self.activation, "split": self.split, "l2_norm": self.l2_norm, "eps": self.eps}
        return causal_conv1d(x, self.weight, self.bias, cu_seqlens=cu_seqlens, **options)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, kernel_size={self.kernel_size[0]}, activation={self.activation}"]
        parts += ["bias=False"] * (self.bias is None)
        parts += [f"{name}={value}" for name in ("split", "l2_norm") if (value := getattr(self, name)) is not None]
        return ", ".join(parts)
