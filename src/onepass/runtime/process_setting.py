"""A setting of the whole process, which a block behind `with` overrides for its own thread.

    outside of blocks   the process's value, which a plain call changes for all threads
    in a block          the block's value, in the thread that entered it and in autograd's threads while they run its backward

A thread doesn't see the blocks of others. So two that overlap, in whatever order they end, leave nothing behind.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from ctypes import py_object, pythonapi
from typing import Any, Generic, TypeVar

import torch

from onepass.runtime.dispatch import TORCH

T = TypeVar("T")


class _ThreadBlocks(threading.local):
    """The values of the blocks that a thread is in, the innermost last. Dynamo guards on this, and can't read a ContextVar."""

    def __init__(self) -> None:
        self.values: tuple[Any, ...] = ()


class _ProcessValue:
    """A value that the process was given, and the one that holds `instead` since this one was taken back."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.instead: _ProcessValue | None = None


class ProcessSetting(Generic[T]):
    """Reading it is `setting.process if not setting.has_blocks else setting.in_thread()`, which calls no function as a rule."""

    def __init__(self, name: str, value: T) -> None:
        self._key = f"onepass.{name}"
        self._lock = threading.Lock()
        self._last = _ProcessValue(value)
        self._open = 0  # blocks, of all threads
        self.process, self.has_blocks = value, False
        self.blocks = _ThreadBlocks()

    def in_thread(self) -> T:
        """The value of this thread's innermost block, or in one of autograd's threads that of backward's caller."""
        values = self.blocks.values
        if not values and not torch.compiler.is_compiling() and torch._C._is_key_in_tls(self._key):
            values = torch._C._get_obj_in_tls(self._key)  # which PyTorch hands on from backward's caller
        return values[-1] if values else self.process

    def change(self, value: T) -> SettingChange[T]:
        """Give the process a value. Entering what this returns takes it back, and sets it in the block alone."""
        return SettingChange(self, value)

    def _exclusive(self) -> AbstractContextManager[Any]:
        return nullcontext() if torch.compiler.is_compiling() else self._lock  # locks can't be traced

    def put(self, entry: _ProcessValue) -> _ProcessValue:
        """Give the process `entry`'s value, and return the entry before."""
        with self._exclusive():
            before, self._last, self.process = self._last, entry, entry.value
        return before

    def take_back(self, entry: _ProcessValue, before: _ProcessValue) -> None:
        """Undo `put(entry)`. What others have put since stays."""
        with self._exclusive():
            entry.instead = before
            while self._last.instead is not None:
                self._last = self._last.instead
            self.process = self._last.value

    def set_blocks(self, values: tuple[Any, ...], opened: int) -> None:
        """Set the values of this thread's blocks, which are `opened` more than before."""
        self.blocks.values = values
        if torch.compiler.is_compiling():
            return
        with self._lock:
            self._open += opened
            self.has_blocks = self._open > 0
        if values or not hasattr(torch._C, "_remove_obj_from_tls"):  # PyTorch before 2.13 has no way to remove it
            if TORCH < (2, 12):  # there it gives back a reference that it did not take, so it gets one
                pythonapi.Py_IncRef(py_object(values))
            torch._C._stash_obj_in_tls(self._key, values)
        else:
            torch._C._remove_obj_from_tls(self._key)


class SettingChange(Generic[T]):
    """A change of the process's setting, made already, or as a context manager one of a block."""

    def __init__(self, setting: ProcessSetting[T], value: T) -> None:
        self._setting, self._value = setting, value
        self._put()

    def _put(self) -> None:
        self._entry = _ProcessValue(self._value)
        self._before: _ProcessValue | None = self._setting.put(self._entry)  # None: taken back

    def undo(self) -> None:
        """Take the process's change back. What others have changed since stays, and a second call does nothing."""
        if self._before is not None:
            self._setting.take_back(self._entry, self._before)
            self._before = None

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            self.undo()
        elif self._before is None:
            self._put()  # for a block that is traced: what counts open blocks is all threads', so tracing leaves it alone
        self._setting.set_blocks((*self._setting.blocks.values, self._value), 1)

    def __exit__(self, *exception: object) -> None:
        self.undo()
        values = self._setting.blocks.values
        last = len(values) - 1 - values[::-1].index(self._value)  # not the last where coroutines of one thread take turns
        self._setting.set_blocks((*values[:last], *values[last + 1 :]), -1)


# ---- validate() ----

_checks = ProcessSetting("validate", False)


def validate(on: bool = True) -> SettingChange[bool]:
    """Turn the costly checks on (or off), from now on or, as a context manager, within the block.

        onepass.validate()                 # everything from here
        with onepass.validate(): ...       # and back to what it was

    They look at the values of tensors, so each waits for the GPU: for finding a fault, not for training. Compiled code is not
    looked into. From now on means the whole process, all threads; a block is its thread's own, as `use_backend`'s is.
    """
    return _checks.change(on)


def validating() -> bool:
    return _checks.process if not _checks.has_blocks else _checks.in_thread()
