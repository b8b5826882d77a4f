"""Helpers for graphs of ATen operators: the kind of a node, its depth, and the insertion of new nodes.

Graphs are AOTAutograd's: functional, with aliasing, in-place writes and autograd already resolved. A node's depth is the length
of the longest path to it from an input. It counts operators that launch kernels, then the views after the last of these. Depth
grows along each edge, so nodes of one depth can't depend on each other. If each of several sets of such nodes is replaced by one
operator, the graph gets no cycle.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten = torch.ops.aten
Depth = tuple[int, int]

SAME = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    operator.getitem,
    *SAME,
}
NORM_SHAPE: dict[Any, int] = {  # where a norm has the shape that it normalizes, among its arguments
    aten.native_layer_norm.default: 1,
    aten._fused_rms_norm.default: 1,
    aten.native_layer_norm_backward.default: 2,
    aten._fused_rms_norm_backward.default: 2,
}
LOOKUPS = {aten.embedding.default, aten.embedding_dense_backward.default}
CASTS = {torch.ops.prims.convert_element_type.default, aten._to_copy.default}


def is_view(node: Node) -> bool:
    return node.target in VIEWS


def is_pointwise(node: Node) -> bool:
    if node.target in CASTS:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def is_norm(node: Node) -> bool:
    return node.target in NORM_SHAPE


def is_reduction(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.reduction in node.target.tags


def is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_impure(node: Node) -> bool:
    """Whether the node has effects besides its outputs, so that its order matters."""
    return node.op == "call_function" and not is_random(node) and node.target is not operator.getitem and node.is_impure()


def value(node: Node) -> Any:
    return node.meta.get("val")


def arguments(node: Node) -> Any:
    """Return a call's arguments, typed as Any: FX types them as a union of every possible argument."""
    return node.args


def operands_of(node: Node) -> list[Node]:
    """Return the nodes among a call's arguments, in order. A node that occurs twice is listed twice."""
    operands: list[Node] = []

    def seen(used: Node) -> Node:
        operands.append(used)
        return used

    map_arg((node.args, node.kwargs), seen)
    return operands


def shape(node: Node) -> list[Any]:
    """Return a tensor's sizes. Symbolic sizes stay symbolic."""
    return list(value(node).shape)


def size_key(size: Any) -> Any:
    """Return a key of a size for comparisons. To compare symbolic sizes themselves would add guards to the user's function."""
    return size.node.expr if isinstance(size, SymInt) else size


def tensor_key(node: Node) -> object:
    tensor = value(node)
    return tuple(size_key(s) for s in tensor.shape), tensor.dtype, tensor.device


def nbytes(node: Node) -> int:
    """Return the bytes of the node's outputs. A symbolic size counts with its traced value."""
    result = value(node)
    return sum(_nbytes(tensor) for tensor in (result if isinstance(result, tuple | list) else [result]))


def _nbytes(tensor: Any) -> int:
    if not isinstance(tensor, Tensor):
        return 0
    elements = tensor.element_size()
    sizes: list[Any] = list(tensor.shape)
    for size in sizes:
        elements *= size.node.hint if isinstance(size, SymInt) else size
    return elements


def launches(node: Node) -> bool:
    """Whether the operator launches kernels of its own if nothing is fused."""
    return node.op == "call_function" and not is_view(node) and not _is_symbolic(node)


def _is_symbolic(node: Node) -> bool:
    return isinstance(value(node), int | float | bool | SymInt | torch.SymFloat | torch.SymBool)


def depths(graph: Graph) -> dict[Node, Depth]:
    """Return each node's depth. Random operators depend on each other in order, because their order determines the numbers."""
    found: dict[Node, Depth] = {}
    last_random: Node | None = None
    for node in graph.nodes:
        before = [found[used] for used in node.all_input_nodes]
        if is_random(node):
            if last_random is not None:
                before.append(found[last_random])
            last_random = node
        deepest = max(before, default=(0, 0))
        if node.op == "call_function" and is_view(node):
            found[node] = deepest[0], deepest[1] + 1
        else:
            found[node] = deepest[0] + (node.op != "placeholder"), 0
    return found


