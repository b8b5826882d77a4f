"""Programs with a known number of fusible groups, and helpers that compare a fused function with the original."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.fusion.cost import LaunchCost
from onepass.fusion.fused import fuse

FREE_COPIES = LaunchCost(bytes_per_us=1e12, launch_us=1e3)  # every fusion that saves a launch pays
NO_COPIES = LaunchCost(bytes_per_us=1e-9, launch_us=1e-3)  # only fusions without a copy pay

NORM = "native_layer_norm"
RMS = ("pow", "mean", "add", "rsqrt", "mul")

# ---- comparing ----


def leaves(outputs: object) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    return [leaf for part in outputs for leaf in leaves(part)] if isinstance(outputs, list | tuple) else []


def loss_of(outputs: object) -> Tensor:
    """Return a weighted sum of all outputs, in which every element of an output has its own weight."""
    total = torch.zeros((), dtype=torch.float64)
    for y in leaves(outputs):
        if y.dtype.is_floating_point and y.requires_grad:
            total = total + (y.double() * torch.linspace(1, 2, y.numel(), dtype=torch.float64).view(y.shape)).sum()
    return total


def step(fn: Callable, args: list, parameters: list[nn.Parameter]) -> tuple[object, list[Tensor | None]]:
    """Return the outputs, and the gradients of all arguments and parameters with requires_grad."""
    args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
    outputs = fn(*args)
    wanted = [x for x in (*args, *parameters) if isinstance(x, Tensor) and x.requires_grad]
    loss = loss_of(outputs)
    if not loss.requires_grad:
        return outputs, []
    return outputs, list(torch.autograd.grad(loss, wanted, allow_unused=True))


def same(found: object, wanted: object, rtol: float, atol: float) -> None:
    found, wanted = list(found), list(wanted)
    assert [x is None for x in found] == [x is None for x in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        if theirs is not None:
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)


def check(
    fn: Callable,
    *args: object,
    rtol: float = 1e-12,
    atol: float = 1e-12,
    grad: bool = True,
    inference: bool = True,
    **options: object,
) -> Callable:
    """Fuse a function or module, assert that values and gradients are those of the original, and return the fused one.

    `inference` is a graph of its own, without gradients, and so is `grad`.
    """
    options.setdefault("compiler", "none")
    fused = fuse(fn, **options)
    parameters = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    if inference:
        with torch.no_grad():
            same(leaves(fused(*args)), leaves(fn(*args)), rtol, atol)
        fused.inference = Counter((f.operator, f.lanes) for f in fused.report().found)
    if grad:
        for _ in range(2):
            (mine, my_gradients), (theirs, their_gradients) = step(fused, args, parameters), step(fn, args, parameters)
            same(leaves(mine), leaves(theirs), rtol, atol)
            same(my_gradients, their_gradients, rtol, atol)
    return fused


def found_in(fn: Callable, *args: object, **options: object) -> Counter:
    """Return the groups that are found in the graph of forward alone."""
    return check(fn, *args, grad=False, **options).inference


# ---- programs with planted groups ----


def lay(x: Tensor, layout: str) -> Tensor:
    """Return the same values in another memory layout. "expanded" repeats the first row."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        wide = torch.zeros(*x.shape, 2, dtype=x.dtype)
        wide[..., 1] = x
        return wide[..., 1]
    if layout == "offset":
        wide = torch.zeros(x.shape[0] + 2, *x.shape[1:], dtype=x.dtype)
        wide[1:-1] = x
        return wide[1:-1]
    if layout == "expanded" and x.dim() > 1:
        return x.select(0, 0).clone().expand(x.shape) if x.shape[0] else x
    return x


def _narrows(x: Tensor, n: int, dim: int, first: int = 0) -> list[Tensor]:
    width = (x.shape[dim] - 2 * first) // n
    return [x.narrow(dim, first + i * width, width) for i in range(n)]


def _slices(x: Tensor, n: int, dim: int) -> list[Tensor]:
    width = x.shape[dim] // n
    lead = (slice(None),) * dim
    return [x[(*lead, slice(i * width, (i + 1) * width if i < n - 1 else None))] for i in range(n)]


def _negative(x: Tensor, n: int, dim: int) -> list[Tensor]:
    """Slice with negative indices."""
    width, size = x.shape[dim] // n, x.shape[dim]
    lead = (slice(None),) * dim
    return [x[(*lead, slice(i * width - size, None if i == n - 1 else (i + 1) * width - size, 1))] for i in range(n)]


def _permuted(x: Tensor, n: int, dim: int) -> list[Tensor]:
    lanes = list(x.chunk(n, dim))
    return lanes[1::2] + lanes[::2]


