"""Sample calls of linear and lora_linear."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from onepass.ops.linear.linear import linear_reference
from onepass.ops.linear.lora_linear import lora_linear_reference
from onepass.product.lora_samples import random_lora, with_lora
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor, fp8_error, linear_tensors
from onepass.runtime.samples import CoveringCall, Sample, random_tensors

SAMPLES = {
    "linear": Sample(partial(random_tensors, ((3, 13, 203), (29, 203), (29,))), linear_reference),
    "lora_linear": Sample(
        partial(random_tensors, ((3, 13, 203), (29, 203), (5, 203), (29, 5), (29,))), lora_linear_reference, {"scale": 0.7}
    ),
}

SHAPES_OF = {
    "linear": {"bias": lambda x, given: given["weight"][:1]},
    "lora_linear": {"bias": lambda x, given: given["weight"][:1]},
}


def _random_linear(draw: Draw) -> RandomCall:
    dtype = draw.dtype()
    precision = draw.precision(dtype)
    width, lead = draw.width(precision=precision), draw.lead()
    tensors = {"x": RandomTensor((*lead, width), dtype)} | linear_tensors(draw, width, dtype, precision)
    tensors |= random_lora(draw, "lora", tensors["weight"].shape[0], width, dtype)
    options, error = {"precision": precision}, fp8_error(precision)
    return RandomCall(tensors, options, linear_reference, True, results=error, arguments=with_lora)


def _random_lora_linear(draw: Draw) -> RandomCall:
    dtype = draw.dtype()
    precision = draw.precision(dtype)
    width, lead = draw.width(precision=precision), draw.lead()
    tensors = {"x": RandomTensor((*lead, width), dtype)} | linear_tensors(draw, width, dtype, precision)
    rank, kind = draw.choose((4, 1, 16, 33)), draw.choose((dtype, torch.promote_types(dtype, torch.float32)))
    tensors["lora_a"] = RandomTensor((rank, width), kind, "weight", parameter=True, top=width)
    tensors["lora_b"] = RandomTensor((tensors["weight"].shape[0], rank), kind, "weight", parameter=True, top=rank)
    scale = draw.choose((1.0, 0.5, 1.7, 0.0))
    formula = partial(lora_linear_reference, scale=scale)
    options = {"scale": scale, "precision": precision}
    # a scale of 0 adds nothing, whatever the adapter has in it
    return RandomCall(tensors, options, formula, True, results=fp8_error(precision), finite=not scale)


RANDOM_CALLS = {"linear": _random_linear, "lora_linear": _random_lora_linear}


def covering_calls() -> Iterator[CoveringCall]:
    """None: both launch cuBLAS only."""
    return iter(())
