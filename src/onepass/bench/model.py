"""The data of the benchmark: what a case file defines, and the results of measuring it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


class Columns(tuple[Tensor, ...]):
    """One output as tensors of its columns, of a contender that makes q, k and v apart: joining them is not its work."""


Result = Tensor | tuple[Tensor, ...]
Call = Callable[..., Result]  # takes the case's tensors in their order
FP8 = " fp8"  # the end of variants whose products are in eight bits
_BY_CUTE = frozenset({"QuACK", "flash-attn 4", "Liger CuTe", "Liger Hopper", "cuDNN flex"})  # contenders: seconds for each shape


@dataclass(frozen=True)
class BenchCase:
    """One shape of one variant of an op, and the bytes that every implementation must move."""

    op: str
    variant: str  # what the op computes, such as an activation; CPU times are measured once for each variant
    shape: tuple[int, ...]  # (rows, width), as the case file understands them
    dtype: torch.dtype
    forward_bytes: int
    backward_bytes: int  # 0 where there is no backward
    fp8: bool = False  # results are rounded to eight bits, or are products of such

    @property
    def kind(self) -> str:
        """The variant without its precision."""
        return self.variant.removesuffix(FP8)

    @property
    def name(self) -> str:
        return f"{self.variant} {'x'.join(str(n) for n in self.shape)}"


@dataclass
class Inputs:
    """The tensors of one call, in argument order, and the incoming gradients of its outputs."""

    tensors: dict[str, Tensor]  # those with requires_grad are differentiated
    by_row: frozenset[str]  # tensors with one row for each output row; the gradients of others are sums over rows
    grads: dict[str, Tensor]  # output name -> incoming gradient, in the order of the outputs
    trained: bool = False  # differentiate by .backward(), which adds parameters' gradients to main_grad; else by autograd.grad
    summed: frozenset[str] = frozenset()  # outputs that are sums over rows; for a chunk of rows the formula returns a part
    row_elements: int = 0  # elements of the formula's largest intermediate for a row, if above those of inputs and outputs

    @property
    def asked(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}

    def fresh_grads(self) -> list[Tensor]:
        """Return copies of the incoming gradients for one backward, as some contenders overwrite them."""
        return [grad.clone() for grad in self.grads.values()]


def outputs_of(result: Result) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def differentiate(result: Result, asked: Sequence[Tensor], incoming: Sequence[Tensor], trained: bool) -> tuple[Tensor, ...]:
    """Return the gradients of `asked`, from autograd.grad, or with `trained` from main_grad or .grad."""
    if not asked:
        return ()
    if isinstance(result, Columns):
        incoming = incoming[0].split([part.shape[-1] for part in result], -1)
    if not trained:
        return torch.autograd.grad(result, asked, incoming)
    torch.autograd.backward(result, incoming)
    grads: tuple[Tensor, ...] = tuple(getattr(tensor, "main_grad", tensor.grad) for tensor in asked)  # type: ignore[misc]
    for tensor in asked:
        tensor.grad = None
    return grads


@dataclass(frozen=True)
class Contender:
    """One implementation to compare. `make` imports and compiles, and may raise: the run shows the error and continues."""

    name: str
    make: Callable[[BenchCase], Call]
    package: str | None = None  # the package that it needs, a key of peers.PACKAGES; if not installed, it is left out
    ours: bool = False
    compiles: bool = False  # needs inductor and, on a CPU, a C++ compiler
    floor: bool = False  # does only a part of the work, as a lower bound of the time; its result is not checked
    lacks: str | None = None  # why it can't run this case here: said below the table, in place of a row

    @property
    def slow_start(self) -> bool:
        """Whether it compiles for seconds, in one thread at a time: --quick leaves it out."""
        return self.compiles or self.name in _BY_CUTE


def worst(errors: Iterable[float]) -> float | None:
    """Return the largest, or NaN if there is one: max alone may drop it. None if there are none."""
    return max(errors, key=lambda error: (error != error, error), default=None)


@dataclass
class Measured:
    """One contender's figures on one case. If it is wrong or raised, it has errors or a message and no times."""

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
    forward_graph_us: float | None = None  # the GPU time of one call in a CUDA graph of several
    backward_graph_us: float | None = None
    both_of_reference: float | None = None  # forward + backward (if there is one), relative to the reference's
    peak_mib: float | None = None
    kept_mib: float | None = None  # saved for backward: what forward leaves allocated beyond inputs and outputs
    errors: dict[str, float] = field(default_factory=dict)  # output or gradient -> relative RMS error against fp64
    allowed: dict[str, float] = field(default_factory=dict)

    @property
    def both_ms(self) -> float | None:
        return None if self.forward_ms is None or self.backward_ms is None else self.forward_ms + self.backward_ms

    @property
    def worst_error(self) -> float | None:
        return worst(self.errors.values())


@dataclass
class CaseResult:
    case: BenchCase
    copy: Measured  # plain copies of as many bytes as the case moves
    rows: list[Measured]
    reference: str | None = None  # OpBench.reference_of
    left_out: dict[str, str] = field(default_factory=dict)  # contender -> why it has no row


@dataclass
class CpuTime:
    """The CPU time of a call on a tiny input, in microseconds: forward with an autograd graph, and forward + backward."""

    name: str  # a contender, or a PyTorch call
    forward_us: float
    both_us: float


@dataclass
class CpuTimes:
    """The CPU times of one variant's contenders."""

    case: BenchCase
    rows: list[CpuTime]
