"""Repair Triton's CPU interpreter. Import this with TRITON_INTERPRET=1 set before onepass is imported.

    os.environ["TRITON_INTERPRET"] = "1"        # before anything imports onepass or triton
    import onepass.testing.interpreter

Triton's interpreter has these faults, from 3.5 to 3.9, those of bf16 without an error. This module repairs them:

- It stores bf16 as bit patterns. Casts to bf16 truncate, or copy integers as bits. Here they round to nearest even.
- `tl.dot` multiplies the bit patterns of bf16. Here it converts them to fp32 first.
- numpy sums rows of a product in orders that depend on their place. Here sums are fp64, and a row's bits are its own, as a GPU's.
- Other arithmetic on bf16 uses the bit patterns too. Here it raises. No kernel needs it: kernels convert to fp32 after a load.
- A comparison keeps its operands' type, and a mask made of it their bytes: masks of floats, which `&` refuses. Here it is int1.
- `range(runtime_argument)` raises under numpy >= 2.4. Here it works.
- A launch copies tensors to the host and back, which a reference cycle keeps alive. Without a GPU, here it doesn't.
- numpy warns of overflows and NaN, which are ordinary in fp32 arithmetic on a GPU. A launch silences these warnings.
- Each call of a device function patches the whole language again, most of a program's cost. Here the first launch does, for good.
- Each function is parsed and compiled again, though only its module is new, as in a mutant. Here equal code is compiled once.
- Types and shapes are made again for each value, most of the remaining cost. Here they are cached, and operators of types that
  have met before are numpy's (`interpreter_types.py`). So are loads, stores and `tl.where` (`interpreter_calls.py`).
- Programs run one after another, so a program that waits for another would hang. Here it yields to the others
  (`kernels/grid_sync.py`). Programs that wait for an event that never comes raise.
- 3.9 takes no tensor out of a constexpr, which `constexpr * tensor` puts there. Here the product is the tensor.
- 3.5 wants a descriptor's strides to be multiples of 16 elements. Here it wants 16 bytes, as a GPU does.
- @triton.autotune asks a driver for the device. A stub driver answers where there is no GPU.

A read or write outside of a kernel's tensors raises (`interpreter_bounds.py`).

Not repaired: libdevice, inline assembly, bf16 atomics and `tl.dot_scaled`. `tl.maximum` keeps the NaN that a GPU drops, before
Triton 3.8. A program's cost hardly depends on its block size, so test with few programs of large blocks.
"""

from __future__ import annotations

import inspect
import os
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from onepass.kernels import grid_sync
from onepass.kernels.language import INTERPRETED, tl, triton
from onepass.runtime.errors import install_hint

if triton is None:
    raise ImportError(f"onepass.testing.interpreter needs triton: {install_hint('triton,test')}")
if not INTERPRETED or isinstance(tl.cdiv, triton.runtime.JITFunction):
    raise ImportError(
        "onepass.testing.interpreter needs TRITON_INTERPRET=1 in the environment before onepass or triton is imported: "
        "the kernels of this process are already compiled ones"
    )

import triton.runtime.interpreter as interpreter

from onepass.testing import interpreter_bounds, interpreter_calls, interpreter_types

_Builder: Any = interpreter.InterpreterBuilder
_Handle: Any = interpreter.TensorHandle


# ---- bf16 ----


def _is_bf16(handle: Any) -> bool:
    return isinstance(handle, _Handle) and bool(handle.dtype.scalar == tl.bfloat16)


def _widened(handle: Any) -> Any:
    """Return a bf16 handle as an fp32 one. Return other handles unchanged."""
    if not _is_bf16(handle):
        return handle
    bits = np.asarray(handle.data).astype(np.uint32) << 16
    return _Handle(bits.view(np.float32), tl.float32)


def _rounded(handle: Any) -> Any:
    """Return a handle of any dtype as a bf16 one, rounded to nearest even."""
    values = torch.from_numpy(np.array(handle.data, order="C").astype(np.float32))
    return _Handle(values.bfloat16().view(torch.uint16).numpy(), tl.bfloat16)


_stock_cast = _Builder.cast_impl
_stock_float_cast = _Builder.create_fp_to_fp
_stock_dot = _Builder.create_dot


def _cast(self: Any, source: Any, to: Any) -> Any:
    if to.scalar == tl.bfloat16:
        return source if _is_bf16(source) else _rounded(source)
    return _stock_cast(self, _widened(source), to)


def _float_cast(self: Any, source: Any, to: Any, rounding: Any) -> Any:
    nearest = getattr(rounding, "name", "RTNE") == "RTNE"
    if to.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32 and nearest:
        return _rounded(source)
    return _stock_float_cast(self, source, to, rounding)


