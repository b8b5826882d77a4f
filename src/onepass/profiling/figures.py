"""Compute the figures of the recorded steps from a trace's events. This module runs nothing on the device."""

from __future__ import annotations

import bisect
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from onepass.profiling import costs
from onepass.profiling.limits import Limits
from onepass.profiling.timeline import PictureBar, StepTimeline, bars, short_name, unit
from onepass.profiling.trace import Trace, TraceEvent, TraceInput, length, union, waits

SHORT_GAP_US = 1000.0  # a launch doesn't explain longer gaps: the CPU does something else, or waits itself
_LEAST_GAP_US = 1.0  # kernels that are already queued follow each other at about this distance
_COPIED_TWICE = "Memcpy DtoD"  # read from and written to the same memory


@dataclass(frozen=True)
class OperatorRow:
    """All calls of one operator, or of one kernel that no operator launched, per step."""

    name: str
    calls: float
    us: float  # on a GPU the time of its kernels; on a CPU its own time, without inner operators that have their own rows
    share: float  # of the time of all rows
    kernels: dict[str, float] = field(default_factory=dict)  # name -> launches, on a GPU
    bytes: float | None = None  # None: unknown
    flops: float | None = None
    gbs: float | None = None
    tflops: float | None = None
    of_copy: float | None = None  # gbs as a fraction of the copy bandwidth
    of_peak: float | None = None  # tflops as a fraction of the rate of a large matrix product of that dtype

    @property
    def near(self) -> str | None:
        """The ceiling of which this row reaches at least NEAR, if any: bandwidth or compute."""
        nearest = max(self.of_copy or 0.0, self.of_peak or 0.0)
        if nearest < NEAR:
            return None
        return "bandwidth" if nearest == self.of_copy else "compute"


NEAR = 0.5


@dataclass(frozen=True)
class Gap:
    """All gaps between one pair of kernels or operators: the pair, their count and total time per step, and the longest."""

    before: str
    after: str
    count: float
    us: float
    longest_us: float


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator, with its kernels' time or on a CPU its own; or one kernel that no operator launched."""

    name: str
    start: float  # when the operator begins on the CPU; sorts calls in program order
    us: float
    step: int
    kernels: tuple[str, ...] = ()
    inputs: tuple[TraceInput, ...] = ()
    within: tuple[str, ...] = ()  # the names of its parents, outwards
    cost: costs.Cost = field(default_factory=costs.Cost)
    operator: bool = False  # False for a range, and for a kernel without an operator
    works: bool = True  # False if it only calls other operators
    by_copy: bool = True  # whether the copy bandwidth is its ceiling; False for copies between host and device

    @property
    def key(self) -> tuple[object, ...]:
        """The operator, shapes and dtypes. Calls with equal keys are the same work."""
        return (self.name, tuple((tensor.shape, tensor.dtype) for tensor in self.inputs))


@dataclass(frozen=True)
class Figures:
    """The figures of all recorded steps together; Profile has them per step."""

    on_gpu: bool
    steps: int
    trains: bool
    traced_us: float
    busy_us: float
    gaps: tuple[Gap, ...]
    gap_count: int
    gap_us: float
    short_gap_us: float
    kernels: int
    launches: int
    launch_us: float
    graphs: int
    waits: int
    peak_bytes: int | None
    calls: tuple[OperatorCall, ...]
    bars: tuple[PictureBar, ...]

    @property
    def same_steps(self) -> bool:
        by_step: dict[int, list[object]] = defaultdict(list)
        for call in self.calls:
            by_step[call.step].append(call.key)
        return len(by_step) > 1 and all(keys == by_step[min(by_step)] for keys in by_step.values())


