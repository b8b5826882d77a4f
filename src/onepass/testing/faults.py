"""Faults in the middle of a step: an allocation that fails, a hook that raises, Ctrl-C, threads, a fork.

    step = op_step(subject)                          # or a Step of a model and its optimizer
    report = inject(step, allocation_faults(step))
    assert report.happened and not report.broken

After each fault, what must last is compared with what was there before. Where it differs, the error must name it. Then the step
runs again, without a fault, and must give what it gives from there.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from onepass.gradients.main_grad import _zeros
from onepass.testing.subject import Subject

# arguments that may carry main_grad
PARAMETERS = ("weight", "bias", "norm_weight", "norm_bias", "activation_bias", "lora.a", "lora.b")
_OURS = str(Path(__file__).parents[1]) + os.sep
_TESTING = _OURS + "testing" + os.sep
_ALLOCATIONS: tuple[tuple[Any, str], ...] = (
    *((torch, name) for name in ("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "full", "cat")),
    (Tensor, "new_empty"),
)
PRODUCTS: tuple[tuple[Any, str], ...] = (
    *((torch, name) for name in ("mm", "addmm", "matmul")),
    *((Tensor, name) for name in ("mm", "addmm_", "matmul", "__matmul__", "sum")),
    (torch.nn.functional, "linear"),
)
_FORK_SECONDS = 60

Results = Mapping[str, Tensor]


class InjectedError(RuntimeError):
    """What a hook raises."""


@dataclass
class Step:
    """Something that is done again and again.

    Args:
        run: does it, and returns its results by name.
        lasting: returns the tensors that a failed run must leave as they were, by name. They keep their memory.
        reset: makes ready for the next run, as a training loop does.
        prepare: runs before each run that is to fail, and not before the run after it.
    """

    name: str
    run: Callable[[], dict[str, Tensor]]
    lasting: Callable[[], dict[str, Tensor]]
    reset: Callable[[], None] = lambda: None
    prepare: Callable[[], None] = lambda: None


@dataclass
class Fault:
    """A context in which a step fails with `error`. It need not fail: what is pooled is not allocated each time."""

    name: str
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    error: type[BaseException]


@dataclass
class FaultReport:
    """How often a step failed, and in words what was not as it must be."""

    happened: int = 0
    broken: list[str] = field(default_factory=list)


def _copied(tensors: Results) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


def _restore(step: Step, before: Results) -> None:
    step.reset()
    with torch.no_grad():
        for name, t in step.lasting().items():
            t.copy_(before[name])


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))


def inject(step: Step, faults: Iterable[Fault], exempt: tuple[str, ...] = ()) -> FaultReport:
    """Run the step with each fault, and once more without. The lasting tensors end as they were, whatever is found.

    Args:
        exempt: endings of names of lasting tensors that a failed run may leave changed, as where `reset` or the next run clears
            them.
    """
    report = FaultReport()
    step.reset()
    before = _copied(step.lasting())
    expected = _copied(step.run())
    _restore(step, before)
    for fault in faults:
        step.prepare()
        _restore(step, before)
        try:
            with fault.context():
                step.run()
        except fault.error as error:
            report.happened += 1
            broken = [name for name, t in step.lasting().items() if not _same(t, before[name]) and not name.endswith(exempt)]
            words = [f"{name} is not as it was" for name in broken if not _names(str(error), name)]
            _restore(step, before)
            again = step.run()
            words += [f"the next step gives another {name}" for name in expected if not _same(again[name], expected[name])]
            report.broken += [f"{step.name}, {fault.name}, {error}: {what}" for what in words]
        _restore(step, before)
    return report


def _names(said: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name.rpartition(' ')[2])}\b", said) is not None


# ---- a step of one op ----


def op_step(subject: Subject) -> Step:
    """Return forward and backward of an op's sample. Parameters carry main_grad; the others' gradients are results."""
    tensors = subject.tensors()
    names = subject.names()
    asking = {name: t for name, t in zip(names, tensors, strict=True) if t.requires_grad}
    for name, t in asking.items():
        if name in PARAMETERS:
            t.main_grad = torch.linspace(-1, 1, t.numel(), device=t.device).view(t.shape)  # type: ignore[attr-defined]
            t.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def run() -> dict[str, Tensor]:
        ys = [y for y in subject.run(*tensors) if y.requires_grad]
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
        results = {f"y{i}": y.detach() for i, y in enumerate(ys)}
        for name, t in asking.items():
            results[f"gradient of {name}"] = t.main_grad if name in PARAMETERS else t.grad  # type: ignore[attr-defined,assignment]
        return results

    def lasting() -> dict[str, Tensor]:
        lasting_tensors = {name: t.detach() for name, t in zip(names, tensors, strict=True)}
        return lasting_tensors | {f"{name}'s main_grad": t.main_grad for name, t in asking.items() if hasattr(t, "main_grad")}

    def reset() -> None:
        for t in asking.values():
            t.grad = None
            if hasattr(t, "main_grad"):
                t.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    return Step(f"{subject.op.name} by {subject.backend}", run, lasting, reset)


# ---- out of memory ----


@dataclass
class AllocationCount:
    """Counts allocations, and fails one of them."""

    fail_at: int = -1
    seen: int = 0

    def count(self) -> None:
        self.seen += 1
        if self.seen - 1 == self.fail_at:
            raise torch.OutOfMemoryError("out of memory, by onepass.testing.faults")


@contextlib.contextmanager
def wrapped(functions: tuple[tuple[Any, str], ...], wrap: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Put what `wrap` makes of them in the place of functions, given as owner and name."""
    with contextlib.ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        yield


