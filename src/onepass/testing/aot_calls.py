"""Which calls cover an op, for `onepass.testing.aot`: between them they launch every kernel in every form that is shipped.

They are made on tensors of the meta device, which have shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass.kernels import adamw as adamw_kernels
from onepass.kernels import bias_activation as activation_kernels
from onepass.kernels import dropout_add as dropout_kernels
from onepass.kernels import ragged_norm, softmax_rows, softmax_whole_rows
from onepass.kernels.activations import ACTIVATIONS
from onepass.kernels.adamw_formula import Stretch
from onepass.kernels.cross_entropy_formula import Terms
from onepass.ops.activation_linear import activation_linear
from onepass.ops.attention import SIZES, attention
from onepass.ops.bias_activation import bias_activation
from onepass.ops.cross_entropy import cross_entropy
from onepass.ops.dropout_add import dropout_add
from onepass.ops.linear_cross_entropy import linear_cross_entropy
from onepass.ops.norm import layer_norm, rms_norm
from onepass.ops.norm_linear import NORMS, norm_linear
from onepass.ops.rope import rope
from onepass.runtime.sizes import ceil_div


@dataclass(frozen=True)
class Call:
    """A call that launches kernels, and the gradient it asks for: `run` returns what to differentiate."""

    label: str
    dtype: torch.dtype
    run: Callable[[], Tensor]


_LARGE = (16384, 16384)
_SHAPES = ((16384, 14336), (2048, 16384), (600_000, 64), (777, 5000), (131_072, 1408), (37, 1))
_NARROW = ((37, 1), (60_000, 16), (4096, 96))  # fp8 has a scale a block of columns: here a row is less than one, or few


def _bias_activation_calls() -> Iterator[Call]:
    """All activations at one shape, all shapes and types for one of each kind, all options for swiglu, all
    at once where rows are narrow, too."""
    for activation in ACTIVATIONS:
        yield _bias_activation_call(activation, _LARGE)
    for activation in ("gelu", "swiglu"):
        for shape in _SHAPES:
            yield _bias_activation_call(activation, shape)
        for dtype in (torch.float16, torch.float32):
            yield _bias_activation_call(activation, _LARGE, dtype)
        for shape in _NARROW:
            yield _bias_activation_call(activation, shape, option="everything")
        for option in ("fp8", "token_weight", "no bias", "frozen x", "main_grad"):
            yield _bias_activation_call(activation, _LARGE, option=option)
    for option in ("fp32 bias", "clamp", "everything"):
        yield _bias_activation_call("swiglu", _LARGE, option=option)
    yield _bias_activation_call("swiglu", (600_000, 64), option="everything")
    for activation in ACTIVATIONS:
        yield _activation_dropout_call(activation, _LARGE)
    for activation in ("gelu", "swiglu"):
        for shape in (*_SHAPES, *_NARROW):
            yield _activation_dropout_call(activation, shape)
        for dtype in (torch.float16, torch.float32):
            yield _activation_dropout_call(activation, _LARGE, dtype)
        for shape in (_LARGE, *_NARROW):
            yield _bias_activation_call(activation, shape, option="everything and dropout")


def _bias_activation_call(activation: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, option: str = "") -> Call:
    rows, width = shape
    wide = 2 * width if ACTIVATIONS[activation].gated else width

    def run() -> Tensor:
        x = _meta(rows, wide, dtype=dtype, asked=option != "frozen x")
        bias = None if option == "no bias" else _meta(wide, dtype=torch.float32 if option == "fp32 bias" else dtype)
        if option == "main_grad":
            _with_main_grad(bias)
        everything = option.startswith("everything")
        token_weight = _meta(rows, dtype=torch.float32) if option == "token_weight" or everything else None
        clamped = (option == "clamp" or everything) and ACTIVATIONS[activation].gated
        return bias_activation(
            x, bias, activation, token_weight=token_weight, clamp=7.0 if clamped else None,
            linear_offset=1.0 if clamped else 0.0, dropout=0.1 if option.endswith("dropout") else 0.0,
            save="fp8" if option == "fp8" or everything else "input", backend="triton",
        )  # fmt: skip

    return Call(" ".join(filter(None, (activation, f"{rows}x{width}", option))), dtype, run)


_SEED, _THRESHOLD = 1 << 62, 6554  # as a number, as it is in eager mode on a GPU


def _activation_dropout_call(activation: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Call:
    rows, width = shape
    dropout: dict[str, Any] = {"seed": _SEED, "threshold": _THRESHOLD}

    def run() -> Tensor:
        x = _meta(rows, width * ACTIVATIONS[activation].parts, dtype=dtype)
        bias, dy = _meta(x.shape[-1], dtype=dtype), _meta(rows, width, dtype=dtype)
        activation_kernels.activation_forward(x, bias, None, activation, None, None, **dropout)
        needs = True, True, False
        activation_kernels.activation_backward(dy, x, None, bias, None, activation, None, None, *needs, **dropout)
        return x

    return Call(f"{activation} {rows}x{width} dropout", dtype, run)


def _dropout_add_calls() -> Iterator[Call]:
    """All shapes with the seed as a number; types, and what is left out, at one; the seed in memory, as graphs have it."""
    for shape in (*_SHAPES, *_NARROW, _LARGE):
        yield _dropout_add_call(shape)
    for dtype in (torch.float16, torch.float32):
        yield _dropout_add_call(_LARGE, dtype)
        yield _dropout_add_call(_LARGE, dtype, "seed in memory")
    for option in ("seed in memory", "no bias", "nothing dropped", "fp32 residual", "main_grad", "some rows", "frozen x"):
        yield _dropout_add_call(_LARGE, option=option)


def _dropout_add_call(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, option: str = "") -> Call:
    def run() -> Tensor:
        x, bias = _meta(*shape, dtype=dtype, asked=option != "frozen x"), _meta(shape[1], dtype=dtype)
        residual = _meta(*shape, dtype=torch.float32 if option == "fp32 residual" else dtype)
        if option == "main_grad":
            _with_main_grad(bias)
        if option in ("seed in memory", "nothing dropped", "main_grad", "frozen x"):
            y: Tensor = dropout_add(x, residual, 0.0 if option == "nothing dropped" else 0.1, bias=bias, backend="triton")
            return y
        first = torch.empty(1, dtype=torch.int64, device="meta") if option == "some rows" else None
        added = None if option == "no bias" else bias
        y = dropout_kernels.dropout_add_forward(x, residual, added, _SEED, first, _THRESHOLD)
        dropout_kernels.dropout_add_backward(y, _SEED, first, _THRESHOLD, dtype, None if added is None else dtype)
        return x

    return Call(" ".join(filter(None, ("dropout_add", f"{shape[0]}x{shape[1]}", option))), dtype, run)


_WIDTHS = (64, 1000, 2048, 4096, 5000, 8192, 12288, 32768, 65536, 131072, 262144)


def _norm_calls() -> Iterator[Call]:
    """Both norms at all widths; types and a residual at one width of each kernel; all options for layer_norm: it holds more."""
    for norm in ("rms_norm", "layer_norm"):
        for width in _WIDTHS:
            yield _norm_call(norm, width)
        for width in (128, 4096, 12288, 32768):
            yield _norm_call(norm, width, torch.float32)
            yield _norm_call(norm, width, option="residual")
        yield _norm_call(norm, 128, option="heads")
    for width in (128, 4096, 12288, 32768):
        for option in ("memory_efficient", "no weight", "frozen x", "frozen weight", "main_grad"):
            yield _norm_call("layer_norm", width, option=option)
        yield _norm_call("layer_norm", width, torch.float32, "residual")
        yield _norm_call("rms_norm", width, option="main_grad")


def _norm_call(norm: str, width: int, dtype: torch.dtype = torch.bfloat16, option: str = "") -> Call:
    def run() -> Tensor:
        x = _meta(2048, width, dtype=dtype, asked=option != "frozen x")
        if option == "heads":  # of a product's rows
            x = _meta(4, 512, 32 * width, dtype=dtype)[..., : 16 * width].unflatten(-1, (16, width))
        vectors = [_meta(width, dtype=dtype, asked=option != "frozen weight") for _ in range(1 + (norm == "layer_norm"))]
        if option == "main_grad":
            _with_main_grad(*vectors)
        residual = _meta(2048, width, dtype=dtype) if option == "residual" else None
        function: Callable[..., Any] = layer_norm if norm == "layer_norm" else rms_norm
        y = function(
            x, *([] if option == "no weight" else vectors), residual=residual,
            memory_efficient=option == "memory_efficient", backend="triton",
        )  # fmt: skip
        result: Tensor = torch.cat(y) if residual is not None else y  # both gradients come back
        return result

    return Call(" ".join(filter(None, (norm, f"2048x{width}", option))), dtype, run)


def _norm_linear_calls() -> Iterator[Call]:
    """The norms' kernels are covered; here they also rebuild y, and add h's gradient while they do."""
    for norm in NORMS:
        for width in (4096, 12288, 32768):
            yield _norm_linear_call(norm, width)
        for width in (64, 2048, 4096, 8192, 12288, 32768):
            yield _norm_linear_call(norm, width, residual=True)


def _norm_linear_call(norm: str, width: int, residual: bool = False) -> Call:
    dtype = torch.bfloat16

    def run() -> Tensor:
        norm_bias = _meta(width, dtype=dtype) if norm == "layer_norm" else None
        x, norm_weight, weight = _meta(2048, width, dtype=dtype), _meta(width, dtype=dtype), _meta(64, width, dtype=dtype)
        added = _meta(2048, width, dtype=dtype) if residual else None
        y: Any = norm_linear(x, norm_weight, weight, residual=added, norm=norm, norm_bias=norm_bias, backend="triton")
        result: Tensor = torch.cat(y, -1) if residual else y  # both gradients come back
        return result

    return Call(f"norm_linear {norm} 2048x{width}{' residual' if residual else ''}", dtype, run)


def _activation_linear_calls() -> Iterator[Call]:
    """The activations' kernels are covered, with a bias: here backward also rebuilds y, and forward adds nothing."""
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


