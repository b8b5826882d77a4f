"""Sample calls of bias_activation and activation_linear."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.fp8 import new_notes
from onepass.kernels.philox import draw_seed, row_numbers, threshold_of
from onepass.ops.activation import kernels
from onepass.ops.activation.activation_linear import activation_linear, activation_linear_reference
from onepass.ops.activation.activations import ACTIVATIONS
from onepass.ops.activation.bias_activation import bias_activation, bias_activation_reference
from onepass.ops.activation.formula import ActivationOptions
from onepass.ops.activation.fp8 import activation_backward_codes, activation_codes
from onepass.ops.activation.fp8_kernels import ActivationNeeds
from onepass.ops.activation.lora_backward import activation_lora_backward
from onepass.product.lora_samples import LoRASample, random_lora, with_lora
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor, fp8_error, linear_tensors
from onepass.runtime.samples import (
    LARGE,
    NARROW,
    SEED,
    SHAPES,
    THRESHOLD,
    CoveringCall,
    Sample,
    give_main_grad,
    meta,
    random_tensors,
)


def _tensors(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, bias and token_weight for a swiglu, of odd sizes."""
    return random_tensors(((37, 2 * 203), (2 * 203,), (37, 1)), device, dtype)


SAMPLES = {
    "activation_linear": Sample(
        partial(random_tensors, ((3, 13, 406), (29, 203), (29,), (406,), (3, 13))),
        activation_linear_reference,
        {"activation": "swiglu"},
        keywords=("activation_bias", "token_weight"),
    ),
    "activation_linear: lora": LoRASample(
        partial(random_tensors, ((3, 13, 406), (29, 203), (29,), (5, 203), (29, 5))),
        activation_linear_reference,
        {"activation": "swiglu"},
        keywords=("x", "weight", "bias", "lora.a", "lora.b"),
    ),
    "bias_activation": Sample(_tensors, bias_activation_reference, {"activation": "swiglu"}, keywords=("token_weight",)),
    "bias_activation: linear": Sample(
        partial(random_tensors, ((37, 203), (37, 203))), bias_activation_reference, {"activation": "swiglu"}, ("linear",)
    ),
}


# `onepass explain`: shapes of optional tensors that are not vectors along x's last dimension, from x and the tensors given.
SHAPES_OF = {
    "activation_linear": {"token_weight": lambda x, given: x.shape[:-1], "bias": lambda x, given: given["weight"][:1]},
    "bias_activation": {"token_weight": lambda x, given: x.shape[:-1], "linear": lambda x, given: x.shape},
}


# ---- random calls ----

_SAVES = "input", "fp8", "offload"
_FP8_ERROR = 2.0  # of gradients at an x of three bits, where a clamp may turn the other way


def _random_activation(
    bias: str, dtype: torch.dtype, width: int, draw: Draw
) -> tuple[dict[str, RandomTensor], dict[str, Any]]:  # fmt: skip
    """Return x, of the activation's result's width, the bias and the token weight, and the options."""
    lead = draw.lead()
    activation = draw.choose(tuple(ACTIVATIONS))
    act = ACTIVATIONS[activation]
    tensors = {"x": RandomTensor((*lead, width * act.parts), dtype)}
    if draw.flag():
        tensors[bias] = RandomTensor((width * act.parts,), draw.beside(dtype), parameter=True)
    if draw.flag(0.3):
        tensors["token_weight"] = RandomTensor((*lead, 1) if draw.flag() else lead, draw.beside(dtype), "finite")
    options: dict[str, Any] = {"activation": activation}
    if act.gated:
        options |= {"clamp": draw.choose((None, 7.0, 0.5)), "linear_offset": draw.choose((0.0, 1.0))}
    return tensors, options


def _random_bias_activation(draw: Draw) -> RandomCall:
    dtype, width = draw.dtype(), draw.width()
    tensors, options = _random_activation("bias", dtype, width, draw)
    save, dropout = draw.choose(_SAVES, (8, 2, 1)), draw.dropout()
    threshold = threshold_of("dropout", dropout)
    if save == "input" and "bias" not in tensors and ACTIVATIONS[options["activation"]].gated and draw.flag():
        shape = (*tensors["x"].shape[:-1], width)
        tensors |= {"x": RandomTensor(shape, dtype), "linear": RandomTensor(shape, dtype)}

    def formula(
        x: Tensor, bias: Tensor | None = None, token_weight: Tensor | None = None, linear: Tensor | None = None
    ) -> Tensor:
        rows, seed = (row_numbers(x), draw_seed(x)) if threshold else (None, 0)
        more = {"linear": linear, "seed": seed, "threshold": threshold, **options}
        return bias_activation_reference(x, bias, token_weight, rows, **more)

    more = {"save": save, "dropout": dropout}
    return RandomCall(tensors, options | more, formula, gradients=_FP8_ERROR * (save == "fp8"))


