"""What a gated delta net computes between its first product and its gated norm, whoever's module holds the parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from onepass.ops.convolution.causal_conv1d import causal_conv1d
from onepass.ops.delta.delta_gates import delta_gates
from onepass.ops.delta.gated_delta_rule import gated_delta_rule

LENGTH_EPS = 1e-6  # of the lengths of q and k


class DeltaNet(NamedTuple):
    """A layer's parameters and heads. Called, it convolves, splits, divides q and k by their lengths, and applies the rule."""

    weight: Tensor  # of the convolution
    bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    split: tuple[int, int, int]  # columns of q, k and v
    key_heads: int
    unit_length: bool = True  # whether q's and k's heads are divided by their lengths

    def __call__(self, qkv: Tensor, b: Tensor, a: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Return y [B, S, heads of v, V]. b and a may be in groups, as `delta_gates` takes them."""
        head = self.split[0] // self.key_heads if self.unit_length else None
        pieces = causal_conv1d(
            qkv, self.weight, self.bias, cu_seqlens=cu_seqlens, split=self.split, l2_norm=(head, head, None), eps=LENGTH_EPS
        )
        heads = self.key_heads, self.key_heads, self.a_log.shape[0]
        q, k, v = (piece.unflatten(-1, (n, -1)) for piece, n in zip(pieces, heads, strict=True))
        g, beta = (gate.flatten(2) for gate in delta_gates(a, b, self.a_log, self.dt_bias))
        y: Any = gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens)
        return y  # type: ignore[no-any-return]
