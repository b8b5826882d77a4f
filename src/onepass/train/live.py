"""Progress of a run, as a share of the machine's peak: bars on a terminal, otherwise a printed line every few seconds."""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from onepass.runtime.ceilings import clock_for, matmul_tflops
from onepass.train.record import Line

_EVERY_S = 10.0  # between printed lines without a terminal


class Live:
    """Shows a progress bar for training, and one for each task before it.

    Args:
        peak: the machine's matrix-product throughput, or None if unknown.
        flops: FLOPs of a token in forward and backward.
    """

    def __init__(self, console: Console, steps: int, flops: float, peak: MatrixPeak | None) -> None:
        self.console, self.steps, self.flops, self.peak = console, steps, flops, peak
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[words]}"), TimeRemainingColumn(compact=True), console=console, transient=True,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}
        self._last = 0.0

    def __enter__(self) -> Live:
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def told(self, what: str, done: int, total: int) -> None:
        """Show the progress of a task other than training."""
        if self.console.is_terminal:
            self._move(what, done, total, "")
        elif done == 0:
            self.say(what)

    def step(self, line: Line) -> None:
        words, evaluated = self.words(line), line.eval_loss is not None
        if self.console.is_terminal:
            self._move("training", line.step + 1, self.steps, words)
            due = evaluated  # above the bar, where it stays
        else:
            due = evaluated or time.monotonic() - self._last > _EVERY_S or line.step + 1 == self.steps
        if due:
            self._last = time.monotonic()
            self.say(f"step {line.step + 1}/{self.steps}  {words}")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def words(self, line: Line) -> str:
        parts = [f"loss {line.loss:.3f}"]
        if line.eval_loss is not None:
            parts.append(f"held-out loss {line.eval_loss:.3f}")
        parts.append(f"{line.tokens_per_s:,.0f} tokens/s")
        share = self.peak.share(line.tokens_per_s * self.flops) if self.peak else None
        if share is not None:
            parts.append(f"{share:.0%} of matmul peak")
        if line.memory_gib is not None:
            parts.append(f"{line.memory_gib:.1f} GiB")
        if line.saturated is not None:
            parts.append(f"{line.saturated:,} saturated")
        if line.underflowed:
            parts.append(f"{line.underflowed:,} underflowed")
        return "  ".join(parts)

    def _move(self, what: str, done: int, total: int, words: str) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total, words="")
        self._bar.update(self._tasks[what], completed=done, total=total, words=words)


# ---- the machine's matrix-product throughput ----

_CPU_SIZE = 1024
_PATIENCE_S = 10.0  # between two measurements on a CPU


class MatrixPeak:
    """The FLOPs per second of a large matrix product: cuBLAS in bf16 on a GPU, `dtype` on a CPU.

    A busy CPU measures too little. A run that is faster than the peak has it measured again.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.flops = self._measured()

    def share(self, flops: float) -> float | None:
        """Return the share of the peak that `flops` per second are, or None if a run at that speed shows the peak to be wrong."""
        if flops > self.flops and self.device.type == "cpu" and time.monotonic() > self._last + _PATIENCE_S:
            self.flops = max(self.flops, self._measured())
        return flops / self.flops if flops <= self.flops else None

    def _measured(self) -> float:
        self._last = time.monotonic()
        clock = clock_for(self.device)
        if self.device.type == "cuda":
            return matmul_tflops(clock) * 1e12
        a, b = (torch.ones(_CPU_SIZE, _CPU_SIZE, dtype=self.dtype) for _ in range(2))  # draws no random numbers in a run
        return 2 * _CPU_SIZE**3 / min(clock.times(lambda _: torch.mm(a, b), budget_ms=150.0)) * 1e3
