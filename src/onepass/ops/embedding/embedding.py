"""embedding: rows of a table by their ids.

Formula  y[i] = weight[ids[i] - vocab_start] where weight has that row; zeros for other ids of the vocabulary, which another rank
         has; NaN for ids outside of the vocabulary. dweight[r] is the sum of dy's rows whose id is r's, in fp32, rounded once.
Shapes   ids [...], weight [ROWS, H], y [..., H]. M ids in all.
Saves    the ids in the order of their rows, 8 bytes each. By PyTorch the ids themselves.
Bytes    forward reads M rows of weight and writes y. Backward reads dy, and reads and writes main_grad's rows that were looked
         up; without main_grad it writes dweight, zeros and those rows.
Kernels  ops/embedding/forward.py, ops/embedding/backward.py: one each way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onepass.gradients.main_grad import GradRequest, grad_requests, main_grads_of
from onepass.kernels.language import kernels_unsupported
from onepass.ops.embedding.forward import EmbeddingOptions, look_up, look_up_tiles, orders_in_kernel
from onepass.ops.embedding.gradient import rows_gradient
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_device, check_floating, value_range
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable, under_functorch
from onepass.runtime.op import Registered, define_op
from onepass.runtime.process_setting import validating
from onepass.runtime.sharding import PARTIAL, WHOLE, Layout, Split, has_dtensor, run_on_shards, split_output, sum_over


def embedding_reference(
    ids: Tensor, weight: Tensor, *, padding_idx: int | None = None, vocab_start: int = 0, vocab_size: int | None = None
) -> Tensor:
    """The formula, for every type."""
    return _formula(ids, weight, _options(weight, padding_idx, vocab_start, vocab_size), False)


def _options(weight: Tensor, padding_idx: int | None, vocab_start: int, vocab_size: int | None) -> EmbeddingOptions:
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    padding_idx = -1 if padding_idx is None else padding_idx % vocab_size
    return EmbeddingOptions(padding_idx, vocab_start, vocab_size)


def _formula(ids: Tensor, weight: Tensor, options: EmbeddingOptions, sound: bool) -> Tensor:
    """`sound`: all ids are known to be in the vocabulary, and nobody differentiates this."""
    rows = weight.shape[0]
    if sound and rows == options.vocab_size:
        return F.embedding(ids, weight)
    local = ids.long() - options.vocab_start
    here = (local >= 0) & (local < rows)
    fill = torch.where((ids >= 0) & (ids < options.vocab_size), 0.0, torch.nan).to(weight.dtype).unsqueeze(-1)
    if rows == 0:
        return fill.expand(*ids.shape, weight.shape[1]).contiguous()
    y = F.embedding(torch.where(here, local, 0), weight)
    if options.padding_idx >= 0:  # F.embedding's padding_idx is not for forward mode
        y = torch.where((ids == options.padding_idx).unsqueeze(-1), y.detach(), y)
    return torch.where(here.unsqueeze(-1), y, fill)


# ---- registered ops ----


def _look_up_fake(ids: Tensor, weight: Tensor, options: EmbeddingOptions, ordered: bool) -> tuple[Tensor, Tensor | None]:
    order = ids.new_empty(ids.numel(), dtype=torch.int64) if ordered else None
    return weight.new_empty(*ids.shape, weight.shape[1]), order


_look_up = Registered(
    "embedding(Tensor ids, Tensor weight, EmbeddingOptions options, bool ordered) -> (Tensor, Tensor?)",
    look_up, _look_up_fake, EmbeddingOptions, dispatched=partial(look_up, keep_scratch=False),
)  # fmt: skip


# ---- autograd ----


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, options: EmbeddingOptions, sound: bool, use_triton: bool
    ) -> Tensor:
        ctx.weight, ctx.main_grad = weight, main_grads_of(ctx.needs_input_grad, weight)[0]
        ctx.how = options, sound, use_triton
        if use_triton:
            y, order = _look_up(ids, weight, options, True)
            ctx.save_for_backward(order)
        else:
            y = _formula(ids, weight, options, sound)
            ctx.save_for_backward(ids)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        options, sound, use_triton = ctx.how
        request = grad_requests(ctx, 1)[0]
        if request is GradRequest.SKIP:
            return None, None, None, None, None
        dy = dy.reshape(saved.numel(), dy.shape[-1])
        rows, order = None, saved
        if not use_triton:
            dy, rows = _trained(dy, saved.reshape(-1), ctx.weight.shape[0], options, sound)
            order = None
        return rows_gradient(dy, rows, order, ctx.weight, ctx.main_grad, request), None, None, None, None


def _trained(dy: Tensor, ids: Tensor, rows: int, options: EmbeddingOptions, sound: bool) -> tuple[Tensor, Tensor]:
    """Return gradients [tokens, H] and the row of each. No token is filtered out: that would synchronise with the GPU.

    Tokens without a gradient to give add zeros, spread over the rows. Additions to a single row would be serial.
    """
    local = ids.long() - options.vocab_start
    if sound and rows == options.vocab_size and options.padding_idx < 0:
        return dy, local
    if rows == 0:
        return dy[:0], local[:0]
    here = (local >= 0) & (local < rows) & (ids != options.padding_idx)
    elsewhere = torch.arange(local.shape[0], device=local.device) % rows
    return torch.where(here.unsqueeze(-1), dy, 0.0), torch.where(here, local, elsewhere)


_apply = fast_apply(_Embedding)


# ---- the public face: say what is wrong, choose who does it, return ----


def unsupported(weight: Tensor, **options: Any) -> str | None:
    """Why the kernels can't take this call, or None."""
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"weight is {weight.dtype}"
    return kernels_unsupported("weight", weight)


