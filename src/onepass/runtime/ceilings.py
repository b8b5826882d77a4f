"""What this machine can do, and the clock that says so: the ceilings every other figure is measured against.

    clock = clock_for(torch.device("cuda"))
    times = clock.times(lambda _: y.copy_(x))     # milliseconds, one a repetition
    ceilings = measure_ceilings(torch.device("cuda"))

On a GPU a time is the GPU's own, between two events, from launches already queued: what a call costs the CPU is not in it and
is measured by itself (`host_us`). The L2 cache is overwritten before every repetition. On a CPU it is the wall clock's.
"""

from __future__ import annotations

import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Any], object]
Before = Callable[[], Any]

_FLUSH_BYTES = 256 << 20  # several times any L2 of today, and what triton.testing.do_bench writes: figures compare
_CPU_FLUSH_BYTES = 64 << 20
_WARM = 2  # untimed repetitions that open each run: they wake the device and say how long one takes
_FEWEST, _MOST = 4, 20  # repetitions in one run; a GPU's queue of launches holds about a thousand


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Clock(ABC):
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def times(self, step: Step, before: Before = lambda: None, budget_ms: float = 10.0) -> list[float]:
        """The milliseconds of each of some repetitions of `step(before())`, where `before` is not timed.

        As many repetitions as fit into budget_ms, within reason.
        """

    @abstractmethod
    def synchronize(self) -> None: ...

    def median(self, step: Step, before: Before = lambda: None, budget_ms: float = 10.0, rounds: int = 5) -> float:
        return statistics.median(t for _ in range(rounds) for t in self.times(step, before, budget_ms))

    def host_us(self, call: Callable[[], object], calls: int = 100) -> float:
        """The CPU time of one call in microseconds: calls follow each other and nobody waits for their results."""
        for _ in range(min(3, calls // 2)):  # few are of work that is not tiny
            call()
        self.synchronize()
        with _no_collection():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            elapsed = time.perf_counter() - start
        self.synchronize()
        return elapsed / calls * 1e6


class CpuClock(Clock):
    """The wall clock, the caches overwritten before every repetition."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.flush: Tensor = torch.zeros(_CPU_FLUSH_BYTES // 4, dtype=torch.int32)

    def times(self, step: Step, before: Before = lambda: None, budget_ms: float = 10.0) -> list[float]:
        with _no_collection():
            start = time.perf_counter()
            self._one(step, before)
            whole_ms = (time.perf_counter() - start) * 1e3  # what is not timed takes its time too
            return [self._one(step, before) for _ in range(_repetitions(whole_ms, budget_ms))]

    def _one(self, step: Step, before: Before) -> float:
        prepared = before()
        self.flush.add_(1)
        start = time.perf_counter()
        step(prepared)
        return (time.perf_counter() - start) * 1e3

    def synchronize(self) -> None:
        pass


class GpuClock(Clock):
    """CUDA events around queued launches."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.flush: Tensor = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def times(self, step: Step, before: Before = lambda: None, budget_ms: float = 10.0) -> list[float]:
        with torch.cuda.device(self.device), _no_collection():
            self._queue(1, step, before)
            torch.cuda.synchronize()
            start = time.perf_counter()
            warm = self._queue(_WARM, step, before)
            queued_us = (time.perf_counter() - start) * 1e6 / _WARM
            torch.cuda.synchronize()
            repetitions = _repetitions(min(a.elapsed_time(b) for a, b in warm), budget_ms)
            # Hold the GPU back until the CPU has queued all of it: otherwise a short kernel's time is the wait for its launch.
            torch.cuda._sleep(int(min(repetitions * queued_us * 1.2, 50e3) * 2000))
            events = self._queue(repetitions, step, before)
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in events]

    def _queue(self, repetitions: int, step: Step, before: Before) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        events = [(_event(), _event()) for _ in range(repetitions)]
        for start, end in events:
            prepared = before()
            self.flush.zero_()
            start.record()
            step(prepared)
            end.record()
            del prepared
        return events

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def clock_for(device: torch.device) -> Clock:
    return GpuClock(device) if device.type == "cuda" else CpuClock(device)


def _repetitions(one_ms: float, budget_ms: float) -> int:
    return max(_FEWEST, min(_MOST, int(budget_ms / max(one_ms, 1e-3))))


@contextmanager
def _no_collection() -> Iterator[None]:
    """A garbage collection in the middle of a repetition would be counted as its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# ---- the ceilings ----


@dataclass(frozen=True)
class Ceilings:
    """What the machine reaches when it does one thing only."""

    copy_gbs: float  # GB/s, the bytes read and the bytes written both counted
    copy_bytes: int  # of the tensor that was copied
    matmul_tflops: float | None  # a large bf16 product by cuBLAS; None on a CPU


def measure_ceilings(device: torch.device, clock: Clock | None = None) -> Ceilings:
    clock = clock or clock_for(device)
    copied = (2 << 30) if device.type == "cuda" else (64 << 20)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        copied = min(copied, free // 4)
    tflops = matmul_tflops(clock) if device.type == "cuda" else None
    return Ceilings(copy_bandwidth(clock, copied), copied, tflops)


def copy_step(device: torch.device, moved: int) -> Step:
    """A plain copy that moves `moved` bytes, as a step for a clock."""
    source = torch.ones(max(moved // 4, 1), dtype=torch.bfloat16, device=device)  # each element is read once, written once
    target = torch.empty_like(source)
    return lambda _: target.copy_(source)


def copy_bandwidth(clock: Clock, copied: int) -> float:
    """GB/s of a copy of `copied` bytes, read and written."""
    return 2 * copied / clock.median(copy_step(clock.device, 2 * copied), budget_ms=20.0) / 1e6


def matmul_tflops(clock: Clock, n: int = 8192) -> float:
    """TFLOP/s of one n x n x n product in bf16, on random data: zeros draw less power and run faster."""
    a, b = (torch.randn(n, n, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / clock.median(lambda _: torch.mm(a, b, out=out), budget_ms=20.0) / 1e9
