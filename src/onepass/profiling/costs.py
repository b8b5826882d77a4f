"""The bytes that an operator must move and the flops that it must do, from the shapes and dtypes of its inputs.

Bytes   every tensor read counts once and every tensor written once. Expanded dimensions (stride 0) count once. The few statistics
        a row that norms and attention save for backward are left out.
None    the cost is unknown: the operator is not listed here, or the result's dtype doesn't follow from the inputs, or the inputs
        have lists of tensors. A trace has the shapes of those without their dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from onepass.profiling.trace import TraceInput

_DTYPES = {
    "float": torch.float32, "double": torch.float64, "c10::Half": torch.float16, "c10::BFloat16": torch.bfloat16,
    "long int": torch.int64, "long": torch.int64, "int": torch.int32, "short int": torch.int16, "short": torch.int16,
    "signed char": torch.int8, "unsigned char": torch.uint8, "bool": torch.bool,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn, "c10::Float8_e5m2": torch.float8_e5m2,
    "c10::complex<float>": torch.complex64, "c10::complex<double>": torch.complex128,
}  # fmt: skip
_SCALAR_TYPES = {  # a trace has the number of c10::ScalarType
    "0": torch.uint8, "1": torch.int8, "2": torch.int16, "3": torch.int32, "4": torch.int64, "5": torch.float16,
    "6": torch.float32, "7": torch.float64, "11": torch.bool, "15": torch.bfloat16,
}  # fmt: skip

_POINTWISE = frozenset({
    "abs", "add", "addcdiv", "addcmul", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clamp",
    "clamp_max", "clamp_min", "cos", "div", "elu", "erf", "exp", "expm1", "floor", "gelu", "gelu_backward", "hardtanh",
    "leaky_relu", "leaky_relu_backward", "lerp", "log", "log1p", "log2", "masked_fill", "maximum", "minimum", "mul",
    "native_dropout_backward", "neg", "pow", "reciprocal", "relu", "remainder", "round", "rsqrt", "rsub", "sigmoid",
    "sigmoid_backward", "sign", "silu", "silu_backward", "sin", "softplus", "softplus_backward", "sqrt", "sub", "tanh",
    "tanh_backward", "threshold_backward", "where", "copy", "fill", "zero",
})  # fmt: skip
_COMPARISONS = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "isnan", "isinf",
    "isfinite",
})  # fmt: skip
_WRITTEN_ONLY = frozenset({"copy", "fill", "zero"})  # in place, without reading the previous contents
_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "prod", "linalg_vector_norm", "logsumexp"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
_NORM_BACKWARDS = frozenset({"native_layer_norm_backward", "_fused_rms_norm_backward"})
_SOFTMAXES = frozenset({"_softmax", "_log_softmax"})
_SOFTMAX_BACKWARDS = frozenset({"_softmax_backward_data", "_log_softmax_backward_data"})
_ATTENTION_KINDS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_ATTENTIONS = frozenset(f"_scaled_dot_product_{kind}" for kind in _ATTENTION_KINDS)
_ATTENTION_BACKWARDS = frozenset(f"{name}_backward" for name in _ATTENTIONS)
_KNOWN = (
    _POINTWISE | _COMPARISONS | _REDUCTIONS | _PRODUCTS | _NORMS | _NORM_BACKWARDS | _SOFTMAXES | _SOFTMAX_BACKWARDS
    | _ATTENTIONS | _ATTENTION_BACKWARDS | {"native_dropout"}
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    bytes: int | None = None
    flops: int | None = None
    dtype: str | None = None  # torch's name for the dtype of a product's operands: the machine's peak depends on it


def is_known(name: str) -> bool:
    """Whether this module knows the operator's cost. It then includes the operators that this one calls."""
    return name.startswith("aten::") and _base(name) in _KNOWN


