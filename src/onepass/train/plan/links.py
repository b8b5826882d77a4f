"""The time of collectives: NCCL's rings over NVLink within a node, and over the nodes' network cards."""

from __future__ import annotations

from typing import NamedTuple

from onepass.train.plan.layouts import NODE, GPULayout
from onepass.train.plan.rates import Links


class Group(NamedTuple):
    """Ranks that communicate. `stride` is the distance of neighbours in the order of ranks, of which a node has NODE."""

    size: int
    stride: int = 1

    @property
    def in_node(self) -> int:
        return max(1, min(self.size, NODE // self.stride))

    @property
    def nodes(self) -> int:
        return -(-self.size // self.in_node)


def groups(layout: GPULayout) -> dict[str, Group]:
    """Return a rank's groups. Tensor-parallel ranks are neighbours; then come context, data and pipeline."""
    within = layout.tensor * layout.context
    return {
        "tensor": Group(layout.tensor),
        "context": Group(layout.context, layout.tensor),
        "replicas": Group(layout.replicas, layout.tensor),
        "pipeline": Group(layout.pipeline, within * layout.data),
    }


def bandwidth(links: Links, group: Group) -> float:
    """Return the bytes a second that each rank of a ring sends. Rings of a node share its network cards, one a GPU."""
    within = (links.pair if group.size == 2 else links.node).value
    return within if group.nodes == 1 else min(within, group.in_node * links.card.value)


def start(links: Links, group: Group) -> float:
    """Return the seconds of a collective beside what its bytes take: the way of the first ones around the ring."""
    if group.size == 2 and group.nodes == 1:
        return links.pair_start.value
    return links.start.value + (group.size - group.nodes) * links.hop.value + (group.nodes - 1) * links.card_hop.value


def gather_time(links: Links, group: Group, whole: float, times: int = 1) -> float:
    """Return the seconds of all-gathers, or reduce-scatters, of `whole` bytes in so many calls."""
    if group.size == 1 or not whole:
        return 0.0
    return whole * (group.size - 1) / group.size / bandwidth(links, group) + times * start(links, group)


def reduce_time(links: Links, group: Group, whole: float, times: int = 1) -> float:
    """Return the seconds of all-reduces of `whole` bytes: a ring scatters sums, and gathers them."""
    if group.size == 1 or not whole:
        return 0.0
    if group.size == 2 and group.nodes == 1:
        return whole / links.pair_reduce.value + times * start(links, group)
    return 2 * gather_time(links, group, whole, times)


def send_time(links: Links, group: Group, size: float) -> float:
    """Return the seconds until a rank's tensor is at the next one."""
    if group.in_node > 1:
        return size / links.pair.value + links.pair_start.value
    return size / links.card.value + links.start.value + links.card_hop.value
