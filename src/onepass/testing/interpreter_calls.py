"""Loads, stores and choices of Triton's interpreter without its checks of types, which take longer than the arithmetic.

As with operators (`interpreter_types.py`), the first call with the types of its operands is the language's. Later ones do what
that did: they reach memory, through the checks of `interpreter_bounds.py`, or call numpy. Other calls are the language's.

Only `onepass.testing.interpreter` uses this module: it calls `install`, and `patch_functions` in the first launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language.core as core
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic

_Tensor: Any = core.tensor
_Handle: Any = interpreter.TensorHandle
_NUMBERS = {type(None), int, float}
_HINTS = {"cache_modifier", "eviction_policy", "volatile"}  # which the interpreter has no use for

_stock_cast: Any = TritonSemantic.cast
_stock_to_tensor: Any = TritonSemantic.to_tensor
_stock_promote: Any = TritonSemantic.binary_op_type_checking_impl


def _cast(self: Any, x: Any, to: Any, fp_downcast_rounding: Any = None) -> Any:
    return x if x.type.scalar is to.scalar else _stock_cast(self, x, to, fp_downcast_rounding)


def _to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
    return x if type(x) is _Tensor else _stock_to_tensor(self, x, check_type)


def _promote(self: Any, one: Any, other: Any, *rest: Any, **named: Any) -> Any:
    """Return operands of one type as they are. A quotient's (`div_or_mod`) may have another type than they."""
    if type(one) is _Tensor and type(other) is _Tensor and one.type is other.type and not rest and not named:
        scalar = one.type.scalar
        if not scalar.is_ptr():
            return one, other
    return _stock_promote(self, one, other, *rest, **named)


def _handle(data: Any, type: Any) -> Any:
    handle = object.__new__(_Handle)
    handle.data, handle.dtype, handle.attr = data, type, {}
    return handle


def _of_shape(handle: Any, shape: tuple[int, ...]) -> Any:
    return handle if not shape or handle.data.shape == shape else _handle(np.broadcast_to(handle.data, shape), handle.dtype)


def _plain(value: Any) -> Any:
    return value.value if type(value) is core.constexpr else value


# ---- memory ----


def _load(stock: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """Wrap `tl.load` of pointers to numbers, with a mask or without, and a number where it masks."""
    kept: dict[Any, Any] = {}

    def run(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
        mask, number = _plain(mask), _plain(other)
        usual = type(pointer) is _Tensor and (mask is None or type(mask) is _Tensor) and type(number) in _NUMBERS
        if not usual or not named.keys() <= _HINTS:
            return stock(pointer, mask=mask, other=other, **named)
        key = id(pointer.type), mask is not None and id(mask.type), number is None, number == 0
        if key not in kept:
            found = stock(pointer, mask=mask, other=other, **named)
            data, handle_type = found.handle.data, found.handle.dtype
            fast = data.shape == pointer.handle.data.shape and found.type.scalar is not core.int1
            fast = fast and (not number or data.dtype.kind == "f")  # bf16 is bits to numpy
            made = (found.type, handle_type, data.dtype) if fast else None
            kept[key] = made, pointer.type, mask is not None and mask.type  # the types keep their ids
            return found
        made = kept[key][0]
        if made is None:
            return stock(pointer, mask=mask, other=other, **named)
        type_, handle_type, numpy_type = made
        if mask is None:
            return _Tensor(builder.create_load(pointer.handle, None, None, False), type_)
        shape = pointer.handle.data.shape
        filling = None if number is None else _handle(np.full(shape, number, numpy_type), handle_type)
        found = builder.create_masked_load(pointer.handle, _of_shape(mask.handle, shape), filling, None, None, False)
        return _Tensor(found, type_)

    return run


def _store(stock: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """Wrap `tl.store` of a tensor of numbers, with a mask or without."""
    kept: dict[Any, Any] = {}

    def run(pointer: Any, value: Any, mask: Any = None, **named: Any) -> Any:
        mask = _plain(mask)
        usual = type(pointer) is _Tensor and type(value) is _Tensor and (mask is None or type(mask) is _Tensor)
        if not usual or not named.keys() <= _HINTS:
            return stock(pointer, value, mask=mask, **named)
        key = id(pointer.type), id(value.type), mask is not None and id(mask.type)
        if key not in kept:
            stored = pointer.type.scalar.element_ty
            fast = None if stored is core.int1 else stored
            kept[key] = fast, pointer.type, value.type, mask is not None and mask.type  # the types keep their ids
            return stock(pointer, value, mask=mask, **named)
        stored = kept[key][0]
        if stored is None:
            return stock(pointer, value, mask=mask, **named)
        shape = pointer.handle.data.shape
        given = value if value.type.scalar is stored else value.to(stored)
        if mask is None:
            return builder.create_store(pointer.handle, _of_shape(given.handle, shape), None, None)
        return builder.create_masked_store(
            pointer.handle, _of_shape(given.handle, shape), _of_shape(mask.handle, shape), None, None
        )

    return run


# ---- choices ----


def _where(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `tl.where` of a mask, and of tensors of one type of numbers, or of one and a number of its kind."""
    kept: dict[Any, Any] = {}

    def run(condition: Any, x: Any, y: Any) -> Any:
        x, y = _plain(x), _plain(y)
        tensors = [each for each in (x, y) if type(each) is _Tensor]
        numbers = [each for each in (x, y) if type(each) in (int, float)]
        usual = type(condition) is _Tensor and condition.type.scalar is core.int1 and tensors and len(tensors) + len(numbers) == 2
        if not usual or any(type(each) is int and not -(2**31) <= each < 2**31 for each in numbers):
            return stock(condition, x, y)
        types = [each.type if type(each) is _Tensor else (type(each), each < 0) for each in (x, y)]
        values = [each.handle.data if type(each) is _Tensor else each for each in (x, y)]
        key = id(condition.type), *(each if type(each) is tuple else id(each) for each in types)
        if key not in kept:
            found = stock(condition, x, y)
            fast = _is_numpys(found, condition, tensors, numbers, values)
            kept[key] = fast, found.type, found.handle.dtype, condition.type, types  # the types keep their ids
            return found
        fast, type_, handle_type, *_ = kept[key]
        if not fast:
            return stock(condition, x, y)
        return _Tensor(_handle(np.where(condition.handle.data, *values), handle_type), type_)

    return run


def _is_numpys(found: Any, condition: Any, tensors: list[Any], numbers: list[Any], values: list[Any]) -> bool:
    """Whether numpy chooses between such values as the language does. It knows no bf16, and promotes in other ways."""
    scalar, kind = tensors[0].type.scalar, tensors[0].handle.data.dtype.kind
    if any(each.type.scalar is not scalar for each in tensors) or scalar.is_ptr():
        return False
    if numbers and kind != "f" and not (scalar.is_int() and type(numbers[0]) is int):
        return False
    ours, theirs = np.where(condition.handle.data, *values), found.handle.data
    same: bool = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return same and np.array_equal(ours, theirs, equal_nan=kind == "f")


def patch_functions(language: Any) -> None:
    """Make functions of `tl` fast, as the first launch has patched them."""
    builder = interpreter.interpreter_builder
    language.load, language.store = _load(language.load, builder), _store(language.store, builder)
    language.where = _where(language.where)


def install() -> None:
    TritonSemantic.cast, TritonSemantic.to_tensor = _cast, _to_tensor
    TritonSemantic.binary_op_type_checking_impl = _promote