def _activation_linear_call(
    activation: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, option: str = ""
) -> Call:
    rows, inner = shape
    act = ACTIVATIONS[activation]

    def run() -> Tensor:
        everything = option == "everything"
        x = _meta(rows, inner * act.parts, dtype=dtype)
        return activation_linear(
            x, _meta(64, inner, dtype=dtype), None, activation,
            activation_bias=None if option == "no activation_bias" else _meta(x.shape[-1], dtype=dtype),
            token_weight=_meta(rows, dtype=torch.float32) if everything else None,
            clamp=7.0 if everything and act.gated else None, linear_offset=1.0 if everything and act.gated else 0.0,
            save="fp8" if option in ("fp8", "everything") else "input", backend="triton",
        )  # fmt: skip

    return Call(" ".join(filter(None, ("activation_linear", activation, f"{rows}x{inner}", option))), dtype, run)


def _cross_entropy_calls() -> Iterator[Call]:
    """Vocabularies of all alignments, types and options at one; what ranks merge; statistics and gradient at once."""
    for width in (32000, 50257, 128256):
        yield _cross_entropy_call(width)
    for dtype in (torch.float16, torch.float32):
        yield _cross_entropy_call(128256, dtype)
    for option in ("smoothing", "over the logits", "sum"):
        yield _cross_entropy_call(128256, option=option)
    for width in (1000, 50257, 128256):
        for dtype in (torch.bfloat16, torch.float32):
            for terms in (Terms(), Terms(smoothing=0.1, softcap=30.0)):
                yield _both_call(width, dtype, terms)