@contextlib.contextmanager
def _counting(functions: tuple[tuple[Any, str], ...], fail_at: int) -> Iterator[AllocationCount]:
    allocations = AllocationCount(fail_at)

    def counted(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            allocations.count()
            return stock(*args, **kwargs)

        return call

    with wrapped(functions, counted):
        yield allocations


def count_python_allocations(fail_at: int = -1) -> contextlib.AbstractContextManager[AllocationCount]:
    """Count the calls of functions that allocate, from Python. The one numbered `fail_at` raises."""
    return _counting(_ALLOCATIONS, fail_at)


class _CountOperators(TorchDispatchMode):
    def __init__(self, allocations: AllocationCount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocations = allocations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(returned.alias_info is None for returned in func._schema.returns):
            self.allocations.count()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def count_operator_allocations(fail_at: int = -1) -> Iterator[AllocationCount]:
    """Count operators with a new result, matrix products among them. The one numbered `fail_at` raises in place of running.

    Ops go through the dispatcher here, and allocations inside our registered ops are not seen.
    """
    allocations = AllocationCount(fail_at)
    with _CountOperators(allocations):
        yield allocations


def count_products(fail_at: int = -1) -> contextlib.AbstractContextManager[AllocationCount]:
    """Count matrix products that Python code calls, which allocate inside. The one numbered `fail_at` raises."""
    return _counting(PRODUCTS, fail_at)


COUNTERS = (count_python_allocations, count_products, count_operator_allocations)


def allocation_faults(step: Step, most: int | None = None) -> Iterator[Fault]:
    """Yield a fault for each allocation of the step in turn, as each of COUNTERS sees them, or for `most` of them.

    Those of the end come first: by then the most has been written.
    """
    before = _copied(step.lasting())
    for counter in COUNTERS:
        step.reset()
        with counter() as counted:
            step.run()
        _restore(step, before)
        for at in list(reversed(range(counted.seen)))[:: max(1, counted.seen // most) if most else 1]:
            name = f"allocation {at} of {counted.seen} ({counter.__name__})"
            yield Fault(name, lambda counter=counter, at=at: counter(at), torch.OutOfMemoryError)  # type: ignore[misc]


# ---- out of memory at each step of one backward ----

_MULTIPLY = ("mm", "addmm", "addmm_", "matmul", "__matmul__")  # their workspace is inside, also where they write to `out`


class MemorySteps(TorchFunctionMode):
    """Note the calls of PyTorch from Python that need memory, or fail in the place of one of them.

    noted = MemorySteps()
    noted.backward(loss())                              # noted.steps: its calls that allocate memory or multiply matrices
    for step in noted.steps:
        MemorySteps(fail_at=step).backward(loss())      # raises torch.OutOfMemoryError in the place of that call
    """

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.calls, self.fail_at, self.steps = 0, fail_at, list[int]()

    def backward(self, loss: Tensor) -> None:
        """Run loss.backward() on this thread. `Tensor.backward` is a call that modes see, which then see none of its calls."""
        _zeros.clear()  # kept from pass to pass: a step that the next one would not have
        with torch.autograd.set_multithreading_enabled(False), self:
            _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call, self.calls = self.calls, self.calls + 1
        if call == self.fail_at:
            raise torch.OutOfMemoryError("no memory, in a test")
        storages = _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _MULTIPLY or _storages(result) - storages:
            self.steps.append(call)
        return result


def _storages(values: Any) -> set[int]:
    storages, left = set[int](), [values]
    while left:  # PyTorch's `tree_leaves` takes longer than the call that is watched
        value = left.pop()
        if isinstance(value, Tensor):
            storages.add(value.untyped_storage()._cdata)
        elif isinstance(value, (list, tuple)):
            left.extend(value)
        elif isinstance(value, dict):
            left.extend(value.values())
    return storages


# ---- hooks that raise ----


def _raise(*args: Any) -> NoReturn:
    raise InjectedError("raised by a hook")


def hook_faults() -> Iterator[Fault]:
    """Yield faults of hooks on saved tensors: packing raises in forward, unpacking in backward."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    yield Fault("a pack hook raises", lambda: hooks(_raise, lambda t: t), InjectedError)
    yield Fault("an unpack hook raises", lambda: hooks(lambda t: t, _raise), InjectedError)


# ---- Ctrl-C ----


@dataclass
class LineCount:
    """Counts lines of onepass's code as they run, and interrupts before one of them."""

    interrupt_at: int = -1
    seen: int = 0
    where: str = ""

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_name in _kernel_names() or not frame.f_code.co_filename.startswith(_OURS):
            return None
        return None if frame.f_code.co_filename.startswith(_TESTING) else self._line

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen - 1 == self.interrupt_at:
                self.where = f"{frame.f_code.co_filename.removeprefix(_OURS)}:{frame.f_lineno}"
                raise KeyboardInterrupt(self.where)
        return self._line


_names_of_kernels: set[str] = set()


def _kernel_names() -> set[str]:
    """Return the names of Triton functions: a GPU runs them whole, and the interpreter line by line."""
    if not _names_of_kernels:
        for module in sys.modules.copy().values():
            if getattr(module, "__name__", "").startswith("onepass."):
                for value in vars(module).copy().values():
                    function = getattr(getattr(value, "jit", value), "fn", None)
                    if function is not None and hasattr(function, "__name__"):
                        _names_of_kernels.add(function.__name__)
        _names_of_kernels.add("")
    return _names_of_kernels


@contextlib.contextmanager
def interrupted(at: int = -1) -> Iterator[LineCount]:
    """Raise KeyboardInterrupt before line number `at` that runs in onepass, kernels aside. Count the lines."""
    lines, before = LineCount(at), sys.gettrace()
    sys.settrace(lines.trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def interrupt_faults(step: Step, samples: int, seed: int = 0) -> Iterator[Fault]:
    """Yield interrupts before `samples` random lines of the step, its first and last among them."""
    before = _copied(step.lasting())
    step.reset()
    step.run()  # what is made once, such as plans of launches, is made
    _restore(step, before)
    with interrupted() as lines:
        step.run()
    _restore(step, before)
    inner = random.Random(seed).sample(range(1, max(1, lines.seen - 1)), min(samples - 2, max(0, lines.seen - 2)))
    for at in sorted({0, lines.seen - 1, *inner}):
        yield Fault(f"interrupted at line {at} of {lines.seen}", lambda at=at: interrupted(at), KeyboardInterrupt)  # type: ignore[misc]


# ---- threads and forks ----


def broken_by_threads(make: Callable[[], Step], threads: int = 4, runs: int = 3) -> list[str]:
    """Run a step of each thread's own at the same time. Return what differs from one thread's results."""
    expected = _copied(make().run())
    broken: list[str] = []
    together = threading.Barrier(threads)
    cores = torch.get_num_threads()

    def work(step: Step) -> None:
        torch.set_num_threads(cores)  # OpenMP gives a new thread all cores, and small products other bits
        before = _copied(step.lasting())
        together.wait()
        try:
            for _ in range(runs):
                _restore(step, before)
                found = step.run()
                broken.extend(
                    f"{step.name}, threads: another {name}" for name in expected if not _same(found[name], expected[name])
                )
        except Exception as error:
            broken.append(f"{step.name}, threads: {type(error).__name__}: {error}")

    workers = [threading.Thread(target=work, args=(make(),)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return broken


def broken_by_fork(steps: list[Step]) -> list[str]:
    """Run steps in a fork of this process, after they ran here. Return what differs there. CPU only: CUDA does not fork."""
    expected = []
    for step in steps:
        before = _copied(step.lasting())
        step.reset()
        expected.append(_copied(step.run()))
        _restore(step, before)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks where there are threads
        child = os.fork()
    if not child:
        _report_from_fork(writing, steps, expected)
    os.close(writing)
    with os.fdopen(reading) as said:
        words = said.read()  # until the child ends
    _, status = os.waitpid(child, 0)
    return words.splitlines() + ([f"the fork ended with status {status}"] if status else [])


def _report_from_fork(writing: int, steps: list[Step], expected: list[dict[str, Tensor]]) -> NoReturn:
    """Run the steps, write what differs, and end this process without its parent's exit handlers."""
    import signal

    signal.alarm(_FORK_SECONDS)  # ends it if it hangs
    status = 1
    try:
        torch.set_num_threads(1)  # the parent's threads are not here
        for step, results in zip(steps, expected, strict=True):
            found = step.run()
            for name in results:
                if not _same(found[name], results[name]):
                    os.write(writing, f"{step.name}, fork: another {name}\n".encode())
        status = 0
    finally:
        os._exit(status)
