"""Measure contenders: check each one's results, then time those that are right, side by side.

Repetitions are split into rounds, with a plain copy as one contender. Each round begins with another contender, so that a machine
that warms up or slows down affects all of them. Figures are medians over all rounds, CPU times are minima. What is timed:
forward     the call, with an autograd graph, as in training
backward    the gradients of all inputs that require one; each run has a forward of its own, which is not timed
CPU time    back-to-back calls on a tiny input, without synchronization; not of passes that have no backward, which ops launch.
            Quick runs on a GPU take a few calls of the case itself: a tiny input's kernels would be compiled for that alone
graph       small cases on a GPU, after the rounds: calls captured in a CUDA graph, so that the GPU never waits for a launch
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench import accuracy
from onepass.bench.define import OpBench
from onepass.bench.model import (
    BenchCase,
    Call,
    CaseResult,
    Contender,
    CpuTime,
    CpuTimes,
    Inputs,
    Measured,
    Result,
    differentiate,
    outputs_of,
)
from onepass.bench.peers import PACKAGES, forget_compiled
from onepass.runtime.ceilings import Ceilings, Clock, copy_step
from onepass.runtime.cuda_graph import capture, side_stream

ROUNDS, ROUNDS_QUICK = 5, 2
CPU_ROUNDS, CPU_ROUNDS_QUICK = 15, 2  # the minimum is reported: other work of the CPU only adds to a call's time
_FIRST_STEPS = 3  # in eight bits: scales are measured, then they come from a history, and then the host knows of it
_FEW_CALLS = 3  # of a case whose work is not tiny: the GPU must not keep the CPU waiting
_GRAPH_BYTES = 32 << 20  # a backward that moves fewer bytes may be shorter than its launches, so it is timed in a graph
T = TypeVar("T")
Tick = Callable[[str], None]


class DeviceLost(RuntimeError):
    """Raised when a contender leaves the device unusable: nothing after it can be measured."""


@dataclass
class BenchPlan:
    """The cases and the contenders of one op's run."""

    bench: OpBench
    cases: list[BenchCase]
    keep: Callable[[Contender], bool]
    quick: bool = False
    peers: Container[str] = frozenset(PACKAGES)  # the installed packages

    @property
    def rounds(self) -> int:
        return ROUNDS_QUICK if self.quick else ROUNDS

    @property
    def cpu_rounds(self) -> int:
        return CPU_ROUNDS_QUICK if self.quick else CPU_ROUNDS

    def has_tiny(self, device: torch.device) -> bool:
        """Whether calls on a tiny input are timed, for each variant's CPU time."""
        return not self.quick or device.type != "cuda"

    def contenders(self, case: BenchCase) -> list[Contender]:
        return [contender for contender in self._wanted(case) if self._lacks(contender) is None]

    def left_out(self, case: BenchCase) -> dict[str, str]:
        """Return why contenders that the request names, or all peers, have no row."""
        return {contender.name: why for contender in self._wanted(case) if (why := self._lacks(contender)) is not None}

    def _wanted(self, case: BenchCase) -> list[Contender]:
        return [contender for contender in self.bench.contenders(case) if self.keep(contender)]

    def _lacks(self, contender: Contender) -> str | None:
        if contender.package is not None and contender.package not in self.peers:
            return "not installed"
        return contender.lacks

    def variants(self) -> Iterator[list[BenchCase]]:
        """Yield consecutive cases that have the same variant and dtype."""
        for _, cases in groupby(self.cases, key=lambda case: (case.variant, case.dtype)):
            yield list(cases)

    def steps(self, device: torch.device) -> int:
        """Return how often `measure` calls tick."""
        timed = [cases[0] for cases in self.variants() if cases[0].backward_bytes]
        steps = sum(len(self.contenders(case)) + self.rounds for case in self.cases) + self.cpu_rounds * len(timed)
        return steps + sum(len(self.contenders(self.bench.tiny(case))) for case in timed if self.has_tiny(device))


class Session(NamedTuple):
    """One op's run: what each of its steps takes."""

    plan: BenchPlan
    clock: Clock
    ceilings: Ceilings
    tick: Tick
    seeds: torch.Generator

    def inputs(self, case: BenchCase) -> Inputs:
        return self.plan.bench.inputs(case, self.clock.device, self.seeds)


