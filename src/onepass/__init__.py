"""onepass: fused training kernels for PyTorch. Each tensor read once, written once."""

from importlib.metadata import version as _version

from onepass import nn, parallel
from onepass.fusion.fused import fuse
from onepass.integrations import norm_backends as _norm_backends
from onepass.kernels.activations import register_activation
from onepass.ops.activation_linear import activation_linear
from onepass.ops.attention import attention
from onepass.ops.bias_activation import bias_activation, bias_geglu, bias_gelu, bias_quick_geglu, bias_swiglu
from onepass.ops.cross_entropy import cross_entropy
from onepass.ops.dropout_add import dropout_add
from onepass.ops.linear import linear
from onepass.ops.linear_cross_entropy import linear_cross_entropy
from onepass.ops.norm import layer_norm, rms_norm
from onepass.ops.norm_linear import norm_linear
from onepass.ops.rope import rope
from onepass.profiling.model import compare
from onepass.profiling.record import profile
from onepass.runtime.backend import explain, register_backend, use_backend
from onepass.runtime.graphs import graphed
from onepass.runtime.validation import validate

_norm_backends.register()  # by name, never by "auto"; loads none of those packages

__version__ = _version("onepass")
__all__ = [
    "activation_linear",
    "attention",
    "bias_activation",
    "bias_geglu",
    "bias_gelu",
    "bias_quick_geglu",
    "bias_swiglu",
    "compare",
    "cross_entropy",
    "dropout_add",
    "explain",
    "fuse",
    "graphed",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "nn",
    "norm_linear",
    "parallel",
    "profile",
    "register_activation",
    "register_backend",
    "rms_norm",
    "rope",
    "use_backend",
    "validate",
]