def _random_activation_linear(draw: Draw) -> RandomCall:
    dtype = draw.dtype()
    precision = draw.precision(dtype)
    width = draw.width(precision=precision)
    tensors, options = _random_activation("activation_bias", dtype, width, draw)
    tensors |= linear_tensors(draw, width, dtype, precision)
    tensors |= random_lora(draw, "lora", tensors["weight"].shape[0], width, dtype)
    save = draw.choose(_SAVES, (8, 2, 1))
    formula = partial(activation_linear_reference, **options)
    given, error = {**options, "save": save, "precision": precision}, fp8_error(precision)
    gradients = _FP8_ERROR * (save == "fp8")
    return RandomCall(tensors, given, formula, True, gradients=gradients, results=error, arguments=with_lora)


RANDOM_CALLS = {"bias_activation": _random_bias_activation, "activation_linear": _random_activation_linear}

# ---- calls that launch every kernel, in every form that is shipped ----


def covering_calls() -> Iterator[CoveringCall]:
    yield from _bias_activation_calls()
    yield from _activation_linear_calls()
    yield from _codes_calls()


def _bias_activation_calls() -> Iterator[CoveringCall]:
    """Yield every activation at one shape, every shape and type for one of each kind, and every option for swiglu.

    Narrow rows also run with all options at once.
    """
    for activation in ACTIVATIONS:
        yield _bias_activation_call(activation, LARGE)
    for activation in ("gelu", "swiglu"):
        for shape in SHAPES:
            yield _bias_activation_call(activation, shape)
        for dtype in (torch.float16, torch.float32):
            yield _bias_activation_call(activation, LARGE, dtype)
        for shape in NARROW:
            yield _bias_activation_call(activation, shape, option="everything")
        for option in ("fp8", "token_weight", "no bias", "frozen x", "main_grad"):
            yield _bias_activation_call(activation, LARGE, option=option)
    for option in ("fp32 bias", "clamp", "everything"):
        yield _bias_activation_call("swiglu", LARGE, option=option)
    yield _bias_activation_call("swiglu", (600_000, 64), option="everything")
    for activation, act in ACTIVATIONS.items():
        if act.gated:
            yield _two_tensors_call(activation, LARGE)
    for shape in (*SHAPES, *NARROW):
        yield _two_tensors_call("swiglu", shape)
    for dtype in (torch.float16, torch.float32):
        yield _two_tensors_call("swiglu", LARGE, dtype)
    for shape in (LARGE, *NARROW):
        yield _two_tensors_call("swiglu", shape, everything=True)
    for activation in ACTIVATIONS:
        yield _activation_dropout_call(activation, LARGE)
    for activation in ("gelu", "swiglu"):
        for shape in (*SHAPES, *NARROW):
            yield _activation_dropout_call(activation, shape)
        for dtype in (torch.float16, torch.float32):
            yield _activation_dropout_call(activation, LARGE, dtype)
        for shape in (LARGE, *NARROW):
            yield _bias_activation_call(activation, shape, option="everything and dropout")


def _bias_activation_call(
    activation: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, option: str = ""
) -> CoveringCall:
    rows, width = shape
    wide = 2 * width if ACTIVATIONS[activation].gated else width

    def run() -> Tensor:
        x = meta(rows, wide, dtype=dtype, requires_grad=option != "frozen x")
        bias = None if option == "no bias" else meta(wide, dtype=torch.float32 if option == "fp32 bias" else dtype)
        if option == "main_grad":
            give_main_grad(bias)
        everything = option.startswith("everything")
        token_weight = meta(rows, dtype=torch.float32) if option == "token_weight" or everything else None
        clamped = (option == "clamp" or everything) and ACTIVATIONS[activation].gated
        return bias_activation(
            x, bias, activation, token_weight=token_weight, clamp=7.0 if clamped else None,
            linear_offset=1.0 if clamped else 0.0, dropout=0.1 if option.endswith("dropout") else 0.0,
            save="fp8" if option == "fp8" or everything else "input", backend="triton",
        )  # fmt: skip

    return CoveringCall(" ".join(filter(None, (activation, f"{rows}x{width}", option))), dtype, run)


def _two_tensors_call(
    activation: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, everything: bool = False
) -> CoveringCall:
    def run() -> Tensor:
        gate, linear = meta(*shape, dtype=dtype), meta(*shape, dtype=dtype)
        weight = meta(shape[0], dtype=torch.float32) if everything else None
        return bias_activation(
            gate, None, activation, linear=linear, token_weight=weight, clamp=7.0 if everything else None,
            linear_offset=1.0 if everything else 0.0, dropout=0.1 if everything else 0.0, backend="triton",
        )  # fmt: skip

    label = f"{activation} {shape[0]}x{shape[1]} two tensors{' everything' if everything else ''}"
    return CoveringCall(label, dtype, run)


