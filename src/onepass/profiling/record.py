"""onepass.profile: warm up a call, time it without the profiler, record it with the profiler, and describe it.

The profiler slows the CPU, so the wall time comes from runs without it. GPU times come from the trace.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile
from torch.utils._python_dispatch import TorchDispatchMode

from onepass.profiling.figures import Gap, figures, rows
from onepass.profiling.limits import limits_of
from onepass.profiling.model import Profile
from onepass.profiling.suggestions import suggestions
from onepass.profiling.trace import STEP, WINDOW, read
from onepass.profiling.verdict import verdict as verdict_of
from onepass.runtime.ceilings import Ceilings
from onepass.runtime.checks import check_whole
from onepass.runtime.cpu_threads import slow_threads
from onepass.runtime.units import counted, number

Tick = Callable[[str], None]

aten = torch.ops.aten
_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_RUNS = (3, 15)  # the least and the most timing runs, without the profiler
_RUN_US = 20e3  # a run calls a short function until it takes about this long, at most _MOST_CALLS times
_MOST_CALLS = 200
_SLOWED = 4.0  # warn above this slowdown by the profiler; small operators are slowed by two or three
_LOG_ERRORS = 2  # of PyTorch's C++ log: warnings are 1
_COLLECTIVES_END = 0.2  # seconds after a recording, in which gloo's threads leave their last collective
_TIMING_US = 2e6  # stop timing after this long in all, once the least number of runs is done


def profile(
    fn: Callable[..., object], *args: Any, warmup: int = 3, steps: int = 5, ceilings: Ceilings | None = None, **kwargs: Any
) -> Profile:
    """Profile `fn(*args, **kwargs)`: what ran, what waited, what bounds it, and which onepass fusions apply.

        profile = onepass.profile(step, batch)
        print(profile)                  # table and sentences
        profile.picture("step.png")     # timeline
        profile.trace("step.json.gz")   # for Perfetto

    fn is called many times, so it should be a step that can be repeated, such as forward, backward and the optimizer. It is
    called `warmup` times first. Then it is timed without the profiler: the wall time is the median of several runs, each of at
    least `steps` calls. Then it is recorded `steps` times under torch.profiler. Calls follow each other without a
    synchronization, as in training.

    Args:
        fn: a function, a module or a compiled function; may call backward().
        warmup: the calls before anything is measured; they compile and allocate.
        steps: the calls to record.
        ceilings: the machine's ceilings, as `onepass.runtime.ceilings.measure_ceilings` returns them. If not given, they are
            measured once in each process.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable, but is a {type(fn).__name__}")
    check_whole("warmup", warmup, 0)
    check_whole("steps", steps, 1)
    if ceilings is not None and not isinstance(ceilings, Ceilings):
        raise TypeError(f"ceilings must be a Ceilings, as measure_ceilings returns it, but is a {type(ceilings).__name__}")

    def call() -> None:
        fn(*args, **kwargs)

    with _telling() as tell:
        for i in range(warmup):
            tell(f"warm-up call {i + 1} of {warmup}")
            call()
        tell("timing without the profiler")
        timing = timed(call, steps)
        tell(f"recording {steps} steps")
        with recording() as recorded:
            labels = LabelCounter()
            with labels.watch():
                call()  # the first call under the profiler pays for its start-up
            synchronize()
            with record_function(WINDOW):
                for _ in range(steps):
                    with record_function(STEP):
                        call()
                synchronize()
        tell("reading the trace, measuring the machine's ceilings")
        return described(recorded.trace(), timing, ceilings, labels.ignored())


@contextmanager
def _telling() -> Iterator[Tick]:
    """Show the current phase on one line of a terminal, and clear it at the end."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    # Redraw only when the text changes: a refresh thread would slow the calls being timed.
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:
        yield lambda text: live.update(Text(f"onepass.profile: {text}", style="dim"), refresh=True)


# ---- time, without the profiler ----


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call, as each run's mean: wall time, and host time until the call returned."""

    wall: tuple[float, ...]
    host: tuple[float, ...] = ()
    peak_bytes: int | None = None  # None without a GPU


