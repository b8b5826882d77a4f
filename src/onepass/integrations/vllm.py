"""vLLM's products, RMSNorm, SiLU and log-probabilities by onepass, under `onepass.batch_invariant()`: a plugin of vLLM's.

    ONEPASS_VLLM=1 vllm serve MODEL     # installed with onepass, and inert without the variable

vLLM calls `register` in every process that it starts, before it makes a model, by its entry point in "vllm.general_plugins".
Linear layers that are not quantised call PyTorch's F.linear, which the switch makes onepass's. Attention, rotation and experts
stay vLLM's.

It was tried with a stub of vLLM's interface alone (tests/integrations/test_vllm.py), by the documentation of vLLM 0.22.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from onepass.integrations.seams import SeamError
from onepass.kernels.invariant_product import BatchInvariance, batch_invariant
from onepass.ops.activation.bias_activation import bias_activation
from onepass.ops.loss.cross_entropy import cross_entropy
from onepass.ops.norm.norm import rms_norm

VARIABLE = "ONEPASS_VLLM"
_registered: BatchInvariance | None = None  # of this process


def register() -> None:
    """Replace vLLM's ops where the environment has ONEPASS_VLLM=1. It may be called again.

    Raises:
        ValueError: the variable is neither 0 nor 1.
        SeamError: a name of vLLM's is not where it was.
    """
    global _registered
    wanted = os.environ.get(VARIABLE, "0")
    if wanted not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, but is {wanted!r}")
    if wanted == "0" or _registered is not None:
        return
    try:
        from vllm.model_executor.custom_op import CustomOp
        from vllm.model_executor.layers.activation import SiluAndMul
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.v1.sample.sampler import Sampler

        makers = ("RMSNorm", _norm_class(RMSNorm)), ("SiluAndMul", _activation_class(SiluAndMul))
        registered, _ = CustomOp.register_oot, Sampler.compute_logprobs
    except (ImportError, AttributeError) as error:
        raise SeamError(f"vLLM lacks what onepass replaces ({error}): unset {VARIABLE}") from error
    _registered = batch_invariant()  # first, as it raises where PyTorch or CUDA can't
    for name, made in makers:
        registered(name=name)(made)
    Sampler.compute_logprobs = staticmethod(log_probabilities)


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the log-softmax of each row in fp32, as vLLM's Sampler.compute_logprobs does."""
    logits = logits.float()
    most, at = logits.max(-1)
    loss: Tensor = cross_entropy(logits, at, reduction="none")
    return logits - most[:, None] - loss[:, None]


def _norm_class(stock: Any) -> Any:
    class InvariantRMSNorm(stock):  # type: ignore[misc]
        def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
            """Return the norm of x, or with a residual that of their sum, and the sum."""
            if self.variance_size_override is not None:  # of a part of the row
                return super().forward(x, residual)
            return rms_norm(x, self.weight if self.has_weight else None, self.variance_epsilon, residual=residual)

    return InvariantRMSNorm


def _activation_class(stock: Any) -> Any:
    class InvariantSiluAndMul(stock):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return bias_activation(x, None, "swiglu")

    return InvariantSiluAndMul
