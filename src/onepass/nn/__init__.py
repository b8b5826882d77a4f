"""Modules: they hold parameters; forward calls one op."""

from onepass.nn.bias_activation import BiasActivation
from onepass.nn.embedding import VocabParallelEmbedding
from onepass.nn.linear import ColumnParallelLinear, Linear, RowParallelLinear
from onepass.nn.mlp import MLP
from onepass.nn.norm import LayerNorm, RMSNorm
from onepass.nn.norm_linear import NormLinear
from onepass.nn.sharding import sharded_state_dict

__all__ = [
    "MLP",
    "BiasActivation",
    "ColumnParallelLinear",
    "LayerNorm",
    "Linear",
    "NormLinear",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "sharded_state_dict",
]
