"""Modules: they hold parameters; forward calls one op."""

from onepass.nn.bias_activation import BiasActivation
from onepass.nn.norm import LayerNorm, RMSNorm
from onepass.nn.norm_linear import NormLinear

__all__ = ["BiasActivation", "LayerNorm", "NormLinear", "RMSNorm"]
