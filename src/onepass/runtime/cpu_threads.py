"""The number of threads of PyTorch's CPU operators: fewer on a busy machine.

OpenMP's threads spin while they wait for each other. Where another process needs a core, they spin away the time that the last
of them waits for. Two threads on two cores beside one busy process then train a fifth to a thirtieth as fast as one thread.
`train` and `bench` use fewer there (`CpuThreads`); `profile` and `doctor` say so (`slow_threads`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from onepass.runtime.units import counted

_PROBE_S = 0.15
_PATIENCE_S = 30.0  # between two choices
_SLOWER = 1.5  # steps that are slower than the fastest by this factor are a reason to choose again
_WORTH = 1.25  # fewer threads must be faster by this factor
_ALL_OF_IT = 0.9  # threads that get this share of their cores' time are alone there


class Probe(NamedTuple):
    rate: float  # calls per second
    share: float  # CPU time over the time that all threads have


def probe(threads: int, most: int) -> Probe:
    """Measure small operators, as a step has them, with `threads` threads. Their work is that of `most` threads."""
    torch.set_num_threads(threads)
    x, weight = torch.ones(256 * most, 128), torch.ones(128, 512)
    F.gelu(x @ weight)  # starts the threads
    calls, start, cpu = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - start) < _PROBE_S or not calls:
        F.gelu(x @ weight)
        calls += 1
    return Probe(calls / elapsed, (time.process_time() - cpu) / elapsed / threads)


class FastestThreads(NamedTuple):
    threads: int
    slower: float  # all threads, than these


def fastest_threads(most: int) -> FastestThreads:
    """Measure how many of `most` threads are as good as any number, the most of such. The number in use stays as it was."""
    before, probes = torch.get_num_threads(), dict[int, Probe]()
    for threads in _candidates(most):
        probes[threads] = measured = probe(threads, most)
        alone = threads == most and measured.share >= _ALL_OF_IT
        if alone or measured.rate * _WORTH < max(probed.rate for probed in probes.values()):
            break
    torch.set_num_threads(before)
    best = max(probed.rate for probed in probes.values())
    count = next(threads for threads, measured in probes.items() if measured.rate * _WORTH >= best)
    return FastestThreads(count, probes[count].rate / probes[most].rate)


def slow_threads() -> tuple[str, str] | None:
    """Return that the threads in use wait for each other, and what to do. None: they don't, or the user chose their number."""
    most = torch.get_num_threads()
    if _is_fixed(most) or (fastest := fastest_threads(most)).threads == most:
        return None
    count, slower = fastest
    found = f"the machine is busy: {counted(most, 'thread')}, which wait for each other, are {slower:.1f} x slower than {count}"
    return found, f"set OMP_NUM_THREADS={count}"


def _is_fixed(count: int) -> bool:
    """Whether there is nothing to choose: OMP_NUM_THREADS is the user's choice, which stays."""
    return count == 1 or "OMP_NUM_THREADS" in os.environ


class CpuThreads:
    """Chooses the number of threads by measurement: at the start, when steps become slow, and until all are in use again.

    Args:
        say: prints a sentence about a change.
        who: uses the threads, in that sentence.
    """

    def __init__(self, say: Callable[[str], object], who: str = "training") -> None:
        self.say, self.who = say, who
        self.most = self.count = torch.get_num_threads()
        self.fixed = _is_fixed(self.most)
        self._fastest = self._next = 0.0

    def choose(self) -> None:
        """Measure, and set the number of threads."""
        if self.fixed:
            return
        chosen, slower = fastest_threads(self.most)
        torch.set_num_threads(chosen)
        if chosen < self.count:
            self.say(
                f"The machine is busy, so {self.who} uses {counted(chosen, 'thread')}: {self.most}, which wait for each "
                f"other, are {slower:.1f} x slower. OMP_NUM_THREADS={self.most} keeps {self.most}."
            )
        elif chosen > self.count:
            self.say(f"The machine is less busy: {self.who} uses {counted(chosen, 'thread')}.")
        if chosen != self.count:
            self._fastest = 0.0
        self.count, self._next = chosen, time.monotonic() + _PATIENCE_S

    def watch(self, tokens_per_s: float) -> None:
        """Choose again if steps became slow, or if fewer threads than all are in use."""
        self._fastest = max(self._fastest, tokens_per_s)
        slow = tokens_per_s * _SLOWER < self._fastest
        if (slow or self.count < self.most) and time.monotonic() >= self._next:
            self.choose()


def _candidates(most: int) -> list[int]:
    """Return all threads, all but one, and then half as many until one."""
    counts = [most, most - 1]
    while counts[-1] > 1:
        counts.append(min(counts[-1] - 1, most // 2 if len(counts) == 2 else counts[-1] // 2))
    return counts
