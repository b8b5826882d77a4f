"""Sample calls of the gated delta rule, and of its gates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.ops.delta.delta_gates import delta_gates, delta_gates_reference
from onepass.ops.delta.gated_delta_rule import gated_delta_rule_reference
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor
from onepass.runtime.samples import CoveringCall, Sample, give_main_grad, meta, random_tensors


def _rule(
    B: int, S: int, key_heads: int, H: int, documents: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return q, k, v, g and beta, and where there are documents boundaries, one of them empty, and a state for each."""
    shapes = *[(B, S, key_heads, 8)] * 2, (B, S, H, 5), *[(B, S, H)] * 2, (documents, H, 8, 5)
    q, k, v, g, beta, state = random_tensors(shapes, device, torch.float32)
    q, k = (F.normalize(t, dim=-1) for t in (q, k))
    tensors = [t.to(dtype) for t in (q, k, v, -g.abs(), beta.sigmoid(), state)]
    if not documents:
        return tuple(tensors[:5])
    ends = [0, *(S * (i + 1) // documents // 3 * 3 for i in range(documents - 2)), *[S] * 2]
    return *tensors, torch.tensor(ends, dtype=torch.int32, device=device)


SAMPLES = {
    "delta_gates": Sample(partial(random_tensors, ((3, 11, 40), (3, 11, 40), (40,), (40,))), delta_gates_reference),
    "gated_delta_rule": Sample(partial(_rule, 3, 70, 2, 2, 0), gated_delta_rule_reference, dtype=torch.bfloat16),
    "gated_delta_rule: documents": Sample(
        partial(_rule, 1, 130, 1, 4, 3),
        gated_delta_rule_reference,
        {"output_final_state": True, "scale": 0.5},
        keywords=("initial_state", "cu_seqlens"),
        frozen=1,
        dtype=torch.bfloat16,
    ),
    "delta_gates: groups": Sample(partial(random_tensors, ((3, 11, 4, 1), (3, 11, 4, 1), (4,), (4,))), delta_gates_reference),
}


SHAPES_OF: dict[str, Any] = {
    "gated_delta_rule": {
        "cu_seqlens": lambda q, given: (2,),
        "initial_state": lambda q, given: (q.shape[0], *given["v"][2:3], q.shape[3], given["v"][3]),
    }
}
TYPES_OF = {"cu_seqlens": torch.int32}


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


def _random_rule(draw: Draw) -> RandomCall:
    dtype, heads = draw.dtype(), draw.choose((1, 2, 3))
    H, K, V = heads * draw.choose((1, 2)), draw.choose((8, 1, 16, 33)), draw.choose((8, 1, 5, 40))
    B, S = (1, 1, *draw.lead())[-2:]
    rows, per_head = (B, S, heads, K), (B, S, H)
    tensors = {"q": RandomTensor(rows, dtype, "tame weight"), "k": RandomTensor(rows, dtype, "tame weight", top=4 * K)}
    tensors["v"] = RandomTensor((B, S, H, V), dtype, "tame")
    tensors |= {"g": RandomTensor(per_head, torch.float32, "positive")}  # of which the op gets the negative: states don't grow
    tensors |= {"beta": RandomTensor(per_head, draw.beside(dtype), "positive")}
    states = B
    if B == 1 and draw.flag(0.5):
        states = draw.choose((2, 1, 4))
        tensors["cu_seqlens"] = RandomTensor((states + 1,), torch.int32, "boundaries", top=S)
    if draw.flag(0.3):
        tensors["initial_state"] = RandomTensor((states, H, K, V), draw.beside(dtype), "tame")
    options: dict[str, Any] = {"output_final_state": True} if draw.flag() else {}

    def arguments(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return given | {"g": -given["g"]}

    return RandomCall(tensors, options, partial(gated_delta_rule_reference, **options), finite=True, arguments=arguments)


RANDOM_CALLS = {"delta_gates": _random_gates, "gated_delta_rule": _random_rule}

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
