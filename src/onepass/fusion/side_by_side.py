"""Parameters packed side by side in one storage, so that one tensor is a view of several of them.

In a graph the whole tensor is the op `onepass::side_by_side(parts)`. Before compilation `take_out` replaces the op by one more
input. Each call makes that input from the current parameters. If their addresses show that they still lie side by side, the
input is a view. Otherwise they are packed again: at the first call, and after `.to()`, `load_state_dict(assign=True)` or other
code gave them new memory. Packing keeps each Parameter object and makes its data a view of the new storage. Parameters whose
memory another tensor holds can't be moved. Their whole is a copy, made at each call.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from onepass.fusion.graph import Emitter
from onepass.runtime.dispatch import TORCH, registered

_log = logging.getLogger("onepass.fusion")
_MARK = "onepass_whole"
# references to a storage's Python object without other holders: a local name's, getrefcount's, and from 2.10 on PyTorch's
_ONLY_HERE = 3 if TORCH >= (2, 10) else 2
_MOST_MOVES = 16  # times that a whole is packed: code that moves parameters more often does so at every step


def _together(parts: Sequence[Tensor], stacked: bool) -> Tensor:
    return torch.stack(list(parts)) if stacked else torch.cat(list(parts))


side_by_side = registered("side_by_side(Tensor[] parts, bool stacked) -> Tensor", _together, _together)


@dataclass
class PackedParameters:
    """One tensor over several parameters: stacked as [parts, *shape], or concatenated along the first dimension."""

    places: tuple[int, ...]  # positions of the parts among the graph's inputs
    shape: tuple[int, ...]
    stacked: bool
    moves: int = 0
    why_copied: str | None = None

    def of(self, inputs: Sequence[Any]) -> Tensor:
        parts: list[Tensor] = [inputs[place] for place in self.places]
        if self.why_copied is None and (_in_place(parts) or self._lay(parts)):
            return parts[0].detach().as_strided(self.shape, _contiguous(self.shape))  # shares the version counter of parts[0]
        return _together(parts, self.stacked)

    def _lay(self, parts: Sequence[Tensor]) -> bool:
        reason = _why_not(parts)
        if reason is None and self.moves == _MOST_MOVES:
            reason = f"they were given other memory {_MOST_MOVES} times"
        if reason is not None:
            self.why_copied = reason
            _log.warning("onepass.fuse copies %d parameters together at each call: %s", len(parts), reason)
            return False
        self.moves += 1
        offset = 0
        with torch.inference_mode(False), torch.no_grad():  # not inference tensors: training may follow
            whole = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)
            setattr(whole.untyped_storage(), _MARK, True)  # PyTorch keeps its Python object as long as the storage lives
            for part in parts:
                place = whole[offset : offset + part.numel()].view(part.shape)
                place.copy_(part)
                part.data = place
                offset += part.numel()
        return True


def _in_place(parts: Sequence[Tensor]) -> bool:
    """Whether each part begins where the previous one ends, in one storage.

    Separate storages may be neighbours in memory, so the first part's storage must reach to the end. Storages never overlap.
    """
    end = start = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return False
        end += _bytes(part)
    storage = parts[0].untyped_storage()
    return storage.data_ptr() + storage.nbytes() >= end and end > start


def _why_not(parts: Sequence[Tensor]) -> str | None:
    """Return why the parameters can't be given new memory, or None. Other holders would keep reading the old memory."""
    spans = sorted((part.data_ptr(), part.data_ptr() + _bytes(part)) for part in parts)
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        return "one shares memory with another, or is there twice"
    on_it = Counter(part.untyped_storage().data_ptr() for part in parts)
    for part in parts:
        if not isinstance(part, nn.Parameter) or type(part.data) is not Tensor:
            return "not all of them are plain parameters"
        if part.numel() == 0 or not part.is_contiguous():
            return "one is empty or not contiguous"
        storage = part.untyped_storage()
        if storage.is_shared() and not storage.is_cuda:
            return "one is shared with other processes"
        if not storage.resizable():
            return "one lies in memory that isn't PyTorch's (a NumPy array's)"
        if storage.nbytes() != _bytes(part) and not hasattr(storage, _MARK):
            return "one is a part of a larger buffer, whose owner would lose it"
        tensors = torch._C._storage_Use_Count(storage._cdata) - 1  # less the Python object's own reference
        if tensors > on_it[storage.data_ptr()] or sys.getrefcount(storage) > _ONLY_HERE:
            return "somebody else holds one's memory (a state_dict, a detached view)"
    return None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _contiguous(shape: Sequence[int]) -> list[int]:
    return list(accumulate(reversed(shape[1:]), int.__mul__, initial=1))[::-1]


# ---- in graphs ----


def whole_of(emit: Emitter, parts: Sequence[Node], stacked: bool) -> Node:
    """Insert the whole tensor of several parameters into a graph."""
    node = emit(side_by_side, list(parts), stacked)
    node.meta[_MARK] = True  # survives on a tensor that forward saves for backward
    return node


def take_out(graph: Graph) -> list[tuple[PackedParameters, Node]]:
    """Replace each `side_by_side` of a forward graph by a new last input. Return the wholes with their new nodes."""
    inputs = graph.find_nodes(op="placeholder")
    places = {node: i for i, node in enumerate(inputs)}
    found: list[tuple[PackedParameters, Node]] = []
    last = inputs[-1] if inputs else None
    for node in graph.find_nodes(op="call_function", target=side_by_side):
        parts, stacked = node.args
        whole = PackedParameters(tuple(places[part] for part in parts), tuple(node.meta["val"].shape), stacked)
        last = _add_input(graph, last, node)
        found.append((whole, last))
    return found


def put_back(graph: Graph) -> list[int]:
    """Give each whole that forward saved a second, last input of the backward graph. Return the positions of the first inputs.

    All uses read the second input. The compiler takes the first for a tensor that forward saved for backward alone, which it
    may overwrite. It may not overwrite the second.
    """
    inputs = graph.find_nodes(op="placeholder")
    found: list[int] = []
    last = inputs[-1] if inputs else None
    for place, node in enumerate(inputs):
        if _MARK in node.meta:
            last = _add_input(graph, last, node)
            found.append(place)
    return found


def _add_input(graph: Graph, last: Node | None, instead: Node) -> Node:
    assert last is not None
    with graph.inserting_after(last):
        node = graph.placeholder(f"whole_{instead.name}")
    node.meta = dict(instead.meta)
    instead.replace_all_uses_with(node)
    if instead.op != "placeholder":
        graph.erase_node(instead)
    return node


Compiled = Callable[[list[Any]], Any]


def forward_with(compiled: Compiled, wholes: Sequence[PackedParameters]) -> Compiled:
    return _with_more(compiled, lambda inputs: [whole.of(inputs) for whole in wholes])


def backward_with(compiled: Compiled, places: Sequence[int]) -> Compiled:
    return _with_more(compiled, lambda inputs: [inputs[place] for place in places])


def _with_more(compiled: Compiled, more: Callable[[list[Any]], list[Any]]) -> Compiled:
    def call(inputs: list[Any]) -> Any:
        inputs.extend(more(inputs))
        return compiled(inputs)

    return boxed(call)


def boxed(call: Compiled) -> Compiled:
    """Mark a function as boxed: it takes its inputs in one list, which it may empty."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call
