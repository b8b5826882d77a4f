"""Sample calls of linear."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from onepass.ops.linear.linear import linear_reference
from onepass.runtime.samples import CoveringCall, Sample, random_tensors

SAMPLES = {"linear": Sample(partial(random_tensors, ((37, 203), (29, 203), (29,))), linear_reference)}


SHAPES_OF = {"linear": {"bias": lambda x, given: given["weight"][:1]}}


def covering_calls() -> Iterator[CoveringCall]:
    """None: linear launches cuBLAS only."""
    return iter(())