def _dot(self: Any, a: Any, b: Any, sums: Any, *rest: Any) -> Any:
    a, b = _widened(a), _widened(b)
    if a.dtype.primitive_bitwidth == 8:
        return _stock_dot(self, a, b, sums, *rest)
    product = np.matmul(a.data, b.data, dtype=np.float64) + sums.data
    return _Handle(product.astype(sums.data.dtype), sums.dtype.scalar)


def _repaired(stock: Any) -> Any:
    """Wrap unary_op or binary_op: raise for bf16, whose bit patterns the stock one computes with. Give comparisons their type."""

    def op(self: Any, *operands: Any) -> Any:
        if any(_is_bf16(operand) for operand in operands):
            raise TypeError("arithmetic on bf16, which the interpreter can't do: go to fp32 right after the load")
        found = stock(self, *operands)
        if found.data.dtype == np.bool_:
            found.dtype = tl.int1
        return found

    return op


# ---- the language, patched once ----

_patch_tensor: Any = interpreter._patch_lang_tensor
_patch_language: Any = interpreter._patch_lang
_EVERYWHERE = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # stands for a function with both among its globals


def _patch_tensor_with_index(tensor: Any, *scope: Any) -> None:
    """Apply the stock patches, and give scalars, which are stored as arrays of one element, `__index__`."""
    _patch_tensor(tensor, *scope)

    def index(x: Any) -> int:
        return int(np.asarray(x.handle.data).reshape(-1)[0])

    if scope:
        scope[0].set_attr(tensor, "__index__", index)
    else:  # Triton 3.5
        tensor.__index__ = index


class _Patched:
    """The scope of patches that stay, as Triton 3.5's did: to set and restore them takes half a millisecond a launch."""

    def restore(self) -> None: ...


@cache
def _patch_once() -> _Patched:
    _patch_language(_EVERYWHERE)
    interpreter_types.patch_operators(tl.tensor)
    interpreter_calls.patch_functions(tl)
    return _Patched()


def _validate_descriptor(self: Any) -> None:
    """Take the place of Triton 3.5's check, which wants strides of 16 elements rather than bytes."""
    width = self.base.dtype.element_ty.primitive_bitwidth // 8
    steps = [int(self.base.data.item()), *(int(stride.data.item()) * width for stride in self.strides[:-1])]
    assert not any(step % 16 for step in steps), "a descriptor's base and strides must be multiples of 16 bytes"
    assert self.strides[-1].data.item() == 1, "a descriptor's last stride must be 1"


# ---- functions, whose assignments the interpreter rewrites ----

_stock_rewrite = interpreter.FunctionRewriter.rewrite_ast
_rewritten: dict[types.CodeType, types.CodeType] = {}


def _rewrite(self: Any) -> Any:
    """Return the rewritten function. What equal code of another module has become is what this becomes."""
    found = _rewritten.get(self.fn.__code__)
    if found is None:
        made = _stock_rewrite(self)
        _rewritten[self.fn.__code__] = made.__code__
        return made
    own = self.fn.__globals__
    own.update({name: value for name, value in vars(interpreter).items() if name not in own})
    function = types.FunctionType(found, own, self.fn.__name__, self.fn.__defaults__)
    function.__annotations__ = self.fn.__annotations__  # which arguments are constants
    return function


# ---- launches ----

_stock_launch = interpreter.GridExecutor.__call__
_one_launch = threading.RLock()  # the interpreter has one builder, whose tensors and program all launches share


def _launch_quietly(self: Any, *args: Any, **kwargs: Any) -> None:
    with _one_launch:
        _launch(self, *args, **kwargs)


def _launch(self: Any, *args: Any, **kwargs: Any) -> None:
    function = self.fn
    self.fn = _Launched(function)
    interpreter_bounds.reached.launch(function.__name__, [*args, *kwargs.values()])
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
            _stock_launch(self, *args, **kwargs)
    except interpreter.InterpreterError as error:
        raise interpreter_bounds.cause_of(error) from None
    finally:
        self.fn = function


def _arguments_as_they_are(self: Any, args: Any, kwargs: Any) -> Any:
    return args, kwargs


def _no_copy_back(self: Any, *_: Any) -> None:
    """Take the place of a copy from the host's memory to the same memory."""


# ---- programs that wait for each other ----

_running: Any = None  # the thread whose turn it is
_idle: list[_Thread] = []  # for reuse: to start a thread takes a tenth of the time of a program
if hasattr(os, "register_at_fork"):  # absent where there is no fork
    os.register_at_fork(after_in_child=_idle.clear)


