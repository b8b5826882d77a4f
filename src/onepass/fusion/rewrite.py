"""All rewriting of one graph, which the backend calls between autograd and code generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from onepass.fusion.cost import LaunchCost
from onepass.fusion.graph import (
    arguments,
    aten,
    backward_nodes,
    drop_aliases,
    is_impure,
    is_tangent,
    launches,
    nbytes,
    operands_of,
    remove_dead,
    share_equal,
    sort,
    value,
)
from onepass.fusion.groups import Sweep
from onepass.fusion.linears import Linears, drop_double_transposes
from onepass.fusion.pieces import gather_gradients
from onepass.fusion.report import GraphReport, OperatorWork
from onepass.fusion.side_by_side import side_by_side
from onepass.fusion.strides import settle

Decompositions = Mapping[Any, Callable[..., Any]]

# Groups are found by these operators, so they must not be decomposed before.
WHOLE = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten._fused_rms_norm.default,
        aten._fused_rms_norm_backward.default,
        aten.slice_backward.default,
        aten.select_backward.default,
        aten.embedding_dense_backward.default,
    }
)


def rewrite(graph: Graph, parameters: set[Node], machine: LaunchCost, compiled: bool) -> GraphReport:
    """Fuse the graph in place, and return its report."""
    started = time.perf_counter()
    before = _work(graph)
    drop_aliases(graph)
    share_equal(graph)
    drop_double_transposes(graph)
    gather_gradients(graph)
    linears = Linears(graph, machine, parameters)
    linears.run()
    sort(graph)
    settle(graph)
    sweep = Sweep(graph, machine, parameters, compiled)
    sweep.run()
    sort(graph)
    settle(graph)
    graph.lint()
    return GraphReport(
        found=[*linears.found, *sweep.found.values()],
        refused=[*linears.refused, *sweep.refused],
        before=before,
        after=_work(graph, sweep.listed, sweep.listed_groups),
        machine=machine,
        seconds=time.perf_counter() - started,
        backward=bool(backward_nodes(graph)),
    )


def _work(graph: Graph, together: Collection[Node] = (), groups: int = 0) -> OperatorWork:
    """Count operators and bytes. `together`: operators that the compiler merges into `groups` kernels."""
    nodes = [node for node in graph.nodes if launches(node) and node.target is not side_by_side]
    alone = [node for node in nodes if node not in together]
    listed = [node for node in nodes if node in together and node.target is not aten.cat.default]
    return OperatorWork(len(alone) + groups, sum(map(_moved, [*alone, *listed])))


def _moved(node: Node) -> int:
    """Return the bytes that an operator reads and writes. A look-up reads as many bytes of its table as it writes."""
    read = node.all_input_nodes
    if node.target is aten.embedding.default:
        read = [node, *read[1:]]
    return nbytes(node) + sum(map(nbytes, read))


def take_apart(graph: Graph, decompositions: Decompositions) -> None:
    """Decompose the operators of WHOLE, as the compiler would have done at the start."""
    for node in list(graph.nodes):
        if node.target in WHOLE and node.target in decompositions:
            _inline(graph, node, decompositions)


def _inline(graph: Graph, node: Node, decompositions: Decompositions) -> None:
    nodes = list(dict.fromkeys(operands_of(node)))

    def call(*tensors: Any) -> Any:
        value_of = dict(zip(nodes, tensors, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), value_of.__getitem__)
        result = decompositions[node.target](*args, **kwargs)
        return tuple(result) if isinstance(result, tuple) else result  # a named tuple would be a call in the graph

    with torch.no_grad():
        inner = make_fx(call, decomposition_table=dict(decompositions))(*[value(used) for used in nodes]).graph
    placed: dict[Node, Any] = dict(zip(inner.find_nodes(op="placeholder"), nodes, strict=True))
    with graph.inserting_before(node):
        for step in inner.nodes:
            if step.op == "call_function":
                placed[step] = graph.node_copy(step, placed.__getitem__)
            elif step.op == "get_attr":
                raise RuntimeError(f"{node.target} holds a constant tensor, which can't be put into the graph")
    results: Any = map_arg(inner.output_node().args[0], placed.__getitem__)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            chosen = results[arguments(user)[1]]
            if chosen is not None:
                user.replace_all_uses_with(chosen)
            graph.erase_node(user)
    remove_dead(graph, [node])


def parameters_of(graph: Graph, is_parameter: Sequence[bool]) -> set[Node]:
    """Return the inputs that are parameters, and that the graph doesn't write to.

    A compiler doesn't know that a tensor of several parameters is their memory. It may write to it before it reads the tensor.
    Return none where AOTAutograd changed the inputs (subclasses, duplicates).
    """
    inputs = [node for node in graph.find_nodes(op="placeholder") if not is_tangent(node)]
    if len(inputs) != len(is_parameter):
        return set()
    given = {node for node, yes in zip(inputs, is_parameter, strict=True) if yes and isinstance(value(node), torch.Tensor)}
    return {node for node in given if not any(map(is_impure, node.users))}
