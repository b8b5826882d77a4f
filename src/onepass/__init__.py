"""onepass: fused training kernels for PyTorch. Each tensor read once, written once."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from torch.serialization import add_safe_globals as _add_safe_globals

from onepass import nn, parallel
from onepass.gradients.graphed_step import graphed_step
from onepass.gradients.graphs import graphed
from onepass.integrations import attention_backends as _attention_backends
from onepass.integrations import norm_backends as _norm_backends
from onepass.kernels.invariant_product import batch_invariant
from onepass.ops.activation.activation_linear import activation_linear
from onepass.ops.activation.activations import register_activation
from onepass.ops.activation.bias_activation import bias_activation, bias_geglu, bias_gelu, bias_quick_geglu, bias_swiglu
from onepass.ops.attention.attention import attention
from onepass.ops.attention.latent_attention import latent_attention
from onepass.ops.attention.rope import rope
from onepass.ops.convolution.causal_conv1d import causal_conv1d
from onepass.ops.delta.delta_gates import delta_gates
from onepass.ops.delta.gated_delta_rule import gated_delta_rule
from onepass.ops.dropout.dropout_add import dropout_add
from onepass.ops.embedding.embedding import embedding
from onepass.ops.experts.experts import experts
from onepass.ops.linear.linear import linear
from onepass.ops.linear.lora_linear import lora_linear
from onepass.ops.loss.cross_entropy import cross_entropy
from onepass.ops.loss.kept_rows import KeptRows, kept_rows
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy
from onepass.ops.loss.linear_divergence import linear_divergence
from onepass.ops.norm.gated_norm import gated_rms_norm
from onepass.ops.norm.gated_norm_linear import gated_norm_linear
from onepass.ops.norm.norm import layer_norm, rms_norm
from onepass.ops.norm.norm_linear import norm_linear
from onepass.ops.routing.route import route
from onepass.ops.routing.routing import Routing
from onepass.ops.scan.mamba_chunk_scan import mamba_chunk_scan
from onepass.ops.softmax.softmax import softmax
from onepass.product import lora_product as _lora_product  # noqa: F401  # enters products with adapters
from onepass.product.fp8 import layer as _layer  # noqa: F401  # enters products in eight bits
from onepass.product.frozen.fp8 import freeze_weight
from onepass.product.frozen.taken import frozen_weight
from onepass.product.frozen.weight import FrozenWeight
from onepass.product.lora import LoRA
from onepass.product.precision import FROZEN as _FROZEN
from onepass.runtime import moved as _moved
from onepass.runtime.backend import explain, register_backend, use_backend
from onepass.runtime.fp8 import FP8Target, FP8Tensor
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.process_setting import validate

if TYPE_CHECKING:
    from onepass import gpt
    from onepass.fusion.fused import fuse
    from onepass.profiling.model import compare
    from onepass.profiling.record import profile

_moved.install()
_attention_backends.register()  # these import none of the packages that they are for
_norm_backends.register()
_add_safe_globals([*_FROZEN, FP8Recipe])  # torch.load takes a module's weights in few bits

__version__ = _version("onepass")
__all__ = [
    "FP8Recipe",
    "FP8Target",
    "FP8Tensor",
    "FrozenWeight",
    "KeptRows",
    "LoRA",
    "Routing",
    "activation_linear",
    "attention",
    "batch_invariant",
    "bias_activation",
    "bias_geglu",
    "bias_gelu",
    "bias_quick_geglu",
    "bias_swiglu",
    "causal_conv1d",
    "compare",
    "cross_entropy",
    "delta_gates",
    "dropout_add",
    "embedding",
    "experts",
    "explain",
    "freeze_weight",
    "frozen_weight",
    "fuse",
    "gated_delta_rule",
    "gated_norm_linear",
    "gated_rms_norm",
    "gpt",
    "graphed",
    "graphed_step",
    "kept_rows",
    "latent_attention",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_divergence",
    "lora_linear",
    "mamba_chunk_scan",
    "nn",
    "norm_linear",
    "parallel",
    "profile",
    "register_activation",
    "register_backend",
    "rms_norm",
    "rope",
    "route",
    "softmax",
    "use_backend",
    "validate",
]

_AT_FIRST_USE = {"compare": "profiling.model", "fuse": "fusion.fused", "gpt": "gpt", "profile": "profiling.record"}


def __getattr__(name: str) -> Any:
    """Import names that are not ops at their first use: they take longer to load than all ops."""
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _import_module(f"{__name__}.{_AT_FIRST_USE[name]}")
    found = globals()[name] = module if name == _AT_FIRST_USE[name] else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
