"""Merge linear layers of one input into one product: query, key and value; gate and up.

Forward is x @ W.T, where W is the weights side by side (`side_by_side`). Each layer's output is a slice of its columns.
Backward concatenates the layers' output gradients to D. The weights' gradients are the rows of D.T @ x. The input's gradient,
a sum of products, becomes D @ W. It is summed in fp32, where the sum of products is rounded at every addition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from onepass.fusion.cost import LaunchCost
from onepass.fusion.graph import (
    CASTS,
    Emitter,
    arguments,
    aten,
    is_pointwise,
    is_view,
    nbytes,
    remove_dead,
    shape,
    size_key,
    tensor_key,
    value,
)
from onepass.fusion.report import FusedGroup, UnfusedGroup
from onepass.fusion.side_by_side import whole_of
from onepass.fusion.strides import replace

_FAR = 200  # nodes after a gradient that `_leads_nowhere` visits before it gives up


@dataclass(frozen=True)
class LinearLayer:
    product: Node
    used: Node  # the product's weight: the parameter, or its cast under autocast
    weight: Node  # [N, K], a parameter
    bias: Node | None


@dataclass
class Linears:
    """One pass over a graph. `found` has the groups that it fused, `refused` those that it did not."""

    graph: Graph
    machine: LaunchCost
    parameters: set[Node]

    def __post_init__(self) -> None:
        self.emit = Emitter(self.graph)
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        self.found: list[FusedGroup] = []
        self.refused: list[UnfusedGroup] = []

    def run(self) -> None:
        for x, layers in self._layers():
            whole = self._merge(x, layers)
            gradients = self._gradients(x, layers)
            if gradients is not None:
                self._merge_backward(x, layers, whole, gradients)
        remove_dead(self.graph, reversed(list(self.graph.nodes)))

    def _layers(self) -> list[tuple[Node, list[LinearLayer]]]:
        """Return each input with its layers. Their weights are parameters of one dtype, and all or none have a bias."""
        found: dict[object, list[LinearLayer]] = defaultdict(list)
        inputs: dict[object, Node] = {}
        for node in self.graph.nodes:
            layer = self._layer(node)
            if layer is not None:
                x = node.args[0] if layer.bias is None else node.args[1]
                key = x, value(layer.weight).dtype, value(layer.used).dtype, layer.bias is None
                inputs[key] = x
                if all(layer.weight is not other.weight for other in found[key]):
                    found[key].append(layer)
        return [(inputs[key], layers) for key, layers in found.items() if len(layers) > 1]

    def _layer(self, node: Node) -> LinearLayer | None:
        if node.target is aten.mm.default:
            right = arguments(node)[1]
            bias = None
        elif node.target is aten.addmm.default and not node.kwargs:
            bias, _, right = arguments(node)
            if bias not in self.parameters or shape(bias) != shape(node)[1:]:  # a bias of one element would be broadcast
                return None
        else:
            return None
        used = _transposed(right)
        weight = _uncast(used)
        if used is None or weight not in self.parameters or not all(isinstance(s, int) for s in shape(used)):
            return None
        return LinearLayer(node, used, weight, bias)

    # ---- forward ----

    def _merge(self, x: Node, layers: Sequence[LinearLayer]) -> Node:
        emit = self.emit
        emit.before = min((layer.product for layer in layers), key=self.order.__getitem__)
        whole = self._weights(layers)
        right = emit(aten.permute.default, whole, [1, 0])
        if layers[0].bias is None:
            product = emit(aten.mm.default, x, right)
        else:
            bias = whole_of(emit, [layer.bias for layer in layers if layer.bias is not None], stacked=False)
            product = emit(aten.addmm.default, bias, x, right)
        for layer, (start, end) in zip(layers, _ranges(layers), strict=True):
            emit.before = layer.product
            self._replace(layer.product, emit(aten.slice.Tensor, product, 1, start, end))
        self.found.append(FusedGroup("linear", len(layers), "one input, weights side by side", 0))
        return whole

    def _weights(self, layers: Sequence[LinearLayer]) -> Node:
        whole = whole_of(self.emit, [layer.weight for layer in layers], stacked=False)
        dtype = value(layers[0].used).dtype
        return whole if dtype == value(whole).dtype else self.emit(torch.ops.prims.convert_element_type.default, whole, dtype)

    def _replace(self, old: Node, new: Node) -> None:
        self.order[new] = self.order.get(old, len(self.order))  # the gradient of a later group may be this one's output
        replace(self.emit, old, new)

    # ---- backward ----

    def _gradients(self, x: Node, layers: Sequence[LinearLayer]) -> list[Node] | None:
        """Return each layer's output gradient [M, N]. Return None where a layer has none, as in inference."""
        found: list[Node] = []
        for layer in layers:
            by_input: list[Node] = [
                arguments(user)[0] for user in layer.used.users if user.target is aten.mm.default and user.args[1] is layer.used
            ]
            by_weight = [each for _, each in _transposed_products(x) if size_key(shape(each)[1]) == shape(layer.weight)[0]]
            candidates = by_input if len(by_input) == 1 else [] if by_input else by_weight
            if len(candidates) != 1:
                return None
            found.append(candidates[0])
        return found if len(set(found)) == len(found) else None

    def _merge_backward(self, x: Node, layers: Sequence[LinearLayer], whole: Node, gradients: Sequence[Node]) -> None:
        copied = sum(nbytes(gradient) for gradient in gradients if not _written_where_wanted(gradient))
        by_weight = self._weight_products(x, gradients)
        by_input = self._sum_of(gradients, layers)
        saved = (len(layers) - 1) * ((by_weight is not None) + 2 * (by_input is not None))
        if not saved:
            return
        if not self.machine.pays(saved, copied):
            why = f"copying {copied:,} bytes together costs more than it saves"
            self.refused.append(UnfusedGroup("linear's backward", len(layers), why))
            return
        self.emit.before = max([*gradients], key=self.order.__getitem__).next
        together = self.emit(aten.cat.default, list(gradients), 1)
        if by_weight is not None:
            product = self.emit(aten.mm.default, self.emit(aten.permute.default, together, [1, 0]), x)
            for old, (start, end) in zip(by_weight, _ranges(layers), strict=True):
                self._replace(old, self.emit(aten.slice.Tensor, product, 0, start, end))
            self.found.append(FusedGroup("linear's weight gradient", len(layers), "one input, gradients side by side", copied))
        if by_input is not None:
            root, terms, rest = by_input
            self.emit.before = root
            total = self.emit(aten.mm.default, together, whole)
            total = self.emit.view(total, shape(terms[0]))
            if value(total).dtype != value(terms[0]).dtype:
                total = self.emit(torch.ops.prims.convert_element_type.default, total, value(terms[0]).dtype)
            for term in rest:
                total = self.emit(aten.add.Tensor, total, term)
            self._replace(root, total)
            once = 0 if by_weight is not None else copied  # both products read one cat
            self.found.append(FusedGroup("linear's input gradient", len(layers), "a sum of products is one product", once))

    def _weight_products(self, x: Node, gradients: Sequence[Node]) -> list[Node] | None:
        found = []
        for gradient in gradients:
            products = [product for product, left in _transposed_products(x) if left is gradient]
            if len(products) != 1 or not self._leads_nowhere(products[0], gradients):
                return None
            found.append(products[0])
        return found

    def _leads_nowhere(self, product: Node, gradients: Sequence[Node]) -> bool:
        """Whether none of the layers' output gradients depends on this weight gradient."""
        waiting, seen = [product], {product}
        while waiting:
            for user in waiting.pop().users:
                if user in gradients or len(seen) > _FAR:
                    return False
                if user not in seen:
                    seen.add(user)
                    waiting.append(user)
        return True

    def _sum_of(self, gradients: Sequence[Node], layers: Sequence[LinearLayer]) -> tuple[Node, list[Node], list[Node]] | None:
        """Find the sum of gradient @ weight over the layers. Return its last addition, the layers' terms, and the other terms."""
        terms = []
        for gradient, layer in zip(gradients, layers, strict=True):
            products = [u for u in layer.used.users if u.target is aten.mm.default and u.args == (gradient, layer.used)]
            if len(products) != 1:
                return None
            terms.append(_term_of(products[0]))
        root = _common_sum(terms[0], terms)
        if root is None:
            return None
        addends = _addends(root)
        if any(addends.count(term) != 1 for term in terms):  # a layer called twice, with one gradient for both
            return None
        rest = [term for term in addends if term not in terms]
        if any(tensor_key(term) != tensor_key(root) for term in [*terms, *rest]):
            return None
        return root, terms, rest


