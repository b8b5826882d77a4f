"""Modules: they hold parameters; forward calls one op."""

from onepass.nn.bias_activation import BiasActivation

__all__ = ["BiasActivation"]
