"""Under `batch_invariant()` a row has the same bits alone, in parts, in another order and among others.

What has rows follows from the op's record: its rule for DTensors says which tensors are divided along with the first one, and
which results are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.invariant_product import batch_invariant
from onepass.runtime.op import Op
from onepass.runtime.sharding import WHOLE, Output, put_tensor, tensors_of
from onepass.testing.invariance import as_bits
from onepass.testing.subject import Subject

# options with which results are a row's: others mix rows, or are refused
_OF_ROWS: dict[str, dict[str, Any]] = {"cross_entropy": {"reduction": "none"}, "linear_cross_entropy": {"reduction": "none"}}
_OF_ROWS |= {"linear_divergence": {"reduction": "none"}, "route": {"aux": None, "z": None}, "dropout_add": {"p": 0.0}}
_NO_DTENSORS = ("lora", "precision", "out")  # options that rules refuse, and that change no rows
_DOCUMENTS = ("ends", "cu_seqlens")  # where these are, a row's place matters
_LAID_OUT, _ONE_NUMBER = " of one that lies by columns", " of one number a row"  # incoming gradients


class RowCall(NamedTuple):
    """A call, and the dimensions of its rows: of tensors by name, and of results in their order."""

    op: Op
    arguments: dict[str, Any]
    backend: str | None
    inputs: dict[str, int]
    outputs: list[Output]

    def run(
        self, which: Tensor | None, incoming: list[Tensor], kinds: Sequence[str] = ("",)
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return rows' results and gradients, all with rows first, and the incoming gradients: those that are given, or new ones.

        which: numbers of the rows, None for all.
        kinds: of incoming gradients, each of which gives gradients.
        """
        arguments, leaves = dict(self.arguments), {}
        for name, t in tensors_of(self.arguments).items():
            part = _part(t.detach(), self.inputs[name], which) if which is not None and name in self.inputs else t.detach()
            if t.requires_grad:
                leaves[name] = part.requires_grad_()
            put_tensor(arguments, name, part)
        results = _flat(self.op.function(**arguments, backend=self.backend), self.outputs)
        found = {f"result {i}": y.detach().movedim(dim, 0) for i, (y, dim) in enumerate(results)}
        asked = [(y, dim) for y, dim in results if y.requires_grad]
        if not incoming:
            generator = torch.Generator().manual_seed(0)
            incoming = [torch.randn(y.shape, generator=generator).to(y).movedim(dim, 0) for y, dim in asked]
        given = [dy if which is None else dy.index_select(0, which.to(dy.device)) for dy in incoming]
        for kind in kinds if asked and leaves else ():
            dys = [_laid_out(dy, dim, kind) for dy, (_, dim) in zip(given, asked, strict=True)]
            ys, last = [y for y, _ in asked], kind == kinds[-1]
            grads = torch.autograd.grad(ys, list(leaves.values()), dys, retain_graph=not last, allow_unused=True)
            for name, grad in zip(leaves, grads, strict=True):
                if name in self.inputs and grad is not None:
                    found[f"gradient of {name}{kind}"] = grad.movedim(self.inputs[name], 0)
        return found, incoming


def _laid_out(dy: Tensor, dim: int, kind: str) -> Tensor:
    """Return an incoming gradient, whose rows come first, with its rows in dimension `dim`."""
    if kind == _ONE_NUMBER and dy.dim() > 1:
        return dy[..., :1].expand(dy.shape).movedim(0, dim)
    whole = dy.movedim(0, dim).contiguous()
    return whole.transpose(0, -1).contiguous().transpose(0, -1) if kind == _LAID_OUT else whole


def _part(t: Tensor, dim: int, which: Tensor) -> Tensor:
    """Return some rows: neighbours where they lie, others as a copy."""
    if bool((which.diff() == 1).all()):
        return t.narrow(dim, int(which[0]), len(which))
    return t.index_select(dim, which.to(t.device))


def _flat(results: Any, outputs: list[Output]) -> list[tuple[Tensor, int]]:
    """The results that have rows, and the dimension of these. Members of a nested tuple have their tuple's."""
    members = results if isinstance(results, tuple) else (results,)
    of_members = outputs if len(outputs) > 1 else outputs * len(members)
    found: list[tuple[Tensor, int]] = []
    for member, output in zip(members, of_members):  # noqa: B905  (what was not asked for is missing at the end)
        if isinstance(member, tuple):
            found += _flat(member, [output])
        elif isinstance(member, Tensor) and isinstance(output, tuple):
            found.append((member, output[0]))
    return found


def row_call(op: Op, arguments: dict[str, Any], dim: int = 0, backend: str | None = None) -> RowCall | None:
    """Return a call whose rows lie along one dimension of its first tensor; None where it has none there.

    arguments: by name. Tensors that require grad get gradients.
    """
    arguments = arguments | _OF_ROWS.get(op.name, {})
    tensors = tensors_of(arguments)
    first = next(iter(tensors))
    if any(arguments.get(name) is not None for name in _DOCUMENTS):
        return None
    known = arguments | {name: None for name in _NO_DTENSORS if name in arguments}
    layout = op.sharding(known, {name: dim if name == first else WHOLE for name in tensors}, 1)
    inputs = {name: int(split) for name, split in layout.inputs.items() if split != WHOLE and name in tensors}
    outputs = layout.outputs if isinstance(layout.outputs, list) else [layout.outputs]
    return RowCall(op, arguments, backend, inputs, outputs) if first in inputs else None


def parts_of(rows: int, sizes: Iterable[int]) -> Iterator[Tensor]:
    """Yield numbers of rows of parts of these sizes: neighbours, and one more in any order, some of them several times."""
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        if size <= rows:
            first = int(torch.randint(rows - size + 1, (), generator=generator))
            yield torch.arange(first, first + size)
        yield torch.randint(rows, (size + 1,), generator=generator)


def check_rows(call: RowCall, parts: Iterable[Tensor]) -> None:
    """Compare the bits of each part's rows with those of the whole call's."""
    with batch_invariant():
        whole, incoming = call.run(None, [], ("", _ONE_NUMBER))
        for which in parts:
            kinds = ("", _LAID_OUT, _ONE_NUMBER) if len(which) < 4 else ("",)
            for name, mine in call.run(which, incoming, kinds)[0].items():
                among = whole[name.removesuffix(_LAID_OUT)]
                theirs = among.index_select(0, which.to(mine.device))
                differ = int((as_bits(mine) != as_bits(theirs)).any(1).sum())
                assert not differ, f"{name}: {differ} of {len(which)} rows are not as among {len(among)}"


def gives_rows_the_same_bits(subject: Subject) -> None:
    """Under `batch_invariant()` a row's results and gradients are the same whatever the other rows are."""
    arguments = vars(subject.sample.call(subject.op.call, *subject.tensors()))
    x = next(iter(tensors_of(arguments).values()))
    for dim in range(min(2, x.dim() - 1)):  # after these come heads
        call = row_call(subject.op, arguments, dim, subject.backend)
        if call is not None and x.shape[dim] > 1:
            check_rows(call, parts_of(x.shape[dim], (1, 2 * x.shape[dim] + 2)))
