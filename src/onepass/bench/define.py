"""OpBench: an op's benchmark, of what its case file says. What the file doesn't say follows from the op's record.

The record (runtime/op.py) has the public function, which is the contender "onepass"; the formula, in the op's samples.py; and
`explain`, which says what backend runs the call. All three are called with the case's tensors and options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from onepass.bench import fp8
from onepass.bench.model import FP8, BenchCase, Call, Contender, Inputs
from onepass.bench.peers import compiled
from onepass.runtime.backend import explain, find_op
from onepass.runtime.fp8 import unfit_gpu
from onepass.runtime.fp8_recipe import Precision

Shape = tuple[int, ...]
ShapesOf = Mapping[str, Sequence[Shape]]  # by variant
Run = Callable[[Callable[..., Any]], Callable[..., Any]]  # compiles a function, or leaves it
Eager = Callable[[BenchCase, Run], Call]  # makes the call of code as people write it


class Shapes(NamedTuple):
    """The shapes of each variant. Cases of one variant follow each other, and reuse compiled kernels."""

    gpu: ShapesOf
    cpu: ShapesOf  # many CPUs multiply bf16 at 1 GFLOP/s
    gpu_quick: ShapesOf | None = None  # None: the first of each variant
    cpu_quick: ShapesOf | None = None

    def of(self, device: torch.device, quick: bool) -> ShapesOf:
        full, few = (self.gpu, self.gpu_quick) if device.type == "cuda" else (self.cpu, self.cpu_quick)
        if quick and few is None:
            return {variant: shapes[:1] for variant, shapes in full.items()}
        return full if few is None or not quick else few


def of_each(variants: Iterable[str], shapes: Sequence[Shape]) -> ShapesOf:
    """Return the shapes of variants that have the same."""
    return {variant: shapes for variant in variants}


class Random:
    """Draws tensors of normal numbers in the case's dtype. Called, it returns one that is not differentiated."""

    def __init__(self, case: BenchCase, device: torch.device, generator: torch.Generator) -> None:
        self.dtype, self.device, self.generator = case.dtype, device, generator

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def input(self, *shape: int) -> Tensor:
        return self(*shape).requires_grad_()

    def parameter(self, *shape: int) -> Parameter:
        return Parameter(self(*shape))

    def weight(self, outer: int, inner: int) -> Parameter:
        """Return a product's weight, which leaves numbers as large as they are."""
        return Parameter(self(outer, inner).mul_(inner**-0.5))

    def integers(self, top: int, *shape: int) -> Tensor:
        return torch.randint(top, shape, generator=self.generator, device=self.device)

    def rotations(self, tokens: int, width: int) -> dict[str, Tensor]:
        """Return tables of rotary positions."""
        speeds = 10000 ** -torch.arange(0, 1, 2 / width, device=self.device)
        angles = torch.arange(tokens, device=self.device)[:, None] * speeds
        return {"cos": angles.cos(), "sin": angles.sin()}


def give_main_grad(parameter: Tensor) -> None:
    """Give a parameter an fp32 main_grad, and a hook that adds .grad to it. onepass adds to main_grad and leaves no .grad."""
    main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            main_grad.add_(parameter.grad)
            parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)