@lru_cache(maxsize=4096)
def cost(name: str, inputs: tuple[TraceInput, ...]) -> Cost:
    if not is_known(name):
        return Cost()
    call = _CostCall.of(name, inputs)
    if call is None:
        return Cost()
    product = call.base in _PRODUCTS | _ATTENTIONS | _ATTENTION_BACKWARDS
    dtype = call.dtype(call.tensors()[-1]) if product and call.tensors() else None
    return Cost(_bytes(call), _flops(call) if product else None, str(dtype).removeprefix("torch.") if dtype else None)


def _base(name: str) -> str:
    """Strip the namespace and the in-place underscore: add for aten::add_, _softmax for aten::_softmax."""
    base = name.removeprefix("aten::")
    return base[:-1] if base.endswith("_") and not base.endswith("__") else base


# ---- match a call with its schema: argument names, and which arguments are written ----


@dataclass(frozen=True)
class _CostCall:
    base: str
    named: dict[str, TraceInput]
    written: frozenset[str]

    @classmethod
    def of(cls, name: str, inputs: tuple[TraceInput, ...]) -> _CostCall | None:
        for schema in _schemas(name):
            if len(schema) == len(inputs) and all(_fits(kind, value) for (_, kind, _), value in zip(schema, inputs, strict=True)):
                named = {argument: value for (argument, _, _), value in zip(schema, inputs, strict=True)}
                return cls(_base(name), named, frozenset(argument for argument, _, write in schema if write))
        return None

    def tensors(self) -> list[TraceInput]:
        """Return the tensors that the operator reads."""
        skipped = self.written if self.base in _WRITTEN_ONLY or not self.in_place() else frozenset()
        return [tensor for argument, tensor in self.named.items() if tensor.shape is not None and argument not in skipped]

    def in_place(self) -> bool:
        return bool(self.written) and next(iter(self.named)) in self.written

    def value(self, argument: str) -> str:
        known = self.named.get(argument)
        return known.value if known is not None else ""

    @staticmethod
    def dtype(tensor: TraceInput) -> torch.dtype | None:
        return _DTYPES.get(tensor.dtype or "")


