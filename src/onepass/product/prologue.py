"""What makes the rows that a linear layer multiplies.

A layer is y = prologue(inputs) @ weight.T + bias. Forward lets the rows go, and backward makes them again. A prologue knows no
product, and a product knows rows alone. For products in eight bits it makes codes as well (product/fp8/prologue.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onepass.gradients.main_grad import GradRequest
from onepass.gradients.vectors import KernelTargets, VectorGrads
from onepass.runtime.dispatch import recomputation
from onepass.runtime.fp8 import FP8Target

Inputs = Sequence[Tensor | None]  # x, then vectors, then others
Kept = Sequence[Tensor | None]  # what backward needs of them; the first is x, or what stands for it
Keep = Callable[[Kept], None]  # takes what backward needs, before the product: a recomputation may end there
Needs = Sequence[bool] | None  # which gradients of the inputs, the weight and the bias may be asked for; None: no backward comes


class PrologueGradients(NamedTuple):
    """What a prologue's backward makes."""

    inputs: Sequence[Tensor | None]
    into: KernelTargets | None = None  # main_grads that its kernel has added to
    rows: Tensor | None = None  # made again
    transposed: Tensor | None = None  # their codes
    da: Tensor | None = None  # u.T @ rows: nobody else wants the rows


class Prologue(Protocol):
    """How rows are made. Implementations are NamedTuples, which a compiler looks through."""

    @property
    def dtype(self) -> torch.dtype:
        """The product's type."""

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the inputs after x whose gradients are sums of columns."""

    @property
    def returns(self) -> tuple[bool, bool]:
        """Whether the call returns the rows after y, and then what stands for x."""

    def rows(self, inputs: Inputs, needs: Needs) -> tuple[Tensor, Kept]:
        """Return the rows in the product's type, and what to keep."""

    def rows_again(self, kept: Kept) -> Tensor:
        """Return the rows in the product's type."""

    def backward(
        self, kept: Kept, vectors: VectorGrads | None, drows: Tensor | None, dx: Tensor | None, requests: Sequence[GradRequest],
        *, rebuild: bool = False, target: FP8Target | None = None, ours: bool = True, u: Tensor | None = None,
    ) -> PrologueGradients:  # fmt: skip
        """Return the gradients that the pass asks for.

        Args:
            drows: the rows' gradient. `ours`: it may be written.
            dx: the gradient of what is returned for x.
            requests: what the pass wants of the inputs.
            rebuild: return the rows, too.
            target: the pass may write the codes of the rows' transpose for this, and return them.
            u: the pass may return u.T @ rows in place of the rows.
        """


# ---- where torch.utils.checkpoint computes a block again ----

# PyTorch ends that with the last tensor that backward needs. A Function's tensors are saved after its forward, so that the last
# product of a block would be made for nothing. `EarlySaves` hands them over before.


class EarlySaves:
    """A call's `Keep`: gives what is kept, and then `others`, to the recomputation's hook."""

    def __init__(self, hook: Callable[[Tensor], Any], others: Kept) -> None:
        self.hook, self.others = hook, others
        self.tensors: Kept = ()

    def __call__(self, kept: Kept) -> None:
        # one that is returned, too, will know this call as its function: a circle, which only the garbage collector ends
        self.tensors = (*[None if tensor is None else tensor.detach() for tensor in kept], *self.others)
        for tensor in self.tensors:
            if tensor is not None:
                self.hook(tensor)


def early_saves(others: Kept) -> EarlySaves | None:
    """Return what takes a call's tensors before its product, or None where nothing is computed again."""
    hook = recomputation()
    return None if hook is None else EarlySaves(hook, others)


def save(ctx: Any, early: EarlySaves | None, *tensors: Tensor | None) -> None:
    """Save tensors for backward that `early` has not taken: what is kept, and then the others."""
    ctx.early = early
    if early is None or not early.tensors:
        ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> Any:
    """Return what `save` has saved. A recomputed call has no backward but within the block itself."""
    return ctx.saved_tensors if ctx.early is None or not ctx.early.tensors else ctx.early.tensors
