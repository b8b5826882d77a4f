"""cuBLASLt's product of eight-bit matrices, called directly: PyTorch has loaded the library, and ctypes finds it.

What `torch._scaled_mm` lacks:
    sums        the product can be added to what `out` holds, in fp32, without another pass over it.
    CPU         a call takes a tenth of the time (22 us beside 220 on an H100's host): what a shape needs is kept.
    algorithms  cuBLAS lists several, its best guess first, and PyTorch takes that. For short sums `_choose` knows better.
All algorithms that it can choose have the same bits, as none splits a sum. So there is no workspace either.

Row-major out [M, N] = a [M, K] @ b [N, K].T is column-major out.T = b @ a.T, so b is cuBLAS's first operand.
"""

from __future__ import annotations

import logging
import threading
from ctypes import addressof, c_float, c_int, c_int8, c_void_p, sizeof
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.cublaslt_library import (
    ALGORITHM_ID,
    ALGORITHM_VARIANT,
    TRANSPOSE_A,
    TYPES,
    Algorithm,
    handle_of,
    load,
    loaded,
)

_log = logging.getLogger("onepass")
_lock = threading.Lock()  # a plan's description is changed at each call

_SUMS_IN_FP32 = 68  # of cublasLt.h, as the attributes of products are
_SCALE_A, _SCALE_B, _FAST, _SCALE_MODE_A, _SCALE_MODE_B = 17, 18, 25, 31, 32
_SCALE_BY_ROW = 3

_HOPPER = 9, 0
_ALIGNMENT = 16  # of addresses, in bytes: more has the same algorithms
_LISTED = 8  # algorithms that are asked for
_NVJET, _PING_PONG = 66, 4  # Hopper's kernels; those of variants below this overlap a tile's end with the next tile's sums
_SHORT = 8192  # of a sum: in longer ones a tile's end doesn't matter


@lru_cache(None)
def unusable(device: torch.device) -> str | None:
    """Return why `scaled_mm` can't run on a GPU, or None. A reason is logged, once."""
    reason = None
    if torch.cuda.get_device_capability(device) != _HOPPER:
        reason = "it was tried on compute capability 9.0 only"
    elif isinstance(library := load(), str):
        reason = library
    if reason is not None:
        _log.info("products in eight bits run by torch._scaled_mm: %s", reason)
    return reason


class _Plan:
    """What products of one kind share: a description, whose scales are set at each call, matrices and the algorithm."""

    def __init__(
        self, device: int, sizes: tuple[int, int, int], a: torch.dtype, b: torch.dtype, out: torch.dtype, row: int, fast: bool,
        add: bool, by_row: bool,
    ) -> None:  # fmt: skip
        M, N, K = sizes
        library = self._library = loaded()
        self._handle = handle_of(device)
        self._product = library.make("MatmulDesc", _SUMS_IN_FP32, TYPES[torch.float32])
        self._scales = c_void_p(_ALIGNMENT), c_void_p(_ALIGNMENT)  # any address will do for the list of algorithms
        of_b, of_a = self._scales
        options: dict[int, Any] = {TRANSPOSE_A: c_int(1), _FAST: c_int8(fast), _SCALE_A: of_b, _SCALE_B: of_a}
        if by_row:
            options |= dict.fromkeys((_SCALE_MODE_A, _SCALE_MODE_B), c_int(_SCALE_BY_ROW))
        library.set_all("MatmulDesc", self._product, options)
        self._matrices = [library.matrix(b, K, N, K), library.matrix(a, K, M, K), library.matrix(out, N, M, row)]
        self._algorithm = self._choose(fast and K <= _SHORT)
        self._factors = c_float(1), c_float(add)

    def _choose(self, hides_ends: bool) -> Algorithm:
        """Return the first algorithm of cuBLAS's list, or the first that hides the ends of tiles where those matter.

        On an H100 that takes .82 to .99 of the time, and nowhere more (docs/notes/0018).
        """
        library = self._library
        listed = library.list_algorithms(self._handle, self._product, self._matrices, _LISTED, _ALIGNMENT)
        if not listed:
            raise RuntimeError("cuBLASLt has no algorithm for these products")
        for each in listed if hides_ends else []:
            if library.setting(each, ALGORITHM_ID) == _NVJET and library.setting(each, ALGORITHM_VARIANT) < _PING_PONG:
                return each
        return listed[0]

    def run(self, a: int, a_inverse: int, b: int, b_inverse: int, out: int, stream: int) -> None:
        """Multiply the matrices at these addresses."""
        library, product = self._library, self._product
        of_b, of_a, of_out = self._matrices
        scale_b, scale_a = self._scales
        one, beta = self._factors
        with _lock:
            scale_b.value, scale_a.value = b_inverse, a_inverse
            library.set(product, _SCALE_A, addressof(scale_b), sizeof(c_void_p))
            library.set(product, _SCALE_B, addressof(scale_a), sizeof(c_void_p))
            status = library.multiply(
                self._handle, product, addressof(one), b, of_b, a, of_a, addressof(beta), out, of_out, out, of_out,
                addressof(self._algorithm), None, 0, stream,
            )  # fmt: skip
        library.check(status, "Matmul")


