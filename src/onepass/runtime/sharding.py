"""DTensors: a rule an op says how the ranks share a call, and the op runs on each rank's part of it.

    def shard_softmax(given, at, ranks):            # for one dimension of the mesh
        rows = leading_split(at["x"], given["x"])
        return Layout({"x": rows}, outputs=split_output(rows, given["x"]))

    if has_dtensor(x):                              # first in the public function
        return run_on_shards("softmax", x=x, ...)   # all arguments

A rule gets the arguments, for each tensor what one mesh dimension does to it, and the number of ranks along that. It returns what
the op can take instead, what the gradients then are, and what comes back. Tensors are redistributed to that and given to the op
as plain ones; results become DTensors. Rules belong to public functions and not to registered ops: they need process groups
(losses over a vocabulary in parts), additions that one rank makes for all, and formulas that are no registered ops.

A split is the tensor dimension that the mesh dimension divides, or WHOLE, or, of gradients and results, PARTIAL: terms of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.runtime.dispatch import PLAIN
from onepass.runtime.op import OPS, Call

WHOLE, PARTIAL = "whole", "partial"
Split = int | str
Output = str | tuple[int, int]  # WHOLE, PARTIAL, or the dimension that is divided and its whole size
_NO_MAIN_GRAD = "its gradient comes in .grad, without main_grad"


class Layout(NamedTuple):
    """How one dimension of the mesh shares a call.

    inputs: for each tensor, the split that the op takes.
    gradients: splits of gradients that differ from their tensors'.
    outputs: one for all results, or a list with one for each. Members of a nested tuple share theirs.
    group: the option that the mesh dimension's process group is given to.
    options: others to change.
    adapt: changes a rank's arguments, from its place in the mesh dimension and the number of ranks.
    finish: the result, from the rank's arguments, what the op returned as DTensors, and a function that makes a DTensor of a
        rank's tensor as the first result is one.
    """

    inputs: dict[str, Split]
    gradients: dict[str, Split] = {}
    outputs: Output | list[Output] = WHOLE
    group: str = ""
    options: dict[str, Any] = {}
    adapt: Callable[[dict[str, Any], int, int], None] | None = None
    finish: Callable[[dict[str, Any], Any, Callable[[Tensor], Any]], Any] | None = None


Rule = Callable[[dict[str, Any], Mapping[str, Split], int], Layout]


def has_dtensor(*tensors: Tensor | None) -> bool:
    for tensor in tensors:
        if type(tensor) not in PLAIN and type(tensor).__name__ == "DTensor":
            return True
    return False


# ---- what rules are made of ----


def leading_split(split: Split, x: Tensor, last: int = 1) -> Split:
    """The split if it divides x before its last dimensions, otherwise WHOLE: what divides those is gathered."""
    return split if split != WHOLE and int(split) < x.dim() - last else WHOLE


def first_split(*splits: Split) -> Split:
    """The first that divides."""
    for split in splits:
        if split != WHOLE:
            return split
    return WHOLE


def all_as(split: Split, *names: str) -> dict[str, Split]:
    """The same split for all of these."""
    return dict.fromkeys(names, split)


def sum_over(split: Split) -> Split:
    """The gradient of a tensor that all ranks have alike, beside one that is divided so."""
    return WHOLE if split == WHOLE else PARTIAL


def split_output(split: Split, like: Tensor) -> Output:
    """A result that is divided as the tensor is."""
    return (int(split), like.shape[int(split)]) if split != WHOLE else WHOLE


def rows_split(given: Mapping[str, Any], at: Mapping[str, Split], *names: str) -> Split:
    """What divides the rows of x or of another of these tensors, of the first that is divided."""
    return first_split(*(leading_split(at[name], given["x"]) for name in names if name in at))


def by_rows(given: Mapping[str, Any], at: Mapping[str, Split], divided: Sequence[str], whole: Sequence[str]) -> Layout:
    """Rows of x, of tensors beside it and of the result are divided. What every row needs is whole, and its gradient a sum."""
    rows = rows_split(given, at, *divided)
    inputs = all_as(rows, *divided) | all_as(WHOLE, *whole)
    return Layout(inputs, all_as(sum_over(rows), *whole), split_output(rows, given["x"]))


def add_bias_once(parts: dict[str, Any], rank: int, ranks: int) -> None:
    """Of ranks whose results are summed, the first adds the bias. The others multiply it by 0, so that each has a gradient."""
    if parts["bias"] is not None and rank:
        parts["bias"] = parts["bias"] * 0


def replicated(t: Any) -> Any:
    """The DTensor, whole on all ranks."""
    return t.redistribute(placements=[_placement(WHOLE)] * t.device_mesh.ndim)


def refuse(arguments: dict[str, Any], *names: str) -> None:
    """Raise where options are given that don't go with DTensors."""
    for name in names:
        if arguments[name] is not None and arguments[name] is not False:
            raise ValueError(f"{name} must be left out where tensors are DTensors, but is {arguments[name]!r}")


def refuse_split(name: str, split: Split, allowed: str) -> None:
    raise ValueError(
        f"{name} can't be divided along its dimension {split} here: redistribute {name}, by its `redistribute(placements=...)`, "
        f"to {allowed}"
    )


# ---- running a call ----


