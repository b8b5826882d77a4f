"""Less of the work that Triton's interpreter does beside a kernel's arithmetic, most of its time; what it computes is the same.

For each value the language makes a type, a shape as a tuple of its own, and a type of that tuple; shapes are compared by making
both again, and each sum or product of integers is made a second time in int64, compared with int32's limits, and thrown away
where the option `debug` is off, as it is. Here a type is made once, and with it what the tensors of that type have in common.

Only for `onepass.testing.interpreter`, which installs it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import triton.language.core as core
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic

_KEPT = "_onepass_kept"  # on a type of Triton's: what was made for it, by what it is or by its shape

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
    """The same object for the same element type and shape."""
    sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
    kept, key = _kept(element_ty), (sizes, *map(type, sizes))  # 4.0 is 4, but no size
    found = kept.get(key)
    if found is None:
        found = object.__new__(cls)
        _stock_block(found, element_ty, shape)
        kept[key] = found
    return found


def _made_already(self: Any, element_ty: Any, shape: Any) -> None:
    pass


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """All but the handle depends on the type alone."""
    kept = _kept(type)
    if "tensor" not in kept:
        _stock_tensor(self, handle, type)
        kept["tensor"] = {name: value for name, value in self.__dict__.items() if name != "handle"}
    self.__dict__.update(kept["tensor"])
    self.handle = handle


def _equal(self: Any, other: Any) -> Any:
    """Of plain integers, as shapes are, with no tuple of constexprs around them."""
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
