"""The "torch" backend: an op's formula with the savings that the kernels have.

Run plainly, a formula keeps every intermediate in fp32 for its backward, and passes each through memory. Here only its
arguments are kept, x in the store asked for, and backward runs the formula again; on a CPU it runs over blocks of rows that
stay in the cache, which makes large ones up to twice as fast.
It can be differentiated as often as one likes where x is kept exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from onepass.runtime import saved
from onepass.runtime.batch_invariance import invariant, rows_at_a_time
from onepass.runtime.dispatch import NotTwiceDifferentiable, needs_grad, under_functorch, writable

Formula = Callable[..., Any]  # of x, then the shared tensors, then those with something for each row: a tensor or a tuple of them
Tensors = tuple[Tensor | None, ...]
FORMULA_RANGE = "onepass formula"  # around what runs without an autograd Function, in a trace of the profiler's
_BLOCK = 1 << 17  # elements: about a MiB of cache with a formula's intermediates


class _RowFormula(NamedTuple):
    function: Formula
    split: int  # tensors that are shared
    alone: bool  # under `batch_invariant()` it takes a row at a time


def run_formula(
    formula: Formula, save: str, x: Tensor, *, shared: Tensors = (), per_row: Tensors = (), parts: int = 1, alone: bool = False
) -> Any:
    """formula(x, *shared, *per_row), whose rows are independent, keeping for backward its arguments only.

    `shared` serve every row (a bias); `per_row` have x's leading dimensions (a token's weight). x is kept as `save` says,
    in fp8 with scales that the `parts` of a row do not share. alone: rows are much work, as sequences, and none may be added.
    """
    if torch.compiler.is_compiling() or under_functorch():  # these choose by themselves what to keep and what to compute again
        return _traced_formula(formula, save, x, (*shared, *per_row), parts)
    of_rows = _RowFormula(formula, len(shared), alone)
    if not needs_grad(x, *shared, *per_row):
        with _formula_range():
            return _forward(of_rows, x, shared, per_row)
    return _FormulaFunction.apply(of_rows, saved.saved_format(x, save, parts), x, *shared, *per_row)  # type: ignore[no-untyped-call]


def _formula_range() -> AbstractContextManager[object]:
    """Return a range in which the profiler, where it runs, shows an op's formula as the work of an op."""
    profiled: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(FORMULA_RANGE) if profiled else nullcontext()


def formula_by_blocks(formula: Formula, x: Tensor, *shared: Tensor | None) -> Any:
    """formula(x, *shared): by `run_formula` where it takes blocks of rows, and else plainly, with no second run in backward."""
    traced = torch.compiler.is_compiling() or under_functorch()
    if traced:
        return formula(x, *shared)
    if _block_rows(x, False) is None:
        with _formula_range():
            return formula(x, *shared)
    return run_formula(formula, "input", x, shared=shared)


class _FormulaFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, formula: _RowFormula, stored: saved.SavedFormat, x: Tensor, *rest: Tensor | None) -> Any:
        kept = saved.pack(x, stored)
        ctx.call = formula, len(kept), stored
        ctx.save_for_backward(*kept, *rest)
        result = _forward(formula, x, rest[: formula.split], rest[formula.split :])
        return tuple(map(writable, result)) if isinstance(result, tuple) else writable(result)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        formula, parts, stored = ctx.call
        tensors = ctx.saved_tensors
        x, rest = saved.unpack(tensors[:parts], stored), tensors[parts:]
        needs, split = ctx.needs_input_grad[2:], formula.split
        if not torch.is_grad_enabled():
            return None, None, *_backward(formula, dys, x, rest[:split], rest[split:], needs)
        if x is not tensors[0]:  # this backward will itself be differentiated, but x is not the x it had
            raise NotTwiceDifferentiable
        asked = [t for t, need in zip((x, *rest), needs, strict=True) if need]
        found = iter(_gradients(formula.function(x, *rest), asked, dys, create_graph=True))
        return None, None, *(next(found) if need else None for need in needs)


# ---- over blocks of rows ----


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _concat_rows(pieces: list[Tensor], whole: Tensor) -> Tensor:
    """A tensor of its own, as large as `whole`, of one piece too. A piece may be a number, of a row without others."""
    return torch.cat([piece.reshape(-1) for piece in pieces])[: whole.numel()].view(whole.shape)


