"""causal_conv1d: a depthwise convolution over time with what follows it in a hybrid layer: SiLU, a split, norms of heads.

Formula  y[t, c] = act(bias[c] + sum over j < W of weight[c, W - 1 - j] x[t - j, c]), without the rows before its sequence or its
         document. act is SiLU or nothing. The columns of y are returned in pieces, and in some of them each head of so many
         columns is divided by sqrt(sum of its squares + eps). fp32 all the way, y rounded once.
Shapes   x [..., S, C], weight [C, W] or [C, 1, W], W from 2 to 8, bias [C]; pieces [..., S, size], contiguous.
Saves    x, weight and bias; with documents each row's position in its own, 4 bytes. Backward makes y's numbers again.
Bytes    forward reads x and writes y; backward reads dy and x and writes dx. The gradients of weight and bias in the same pass.
Kernels  ops/convolution/kernels.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.gradients.main_grad import grad_requests
from onepass.gradients.places import place_of
from onepass.gradients.vectors import contiguous_param, saved_vectors, vector_grads, with_fp32_grads
from onepass.kernels.document_positions import document_positions
from onepass.kernels.language import kernels_unsupported
from onepass.ops.convolution import kernels
from onepass.ops.convolution.kernels import ConvKept
from onepass.ops.convolution.tiles import MOST_ROWS, PIECES, WIDEST_HEAD, ConvOptions, backward_tiles, chunk_rows, forward_tiles
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.checks import check_device, check_eps, check_floating, check_vector
from onepass.runtime.chunks import CHUNK
from onepass.runtime.dispatch import cast, fast_apply, needs_grad, not_twice_differentiable
from onepass.runtime.documents import check_documents, documents_in_turn, positions_within
from onepass.runtime.formula import run_formula
from onepass.runtime.op import Call, Registered, define_op
from onepass.runtime.sharding import (
    WHOLE,
    Layout,
    Split,
    all_as,
    has_dtensor,
    leading_split,
    run_on_shards,
    split_output,
    sum_over,
)

_TYPES = (torch.bfloat16, torch.float32, torch.float16)
WIDTHS = range(2, 9)  # of the convolution
HeadWidths = int | Sequence[int | None] | None  # what l2_norm may be


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    cu_seqlens: Tensor | None = None,
    split: Sequence[int] | None = None,
    l2_norm: HeadWidths = None,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, ...]:
    """The formula, for every type."""
    heads = _heads_of(split, l2_norm)
    sizes = x.shape[-1:] if split is None else split
    since = None if cu_seqlens is None else positions_within(cu_seqlens, x.shape[-2])
    ys = _formula(x, weight, bias, since, activation, tuple(sizes), heads, eps)
    return ys[0] if split is None else ys


def _formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, since: Tensor | None, activation: str | None, sizes: Sequence[int],
    heads: Sequence[int], eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y's pieces. `since`: each row's position in its document, -1 where the boundaries are wrong."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, taps = x.to(wide), weight.to(wide).reshape(weight.shape[0], weight.shape[-1]).unbind(-1)
    y = rows * taps[-1]
    if bias is not None:
        y = y + bias.to(wide)
    for j, tap in enumerate(reversed(taps[:-1]), 1):
        before = F.pad(rows, (0, 0, j, 0)).narrow(-2, 0, x.shape[-2])
        y = y + (before if since is None else before.masked_fill((since < j)[:, None], 0.0)) * tap
    if since is not None:
        y = y.masked_fill((since < 0)[:, None], torch.nan)
    if activation == "silu":
        y = F.silu(y)
    pieces = []
    for piece, head in zip(y.split(list(sizes), -1), heads, strict=True):
        if head:
            by_head = piece.unflatten(-1, (-1, head))
            piece = (by_head * (by_head.square().sum(-1, keepdim=True) + eps).rsqrt()).flatten(-2)
        pieces.append(cast(piece, x.dtype).contiguous())
    return tuple(pieces)


def _heads_of(split: Sequence[int] | None, l2_norm: HeadWidths) -> tuple[int, ...]:
    """Return the width of the heads that are normalised in each piece, or 0."""
    widths = l2_norm if isinstance(l2_norm, Sequence) else [l2_norm] * (1 if split is None else len(split))
    return tuple([width or 0 for width in widths])


# ---- registered ops, and autograd ----


def _forward_fake(x: Tensor, weight: Tensor, bias: Any, since: Any, options: ConvOptions) -> tuple[Tensor | None, ...]:
    return tuple(x.new_empty(*x.shape[:-1], size) if size else None for size in options[2:5])


_forward = Registered(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? since, ConvOptions options) -> (Tensor, Tensor?, Tensor?)",
    kernels.conv_forward,
    _forward_fake,
    ConvOptions,
)


def _backward_fake(kept: ConvKept, options: ConvOptions, *needs: bool) -> tuple[Tensor | None, ...]:
    given = zip((kept.x, kept.weight, kept.bias), needs, strict=True)
    return tuple(t.new_empty(t.shape) if t is not None and need else None for t, need in given)


_backward = Registered(
    "causal_conv1d_backward(ConvKept kept, ConvOptions options, bool need_dx, bool need_dweight, bool need_dbias) -> "
    "(Tensor?, Tensor?, Tensor?)",
    kernels.conv_backward,
    _backward_fake,
    ConvKept,
    ConvOptions,
    dispatched=partial(kernels.conv_backward, keep_scratch=False),
)


class _ConvFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, since: Tensor | None, options: ConvOptions
    ) -> tuple[Tensor, ...]:
        ctx.options, ctx.place = options, place_of(x)
        ctx.vectors = saved_vectors(ctx, 1, weight, bias)
        ctx.save_for_backward(x, weight, bias, since)
        return tuple([y for y in _forward(x, weight, bias, since, options) if y is not None])

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor, second_dy: Any = None, third_dy: Any = None) -> tuple[Tensor | None, ...]:
        x, weight, bias, since = ctx.saved_tensors
        need_dx, *needs = ctx.needs_input_grad[:3]
        grads = None if ctx.vectors is None else vector_grads(ctx.vectors, grad_requests(ctx, 3)[1:])
        into, direct = None, {"place": ctx.place}
        kept = ConvKept(dy, second_dy, third_dy, x, weight, bias, since)
        if grads is not None:
            needs = list(grads.needed())
            into = grads.into(*kept)
            if into is not None:
                direct["into"] = into.tensors
            else:
                weight, bias = grads.wide(weight, bias)
                kept = kept._replace(weight=weight, bias=bias)  # type: ignore[arg-type]
        dx, *found = _backward(kept, ctx.options, need_dx, *needs, **direct)
        return dx, *(found if grads is None else grads.put(into, *found)), None, None


_apply = fast_apply(_ConvFunction)


# ---- the public function: say what is wrong, choose who does it, return ----


def unsupported(x: Tensor, split: Sequence[int] | None, l2_norm: HeadWidths) -> str | None:
    """Why the kernels can't take this call, or None."""
    if x.dtype not in _TYPES:
        return f"x is {x.dtype}"
    if split is not None and len(split) > PIECES:
        return f"split has {len(split)} pieces, and the kernels write {PIECES}"
    if x.shape[:-1].numel() > MOST_ROWS:
        return f"x has {x.shape[:-1].numel()} rows, and the kernels count {MOST_ROWS}"
    heads = {width for width in _heads_of(split, l2_norm) if width}
    if len(heads) > 1:
        return f"heads are of {' and '.join(map(str, sorted(heads)))} columns, and the kernels know one width"
    if heads and max(heads) > WIDEST_HEAD:
        return f"heads of {max(heads)} are longer than {WIDEST_HEAD}"
    return kernels_unsupported("x", x)