def _cross_entropy_call(width: int, dtype: torch.dtype = torch.bfloat16, option: str = "") -> Call:
    def run() -> Tensor:
        logits, labels = _meta(2048, width, dtype=dtype), torch.empty(2048, dtype=torch.int64, device="meta")
        over, smoothing = option == "over the logits", 0.1 if option == "smoothing" else 0.0
        given = logits * 1 if over else logits
        reduction = "sum" if option == "sum" else "mean"
        loss: Tensor = cross_entropy(
            given, labels, reduction=reduction, label_smoothing=smoothing, inplace_backward=over, backend="triton"
        )
        return loss

    return Call(" ".join(filter(None, (f"cross_entropy 2048x{width}", option))), dtype, run)


def _both_call(width: int, dtype: torch.dtype, terms: Terms) -> Call:
    """Of whole rows whose incoming gradient is known, and of their statistics as one rank of several sends them."""

    def run() -> Tensor:
        x, labels = _meta(2048, width, dtype=dtype), torch.empty(2048, dtype=torch.int64, device="meta")
        incoming, place = _meta(2048, dtype=torch.float32), torch.empty(2, dtype=torch.int64, device="meta")
        softmax_whole_rows.statistics_and_gradient(x, x, labels, terms, True, incoming)
        parts = softmax_rows.merged(softmax_rows.statistics(x, labels, terms, True, 0, 0, place), terms, True)
        found = softmax_rows.finished(torch.cat([parts, parts]), labels, terms, True, 0, dtype, place)
        each = softmax_rows.Incoming(*[incoming] * 4)
        softmax_rows.gradient(x, x, labels, terms, found.logsumexp, found.entropy, each, 0, 0, place)
        return x

    said = "softcap and smoothing" if terms.softcap else ""
    return Call(" ".join(filter(None, (f"cross_entropy rows 2048x{width}", said))), dtype, run)