def _transposed(node: object) -> Node | None:
    """Return the tensor that a node transposes, or None."""
    if not isinstance(node, Node):
        return None
    order: Any = node.args[1] if node.target is aten.permute.default else None
    if node.target is not aten.t.default and (order is None or list(order) != [1, 0]):
        return None
    base = node.args[0]
    return base if isinstance(base, Node) else None


def _transposed_products(x: Node) -> list[tuple[Node, Node]]:
    """Return the products left.T @ x, each with its left operand."""
    products = [user for user in x.users if user.target is aten.mm.default and user.args[1] is x]
    return [(product, left) for product in products if (left := _transposed(product.args[0])) is not None]


def _uncast(node: Node | None) -> Node | None:
    """Return the input of a cast. Return other nodes unchanged."""
    if node is not None and node.target in CASTS and len(node.all_input_nodes) == 1:
        return node.all_input_nodes[0]
    return node


def _ranges(layers: Sequence[LinearLayer]) -> list[tuple[int, int]]:
    return list(pairwise([0, *accumulate(int(shape(layer.weight)[0]) for layer in layers)]))


def _written_where_wanted(gradient: Node) -> bool:
    """Whether a generated kernel writes the gradient. Such a kernel can write anywhere; a library's can't."""
    while is_view(gradient) and isinstance(gradient.args[0], Node):
        gradient = gradient.args[0]
    return is_pointwise(gradient)


def _term_of(product: Node) -> Node:
    """Return the term that a sum adds for a product: the product, or the last of its views and casts that have one user."""
    term = product
    while len(term.users) == 1:
        (user,) = term.users
        if user.target not in (aten.view.default, aten._unsafe_view.default) and user.target not in CASTS:
            break
        term = user
    return term


def _is_sum(node: Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and all(isinstance(arg, Node) for arg in node.args)


def _common_sum(term: Node, terms: Sequence[Node]) -> Node | None:
    """Return the first sum after `term` that adds all terms, or None. Each sum on the way must have one user."""
    while len(term.users) == 1 and _is_sum(next(iter(term.users))):
        term = next(iter(term.users))
        if all(other in _addends(term) for other in terms):
            return term
    return None


def _addends(root: Node) -> list[Node]:
    found, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        if node is root or (_is_sum(node) and len(node.users) == 1):
            waiting.extend(arg for arg in node.args if isinstance(arg, Node))
        else:
            found.append(node)
    return found


def drop_double_transposes(graph: Graph) -> None:
    """Replace a transpose of a transpose by its source. Autograd writes weights that way."""
    for node in list(graph.nodes):
        once = _transposed(node)
        twice = _transposed(once) if once is not None else None
        if twice is not None:
            node.replace_all_uses_with(twice, delete_user_cb=lambda user: user.op != "output")  # the caller has two tensors
    remove_dead(graph, reversed(list(graph.nodes)))
