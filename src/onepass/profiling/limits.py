"""The machine's ceilings: copy bandwidth, and product rates for the dtypes in a trace. Measured once in a process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import torch

from onepass.runtime.ceilings import Ceilings, clock_for, measure_ceilings


@dataclass(frozen=True)
class Limits:
    """The machine's ceilings: copy bandwidth, and the matrix product rate for each dtype of the operands."""

    copy_gbs: float | None = None
    tflops: dict[str, float] = field(default_factory=dict)


def limits_of(products: Iterable[str], on_gpu: bool, ceilings: Ceilings | None) -> Limits:
    """Return the limits for these dtypes of matrix products. `ceilings`, if given, replace the measurement."""
    if ceilings is not None:
        rate = ceilings.matmul_tflops
        return Limits(ceilings.copy_gbs, {"bfloat16": rate, "float16": rate} if rate else {})
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    try:
        copy = _ceilings(device).copy_gbs
        rates = {dtype: _product_tflops(device, dtype) for dtype in sorted(set(products))}
    except torch.OutOfMemoryError:
        return Limits()
    finally:
        if on_gpu:
            torch.cuda.empty_cache()
    return Limits(copy, rates)


@cache
def _ceilings(device: torch.device) -> Ceilings:
    return measure_ceilings(device)


@cache
def _product_tflops(device: torch.device, dtype: str) -> float:
    """Measure a large matrix product of random data with this process's settings (TF32, threads)."""
    measured = _ceilings(device).matmul_tflops
    if dtype == "bfloat16" and measured is not None:
        return measured
    n = 1024 if device.type == "cpu" else 8192 if dtype == "float16" else 4096
    a, b = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in range(2))
    with torch.no_grad():
        return 2 * n**3 / clock_for(device).median(lambda _: torch.mm(a, b), rounds=3) / 1e9
