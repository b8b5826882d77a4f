"""What a case file fills in, and what comes out of measuring it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

Result = Tensor | tuple[Tensor, ...]
Call = Callable[..., Result]  # takes the case's tensors in their order


@dataclass(frozen=True)
class BenchCase:
    """One shape of one variant of an op, and the bytes that nobody can do without."""

    op: str
    variant: str  # what the op does, say an activation: contenders' CPU time is measured once for each
    shape: tuple[int, ...]  # (rows, width), as the case file understands them
    dtype: torch.dtype
    forward_bytes: int
    backward_bytes: int

    @property
    def name(self) -> str:
        return f"{self.variant} {'x'.join(str(n) for n in self.shape)}"


@dataclass
class Inputs:
    """The tensors of one call, in its order, and the gradients that come back."""

    tensors: dict[str, Tensor]  # those that require a gradient are differentiated
    by_row: frozenset[str]  # have a row for each row of the outputs; the others are whole, their gradients summed over rows
    grads: dict[str, Tensor]  # for each output, by its name and in its order, the gradient that comes back
    trained: bool = False  # by .backward(), which gathers a parameter's gradient in its main_grad; else by autograd.grad
    summed: frozenset[str] = frozenset()  # outputs that are sums over the rows; the formula gives what some rows add to them
    row_elements: int = 0  # of what is made of a row on the way, where that is more than any input or output has

    @property
    def asked(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}

    def fresh_grads(self) -> list[Tensor]:
        """For one backward: some write their results over the gradients they are given."""
        return [grad.clone() for grad in self.grads.values()]


def outputs_of(result: Result) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def differentiate(result: Result, asked: Sequence[Tensor], incoming: Sequence[Tensor], trained: bool) -> tuple[Tensor, ...]:
    """The gradients of those asked, wherever they are put."""
    if not trained:
        return torch.autograd.grad(result, asked, incoming)
    torch.autograd.backward(result, incoming)
    grads: tuple[Tensor, ...] = tuple(getattr(tensor, "main_grad", tensor.grad) for tensor in asked)  # type: ignore[misc]
    for tensor in asked:
        tensor.grad = None
    return grads


@dataclass(frozen=True)
class Contender:
    """Somebody's way to do it. `make` imports and compiles, and may raise: the run shows that and goes on."""

    name: str
    make: Callable[[BenchCase], Call]
    package: str | None = None  # the peer it needs, as peers.PACKAGES names it; without it the contender is absent
    ours: bool = False
    compiles: bool = False  # needs inductor and, on a CPU, a C++ compiler
    floor: bool = False  # does a part of the work, to say how long that takes at least: what it returns is not judged


@dataclass(frozen=True)
class OpBench:
    """All that the runner asks of a case file."""

    op: str
    cases: Callable[[torch.device, torch.dtype, bool], list[BenchCase]]  # device, dtype, quick
    inputs: Callable[[BenchCase, torch.device, torch.Generator], Inputs]
    contenders: Callable[[BenchCase], list[Contender]]
    formula: Callable[[BenchCase], Call]  # generic over types: exact in fp64, the baseline in fp32
    tiny: Callable[[BenchCase], BenchCase]  # the same variant, so small that only the CPU's time counts
    backend: Callable[[BenchCase, Inputs], str]  # which of our backends takes such a call
    without: dict[str, str] = field(default_factory=dict)  # packages with nothing to compare, and why
    baseline: Callable[[BenchCase], Call] | None = None  # in the case's own type: for matrix products, whose operands have it
    reference: str | None = None  # the contender whose time the others' is set against, where a copy says nothing
    around: Callable[[BenchCase], AbstractContextManager[None]] = lambda case: nullcontext()  # what a case's contenders run in


@dataclass
class Measured:
    """One contender on one case. Where it is wrong, or raised, there are errors or a message, and no speed."""

    contender: str
    ours: bool = False
    floor: bool = False  # see Contender
    status: str = "ok"  # "ok", "wrong", "error"
    message: str | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    forward_of_copy: float | None = None
    backward_of_copy: float | None = None
    cpu_forward_us: float | None = None
    cpu_both_us: float | None = None
    forward_graph_us: float | None = None  # the GPU's time of a call among others in a CUDA graph
    backward_graph_us: float | None = None
    both_of_reference: float | None = None  # forward and backward, over the same of the op's reference
    peak_mib: float | None = None
    kept_mib: float | None = None  # what forward leaves allocated beyond inputs and outputs: saved for backward
    errors: dict[str, float] = field(default_factory=dict)  # relative RMS against fp64, of each output and gradient
    allowed: dict[str, float] = field(default_factory=dict)

    @property
    def worst_error(self) -> float | None:
        # a NaN is the worst there is, and max() would not say so
        return max(self.errors.values(), key=lambda e: (e != e, e)) if self.errors else None


@dataclass
class CaseResult:
    case: BenchCase
    copy: Measured  # plain copies of as many bytes as the case moves
    rows: list[Measured]
    reference: str | None = None  # as the op's OpBench names it


@dataclass
class CpuTime:
    """The CPU time of a call on a tiny input, in microseconds: forward with a graph built, and forward and backward."""

    name: str  # a contender, or a reference
    forward_us: float
    both_us: float


@dataclass
class CpuTimes:
    """One variant's: who takes how long to say what is to be done."""

    case: BenchCase
    rows: list[CpuTime]
    references: list[CpuTime]