def _options(
    x: Tensor, activation: str | None, split: Sequence[int] | None, l2_norm: HeadWidths, eps: float
) -> ConvOptions:  # fmt: skip
    first, second, third = (*(x.shape[-1:] if split is None else split), 0, 0)[:PIECES]
    heads = _heads_of(split, l2_norm)
    normed = sum(1 << i for i, head in enumerate(heads) if head)
    return ConvOptions(activation == "silu", float(eps), first, second, third, normed, max(heads))


def variant(call: Call) -> str:
    """Which kernels a call runs, and their tiles."""
    x = call.x
    if not x.numel():
        return "the PyTorch formula, as there is nothing to do"
    options = _options(x, call.activation, call.split, call.l2_norm, call.eps)
    M, said = x.shape[:-1].numel(), []
    W = call.weight.shape[-1]
    both = [tiles(options, W, x.element_size()) for tiles in (forward_tiles, backward_tiles)]
    for name, tiles in zip(("forward", "backward"), both, strict=True):
        rows = chunk_rows(M, tiles, x.device)
        said.append(f"{name} in chunks of {rows} rows x {tiles.heads * tiles.head} columns, {tiles.rows} rows a turn")
    documents = "" if call.cu_seqlens is None else " and each row's position in its document"
    return f"{'; '.join(said)}; keeps x{documents}"


