"""cuBLASLt through ctypes: PyTorch has loaded the library. What products in eight bits and batch-invariant ones share."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from functools import lru_cache
from typing import Any

import torch

from onepass.runtime.fp8 import E4M3, E5M2

# of cublasLt.h: types, and the attributes of products, preferences and algorithms
TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 14, E4M3: 28, E5M2: 29}
TRANSPOSE_A = 3
ALGORITHM_ID, ALGORITHM_VARIANT = 0, 5
_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)

_MAJOR = 13  # the release of cuBLAS that this was tried on


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("status", c_int), ("waves", c_float), ("reserved", c_int * 4),
    )  # fmt: skip


class Library:
    """The functions of cuBLASLt that products take. They keep the interpreter's lock, as they take a few microseconds."""

    def __init__(self) -> None:
        self._library = ctypes.PyDLL(f"libcublasLt.so.{_MAJOR}")
        self._library.cublasLtGetStatusString.restype = ctypes.c_char_p
        self.multiply = self._library.cublasLtMatmul
        self.multiply.argtypes = [*[c_void_p] * 14, c_size_t, c_void_p]
        self.set = self._library.cublasLtMatmulDescSetAttribute
        self.set.argtypes = [c_void_p, c_int, c_void_p, c_size_t]

    def call(self, name: str, *args: Any) -> None:
        """Call a function that is not in a hurry, and raise where it fails."""
        self.check(self._library[f"cublasLt{name}"](*args), name)

    def make(self, name: str, *args: Any) -> c_void_p:
        """Return what a function makes. It is kept for good, with the plan."""
        made = c_void_p()
        self.call(f"{name}Create", byref(made), *args)
        return made

    def check(self, status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"cuBLASLt's {what}: {self._library.cublasLtGetStatusString(status).decode()}")

    def set_all(self, what: str, target: c_void_p, options: dict[int, Any]) -> None:
        """Set attributes of a description, a matrix or a preference."""
        for option, value in options.items():
            self.call(f"{what}SetAttribute", target, option, byref(value), c_size_t(sizeof(value)))

    def matrix(self, dtype: torch.dtype, rows: int, columns: int, stride: int) -> c_void_p:
        """Return a column-major matrix's layout."""
        return self.make("MatrixLayout", TYPES[dtype], c_uint64(rows), c_uint64(columns), c_int64(stride))

    def list_algorithms(
        self, handle: c_void_p, product: c_void_p, matrices: Sequence[c_void_p], count: int, alignment: int
    ) -> list[Algorithm]:
        """Return cuBLAS's list, its best guess first, of algorithms that don't split a sum and need no workspace."""
        preference = self.make("MatmulPreference")
        alignments = dict.fromkeys(_ALIGNMENTS, c_uint32(alignment))
        self.set_all("MatmulPreference", preference, {_WORKSPACE: c_uint64(0), _REDUCTIONS: c_uint32(0), **alignments})
        listed, found = (Algorithm * count)(), c_int()
        matrices = *matrices, matrices[-1]
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            handle, product, *matrices, preference, count, listed, byref(found)
        )  # fmt: skip
        self.call("MatmulPreferenceDestroy", preference)
        return listed[: found.value] if not status else []

    def setting(self, algorithm: Algorithm, option: int) -> int:
        value = c_uint32()
        self.call(
            "MatmulAlgoConfigGetAttribute", byref(algorithm), option, byref(value), c_size_t(sizeof(value)), byref(c_size_t())
        )
        return value.value


@lru_cache(1)
def load() -> Library | str:
    """Return the library, or why it can't be used."""
    version = torch.version.cuda or "none"
    if version.split(".")[0] != str(_MAJOR):
        return f"PyTorch has CUDA {version}, and cuBLASLt's interface was tried with {_MAJOR}"
    try:
        return Library()
    except (OSError, AttributeError) as error:
        return f"cuBLASLt was not found: {error}"


def loaded() -> Library:
    library = load()
    assert isinstance(library, Library)
    return library


@lru_cache(None)
def handle_of(device: int) -> c_void_p:
    """Return a device's handle. The device must be the current one."""
    return loaded().make("")
