"""The weight gradient's product into an fp32 main_grad, by itself, against the other ways to get it there.

    python benchmarks/wgrad.py [--json FILE]

Milliseconds on one GPU, medians, the L2 cache overwritten before each. "cuBLAS beta 1" is one call of cublasGemmEx on PyTorch's
own handle, which is all that Apex's extension does; "mm" is the bf16 product alone, whose result nobody adds. QuACK where it is
installed. Extra: what a call allocates at most, MiB.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from onepass.bench.record import commit, device_name, versions
from onepass.gradients.main_grad import add_gradient
from onepass.runtime.ceilings import clock_for

SHAPES = ((2048, 4096, 4096), (8192, 4096, 4096), (8192, 4096, 14336), (4096, 8192, 28672), (8192, 12288, 12288))
_CUDA_R_32F, _CUDA_R_16BF, _COMPUTE_32F, _DEFAULT_ALGO, _N, _T = 0, 14, 68, 99, 0, 1


def _cublas() -> ctypes.CDLL:
    torch.cuda.current_blas_handle()  # loads it
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcublas.so" in line:
            return ctypes.CDLL(line.split()[-1])
    raise RuntimeError("PyTorch has not loaded libcublas.so: this needs a CUDA build")


def beta_one(library: ctypes.CDLL) -> Callable[[Tensor, Tensor, Tensor], None]:
    """main_grad += dy.T @ x, row by row in memory, so main_grad.T += x.T @ dy as cuBLAS counts columns."""
    one = ctypes.c_float(1.0)

    def call(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
        tokens, outer = dy.shape
        inner = x.shape[1]
        status = library.cublasGemmEx(
            ctypes.c_void_p(torch.cuda.current_blas_handle()), _N, _T, inner, outer, tokens, ctypes.byref(one),
            ctypes.c_void_p(x.data_ptr()), _CUDA_R_16BF, inner, ctypes.c_void_p(dy.data_ptr()), _CUDA_R_16BF, outer,
            ctypes.byref(one), ctypes.c_void_p(main_grad.data_ptr()), _CUDA_R_32F, inner, _COMPUTE_32F, _DEFAULT_ALGO,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"cublasGemmEx returned {status}")

    return call


def ways() -> dict[str, Callable[[Tensor, Tensor, Tensor], object]]:
    """main_grad, dy, x -> nothing of interest."""
    found: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
        "onepass": add_gradient,
        "cuBLAS beta 1": beta_one(_cublas()),
        "mm, add_": lambda main_grad, dy, x: main_grad.add_(dy.t() @ x),
        "mm": lambda main_grad, dy, x: dy.t() @ x,
    }
    try:
        from quack.gemm_interface import gemm_add_inplace

        found["QuACK"] = lambda main_grad, dy, x: gemm_add_inplace(dy.t(), x, main_grad, tuned=False)
    except ImportError:
        pass
    return found


def extra_mib(call: Callable[[], object]) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(shape: tuple[int, int, int]) -> dict[str, dict[str, float]]:
    tokens, inner, outer = shape
    clock = clock_for(torch.device("cuda"))
    dy = torch.randn(tokens, outer, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16)
    exact = dy.double().t() @ x.double()
    found: dict[str, dict[str, float]] = {}
    times: dict[str, list[float]] = {}
    calls = ways()
    for name, call in calls.items():
        main_grad = torch.zeros(outer, inner, device="cuda")
        result = call(main_grad, dy, x)
        got = result if name == "mm" and isinstance(result, Tensor) else main_grad
        error = ((got.double() - exact).norm() / exact.norm()).item()
        extra = extra_mib(lambda call=call, main_grad=main_grad: call(main_grad, dy, x))  # type: ignore[misc]
        found[name] = {"error": error, "extra_mib": extra}
    main_grad = torch.zeros(outer, inner, device="cuda")
    for _ in range(5):  # all in turn: a GPU at its power limit slows down whoever comes last
        for name, call in calls.items():
            times.setdefault(name, []).extend(clock.times(lambda _, call=call: call(main_grad, dy, x), budget_ms=30))
    for name, all_of_them in times.items():
        found[name]["ms"] = sorted(all_of_them)[len(all_of_them) // 2]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = {f"{t} x {k} -> {n}": measure((t, k, n)) for t, k, n in SHAPES}
    table = Table("tokens x in -> out", *next(iter(rows.values())), title="ms (extra MiB)")
    for name, row in rows.items():
        table.add_row(name, *(f"{each['ms']:.3f} ({each['extra_mib']:.0f})" for each in row.values()))
    Console(width=130).print(table)
    if args.json:
        record = {"commit": commit(), "gpu": device_name(torch.device("cuda")), "versions": versions(), "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
