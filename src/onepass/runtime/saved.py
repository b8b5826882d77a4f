"""How an op keeps its input for backward: unchanged ("input"), in eight bits ("fp8"), or in the host's memory ("offload").

fp8: each run of 64 neighbours in a row shares a power of two, kept as its exponent in one byte, and each value becomes an
e4m3 number: 65/128 of bf16's bytes, and an error of at most 1/16 of the value or 2**-17 of the run's largest, whatever its
scale (fp32 subnormals aside). Nothing saturates; NaN and infinities come back as NaN.

offload: a side stream copies into pinned memory. In backward the copy back begins one tensor ahead, under the work of the layer
before. Both directions share one stream, so a tensor is whole before it returns.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from onepass.runtime.dispatch import cast
from onepass.runtime.op import Registered
from onepass.runtime.sizes import ceil_div

SAVES = ("input", "fp8", "offload")
FP8_RUN = 64  # neighbours that share a scale


@dataclass(frozen=True)
class SavedFormat:
    """What `unpack` needs besides the tensors."""

    save: str
    dtype: torch.dtype
    device: torch.device
    parts: int  # equal parts of the last dimension; a scale belongs to one of them


def saved_format(x: Tensor, save: str, parts: int) -> SavedFormat:
    return SavedFormat(save, x.dtype, x.device, parts)


def pack(x: Tensor, stored: SavedFormat) -> tuple[Tensor, ...]:
    """Return the tensors to save for backward in place of x."""
    save = stored.save
    if save == "fp8":
        return fp8_quantise(x, stored.parts)
    return (offload(x),) if save == "offload" else (x,)


def unpack(tensors: tuple[Tensor, ...], stored: SavedFormat) -> Tensor:
    if stored.save == "fp8":
        codes, exponents = tensors
        return fp8_dequantise(codes, exponents, stored.dtype, stored.parts)
    return fetch(tensors[0], stored.device) if stored.save == "offload" else tensors[0]


# ---- fp8 ----


def fp8_quantise(x: Tensor, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Return x as e4m3 codes (uint8, x's shape) and the exponents of its runs (uint8, [..., parts * runs]).

    Runs do not cross the borders of the `parts` equal parts of the last dimension, nor those of rows.
    """
    size = x.shape[-1] // parts
    runs = ceil_div(size, FP8_RUN)
    wide = x.float().unflatten(-1, (parts, size))
    wide = F.pad(wide, (0, runs * FP8_RUN - size)).unflatten(-1, (runs, FP8_RUN))
    largest = wide.abs().nan_to_num(0.0, 0.0).amax(-1)
    # the least exponent that brings the run's largest to at most 448 = 1.75 * 2**8
    exponent = ((largest.view(torch.int32) + 0x1FFFFF) >> 23).sub(127 + 8).clamp(min=-126)
    scaled = wide * ((127 - exponent) << 23).view(torch.float32).unsqueeze(-1)
    scaled = torch.where(scaled.isfinite(), scaled, torch.nan)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)[..., :size].flatten(-2)
    return codes.contiguous(), (exponent + 127).to(torch.uint8).flatten(-2)


def fp8_empty(x: Tensor, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Allocate x's codes and exponents."""
    runs = parts * ceil_div(x.shape[-1] // parts, FP8_RUN)
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    return codes, x.new_empty((*x.shape[:-1], runs), dtype=torch.uint8)


def fp8_dequantise(codes: Tensor, exponents: Tensor, dtype: torch.dtype, parts: int = 1) -> Tensor:
    size = codes.shape[-1] // parts
    scale = (exponents.int() << 23).view(torch.float32).unflatten(-1, (parts, -1))
    values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (parts, size))
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)  # a type's largest numbers round up past it
    values = (values * scale.repeat_interleave(FP8_RUN, -1)[..., :size]).clamp(-largest, largest)
    return cast(values.flatten(-2), dtype)


# ---- offload ----


@dataclass
class _OffloadStream:
    """One device's side stream, and the order in which tensors were sent.

    Host copies are keyed by object, not by address: an address is reused when a graph dies.
    """

    stream: torch.cuda.Stream
    last: weakref.ref[Tensor] | None = None
    before: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)  # a weak reference or None for each
    ahead: tuple[weakref.ref[Tensor], Tensor, torch.cuda.Event] | None = None  # a copy back that runs ahead of its request


_offload_streams: dict[int, _OffloadStream] = {}


def _offload_stream(device: torch.device) -> _OffloadStream:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("save='offload' can't be captured in a CUDA graph: use save='input' or 'fp8' there")
    if device.index not in _offload_streams:
        _offload_streams[device.index] = _OffloadStream(torch.cuda.Stream(device))
    return _offload_streams[device.index]


def _offload(x: Tensor) -> Tensor:
    if x.device.type != "cuda":  # the host has it already; a registered op must not return its own input
        return x.clone()
    traffic = _offload_stream(x.device)
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    traffic.stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(traffic.stream):
        host.copy_(x, non_blocking=True)
    x.record_stream(traffic.stream)
    traffic.before[host], traffic.last = traffic.last, weakref.ref(host)
    traffic.ahead = None  # a forward has begun: drop what a backward copied back and did not use
    return host


def _fetch(host: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return host.clone()
    traffic = _offload_stream(device)
    ahead, traffic.ahead = traffic.ahead, None
    if ahead is not None and ahead[0]() is host:
        _, x, arrived = ahead
    else:
        x, arrived = _copy_back(traffic, host, device)
    earlier = traffic.before.get(host)
    earlier_host = earlier() if earlier is not None else None
    if earlier_host is not None:
        traffic.ahead = weakref.ref(earlier_host), *_copy_back(traffic, earlier_host, device)
    stream = torch.cuda.current_stream(device)
    stream.wait_event(arrived)
    x.record_stream(stream)  # which may not be the stream that it was copied for
    return x


def _copy_back(traffic: _OffloadStream, host: Tensor, device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
    x = torch.empty(host.shape, dtype=host.dtype, device=device)
    traffic.stream.wait_stream(torch.cuda.current_stream(device))  # an earlier tensor may still use x's memory
    with torch.cuda.stream(traffic.stream):
        x.copy_(host, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(traffic.stream)
    x.record_stream(traffic.stream)
    return x, arrived


_registered_offload = Registered(
    "offload(Tensor x) -> Tensor", _offload, lambda x: torch.empty(x.shape, dtype=x.dtype, device="cpu")
)
_registered_fetch = Registered(
    "fetch(Tensor host, Device device) -> Tensor",
    _fetch,
    lambda host, device: torch.empty(host.shape, dtype=host.dtype, device=device),
)


def offload(x: Tensor) -> Tensor:
    """Return x's copy in pinned host memory, or x itself where it is on a CPU."""
    if x.device.type == "cpu":
        return x
    host: Tensor = _registered_offload(x)
    return host


def fetch(host: Tensor, device: torch.device) -> Tensor:
    """Return what was offloaded, on its device."""
    if device.type == "cpu":
        return host
    x: Tensor = _registered_fetch(host, device)
    return x