def measure(plan: BenchPlan, clock: Clock, ceilings: Ceilings, tick: Tick) -> Iterator[CpuTimes | CaseResult]:
    """Measure one op. Yield each variant's CPU times, then its cases, as each is done."""
    session = Session(plan, clock, ceilings, tick, torch.Generator(device=clock.device))
    for cases in plan.variants():
        tiny = cases[0].backward_bytes and plan.has_tiny(clock.device)
        cpu = _cpu_times(session, plan.bench.tiny(cases[0])) if tiny else None
        if cpu is not None:
            yield cpu
        for case in cases:
            result = _measure_case(session, case)
            if cpu is not None:
                _add_cpu_times(result, cpu)
            yield result


# ---- one case ----


@dataclass
class _Lane:
    """One contender in the rounds, or the copy."""

    name: str
    forward: Callable[..., object]  # called with the clock's argument or with none
    backward: Callable[[Any], object]
    before_backward: Callable[[], Any]
    both: Callable[[], object]
    train: Callable[[], object]  # forward and backward by .backward(), as in a training step
    forward_ms: list[float]
    backward_ms: list[float]


def _measure_case(session: Session, case: BenchCase) -> CaseResult:
    forget_compiled()
    checked = [_check(session, contender, case) for contender in session.plan.contenders(case)]
    with session.plan.bench.around(case):
        return _time_case(session, case, checked)


def _time_case(session: Session, case: BenchCase, checked: list[tuple[Measured, Call | None]]) -> CaseResult:
    plan, clock = session.plan, session.clock
    rows = [row for row, _ in checked]
    right = [(row, call) for row, call in checked if call is not None]
    inputs = session.inputs(case)
    for row, call in right:
        row.peak_mib, row.kept_mib = memory_mib(call, inputs, clock.device)
    lanes = [_copy_lane(case, clock.device), *(_lane(row.contender, call, inputs) for row, call in right)]
    budget = 10.0 if clock.device.type == "cuda" else 30.0 if plan.quick else 150.0
    for turn in range(plan.rounds):
        session.tick(f"{case.name}: timing, round {turn + 1} of {plan.rounds}")
        for lane in _rotated(lanes, turn):
            _take_first_steps(lane, case, clock)
            lane.forward_ms += clock.times(lane.forward, budget_ms=budget)
            if case.backward_bytes:
                lane.backward_ms += clock.times(lane.backward, lane.before_backward, budget_ms=budget)
    by_name = {row.contender: row for row in rows}
    copy = by_name["copy"] = Measured("copy")
    for lane in lanes:
        row = by_name[lane.name]
        row.forward_ms = statistics.median(lane.forward_ms)
        row.forward_of_copy = case.forward_bytes / row.forward_ms / 1e6 / session.ceilings.copy_gbs
        if lane.backward_ms:
            row.backward_ms = statistics.median(lane.backward_ms)
            row.backward_of_copy = case.backward_bytes / row.backward_ms / 1e6 / session.ceilings.copy_gbs
    if clock.device.type == "cuda" and 0 < case.backward_bytes < _GRAPH_BYTES:
        for row, call in right:  # new leaves for each: autograd has bound those of the rounds to another stream
            _replay(row, _lane(row.contender, call, session.inputs(case)), clock)
    reference = plan.bench.reference_of(case)
    _set_against(by_name.get(reference or ""), rows, case)
    result = CaseResult(case, copy, rows, reference, plan.left_out(case))
    if case.backward_bytes and not plan.has_tiny(clock.device):
        times = _timed_calls(lanes[1:], clock, plan.cpu_rounds, session.tick, case.name, _FEW_CALLS)
        _add_cpu_times(result, CpuTimes(case, times))
    return result


def _replay(row: Measured, lane: _Lane, clock: Clock) -> None:
    """Time replays of forward, and of both; backward is their difference.

    Backward can't be repeated by itself: compiled code may overwrite the tensors that it saved.
    """
    try:
        both = replay_us(lane.both, clock)  # first: a step in eight bits that is captured ends with no update of its own
        row.forward_graph_us = replay_us(lane.forward, clock)
        row.backward_graph_us = both - row.forward_graph_us
    except Exception:  # some contenders can't be captured: they get no graph time
        _still_there(clock, row)


def _set_against(reference: Measured | None, rows: list[Measured], case: BenchCase) -> None:
    """Compare forward and backward with the reference's; forward alone where the case has no backward."""
    whole = _whole_ms(reference, case) if reference else None
    for row in rows:
        both = _whole_ms(row, case)
        row.both_of_reference = both / whole if both and whole else None


def _whole_ms(row: Measured, case: BenchCase) -> float | None:
    return row.both_ms if case.backward_bytes else row.forward_ms


