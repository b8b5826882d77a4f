"""Outputs that are lanes of one tensor, and that their caller may write to as if they weren't.

For autograd such an output is a view, made where gradients are off. It forbids in-place operators on that, and counts a write to
one lane as a write to all. Generated code returns other tensors, so this is for graphs that no compiler follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from onepass.fusion.graph import backward_nodes, is_view, readers
from onepass.fusion.side_by_side import Compiled, boxed


def read_by_backward(joint: Graph, returned: int) -> list[bool]:
    """Return for each of the first `returned` outputs whether backward reads it."""
    outputs: Any = joint.output_node().args[0]
    backward = backward_nodes(joint) - {joint.output_node()}
    return [isinstance(output, Node) and not backward.isdisjoint(readers(output)) for output in outputs[:returned]]


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
