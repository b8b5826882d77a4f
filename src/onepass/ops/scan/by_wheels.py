"""Whose kernels compute Mamba 2's scan: those of installed wheels, the first that takes a call.

mamba_ssm   mamba-ssm's Triton kernels, which read B and C where they lie, of groups of heads
fla         FLA's of simple gated linear attention: dt A is the logarithm of its gate, dt x its values, B of every head its keys

Their public functions can't be compiled without a graph break, and give second derivatives that are wrong without a word. So the
functions of both passes below them are called, whose names and parameters are looked up first. What is missing is said.
A wheel that is known to compute wrong gradients with the Triton in use is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.fla import refused_gradients, refused_operands
from onepass.ops.scan.chunks import ScanInputs, ScanOptions, step_sizes
from onepass.runtime.documents import document_of, readable_boundaries
from onepass.runtime.errors import version_of
from onepass.runtime.sizes import ceil_div
from onepass.runtime.wheels import Wheel, constant, find_functions

_SCAN = {"x", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "seq_idx", "dt_softplus", "dt_limit"}
_MAMBA = Wheel(
    "mamba-ssm", "mamba-ssm", "pip install mamba-ssm", "mamba_ssm.ops.triton.ssd_combined",
    {
        "_mamba_chunk_scan_combined_fwd": _SCAN,
        "_mamba_chunk_scan_combined_bwd": _SCAN | {"dout", "out", "dfinal_states", "dx", "ddt", "dB", "dC"},
    },
    r"(mamba_ssm|causal_conv1d|triton)\b",
)  # fmt: skip
_MAMBA_ORDER = _MAMBA._replace(module="mamba_ssm.utils.determinism", parameters={"set_deterministic_mode": {"value"}})
_ROWS = {"q", "k", "v", "g", "g_gamma", "scale", "initial_state", "cu_seqlens", "chunk_size", "chunk_indices"}
_FLA = Wheel(
    "FLA", "fla-core", "pip install flash-linear-attention", "fla.ops.simple_gla.chunk",
    {
        "chunk_simple_gla_fwd": _ROWS | {"output_final_state"},
        "chunk_simple_gla_bwd": _ROWS | {"do", "dht"},
        "chunk_local_cumsum": {"g", "chunk_size", "reverse", "scale", "cu_seqlens", "chunk_indices"},
        "prepare_chunk_indices": {"cu_seqlens", "chunk_size"},
    },
    r"(fla|triton)\b",
)  # fmt: skip
_CHUNKS = {"mamba_ssm": 256, "fla": 64}  # tokens
_WIDEST_STATE = 256
_MOST = 1 << 31  # numbers that mamba-ssm's offsets reach
_ORDER = RLock()


class ScanGradients(NamedTuple):
    """The gradients of a call's results."""

    dy: Tensor
    dfinal: Tensor | None


# ---- who takes a call ----


@lru_cache(1)
def mamba_functions() -> tuple[Any, ...] | str:
    """Return mamba-ssm's functions, or why there are none. Imports the package, which takes seconds."""
    functions, order = find_functions(_MAMBA), find_functions(_MAMBA_ORDER)
    if isinstance(functions, str) or isinstance(order, str):
        return functions if isinstance(functions, str) else order
    return functions + order


@lru_cache(1)
def fla_functions() -> tuple[Any, ...] | str:
    """Return FLA's functions and what its sums are scaled by, or why there are none. Imports the package, which takes seconds."""
    functions = find_functions(_FLA)
    if isinstance(functions, str):
        return functions
    scale = functions[0].__globals__.get("RCP_LN2")
    if scale is None:
        return (
            f"FLA {version_of(_FLA.package)} is older than the kernels that are known, whose exponents are of 2 ({_FLA.install})"
        )
    return *functions, scale


@constant
def _why_no_mamba() -> str | None:
    functions = mamba_functions()
    return functions if isinstance(functions, str) else None


@constant
def _why_no_fla() -> str | None:
    functions = fla_functions()
    return functions if isinstance(functions, str) else None


