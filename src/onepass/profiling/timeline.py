"""The bars of a picture, the step and the operator that each event belongs to, and short names."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from onepass.profiling import costs
from onepass.profiling.trace import Trace, TraceEvent

_FUNCTOR = re.compile(r"\b(\w*(?:[Ff]unctor|KernelImpl|_kernel_impl|_kernel_cuda)\w*|\w+Ops)\b")
_INNERMOST = re.compile(r"<[^<>]*>")
_NAMELESS = ("Kernel", "Kernel2", "device_kernel")


@dataclass(frozen=True)
class PictureBar:
    """One bar of the timeline: an operator, a kernel, a launch or a copy."""

    lane: str
    name: str
    start: float
    end: float
    kind: str  # "operator" | "launch" | "product" | "kernel" | "copy"
    step: int


class StepTimeline:
    """Map an event to its step, by its time on the CPU. After a step's end, that step; a kernel goes by its launch."""

    def __init__(self, trace: Trace) -> None:
        self._starts = sorted(event.start for event in trace.steps)
        self._ends = sorted(event.end for event in trace.steps)

    def inside(self, event: TraceEvent) -> bool:
        """Whether the event is inside a step. Between steps record.py itself waits for the GPU."""
        return not self._starts or event.start < self._ends[self(event)]

    def __call__(self, event: TraceEvent) -> int:
        return max(bisect.bisect_right(self._starts, event.queued) - 1, 0)


def unit(event: TraceEvent | None) -> TraceEvent | None:
    """Return the operator that an event belongs to: the outermost one of known cost, or else the innermost."""
    if event is None:
        return None
    operators = [around for around in event.parents() if around.is_operator]
    known = [operator for operator in operators if costs.is_known(operator.name)]
    return known[-1] if known else operators[0] if operators else None


def bars(trace: Trace, step_of: StepTimeline) -> Iterable[PictureBar]:
    lanes = dict.fromkeys(event.lane for event in [*trace.ops, *trace.runtime])
    threads = {lane: f"CPU thread {i}" for i, lane in enumerate(lanes, 1)}
    products = set() if trace.gpu else {id(_outermost(op)) for op in trace.ops if _is_product(op)}
    for op in trace.ops:
        if op.is_operator and _outermost(op) is op:
            yield PictureBar(
                threads[op.lane], op.name, op.start, op.end, "product" if id(op) in products else "operator", step_of(op)
            )
    for event in trace.runtime:
        if event.is_launch:
            yield PictureBar(f"{threads[event.lane]} launches", event.name, event.start, event.end, "launch", step_of(event))
    for event in trace.gpu:
        operator = None if event.parent is None else unit(event.parent)
        kind = "copy" if event.is_copy else "product" if operator is not None and _is_product(operator) else "kernel"
        yield PictureBar(
            f"GPU {event.lane[0]} stream {event.lane[1]}", short_name(event.name), event.start, event.end, kind, step_of(event)
        )


def _is_product(op: TraceEvent) -> bool:
    return costs.is_known(op.name) and costs.cost(op.name, op.inputs()).flops is not None


def _outermost(op: TraceEvent) -> TraceEvent:
    return [around for around in op.parents() if around.is_operator][-1]


# ---- names ----


@lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """Shorten a kernel's name: drop template arguments and the namespaces of PyTorch. Keep an operator's name."""
    if name.startswith("autograd::engine::evaluate_function: "):
        return "autograd engine"
    if not name.startswith("void ") and "<" not in name:
        return name
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    inside = name.partition("<")[2]
    functors = [functor for functor in _FUNCTOR.findall(inside) if not functor.startswith("gpu_kernel")]
    plain = name.replace("->", "")
    while (outer := _INNERMOST.sub("", plain)) != plain:
        plain = outer
    plain = plain.partition("(")[0].rpartition("::")[2].strip()
    if plain in _NAMELESS:  # CUTLASS: the kernel's name is a template argument
        return re.split(r"[<>,( ]", inside)[0].rpartition("::")[2] or plain
    return f"{plain}<{functors[0]}>" if functors else plain