def variant(ids: Tensor, weight: Tensor, **options: Any) -> str:
    """Which kernels a call runs, and their tiles."""
    if not (ids.numel() and weight.numel()):
        return "the PyTorch formula, as there is nothing to do"
    tiles = look_up_tiles(weight.shape[1])
    description = f"{tiles.block_m} tokens a program"
    if not needs_grad(weight):
        return f"forward with {description}; no gradient is asked for"
    who = "the same kernel" if orders_in_kernel(ids.numel(), *weight.shape) else "PyTorch"
    return f"forward with {description}, while {who} orders the tokens by row; backward with a program a token; keeps the order"


def _check(given: Mapping[str, Any]) -> bool:
    """Raise where an argument is wrong. Return whether the ids were read, and are all in the vocabulary."""
    ids, weight = given["ids"], given["weight"]
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        kind = f"of {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise TypeError(f"ids must be an int32 or int64 tensor, but is {kind}")
    check_floating("weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"weight must have shape (rows, features), but has {tuple(weight.shape)}")
    check_device("ids", ids, weight, "weight")
    rows = weight.shape[0]
    for name in ("padding_idx", "vocab_start", "vocab_size"):
        number = given[name]
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise TypeError(f"{name} must be a whole number, but is {number!r}")
    padding_idx, vocab_start, vocab_size = given["padding_idx"], given["vocab_start"], given["vocab_size"]
    if vocab_size is None:
        vocab_size = rows
    if vocab_size < rows:
        raise ValueError(f"vocab_size must be at least {rows}, weight's rows, but is {vocab_size}")
    if not 0 <= vocab_start <= vocab_size - rows:
        raise ValueError(
            f"vocab_start must be from 0 to {vocab_size - rows}, so that weight's {rows} rows are of the vocabulary, "
            f"but is {vocab_start}"
        )
    if padding_idx is not None and not -vocab_size <= padding_idx < vocab_size:
        raise ValueError(f"padding_idx must be from {-vocab_size} to {vocab_size - 1}, but is {padding_idx}")
    return _ids_are_sound(ids, vocab_size)


def _ids_are_sound(ids: Tensor, vocab_size: int) -> bool:
    """Whether the ids were read and are all in the vocabulary. Raise IndexError where one is not."""
    if ids.device.type not in ("cpu", "meta") and not validating():
        return False
    if torch.compiler.is_compiling() or under_functorch() or ids.is_meta or isinstance(ids, FakeTensor):
        return False  # no values to read
    if ids.numel():
        least, most = value_range(ids)
        if least < 0 or most >= vocab_size:
            raise IndexError(
                f"ids must be from 0 to {vocab_size - 1}, the rows of the vocabulary, but are from {least} to {most}"
            )
    return True


def shard_embedding(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Ids are divided where the table is whole. Its rows, a part of the vocabulary, make y a sum; its columns divide y's."""
    ids, weight = given["ids"], given["weight"]
    if at["weight"] == 0:
        if given["vocab_size"] is not None:
            raise ValueError(f"vocab_size must be None for a weight that is a DTensor, but is {given['vocab_size']}")
        return Layout({"ids": WHOLE, "weight": 0}, outputs=PARTIAL, options={"vocab_size": weight.shape[0]}, adapt=_first_row)
    if at["weight"] == 1:
        return Layout({"ids": WHOLE, "weight": 1}, outputs=(ids.dim(), weight.shape[1]))
    return Layout({"ids": at["ids"], "weight": WHOLE}, {"weight": sum_over(at["ids"])}, split_output(at["ids"], ids))


def _first_row(parts: dict[str, Any], rank: int, ranks: int) -> None:
    """The id of this rank's first row, as DTensors divide: the last ranks have less, or nothing."""
    rows = parts["vocab_size"]
    parts["vocab_start"] = min(rows, rank * -(-rows // ranks))


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    padding_idx: int | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Rows of a table by their ids, as in ``F.embedding``; one kernel forward, one backward.

    Backward adds to the rows that were looked up, in fp32, and always in the same order. A weight with ``main_grad`` has its
    gradient added there, and rows that nobody looked up are neither read nor written.

    Args:
        ids: ``[...]``, int32 or int64.
        weight: ``[rows, H]``.
        padding_idx: the id whose row gets no gradient. A negative one counts from the vocabulary's end.
        vocab_start: the id of weight's first row, where weight is one rank's part of a larger table. Ids of other ranks give
            zeros, so that the sum over the ranks is the embedding.
        vocab_size: the rows of the whole table. None: weight is the whole.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        y ``[..., H]``, of weight's type, also under autocast. An id outside of the vocabulary raises IndexError on a CPU and
        under `onepass.validate()`. On a GPU and in a compiled graph its row is NaN, and no row gets a gradient from it.
    """
    given = {"ids": ids, "weight": weight, "padding_idx": padding_idx, "vocab_start": vocab_start, "vocab_size": vocab_size}
    if has_dtensor(ids, weight):
        return run_on_shards("embedding", **given, backend=backend)  # type: ignore[no-any-return]
    sound = _check(given)
    chosen = choose("embedding", backend, unsupported(weight))
    if chosen not in NATIVE:
        return run_other("embedding", chosen, **given)  # type: ignore[no-any-return]
    options = _options(weight, padding_idx, vocab_start, vocab_size)
    use_triton = chosen == "triton" and ids.numel() > 0 and weight.numel() > 0
    if under_functorch():
        return _formula(ids, weight, options, False)
    if needs_grad(weight):
        return _apply(weight, ids, options, sound, use_triton)  # type: ignore[no-any-return]
    if use_triton:
        return _look_up(ids, weight, options, False)[0]  # type: ignore[no-any-return]
    return _formula(ids, weight, options, sound)


define_op(
    embedding,
    check=lambda call: _check(vars(call)),
    unsupported=lambda call: unsupported(**vars(call)),
    variant=lambda call: variant(**vars(call)),
    sharding=shard_embedding,
    formula=lambda call: "the PyTorch formula; a gradient's rows are summed in order, and the ids are saved",
)