def mamba_refuses(inputs: ScanInputs, final: bool, grads: bool) -> str | None:
    """Say why mamba-ssm can't take a call, or None. `final`: states are asked for. `grads`: a gradient is."""
    refused = refused_operands(x=inputs.x, B=inputs.B, C=inputs.C)
    if refused is not None:
        return refused
    if inputs.cu_seqlens is not None and (final or inputs.states is not None):
        return "mamba-ssm has no states of documents, and initial_states or return_final_states is given with cu_seqlens"
    batch, S, H, P = inputs.x.shape
    G, N = inputs.B.shape[2:]
    if N > _WIDEST_STATE:
        return f"states of {N} are wider than mamba-ssm's {_WIDEST_STATE}"
    chunk = _CHUNKS["mamba_ssm"]
    largest = max(batch * ceil_div(S, chunk) * max(H * P * N, G * chunk * chunk), *map(_reach, inputs[:5]))
    if largest >= _MOST:
        return f"mamba-ssm's offsets are of 32 bits, and this call's reach {largest}"
    return _why_no_mamba()


def _reach(t: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def fla_refuses(inputs: ScanInputs, final: bool, grads: bool) -> str | None:
    """Say why FLA can't take a call, or None."""
    refused = refused_operands(x=inputs.x, B=inputs.B, C=inputs.C)
    if refused is not None:
        return refused
    P, N = inputs.x.shape[-1], inputs.B.shape[-1]
    if P % 2 or N % 2 or N > _WIDEST_STATE:
        return f"heads of {P} with states of {N} are not FLA's, which are even and to {_WIDEST_STATE}"
    refused = refused_gradients(inputs.x.device, "mamba-ssm") if grads else None
    return refused or _why_no_fla()


REFUSALS: dict[str, Callable[[ScanInputs, bool, bool], str | None]] = {"mamba_ssm": mamba_refuses, "fla": fla_refuses}


def wheel_title(name: str) -> str:
    """Return the wheel's name and version, and its chunks, as messages have them."""
    wheel = _MAMBA if name == "mamba_ssm" else _FLA
    return f"{wheel.title} {version_of(wheel.package)}'s kernels, in chunks of {_CHUNKS[name]} tokens"


# ---- calls ----


def wheel_forward(inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor, Tensor | None]:
    """Return y and final states."""
    with torch.cuda.device_of(inputs.x):
        y, final = (_mamba_forward if options.wheel == "mamba_ssm" else _fla_forward)(inputs, options)
    return y, final.contiguous() if options.final and final is not None else None


def wheel_backward(
    grads: ScanGradients, inputs: ScanInputs, options: ScanOptions, need_dstates: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, dt, A, B, C, D, dt_bias and the initial states."""
    with torch.cuda.device_of(inputs.x):
        found = (_mamba_backward if options.wheel == "mamba_ssm" else _fla_backward)(grads, inputs, options)
    found = *found[:7], found[7] if need_dstates else None
    return tuple(
        None if given is None or grad is None else grad.to(given.dtype) for grad, given in zip(found, inputs[:8], strict=True)
    )


def _functions(name: str) -> tuple[Any, ...]:
    functions = mamba_functions() if name == "mamba_ssm" else fla_functions()
    if isinstance(functions, str):
        raise RuntimeError(functions)
    return functions


# ---- mamba-ssm ----


def _mamba_call(inputs: ScanInputs, options: ScanOptions) -> dict[str, Any]:
    A, documents = inputs.A.float(), None
    if inputs.cu_seqlens is not None:
        S = inputs.x.shape[1]
        boundaries, right = readable_boundaries(inputs.cu_seqlens, S)
        documents, A = document_of(boundaries, S)[None], A + torch.where(right, 0.0, torch.nan)
    return {
        "x": inputs.x, "dt": inputs.dt, "A": A, "B": inputs.B, "C": inputs.C, "chunk_size": _CHUNKS["mamba_ssm"], "D": inputs.D,
        "dt_bias": inputs.dt_bias, "initial_states": None if inputs.states is None else inputs.states.float().contiguous(),
        "seq_idx": documents, "dt_softplus": options.softplus, "dt_limit": (options.least, options.most),
    }  # fmt: skip


def _mamba_forward(inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor, Tensor]:
    forward, _, set_order = _functions("mamba_ssm")
    with _in_one_order(set_order):
        y, _, _, _, _, final = forward(**_mamba_call(inputs, options))
    return y, final


def _mamba_backward(grads: ScanGradients, inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor | None, ...]:
    _, backward, set_order = _functions("mamba_ssm")
    dx, ddt, dB, dC = (t.new_empty(t.shape) for t in (inputs.x, inputs.dt, inputs.B, inputs.C))
    given = {"dout": grads.dy.contiguous(), "dfinal_states": grads.dfinal, "dx": dx, "ddt": ddt, "dB": dB, "dC": dC}
    with _in_one_order(set_order):  # "out" is read beside a gate only
        dx, ddt, dA, dB, dC, dD, _, dbias, dstates = backward(**_mamba_call(inputs, options), **given, out=inputs.x)
    return dx, ddt, dA, dB, dC, dD, dbias, None if dstates is None else dstates.contiguous()


@contextmanager
def _in_one_order(set_order: Callable[[bool | None], None]) -> Iterator[None]:
    """Let mamba-ssm add without atomics, and leave its setting as it was."""
    with _ORDER:
        before = set_order.__globals__["_deterministic_override"]
        set_order(True)
        try:
            yield
        finally:
            set_order(before)


# ---- FLA ----


def _fla_call(inputs: ScanInputs, options: ScanOptions) -> tuple[dict[str, Any], dict[str, Any], Tensor]:
    """Return what both passes take, what sums of chunks take, and the steps."""
    _, _, local_sums, chunks_of, scale = _functions("fla")
    x, B, C = inputs.x, inputs.B, inputs.C
    A, boundaries, indices = inputs.A.float(), None, None
    if inputs.cu_seqlens is not None:
        boundaries, right = readable_boundaries(inputs.cu_seqlens, x.shape[1])
        indices = chunks_of(cu_seqlens=boundaries, chunk_size=_CHUNKS["fla"])
        A = A + torch.where(right, 0.0, torch.nan)
    steps = step_sizes(inputs.dt, inputs.dt_bias, options, torch.float32).contiguous()
    serves = x.shape[2] // B.shape[2]
    B, C = (t.repeat_interleave(serves, 2) if serves > 1 else t.contiguous() for t in (B, C))
    chunks = {"cu_seqlens": boundaries, "chunk_size": _CHUNKS["fla"], "chunk_indices": indices}
    call = {
        "q": C, "k": B, "v": (steps[..., None] * x).to(x.dtype).contiguous(), "g": local_sums(g=steps * A, scale=scale, **chunks),
        "g_gamma": None, "scale": 1.0,
        "initial_state": None if inputs.states is None else inputs.states.float().mT.contiguous(), **chunks,
    }  # fmt: skip
    return call, chunks, steps


def _fla_forward(inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor, Tensor | None]:
    call, _, _ = _fla_call(inputs, options)
    y, final = _functions("fla")[0](**call, output_final_state=options.final)
    if inputs.D is not None:
        y = y + inputs.D.float()[:, None] * inputs.x
    return y.to(inputs.x.dtype), None if final is None else final.mT


def _fla_backward(grads: ScanGradients, inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor | None, ...]:
    call, chunks, steps = _fla_call(inputs, options)
    x, dt, A, D = inputs.x, inputs.dt.float(), inputs.A.float(), inputs.D
    dy, dfinal = grads.dy.contiguous(), None if grads.dfinal is None else grads.dfinal.mT.contiguous()
    dC, dB, dv, dsums, dstates = _functions("fla")[1](**call, do=dy, dht=dfinal)
    dg = _functions("fla")[2](g=dsums, reverse=True, **chunks)
    dx = dv * steps[..., None]
    dD = None
    if D is not None:
        dx, dD = dx + D.float()[:, None] * dy, (dy.float() * x).sum((0, 1, 3))
    dsteps = (dv.float() * x).sum(-1) + dg * A
    if inputs.dt_bias is not None:
        dt = dt + inputs.dt_bias.float()
    smooth = torch.nn.functional.softplus(dt) if options.softplus else dt
    ddt = torch.where((smooth >= options.least) & (smooth <= options.most), dsteps, 0.0)
    if options.softplus:
        ddt = ddt * dt.sigmoid()
    groups = (inputs.B.shape[2], -1)
    dB, dC = (t.unflatten(2, groups).float().sum(3) for t in (dB, dC))
    vectors = (dg * steps).sum((0, 1)), dD, None if inputs.dt_bias is None else ddt.sum((0, 1))
    return dx, ddt, vectors[0], dB, dC, *vectors[1:], None if dstates is None else dstates.mT.contiguous()
