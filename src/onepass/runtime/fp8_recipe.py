"""How products run in eight bits: which scales, which formats, and what stays in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onepass.runtime.fp8 import E4M3, E5M2

SCALINGS = ("delayed", "current", "row")
FORMATS = ("hybrid", "e4m3")
AMAX_ALGORITHMS = ("max", "most_recent")
LARGEST_MARGIN = 8  # of 18 powers of two that e4m3 has
LONGEST_HISTORY = 1 << 16


@dataclass(frozen=True)
class FP8Recipe:
    """A recipe of eight-bit products.

    Args:
        scaling: where scales come from. "delayed": one a tensor, from the largest magnitudes of the steps before, found by the
            passes that write it. "current": one a tensor, from its own largest magnitude, found by a pass before. "row": each
            row's own, for the product and its input gradient; the weight's gradient is then a 16-bit product.
        format: "hybrid" has e4m3 forward and e5m2 for gradients, "e4m3" has that for all.
        margin: powers of two between the largest magnitude and the format's largest number, with delayed and current scales.
        amax_history_len: steps whose largest magnitudes delayed scales come from.
        amax_compute_algo: "max" takes the largest of them, "most_recent" that of the last step.
        wgrad: whether the weight's gradient is an eight-bit product too. "row" has none.
    """

    scaling: str = "delayed"
    format: str = "hybrid"
    margin: int = 0
    amax_history_len: int = 16
    amax_compute_algo: str = "max"
    wgrad: bool = True

    def __post_init__(self) -> None:
        for name, choices in (("scaling", SCALINGS), ("format", FORMATS), ("amax_compute_algo", AMAX_ALGORITHMS)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, but is {value!r}")
        for name, least, most in (("margin", 0, LARGEST_MARGIN), ("amax_history_len", 1, LONGEST_HISTORY)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name} must be a whole number from {least} to {most}, but is {value!r}")
        if type(self.wgrad) is not bool:
            raise TypeError(f"wgrad must be True or False, but is {self.wgrad!r}")

    @property
    def gradient_type(self) -> torch.dtype:
        """The eight-bit type of gradients."""
        return E5M2 if self.format == "hybrid" else E4M3

    @property
    def types(self) -> str:
        """The eight-bit types in words."""
        return "e4m3" if self.gradient_type is E4M3 else "e4m3, gradients in e5m2"

    @property
    def has_wgrad(self) -> bool:
        """Whether the weight's gradient is an eight-bit product: with a scale a row, terms of its sum differ in scale."""
        return self.wgrad and self.scaling != "row"


Precision = FP8Recipe | str | None  # an op's argument: None is its inputs' type, "fp8" the default recipe


def recipe_of(precision: object) -> FP8Recipe | None:
    """Return the recipe that a `precision` argument names, or None where products have their inputs' type."""
    if precision is None or isinstance(precision, FP8Recipe):
        return precision
    if precision == "fp8":
        return FP8Recipe()
    raise ValueError(f"precision must be None, 'fp8' or an FP8Recipe, but is {precision!r}")
