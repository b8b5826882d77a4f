"""Sample calls of layer_norm, rms_norm, gated_rms_norm, norm_linear and gated_norm_linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.fp8 import new_notes
from onepass.ops.norm import fp8
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.gated_norm import gated_rms_norm, gated_rms_norm_reference
from onepass.ops.norm.gated_norm_linear import gated_norm_linear, gated_norm_linear_reference
from onepass.ops.norm.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference
from onepass.ops.norm.norm_linear import NORMS, norm_linear, norm_linear_reference
from onepass.product.lora_samples import LoRASample, random_lora, with_lora
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor, fp8_error, linear_tensors
from onepass.runtime.samples import (
    CoveringCall,
    Sample,
    give_main_grad,
    meta,
    random_tensors,
)

SAMPLES = {
    "layer_norm": Sample(partial(random_tensors, ((11, 203), (203,), (203,))), layer_norm_reference),
    "rms_norm": Sample(partial(random_tensors, ((11, 203), (203,))), rms_norm_reference),
    "gated_rms_norm": Sample(partial(random_tensors, ((5, 11, 40), (5, 11, 40), (40,))), gated_rms_norm_reference),
    "norm_linear": Sample(partial(random_tensors, ((11, 203), (203,), (29, 203))), norm_linear_reference),
    "gated_norm_linear": Sample(
        partial(random_tensors, ((3, 5, 160), (3, 5, 160), (40,), (29, 160))), gated_norm_linear_reference, {"group_size": 40}
    ),
    "layer_norm: residual": Sample(
        partial(random_tensors, ((11, 203), (203,), (203,), (11, 203))),
        layer_norm_reference,
        {"zero_centered_gamma": True},
        keywords=("residual",),
    ),
    "rms_norm: residual": Sample(
        partial(random_tensors, ((11, 203), (203,), (11, 203))), rms_norm_reference, keywords=("residual",)
    ),
    "rms_norm: post_residual": Sample(
        partial(random_tensors, ((11, 203), (203,), (11, 203))), rms_norm_reference, keywords=("post_residual",)
    ),
    "gated_rms_norm: the gate first": Sample(
        partial(random_tensors, ((11, 203), (11, 203), (203,))),
        gated_rms_norm_reference,
        {"norm_before_gate": False, "group_size": 29, "activation": "sigmoid", "zero_centered_gamma": True},
    ),
    "gated_norm_linear: rows": Sample(
        partial(random_tensors, ((11, 203), (11, 203), (203,), (29, 203), (29,))),
        gated_norm_linear_reference,
        {"activation": "sigmoid", "zero_centered_gamma": True},
    ),
    "gated_norm_linear: the gate first": Sample(
        partial(random_tensors, ((11, 203), (11, 203), (203,), (29, 203))),
        gated_norm_linear_reference,
        {"norm_before_gate": False, "group_size": 29},
    ),
    "norm_linear: lora": LoRASample(
        partial(random_tensors, ((11, 203), (203,), (29, 203), (5, 203), (29, 5))),
        norm_linear_reference,
        keywords=("x", "norm_weight", "weight", "lora.a", "lora.b"),
    ),
    "norm_linear: all outputs": Sample(
        partial(random_tensors, ((3, 5, 203), (203,), (29, 203), (29,), (203,), (3, 5, 203))),
        norm_linear_reference,
        {"norm": "layer_norm", "return_norm_output": True},
        keywords=("norm_bias", "residual"),
    ),
}


SHAPES_OF = {
    "layer_norm": {"residual": lambda x, given: x.shape},
    "rms_norm": {"residual": lambda x, given: x.shape, "post_residual": lambda x, given: x.shape},
    "gated_rms_norm": {"z": lambda x, given: x.shape},
    "norm_linear": {"residual": lambda x, given: x.shape, "bias": lambda x, given: given["weight"][:1]},
    "gated_norm_linear": {
        "z": lambda x, given: x.shape,
        "norm_weight": lambda x, given: (given.get("group_size") or x.shape[-1],),
        "bias": lambda x, given: given["weight"][:1],
    },
}


# ---- random calls ----

_NARROWEST = 2  # and 3 of a layer norm: gradients of narrower rows cancel, and leave roundings times 1 / sqrt(eps)


def _least_eps(width: int) -> float:
    """Of few numbers all may be equal, which leaves roundings times 1 / sqrt(eps)."""
    return 1e-12 if width > 16 else 1e-5


def _random_norm(layer: bool, draw: Draw) -> RandomCall:
    dtype = draw.dtype()
    width = max(_NARROWEST + layer, draw.width())
    lead = draw.lead()
    tensors = {"x": RandomTensor((*lead, width), dtype)}
    if draw.flag(0.8):
        tensors["weight"] = RandomTensor((width,), draw.beside(dtype), parameter=True)
    if layer and draw.flag():
        tensors["bias"] = RandomTensor((width,), draw.beside(dtype), parameter=True)
    if draw.flag(0.3):
        tensors["residual"] = RandomTensor((*lead, width), draw.beside(dtype))
    options: dict[str, Any] = {"eps": draw.choose((1e-5, _least_eps(width), 0.1))}
    options["zero_centered_gamma"] = "weight" in tensors and draw.flag(0.3)
    if not layer and "residual" not in tensors and draw.flag(0.2):
        tensors["post_residual"] = RandomTensor((*lead, width), draw.beside(dtype))
    options["return_input"] = "post_residual" not in tensors and draw.flag(0.2)
    reference: Callable[..., Any] = layer_norm_reference if layer else rms_norm_reference
    formula = partial(reference, stored=dtype, **options)
    return RandomCall(tensors, {**options, "memory_efficient": draw.flag(0.2)}, formula)


def _random_gated_norm(draw: Draw) -> RandomCall:
    dtype = draw.dtype()
    width, group_size = draw.choose(((max(_NARROWEST, draw.width()), None), (64, 16), (36, 4), (51, 17)), (6, 1, 1, 1))
    lead, norm_first = draw.lead(), draw.flag(0.6)
    # A gate in front: infinity times one of 0 is NaN, from z = -87.3 on, in the formula from -88.7; and exp(z) is right to
    # |z| / 2 units in the last place, which shows where all of a group lies there.
    kinds = ("number", "number") if norm_first else ("finite", "tame")
    shape, types = (*lead, width), (dtype, draw.beside(dtype))
    tensors = {name: RandomTensor(shape, to, kind) for name, to, kind in zip("xz", types, kinds, strict=True)}
    if draw.flag(0.8):
        tensors["weight"] = RandomTensor((width,), draw.beside(dtype), parameter=True)
    options: dict[str, Any] = {
        "eps": draw.choose((1e-5, _least_eps(group_size or width), 0.1)),
        "zero_centered_gamma": "weight" in tensors and draw.flag(0.3),
        "activation": draw.choose(("silu", "sigmoid"), (3, 1)),
        "norm_before_gate": norm_first,
        "group_size": group_size,
    }
    return RandomCall(tensors, options, partial(gated_rms_norm_reference, **options))


def _random_norm_linear(draw: Draw) -> RandomCall:
    dtype, norm = draw.dtype(), draw.choose(tuple(NORMS))
    precision = draw.precision(dtype)
    width = max(_NARROWEST + (norm == "layer_norm"), draw.width(precision=precision))
    lead = draw.lead()
    tensors: dict[str, RandomTensor] = {"x": RandomTensor((*lead, width), dtype)}
    if draw.flag(0.8):
        tensors["norm_weight"] = RandomTensor((width,), draw.beside(dtype), parameter=True)
    tensors |= linear_tensors(draw, width, dtype, precision)
    tensors |= random_lora(draw, "lora", tensors["weight"].shape[0], width, dtype)
    if norm == "layer_norm" and draw.flag():
        tensors["norm_bias"] = RandomTensor((width,), draw.beside(dtype), parameter=True)
    if draw.flag(0.3):
        tensors["residual"] = RandomTensor((*lead, width), draw.beside(dtype))
    options: dict[str, Any] = {
        "norm": norm,
        "eps": draw.choose((None, 1e-5, _least_eps(width), 0.1)),
        "zero_centered_gamma": "norm_weight" in tensors and draw.flag(0.3),
        "return_norm_output": draw.flag(0.3),
        "return_input": draw.flag(0.2),
    }
    missing: dict[str, Any] = {} if "norm_weight" in tensors else {"norm_weight": None}
    formula = partial(norm_linear_reference, stored=dtype, **missing, **options)
    given = {**missing, **options, "precision": precision}
    return RandomCall(tensors, given, formula, products=True, results=fp8_error(precision), arguments=with_lora)


def _random_gated_norm_linear(draw: Draw) -> RandomCall:
    gated = _random_gated_norm(draw)
    shape, dtype = gated.tensors["x"].shape, gated.tensors["x"].dtype
    width, group_size = shape[-1], gated.options["group_size"]
    precision = draw.precision(dtype) if width % 16 == 0 else None
    norm_weight = gated.tensors.pop("weight", None)
    if norm_weight is not None:
        shared = group_size is not None and draw.flag()
        gated.tensors["norm_weight"] = replace(norm_weight, shape=(group_size if shared else width,))
    tensors = gated.tensors | linear_tensors(draw, width, dtype, precision)
    tensors |= random_lora(draw, "lora", tensors["weight"].shape[0], width, dtype)
    missing: dict[str, Any] = {} if norm_weight is not None else {"norm_weight": None}
    formula = partial(gated_norm_linear_reference, **missing, **gated.options)
    given = {**missing, **gated.options, "precision": precision}
    return RandomCall(tensors, given, formula, products=True, results=fp8_error(precision), arguments=with_lora)


RANDOM_CALLS = {
    "layer_norm": partial(_random_norm, True),
    "rms_norm": partial(_random_norm, False),
    "gated_rms_norm": _random_gated_norm,
    "norm_linear": _random_norm_linear,
    "gated_norm_linear": _random_gated_norm_linear,
}

# ---- calls that launch every kernel, in every form that is shipped ----


def covering_calls() -> Iterator[CoveringCall]:
    yield from _norm_calls()
    yield from _gated_norm_calls()
    yield from _norm_linear_calls()
    yield from _codes_calls()


_WIDTHS = (64, 1000, 2048, 4096, 5000, 8192, 12288, 32768, 65536, 131072, 262144)


def _norm_calls() -> Iterator[CoveringCall]:
    """Both norms at all widths; types and a residual at one width of each kernel; all options for layer_norm: it holds more."""
    for norm in ("rms_norm", "layer_norm"):
        for width in _WIDTHS:
            yield _norm_call(norm, width)
        for width in (128, 4096, 12288, 32768):
            yield _norm_call(norm, width, torch.float32)
            yield _norm_call(norm, width, option="residual")
        yield _norm_call(norm, 128, option="heads")
        for width in (64, 1000, 1024, 4096, 5000, 8192):
            yield _norm_call(norm, width, rows=256)
        for option in ("residual", "main_grad"):
            yield _norm_call(norm, 4096, option=option, rows=256)
    for width in _WIDTHS:
        yield _norm_call("rms_norm", width, option="post_residual")
    yield _norm_call("rms_norm", 4096, torch.float32, "post_residual")
    for width in (128, 4096, 12288, 32768):
        for option in ("memory_efficient", "no weight", "frozen x", "frozen weight", "main_grad"):
            yield _norm_call("layer_norm", width, option=option)
        yield _norm_call("layer_norm", width, torch.float32, "residual")
        yield _norm_call("rms_norm", width, option="main_grad")


def _norm_call(norm: str, width: int, dtype: torch.dtype = torch.bfloat16, option: str = "", rows: int = 2048) -> CoveringCall:
    def run() -> Tensor:
        x = meta(rows, width, dtype=dtype, requires_grad=option != "frozen x")
        if option == "heads":  # of a product's rows
            x = meta(4, 512, 32 * width, dtype=dtype)[..., : 16 * width].unflatten(-1, (16, width))
        vectors = [meta(width, dtype=dtype, requires_grad=option != "frozen weight") for _ in range(1 + (norm == "layer_norm"))]
        if option == "main_grad":
            give_main_grad(*vectors)
        added = {option: meta(rows, width, dtype=dtype)} if option in ("residual", "post_residual") else {}
        function: Callable[..., Any] = layer_norm if norm == "layer_norm" else rms_norm
        y = function(
            x, *([] if option == "no weight" else vectors), **added,
            memory_efficient=option == "memory_efficient", backend="triton",
        )  # fmt: skip
        result: Tensor = torch.cat(y) if option == "residual" else y  # both gradients come back
        return result

    return CoveringCall(" ".join(filter(None, (norm, f"{rows}x{width}", option))), dtype, run)


def _gated_norm_calls() -> Iterator[CoveringCall]:
    """Heads and rows of all tiles; options and types of heads that people have."""
    for width in (64, 128, 256, 1000, 2048, 4096, 5120, 8192):
        yield _gated_norm_call(width)
    yield _gated_norm_call(1024, groups=8, norm_before_gate=False)
    for option in ("frozen weight", "frozen x", "main_grad", "heads"):
        yield _gated_norm_call(128, option=option)
    yield _gated_norm_call(128, activation="sigmoid", zero_centered_gamma=True)
    for width in (128, 4096, 5120, 8192):
        yield _gated_norm_call(width, torch.float32)
        yield _gated_norm_call(width, norm_before_gate=False)
    for width in (64, 128, 256, 2048):  # backward makes the rows again
        yield _gated_norm_linear_call(width)
    for width in (128, 1024):
        yield _gated_norm_linear_call(width, norm_before_gate=False)


def _gated_norm_call(
    width: int, dtype: torch.dtype = torch.bfloat16, option: str = "", groups: int = 1, **options: Any
) -> CoveringCall:
    def run() -> Tensor:
        x, z = (meta(65536, groups * width, dtype=dtype, requires_grad=option != "frozen x") for _ in range(2))
        if option == "heads":  # z of a product's rows
            z = meta(4, 512, 64 * width, dtype=dtype)[..., : 32 * width].unflatten(-1, (32, width))
        weight = meta(groups * width, dtype=dtype, requires_grad=option != "frozen weight")
        if option == "main_grad":
            give_main_grad(weight)
        group_size = None if groups == 1 else width
        return gated_rms_norm(x.view(z.shape), z, weight, group_size=group_size, backend="triton", **options)

    said = [f"{name}={value}" for name, value in options.items()]
    return CoveringCall(" ".join(filter(None, ("gated_rms_norm", f"{groups}x{width}", option, *said))), dtype, run)


def _gated_norm_linear_call(head: int, norm_before_gate: bool = True) -> CoveringCall:
    dtype, width = torch.bfloat16, head * max(1, 4096 // head)

    def run() -> Tensor:
        x, z = (meta(2048, width, dtype=dtype) for _ in range(2))
        norm_weight, weight = meta(head if norm_before_gate else width, dtype=dtype), meta(64, width, dtype=dtype)
        options = {"group_size": head, "norm_before_gate": norm_before_gate}
        return gated_norm_linear(x, z, norm_weight, weight, backend="triton", **options)  # type: ignore[arg-type]

    return CoveringCall(f"gated_norm_linear {width // head}x{head}{'' if norm_before_gate else ' gate first'}", dtype, run)


def _norm_linear_calls() -> Iterator[CoveringCall]:
    """The norms' kernels are covered; here they also rebuild y, and add h's gradient while they do."""
    for norm in NORMS:
        for width in (4096, 12288, 32768):
            yield _norm_linear_call(norm, width)
        for width in (64, 2048, 4096, 8192, 12288, 32768):
            yield _norm_linear_call(norm, width, residual=True)


def _norm_linear_call(norm: str, width: int, residual: bool = False) -> CoveringCall:
    dtype = torch.bfloat16

    def run() -> Tensor:
        norm_bias = meta(width, dtype=dtype) if norm == "layer_norm" else None
        x, norm_weight, weight = meta(2048, width, dtype=dtype), meta(width, dtype=dtype), meta(64, width, dtype=dtype)
        added = meta(2048, width, dtype=dtype) if residual else None
        y: Any = norm_linear(x, norm_weight, weight, residual=added, norm=norm, norm_bias=norm_bias, backend="triton")
        result: Tensor = torch.cat(y, -1) if residual else y  # both gradients come back
        return result

    return CoveringCall(f"norm_linear {norm} 2048x{width}{' residual' if residual else ''}", dtype, run)


def _codes_calls() -> Iterator[CoveringCall]:
    """Codes of both norms by row and by tensor, and transposed: what is held and what is read again, and both types."""
    for norm in ("rms_norm", "layer_norm"):
        for width in (64, 1000, 2048, 4096, 5008, 8192, 12288, 20480, 32768, 65536):
            yield _codes_call(norm, width)
            yield _codes_call(norm, width, residual=True)
        for width in (128, 4096, 12288, 32768):
            yield _codes_call(norm, width, torch.float32, residual=True)
            yield _codes_call(norm, width, to=E5M2)


def _codes_call(
    norm: str, width: int, dtype: torch.dtype = torch.bfloat16, to: torch.dtype = E4M3, residual: bool = False
) -> CoveringCall:
    def run() -> Tensor:
        x, weight = meta(2048, width, dtype=dtype), meta(width, dtype=dtype).detach()
        bias = meta(width, dtype=dtype).detach() if norm == "layer_norm" else None
        added = meta(2048, width, dtype=dtype).detach() if residual else None
        options = NormOptions(norm == "layer_norm", 1e-6, False)
        noted = new_notes("meta")
        target = FP8Target(to, torch.empty((), device="meta"), *noted)
        fp8.norm_codes(x.detach(), added, weight, bias, options, FP8Target(to), True)
        stats = fp8.norm_codes(x.detach(), added, weight, bias, options, target, True)[-1]
        measured = target._replace(underflowed=None)
        fp8.norm_codes(x.detach(), added, weight, bias, options, measured, False)
        fp8.norm_codes(x.detach(), added, weight, bias, options, FP8Target(to, target.scale), False)
        fp8.norm_codes_transposed(x.detach(), stats, weight, bias, options, target)
        fp8.norm_codes_transposed(x.detach(), None, weight, bias, options, target)
        return x

    label = f"fp8 norm {norm.removesuffix('_norm')} 2048x{width}{' e5m2' if to is E5M2 else ''}{' residual' if residual else ''}"
    return CoveringCall(label, dtype, run, 89)