_OPTIONS: dict[str, dict[str, Any]] = {
    "smoothing": {"label_smoothing": 0.1},
    "all terms": {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 30.0, "logit_scale": 0.5},
}
_ROOMY = 1 << 40  # bytes: whole rows at a time
_WAYS: dict[str, dict[str, Any]] = {  # and what leaves the planner no other one
    "promised": {"grad_scale": 1.0},
    "keep": {"reduction": "none", "chunk_bytes": _ROOMY},
    "forward": {"logits_dtype": torch.float32, "chunk_bytes": _ROOMY},
    "again": {"reduction": "none", "logits_dtype": torch.float32, "chunk_bytes": _ROOMY},
    "blocks": {"reduction": "none", "chunk_bytes": 1 << 20},
}


def _linear_cross_entropy_calls() -> Iterator[Call]:
    """Vocabularies that take each kind of tile of whole rows; every way, all terms, types, statistics and main_grad at one; odd
    vocabularies, whose weight gets rows of zeros on a GPU."""
    for width in (1000, 32000, 50304, 128256):
        for way in _WAYS if width == 128256 else ("promised", "forward"):
            yield _linear_cross_entropy_call(width, way)
        for option in ("smoothing", "all terms"):
            yield _linear_cross_entropy_call(width, "promised", option=option)
    for way in _WAYS:
        yield _linear_cross_entropy_call(128256, way, option="all terms")
    for way in ("promised", "keep", "blocks"):
        for dtype in (torch.float16, torch.float32):
            yield _linear_cross_entropy_call(128256, way, dtype)
        yield _linear_cross_entropy_call(128256, way, option="main_grad")
    for way in ("keep", "again", "blocks"):
        yield _linear_cross_entropy_call(128256, way, option="stats")
    for width in (1001, 50257):
        for dtype in (torch.bfloat16, torch.float32):
            for terms in (Terms(), Terms(smoothing=0.1, z_loss=1e-3, softcap=30.0)):
                yield _padded_call(width, dtype, terms)


def _linear_cross_entropy_call(width: int, way: str, dtype: torch.dtype = torch.bfloat16, option: str = "") -> Call:
    options = _WAYS[way] | _OPTIONS.get(option, {})

    def run() -> Tensor:
        hidden, weight = _meta(2048, 64, dtype=dtype), _meta(width, 64, dtype=dtype)
        labels = torch.empty(2048, dtype=torch.int64, device="meta")
        if option == "main_grad":
            _with_main_grad(weight)
        found = linear_cross_entropy(hidden, weight, labels, return_stats=option == "stats", backend="triton", **options)
        result: Tensor = torch.cat([found[0], *found[1][:3]]) if option == "stats" else found  # a gradient comes for each
        return result

    return Call(" ".join(filter(None, (f"linear_cross_entropy 2048x{width}", way, option))), dtype, run)