def check_conv(given: Mapping[str, Any]) -> None:
    """Raise where an argument is wrong."""
    x, weight, bias, split = given["x"], given["weight"], given["bias"], given["split"]
    check_floating("x", x)
    if x.dim() < 2:
        raise ValueError(f"x must have shape [..., S, C], rows over time of C columns, but has {tuple(x.shape)}")
    C, shape = x.shape[-1], tuple(weight.shape) if isinstance(weight, Tensor) else ()
    check_floating("weight", weight)
    if shape[:1] != (C,) or shape[1:-1] not in ((), (1,)) or len(shape) < 2:
        raise ValueError(f"weight must have shape [{C}, W] or [{C}, 1, W], for each of x's columns, but has {shape}")
    check_device("weight", weight, x)
    if bias is not None:
        check_vector("bias", bias, x)
    options = given["activation"], split, given["l2_norm"], given["eps"]
    check_options("x's last dimension", C, "weight's last dimension", shape[-1], *options)
    if given["cu_seqlens"] is not None:
        check_documents(given["cu_seqlens"], x, tuple(x.shape[:-1]), "x")


def check_options(
    name: str, columns: int, width_name: str, width: int, activation: object, split: object, l2_norm: object, eps: float
) -> None:
    """Raise where an option is wrong. The names: what the columns and the convolution's width are called."""
    if width not in WIDTHS:
        raise ValueError(f"{width_name} must be {WIDTHS[0]} to {WIDTHS[-1]}, but is {width!r}")
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, but is {activation!r}")
    check_eps(eps)
    _check_pieces(name, columns, split, l2_norm)


def _check_pieces(name: str, columns: int, split: object, l2_norm: object) -> None:
    """Raise unless `split` divides the columns, called `name`, and `l2_norm` the pieces."""
    sizes: Any = (columns,) if split is None else split
    if not isinstance(sizes, Sequence) or not sizes or any(type(size) is not int or size < 0 for size in sizes):
        raise TypeError(f"split must be sizes of pieces, whole numbers, or None, but is {split!r}")
    if sum(sizes) != columns or (split is not None and 0 in sizes):
        raise ValueError(f"split must be sizes above 0 that add up to {name}, {columns}, but is {split!r}")
    if l2_norm is None:
        return
    if split is not None and (not isinstance(l2_norm, Sequence) or len(l2_norm) != len(sizes)):
        raise ValueError(f"l2_norm must have a head width or None for each of the {len(sizes)} pieces, but is {l2_norm!r}")
    widths: Any = l2_norm if isinstance(l2_norm, Sequence) else (l2_norm,)
    if len(widths) != len(sizes):
        raise ValueError(f"l2_norm must be one head width where split is None, but is {l2_norm!r}")
    for i, (size, width) in enumerate(zip(sizes, widths, strict=True)):
        if width is not None and (type(width) is not int or width < 1 or size % width):
            piece = f"split[{i}]" if split is not None else name
            raise ValueError(f"l2_norm must be a head width that divides {piece}, {size}, or None, but is {width!r}")


