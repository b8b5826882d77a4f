"""Cache types in Triton's interpreter. This removes work besides a kernel's arithmetic, most of its time. Results are the same.

For each value the language makes a type, a shape as a tuple object, and a type of that tuple. It compares two shapes by making
both again. It computes each sum or product of integers a second time in int64 and compares that with int32's limits. Without
the option `debug`, which is off here, it discards the comparison. This module makes each type once, with the attributes that its
tensors share, and runs the overflow check only with `debug`.

Only `onepass.testing.interpreter` uses this module: it calls `install`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import triton.language.core as core
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic

_KEPT = "_onepass_kept"  # an attribute of Triton types: the cached objects, by kind or by shape

_Block: Any = core.block_type
_Tensor: Any = core.tensor
_Tuple: Any = core.tuple

_stock_block = _Block.__init__
_stock_tensor = _Tensor.__init__
_stock_equal = _Tuple.__eq__
_stock_numpy_type: Any = interpreter._get_np_dtype
_stock_broadcast: Any = TritonSemantic.broadcast_impl_value


def _kept(of: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = of.__dict__.setdefault(_KEPT, {})
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


def _made_already(self: Any, element_ty: Any, shape: Any) -> None:
    pass


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """Copy the attributes of the type's first tensor. Only the handle differs."""
    kept = _kept(type)
    if "tensor" not in kept:
        _stock_tensor(self, handle, type)
        kept["tensor"] = {name: value for name, value in self.__dict__.items() if name != "handle"}
    self.__dict__.update(kept["tensor"])
    self.handle = handle


def _equal(self: Any, other: Any) -> Any:
    """Compare tuples of plain integers, as shapes are, without wrapping each integer in a constexpr."""
    theirs = other.values if type(other) is _Tuple else other
    if isinstance(theirs, list | tuple) and all(type(value) is int for values in (self.values, theirs) for value in values):
        return core.constexpr(self.values == list(theirs))
    return _stock_equal(self, other)


def _numpy_type(tt_dtype: Any) -> Any:
    kept = _kept(tt_dtype)
    if "numpy" not in kept:
        kept["numpy"] = _stock_numpy_type(tt_dtype)
    return kept["numpy"]


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    return (lhs, rhs) if lhs.type is rhs.type else _stock_broadcast(self, lhs, rhs)


def install() -> None:
    _Block.__new__, _Block.__init__ = _one_block_type, _made_already
    _Tensor.__init__ = _tensor
    _Tuple.__eq__ = _equal
    interpreter._get_np_dtype = _numpy_type
    TritonSemantic.broadcast_impl_value = _broadcast
    builder: Any = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