class _Launched:
    """Replaces a kernel's function. It collects the programs of a launch, and at the last one runs them all in turns."""

    def __init__(self, function: Any) -> None:
        self.function, self.programs = function, deque()  # type: ignore[var-annotated]
        self.__name__, self.__signature__ = function.__name__, inspect.signature(function)  # Triton reads both

    def __call__(self, **arguments: Any) -> None:
        builder = interpreter.interpreter_builder
        self.programs.append((builder.grid_idx, partial(self.function, **arguments)))
        if builder.grid_idx == tuple(size - 1 for size in builder.grid_dim):
            _take_turns(self.programs)


class _Thread:
    """A thread that runs programs one after another. A program that waits blocks its thread; another thread runs the rest."""

    def __init__(self) -> None:
        self.turn, self.back = threading.Lock(), threading.Lock()
        self.programs: deque[tuple[tuple[int, ...], Callable[[], None]]] = deque()
        self.place: tuple[int, ...] = ()
        self.failure: BaseException | None = None
        self.ended = 0  # programs that ended in this turn
        self.waits = self.given_up = False
        self.turn.acquire()
        self.back.acquire()
        threading.Thread(target=self._run, daemon=True).start()

    def go_on(self) -> None:
        """Let the thread run until all its programs have ended, or one waits or fails."""
        global _running
        _running, self.ended, self.waits = self, 0, False
        interpreter.interpreter_builder.grid_idx = self.place  # for the program that waited. New ones set their own
        self.turn.release()
        self.back.acquire()

    def _run(self) -> None:
        with np.errstate(all="ignore"):  # numpy's error state is per thread
            while not self.given_up:
                self.turn.acquire()
                try:
                    self._run_programs()
                except BaseException as failure:
                    self.failure, self.given_up = failure, True
                self.back.release()

    def _run_programs(self) -> None:
        while self.programs:
            self.place, program = self.programs.popleft()
            interpreter.interpreter_builder.grid_idx = self.place
            program()
            self.ended += 1

    def wait(self) -> None:
        self.waits = True
        self.programs = deque()  # another thread runs the rest
        self.back.release()
        self.turn.acquire()
        if self.given_up:
            raise SystemExit


def _take_turns(programs: deque[tuple[tuple[int, ...], Callable[[], None]]]) -> None:
    waiting: deque[_Thread] = deque()
    in_vain = 0
    while programs or waiting:
        if programs:
            thread = _idle.pop() if _idle else _Thread()
            thread.programs = programs
        else:
            thread = waiting.popleft()
        thread.go_on()
        if thread.failure is not None:
            _give_up(waiting)
            raise thread.failure
        (waiting if thread.waits else _idle).append(thread)
        in_vain = 0 if thread.ended else in_vain + 1
        if in_vain > _PATIENCE * (len(waiting) + 1):
            _give_up(waiting)
            raise RuntimeError(f"{len(waiting)} programs wait for each other, or for what never comes")


_PATIENCE = 200  # rounds over all waiting programs in which none ends. In a round a program may only get to its next wait


def _give_up(waiting: Iterable[_Thread]) -> None:
    for thread in waiting:
        thread.given_up = True
        thread.turn.release()


def _yield_to_programs() -> int:
    _running.wait()
    return 0


class _NoDriver:
    """A stub driver for @triton.autotune where there is no GPU."""

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        def benchmark(function: Any, quantiles: Any = None, **_: Any) -> list[float]:
            function()
            return [1.0] * 3

        return benchmark


def _repair() -> None:
    interpreter_types.install()
    interpreter_calls.install()
    interpreter_bounds.install(_Builder)
    _Builder.cast_impl, _Builder.create_fp_to_fp, _Builder.create_dot = _cast, _float_cast, _dot
    _Builder.binary_op = _repaired(_Builder.binary_op)
    _Builder.unary_op = _repaired(_Builder.unary_op)
    interpreter._patch_lang_tensor = _patch_tensor_with_index
    interpreter.FunctionRewriter.rewrite_ast = _rewrite
    interpreter._patch_lang = lambda function: _patch_once()
    if not hasattr(interpreter, "_LangPatchScope"):  # Triton 3.5
        interpreter.TensorDescHandle.validate = _validate_descriptor
    interpreter.GridExecutor.__call__ = _launch_quietly
    grid_sync.yield_to_programs = _yield_to_programs
    if not torch.cuda.is_available():
        interpreter.GridExecutor._init_args_hst = _arguments_as_they_are
        interpreter.GridExecutor._restore_args_dev = _no_copy_back
        triton.runtime.driver.set_active(_NoDriver())


_repair()
