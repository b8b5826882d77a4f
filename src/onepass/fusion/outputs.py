"""Outputs that are lanes of one tensor, and that their caller may write to as if they weren't.

For autograd such an output is a view, made where gradients are off. It forbids in-place operators on that, and counts a write to
one lane as a write to all. Generated code returns tensors that share memory and no version, by which autograd finds that what
backward reads was written to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from onepass.fusion.graph import backward_nodes, is_view, readers
from onepass.fusion.side_by_side import Compiled, boxed


def read_by_backward(joint: Graph, returned: int) -> list[bool]:
    """Return for each of the first `returned` outputs whether backward reads it."""
    outputs: Any = joint.output_node().args[0]
    backward = _backward(joint)
    return [isinstance(output, Node) and not backward.isdisjoint(readers(output)) for output in outputs[:returned]]


def before_gradients(joint: Graph) -> int:
    """Return how many outputs come before the gradients, of which some are None."""
    outputs: Any = joint.output_node().args[0]
    backward = _backward(joint)
    return next((place for place, output in enumerate(outputs) if output is None or output in backward), len(outputs))


def _backward(joint: Graph) -> set[Node]:
    """Return backward's operators, those too that a formula of several has before an incoming gradient."""
    tagged = {node for node in joint.nodes if node.meta.get("partitioner_tag") == "is_backward"}
    return (tagged | backward_nodes(joint)) - {joint.output_node()}


def lanes_of_saved(graph: Graph, read: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the places of outputs that need a version in common, each with the place of the one that has it.

    They are the lanes that backward reads, and what is saved of the same tensors.

    Args:
        read: see `read_by_backward`. What follows these outputs is saved.
    """
    outputs: Any = graph.output_node().args[0]
    saved: dict[Node, list[int]] = defaultdict(list)
    lanes: dict[Node, list[int]] = defaultdict(list)
    for place, output in enumerate(outputs):
        if isinstance(output, Node) and (place >= len(read) or (read[place] and _is_lane(output))):
            (saved if place >= len(read) else lanes)[_viewed(output)[-1]].append(place)
    return [(place, saved[whole][0]) for whole, of_it in lanes.items() if saved[whole] for place in (*saved[whole][1:], *of_it)]


def with_shared_versions(compiled: Compiled, places: Sequence[tuple[int, int]]) -> Compiled:
    """Return generated code whose outputs share versions, by `lanes_of_saved`.

    So a write to such a lane before backward is an error, as it is where the function isn't fused.
    """

    def call(inputs: list[Any]) -> Any:
        results = list(compiled(inputs))
        for place, other in places:
            lane, saved = results[place], results[other]
            if lane.dtype is saved.dtype and lane.untyped_storage().data_ptr() == saved.untyped_storage().data_ptr():
                results[place] = saved.as_strided(lane.size(), lane.stride(), lane.storage_offset()).detach()
        return results

    return boxed(call)


def with_own_outputs(compiled: Compiled, graph: Graph, read: Sequence[bool] = ()) -> Compiled:
    """Return `compiled` with outputs that are no views. read: see `read_by_backward`; what follows these outputs is saved."""
    outputs: Any = graph.output_node().args[0]
    returned = outputs[: len(read)] if read else outputs
    saved = set(outputs[len(returned) :])
    own = {
        place: _own(output, saved, place < len(read) and read[place]) for place, output in enumerate(returned) if _is_lane(output)
    }
    if not own:
        return compiled

    def call(inputs: list[Any]) -> Any:
        results = list(compiled(inputs))
        for place, made in own.items():
            results[place] = made(results[place])
        return results

    return boxed(call)


def _own(lane: Node, saved: set[Node], read: bool) -> Callable[[Tensor], Tensor]:
    """Return how a lane gets an output of its own.

    A write to what backward reads is an error, so that the output keeps its version. If backward reads other lanes alone, a write
    is none. Then the output is a copy, where the lanes' one tensor is saved.
    """
    if saved.isdisjoint(_viewed(lane)):
        return lambda result: result.data
    return Tensor.detach if read else Tensor.clone


def _is_lane(node: object) -> bool:
    return isinstance(node, Node) and is_view(node) and _viewed(node)[-1].op == "call_function"


def _viewed(node: Node) -> list[Node]:
    """Return the node and all that it is a view of."""
    found = [node]
    while is_view(node):
        (node, *_) = node.all_input_nodes
        found.append(node)
    return found
