"""Whose kernels compute the gated delta rule: those of installed wheels, the first that takes a call.

flash_qla   FlashQLA's (flash-qla), for heads of 128 on Hopper and Blackwell; 1.4 to 2.5 times as fast as FLA's by its own figures
fla         FLA's Triton kernels (flash-linear-attention, or its part fla-core)

Their public functions can't be compiled without a graph break, and give second derivatives that are wrong without a word. So the
functions of both passes below them are called, whose names and parameters are looked up first. What is missing is said.
A wheel that is known to compute wrong gradients with the Triton in use is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.fla import refused_gradients, refused_operands
from onepass.runtime.documents import are_right, readable_boundaries
from onepass.runtime.errors import version_of
from onepass.runtime.sizes import compute_capability
from onepass.runtime.wheels import Wheel, constant, find_functions

_ROWS = {"q", "k", "v", "g", "beta", "scale", "initial_state", "cu_seqlens"}
_FLA = Wheel(
    "FLA", "fla-core", "pip install flash-linear-attention", "fla.ops.gated_delta_rule.chunk",
    {
        "chunk_gated_delta_rule_fwd": _ROWS | {"output_final_state", "chunk_indices", "chunk_size"},
        "chunk_gated_delta_rule_bwd": _ROWS | {"A", "do", "dht", "chunk_indices", "chunk_size"},
        "prepare_chunk_indices": {"cu_seqlens", "chunk_size"},
    },
    r"(fla|triton)\b",
)  # fmt: skip
_QLA = Wheel(
    "FlashQLA", "flash-qla", "pip install flash-qla", "flash_qla",
    {
        "chunk_gated_delta_rule_fwd": _ROWS | {"output_final_state", "auto_cp", "is_train"},
        "chunk_gated_delta_rule_bwd": _ROWS | {"A", "do", "dht", "auto_cp"},
    },
    r"(flash_qla|tilelang|tvm)\b",
)  # fmt: skip
CHUNK = 64  # tokens of both wheels' chunks
_WIDEST_KEYS = 256  # FLA's
_QLA_HEADS = 128
_QLA_GPUS = ((9, 0), (10, 0), (10, 3))


class DeltaOptions(NamedTuple):
    """What the rule takes besides tensors."""

    scale: float
    final: bool  # whether final states are returned
    wheel: str


class DeltaInputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor | None
    cu_seqlens: Tensor | None


class DeltaKept(NamedTuple):
    """What backward has of a call, and the gradients of its results."""

    dy: Tensor
    dfinal: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    sums: Tensor  # of g, as the wheel has them
    beta: Tensor
    system: Tensor  # [B, S, H, CHUNK]: the inverse of each chunk's triangular system
    state: Tensor | None
    cu_seqlens: Tensor | None


# ---- who takes a call ----


@lru_cache(1)
def fla_functions() -> tuple[Any, ...] | str:
    """Return FLA's functions, or why there are none. Imports the package, which takes seconds."""
    return find_functions(_FLA)


@lru_cache(1)
def qla_functions() -> tuple[Any, ...] | str:
    """Return FlashQLA's functions, or why there are none. Imports the package, which takes seconds."""
    return find_functions(_QLA)


@constant
def _why_no_fla() -> str | None:
    functions = fla_functions()
    return functions if isinstance(functions, str) else None


@constant
def _why_no_qla() -> str | None:
    functions = qla_functions()
    return functions if isinstance(functions, str) else None


def fla_refuses(inputs: DeltaInputs, grads: bool) -> str | None:
    """Say why FLA can't take a call, or None. `grads`: a gradient is asked for."""
    refused = refused_operands(q=inputs.q, k=inputs.k, v=inputs.v)
    if refused is not None:
        return refused
    if inputs.k.shape[-1] > _WIDEST_KEYS:
        return f"heads of keys of {inputs.k.shape[-1]} are wider than FLA's {_WIDEST_KEYS}"
    refused = refused_gradients(inputs.q.device, "flash-qla") if grads else None
    return refused or _why_no_fla()


def qla_refuses(inputs: DeltaInputs, grads: bool) -> str | None:
    """Say why FlashQLA can't take a call, or None."""
    refused = refused_operands(q=inputs.q, k=inputs.k, v=inputs.v)
    if refused is not None:
        return refused
    K, V = inputs.k.shape[-1], inputs.v.shape[-1]
    if K != _QLA_HEADS or V != _QLA_HEADS:
        return f"heads of {K} and {V} are not FlashQLA's {_QLA_HEADS}"
    capability = compute_capability(inputs.q.device)
    if capability not in _QLA_GPUS:
        is_ = ".".join(map(str, capability))
        return f"FlashQLA's gradients need a GPU of Hopper or Blackwell, 9.0, 10.0 or 10.3, and this one is {is_}"
    return _why_no_qla()


