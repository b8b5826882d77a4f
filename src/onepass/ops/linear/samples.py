"""Sample calls of linear."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from onepass.ops.linear.linear import linear_reference
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor, fp8_error, linear_tensors
from onepass.runtime.samples import CoveringCall, Sample, random_tensors

SAMPLES = {"linear": Sample(partial(random_tensors, ((3, 13, 203), (29, 203), (29,))), linear_reference)}


SHAPES_OF = {"linear": {"bias": lambda x, given: given["weight"][:1]}}


def _random_linear(draw: Draw) -> RandomCall:
    dtype = draw.dtype()
    precision = draw.precision(dtype)
    width, lead = draw.width(precision=precision), draw.lead()
    tensors = {"x": RandomTensor((*lead, width), dtype)} | linear_tensors(draw, width, dtype, precision)
    return RandomCall(tensors, {"precision": precision}, linear_reference, True, results=fp8_error(precision))


RANDOM_CALLS = {"linear": _random_linear}


def covering_calls() -> Iterator[CoveringCall]:
    """None: linear launches cuBLAS only."""
    return iter(())