def epochs(graph: Graph) -> dict[Node, int]:
    """Return the number of impure nodes before each node. No node may move past an impure one."""
    count = 0
    found: dict[Node, int] = {}
    for node in graph.nodes:
        found[node] = count
        count += is_impure(node)
    return found


def backward_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that depend on incoming gradients. Forward must not depend on them: the graph is partitioned later."""
    found: set[Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or any(used in found for used in node.all_input_nodes):
            found.add(node)
    return found


def only_for_backward(graph: Graph, backward: set[Node]) -> set[Node]:
    """Return the nodes that no forward output needs. The partitioner puts them into backward, even if they use no gradient."""
    needed: set[Node] = set()
    waiting = [node for node in graph.output_node().all_input_nodes if node not in backward]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    return set(graph.nodes) - needed if backward else set()


def is_tangent(node: Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)  # AOTAutograd recognises tangents by this name


class NoRule(Exception):
    """The lanes of a group can't be one operator. The message says why."""


class Emitter:
    """Insert new nodes into a graph, each with the fake value that a trace would have given it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.before: Node | None = None  # new nodes go before it

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        values, named = map_arg((args, kwargs), value)
        with torch.no_grad():
            result = target(*values, **named)
        if self.before is None:
            raise RuntimeError("the emitter has no place: set `before`")
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = result
        node.meta["original_aten"] = target  # inductor names kernels by it
        if "stack_trace" in self.before.meta:
            node.meta["stack_trace"] = self.before.meta["stack_trace"]
        return node

    def constant(self, numbers: Sequence[int], like: Node, behind: int) -> Node:
        """Insert integers, one a lane, on the device of `like`. They have `behind` more dimensions, of one element."""
        with unset_fake_temporarily():
            tensor = torch.tensor(numbers, device=value(like).device).view(-1, *[1] * behind)
        owner: Any = self.graph.owning_module
        name = next(name for i in count() if not hasattr(owner, name := f"_fused_constant{i}"))
        owner.register_buffer(name, tensor)
        assert self.before is not None
        with self.graph.inserting_before(self.before):
            node = self.graph.get_attr(name)
        node.meta["val"] = value(like).fake_mode.from_tensor(tensor)
        return self(aten.lift_fresh_copy.default, node)  # as in a trace: fake tensors take a real one nowhere else

    def item(self, node: Node, index: int) -> Node:
        return self(operator.getitem, node, index)

    def view(self, node: Node, sizes: Sequence[Any]) -> Node:
        """Return a view where strides allow one, else a view of a copy, as reshape does."""
        if [size_key(s) for s in sizes] == [size_key(s) for s in shape(node)]:
            return node
        symbolic = [dim for dim, size in enumerate(sizes) if isinstance(size, SymInt)]
        given = [-1 if symbolic == [dim] else size for dim, size in enumerate(sizes)]
        given = self.sizes(given, node) if len(symbolic) > 1 else given
        if not can_be_viewed(value(node), sizes):
            node = self(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self(aten.view.default, node, given)

    def sizes(self, sizes: Sequence[Any], like: Node) -> list[Any]:
        """Return sizes as arguments. For a symbolic size it is a node with that value, or sym_size of a tensor that has it."""
        known = {size_key(s): (like, dim) for dim, s in enumerate(shape(like))}
        return [self._size(s, known) if isinstance(s, SymInt) else s for s in sizes]

    def _size(self, size: SymInt, known: dict[object, tuple[Node, int]]) -> Node:
        key = size_key(size)
        if key in known:
            return self(aten.sym_size.int, *known[key])
        for node in self.graph.nodes:
            assert isinstance(node, Node)
            known_value = value(node)
            if isinstance(known_value, SymInt) and size_key(known_value) == key:
                return node
            if node.op == "placeholder" and isinstance(known_value, Tensor):
                for dim, asked in enumerate(known_value.shape):
                    if size_key(asked) == key:
                        return self(aten.sym_size.int, node, dim)
        raise NoRule(f"a size that changes from call to call, {size}, is nowhere at hand")

    def move(self, node: Node, source: int, target: int) -> Node:
        if source == target:
            return node
        order = [dim for dim in range(value(node).dim()) if dim != source]
        order.insert(target, source)
        return self(aten.permute.default, node, order)


def can_be_viewed(tensor: Tensor, sizes: Sequence[Any]) -> bool:
    """Whether a view is possible, as ATen decides it. Fake tensors allow some that real ones refuse, next to dimensions of 1.

    Symbolic sizes are compared as expressions, without guards. Where those can't tell, the answer is no.
    """
    old, strides, new = ([size_key(s) for s in given] for given in (tensor.shape, tensor.stride(), sizes))
    if tensor.is_contiguous() or 0 in old:
        return True
    place, size, step = len(new), cast(Any, 1), strides[-1]
    for dim in reversed(range(len(old))):
        size = size * old[dim]
        if dim and (old[dim - 1] == 1 or strides[dim - 1] == size * step):
            continue  # one chunk of memory with the dimension before
        viewed: Any = 1
        while place and (new[place - 1] == 1 or viewed != size):
            place -= 1
            viewed = viewed * new[place]
        if viewed != size:
            return False
        size, step = 1, strides[dim - 1]
    return place == 0


def drop_aliases(graph: Graph) -> None:
    """Replace aliases by their source. Aliases that the graph returns stay: the caller may rely on two tensors."""
    output = graph.output_node()
    for node in list(graph.nodes):
        if node.target in SAME and isinstance(node.args[0], Node):
            node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user is not output)
            if not node.users:
                graph.erase_node(node)


def share_equal(graph: Graph) -> None:
    """Merge equal calls on equal tensors into one node, as AOTAutograd does later.

    Then three layers that each flatten their common input share one input. And a value that backward recomputes is not taken for
    a second lane.
    """
    seen: dict[object, Node] = {}
    output = graph.output_node()
    for node in list(graph.nodes):
        if node.op != "call_function" or is_random(node) or is_impure(node) or not _is_pure(node):
            continue
        first = seen.setdefault((node.target, frozen(node.args), frozen(node.kwargs)), node)
        if first is not node and not (leaves(first, output) and leaves(node, output)):  # a caller may write to one of two outputs
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def leaves(node: Node, output: Node) -> bool:
    """Whether the graph returns the node's tensor or a view of it."""
    return any(user is output or (is_view(user) and leaves(user, output)) for user in node.users)


