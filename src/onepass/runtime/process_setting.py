"""A setting of the whole process that is changed at once, and for a block where it stands behind `with`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ProcessSetting(Generic[T]):
    """`put(value)` has been done; as a context manager it is done again, and `put(before)` at the end."""

    def __init__(self, put: Callable[[T], None], before: T, value: T) -> None:
        self._put, self._before, self._value = put, before, value
        put(value)

    def __enter__(self) -> None:
        self._put(self._value)

    def __exit__(self, *exception: object) -> None:
        self._put(self._before)
