"""Megatron's norms by onepass.nn: the kind that the config says, centred or not, with sequence parallelism."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from onepass.nn.norm import LayerNorm, RMSNorm


class MegatronNorm:
    """A norm, called as FusedLayerNorm, WrappedTorchNorm and TENorm are. It returns an onepass.nn.RMSNorm or LayerNorm.

    It is a class because build_module takes a function for the built module itself. Options come from config alone, as in
    theirs. Every hidden size has a kernel, so persist_layer_norm has nothing to choose. With has_residual and
    fused_residual_rmsnorm it returns (output, residual), as TENorm does.
    """

    kinds: ClassVar[dict[str, Any]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, *_: Any, has_residual: bool = False, **__: Any) -> Any:
        if config.normalization not in cls.kinds:
            raise ValueError(f"config.normalization must be {' or '.join(cls.kinds)}, but is {config.normalization!r}")
        return cls.kinds[config.normalization](
            hidden_size,
            eps,
            device="cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
            dtype=config.params_dtype,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            memory_efficient=config.memory_efficient_layer_norm,
            return_input=has_residual and getattr(config, "fused_residual_rmsnorm", False),
            sequence_parallel=config.sequence_parallel,
        )


class FusedLayerNorm(MegatronNorm):
    """In place of Megatron's class of this name, which needs Apex and knows LayerNorm only."""

    kinds = {"LayerNorm": LayerNorm}


class WrappedTorchNorm(MegatronNorm):
    """In place of Megatron's class of this name: a class of its own, so that undo can tell the two."""


class HeadNorm(RMSNorm):
    """An RMSNorm of heads. Called with None it returns its weight: hooks that gather parameters run, and attention normalises."""

    def forward(self, x: Tensor | None, residual: Tensor | None = None) -> Any:
        return self.given(self.weight) if x is None else super().forward(x, residual)


class MegatronHeadNorm(MegatronNorm):
    """q_layernorm or k_layernorm: `MegatronNorm`, and if that is an RMSNorm a `HeadNorm`."""

    kinds = MegatronNorm.kinds | {"RMSNorm": HeadNorm}


class ResidualNorm:
    """A norm before a residual connection: with fused_residual_rmsnorm it returns (output, residual), as TENorm does there."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return MegatronNorm(config, hidden_size, eps, has_residual=True)