def gpu_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def synchronize() -> None:
    if gpu_in_use():
        torch.cuda.synchronize()


def timed(call: Callable[[], None], steps: int) -> Timing:
    """Time runs of a call. A clock repeats short ones more often, on one rank alone: the call may hold collectives."""
    before = torch.cuda.memory_allocated() if gpu_in_use() else 0
    if gpu_in_use():
        torch.cuda.reset_peak_memory_stats()
    one, _ = run(call, 1)
    by_clock = not _has_several_ranks()
    calls = max(steps, min(_MOST_CALLS, int(_RUN_US / max(one, 1.0)))) if by_clock else steps
    most = _RUNS[1] if by_clock else _RUNS[0]
    runs: list[tuple[float, float]] = []
    while len(runs) < _RUNS[0] or (len(runs) < most and sum(wall for wall, _ in runs) * calls < _TIMING_US):
        runs.append(run(call, calls))
    peak = torch.cuda.max_memory_allocated() - before if gpu_in_use() else None
    return Timing(tuple(wall for wall, _ in runs), tuple(host for _, host in runs), peak)


def _has_several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def run(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Return the wall time and the host time (until the last call returned) of one of `calls` calls, in microseconds."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    queued = time.perf_counter()
    synchronize()
    return (time.perf_counter() - start) / calls * 1e6, (queued - start) / calls * 1e6


# ---- the trace ----


class ProfilerInUse(RuntimeError):
    """Another profiler runs, or ran inside a recording and ended it. PyTorch has one session a process."""


class Recorded:
    """A torch.profiler session that is started and stopped by hand. `trace` then returns the Chrome trace as JSON text."""

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch 2.13's profiler logs its start and stop
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # On a GPU the caching allocator reports the peak.
        memory = not torch.cuda.is_available()
        self._profiler = torch_profile(activities=activities, record_shapes=True, profile_memory=memory, acc_events=True)
        self._running = False
        self._ended_by_another = False

    def start(self) -> None:
        if _profiler_enabled():
            raise ProfilerInUse("another profiler runs already, and PyTorch has one at a time: end it first, or take one out")
        self._running = True
        self._log_level = _set_log_level(_LOG_ERRORS)
        self._profiler.start()

    def stop(self) -> None:
        """Stop the session, unless it is stopped."""
        if not self._running:
            return
        self._running = False
        synchronize()
        if _has_several_ranks():
            # gloo's thread notes a collective's end in the recording after it has let the caller go (PyTorch 2.13). Where the
            # recording has been freed by then, it writes to memory that is another's, and the process crashes some time later.
            time.sleep(_COLLECTIVES_END)
        self._ended_by_another = not _profiler_enabled()
        self._profiler.stop()
        if self._log_level is not None:
            _set_log_level(self._log_level)

    def trace(self) -> bytes:
        if self._ended_by_another:  # to export such a recording crashes the process (PyTorch 2.13)
            raise ProfilerInUse(
                "another profiler ended this recording, as PyTorch has one at a time: take out what the profiled code profiles "
                "by itself (onepass.profile, torch.profiler)"
            )
        descriptor, path = tempfile.mkstemp(suffix=".json")
        os.close(descriptor)
        try:
            self._profiler.export_chrome_trace(path)
            with open(path, "rb") as file:
                return file.read()
        finally:
            os.unlink(path)


def _set_log_level(level: int) -> int | None:
    """Set the least level that PyTorch's C++ code logs, and return the level before: it warns of memory older than the recording.

    TORCH_CPP_LOG_LEVEL, which sets the same variable, is read as PyTorch is imported. Returns None where the variable is missing.
    """
    try:
        variable = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # another platform, or another PyTorch: the warning is shown
        return None
    before, variable.value = variable.value, level
    return before


@contextmanager
def recording() -> Iterator[Recorded]:
    recorded = Recorded()
    recorded.start()
    try:
        yield recorded
    finally:
        recorded.stop()


# ---- labels without a loss ----


class LabelCounter(TorchDispatchMode):
    """Count all labels of cross entropies in the block, and those that are ignore_index, such as a prompt's.

    A trace has the labels' shape, but not their values. Nothing waits for a GPU in the block.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._all = 0
        self._ignored: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _LOSSES and type(args[1]) is Tensor and not _is_capturing(args[1]):
            _, labels, _, _, ignore_index = args
            self._all += labels.numel()
            self._ignored.append((labels == ignore_index).sum())
        return func(*args, **(kwargs or {}))

    def watch(self) -> AbstractContextManager[Any]:
        """Count in the block, unless something was compiled in this process: under a mode Dynamo's code runs uncompiled."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        return nullcontext() if utils is not None and any(utils.counters["frames"].values()) else self

    def ignored(self) -> float:
        """The fraction of the labels that are ignored; 0 where no loss was seen."""
        return sum(count.item() for count in self._ignored) / self._all if self._all else 0.0


def _is_capturing(labels: Tensor) -> bool:
    return labels.is_cuda and torch.cuda.is_current_stream_capturing()


# ---- the profile ----


def described(trace: bytes, timing: Timing | None, ceilings: Ceilings | None = None, ignored_labels: float = 0.0) -> Profile:
    """Build the profile from a trace. Without a timing the wall time is the trace's, and Profile.timed is False."""
    data = json.loads(trace)
    totals = figures(read(data))
    dtypes = [call.cost.dtype for call in totals.calls if call.cost.dtype is not None]
    limits = limits_of(dtypes, totals.on_gpu, ceilings)
    steps = totals.steps
    table = rows(totals.calls, steps, limits)
    traced_us, busy_us = totals.traced_us / steps, totals.busy_us / steps
    walls: Sequence[float] = timing.wall if timing is not None else [traced_us]
    wall_us = statistics.median(walls)
    # On a CPU the operators' times include the profiler's overhead, so only the busy fraction is carried over.
    idle_us = wall_us - busy_us if totals.on_gpu else wall_us * (1 - busy_us / traced_us) if traced_us else 0.0
    idle_us = max(idle_us, 0.0)
    counts = ("gap_count", "gap_us", "short_gap_us", "kernels", "launches", "graphs", "waits")
    per_step: dict[str, Any] = {name: getattr(totals, name) / steps for name in counts}
    verdict, reasons = verdict_of(totals, table, wall_us, idle_us)
    if limits.copy_gbs is None:
        reasons = (*reasons, "too little memory is free to measure the machine's ceilings: hand them in as ceilings=")
    if timing is not None and not totals.on_gpu and traced_us > _SLOWED * wall_us:
        slowed = f"{number(traced_us / wall_us)} times as long as without the profiler"
        reasons = (*reasons, f"the recorded steps took {slowed}: shares of the time are unsure, on a busy machine above all")
    if ceilings is None and not totals.on_gpu and (slow := slow_threads()):
        reasons = (*reasons, "; ".join(slow))
    return Profile(
        device=_device(data, totals.on_gpu),
        on_gpu=totals.on_gpu,
        steps=steps,
        wall_us=wall_us,
        wall_range=(min(walls), max(walls)),
        timed=timing is not None,
        traced_us=traced_us,
        host_us=statistics.median(timing.host) if timing is not None and timing.host else None,
        busy_us=busy_us,
        idle_us=idle_us,
        gaps=tuple(Gap(g.before, g.after, g.count / steps, g.us / steps, g.longest_us) for g in totals.gaps),
        launch_us=totals.launch_us,
        peak_bytes=timing.peak_bytes if timing is not None and timing.peak_bytes is not None else totals.peak_bytes,
        limits=limits,
        rows=tuple(table),
        same_steps=totals.same_steps,
        verdict=verdict,
        reasons=reasons,
        suggestions=suggestions(totals, verdict, idle_us, limits, ignored_labels),
        bars=totals.bars,
        packed_trace=gzip.compress(trace, compresslevel=1),
        **per_step,
    )


def _device(data: dict[str, Any], on_gpu: bool) -> str:
    if not on_gpu:
        return f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    devices = data.get("deviceProperties") or [{}]
    return str(devices[0].get("name", "GPU"))
