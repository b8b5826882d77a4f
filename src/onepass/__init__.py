"""onepass: fused training kernels for PyTorch. Each tensor read once, written once."""

from importlib.metadata import version as _version

from onepass import nn
from onepass.kernels.activations import register_activation
from onepass.ops.bias_activation import bias_activation, bias_geglu, bias_gelu, bias_quick_geglu, bias_swiglu
from onepass.runtime.backend import explain, register_backend, use_backend
from onepass.runtime.validation import validate

__version__ = _version("onepass")
__all__ = [
    "bias_activation",
    "bias_geglu",
    "bias_gelu",
    "bias_quick_geglu",
    "bias_swiglu",
    "explain",
    "nn",
    "register_activation",
    "register_backend",
    "use_backend",
    "validate",
]