@dataclass
class OpBench:
    """An op's benchmark: what its case file says, and what follows.

    Args:
        op: the name of the case file.
        tiny_shape: so small that the CPU's time dominates.
        bytes_moved: returns what forward and backward must move, for a variant, a shape and the bytes of a number.
        draw: returns the tensors of a call.
        peers: returns the contenders but onepass, in the order of the table's rows.
        name: returns the op's name in its record, where that is not `op`.
        keywords: returns the names of the last tensors, where the op takes them by name.
        ours, backend: in place of what follows from the record. With `weights`, `ours` gets a precision too.
        formula: the same. It works in any dtype: exact in fp64, the baseline in fp32.
        weights: places of the products' weights among the tensors. Cases in eight bits have a row for each recipe.
        baseline: for matrix products: rounds their operands to the case's dtype.
        reference: for compute-bound ops: the contender that times are relative to, in place of a copy.
        around: returns the context that contenders run in.
        without: says of packages why they have nothing to compare.
        in_fp8: all variants are in eight bits, not only those whose names say so.
    """

    op: str
    shapes: Shapes
    tiny_shape: Shape
    bytes_moved: Callable[[str, Shape, int], tuple[int, int]]
    draw: Callable[[BenchCase, Random], Inputs]
    peers: Callable[[BenchCase], list[Contender]]
    _: KW_ONLY
    name: Callable[[BenchCase], str] = lambda case: case.op
    options: Callable[[BenchCase], dict[str, Any]] = lambda case: {}
    keywords: Callable[[BenchCase], tuple[str, ...]] = lambda case: ()
    ours: Callable[..., Call] | None = None
    weights: Sequence[int] = ()
    formula: Callable[[BenchCase], Call] | None = None
    baseline: Callable[[BenchCase], Call] | None = None
    backend: Callable[[BenchCase, Inputs], str] | None = None
    reference: str | Callable[[BenchCase], str] | None = None
    around: Callable[[BenchCase], AbstractContextManager[None]] = lambda case: nullcontext()
    without: dict[str, str] = field(default_factory=dict)
    in_fp8: bool = False

    def case(self, variant: str, shape: Shape, dtype: torch.dtype) -> BenchCase:
        moved = self.bytes_moved(variant, shape, dtype.itemsize)
        return BenchCase(self.op, variant, shape, dtype, *moved, fp8=self.in_fp8 or variant.endswith(FP8))

    def tiny(self, case: BenchCase) -> BenchCase:
        return self.case(case.variant, self.tiny_shape, case.dtype)

    def cases(self, device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
        by_variant = self.shapes.of(device, quick).items()
        cases = [self.case(variant, shape, dtype) for variant, shapes in by_variant for shape in shapes]
        return [case for case in cases if not case.fp8 or has_fp8(device)]

    def inputs(self, case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
        return self.draw(case, Random(case, device, generator))

    def contenders(self, case: BenchCase) -> list[Contender]:
        make = self.ours or self._by_record
        ours = fp8.ours(case, make, self.weights) if self._has_recipes(case) else [Contender("onepass", make, ours=True)]
        return [*ours, *self.peers(case)]

    def formula_of(self, case: BenchCase) -> Call:
        if self.formula is not None:
            return self.formula(case)
        name = self.name(case)
        return self._bound(case, find_op(name).samples.SAMPLES[name].formula)

    def backend_of(self, case: BenchCase, inputs: Inputs) -> str:
        """Return the onepass backend that runs the call."""
        if self.backend is not None:
            return self.backend(case, inputs)
        explanation: Any = self._bound(case, partial(explain, self.name(case)))(*inputs.tensors.values())
        return str(explanation.backend)

    def reference_of(self, case: BenchCase) -> str | None:
        if self._has_recipes(case):
            return fp8.reference(case)
        return self.reference(case) if callable(self.reference) else self.reference

    def _has_recipes(self, case: BenchCase) -> bool:
        return case.fp8 and bool(self.weights)

    def _by_record(self, case: BenchCase, precision: Precision = None) -> Call:
        more = {} if precision is None else {"precision": precision}
        return self._bound(case, find_op(self.name(case)).function, **more)

    def _bound(self, case: BenchCase, function: Callable[..., Any], **more: Any) -> Call:
        return bind(function, self.options(case) | more, self.keywords(case))


def has_fp8(device: torch.device) -> bool:
    """Whether eight bits run on the device. A GPU that is named on a machine without one counts as one that has them."""
    return device.type != "cuda" or not torch.cuda.is_available() or unfit_gpu(device) is None


def bind(function: Callable[..., Any], options: dict[str, Any], keywords: tuple[str, ...] = ()) -> Call:
    """Return the function of a case's tensors, of which it takes the last by name."""
    if not keywords:
        return partial(function, **options)
    count = len(keywords)
    return lambda *tensors: function(*tensors[:-count], **dict(zip(keywords, tensors[-count:], strict=False)), **options)


def in_a_row(loss: Callable[..., Tensor]) -> Call:
    """Return a loss as shape [1]: results have a dimension of rows."""
    return lambda *tensors: loss(*tensors).view(1)


def as_written(eager: Eager) -> Callable[[BenchCase], Call]:
    """Return what makes the call that is not compiled."""
    return lambda case: eager(case, lambda function: function)


def by_pytorch(eager: Eager, name: str = "eager", lacks: str | None = None) -> list[Contender]:
    """Return the rows of code as people write it, and of the same compiled.

    Args:
        eager: returns the call of a case; its second argument compiles what is to be compiled of it, or leaves it.
        lacks: why the first can't run. See Contender.
    """
    compiles = Contender("torch.compile", lambda case: eager(case, compiled), compiles=True)
    return [Contender(name, as_written(eager), lacks=lacks), compiles]
