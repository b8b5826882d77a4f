"""Parse torch.profiler's Chrome trace into events, with each operator's inputs and parents and the launch of each kernel.

This module runs nothing on the device, so it reads traces of any machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from onepass.runtime.formula import FORMULA_RANGE

WINDOW = "onepass: profiled"  # record_function ranges of record.py: the part of the trace to read, and each step in it
STEP = "onepass: step"
_OPTIMIZER = "Optimizer.step#"  # every torch.optim.Optimizer's, before its class

_KINDS = {
    "cpu_op": "op",
    "user_annotation": "mark",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "kernel": "gpu",
    "gpu_memcpy": "gpu",
    "gpu_memset": "gpu",
}
_LAUNCH = re.compile(r"cuda(Graph)?Launch|cuLaunch|cuGraphLaunch")
_WAIT = re.compile(r"Synchronize$")
# Ranges that a trace records as operators. Their time belongs to the operators inside.
_WRAPPER = re.compile(r"^(autograd::engine::|torch::autograd::|Torch-Compiled Region)")


@dataclass(frozen=True)
class TraceInput:
    """An operator's argument: a tensor if shape and dtype are set, else the text of a number or a list."""

    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    strides: tuple[int, ...] | None = None
    value: str = ""


@dataclass(eq=False)
class TraceEvent:
    """An event. Times are in microseconds of the trace's clock. `lane` is process and thread, or device and stream."""

    kind: str
    name: str
    start: float
    end: float
    lane: tuple[Any, Any]
    args: dict[str, Any] = field(default_factory=dict, repr=False)
    parent: TraceEvent | None = field(default=None, repr=False)
    inner: float = 0.0  # the time of its direct children

    @property
    def us(self) -> float:
        return self.end - self.start

    @property
    def queued(self) -> float:
        """When a kernel was launched, where that is known. When anything else began."""
        return self.parent.start if self.kind == "gpu" and self.parent is not None else self.start

    @property
    def is_launch(self) -> bool:
        return self.kind == "runtime" and _LAUNCH.match(self.name) is not None

    @property
    def is_graph(self) -> bool:
        return self.is_launch and "Graph" in self.name

    @property
    def is_wait(self) -> bool:
        return self.kind == "runtime" and _WAIT.search(self.name) is not None

    @property
    def is_operator(self) -> bool:
        """False for ranges that only contain operators: autograd's nodes, compiled regions, a user's record_function."""
        return self.kind == "op" and "::" in self.name and not _WRAPPER.match(self.name)

    @property
    def is_copy(self) -> bool:
        return self.kind == "gpu" and self.name.startswith(("Memcpy", "Memset"))

    def parents(self) -> Iterable[TraceEvent]:
        """Yield the event itself, then its parents outwards."""
        event: TraceEvent | None = self
        while event is not None:
            yield event
            event = event.parent

    def inputs(self) -> tuple[TraceInput, ...]:
        names = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
        dims, types, strides, values = (self.args.get(name) or [] for name in names)
        inputs = []
        for i, kind in enumerate(types):
            shape = dims[i] if i < len(dims) else []
            value = str(values[i]) if i < len(values) else ""
            if kind in ("", "Scalar", "ScalarList", "TensorList", "GenericList"):
                inputs.append(TraceInput(None, None, None, value))
            else:
                steps = tuple(strides[i]) if i < len(strides) and len(strides[i]) == len(shape) else None
                inputs.append(TraceInput(tuple(shape), kind, steps, value))
        return tuple(inputs)


@dataclass(frozen=True)
class Trace:
    """The events inside the windows, in order of time."""

    ops: list[TraceEvent]
    runtime: list[TraceEvent]  # calls of the CUDA runtime and driver
    gpu: list[TraceEvent]  # kernels, copies and fills
    windows: list[TraceEvent]
    steps: list[TraceEvent]
    trains: bool  # an optimizer stepped
    allocations: list[tuple[float, int]]  # on the CPU: time and bytes, negative for a free


def read(data: dict[str, Any]) -> Trace:
    """Return the events inside the WINDOW marks. Without marks: from the first kernel's launch, or first operator, to the end."""
    events, memory = _events(data.get("traceEvents", []))
    marks = [event for event in events if event.kind == "mark"]
    ops = [event for event in events if event.kind == "op"]
    runtime = [event for event in events if event.kind == "runtime"]
    gpu = [event for event in events if event.kind == "gpu"]
    _nest([*ops, *runtime])
    launched = {event.args.get("correlation"): event for event in runtime if event.args.get("correlation")}
    for event in gpu:
        event.parent = launched.get(event.args.get("correlation"))
    windows = [event for event in marks if event.name == WINDOW] or _whole(ops, gpu)

    def within(event: TraceEvent) -> bool:  # a kernel counts by its launch, as it may run after the window
        return any(window.start <= event.queued <= window.end for window in windows)

    return Trace(
        [event for event in ops if within(event)],
        [event for event in runtime if within(event)],
        [event for event in gpu if within(event)],
        windows,
        [event for event in marks if event.name == STEP],
        any(event.name.startswith(_OPTIMIZER) for event in marks if within(event)),
        [(at, size) for at, size in memory if any(window.start <= at <= window.end for window in windows)],
    )


def _events(raw: list[dict[str, Any]]) -> tuple[list[TraceEvent], list[tuple[float, int]]]:
    events, memory = [], []
    for item in raw:
        if item.get("name") == "[memory]" and item.get("args", {}).get("Device Type") == 0:
            memory.append((float(item["ts"]), int(item["args"]["Bytes"])))
        kind = _KINDS.get(str(item.get("cat", "")).lower())
        if kind is None or item.get("ph") != "X":
            continue
        if item["name"] == FORMULA_RANGE:  # nests as operators do
            kind = "op"
        args = item.get("args", {})
        lane = (item.get("pid"), item.get("tid"))
        if kind == "gpu":
            lane = (args.get("device", lane[0]), args.get("stream", lane[1]))
        start = float(item["ts"])
        events.append(TraceEvent(kind, item["name"], start, start + float(item.get("dur") or 0), lane, args))
    events.sort(key=lambda event: (event.start, -event.end))
    return events, sorted(memory)


def _nest(events: list[TraceEvent]) -> None:
    """Set each event's parent: the innermost event of its thread that is still running when it begins."""
    open_in: dict[tuple[Any, Any], list[TraceEvent]] = {}
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        stack = open_in.setdefault(event.lane, [])
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if stack:
            event.parent = stack[-1]
            stack[-1].inner += event.us
        stack.append(event)


def _whole(ops: list[TraceEvent], gpu: list[TraceEvent]) -> list[TraceEvent]:
    if gpu:
        return [TraceEvent("mark", WINDOW, min(event.queued for event in gpu), max(event.end for event in gpu), (0, 0))]
    if ops:
        return [TraceEvent("mark", WINDOW, ops[0].start, max(event.end for event in ops), (0, 0))]
    return []


# ---- intervals ----

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals, sorted."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return math.fsum(end - start for start, end in intervals)


def waits(events: Iterable[TraceEvent]) -> list[tuple[TraceEvent, TraceEvent, float]]:
    """Return the gaps between the first and the last event: the event before, the event after, and the gap's length."""
    gaps = []
    last: TraceEvent | None = None
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        if last is not None and event.start > last.end:
            gaps.append((last, event, event.start - last.end))
        if last is None or event.end > last.end:
            last = event
    return gaps
