"""Sample calls of the delta rule's gates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.ops.delta.delta_gates import delta_gates, delta_gates_reference
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor
from onepass.runtime.samples import CoveringCall, Sample, give_main_grad, meta, random_tensors

SAMPLES = {
    "delta_gates": Sample(partial(random_tensors, ((3, 11, 40), (3, 11, 40), (40,), (40,))), delta_gates_reference),
    "delta_gates: groups": Sample(partial(random_tensors, ((3, 11, 4, 1), (3, 11, 4, 1), (4,), (4,))), delta_gates_reference),
}


SHAPES_OF: dict[str, Any] = {}


# ---- random calls ----


def _random_gates(draw: Draw) -> RandomCall:
    dtype, groups = draw.dtype(), draw.choose((None, 16, 3, 1), (4, 1, 1, 1))
    width = draw.width()
    shape = (*draw.lead(), *((width,) if groups is None else (groups, width)))
    H = width * (groups or 1)
    vectors = {name: RandomTensor((H,), draw.beside(dtype), "tame", parameter=True) for name in ("a_log", "dt_bias")}
    tensors = {"a": RandomTensor(shape, dtype), "b": RandomTensor(shape, draw.beside(dtype))} | vectors
    # finite: beside a gate that has no incoming gradient the other's NaN would be multiplied by zeros
    return RandomCall(tensors, {}, delta_gates_reference, arithmetic={"y1": "b", "db": "b"}, finite=True)


RANDOM_CALLS = {"delta_gates": _random_gates}

# ---- calls that launch every kernel, in every form that is shipped ----


def covering_calls() -> Iterator[CoveringCall]:
    """Models' heads in all types, plain, as a slice, and in groups of one projection; frozen tensors; odd and many heads."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for option in ("", "groups", "sliced groups"):
            yield _gates_call(32, dtype, option)
    for option in ("main_grad", "frozen rows", "frozen a_log", "frozen dt_bias", "frozen vectors", "vectors of bf16", "sliced"):
        yield _gates_call(32, option=option)
    for heads in (1, 48, 64, 100, 1000, 4096):
        yield _gates_call(heads)


def _gates_call(H: int, dtype: torch.dtype = torch.bfloat16, option: str = "") -> CoveringCall:
    def run() -> Tensor:
        rows, vectors = option != "frozen rows", option != "frozen vectors"
        width = 2 * H + (64 if "sliced" in option else 0)
        projected = meta(4, 4096, width, dtype=dtype, requires_grad=rows)
        if "groups" in option:
            b, a = projected[..., : 2 * H].unflatten(-1, (H // 2, 4)).chunk(2, -1)
        elif option == "sliced":
            a, b = projected[..., :H], projected[..., H : 2 * H]
        else:
            a, b = (meta(4, 4096, H, dtype=dtype, requires_grad=rows) for _ in range(2))
        of_vectors = torch.bfloat16 if option == "vectors of bf16" else torch.float32
        a_log = meta(H, dtype=of_vectors, requires_grad=vectors and option != "frozen a_log")
        dt_bias = meta(H, dtype=of_vectors, requires_grad=vectors and option != "frozen dt_bias")
        if option == "main_grad":
            give_main_grad(a_log, dt_bias)
        g, beta = delta_gates(a, b, a_log, dt_bias, backend="triton")
        return torch.cat([g, beta], -1)

    return CoveringCall(" ".join(filter(None, ("delta_gates", f"16384x{H}", option))), dtype, run)