def _padded_call(width: int, dtype: torch.dtype, terms: Terms) -> Call:
    """Of the logits that a weight with rows of zeros after its last gives; where they are fp32, their gradient lies beside."""

    def run() -> Tensor:
        room = ceil_div(width, 64) * 64
        buffer, labels = _meta(2048, room, dtype=dtype), torch.empty(2048, dtype=torch.int64, device="meta")
        x, incoming = buffer[:, :width], _meta(2048, dtype=torch.float32)
        out = _meta(2048, room, dtype=torch.bfloat16)[:, :width] if dtype is torch.float32 else x
        softmax_whole_rows.statistics_and_gradient(x, out, labels, terms, False, incoming, room)
        softmax_rows.statistics(x, labels, terms, False, 0, width, None, room)
        softmax_rows.gradient(x, out, labels, terms, incoming, None, softmax_rows.Incoming(incoming), 0, width, None, room)
        return buffer

    said = "all terms" if terms.softcap else ""
    return Call(" ".join(filter(None, (f"linear_cross_entropy rows 2048x{width}", said))), dtype, run)


_HEADS = (  # of q, of k, their width, and how much of it is turned: grouped, alone, one k for all, odd and partly turned ones
    (32, 8, 128, 128), (12, 12, 64, 64), (71, 1, 64, 64), (40, 40, 128, 128), (16, 16, 80, 32), (32, 32, 80, 80), (24, 8, 96, 96),
    (8, 4, 256, 256), (64, 8, 256, 64), (3, 1, 10, 6), (1, 1, 4096, 4096),
)  # fmt: skip


def _rope_calls() -> Iterator[Call]:
    """All heads, in halves and interleaved; types, tables and what is frozen at one of them."""
    for heads in _HEADS:
        for option in ("", "interleaved"):
            yield _rope_call(heads, option=option)
    for dtype in (torch.float16, torch.float32):
        for option in ("", "interleaved"):
            yield _rope_call(_HEADS[0], dtype, option)
    for option in ("bf16 tables", "frozen q", "frozen k"):
        yield _rope_call(_HEADS[0], option=option)


