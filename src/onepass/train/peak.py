"""The machine's matrix-product throughput, relative to which a run's is shown."""

from __future__ import annotations

import torch

from onepass.runtime.ceilings import clock_for, matmul_tflops

_CPU_SIZE = 1024


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOPs per second of a large matrix product: cuBLAS in bf16 on a GPU, `dtype` on a CPU."""
    clock = clock_for(device)
    if device.type == "cuda":
        return matmul_tflops(clock) * 1e12
    a, b = (torch.randn(_CPU_SIZE, _CPU_SIZE, dtype=dtype) for _ in range(2))
    return 2 * _CPU_SIZE**3 / min(clock.times(lambda _: torch.mm(a, b), budget_ms=150.0)) * 1e3