def _aligned(scales: Tensor) -> Tensor:
    """A copy of what lies where cuBLAS can't read it, as some rows' scales of a longer vector may."""
    return scales.clone() if scales.data_ptr() % _ALIGNMENT else scales


@lru_cache(4096)
def _plan(*kind: Any) -> _Plan:
    return _Plan(*kind)


def scaled_mm(
    a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, out: Tensor, *, fast: bool = False, add: bool = False
) -> None:  # fmt: skip
    """Write a @ b.T over their scales to `out`, or add it there.

    Args:
        a, b: codes [M, K] and [N, K], contiguous; K and N are multiples of 16.
        a_inverse, b_inverse: fp32, of one element both, or of M and N.
        out: [M, N] of fp32 or a 16-bit type, with rows of contiguous elements.
        fast: sums may be kept in fewer bits than fp32, as the tensor cores of Hopper do.
        add: in fp32. A 16-bit product is rounded before it is added.
    """
    device = a.get_device()
    if device != torch._C._cuda_getDevice():  # cuBLAS launches on the current device
        with torch.cuda.device(device):
            return scaled_mm(a, a_inverse, b, b_inverse, out, fast=fast, add=add)
    (M, K), N = a.shape, b.shape[0]
    a_inverse, b_inverse = (_aligned(t) if t.dim() else t for t in (a_inverse, b_inverse))
    places = a.data_ptr(), a_inverse.data_ptr(), b.data_ptr(), b_inverse.data_ptr(), out.data_ptr()
    plan = _plan(device, (M, N, K), a.dtype, b.dtype, out.dtype, out.stride(0), fast, add, a_inverse.dim() > 0)
    plan.run(*places, torch._C._cuda_getCurrentRawStream(device))


# ---- the product, on any device ----


def _is_writable(out: Tensor) -> bool:
    """Whether cuBLAS writes a product of eight bits there: rows are contiguous, and begin at multiples of 16 bytes."""
    return out.stride(1) == 1 and (out.data_ptr() | out.stride(0) * out.element_size()) % _ALIGNMENT == 0


def scaled_product(
    a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, dtype: torch.dtype, *,
    fast: bool = False, out: Tensor | None = None, add: bool = False,
) -> Tensor:  # fmt: skip
    """Return a @ b.T of codes a [M, K] and b [N, K], over their scales, in `dtype`.

    Args:
        a_inverse, b_inverse: the inverses of scales, of one element both, or [M, 1] and [N, 1].
        fast: sums may be kept in fewer bits than fp32, as the tensor cores of Hopper do.
        out: where the product is written, of `dtype`.
        add: to what `out` holds, in fp32, and rounded once.
    """
    if add and dtype is not torch.float32:  # cuBLAS would round the product as well as the sum
        assert out is not None
        return out.add_(scaled_product(a, a_inverse, b, b_inverse, torch.float32, fast=fast))
    if out is not None and out.is_cuda and not _is_writable(out):
        product = scaled_product(a, a_inverse, b, b_inverse, dtype, fast=fast)
        return out.add_(product) if add else out.copy_(product)
    if a.is_cuda and a.numel() and unusable(a.device) is None:
        into = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device) if out is None else out
        scaled_mm(a, a_inverse, b, b_inverse, into, fast=fast, add=add)
        return into
    if a.is_cuda:
        scales = {"scale_a": a_inverse, "scale_b": b_inverse.t() if b_inverse.dim() else b_inverse}
        product = torch._scaled_mm(a, b.t(), **scales, out_dtype=dtype, use_fast_accum=fast)
    else:
        product = ((a.float() * a_inverse) @ (b.float() * b_inverse).t()).to(dtype)
    if out is None:
        return product
    return out.add_(product) if add else out.copy_(product)


def add_scaled_product(out: Tensor, a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, *, fast: bool = False) -> Tensor:
    """Add a @ b.T to `out` without a pass of its own, and return it. A 16-bit product is rounded before it is added."""
    if a.is_cuda and a.numel() and _is_writable(out) and unusable(a.device) is None:
        scaled_mm(a, a_inverse, b, b_inverse, out, fast=fast, add=True)
        return out
    return out.add_(scaled_product(a, a_inverse, b, b_inverse, out.dtype, fast=fast))