def figures(trace: Trace) -> Figures:
    on_gpu = bool(trace.gpu)
    step_of = StepTimeline(trace)
    calls = _gpu_calls(trace, step_of) if on_gpu else _cpu_calls(trace, step_of)
    working = _busiest_device(trace.gpu) if on_gpu else [op for op in trace.ops if op.parent is None]
    gaps = [wait for window in _by_window(trace, working) for wait in waits(window)]
    long_enough = [(a, b, us) for a, b, us in gaps if us >= _LEAST_GAP_US]
    launches = [event for event in trace.runtime if event.is_launch and not _within_a_launch(event)] if on_gpu else []
    dispatched = [call.us for call in calls if call.operator]
    one = [event.us for event in launches] if on_gpu else dispatched
    return Figures(
        on_gpu,
        max(len(trace.steps), 1),
        trace.trains,
        _traced(trace),
        length(union((event.start, event.end) for event in working)),
        _gaps(long_enough),
        len(long_enough),
        sum(us for _, _, us in long_enough),
        sum(us for _, _, us in long_enough if us <= SHORT_GAP_US),
        len([event for event in trace.gpu if not event.is_copy]),
        len(one),
        (statistics.mean(one) if on_gpu else statistics.median(one)) if one else 0.0,
        len([event for event in launches if event.is_graph]),
        len([event for event in trace.runtime if event.is_wait and step_of.inside(event)]),
        _peak(trace.allocations),
        tuple(calls),
        tuple(bars(trace, step_of)),
    )


def _within_a_launch(event: TraceEvent) -> bool:
    """Whether this is the driver's call inside a CUDA runtime launch, which would count twice."""
    return event.parent is not None and event.parent.is_launch


def _traced(trace: Trace) -> float:
    """Return the length of the windows, plus the time until their last kernel ends."""
    last_kernel = max((event.end for event in trace.gpu), default=0.0)
    last_window = max((window.end for window in trace.windows), default=0.0)
    return length((window.start, window.end) for window in trace.windows) + max(last_kernel - last_window, 0.0)


def _busiest_device(gpu: list[TraceEvent]) -> list[TraceEvent]:
    """Return the events of the GPU with the most work. Idle time of several GPUs together would mean nothing."""
    by_device: dict[object, list[TraceEvent]] = defaultdict(list)
    for event in gpu:
        by_device[event.lane[0]].append(event)
    return max(by_device.values(), key=lambda events: sum(event.us for event in events))


def _by_window(trace: Trace, events: list[TraceEvent]) -> list[list[TraceEvent]]:
    starts = sorted(window.start for window in trace.windows)
    windows: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in events:
        windows[bisect.bisect_right(starts, event.queued)].append(event)
    return list(windows.values())


def _peak(allocations: Sequence[tuple[float, int]]) -> int | None:
    now = most = 0
    for _, size in allocations:
        now += size
        most = max(most, now)
    return most if allocations else None


# ---- calls: operators and their kernels ----


def _gpu_calls(trace: Trace, step_of: StepTimeline) -> list[OperatorCall]:
    by_operator: dict[int, tuple[TraceEvent, list[TraceEvent]]] = {}
    calls = []
    for event in trace.gpu:
        launch = event.parent
        graphed = launch is not None and launch.is_graph
        operator = None if launch is None or graphed or event.is_copy else unit(launch)
        if operator is None:
            calls.append(_alone(event, step_of))
        else:
            by_operator.setdefault(id(operator), (operator, []))[1].append(event)
    for operator, kernels in by_operator.values():
        # Kernels of one operator may run at the same time.
        us = length(union((kernel.start, kernel.end) for kernel in kernels))
        calls.append(_called(operator, us, step_of, tuple(kernel.name for kernel in kernels)))
    return sorted(calls, key=lambda call: call.start)


def _alone(event: TraceEvent, step_of: StepTimeline) -> OperatorCall:
    moved = event.args.get("bytes") if event.is_copy else None
    twice = 2 if event.name.startswith(_COPIED_TWICE) else 1
    cost = costs.Cost(None if moved is None else int(moved) * twice)
    on_device = event.name.startswith("Memset") or twice == 2
    within = tuple(around.name for around in event.parents()) if event.parent is not None else ()
    return OperatorCall(event.name, event.queued, event.us, step_of(event), (event.name,), (), within, cost, by_copy=on_device)


