"""The weight gradient's product into an fp32 main_grad, by itself, against the other ways to get it there.

Bytes     reads dy, x and main_grad, and writes main_grad. There is no backward: it is a part of one. Each call adds once more.
Time      relative to that of `mm`, the product alone in the storage type, which nobody adds: it is timed and not checked.
Shapes    tokens x input features x output features.
Peers     mm, add_: what people write; torch.compile: the same.
          cuBLAS beta 1: one call of cublasGemmEx on PyTorch's own handle, which is all that Apex's extension does.
          QuACK: its product that adds in place, without tuning.
"""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass.bench.define import OpBench, Random, Shape, Shapes, by_pytorch, of_each
from onepass.bench.model import BenchCase, Call, Contender, Inputs
from onepass.bench.peers import imported, needs_gpu
from onepass.gradients.main_grad import add_gradient

_GPU = [(2048, 4096, 4096), (8192, 4096, 4096), (8192, 4096, 14336), (4096, 8192, 28672), (8192, 12288, 12288)]
_SHAPES = Shapes(of_each(["plain"], _GPU), of_each(["plain"], [(256, 512, 768)]))
_CUDA_R_32F, _CUDA_R_16BF, _COMPUTE_32F, _DEFAULT_ALGO, _N, _T = 0, 14, 68, 99, 0, 1  # of cuBLAS


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, inner, outer = shape
    return tokens * (inner + outer) * size + 8 * inner * outer, 0


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, inner, outer = case.shape
    main_grad = torch.zeros(outer, inner, device=random.device)
    tensors = {"main_grad": main_grad, "dy": random(tokens, outer), "x": random(tokens, inner)}
    return Inputs(tensors, frozenset({"dy", "x"}), {"sum": torch.zeros_like(main_grad)}, summed=frozenset({"sum"}))


def _baseline(case: BenchCase) -> Call:
    def call(main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        if dy.is_cuda and dy.dtype != torch.float32:
            return torch.mm(dy.t(), x, out_dtype=torch.float32)
        return dy.float().t() @ x.float()

    return call


def _added(add: Any) -> Call:
    """Return the call of a function of main_grad, dy and x, which adds to main_grad."""

    def call(main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        add(main_grad, dy, x)
        return main_grad

    return call


def _cublas(case: BenchCase) -> Call:
    torch.cuda.current_blas_handle()  # loads it
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcublas.so" in line}
    library, one = ctypes.CDLL(paths.pop()), ctypes.c_float(1.0)

    def add(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
        """main_grad.T += x.T @ dy, as cuBLAS counts columns."""
        (tokens, outer), inner = dy.shape, x.shape[1]
        status = library.cublasGemmEx(
            ctypes.c_void_p(torch.cuda.current_blas_handle()), _N, _T, inner, outer, tokens, ctypes.byref(one),
            ctypes.c_void_p(x.data_ptr()), _CUDA_R_16BF, inner, ctypes.c_void_p(dy.data_ptr()), _CUDA_R_16BF, outer,
            ctypes.byref(one), ctypes.c_void_p(main_grad.data_ptr()), _CUDA_R_32F, inner, _COMPUTE_32F, _DEFAULT_ALGO,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"cublasGemmEx returned {status}")

    return _added(add)


def _quack(case: BenchCase) -> Call:
    function = partial(imported("quack.gemm_interface", "gemm_add_inplace"), tuned=False)
    return _added(lambda main_grad, dy, x: function(dy.t(), x, main_grad))


def _peers(case: BenchCase) -> list[Contender]:
    lacks = needs_gpu() if case.dtype == torch.bfloat16 else "called for bf16 only"
    return [
        Contender("mm", lambda case: lambda main_grad, dy, x: dy.t() @ x, floor=True),
        *by_pytorch(lambda case, run: run(lambda main_grad, dy, x: main_grad.add_(dy.t() @ x)), "mm, add_"),
        Contender("cuBLAS beta 1", _cublas, lacks=lacks),
        Contender("QuACK", _quack, package="QuACK"),
    ]


BENCH = OpBench(
    "wgrad", _SHAPES, (64, 128, 128), _bytes_moved, _inputs, _peers,
    ours=lambda case: _added(add_gradient), baseline=_baseline, reference="mm",
    formula=lambda case: lambda main_grad, dy, x: dy.t() @ x,  # the first call, which is checked, finds zeros in main_grad
    backend=lambda case, inputs: "triton" if inputs.tensors["x"].is_cuda else "torch",
    without={"Apex": "its extension is one cuBLAS product"},
)  # fmt: skip