def _activation_dropout_call(activation: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> CoveringCall:
    rows, width = shape
    options = ActivationOptions(activation, None, None, THRESHOLD, SEED)

    def run() -> Tensor:
        x = meta(rows, width * ACTIVATIONS[activation].parts, dtype=dtype)
        bias, dy = meta(x.shape[-1], dtype=dtype), meta(rows, width, dtype=dtype)
        kernels.activation_forward(x, bias, None, None, None, options, dtype)
        kernels.activation_backward(dy, x, None, bias, None, None, None, options, True, True, False, False, dtype, None)
        return x

    return CoveringCall(f"{activation} {rows}x{width} dropout", dtype, run)


def _activation_linear_calls() -> Iterator[CoveringCall]:
    """Yield calls whose backward also rebuilds y; the rest of the kernels is covered by bias_activation's calls."""
    wide, rest = (16384, 8192), ((777, 5000), (600_000, 64), (37, 1))
    for activation in ACTIVATIONS:
        yield _activation_linear_call(activation, wide)
    for activation in ("gelu", "swiglu"):
        for shape in rest:
            yield _activation_linear_call(activation, shape)
        yield _activation_linear_call(activation, (4096, 96), option="everything")
        for dtype in (torch.float16, torch.float32):
            yield _activation_linear_call(activation, wide, dtype)
        for option in ("no activation_bias", "fp8", "everything"):
            yield _activation_linear_call(activation, wide, option=option)
    for activation, width, rank, before in (
        ("swiglu", 14336, 16, 32), ("swiglu", 14336, 16, 0), ("swiglu", 5000, 64, 64), ("gelu", 16384, 16, 16), ("gelu", 40, 4, 4)
    ):  # fmt: skip
        yield _lora_call(activation, width, rank, before)


def _activation_linear_call(
    activation: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, option: str = ""
) -> CoveringCall:
    rows, inner = shape
    act = ACTIVATIONS[activation]

    def run() -> Tensor:
        everything = option == "everything"
        x = meta(rows, inner * act.parts, dtype=dtype)
        return activation_linear(
            x, meta(64, inner, dtype=dtype), None, activation,
            activation_bias=None if option == "no activation_bias" else meta(x.shape[-1], dtype=dtype),
            token_weight=meta(rows, dtype=torch.float32) if everything else None,
            clamp=7.0 if everything and act.gated else None, linear_offset=1.0 if everything and act.gated else 0.0,
            save="fp8" if option in ("fp8", "everything") else "input", backend="triton",
        )  # fmt: skip

    return CoveringCall(" ".join(filter(None, ("activation_linear", activation, f"{rows}x{inner}", option))), dtype, run)


def _lora_call(activation: str, width: int, rank: int, before: int) -> CoveringCall:
    """Return a backward with an adapter's gradient, and where `before` isn't 0 that of the adapter of the layer before."""
    rows, parts, dtype = 4096, ACTIVATIONS[activation].parts, torch.bfloat16
    options = ActivationOptions(activation, None, None)

    def run() -> Tensor:
        x, dy, u, t = (meta(rows, columns, dtype=dtype) for columns in (width * parts, width, rank, before))
        activation_lora_backward(dy, x, None, None, u, t if before else None, options)
        return x

    return CoveringCall(f"activation_linear {activation} {rows}x{width} lora {rank} after {before}", dtype, run)


def _codes_calls() -> Iterator[CoveringCall]:
    """Yield every activation at one width, and swiglu and gelu at every width, type and with every option."""
    for activation in ACTIVATIONS:
        yield _codes_call(activation, 8192)
    for activation in ("gelu", "swiglu"):
        for width in (1408, 5008, 28672, 203, 96, 1):
            yield _codes_call(activation, width)
        yield _codes_call(activation, 8192, torch.float32)
        yield _codes_call(activation, 8192, torch.float16)
        yield _codes_call(activation, 14336)
        for option in ("bare", "everything"):
            yield _codes_call(activation, 8192, option=option)


def _codes_call(activation: str, width: int, dtype: torch.dtype = torch.bfloat16, option: str = "") -> CoveringCall:
    act, rows, everything = ACTIVATIONS[activation], 8192, option == "everything"
    clamped = everything and act.gated
    options = ActivationOptions(activation, 7.0 if clamped else None, 1.0 if clamped else None)

    def run() -> Tensor:
        x, dy = meta(rows, width * act.parts, dtype=dtype), meta(rows, width, dtype=dtype)
        bias = None if option == "bare" else meta(width * act.parts, dtype=dtype)
        weight = meta(rows, dtype=torch.float32) if everything else None
        noted = new_notes("meta")
        for to in (E4M3, E5M2) if everything else (E4M3,):
            target = FP8Target(to, torch.empty((), device="meta"), *noted)
            activation_codes(x, bias, weight, options, FP8Target(to), use_triton=True)
            activation_codes(x, bias, weight, options, target, use_triton=True)
            activation_codes(x, bias, weight, options, target._replace(underflowed=None), use_triton=True)
            activation_backward_codes(
                dy, x, bias, weight, options, target, target._replace(dtype=E4M3),
                ActivationNeeds(dbias=bias is not None, dtoken_weight=weight is not None), use_triton=True,
            )  # fmt: skip
        if option == "bare":  # each output alone
            for needs in (ActivationNeeds(dx_transposed=False), ActivationNeeds(dx=False)):
                activation_backward_codes(dy, x, None, None, options, target, None, needs, use_triton=True)
            activation_backward_codes(None, x, None, None, options, None, target, use_triton=True)
        return x

    return CoveringCall(" ".join(filter(None, ("codes", activation, f"{rows}x{width}", option))), dtype, run, 89)