def shard_conv(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Sequences are divided. Time is not, as each row needs those before it; nor are columns, as pieces and heads are whole."""
    x = given["x"]
    sequences = leading_split(at["x"], x, last=2) if given["cu_seqlens"] is None else WHOLE
    inputs = {"x": sequences, **all_as(WHOLE, "weight", "bias", "cu_seqlens")}
    return Layout(inputs, all_as(sum_over(sequences), "weight", "bias"), split_output(sequences, x))


@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = ..., *, activation: str | None = ..., cu_seqlens: Tensor | None = ...,
    split: None = ..., l2_norm: HeadWidths = ..., eps: float = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = ..., *, activation: str | None = ..., cu_seqlens: Tensor | None = ...,
    split: Sequence[int], l2_norm: HeadWidths = ..., eps: float = ..., backend: str | None = ...,
) -> tuple[Tensor, ...]: ...  # fmt: skip
@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = ..., *, activation: str | None = ..., cu_seqlens: Tensor | None = ...,
    split: Sequence[int] | None, l2_norm: HeadWidths = ..., eps: float = ..., backend: str | None = ...,
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    cu_seqlens: Tensor | None = None,
    split: Sequence[int] | None = None,
    l2_norm: HeadWidths = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """A depthwise causal convolution over time, SiLU, a split into pieces and norms of heads; one kernel forward, one backward.

    Args:
        x: ``[..., S, C]``: sequences of S rows of C columns. Evenly spaced rows, such as a slice of a projection's, are read
            where they lie.
        weight: ``[C, W]``, or ``[C, 1, W]`` as ``nn.Conv1d`` has it, of any floating-point type. W from 2 to 8. The last of
            W numbers is the row's own, those before it are of the rows before.
        bias: ``[C]``, of any floating-point type, or None.
        activation: ``silu``, or None.
        cu_seqlens: int32 ``[documents + 1]``, on x's device: the boundaries of documents that follow each other in one sequence,
            from 0 to S. A row sees its own document only, which has the bits that it would have alone, by the kernels. Documents
            may be empty. On a GPU nothing waits to read them: where they are wrong, all results are NaN, and `validate` raises.
        split: sizes of pieces of the columns, such as q, k and v, which add up to C. They are returned as a tuple.
        l2_norm: the width of heads, each of which is divided by ``sqrt(sum of its squares + eps)``; with `split` a width or None
            for each piece. The kernels take one width, of up to 256.
        eps: added to the sum of the squares; above 0.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND. The
            kernels write up to 3 pieces; more take the formula.

    Returns:
        y, of x's shape and type, or its pieces, each contiguous. Arithmetic is in fp32, and y is rounded once. x is kept for
        backward, and nothing else of its size.
    """
    given = {
        "x": x, "weight": weight, "bias": bias, "activation": activation, "cu_seqlens": cu_seqlens, "split": split,
        "l2_norm": l2_norm, "eps": eps,
    }  # fmt: skip
    if has_dtensor(x, weight, bias):
        return run_on_shards("causal_conv1d", **given, backend=backend)  # type: ignore[no-any-return]
    check_conv(given)
    chosen = choose("causal_conv1d", backend, unsupported(x, split, l2_norm))
    if chosen not in NATIVE:
        return run_other("causal_conv1d", chosen, **given)  # type: ignore[no-any-return]
    ys: tuple[Tensor, ...]
    if chosen == "torch" or x.numel() == 0:
        sizes, heads = x.shape[-1:] if split is None else split, _heads_of(split, l2_norm)
        ys = _by_formula(x, weight, bias, cu_seqlens, activation, sizes, heads, eps)
    else:
        since = None if cu_seqlens is None else document_positions(cu_seqlens, x.shape[-2])
        options = _options(x, activation, split, l2_norm, eps)
        weight, bias = contiguous_param(weight), contiguous_param(bias)  # type: ignore[assignment]
        if needs_grad(x, weight, bias):
            ys = _apply(x, weight, bias, since, options)
        else:
            ys = tuple([y for y in _forward(x, weight, bias, since, options) if y is not None])
    return ys[0] if split is None else ys


def _by_formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, activation: str | None, sizes: Sequence[int],
    heads: Sequence[int], eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`run_formula` of whole sequences, which are its rows."""
    since = None if cu_seqlens is None else positions_within(cu_seqlens, x.shape[-2])
    shape, options = x.shape[-2:], (activation, sizes, heads, eps)

    def formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        x = x.unflatten(-1, shape)
        ys = (
            _by_chunks(x, weight, bias, cu_seqlens, options)
            if invariant() and x.numel()
            else _formula(x, weight, bias, since, *options)
        )
        return tuple([y.flatten(-2) for y in ys])

    ys = run_formula(formula, "input", x.flatten(-2), shared=with_fp32_grads(weight, bias), alone=True)
    return tuple([y.unflatten(-1, (shape[0], size)) for y, size in zip(ys, sizes, strict=True)])


def _by_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, options: tuple[Any, ...]
) -> list[Tensor]:
    """Return `_formula`'s pieces of chunks of `CHUNK` rows from a document's first on: tensors of other sizes have other bits."""
    S, W = x.shape[-2], weight.shape[-1]
    chunks = []
    for row in x.reshape(-1, *x.shape[-2:]):
        for first, end in documents_in_turn(cu_seqlens, S, "causal_conv1d by PyTorch's operators"):
            own = F.pad(row[first:end], (0, 0, W - 1, (first - end) % CHUNK))
            for at in range(0, end - first, CHUNK):
                ys = _formula(own[at : at + CHUNK + W - 1], weight, bias, None, *options)
                chunks.append([y[W - 1 : W - 1 + min(CHUNK, end - first - at)] for y in ys])
    return [torch.cat(piece).view(*x.shape[:-1], -1) for piece in zip(*chunks, strict=True)]


define_op(
    causal_conv1d,
    check=lambda call: check_conv(vars(call)),
    unsupported=lambda call: unsupported(call.x, call.split, call.l2_norm),
    variant=variant,
    sharding=shard_conv,
)
