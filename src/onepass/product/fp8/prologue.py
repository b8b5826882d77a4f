"""What a prologue makes for a product in eight bits: its rows as codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from onepass.product.prologue import Inputs, Kept, Needs, Prologue
from onepass.runtime.fp8 import FP8Target

Codes = tuple[Tensor, Tensor | None]  # [rows, K], and the inverses of their scales where each row has its own


class FP8Prologue(Prologue, Protocol):
    """The codes of rows."""

    def codes(self, inputs: Inputs, target: FP8Target, needs: Needs) -> tuple[Codes, Kept]:
        """Return the rows' codes, and what to keep."""

    def codes_again(self, kept: Kept, target: FP8Target) -> Codes:
        """Return the rows' codes."""

    def transposed_codes(self, kept: Kept, target: FP8Target) -> Tensor:
        """Return the codes of the rows' transpose, as `runtime.fp8.transpose` has them."""


class GraphPrologue(FP8Prologue, Protocol):
    """The same in a compiled graph."""

    def in_graph(self, inputs: Inputs, *product: Any, needs: Needs) -> tuple[Sequence[Any], Kept]:
        """Run the registered op of codes and their product. Return its results (`forward_fake`), and what to keep."""