def _gradients(result: Any, asked: list[Tensor], dys: Iterable[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
    """Those of what is asked for, through the outputs that depend on it."""
    pairs = [(y, dy) for y, dy in zip(_outputs(result), dys, strict=True) if y.requires_grad]
    outputs, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, asked, grads, create_graph=create_graph)


def _forward(formula: _RowFormula, x: Tensor, shared: Tensors, per_row: Tensors) -> Any:
    if _block_rows(x, formula.alone) is None:
        return formula.function(x, *shared, *per_row)
    M = x.shape[:-1].numel()
    blocks = [formula.function(rows, *shared, *others) for rows, *others in _blocks(x, per_row, formula.alone)]
    if isinstance(blocks[0], tuple):
        return tuple(torch.cat(each)[:M].view(*x.shape[:-1], -1) for each in zip(*blocks, strict=True))
    return torch.cat(blocks)[:M].view(*x.shape[:-1], -1)


def _backward(
    formula: _RowFormula, dys: tuple[Tensor, ...], x: Tensor, shared: Tensors, per_row: Tensors, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients of x, shared and per_row; those of shared tensors summed in fp32 over all rows and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    split = 1 + len(shared)
    leaves = _leaves(shared, needs[1:split], wide)
    own: list[list[Tensor]] = [[] for _ in (x, *per_row)]
    total: list[Tensor | None] = [None if t is None else torch.zeros_like(t) for t in leaves]
    for rows, *others in _blocks(x, (*dys, *per_row), formula.alone, zeros=len(dys)):
        dy_rows, others = others[: len(dys)], others[len(dys) :]
        pieces = _leaves((rows, *others), (needs[0], *needs[split:]))
        with torch.enable_grad():
            y = formula.function(pieces[0], *leaves, *pieces[1:])
        asked = [t for t in (*pieces, *leaves) if t is not None and t.requires_grad]
        grads = iter(_gradients(y, asked, dy_rows))
        for gathered, piece in zip(own, pieces, strict=True):
            if piece is not None and piece.requires_grad:
                gathered.append(next(grads))
        for sum_, leaf in zip(total, leaves, strict=True):
            if leaf is not None and leaf.requires_grad:
                assert sum_ is not None
                sum_ += next(grads)
    whole = [_concat_rows(g, t) if g and t is not None else None for g, t in zip(own, (x, *per_row), strict=True)]
    rounded = [sum_.to(t.dtype) if sum_ is not None and t is not None else None for sum_, t in zip(total, shared, strict=True)]
    return [g if need else None for g, need in zip((whole[0], *rounded, *whole[1:]), needs, strict=True)]


def formula_gradients(
    formula: Formula, tensors: Tensors, needs: Sequence[bool], dy: Tensor
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """Return the formula of all tensors, of one output, and of dy the gradients of those that are needed, each in its type."""
    leaves = _leaves(tensors, needs)
    with torch.enable_grad():
        y = formula(*leaves)
    asked = [t for t in leaves if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(y, asked, dy) if asked else ())
    return y.detach(), [next(grads) if need else None for need in needs]


def _leaves(tensors: Tensors, needs: Sequence[bool], dtype: torch.dtype | None = None) -> list[Tensor | None]:
    return [t if t is None else t.detach().to(dtype or t.dtype).requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]


def _block_rows(x: Tensor, alone: bool) -> int | None:
    """How many rows to take at a time; None for all at once."""
    all_rows = x.shape[:-1].numel()
    most = max(1, _BLOCK // x.shape[-1]) if x.device.type == "cpu" and x.numel() >= 32 * _BLOCK else all_rows
    step = rows_at_a_time(x, most, alone)
    return None if step == all_rows or not all_rows else step


def _blocks(x: Tensor, per_row: Tensors, alone: bool, zeros: int = 0) -> Iterator[list[Any]]:
    """Blocks of rows of x and of what belongs to them.

    Under `batch_invariant()` the last has as many rows as the others: its last one again, or zeros in the first `zeros` of
    per_row.
    """
    step = _block_rows(x, alone)
    if step is None:
        yield [x, *per_row]
        return
    M = x.numel() // x.shape[-1]
    flat = [t if t is None else t.reshape(M, *t.shape[x.dim() - 1 :]) for t in (x, *per_row)]
    filled = step if invariant() else 0
    for first in range(0, M, step):
        part = [t if t is None else t[first : first + step] for t in flat]
        yield [t if t is None else _filled_up(t, filled, 0 < i <= zeros) for i, t in enumerate(part)]


def _filled_up(t: Tensor, rows: int, zeros: bool) -> Tensor:
    """Return t with so many rows: after its own zeros, or its last one again."""
    if len(t) >= rows:
        return t
    last = torch.zeros_like(t[-1:]) if zeros else t[-1:]
    return torch.cat([t, last.expand(rows - len(t), *last.shape[1:])])


# ---- under a compiler or a transform ----


def _traced_formula(formula: Formula, save: str, x: Tensor, rest: Tensors, parts: int) -> Any:
    if save != "fp8" or not needs_grad(x, *rest):
        return formula(x, *rest)
    kept: Tensor = _ThroughFp8.apply(x, parts)  # type: ignore[no-untyped-call]
    y: Tensor = _ValueOf.apply(formula(x, *rest).detach(), formula(kept, *rest))  # type: ignore[no-untyped-call]
    return y


class _ThroughFp8(torch.autograd.Function):
    """x as fp8 would give it back; its gradient is x's."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, parts: int) -> tuple[Tensor, int]:
        kept: Tensor = _ThroughFp8.apply(x.movedim(in_dims[0], 0), parts)  # type: ignore[no-untyped-call]
        return kept, 0  # rows alike; a generated rule needs PyTorch 2.13, as vmap can't view bits before

    @staticmethod
    def forward(x: Tensor, parts: int) -> Tensor:
        return saved.fp8_dequantise(*saved.fp8_quantise(x, parts), x.dtype, parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


class _ValueOf(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, differentiated: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy
