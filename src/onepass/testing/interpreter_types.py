"""Cache types in Triton's interpreter. This removes work besides a kernel's arithmetic, most of its time. Results are the same.

For each value the language makes a type, a shape as a tuple object, and a type of that tuple. It compares two shapes by making
both again. It computes each sum or product of integers a second time in int64 and compares that with int32's limits. Without
the option `debug`, which is off here, it discards the comparison. This module makes each type once, with the attributes that its
tensors share, and runs the overflow check only with `debug`.

An operator or a cast checks and promotes the types of its operands and splats scalars to blocks, for each value anew. Here the
first call with two types does so, and later ones call numpy's function. Where that has another result for the first call, none is
fast.

Only `onepass.testing.interpreter` uses this module: it calls `install`, and `patch_operators` in the first launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import triton.language.core as core
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic

_KEPT = "_onepass_kept"  # an attribute of Triton types: the cached objects, by kind or by shape

_Block: Any = core.block_type
_Pointer: Any = core.pointer_type
_Tensor: Any = core.tensor
_Constexpr: Any = core.constexpr
_Tuple: Any = core.tuple

_stock_block = _Block.__init__
_stock_pointer = _Pointer.__init__
_stock_tensor = _Tensor.__init__
_stock_equal = _Tuple.__eq__
_stock_numpy_type: Any = interpreter._get_np_dtype
_stock_broadcast: Any = TritonSemantic.broadcast_impl_value


def _kept(of: Any) -> dict[Any, Any]:
    found: dict[Any, Any] | None = of.__dict__.get(_KEPT)
    if found is None:
        found = of.__dict__[_KEPT] = {}
    return found


def _one_block_type(cls: Any, element_ty: Any, shape: Any) -> Any:
    """Return one object for each element type and shape."""
    sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
    kept, key = _kept(element_ty), (sizes, *map(type, sizes))  # with types: 4.0 equals 4, but is no size
    found = kept.get(key)
    if found is None:
        found = object.__new__(cls)
        _stock_block(found, element_ty, shape)
        kept[key] = found
    return found


def _one_pointer_type(cls: Any, element_ty: Any, address_space: int = 1, const: bool = False) -> Any:
    kept, key = _kept(element_ty), ("pointer", address_space, const)
    found = kept.get(key)
    if found is None:
        found = object.__new__(cls)
        _stock_pointer(found, element_ty, address_space, const)
        kept[key] = found
    return found


def _made_already(self: Any, *_: Any, **__: Any) -> None:
    """Do nothing: `__new__` returns a type that is made."""


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """Copy the attributes of the type's first tensor. Only the handle differs."""
    attributes = _kept(type).get("tensor")
    if attributes is None:
        _stock_tensor(self, handle, type)
        _kept(type)["tensor"] = dict(self.__dict__)
    else:
        self.__dict__.update(attributes)
        self.handle = handle


def _equal(self: Any, other: Any) -> Any:
    """Compare tuples of plain integers, as shapes are, without wrapping each integer in a constexpr."""
    theirs = other.values if type(other) is _Tuple else other
    if isinstance(theirs, list | tuple) and all(type(value) is int for values in (self.values, theirs) for value in values):
        return core.constexpr(self.values == list(theirs))
    return _stock_equal(self, other)


def _constexpr(cls: Any, value: Any = None) -> Any:
    """Return a tensor as it is: `constexpr * tensor` is one, which Triton 3.9 refuses to take out of a constexpr."""
    return value if type(value) is _Tensor else object.__new__(cls)


def _numpy_type(tt_dtype: Any) -> Any:
    kept = _kept(tt_dtype)
    if "numpy" not in kept:
        kept["numpy"] = _stock_numpy_type(tt_dtype)
    return kept["numpy"]


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    one, other = lhs.type, rhs.type
    if one is other or (type(one) is _Block and type(other) is _Block and one.shape.values == other.shape.values):
        return lhs, rhs
    return _stock_broadcast(self, lhs, rhs)


# ---- operators ----

_Handle: Any = interpreter.TensorHandle


def _divide(a: Any, b: Any) -> Any:
    return (a - np.fmod(a, b)) // b  # integers, towards zero


_COMPUTE: dict[str, Callable[[Any, Any], Any]] = {
    "__add__": np.add, "__radd__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, "__rmul__": np.multiply,
    "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal,
    "__eq__": np.equal, "__ne__": np.not_equal, "__and__": np.bitwise_and, "__or__": np.bitwise_or, "__xor__": np.bitwise_xor,
    "__lshift__": np.left_shift, "__rshift__": np.right_shift, "__floordiv__": _divide, "__mod__": np.fmod,
}  # fmt: skip
_NEGATIVE, _LARGE = object(), object()  # types of an int that an unsigned tensor refuses, and of one that only it takes
_EVERYTHING = slice(None)
_new = object.__new__
_learnt: dict[tuple[Any, ...], Any] = {}  # by operator and ids of types: numpy's function, what its results have, and the types


