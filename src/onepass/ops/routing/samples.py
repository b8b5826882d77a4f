"""Sample calls of route."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.ops.routing.route import route, route_reference
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor
from onepass.runtime.samples import CoveringCall, Sample, meta, random_tensors


def _biased(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Logits of two sequences, and an expert bias that decides."""
    logits, bias = random_tensors(((2, 11, 24), (24,)), device, dtype)
    return logits, bias.mul(0.3)


_LOGITS = partial(random_tensors, ((2, 11, 24),))
_LOSSES: dict[str, Any] = {"aux": 0.5, "z": 0.25}
SAMPLES = {
    "route": Sample(_LOGITS, route_reference, {"k": 3, **_LOSSES}),
    "route: not normalised": Sample(_LOGITS, route_reference, {"k": 4, "normalise": False, "scale": 2.5}),
    "route: sigmoid, groups, bias": Sample(
        _biased, route_reference, {"k": 4, "score": "sigmoid", "groups": (4, 2), "scale": 2.5, **_LOSSES},
        keywords=("bias",), frozen=1,
    ),
}  # fmt: skip


SHAPES_OF: dict[str, Any] = {"route": {}}


# ---- random calls ----


def _random_route(draw: Draw) -> RandomCall:
    """No bias and no groups: those choose by rounded scores, and of nearly equal ones the formula chooses another in fp64."""
    dtype, width, lead = draw.dtype(), draw.width(), draw.lead()
    options: dict[str, Any] = {
        "k": min(width, draw.choose((1, 2, 4, 8))), "score": draw.choose(("softmax", "sigmoid")), "normalise": draw.flag(0.7),
        "scale": draw.choose((1.0, 2.5)), "aux": draw.choose((None, 0.5)), "z": draw.choose((None, 0.25)),
    }  # fmt: skip
    floor = 1e-7 * options["scale"]  # where one probability is 1, all gradients of the token cancel
    return RandomCall(
        {"logits": RandomTensor((*lead, width), dtype)}, options, partial(route_reference, **options),
        floors=lambda given: {"dlogits": floor},
    )  # fmt: skip


RANDOM_CALLS = {"route": _random_route}

# ---- calls that launch every kernel, in every form that is shipped ----

_EXPERTS = (1, 8, 60, 128, 160, 256, 384, 1024)
_SIGMOID: dict[str, Any] = {"score": "sigmoid"}
_DEEPSEEK: dict[str, Any] = {"score": "sigmoid", "groups": (8, 4), "scale": 2.5}


def covering_calls() -> Iterator[CoveringCall]:
    """All numbers of experts with both losses; other options and types at some of them."""
    for experts in _EXPERTS:
        yield _call(experts, **_LOSSES)
    for experts in (128, 384):
        for dtype in (torch.float16, torch.float32):
            yield _call(experts, dtype, **_LOSSES)
        for options in ({}, {"normalise": False}, _SIGMOID, _SIGMOID | {"normalise": False}, _SIGMOID | _LOSSES):
            yield _call(experts, torch.float32, **options)
        yield _call(experts, biased=True, **_LOSSES)
    for experts in (160, 256, 1024):
        yield _call(experts, biased=True, **_DEEPSEEK, **_LOSSES)
    yield _call(256, torch.float32, biased=True, **_DEEPSEEK)
    yield _call(256, groups=(8, 4), normalise=False)


def _call(experts: int, dtype: torch.dtype = torch.bfloat16, biased: bool = False, **options: Any) -> CoveringCall:
    def run() -> Tensor:
        logits = meta(16384, experts, dtype=dtype)
        bias = meta(experts, dtype=torch.float32, requires_grad=False) if biased else None
        routing = route(logits, min(8, experts), bias=bias, **options, backend="triton")
        losses = [loss for loss in (routing.aux_loss, routing.z_loss) if loss is not None]
        return routing.weights + sum(losses) if losses else routing.weights

    words = (f"{name}={value}" for name, value in options.items())
    return CoveringCall(" ".join(("route", f"16384x{experts}", *("bias",) * biased, *words)), dtype, run)
