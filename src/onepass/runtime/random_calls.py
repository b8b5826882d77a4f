"""What fuzzing draws of an op: a random call, described without its numbers.

Each family's `samples.py` has `RANDOM_CALLS`: for each op a function from a `Draw` to a `RandomCall`. Only tools import these.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from onepass.runtime.fp8_recipe import FP8Recipe

T = TypeVar("T")

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

# Sizes are few, as a kernel is compiled for each width; rows are run-time arguments. In order of simplicity.
_WIDTHS = (8, 1, 2, 3, 17, 33, 64, 100, 129, 257)
_FP8_WIDTHS = (64, 16, 48, 128, 256)
_LARGE_WIDTHS = (1000, 1025, 4096, 5000)
_LEADS = ((3,), (1,), (2, 3), (37,), (), (5, 7), (2, 3, 5), (0,), (2, 0), (1, 1), (65,))
_NO_ROWS = ((0,), (2, 0), (0, 3))
_LARGE_LEADS = ((257,), (4, 129))
_ON_A_GPU = ((4097,), (3, 1025), (20_000,))
_RECIPES = (
    None, FP8Recipe(), FP8Recipe("current"), FP8Recipe("row"), FP8Recipe(format="e4m3", wgrad=False),
    FP8Recipe("current", margin=2),
)  # fmt: skip
_FP8_ERROR = 0.2  # of a product in eight bits, whose gradients have two: twice the largest of thousands of cases
_MOST = 1 << 22  # numbers of such a tensor


class Draw:
    """The choices of one random call. Each is recorded by its index, and index 0 is the simplest, which shrinking relies on.

    Args:
        source: makes the choices.
        given: indices to take instead. Where they end, the simplest follows.
        roomy: whether sizes may be as large as a GPU likes them.
        empty: whether all calls are without rows.
    """

    def __init__(
        self, source: random.Random, given: Sequence[int] | None = None, roomy: bool = False, empty: bool = False
    ) -> None:
        self.source, self._given, self._roomy, self._empty = source, given, roomy, empty
        self.taken: list[int] = []
        self._width = 1  # drawn last

    def choose(
        self, values: Sequence[T], weights: Sequence[float] | None = None, source: random.Random | None = None
    ) -> T:
        if self._given is None:
            index = (source or self.source).choices(range(len(values)), weights)[0]
        else:
            at = len(self.taken)
            index = min(self._given[at], len(values) - 1) if at < len(self._given) else 0
        self.taken.append(index)
        return values[index]

    def flag(self, likely: float = 0.5) -> bool:
        return self.choose((False, True), (1 - likely, likely))

    def precision(self, dtype: torch.dtype) -> FP8Recipe | None:
        """Return a recipe of products in eight bits, which fp64 has none of, or None most of the time."""
        return None if dtype is FP64 else self.choose(_RECIPES, (16, *(1 for _ in _RECIPES[1:])))

    def width(self, rare: float = 0.1, precision: FP8Recipe | None = None) -> int:
        """Return the size of a last dimension, at least 1. Large ones are rare. With a precision most are sizes that it takes."""
        if precision is not None and not self.flag(0.1):
            self._width = self.choose(_FP8_WIDTHS)
            return self._width
        large = self.flag(0.3 if self._roomy else rare)
        self._width = self.choose(_LARGE_WIDTHS if large else _WIDTHS)
        return self._width

    def lead(self) -> tuple[int, ...]:
        """Return the dimensions before the last, whose width is drawn before them."""
        if self._empty:
            return self.choose(_NO_ROWS)
        if self._roomy and self.flag(0.2):
            return self.choose([lead for lead in _ON_A_GPU if math.prod(lead) * self._width <= _MOST] or _LARGE_LEADS)
        return self.choose(_LARGE_LEADS if self.flag(0.05) else _LEADS)

    def dtype(self) -> torch.dtype:
        """Return x's type. Of fp64, which kernels don't take, the formula must compute in fp64."""
        return self.choose((FP32, BF16, FP16, FP64), (4, 4, 4, 1))

    def beside(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of a tensor that may have another type than x."""
        return self.choose((dtype, FP32, BF16, FP16), (6, 2, 1, 1))

    def dropout(self) -> float:
        """Return a probability, which is 0 most of the time."""
        return self.choose((0.0, 0.5, 0.1, 1.0), (4, 1, 1, 1))


@dataclass(frozen=True)
class RandomTensor:
    """One tensor of a random call.

    Args:
        kind: what its numbers are: "number" (of any size), "finite" (no infinity), "tame" (of size 1 or less), "weight" (so that
            a product of such rows keeps the size), "tame weight", "positive", "constant" (positive, without a gradient),
            "labels", "mask", "boundaries" of documents, "cos" or "sin".
        parameter: whether it may carry main_grad.
        top: the number of labels, the columns of a weight, or the last boundary.
        ignore_index: of labels.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "number"
    parameter: bool = False
    top: int = 1
    ignore_index: int = -100


@dataclass(frozen=True)
class RandomCall:
    """One call of an op.

    Args:
        tensors: by the names of the op's parameters.
        options: the op's other options.
        formula: takes the tensors by their names, in any type, and returns what the op returns. The op and the formula find the
            random state alike, so that the formula can drop what the op drops.
        products: whether operands of products inside are rounded to the storage type.
        constants: tensors that get no gradient, whether they ask for one or not. All others do, also where there are no rows.
        written: tensors that the call writes by design. They are given as results of an operator.
        gradients: how far gradients may be from the formula's, relatively, where the op keeps less than x.
        results: how far all results may be from the formula's, relatively, where the op computes in fewer bits.
        finite: draw no infinity and no NaN, where the formula isn't the contract for them.
        incoming: the size of incoming gradients. Loss scaling keeps those of fp16 from vanishing.
        promised: the gradient that comes to the first result where the call was promised it. None comes to the others.
        floors: takes the tensors, and returns absolute errors that results ("y0", "dweight") may have where terms cancel.
        arithmetic: which tensor's type the arithmetic of a result ("y1", "dk") has, where that is not the first one's.
        can_defer: whether the weight's gradient may be made after backward, where the op can.
        arguments: makes the op's keywords of the tensors, where some of them are parts of a record.
    """

    tensors: dict[str, RandomTensor]
    options: dict[str, Any]
    formula: Callable[..., Any]
    products: bool = False
    constants: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    gradients: float = 0.0
    results: float = 0.0
    finite: bool = False
    incoming: float = 1.0
    promised: float | None = None
    floors: Callable[[dict[str, Tensor]], dict[str, float]] = lambda tensors: {}
    arithmetic: Mapping[str, str] = field(default_factory=dict)
    can_defer: bool = True
    arguments: Callable[[dict[str, Tensor]], dict[str, Any]] = lambda tensors: tensors


def linear_tensors(
    draw: Draw, width: int, dtype: torch.dtype, precision: FP8Recipe | None = None
) -> dict[str, RandomTensor]:  # fmt: skip
    """Return the weight of a product with rows of `width` numbers, and a bias or none."""
    columns = draw.choose((8, 1, 5, 64, 33) if precision is None else _FP8_WIDTHS)
    found = {"weight": RandomTensor((columns, width), dtype, "weight", True, width)}
    if draw.flag():
        found["bias"] = RandomTensor((columns,), dtype, parameter=True)
    return found


def fp8_error(precision: FP8Recipe | None) -> float:
    """Return the relative error of an op's results that a precision accounts for."""
    return 0.0 if precision is None else _FP8_ERROR