def _lane(name: str, call: Call, inputs: Inputs) -> _Lane:
    tensors, asked, grads = list(inputs.tensors.values()), list(inputs.asked.values()), inputs.fresh_grads()

    def forward(_: Any = None) -> Result:
        return call(*tensors)

    def before_backward() -> tuple[Result, list[Tensor]]:
        return call(*tensors), inputs.fresh_grads()

    def backward(given: tuple[Result, list[Tensor]]) -> tuple[Tensor, ...]:
        results, incoming = given
        return differentiate(results, asked, incoming, inputs.trained)

    def both() -> tuple[Tensor, ...]:
        return differentiate(call(*tensors), asked, grads, inputs.trained)

    def train() -> tuple[Tensor, ...]:
        return differentiate(call(*tensors), asked, grads, True)

    return _Lane(name, forward, backward, before_backward, both, train, [], [])


def _take_first_steps(lane: _Lane, case: BenchCase, clock: Clock) -> None:
    """Let delayed scales come from a history, as in most of a run's steps. Lanes share weights, and each recipe starts anew."""
    if case.fp8 and case.backward_bytes:
        for _ in range(_FIRST_STEPS):
            lane.both()
            clock.synchronize()


def _copy_lane(case: BenchCase, device: torch.device) -> _Lane:
    forward, backward = copy_step(device, case.forward_bytes), copy_step(device, case.backward_bytes)
    return _Lane("copy", forward, backward, lambda: None, lambda: None, lambda: None, [], [])


def _rotated(items: Sequence[T], turn: int) -> list[T]:
    turn %= max(len(items), 1)
    return [*items[turn:], *items[:turn]]


# ---- accuracy ----


def _check(session: Session, contender: Contender, case: BenchCase) -> tuple[Measured, Call | None]:
    """Return the contender's row and its call. The call is None if the contender is wrong or raised: it is not timed then."""
    bench, clock, seeds = session.plan.bench, session.clock, session.seeds
    session.tick(f"{case.name}: {contender.name}, {'compiling and ' if contender.compiles else ''}checking")
    row = Measured(contender.name, ours=contender.ours, floor=contender.floor)
    call: Call | None = None
    seeds.manual_seed(seeds.initial_seed() + 1)  # new inputs for every check
    try:
        inputs = session.inputs(case)
        with warnings.catch_warnings():
            if not contender.ours:  # hide warnings from peers' code
                warnings.simplefilter("ignore")
            call = contender.make(case)
            with bench.around(case):  # not the formula, whose operators may not support this mode
                if case.fp8:
                    accuracy.outputs(call, inputs)  # delayed scales come from the step before
                got = accuracy.outputs(call, inputs)
        clock.synchronize()
        if not contender.floor:
            row.errors, row.allowed = accuracy.judged(bench, case, inputs, got, contender.ours)
    except Exception as error:  # a peer's error is a line in the table
        call, row.status, row.message = None, "error", f"{type(error).__name__}: {_first_line(error)}"
    if row.status == "error":
        _still_there(clock, row)
    elif wrong := accuracy.too_far(row.errors, row.allowed):
        call, row.status = None, "wrong"
        row.message = "; ".join(f"{name} is {row.errors[name]:.2g} off, {row.allowed[name]:.2g} is allowed" for name in wrong)
    if clock.device.type == "cuda":
        torch.cuda.empty_cache()
    return row, call


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else ""


def _still_there(clock: Clock, row: Measured) -> None:
    try:
        clock.synchronize()
    except RuntimeError as error:
        raise DeviceLost(f"{row.contender} left {clock.device} unusable: {row.message}") from error


# ---- CPU time ----


def _cpu_times(session: Session, tiny: BenchCase) -> CpuTimes:
    forget_compiled()
    checked = [_check(session, contender, tiny) for contender in session.plan.contenders(tiny)]
    inputs = session.inputs(tiny)
    lanes = [_lane(row.contender, call, inputs) for row, call in checked if call is not None]
    with session.plan.bench.around(tiny):
        return CpuTimes(tiny, _timed_calls(lanes, session.clock, session.plan.cpu_rounds, session.tick, tiny.variant))


def _timed_calls(
    lanes: list[_Lane], clock: Clock, rounds: int, tick: Tick, title: str, calls: int | None = None
) -> list[CpuTime]:  # fmt: skip
    forward: dict[str, list[float]] = {lane.name: [] for lane in lanes}
    both: dict[str, list[float]] = {lane.name: [] for lane in lanes}
    calls = calls or (100 if clock.device.type == "cuda" else 20)
    for turn in range(rounds):
        tick(f"{title}: CPU time of a call, round {turn + 1} of {rounds}")
        for lane in _rotated(lanes, turn):
            forward[lane.name].append(clock.host_us(lane.forward, calls))
            both[lane.name].append(clock.host_us(lane.train, calls))
    return [CpuTime(lane.name, min(forward[lane.name]), min(both[lane.name])) for lane in lanes]