def _attributes(tensor: Any) -> dict[str, Any]:
    """Return what all tensors of its type have: everything but the handle."""
    return {name: value for name, value in tensor.__dict__.items() if name != "handle"}


def _make(data: Any, handle_type: Any, attributes: dict[str, Any]) -> Any:
    """Return a tensor without the checks that its type has passed before."""
    handle, tensor = _new(_Handle), _new(_Tensor)
    handle.data, handle.dtype, handle.attr = data, handle_type, {}
    tensor.__dict__.update(attributes)
    tensor.handle = handle
    return tensor


def _add_pointers(size: int, pointers: Any, offsets: Any) -> Any:
    return pointers + size * np.asarray(offsets).astype(np.uint64)


def _compute_of(name: str, left: Any, value: Any, found: Any) -> Callable[[Any, Any], Any] | None:
    """Return the function of arrays that makes what the stock operator has found, or None."""
    data, compute = left.handle.data, _COMPUTE[name]
    kind = data.dtype.kind
    if left.type.scalar.is_ptr():
        compute = partial(_add_pointers, max(1, left.type.scalar.element_ty.primitive_bitwidth // 8))
        alike = name == "__add__"
    elif hasattr(value, "dtype"):
        alike = value.dtype.kind == kind  # the language and numpy promote other pairs in different ways
    else:
        alike = kind == "f" or (kind in ("iu" if value < 2**31 else "u") and type(value) is int)
    if not alike or type(found) is not _Tensor:
        return None
    ours, theirs = compute(data, value), found.handle.data
    same = ours.dtype == theirs.dtype and ours.shape == theirs.shape and np.array_equal(ours, theirs, equal_nan=kind == "f")
    return compute if same else None


def _operator(name: str, stock: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap an operator of `tl.tensor`. Its other operand is a tensor, a number or a constexpr."""

    def run(self: Any, other: Any) -> Any:
        value = other.value if type(other) is core.constexpr else other
        right: Any = type(value)
        if right is _Tensor:
            right, value = value.type, value.handle.data
        elif right is int and -(2**31) <= value < 2**32:
            right = _NEGATIVE if value < 0 else int if value < 2**31 else _LARGE
        elif right is not float:
            return stock(self, other)
        key = name, id(self.type), id(right)
        learnt = _learnt.get(key)
        if learnt is None:
            found = stock(self, other)
            compute = _compute_of(name, self, value, found)
            _learnt[key] = compute, compute and found.handle.dtype, compute and _attributes(found), self.type, right
            return found
        compute, handle_type, attributes, *_ = learnt
        return stock(self, other) if compute is None else _make(compute(self.handle.data, value), handle_type, attributes)

    return run


def _new_dimensions(stock: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap `tensor[:, None]` and its like."""

    def run(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or not all([each is None or each == _EVERYTHING for each in slices]):
            return stock(self, slices)
        kept, key = _kept(self.type), tuple([each is None for each in slices])
        if key not in kept:
            kept[key] = _attributes(stock(self, slices))
        return _make(self.handle.data[slices], self.handle.dtype, kept[key])

    return run


_OF_NUMPY = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp16", "fp32", "fp64"}


def _cast(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `tensor.to`. Between types of numpy's it is `astype`, once that has made what the stock cast makes."""

    def run(self: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
        if rest or named:
            return stock(self, dtype, *rest, **named)
        dtype = dtype.value if type(dtype) is core.constexpr else dtype
        kept, key = _kept(self.type), ("to", dtype)
        if key not in kept:
            found = stock(self, dtype)
            kept[key] = None
            if self.type is not found.type and {self.type.scalar.name, found.type.scalar.name} <= _OF_NUMPY:
                data = found.handle.data
                if np.array_equal(self.handle.data.astype(data.dtype), data, equal_nan=data.dtype.kind == "f"):
                    kept[key] = data.dtype, found.handle.dtype, _attributes(found)
            return found
        if kept[key] is None:
            return stock(self, dtype)
        numpy_type, handle_type, attributes = kept[key]
        return _make(self.handle.data.astype(numpy_type), handle_type, attributes)

    return run


def patch_operators(tensor: Any) -> None:
    """Make the operators of `tl.tensor` fast, as the first launch has patched them."""
    for name in _COMPUTE:
        setattr(tensor, name, _operator(name, getattr(tensor, name)))
    tensor.to, tensor.__getitem__ = _cast(tensor.to), _new_dimensions(tensor.__getitem__)


def install() -> None:
    _Block.__new__, _Block.__init__ = _one_block_type, _made_already
    _Pointer.__new__, _Pointer.__init__ = _one_pointer_type, _made_already
    _Tensor.__init__ = _tensor
    _Constexpr.__new__ = _constexpr
    _Tuple.__eq__ = _equal
    interpreter._get_np_dtype = _numpy_type
    TritonSemantic.broadcast_impl_value = _broadcast
    builder: Any = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