def _called(operator: TraceEvent, us: float, step_of: StepTimeline, kernels: tuple[str, ...] = ()) -> OperatorCall:
    inputs = operator.inputs()
    within = tuple(around.name for around in operator.parents())[1:]
    cost = costs.cost(operator.name, inputs)
    works = bool(kernels) or not operator.inner or costs.is_known(operator.name)
    return OperatorCall(
        operator.name, operator.start, us, step_of(operator), kernels, inputs, within, cost, operator=True, works=works
    )


def _cpu_calls(trace: Trace, step_of: StepTimeline) -> list[OperatorCall]:
    """Return each operator with its own time. An operator of known cost includes the time of those that it calls."""
    calls = []
    for op in trace.ops:
        owner = unit(op) if op.is_operator else None
        if owner is op:
            calls.append(_called(op, op.us if costs.is_known(op.name) else op.us - op.inner, step_of))
        elif owner is None:  # a range, such as an autograd node: its time outside operators
            calls.append(OperatorCall(op.name, op.start, op.us - op.inner, step_of(op), works=False))
    return calls


# ---- rows ----


def rows(calls: Iterable[OperatorCall], steps: int, limits: Limits) -> list[OperatorRow]:
    by_name: dict[str, list[OperatorCall]] = defaultdict(list)
    for call in calls:
        by_name[short_name(call.name)].append(call)
    whole = sum(call.us for group in by_name.values() for call in group)
    table = [_row(name, group, steps, limits, whole) for name, group in by_name.items()]
    return sorted(table, key=lambda row: -row.us)


def _row(name: str, calls: list[OperatorCall], steps: int, limits: Limits, whole: float) -> OperatorRow:
    us = sum(call.us for call in calls)
    moved = costs.total([call.cost.bytes for call in calls])
    flops = costs.total([call.cost.flops for call in calls])
    gbs = moved / us / 1e3 if moved and us else None
    tflops = flops / us / 1e6 if flops and us else None
    to_copy = limits.copy_gbs if all(call.by_copy for call in calls) else None
    kernels = Counter(short_name(kernel) for call in calls for kernel in call.kernels)
    return OperatorRow(
        name=name,
        calls=len(calls) / steps,
        us=us / steps,
        share=us / whole if whole else 0.0,
        kernels={kernel: count / steps for kernel, count in kernels.most_common()},
        bytes=None if moved is None else moved / steps,
        flops=None if flops is None else flops / steps,
        gbs=gbs,
        tflops=tflops,
        of_copy=gbs / to_copy if gbs and to_copy else None,
        of_peak=_of_peak(calls, us, limits),
    )


def _of_peak(calls: list[OperatorCall], us: float, limits: Limits) -> float | None:
    """Return the time that the products would take at their dtypes' peak, as a fraction of the time that they took."""
    at_peak = 0.0
    for call in calls:
        peak = limits.tflops.get(call.cost.dtype or "")
        if call.cost.flops is None or peak is None:
            return None
        at_peak += call.cost.flops / peak / 1e6
    return at_peak / us if us else None


def _gaps(all_gaps: list[tuple[TraceEvent, TraceEvent, float]]) -> tuple[Gap, ...]:
    """Group the gaps by the pair of names around them, the largest sum first. Sums are over all steps."""
    between: dict[tuple[str, str], list[float]] = defaultdict(list)
    for before, after, us in all_gaps:
        between[short_name(before.name), short_name(after.name)].append(us)
    gaps = [Gap(before, after, len(all_us), sum(all_us), max(all_us)) for (before, after), all_us in between.items()]
    return tuple(sorted(gaps, key=lambda gap: -gap.us))