def cpu_speed(clock: Clock, dtype: torch.dtype) -> list[CpuTime]:
    """Return the CPU times of PyTorch calls, which show how fast this CPU is: others' are judged by their ratio to these."""
    lanes = [_lane(name, call, given) for name, (call, given) in _pytorch_calls(clock.device, dtype).items()]
    return _timed_calls(lanes, clock, CPU_ROUNDS_QUICK, lambda text: None, "PyTorch")


def _pytorch_calls(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[Call, Inputs]]:
    x, dy = (torch.randn(64, 1024, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(1024, device=device, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    by_row = frozenset({"x"})
    norm = Inputs({"x": x, "weight": weight.requires_grad_()}, by_row, {"y": dy})
    gelu = Inputs({"x": x, "bias": bias.requires_grad_()}, by_row, {"y": dy})
    return {
        "F.rms_norm(x)": (lambda x, weight: F.rms_norm(x, (1024,), weight, 1e-6), norm),
        "F.gelu(x + bias)": (lambda x, bias: F.gelu(x + bias, approximate="tanh"), gelu),
    }


def _add_cpu_times(result: CaseResult, cpu: CpuTimes) -> None:
    times = {time.name: time for time in cpu.rows}
    for row in result.rows:
        if row.status == "ok" and row.contender in times:
            row.cpu_forward_us, row.cpu_both_us = times[row.contender].forward_us, times[row.contender].both_us


# ---- memory, and calls in a CUDA graph ----

_IN_A_GRAPH = 20  # calls a graph: they share the cost of its launch
_WARM = 3  # calls before a capture, which may not contain one-time compilation, loading or allocation


def memory_mib(call: Call, inputs: Inputs, device: torch.device) -> tuple[float, float]:
    """Return the peak and the kept memory of a call, on a CPU as PyTorch's profiler sees it.

    The peak is the most that forward and backward allocate beyond the inputs, results included. The kept memory is what forward
    leaves allocated beyond inputs and outputs, for backward.
    """
    asked, grads = list(inputs.asked.values()), inputs.fresh_grads()
    differentiate(call(*inputs.tensors.values()), asked, inputs.fresh_grads(), inputs.trained)  # one-time allocations happen here
    if device.type == "cpu":
        return _cpu_memory_mib(call, inputs, asked, grads)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before, asked_for = torch.cuda.memory_allocated(device), _asked_for(device)
    results = call(*inputs.tensors.values())
    kept = _asked_for(device) - asked_for - _bytes_made(results, inputs)
    got = differentiate(results, asked, grads, inputs.trained)
    torch.cuda.synchronize(device)
    del results, got
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20, kept / 2**20


def _bytes_made(results: Result, inputs: Inputs) -> int:
    """Return the bytes of results, without those of inputs, which some write to and return."""
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs.tensors.values()}
    storages = {output.untyped_storage().data_ptr(): output.untyped_storage().nbytes() for output in outputs_of(results)}
    return sum(size for place, size in storages.items() if place not in given)


def _cpu_memory_mib(call: Call, inputs: Inputs, asked: list[Tensor], grads: list[Tensor]) -> tuple[float, float]:
    from onepass.profiling.record import recording  # imports rich, which a refused request doesn't need
    from onepass.profiling.trace import STEP, WINDOW, read

    with recording() as recorded, torch.profiler.record_function(WINDOW):
        with torch.profiler.record_function(STEP):
            results = call(*inputs.tensors.values())
        got = differentiate(results, asked, grads, inputs.trained)
    made = _bytes_made(results, inputs)
    del results, got
    trace = read(json.loads(recorded.trace()))
    (forward,) = trace.steps
    kept = sum(size for at, size in trace.allocations if at <= forward.end) - made
    return max(accumulate((size for _, size in trace.allocations), initial=0)) / 2**20, kept / 2**20


def _asked_for(device: torch.device) -> int:
    """Return the bytes in use as requested, without the allocator's rounding of up to a MiB a tensor."""
    held: int = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    return held


def replay_us(call: Callable[[], object], clock: Clock) -> float:
    """Return the GPU time of one call in microseconds, from replays of a graph of several calls on the same tensors."""
    with side_stream(clock.device):
        for _ in range(_WARM):
            call()
            clock.synchronize()  # the host hears of a history of scales before the capture, in which it asks nothing
        graph, _ = capture(lambda: [call() for _ in range(_IN_A_GRAPH)], clock.device)
    return clock.median(lambda _: graph.replay()) * 1e3 / _IN_A_GRAPH
