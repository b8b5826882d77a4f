"""Modules. They hold parameters, and forward calls one op."""

from onepass.nn.bias_activation import BiasActivation
from onepass.nn.convolution import CausalConv1d
from onepass.nn.embedding import VocabParallelEmbedding
from onepass.nn.experts import Experts
from onepass.nn.fp8_gathers import use_fp8_gathers
from onepass.nn.linear import ColumnParallelLinear, Linear, RowParallelLinear
from onepass.nn.linear_cross_entropy import LinearCrossEntropy
from onepass.nn.linear_divergence import LinearDivergence
from onepass.nn.mlp import MLP
from onepass.nn.norm import GatedRMSNorm, LayerNorm, RMSNorm
from onepass.nn.norm_linear import NormLinear
from onepass.nn.precision import fp8_saturations, fp8_state_dict, fp8_underflows, load_fp8_state_dict, set_precision
from onepass.nn.router import Router
from onepass.nn.sharding import sharded_state_dict

__all__ = [
    "MLP",
    "BiasActivation",
    "CausalConv1d",
    "ColumnParallelLinear",
    "Experts",
    "GatedRMSNorm",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "LinearDivergence",
    "NormLinear",
    "RMSNorm",
    "Router",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "fp8_saturations",
    "fp8_state_dict",
    "fp8_underflows",
    "load_fp8_state_dict",
    "set_precision",
    "sharded_state_dict",
    "use_fp8_gathers",
]
