"""Sample calls of linear and lora_linear."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from onepass.ops.linear.linear import linear_reference
from onepass.ops.linear.lora_linear import lora_linear_reference
from onepass.product.lora_samples import random_lora, with_lora
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor, fp8_error, linear_tensors
from onepass.runtime.samples import CoveringCall, Sample, random_tensors


def _documents(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, the weight, adapters of four documents, one of which is empty, and where they end."""
    tensors = random_tensors(((3, 13, 203), (29, 203), (4, 5, 203), (4, 29, 5)), device, dtype)
    return *tensors, torch.tensor((5, 5, 30, 36), dtype=torch.int32, device=device)


SAMPLES = {
    "linear": Sample(partial(random_tensors, ((3, 13, 203), (29, 203), (29,))), linear_reference),
    "lora_linear": Sample(
        partial(random_tensors, ((3, 13, 203), (29, 203), (5, 203), (29, 5), (29,))), lora_linear_reference, {"scale": 0.7}
    ),
    "lora_linear: documents": Sample(
        _documents, lora_linear_reference, {"scale": (0.5, 1.0, 1.7, 2.0)}, keywords=("ends",), frozen=1
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
    scale, dropout = draw.choose((1.0, 0.5, 1.7, 0.0)), draw.dropout()
    by_document = draw.flag(0.3)
    if by_document:
        documents = draw.choose((3, 2, 9))
        tensors["ends"] = RandomTensor((documents,), torch.int32, "boundaries", top=prod(lead))
        for name in ("lora_a", "lora_b"):
            tensors[name] = replace(tensors[name], shape=(documents, *tensors[name].shape))
    formula = partial(lora_linear_reference, scale=scale, dropout=dropout)
    options = {"scale": scale, "dropout": dropout, "precision": precision}
    # a scale of 0 adds nothing, whatever the adapter has in it; in the formula's gradients each document meets all rows
    finite = not scale or by_document
    return RandomCall(tensors, options, formula, True, results=fp8_error(precision), finite=finite)


RANDOM_CALLS = {"linear": _random_linear, "lora_linear": _random_lora_linear}


def covering_calls() -> Iterator[CoveringCall]:
    """None: both launch cuBLAS only."""
    return iter(())