REFUSALS: dict[str, Callable[[DeltaInputs, bool], str | None]] = {"flash_qla": qla_refuses, "fla": fla_refuses}


def wheel_title(name: str) -> str:
    """Return the wheel's name and version, as messages have them."""
    wheel = _QLA if name == "flash_qla" else _FLA
    return f"{wheel.title} {version_of(wheel.package)}"


# ---- calls ----


class _Documents(NamedTuple):
    """What a wheel is told of documents. FlashQLA computes nonsense for those after one without tokens, so none is told of."""

    boundaries: Tensor | None
    told: Tensor | None = None  # int64: which documents the boundaries have; None: all

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, tokens: int, wheel: str) -> _Documents:
        boundaries = None if cu_seqlens is None else readable_boundaries(cu_seqlens, tokens)[0]
        if boundaries is None or wheel == "fla":
            return cls(boundaries)
        told = boundaries.diff().nonzero().squeeze(1)
        return cls(torch.cat([boundaries[:1], boundaries[1:].index_select(0, told)]), told)

    def take(self, states: Tensor | None) -> Tensor | None:
        states = None if states is None else states.float()
        return states if states is None or self.told is None else states.index_select(0, self.told)

    def put(self, found: Tensor, unmoved: Tensor | None, like: Tensor) -> Tensor:
        """Return what was found, and where a document was not told of, `unmoved`'s or zeros. like: [documents + 1]."""
        if self.told is None:
            return found
        if unmoved is None:
            unmoved = found.new_zeros(like.shape[0] - 1, *found.shape[1:])
        return unmoved.to(found.dtype).index_copy(0, self.told, found)


def wheel_forward(inputs: DeltaInputs, options: DeltaOptions) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return y, final states, g's sums and the systems' inverses."""
    q, k, v, g, beta, state = (None if t is None else _laid_evenly(t) for t in inputs[:6])
    assert q is not None and g is not None
    g, cu_seqlens = g.float(), inputs.cu_seqlens
    if cu_seqlens is not None:
        g = g + torch.where(are_right(cu_seqlens, q.shape[1]), 0.0, torch.nan)
    documents = _Documents.of(cu_seqlens, q.shape[1], options.wheel)
    given: dict[str, Any] = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": options.scale, "initial_state": documents.take(state),
        "output_final_state": options.final, "cu_seqlens": documents.boundaries,
    }  # fmt: skip
    with torch.cuda.device_of(q):
        if options.wheel == "fla":
            sums, y, system, final, *_ = _functions("fla")[0](**given, **_fla_chunks(documents.boundaries))
        else:
            sums, system, y, _, final, _ = _functions("flash_qla")[0](**given, auto_cp=False, is_train=True)
    if options.final and cu_seqlens is not None:
        final = documents.put(final, state, cu_seqlens)
    return y.to(q.dtype), final if options.final else None, sums, system


def wheel_backward(kept: DeltaKept, options: DeltaOptions, need_dstate: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, g, beta and the initial states."""
    dy, dfinal, q, k, v, sums, beta, system, state = (None if t is None else _laid_evenly(t) for t in kept[:9])
    assert q is not None and k is not None and v is not None and sums is not None and beta is not None
    documents = _Documents.of(kept.cu_seqlens, q.shape[1], options.wheel)
    given: dict[str, Any] = {
        "q": q, "k": k, "v": v, "g": sums, "beta": beta, "A": system, "scale": options.scale,
        "initial_state": documents.take(state), "do": dy, "dht": documents.take(dfinal), "cu_seqlens": documents.boundaries,
    }  # fmt: skip
    with torch.cuda.device_of(q):
        if options.wheel == "fla":
            dq, dk, dv, dbeta, dg, dstate, *_ = _functions("fla")[1](**given, **_fla_chunks(documents.boundaries))
        else:
            dq, dk, dv, dbeta, dg, dstate = _functions("flash_qla")[1](**given, auto_cp=False)
    if not need_dstate or state is None:
        dstate = None
    elif kept.cu_seqlens is not None:
        dstate = documents.put(dstate, dfinal, kept.cu_seqlens)
    dstate = None if dstate is None else dstate.to(state.dtype)  # type: ignore[union-attr]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg.float(), dbeta.to(beta.dtype), dstate


def _laid_evenly(t: Tensor) -> Tensor:
    """Return a contiguous tensor at a multiple of 16 bytes, as FlashQLA's tensor maps need. What is elsewhere is copied."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


def _functions(name: str) -> tuple[Any, ...]:
    functions = fla_functions() if name == "fla" else qla_functions()
    if isinstance(functions, str):
        raise RuntimeError(functions)
    return functions


def _fla_chunks(boundaries: Tensor | None) -> dict[str, Any]:
    """FLA's host reads how many chunks documents have."""
    indices = None if boundaries is None else _functions("fla")[2](cu_seqlens=boundaries, chunk_size=CHUNK)
    return {"chunk_indices": indices, "chunk_size": CHUNK}