def readers(node: Node) -> set[Node]:
    """Return the users of the node's tensor and of its views, without the views."""
    return {reader for user in node.users for reader in (readers(user) if is_view(user) else [user])}


def _is_pure(node: Node) -> bool:
    return node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload)


def frozen(argument: Any) -> object:
    """Return arguments as a hashable key."""
    if isinstance(argument, list | tuple):
        return tuple(frozen(a) for a in argument)
    if isinstance(argument, dict):
        return tuple((k, frozen(v)) for k, v in argument.items())
    return argument, type(argument)  # with its type: 1, 1.0 and True are equal


def sort(graph: Graph) -> None:
    """Sort the nodes topologically, and otherwise keep their order. Random operators always keep theirs."""
    order: list[Node] = []
    placed: set[Node] = set()
    begun: set[Node] = set()
    random = [node for node in graph.nodes if is_random(node)]
    earlier = dict(zip(random[1:], random, strict=False))
    for root in list(graph.nodes):
        waiting = [root]
        while waiting:
            node = waiting[-1]
            needed = [*node.all_input_nodes, *([earlier[node]] if node in earlier else [])]
            missing = [used for used in needed if used not in placed] if node not in placed else []
            if missing:
                begun.add(node)
                if not begun.isdisjoint(missing):
                    raise RuntimeError("onepass.fuse made a circle of operators: please report the program")
                waiting.extend(missing)
            else:
                waiting.pop()
                if node not in placed:
                    placed.add(node)
                    order.append(node)
    last = graph._root
    for node in order:
        last.append(node)
        last = node


def remove_dead(graph: Graph, candidates: Iterable[Node]) -> None:
    """Erase candidates without users, and the nodes that only they used."""
    waiting = list(candidates)
    gone: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in gone or node.users or node.op != "call_function" or is_impure(node) or is_random(node):
            continue
        waiting.extend(node.all_input_nodes)
        gone.add(node)
        graph.erase_node(node)
