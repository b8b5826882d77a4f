"""Steps whose own times decide whether a CUDA graph runs them: it pays where a GPU waits for the calls of a slow CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.runtime.cuda_graph import free_memory
from onepass.train.batches import TokenBatch
from onepass.train.steps import GraphedSteps, TrainSteps

_SKIPPED, _TIMED = 3, 5  # steps: the first ones compile and allocate
_WAITS = 0.9  # share of a microbatch's time that its calls take where the GPU waits for them


class _CaptureFailed(Exception):
    """Its text says why."""


class MeasuredSteps(GraphedSteps):
    """TrainSteps that become GraphedSteps if the first steps wait for the CPU, and say which.

    They stay as they are if a graph's memory would leave evaluations too little, or if its capture fails. Losses are the same.

    Args:
        say: takes the line that says what was decided, and why.
        decided: capture at the first step, if that can be captured.
        group: the tensor-parallel ranks, whose microbatches hold collectives.
    """

    def __init__(
        self, *args: Any, say: Callable[[str], None] | None = None, decided: bool = False, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(*args)
        self._group = group
        self._say = say or (lambda text: None)
        self._steps = 0
        self._times: list[tuple[float, float]] = []  # of a step's first microbatch: until its last call, and until its end
        self._timing, self._decided, self.replays = False, decided, decided
        self._reason = ""

    def run(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        if len(self._times) == _TIMED and not self._decided:
            self._decide(batch.tokens.device)
        if self.replays:
            try:
                loss_and_norm = super().run(batch)
            except _CaptureFailed as failure:  # the same step again, which begins by clearing gradients
                self.replays = False
                self._report(f"not captured, though {self._reason}, as that failed: {failure}")
            else:
                self._report(f"captured, as {self._reason}")
                return loss_and_norm
        self._steps += 1
        self._timing = not self._decided and self._steps > _SKIPPED
        with self.update.accumulate() if self._timing else nullcontext():  # reductions in a microbatch wait for other ranks
            return TrainSteps.run(self, batch)

    def _micro(self, part: TokenBatch, share: float) -> Tensor:
        """Run a microbatch, and time it if it is the first one of a step that counts.

        Later ones would be called while the GPU runs those before. When its queue of launches is full, calls take its time.
        """
        if not self._timing:
            return super()._micro(part, share)
        self._timing = False
        synchronize(part.tokens.device)
        began = perf_counter()
        loss = super()._micro(part, share)
        called = perf_counter()
        synchronize(part.tokens.device)
        self._times.append((called - began, perf_counter() - began))
        return loss

    def _decide(self, device: torch.device) -> None:
        times = (median(times) for times in zip(*self._times, strict=True))
        own, others = memory_of_graph(device)
        calls, whole, needed, lacking = self._most(*times, own, -others)
        left, self._decided = -lacking, True
        self._reason = f"a microbatch's calls take the CPU {1e3 * calls:.1f} of its {1e3 * whole:.1f} ms"
        if calls < _WAITS * whole:
            self._report(f"not needed, as {self._reason}")
        elif needed > left:
            gib = f"its {needed / 2**30:.1f} GiB would leave evaluations {max(left, 0) / 2**30:.1f}"
            self._report(f"not captured, as {gib}, though {self._reason}")
        else:
            self.replays = True

    def _most(self, *values: float) -> list[float]:
        """Return each value's largest over all ranks that decide together."""
        return [*values]

    def _report(self, text: str) -> None:
        if self._reason:
            self._say(f"CUDA graph: {text}")
        self._reason = ""

    def _captured(self, micro: Callable[[], Tensor], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture on all tensor-parallel ranks or on none. What fails before, in a warm-up with collectives, ends the run."""
        failure = graph = None
        try:
            graph = super()._captured(micro, device)
        except RuntimeError as error:
            failure = str(error).partition("\n")[0]
        if self._group is not None:
            failed = torch.tensor(float(graph is None))  # on the CPU, by gloo
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
            failure = failure or ("another rank's failed" if failed else None)
        if failure is not None or graph is None:  # raised here: the error's own frames would keep the capture's memory
            raise _CaptureFailed(failure)
        return graph


class ComparedSteps(MeasuredSteps):
    """MeasuredSteps of several ranks: all keep the graph, or none, by whether a step takes less time with it than without.

    Without one, gradients are reduced under backward. Replays call no hooks, so reductions start after the last one. No graph
    holds those of data-parallel ranks, whose order is one either way: a rank whose capture fails goes on without.
    """

    _seconds: list[float] | None = None  # of steps that are compared: without the graph, then with it

    def run(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        if self._seconds is None:
            return super().run(batch)
        device = batch.tokens.device
        synchronize(device)
        began = perf_counter()
        loss_and_norm = super().run(batch)
        synchronize(device)
        lost = len(self._seconds) >= _TIMED and not self.replays
        self._seconds.append(math.inf if lost else perf_counter() - began)
        if len(self._seconds) == _TIMED:
            self.replays = True
        elif len(self._seconds) == 2 * _TIMED:
            self._compare(device)
        return loss_and_norm

    def _decide(self, device: torch.device) -> None:
        super()._decide(device)
        if self.replays:
            self.replays, self._seconds = False, []

    def _compare(self, device: torch.device) -> None:
        assert self._seconds is not None
        times = median(self._seconds[:_TIMED]), median(self._seconds[_TIMED:])
        without, replayed = (1e3 * seconds for seconds in self._most(*times))
        self._seconds = None
        compared = f"a step takes {replayed:.1f} ms with it and {without:.1f} without"
        if replayed < without:
            self._say(f"CUDA graph: kept, as {compared}")
            return
        self.replays, self._graph = False, None
        free_memory(device)
        self._say(f"CUDA graph: given up, as {compared if replayed < math.inf else 'a rank could not capture one'}")

    def _most(self, *values: float) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64, device="cpu")  # by gloo
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()


def synchronize(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def memory_of_graph(device: torch.device) -> tuple[int, int]:
    """Return how many bytes of a step a graph would keep for itself, and how many it would leave to others."""
    allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    return peak - allocated, free + torch.cuda.memory_reserved(device) - peak