def _nested(x: Tensor, n: int, dim: int) -> list[Tensor]:
    """Slice two slices of x."""
    width = x.shape[dim] // n
    first, second = x.narrow(dim, 0, n // 2 * width), x.narrow(dim, n // 2 * width, (n - n // 2) * width)
    return [*first.chunk(n // 2, dim), *second.chunk(n - n // 2, dim)]


def uneven_widths(n: int, width: int) -> list[int]:
    return [width + (i % 3) for i in range(n)]


WAYS: dict[str, Callable[[Tensor, int, int], list[Tensor]]] = {
    "split": lambda x, n, dim: list(x.split(x.shape[dim] // n, dim)),
    "split sizes": lambda x, n, dim: list(x.split([x.shape[dim] // n] * n, dim - x.dim())),
    "chunk": lambda x, n, dim: list(x.chunk(n, dim)),
    "tensor_split": lambda x, n, dim: list(x.tensor_split(n, dim)),
    "narrow": _narrows,
    "slices": _slices,
    "negative": _negative,
    "inner": lambda x, n, dim: _narrows(x, n, dim, first=1),
    "permuted": _permuted,
    "nested": _nested,
    "unbind": lambda x, n, dim: list(x.unbind(dim)),
    "select": lambda x, n, dim: [x.select(dim, i) for i in range(n)],
    "backwards": lambda x, n, dim: [x.select(dim, -1 - i) for i in range(n)],
    "uneven": lambda x, n, dim: list(x.split(uneven_widths(n, (x.shape[dim] - sum(uneven_widths(n, 0))) // n), dim)),
}
SQUEEZED = ("unbind", "select", "backwards")


@dataclass(frozen=True)
class Step:
    """A function of one lane, and its operators. Each of them must be found once in a group."""

    run: Callable[..., Tensor]
    operators: tuple[str, ...]
    rank: int = 0  # the fewest dimensions of a lane
    empty: bool = True  # whether it works without elements
    uneven: bool = False  # whether it works on lanes of different widths
    weights: int = 0  # how many vectors each lane has, as long as its last dimension


def _hand_rms(y: Tensor, weight: Tensor) -> Tensor:
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))


def _gated(y: Tensor) -> Tensor:
    """Multiply one half of each row by silu of the other half."""
    both = y.unsqueeze(-1).expand(*y.shape, 2).reshape(*y.shape[:-1], 2 * y.shape[-1]) * 3
    return F.silu(both[..., : y.shape[-1]]) * both[..., y.shape[-1] :]


STEPS: dict[str, Step] = {
    "tanh": Step(torch.tanh, ("tanh",), uneven=True),
    "silu": Step(F.silu, ("silu",), uneven=True),
    "gelu": Step(lambda y: F.gelu(y, approximate="tanh"), ("gelu",), uneven=True),
    "relu": Step(F.relu, ("relu",), uneven=True),
    "half": Step(lambda y: y * 0.5 + 1, ("mul", "add"), uneven=True),
    "twice": Step(lambda y: y * y, ("mul",), uneven=True),
    "clamp": Step(lambda y: torch.clamp(y, -1.0, 0.5), ("clamp",), uneven=True),
    "where": Step(lambda y: torch.where(y > 0, y, -y), ("gt", "neg", "where"), uneven=True),
    "softmax": Step(lambda y: y.softmax(-1), ("_softmax",), rank=1),
    "softmax first": Step(lambda y: y.softmax(0), ("_softmax",), rank=1),
    "log_softmax": Step(lambda y: y.log_softmax(-1), ("_log_softmax",), rank=1),
    "cumsum": Step(lambda y: y.cumsum(0), ("cumsum",), rank=1),
    "layer_norm": Step(lambda y: F.layer_norm(y, y.shape[-1:]), (NORM,), rank=1, empty=False),
    "layer_norm all": Step(lambda y: F.layer_norm(y, y.shape), (NORM,), rank=1, empty=False),
    "layer_norm weights": Step(lambda y, w, b: F.layer_norm(y, y.shape[-1:], w, b), (NORM,), rank=1, empty=False, weights=2),
    "layer_norm weight": Step(lambda y, w: F.layer_norm(y, y.shape[-1:], w), (NORM,), rank=1, empty=False, weights=1),
    "rms_norm": Step(lambda y: F.rms_norm(y, y.shape[-1:]), RMS, rank=1, empty=False),  # on a CPU it decomposes into operators
    "rms_norm weight": Step(lambda y, w: F.rms_norm(y, y.shape[-1:], w), (*RMS, "mul"), rank=1, empty=False, weights=1),
    "rms by hand": Step(_hand_rms, (*RMS, "mul"), rank=1, empty=False, weights=1),
    "own bias": Step(lambda y, b: y + b, ("add",), rank=1, weights=1),
    "less mean": Step(lambda y: y - y.mean(-1, keepdim=True), ("mean", "sub"), rank=1, empty=False),
    "less mean 0": Step(lambda y: y - y.mean(0), ("mean", "sub"), rank=1, empty=False),
    "by sum": Step(lambda y: y / (1 + y.pow(2).sum()), ("pow", "sum", "add", "div"), rank=1),
    "var": Step(lambda y: y * y.var(-1, keepdim=True, correction=0), ("var", "mul"), rank=1, empty=False),
    "amax": Step(lambda y: y - y.amax(0, keepdim=True), ("amax", "sub"), rank=1, empty=False),
    "logsumexp": Step(lambda y: y - y.logsumexp(-1, keepdim=True), ("logsumexp", "sub"), rank=1, empty=False),
    "turned": Step(lambda y: torch.tanh(y.transpose(0, -1)).transpose(0, -1), ("tanh",), rank=2),
    "flat": Step(lambda y: torch.tanh(y.reshape(-1)).view(y.shape), ("tanh",), rank=1),
    "pushed": Step(lambda y: torch.tanh(y.unsqueeze(-1)).squeeze(-1) + y, ("tanh", "add"), rank=1),
    "wide": Step(lambda y: torch.tanh(y.expand(2, *y.shape)).sum(0), ("tanh", "sum")),
    "gated": Step(_gated, ("mul", "silu", "mul"), rank=1),
    "single": Step(lambda y: y.float().double(), ("_to_copy", "_to_copy")),
}

LONE = (torch.sin, torch.cos, torch.atan, lambda x: x * 1.25, lambda x: x.flip(0) if x.dim() else x)


@dataclass(frozen=True)
class Planted:
    """One group: how its lanes are sliced from x, the steps of each lane, and how the lanes are combined."""

    way: str
    lanes: int
    sizes: tuple[int, ...]  # x's shape
    dim: int
    steps: tuple[str, ...]
    end: str  # cat, cat 0, stack, sum, return
    layout: str = ""
    lone: int = 0
    decoy: bool = False  # run the first step on an unrelated tensor too

    @property
    def found(self) -> Counter:
        return Counter((operator, self.lanes) for name in self.steps for operator in STEPS[name].operators)

    @property
    def lane_sizes(self) -> list[tuple[int, ...]]:
        x = torch.empty(self.sizes)
        return [tuple(lane.shape) for lane in WAYS[self.way](x, self.lanes, self.dim)]


class Program(nn.Module):
    """Planted groups one after another. Each has an input of its own, to which the previous group adds a scalar."""

    def __init__(self, groups: tuple[Planted, ...], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.groups = groups
        self.weights = nn.ParameterList()
        for group in groups:
            for name in group.steps:
                for sizes in group.lane_sizes:
                    for _ in range(STEPS[name].weights):
                        self.weights.append(nn.Parameter(torch.rand(sizes[-1], dtype=torch.float64).to(dtype) + 0.5))

    def inputs(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        found = []
        for group in self.groups:
            x = lay(torch.randn(group.sizes, dtype=torch.float64).to(dtype), group.layout)
            found.append(x.detach().requires_grad_())
            found.append(torch.randn(group.lane_sizes[0], dtype=torch.float64).to(dtype).requires_grad_())
        return found

    @property
    def found(self) -> Counter:
        return sum((group.found for group in self.groups), Counter())

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = []
        carry = inputs[0].sum()
        weights = iter(self.weights)
        for group, x, other in zip(self.groups, inputs[::2], inputs[1::2], strict=True):
            x = LONE[group.lone](x + carry * 0.01)
            lanes = WAYS[group.way](x, group.lanes, group.dim)
            if group.decoy:  # at the same depth of the graph as the group's lanes
                outputs.append(STEPS[group.steps[0]].run(LONE[group.lone](other + carry * 0.01)))
            for name in group.steps:
                step = STEPS[name]
                own = [[next(weights) for _ in range(step.weights)] for _ in lanes]
                lanes = [step.run(y, *w) for y, w in zip(lanes, own, strict=True)]
            ends = self._ended(group, lanes)
            outputs.extend(ends)
            carry = sum(end.sum() * (i + 1) for i, end in enumerate(ends[:1]))
        return outputs

    def _ended(self, group: Planted, lanes: list[Tensor]) -> list[Tensor]:
        if group.end == "return":
            return lanes
        if group.end == "sum":
            return [functools.reduce(torch.add, lanes)]
        if group.end == "stack":
            return [torch.stack(lanes, -1)]
        if not lanes[0].dim():
            return [torch.stack(lanes)]
        dim = min(group.dim, lanes[0].dim() - 1)
        return [torch.cat(lanes, dim if group.end == "cat" else 0)]