def run_on_shards(op_name: str, /, **arguments: Any) -> Any:
    """Run an op by its rule, and return DTensors. A plain tensor beside DTensors is one that all ranks have alike."""
    op = OPS[op_name]
    tensors = tensors_of(arguments)
    mesh = _common_mesh(tensors)
    if not torch.compiler.is_compiling():  # compiled, each rank's own call checks
        op.check(Call(**{name: value for name, value in arguments.items() if name != "backend"}))
    splits = {name: _splits_of(name, t, mesh.ndim) for name, t in tensors.items()}
    layouts = [op.sharding(arguments, {name: of[i] for name, of in splits.items()}, mesh.size(i)) for i in range(mesh.ndim)]
    parts = dict(arguments)
    for name, t in tensors.items():
        inputs = [layout.inputs[name] for layout in layouts]
        gradients = [layout.gradients.get(name, layout.inputs[name]) for layout in layouts]
        put_tensor(parts, name, _part_of(t, mesh, inputs, gradients))
    for i, layout in enumerate(layouts):
        for option, value in layout.options.items():
            parts[option] = value
        if layout.group:
            if parts[layout.group] is not None:
                raise ValueError(f"{op_name} can share its weight over one dimension of the mesh, but it is divided over two")
            parts[layout.group] = mesh.get_group(i)
        if layout.adapt is not None:
            layout.adapt(parts, mesh.get_local_rank(i), mesh.size(i))
    results = _wrapped(op.function(**parts), mesh, [layout.outputs for layout in layouts])
    finish = next((layout.finish for layout in layouts if layout.finish is not None), None)
    if finish is None:
        return results
    first = [layout.outputs[0] if isinstance(layout.outputs, list) else layout.outputs for layout in layouts]
    return finish(parts, results, lambda t: _wrapped(t, mesh, first))


def tensors_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among the arguments, those of records by "argument.field"."""
    tensors = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            tensors |= {f"{name}.{field}": t for field, t in zip(value._fields, value, strict=True) if isinstance(t, Tensor)}
    for name, t in tensors.items():
        if getattr(t, "main_grad", None) is not None:
            if has_dtensor(t):
                raise TypeError(f"main_grad must be a plain weight's, but its weight is a DTensor: {_NO_MAIN_GRAD}")
            raise TypeError(f"main_grad must be a weight's beside plain tensors, but {name} is beside DTensors: {_NO_MAIN_GRAD}")
    return tensors


def put_tensor(parts: dict[str, Any], name: str, part: Tensor) -> None:
    argument, _, field = name.partition(".")
    parts[argument] = parts[argument]._replace(**{field: part}) if field else part


def _common_mesh(tensors: dict[str, Tensor]) -> Any:
    meshes: dict[str, Any] = {name: t.device_mesh for name, t in tensors.items() if has_dtensor(t)}  # type: ignore[attr-defined]
    first, mesh = next(iter(meshes.items()))
    for name, other in meshes.items():
        if other != mesh:
            raise ValueError(f"{name} must be on {first}'s mesh {mesh}, but is on {other}: redistribute one of them")
    return mesh


def _splits_of(name: str, t: Any, dimensions: int) -> list[Split]:
    """What each dimension of the mesh does to a tensor. A tensor of partial sums counts as whole, as it will be summed first."""
    if not has_dtensor(t):
        return [WHOLE] * dimensions
    splits: list[Split] = []
    for placement in t.placements:
        if placement.is_shard():
            splits.append(placement.dim % t.dim())
        elif placement.is_replicate() or placement.is_partial():
            splits.append(WHOLE)
        else:
            raise ValueError(f"{name} can't be taken as {placement}: redistribute it to Shard, or to Replicate")
    return splits


def _placement(split: Split | tuple[int, int]) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if split == WHOLE:
        return Replicate()
    return Partial() if split == PARTIAL else Shard(split[0] if isinstance(split, tuple) else int(split))


def _part_of(t: Any, mesh: Any, inputs: list[Split], gradients: list[Split]) -> Tensor:
    """This rank's part of a tensor, as a plain one whose gradient becomes the DTensor's."""
    from torch.distributed.tensor import DTensor

    whole = [WHOLE] * mesh.ndim
    if not has_dtensor(t):
        if inputs == gradients == whole:
            return t  # type: ignore[no-any-return]
        t = DTensor.from_local(t, mesh, [_placement(WHOLE)] * mesh.ndim, run_check=False)
    placements = tuple(_placement(split) for split in inputs)
    if tuple(t.placements) != placements or gradients != inputs:  # its backward lays the gradient as t lies
        t = t.redistribute(placements=placements)
    return t.to_local(grad_placements=tuple(_placement(split) for split in gradients))  # type: ignore[no-any-return]


def _wrapped(results: Any, mesh: Any, outputs: list[Any]) -> Any:
    """A rank's results as DTensors: `outputs` has those of each dimension of the mesh."""
    if isinstance(results, tuple):
        divided = [[of[i] if isinstance(of, list) else of for of in outputs] for i in range(len(results))]
        members = [_wrapped(member, mesh, of) for member, of in zip(results, divided, strict=True)]
        return type(results)(*members) if hasattr(results, "_fields") else tuple(members)
    if results is None:
        return None
    from torch.distributed.tensor import DTensor

    outputs = [of[0] if isinstance(of, list) else of for of in outputs]
    placements = [_placement(of) for of in outputs]
    shape, parts, even = list(results.shape), [1] * results.dim(), True
    for i, of in enumerate(outputs):
        if isinstance(of, tuple):
            dim, size = of
            shape[dim] = size
            parts[dim] *= mesh.size(i)
            even = even and size % parts[dim] == 0
    if even:
        return DTensor.from_local(results, mesh, placements, run_check=False)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        results.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
