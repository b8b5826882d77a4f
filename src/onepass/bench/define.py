"""Make an op's benchmark of what its case file says. What the file doesn't say follows from the op's record.

The record (runtime/op.py) has the public function, which is the contender "onepass"; the formula, in the op's samples.py; and
`explain`, which says what backend runs the call. All three are called with the case's tensors and options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.bench import fp8
from onepass.bench.inputs import Random
from onepass.bench.model import FP8, BenchCase, Call, Contender, Inputs, OpBench
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


def define_bench(
    op: str,
    shapes: Shapes,
    tiny: Shape,
    bytes_moved: Callable[[str, Shape, int], tuple[int, int]],
    inputs: Callable[[BenchCase, Random], Inputs],
    peers: Callable[[BenchCase], list[Contender]],
    *,
    name: Callable[[BenchCase], str] | None = None,
    options: Callable[[BenchCase], dict[str, Any]] = lambda case: {},
    keywords: Callable[[BenchCase], tuple[str, ...]] = lambda case: (),
    ours: Callable[..., Call] | None = None,
    weights: Sequence[int] = (),
    formula: Callable[[BenchCase], Call] | None = None,
    baseline: Callable[[BenchCase], Call] | None = None,
    backend: Callable[[BenchCase, Inputs], str] | None = None,
    reference: str | Callable[[BenchCase], str] | None = None,
    around: Callable[[BenchCase], AbstractContextManager[None]] = lambda case: nullcontext(),
    without: dict[str, str] | None = None,
    in_fp8: bool = False,
) -> OpBench:
    """Return an op's benchmark.

    Args:
        op: the name of the case file.
        tiny: a shape so small that the CPU's time dominates.
        bytes_moved: returns what forward and backward must move, for a variant, a shape and the bytes of a number.
        peers: returns the contenders but onepass, in the order of the table's rows.
        name: returns the op's name in its record, where that is not `op`.
        keywords: returns the names of the last tensors, where the op takes them by name.
        ours, formula, backend: in place of what follows from the record. With `weights`, `ours` gets a precision too.
        weights: places of the products' weights among the tensors. Cases in eight bits have a row for each recipe.
        baseline, reference, around, without: see OpBench.
        in_fp8: all variants are in eight bits, not only those whose names say so.
    """

    def name_of(case: BenchCase) -> str:
        return op if name is None else name(case)

    def case_of(variant: str, shape: Shape, dtype: torch.dtype) -> BenchCase:
        moved = bytes_moved(variant, shape, dtype.itemsize)
        return BenchCase(op, variant, shape, dtype, *moved, fp8=in_fp8 or variant.endswith(FP8))

    def cases(device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
        found = [case_of(variant, shape, dtype) for variant, each in shapes.of(device, quick).items() for shape in each]
        return [case for case in found if not case.fp8 or has_fp8(device)]

    def called(case: BenchCase, function: Callable[..., Any], **more: Any) -> Call:
        return bind(function, options(case) | more, keywords(case))

    def by_record(case: BenchCase, precision: Precision = None) -> Call:
        return called(case, find_op(name_of(case)).function, **({} if precision is None else {"precision": precision}))

    def contenders(case: BenchCase) -> list[Contender]:
        run = ours or by_record
        mine = fp8.ours(case, run, weights) if case.fp8 and weights else [Contender("onepass", run, ours=True)]
        return [*mine, *peers(case)]

    def formula_of(case: BenchCase) -> Call:
        known = name_of(case)
        return called(case, find_op(known).samples.SAMPLES[known].formula)

    def backend_of(case: BenchCase, given: Inputs) -> str:
        explanation: Any = called(case, partial(explain, name_of(case)))(*given.tensors.values())
        return str(explanation.backend)

    def reference_of(case: BenchCase) -> str | None:
        if case.fp8 and weights:
            return fp8.reference(case)
        return reference(case) if callable(reference) else reference

    return OpBench(
        op, case_of, cases,
        inputs=lambda case, device, generator: inputs(case, Random(case, device, generator)),
        contenders=contenders,
        formula=formula or formula_of,
        tiny=lambda case: case_of(case.variant, tiny, case.dtype),
        backend=backend or backend_of,
        without=without or {}, baseline=baseline, reference_of=reference_of, around=around,
    )  # fmt: skip


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