def _rope_call(heads: tuple[int, int, int, int], dtype: torch.dtype = torch.bfloat16, option: str = "") -> Call:
    HQ, HK, D, R = heads

    def run() -> Tensor:
        q, k = (_meta(4, 512, H, D, dtype=dtype, asked=option != f"frozen {name}") for name, H in (("q", HQ), ("k", HK)))
        table = dtype if option == "bf16 tables" else torch.float32
        cos, sin = (_meta(512, R // 2, dtype=table, asked=False) for _ in range(2))
        turned = rope(q, k, cos, sin, interleaved=option == "interleaved", backend="triton")
        return torch.cat([y.flatten() for y in turned])

    return Call(" ".join(filter(None, (f"rope {HQ}/{HK}x{D}", f"{R} turned" if R < D else "", option))), dtype, run)


def _attention_calls() -> Iterator[Call]:
    """All sizes of heads, alone and grouped; the other type, and what is not turned or a part of something, at one of them."""
    for D in SIZES:
        yield _attention_call(8, 8, D)
        yield _attention_call(32, 8, D)
    yield _attention_call(32, 8, 64, torch.float16)
    for option in ("not turned", "odd strides"):
        yield _attention_call(32, 8, 64, option=option)


def _attention_call(heads: int, groups: int, D: int, dtype: torch.dtype = torch.bfloat16, option: str = "") -> Call:
    def run() -> Tensor:
        columns = (heads + 2 * groups) * D
        qkv = _meta(4, 512, columns + 1, dtype=dtype)[..., 1:] if option else _meta(4, 512, columns, dtype=dtype)
        cos = None if option == "not turned" else _meta(512, D // 2, dtype=torch.float32, asked=False)
        return attention(qkv, heads, groups, cos=cos, sin=cos, backend="triton")

    return Call(" ".join(filter(None, (f"attention {heads}/{groups}x{D}", option))), dtype, run)


_RAGGED: dict[str, tuple[int, ...]] = {  # some widths, a lane each
    "64 lanes of 32 to 512": (32, 64, 96, 128, 192, 256, 384, 512) * 8,
    "16 lanes of 128": (128,) * 16,
    "lanes of 16 to 2048": tuple(1 << k for k in range(4, 12)),
    "lanes of 64 and 5000": (64, 5000),
    "odd lanes": (1, 33, 255, 1000, 2001),
}


def _ragged_norm_calls() -> Iterator[Call]:
    """Both norms at all mixtures of widths; types, flat outputs and what is left out at one that has most kinds of tiles."""
    for layer in (True, False):
        for lanes in _RAGGED:
            yield _ragged_norm_call(layer, lanes)
        for dtype in (torch.float16, torch.float32):
            for lanes in ("lanes of 16 to 2048", "odd lanes"):
                yield _ragged_norm_call(layer, lanes, dtype)
        for option in ("flat", "no vectors", "frozen vectors", "fp32 vectors"):
            yield _ragged_norm_call(layer, "64 lanes of 32 to 512", option=option)


def _ragged_norm_call(layer: bool, lanes: str, dtype: torch.dtype = torch.bfloat16, option: str = "") -> Call:
    def run() -> Tensor:
        xs = [_meta(2048, width, dtype=dtype) for width in _RAGGED[lanes]]
        vector_type = torch.float32 if option == "fp32 vectors" else dtype
        weights = [] if option == "no vectors" else [_meta(x.shape[-1], dtype=vector_type) for x in xs]
        asked = bool(weights) and option != "frozen vectors"
        _, mean, rstd = ragged_norm.ragged_forward(xs, weights, weights if layer else [], layer, 1e-5, option != "flat")
        ragged_norm.ragged_backward(xs, xs, weights, mean, rstd, layer, option != "flat", asked, asked and layer)
        return xs[0]

    return Call(" ".join(filter(None, ("ragged", "layer_norm" if layer else "rms_norm", lanes, option))), dtype, run)


def _adamw_calls() -> Iterator[Call]:
    """All types of weights, whole and of odd sizes, with and without what a step may leave out."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in (1 << 20, 12345):
            for option in ("", "clipped, zeros left"):
                yield _adamw_call(size, dtype, option)


def _adamw_call(size: int, dtype: torch.dtype, option: str) -> Call:
    def run() -> Tensor:
        weight = _meta(size, dtype=dtype)
        grad, exp_avg, exp_avg_sq = (_meta(size, dtype=torch.float32, asked=False) for _ in range(3))
        beside = {torch.bfloat16: torch.int16, torch.float16: torch.float32}.get(dtype)
        rest = None if beside is None else torch.empty(size, dtype=beside, device="meta")
        numbers = _meta(2 * adamw_kernels.OPTIONS + 1, dtype=torch.float64, asked=False)
        step, scalars = grad[0], grad[: 2 * adamw_kernels.SCALARS]
        adamw_kernels.write_scalars(numbers, step, grad[0] if option else None, scalars)
        for batch in adamw_kernels.batches_of([Stretch(weight.detach(), grad, exp_avg, exp_avg_sq, rest, 0)]):
            adamw_kernels.step_batch(batch, scalars, bool(option))
        return weight

    return Call(" ".join(filter(None, (f"adamw {size}", option))), dtype, run)


CALLS: dict[str, Callable[[], Iterator[Call]]] = {
    "adamw": _adamw_calls,
    "attention": _attention_calls,
    "bias_activation": _bias_activation_calls,
    "activation_linear": _activation_linear_calls,
    "cross_entropy": _cross_entropy_calls,
    "dropout_add": _dropout_add_calls,
    "linear": lambda: iter(()),  # cuBLAS
    "linear_cross_entropy": _linear_cross_entropy_calls,
    "norm": _norm_calls,
    "norm_linear": _norm_linear_calls,
    "ragged_norm": _ragged_norm_calls,
    "rope": _rope_calls,
}


def _meta(*shape: int, dtype: torch.dtype, asked: bool = True) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=asked)


def _with_main_grad(*parameters: Any) -> None:
    for parameter in parameters:
        parameter.main_grad = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
