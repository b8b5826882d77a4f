"""Parameters laid side by side in one storage, so that several of them are one tensor without a copy.

In a graph the whole is the op `onepass::side_by_side(parts)`. Before the graph is compiled the op becomes one more input
(`take_out`), and at each call that input is made of the parameters as they are then: their addresses say whether they still
lie as they should, in which case it is a view. Otherwise (the first time; after `.to()`, `load_state_dict(assign=True)`, or
whoever else gave them other memory) they are laid anew, each remaining the parameter that it was, its data a view of the new
storage. Parameters whose memory somebody else holds too can't be moved: of those the whole is a copy, made at each call.
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
from onepass.runtime.dispatch import registered

_log = logging.getLogger("onepass.fusion")
_MARK = "onepass_whole"
_ONLY_HERE = 3  # references to a storage's Python object that nobody else holds: PyTorch's, a local name, the question
_MOST_MOVES = 16  # of one whole: whoever moves parameters oftener does so at every step


def _together(parts: Sequence[Tensor], stacked: bool) -> Tensor:
    return torch.stack(list(parts)) if stacked else torch.cat(list(parts))


side_by_side = registered("side_by_side(Tensor[] parts, bool stacked) -> Tensor", _together, _together)


@dataclass
class PackedParameters:
    """One tensor over several parameters: stacked, [parts, *shape], or one behind the other along their first dimension."""

    places: tuple[int, ...]  # of the parts among the graph's inputs
    shape: tuple[int, ...]
    stacked: bool
    moves: int = 0
    why_copied: str | None = None

    def of(self, inputs: Sequence[Any]) -> Tensor:
        parts: list[Tensor] = [inputs[place] for place in self.places]
        if self.why_copied is None and (_in_place(parts) or self._lay(parts)):
            return parts[0].detach().as_strided(self.shape, _contiguous(self.shape))  # its version is the parameters'
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
        with torch.inference_mode(False), torch.no_grad():  # who calls under inference_mode may train later
            whole = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)
            setattr(whole.untyped_storage(), _MARK, True)  # PyTorch keeps one Python object for as long as the storage lives
            for part in parts:
                place = whole[offset : offset + part.numel()].view(part.shape)
                place.copy_(part)
                part.data = place
                offset += part.numel()
        return True


def _in_place(parts: Sequence[Tensor]) -> bool:
    """Whether each part begins where the one before it ends, in one storage.

    Neighbours in memory may be strangers, so the first one's storage must reach to the end. Two storages never overlap.
    """
    end = start = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return False
        end += _bytes(part)
    storage = parts[0].untyped_storage()
    return storage.data_ptr() + storage.nbytes() >= end and end > start


def _why_not(parts: Sequence[Tensor]) -> str | None:
    """Why parameters can't be given other memory: somebody would go on looking at the old one."""
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
        tensors = torch._C._storage_Use_Count(storage._cdata) - 1  # the Python object holds it too
        if tensors > on_it[storage.data_ptr()] or sys.getrefcount(storage) > _ONLY_HERE:
            return "somebody else holds one's memory (a state_dict, a detached view)"
    return None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _contiguous(shape: Sequence[int]) -> list[int]:
    return list(accumulate(reversed(shape[1:]), int.__mul__, initial=1))[::-1]


# ---- in graphs ----


def whole_of(emit: Emitter, parts: Sequence[Node], stacked: bool) -> Node:
    """Put the whole of some parameters into a graph."""
    node = emit(side_by_side, list(parts), stacked)
    node.meta[_MARK] = True  # stays with what forward keeps for backward
    return node


def take_out(graph: Graph) -> list[tuple[PackedParameters, Node]]:
    """Make each `side_by_side` of a forward graph an input of it, the last ones; gives them with their new nodes."""
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
    """In a backward graph, give each whole that forward kept a second, last input for its uses; gives the places of the first.

    The compiler may write over what forward kept for backward alone, as it takes a whole to be; over the second it may not.
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
    def call(inputs: list[Any]) -> Any:
        inputs.extend([whole.of(inputs) for whole in wholes])
        return compiled(inputs)

    return boxed(call)


def backward_with(compiled: Compiled, places: Sequence[int]) -> Compiled:
    def call(inputs: list[Any]) -> Any:
        inputs.extend([inputs[place] for place in places])
        return compiled(inputs)

    return boxed(call)


def boxed(call: Compiled) -> Compiled:
    """Say that it takes its inputs in one list, which it may empty."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call