@cache
def _schemas(name: str) -> list[list[tuple[str, str, bool]]]:
    """Return each overload's arguments as (name, type, whether it is written)."""
    return [
        [(a.name, str(a.type), a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments]
        for schema in torch._C._jit_get_schemas_for_operator(name)
    ]


def _fits(kind: str, argument: TraceInput) -> bool:
    if kind.startswith("List[") or kind.startswith("Optional[List["):
        return argument.shape is None
    if "Tensor" in kind:
        return argument.shape is not None or (kind.startswith("Optional") and not argument.value)
    return argument.shape is None


# ---- bytes ----


def total(values: Sequence[int | None]) -> int | None:
    """Return the sum, or None if one of the values is unknown."""
    return None if None in values else sum(value for value in values if value is not None)


def _size(shape: tuple[int, ...], dtype: torch.dtype | None) -> int | None:
    return None if dtype is None else math.prod(shape) * dtype.itemsize


def _read(tensor: TraceInput) -> int | None:
    """Return the bytes of a tensor; expanded dimensions count once. Scalars count 0: a trace shows Python numbers as tensors."""
    assert tensor.shape is not None
    if not tensor.shape:
        return 0
    strides = tensor.strides or (1,) * len(tensor.shape)
    once = tuple(n for n, stride in zip(tensor.shape, strides, strict=True) if stride != 0 or n == 0)
    return _size(once, _CostCall.dtype(tensor))


def _bytes(call: _CostCall) -> int | None:
    return total([*map(_read, call.tensors()), _written(call)])


def _written(call: _CostCall) -> int | None:
    if call.written:
        written_to = [call.named[argument] for argument in call.written]
        return total([None if tensor.shape is None else _read(tensor) for tensor in written_to])
    tensors = call.tensors()
    if not tensors:
        return None
    shape, dtype = _result(call, tensors)
    if shape is None:
        return None
    written = _size(shape, dtype)
    if call.base == "native_dropout" and written is not None:
        return written + math.prod(shape)  # the mask, one byte an element
    if call.base in _NORM_BACKWARDS | _ATTENTION_BACKWARDS:
        return _gradients(call)
    return written


def _result(call: _CostCall, tensors: list[TraceInput]) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    shapes = [tensor.shape for tensor in tensors if tensor.shape is not None]
    first, dtype = shapes[0], _CostCall.dtype(tensors[0])
    if call.base in _POINTWISE:
        return tuple(torch.broadcast_shapes(*shapes)), _promoted(call, tensors)
    if call.base in _COMPARISONS:
        return tuple(torch.broadcast_shapes(*shapes)), torch.bool
    if call.base in _REDUCTIONS:
        return _reduced(call, first), _asked(call, "dtype", dtype)
    if call.base in _PRODUCTS:
        a, b = shapes[-2:]
        return (*a[:-1], b[-1]), _asked(call, "out_dtype", _CostCall.dtype(tensors[-1]))
    if call.base in _SOFTMAXES:
        return first, torch.float32 if call.value("half_to_float") == "True" else dtype
    if call.base in _SOFTMAX_BACKWARDS:
        return first, _asked(call, "input_dtype", dtype)
    if call.base in _ATTENTIONS:
        return (*first[:-1], shapes[2][-1]), dtype
    return first, dtype


def _promoted(call: _CostCall, tensors: list[TraceInput]) -> torch.dtype | None:
    """Return the promoted dtype. Integers give None: a division or a Python float makes the result floating-point."""
    chosen = tensors[1:] if call.base == "where" else tensors
    dtypes = [_CostCall.dtype(tensor) for tensor in chosen if tensor.shape] or [_CostCall.dtype(tensor) for tensor in chosen]
    known = [dtype for dtype in dtypes if dtype is not None]
    if not known or len(known) < len(dtypes):
        return None
    dtype = reduce(torch.promote_types, known)
    return dtype if dtype.is_floating_point or dtype.is_complex else None


def _asked(call: _CostCall, argument: str, otherwise: torch.dtype | None) -> torch.dtype | None:
    value = call.value(argument)
    return _SCALAR_TYPES.get(value) if value else otherwise


def _reduced(call: _CostCall, shape: tuple[int, ...]) -> tuple[int, ...]:
    dims = [int(n) for n in call.value("dim").strip("[]").replace(",", " ").split()]
    gone = {dim % max(len(shape), 1) for dim in dims} if dims else set(range(len(shape)))
    return tuple(n for i, n in enumerate(shape) if i not in gone)


def _gradients(call: _CostCall) -> int | None:
    """Return the bytes of the input gradients that output_mask asks for; each is as large as its input."""
    names = ("input", "weight", "bias") if call.base in _NORM_BACKWARDS else ("query", "key", "value")
    mask = call.value("output_mask").strip("[]").replace(",", " ").split()
    wanted = [name for i, name in enumerate(names) if i >= len(mask) or mask[i] == "True"]
    inputs = [call.named[name] for name in wanted if name in call.named and call.named[name].shape is not None]
    return total([_size(tensor.shape or (), _CostCall.dtype(tensor)) for tensor in inputs])


# ---- flops ----


def _flops(call: _CostCall) -> int | None:
    """Return the flops by PyTorch's flop_registry. Causal attention with as many keys as queries counts half, by convention."""
    name = call.base.replace("_for_cpu", "")
    formula: Any = flop_registry.get(getattr(torch.ops.aten, name))
    shapes = [tensor.shape for tensor in call.named.values() if tensor.shape is not None]
    if formula is None:
        return None
    if call.base in _PRODUCTS:
        return int(formula(*shapes[: 3 if "add" in call.base else 2]))
    query, key, value = (call.named[argument].shape or () for argument in ("query", "key", "value"))
    heads = query[:2]  # grouped-query attention: several query heads share a key and value head
    shapes = [query, (*heads, *key[2:]), (*heads, *value[2:])]
    if call.base in _ATTENTION_BACKWARDS:
        shapes.insert(0, (*query[:-1], value[-1]))
    flops = int(formula(*shapes))
    return flops // 2 if call.value("is_causal") == "True" and query[-2] == key[-2] else flops
