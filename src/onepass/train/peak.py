"""The machine's matrix-product throughput, relative to which a run's is shown."""

from __future__ import annotations

import time

import torch

from onepass.runtime.ceilings import clock_for, matmul_tflops

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
