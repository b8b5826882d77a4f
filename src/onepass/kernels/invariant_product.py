"""Matrix products whose rows have the same bits whatever their number: PyTorch's, while `onepass.batch_invariant()` is on.

A row's bits depend on the order of its sum over K. cuBLAS chooses that by the number of rows: with few, programs share a sum.

CUDA   cuBLASLt's algorithms that don't split a sum. One, the reference, suits many rows. Where its tiles are too large for the
       rows at hand, another stands in, once it has given the reference's bits on random rows. All of Hopper's in 16 bits do
       (docs/notes/0040-batch-invariance.md). While a CUDA graph is captured nothing can be compared, so there unseen sizes
       take the reference.
CPU    blocks of 64 rows, the last filled up with zeros. So are the columns of fp64, and few of fp32: MKL sums what is left of its
       tiles in other orders.

A product of x stored by columns is a weight's gradient, whose sums are over the rows. PyTorch computes it as always.
What is multiplied here are aten's mm, addmm, linear, and bmm with one matrix for all: so matmul with a matrix too, and backward.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from ctypes import addressof, c_double, c_float, c_int, c_void_p, sizeof
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from onepass.kernels.cublaslt_library import TRANSPOSE_A, TYPES, Algorithm, Library, handle_of, load, loaded
from onepass.runtime.batch_invariance import INVARIANT, invariant
from onepass.runtime.dispatch import under_functorch
from onepass.runtime.process_setting import SettingChange
from onepass.runtime.sizes import ceil_div

_lock = threading.Lock()  # a kind's description is changed at each call

# of cublasLt.h: what sums are computed in, and attributes of products
_IN_FP32, _IN_FP64, _IN_TF32 = 68, 70, 77
_EPILOGUE, _BIAS = 7, 8
_ADD_BIAS = 4

_ALIGNMENT = 16  # bytes
_STEPS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # numbers of rows; up to each, one algorithm
_LISTED = 8  # algorithms that are asked for
_REFERENCE_ROWS = 4096
_FEW = 512  # rows, up to which cuBLAS would split a long sum, and lists little else
_UNSPLIT = 2048  # of a sum that it doesn't split
_COMPARED_ROWS, _COMPARED_NUMBERS = 4096, 1 << 26  # at most: rows, and numbers of a matrix
_OTHERS = 64  # rows beside, when the reference's bits are compared
_COLUMNS = 256  # a compared width differs from the real one by multiples of this
_CPU_ROWS = 64
_CPU_COLUMNS = 48  # what tiles' columns divide


# ---- CUDA ----


class _Kind(NamedTuple):
    """Products that one order of sums serves."""

    device: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    by_rows: bool  # b [K, N] is stored by rows
    N: int
    K: int
    has_bias: bool
    sums: int


class _InvariantProducts:
    """A kind's description and algorithms, one for each step of rows."""

    def __init__(self, kind: _Kind) -> None:
        self.kind, self._library, self._handle = kind, loaded(), handle_of(kind.device)
        scale = torch.float64 if kind.sums == _IN_FP64 else torch.float32
        self._product = self._library.make("MatmulDesc", kind.sums, TYPES[scale])
        options: dict[int, Any] = {TRANSPOSE_A: c_int(not kind.by_rows)}
        if kind.has_bias:
            options |= {_EPILOGUE: c_int(_ADD_BIAS), _BIAS: c_void_p(_ALIGNMENT)}
        self._library.set_all("MatmulDesc", self._product, options)
        self._alignment = _alignment(kind)
        self._of_step: dict[int, Algorithm] = {}
        listed = self._listed(_REFERENCE_ROWS, kind.K)
        if not listed:
            raise RuntimeError(f"cuBLASLt has no algorithm without a split sum for {kind}")
        self.reference = listed[0]

    def _listed(self, rows: int, K: int) -> list[Algorithm]:
        kind = self.kind
        matrices = _matrices(
            kind.dtype, kind.out_dtype, kind.by_rows, (rows, kind.N, K), (K, kind.N if kind.by_rows else K, kind.N)
        )
        return self._library.list_algorithms(self._handle, self._product, matrices, _LISTED, self._alignment)

    def algorithm(self, rows: int) -> Algorithm | None:
        """Return the algorithm for a number of rows, or None where it is not known yet and a graph is being captured."""
        step = next((step for step in _STEPS if rows <= step), _STEPS[-1])
        known = self._of_step.get(step)
        if known is None:
            if torch.cuda.is_current_stream_capturing():
                return None
            known = self._of_step[step] = self._choose(step)
        return known

    def _choose(self, step: int) -> Algorithm:
        """Return the first algorithm of cuBLAS's list that has the reference's bits for so many rows, or the reference."""
        listed = self._listed(step, self.kind.K if step > _FEW else min(self.kind.K, _UNSPLIT))
        for each in (*listed, self.reference):
            if self._has_same_bits(each, step):
                return each
        raise RuntimeError(f"cuBLASLt has no algorithm whose rows don't depend on their number for {self.kind}")

    def _has_same_bits(self, algorithm: Algorithm, step: int) -> bool:
        """Multiply some random rows by an algorithm, and by the reference among others."""
        kind, most = self.kind, min(step, _COMPARED_ROWS, max(_OTHERS, _COMPARED_NUMBERS // self.kind.K))
        generator = torch.Generator(f"cuda:{kind.device}").manual_seed(0)

        def draw(*shape: int, dtype: torch.dtype = kind.dtype) -> Tensor:
            return torch.randn(shape, dtype=dtype, generator=generator, device=generator.device)

        widest = max(1, _COMPARED_NUMBERS // (max(most, kind.K) * _COLUMNS)) * _COLUMNS
        N = kind.N if widest >= kind.N else widest - _COLUMNS + kind.N % _COLUMNS  # as well aligned
        x, b = draw(_OTHERS + most, kind.K), draw(kind.K, N)
        b = b if kind.by_rows else b.t().contiguous().t()
        bias = draw(N, dtype=kind.out_dtype) if kind.has_bias else None
        expected, found = (torch.empty(len(x), N, dtype=kind.out_dtype, device=x.device) for _ in range(2))
        self.run(self.reference, x, b, expected, bias, None, 1.0, 0.0)
        for rows in {1, most // 2 + 1, most}:
            part = slice(_OTHERS - 1, _OTHERS - 1 + rows)  # from an odd place on
            try:
                self.run(algorithm, x[part], b, found[part], bias, None, 1.0, 0.0)
            except RuntimeError:  # it doesn't take these sizes
                return False
            if not torch.equal(found[part], expected[part]):
                return False
        return True

    def run(
        self, algorithm: Algorithm, x: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, start: Tensor | None,
        alpha: float, beta: float,
    ) -> None:  # fmt: skip
        """Write alpha * x @ b + beta * start + bias to `out`."""
        start = out if start is None else start
        strides = x.stride(0), b.stride(0 if self.kind.by_rows else 1), start.stride(0), out.stride(0)
        self.call(algorithm, (x.shape[0], out.shape[1], x.shape[1]), *strides).run(x, b, out, bias, start, alpha, beta)

    def call(
        self, algorithm: Algorithm, sizes: tuple[int, int, int], of_x: int, of_b: int, of_start: int, of_out: int
    ) -> _PreparedCall:
        """Return what calls on matrices of these sizes and strides share."""
        kind, (M, N, _) = self.kind, sizes
        matrices = _matrices(kind.dtype, kind.out_dtype, kind.by_rows, sizes, (of_x, of_b, of_out))
        start = _matrix(kind.out_dtype, N, M, of_start)
        number = c_double if kind.sums == _IN_FP64 else c_float
        return _PreparedCall(self._library, kind.device, self._handle, self._product, matrices, start, algorithm, number)


class _PreparedCall(NamedTuple):
    library: Library
    device: int
    handle: c_void_p
    product: c_void_p
    matrices: tuple[c_void_p, c_void_p, c_void_p]
    of_start: c_void_p
    algorithm: Algorithm
    number: type[c_float] | type[c_double]

    def run(self, x: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, start: Tensor, alpha: float, beta: float) -> None:
        alpha_, beta_ = self.number(alpha), self.number(beta)
        of_b, of_x, of_out = self.matrices
        with _lock:
            if bias is not None:
                place = c_void_p(bias.data_ptr())
                self.library.set(self.product, _BIAS, addressof(place), sizeof(place))
            status = self.library.multiply(
                self.handle, self.product, addressof(alpha_), b.data_ptr(), of_b, x.data_ptr(), of_x, addressof(beta_),
                start.data_ptr(), self.of_start, out.data_ptr(), of_out, addressof(self.algorithm), None, 0,
                torch._C._cuda_getCurrentRawStream(self.device),
            )  # fmt: skip
        self.library.check(status, "Matmul")


@lru_cache(4096)
def _products(kind: _Kind) -> _InvariantProducts:
    return _InvariantProducts(kind)


_calls: dict[tuple[Any, ...], _PreparedCall] = {}  # by the kind, the rows and the strides
_CALLS = 8192  # that are kept


def _prepare(key: tuple[Any, ...]) -> _PreparedCall:
    *kind, M, of_x, of_b, of_start, of_out = key
    products = _products(_Kind(*kind))
    known = products.algorithm(M)
    sizes = M, products.kind.N, products.kind.K
    call = products.call(known or products.reference, sizes, of_x, of_b, of_start, of_out)
    if known is not None:
        if len(_calls) >= _CALLS:
            _calls.clear()
        _calls[key] = call
    return call


def _alignment(kind: _Kind) -> int:
    """Return what all rows of a kind's matrices are aligned to, in bytes."""
    size, row_of_b = kind.dtype.itemsize, kind.N if kind.by_rows else kind.K
    rows = kind.K * size, row_of_b * size, kind.N * kind.out_dtype.itemsize
    return size if any(row % _ALIGNMENT for row in rows) else _ALIGNMENT


@lru_cache(8192)
def _matrix(dtype: torch.dtype, rows: int, columns: int, stride: int) -> c_void_p:
    return loaded().matrix(dtype, rows, columns, max(stride, rows))


def _matrices(
    dtype: torch.dtype, out_dtype: torch.dtype, by_rows: bool, sizes: tuple[int, int, int], strides: Sequence[int]
) -> tuple[c_void_p, c_void_p, c_void_p]:
    """Return the layouts of b, x and the product. Row-major x @ b is column-major b.T @ x.T, so b is cuBLAS's first operand."""
    M, N, K = sizes
    of_x, of_b, of_out = strides
    b = _matrix(dtype, N, K, of_b) if by_rows else _matrix(dtype, K, N, of_b)
    return b, _matrix(dtype, K, M, of_x), _matrix(out_dtype, N, M, of_out)


def _fits(t: Tensor, rows: int = 0) -> bool:
    """Whether the kernels that suit a matrix's sizes can read it where it lies. Its dimension `rows` has the larger stride."""
    shape, strides, size = t.shape, t.stride(), t.element_size()
    row, stride = shape[1 - rows], strides[rows]
    if strides[1 - rows] != 1 or (stride < row and shape[rows] > 1):
        return False
    return row * size % _ALIGNMENT != 0 or (t.data_ptr() | stride * size) % _ALIGNMENT == 0


def _copied(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)


def _on_cuda(x: Tensor, b: Tensor, out: Tensor, start: Tensor | None, alpha: float, beta: float) -> None:
    device = x.get_device()
    if device != torch._C._cuda_getDevice():  # cuBLAS launches on the current device
        with torch.cuda.device(device):
            return _on_cuda(x, b, out, start, alpha, beta)
    if not _fits(out):
        whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        _on_cuda(x, b, whole, start, alpha, beta)
        out.copy_(whole)
        return None
    (M, K), N = x.shape, b.shape[1]
    x = x if _fits(x) else _copied(x)
    by_rows = b.stride(1) == 1 and N > 1
    if not _fits(b, 0 if by_rows else 1):
        b, by_rows = _copied(b), True
    dtype, out_dtype, bias = x.dtype, out.dtype, None
    if start is None:
        start = out
    elif start.dim() == 1 and start.shape[0] == N and beta == 1 and dtype.itemsize == 2:
        bias, start, beta = start.to(out_dtype), out, 0.0
        bias = bias if bias.is_contiguous() and bias.data_ptr() % _ALIGNMENT == 0 else bias.clone()
    elif start.shape != out.shape or start.dtype is not out_dtype or not _fits(start):
        start = out.copy_(start)
    sums = _IN_FP64 if dtype is torch.float64 else _IN_FP32
    if dtype is torch.float32 and torch._C._get_cublas_allow_tf32():
        sums = _IN_TF32
    kind = device, dtype, out_dtype, by_rows, N, K, bias is not None, sums
    key = *kind, M, x.stride(0), b.stride(0 if by_rows else 1), start.stride(0), out.stride(0)
    (_calls.get(key) or _prepare(key)).run(x, b, out, bias, start, alpha, beta)
    return None


# ---- CPU ----


def _on_cpu(
    raw: _Raw, keyset: Any, x: Tensor, b: Tensor, start: Tensor | None, alpha: float, beta: float
) -> Tensor:  # fmt: skip
    M, N = x.shape[0], b.shape[1]
    whole, width = ceil_div(M, _CPU_ROWS) * _CPU_ROWS, N
    if x.dtype is torch.float64 or (x.dtype is torch.float32 and N < _CPU_COLUMNS):
        width = ceil_div(N, _CPU_COLUMNS) * _CPU_COLUMNS
        b = _filled_up(b.t(), width).t()
    y = x.new_empty(whole, width)
    x = _filled_up(x, whole)
    if start is not None:
        start = _filled_up(_filled_up(start.expand(M, N), whole).t(), width).t()
    for at in range(0, whole, _CPU_ROWS):
        rows = slice(at, at + _CPU_ROWS)
        if start is None:
            raw["mm.out"].call_boxed(keyset, x[rows], b, out=y[rows])
        else:
            raw["addmm.out"].call_boxed(keyset, start[rows], x[rows], b, beta=beta, alpha=alpha, out=y[rows])
    return y[:M] if width == N else y[:M, :N].contiguous()


def _filled_up(t: Tensor, rows: int) -> Tensor:
    """Return a contiguous matrix with zeros below."""
    if t.shape[0] == rows:
        return t.contiguous()
    return torch.cat([t, t.new_zeros(rows - t.shape[0], t.shape[1])])


# ---- in place of aten's ----

_Raw = dict[str, Any]  # PyTorch's kernels, by the names of ops
_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _takes(
    x: Tensor, b: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None, start: Tensor | None = None
) -> bool:  # fmt: skip
    """Whether a product's rows are promised their bits. A weight's gradient's are not, and what is wrong PyTorch says."""
    if not invariant() or x.dim() != 2 or b.dim() != 2 or x.shape[1] != b.shape[0] or x.dtype is not b.dtype:
        return False
    if x.dtype not in _TYPES or x.device != b.device or not x.numel() or not b.numel() or _is_transposed(x):
        return False
    dtype, shape = dtype or x.dtype, (x.shape[0], b.shape[1])
    if out is not None and (out.dtype is not dtype or out.device != x.device or (out.numel() > 0 and out.shape != shape)):
        return False
    if start is None:
        return True
    fits = start.dim() <= 2 and all(
        mine in (1, theirs) for mine, theirs in zip(reversed(start.shape), reversed(shape), strict=False)
    )
    return fits and start.device == x.device and start.dtype in (x.dtype, dtype)


def _is_transposed(x: Tensor) -> bool:
    """Whether x is a matrix of rows, transposed, as in a weight's gradient."""
    rows, columns = x.stride()
    return rows == 1 and x.shape[1] > 1 and columns >= x.shape[0]


def _product(
    raw: _Raw, keyset: Any, x: Tensor, b: Tensor, *,
    out: Tensor | None = None, dtype: torch.dtype | None = None, start: Tensor | None = None, alpha: float = 1, beta: float = 0,
) -> Tensor:  # fmt: skip
    shape = x.shape[0], b.shape[1]
    start = None if beta == 0 else start
    if out is not None and out.shape != shape:
        out.resize_(shape)
    if not x.is_cuda:
        y = _on_cpu(raw, keyset, x, b, start, alpha, beta)
        return y if out is None else out.copy_(y)
    y = torch.empty(shape, dtype=dtype or x.dtype, device=x.device) if out is None else out
    _on_cuda(x, b, y, start, alpha, beta)
    return y


def _mm(name: str, raw: _Raw) -> Callable[..., Tensor]:
    def run(keyset: Any, x: Tensor, b: Tensor, *dtype: torch.dtype, **out: Any) -> Tensor:
        if not _takes(x, b, dtype[0] if dtype else None, **out):
            return raw[name].call_boxed(keyset, x, b, *dtype, **out)  # type: ignore[no-any-return]
        return _product(raw, keyset, x, b, dtype=dtype[0] if dtype else None, **out)

    return run


def _addmm(name: str, raw: _Raw) -> Callable[..., Tensor]:
    def run(
        keyset: Any, start: Tensor, x: Tensor, b: Tensor, *dtype: torch.dtype, beta: float = 1, alpha: float = 1, **out: Any
    ) -> Tensor:  # fmt: skip
        into: dict[str, Any] = {"out": start} if name == "addmm_" else out
        if not _takes(x, b, dtype[0] if dtype else None, into.get("out"), start) or (
            name == "addmm_" and start.shape != (x.shape[0], b.shape[1])
        ):
            options: dict[str, Any] = {"beta": beta, "alpha": alpha, **out}
            return raw[name].call_boxed(keyset, start, x, b, *dtype, **options)  # type: ignore[no-any-return]
        return _product(raw, keyset, x, b, dtype=dtype[0] if dtype else None, start=start, alpha=alpha, beta=beta, **into)

    return run


def _bmm(name: str, raw: _Raw) -> Callable[..., Tensor]:
    def run(keyset: Any, x: Tensor, b: Tensor) -> Tensor:
        if invariant() and x.dim() == b.dim() == 3 and len(x) == len(b) and (len(b) == 1 or b.stride(0) == 0):
            rows, matrix = x.reshape(-1, x.shape[2]), b[0]  # a matrix for all rows, as PyTorch calls it without gradients
            if _takes(rows, matrix):
                return _product(raw, keyset, rows, matrix).view(*x.shape[:2], matrix.shape[1])
        return raw[name].call_boxed(keyset, x, b)  # type: ignore[no-any-return]

    return run


def _linear(raw: Any) -> Callable[..., Tensor]:
    """F.linear of three dimensions as that of all rows: PyTorch rounds twice, before and after the bias, where they lie apart."""

    def run(keyset: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not invariant() or type(x) not in (Tensor, Parameter) or not x.dim() or weight.dim() != 2 or under_functorch():
            return raw.call_boxed(keyset, x, weight, bias)  # type: ignore[no-any-return]
        rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
        y: Tensor = raw.call_boxed(keyset, rows, weight, bias)
        if y.requires_grad:
            y.register_hook(_by_rows)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])

    return run


def _by_rows(dy: Tensor) -> Tensor:
    """Return a gradient that can't be taken for a transposed one."""
    return dy.contiguous() if _is_transposed(dy) else dy


_FORMS = "", ".out", ".dtype", ".dtype_out"
_REPLACED = {f"{op}{form}": make for op, make in (("mm", _mm), ("addmm", _addmm)) for form in _FORMS}
_REPLACED |= {"addmm_": _addmm, "bmm": _bmm}


class _Replacement:
    """Ours in place of aten's kernels, from the first block or change that asks for it until none does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: torch.library.Library | None = None

    def settle(self) -> None:
        with self._lock:
            wanted = INVARIANT.process or INVARIANT.has_blocks
            if wanted and self._library is None:
                self._library = self._put()
            elif not wanted and self._library is not None:
                self._library._destroy()
                self._library = None

    def _put(self) -> torch.library.Library:
        library, has_kernel = torch.library.Library("aten", "IMPL"), torch._C._dispatch_has_kernel_for_dispatch_key
        linear = _linear(torch.library.get_kernel("aten::linear", "AutogradCPU"))  # PyTorch's, the same for all devices
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            for key in ("CPU", "CUDA"):
                names = [name for name in _REPLACED if has_kernel(f"aten::{name}", key)]
                raw = {name: torch.library.get_kernel(f"aten::{name}", key) for name in names}
                for name in names:
                    library.impl(name, _REPLACED[name](name, raw), key, with_keyset=True)
            library.impl("linear", linear, "CompositeImplicitAutograd", with_keyset=True)
        return library


_replacement = _Replacement()


class BatchInvariance(SettingChange[bool]):
    """What `batch_invariant` returns."""

    _entering = False

    def __init__(self, on: bool) -> None:
        super().__init__(INVARIANT, on)
        _replacement.settle()

    def undo(self) -> None:
        super().undo()
        if not self._entering:
            _replacement.settle()

    def __enter__(self) -> None:
        self._entering = True  # what the process has is taken back and set anew in the block: ours stay in between
        super().__enter__()
        self._entering = False
        _replacement.settle()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        _replacement.settle()


def batch_invariant(on: bool = True) -> BatchInvariance:
    """Give each row the same bits whatever else is in its batch, from now on or, as a context manager, within the block.

        onepass.batch_invariant()                 # everything from here
        with onepass.batch_invariant(): ...       # and back to what it was

    A row is a token, and for attention a document. Its results and its part of inputs' gradients then depend neither on the
    number of rows nor on its place among them. The gradients of weights depend on the rows and their order. What can't keep
    this raises. From now on means the whole process, all threads; a block is its thread's own, as `use_backend`'s is.

    While it is on, PyTorch's products with a matrix are ours, on CPUs and CUDA GPUs. docs/equal-bits.md says what is promised,
    and what it costs.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("onepass.batch_invariant() must be called outside of compiled code")
    if not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(
            f"onepass.batch_invariant() needs a PyTorch with torch.library.get_kernel, but this is {torch.__version__}"
        )
    if on and torch.cuda.is_available() and isinstance(reason := load(), str):
        raise RuntimeError(f"onepass.batch_invariant() has no products: {reason}")
    return BatchInvariance(on)
