"""Recorders of a script: all of it or some seconds (WholeRecorder), some optimizer steps, or some calls of one function."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import record_function

from onepass.profiling.model import Profile
from onepass.profiling.record import LabelCounter, Recorded, Timing, described, gpu_in_use, run, synchronize
from onepass.profiling.trace import STEP, WINDOW
from onepass.runtime.errors import CommandError

_UNDECORATED = "__onepass_undecorated__"
_AGAIN_S = 0.5  # a script may swallow RecordingDone, so the alarm raises it again at this interval


class RecordingDone(BaseException):
    """Raised to end the script once enough is recorded. A BaseException, because scripts catch Exception."""


def say(text: str) -> None:
    print(f"onepass profile: {text}", file=sys.stderr, flush=True)


class WholeRecorder:
    """Record all of a script, or some seconds of it: SIGALRM starts and stops the recording."""

    def __init__(self, skip: float, seconds: float) -> None:
        self._skip, self._seconds = skip, seconds
        self._recorded: Recorded | None = None

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._alarm)
        if self._skip:
            signal.setitimer(signal.ITIMER_REAL, self._skip)
        else:
            self._start()

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        self._stop()

    def _alarm(self, *_: object) -> None:
        if self._recorded is None:
            self._start()
        else:
            self._stop()
            raise RecordingDone

    def _start(self) -> None:
        say(f"recording, for {self._seconds:g} s at most" if self._seconds else "recording")
        self._recorded = Recorded()
        self._recorded.start()
        if self._seconds:
            signal.setitimer(signal.ITIMER_REAL, self._seconds, _AGAIN_S)

    def _stop(self) -> None:
        if self._recorded is not None:
            self._recorded.stop()

    def profile(self) -> Profile:
        if self._recorded is None:
            raise CommandError(f"the script ended before --skip-first ({self._skip:g} s) was over")
        return described(self._recorded.trace(), None)


class StepRecorder(WholeRecorder):
    """Record a script after its first `skip` optimizer steps, for `steps` more: clocks would end ranks at different ones."""

    def __init__(self, skip: int, steps: int) -> None:
        super().__init__(0.0, 0.0)
        self._first, self._last = skip, skip + steps
        self._done = 0

    def __enter__(self) -> None:
        say(f"one of several ranks: recording optimizer steps {self._first + 1} to {self._last} in place of seconds")
        self._hook = register_optimizer_step_post_hook(self._count)
        if not self._first:
            self._start()

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self._stop()

    def _count(self, *_: object) -> None:
        self._done += 1
        if self._done == self._first:
            self._start()
        if self._done >= self._last:
            self._stop()
            raise RecordingDone

    def profile(self) -> Profile:
        if self._recorded is None:
            raise CommandError(
                f"the script made {self._done} optimizer steps, and recording begins after --skip {self._first}; "
                "--seconds 0 records all of it"
            )
        return super().profile()


class CallRecorder:
    """Record calls of one function: the first `skip` warm up, the next `steps` are timed, the next `steps` recorded."""

    def __init__(self, name: str, skip: int, steps: int) -> None:
        self._name, self._skip, self._steps = name, skip, steps
        self._calls = 0
        self._inside = False
        self._runs: list[tuple[float, float]] = []  # wall and host time
        self._peak: int | None = None
        self._labels = LabelCounter()
        self._recorded: Recorded | None = None

    def __enter__(self) -> None:
        self._compile = torch.compile
        torch.compile = self._compile_and_decorate

    def __exit__(self, *_: object) -> None:
        torch.compile = self._compile
        if self._recorded is not None:
            self._recorded.stop()

    def decorate(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # recursion
                return fn(*args, **kwargs)
            self._inside = True
            try:
                return self._call(lambda: fn(*args, **kwargs))
            finally:
                self._inside = False

        vars(called)[_UNDECORATED] = fn
        return called

    def _compile_and_decorate(self, model: Any = None, **options: Any) -> Any:
        """Compile the undecorated function and decorate the result, so that the recorder stays outside the compiled code."""
        fn = getattr(model, _UNDECORATED, None)
        return self._compile(model, **options) if fn is None else self.decorate(self._compile(fn, **options))

    def _call(self, call: Callable[[], Any]) -> Any:
        number, timed = self._calls - self._skip, self._steps
        self._calls += 1
        if number < 0:
            return call()
        if number < timed:
            return self._timed(call)
        if number == timed:  # not recorded: the first call under the profiler pays for its start-up
            say(f"recording the next {self._steps} calls of {self._name}")
            self._recorded = Recorded()
            self._recorded.start()
            with self._labels.watch():
                return call()
        synchronize()
        with record_function(WINDOW):
            with record_function(STEP):
                result = call()
            synchronize()
        if number == timed + self._steps:
            raise RecordingDone
        return result

    def _timed(self, call: Callable[[], Any]) -> Any:
        before = torch.cuda.memory_allocated() if gpu_in_use() else 0
        if gpu_in_use():
            torch.cuda.reset_peak_memory_stats()
        results: list[Any] = []
        self._runs.append(run(lambda: results.append(call()), 1))
        if gpu_in_use():
            self._peak = max(self._peak or 0, torch.cuda.max_memory_allocated() - before)
        return results[0]

    def profile(self) -> Profile:
        needed = self._skip + 2 * self._steps + 1
        if self._calls < needed:
            how = f"--skip {self._skip} --steps {self._steps} needs {needed}: calls that warm up, are timed and are recorded"
            raise CommandError(f"the script called {self._name} {self._calls} times; {how}")
        assert self._recorded is not None
        walls, hosts = zip(*self._runs, strict=True)
        timing = Timing(walls, hosts, self._peak)
        return described(self._recorded.trace(), timing, ignored_labels=self._labels.ignored())
