"""mamba_chunk_scan against its peers: Mamba 2's scan, forward and backward, by whose kernels onepass takes.

Bytes     forward reads x, dt, B and C and writes y; backward reads these and dy and writes their gradients. Products bind, and
          what passes from chunk to chunk: fractions of a copy are small.
Variants  `plain`; eight `documents` in one sequence.
Shapes    sequences x tokens x heads x groups x states. Heads have 64 columns.
Peers     mamba-ssm's `mamba_chunk_scan_combined`, in chunks of 256, with additions in any order, as it is by default; FLA's
          `chunk_simple_gla` with eager code around it. "formula" is onepass's own in plain PyTorch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.define import OpBench, Random, Shape, Shapes
from onepass.bench.model import BenchCase, Call, Contender, Inputs
from onepass.bench.peers import imported
from onepass.ops.scan.chunks import ScanInputs, ScanOptions, scan_as_cast
from onepass.ops.scan.mamba_chunk_scan import mamba_chunk_scan
from onepass.runtime.documents import document_of

_HEAD, _DOCUMENTS, _CHUNK = 64, 8, 256
_SHAPES = Shapes(
    gpu={
        "plain": [(1, 16384, 128, 8, 128), (4, 4096, 128, 8, 128), (2, 4096, 48, 1, 128)],
        "documents": [(1, 16384, 128, 8, 128)],
    },
    gpu_quick={"plain": [(1, 2048, 128, 8, 128)]},  # by the formula, where no kernels are installed, 16384 take half a minute
    cpu={"plain": [(1, 512, 4, 1, 16)], "documents": [(1, 1024, 2, 1, 16)]},
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    B, S, H, G, N = shape
    y = B * S * H * _HEAD * size
    inputs = y + B * S * H * size + 2 * B * S * G * N * size
    return inputs + y, 2 * inputs + y


def _inputs(case: BenchCase, random: Random) -> Inputs:
    B, S, H, G, N = case.shape
    tensors: dict[str, Tensor] = {"x": random.input(B, S, H, _HEAD), "dt": random.input(B, S, H)}
    tensors["A"] = (-1 - random(H).float().abs()).requires_grad_()
    tensors |= {name: (N**-0.5 * random(B, S, G, N)).detach().requires_grad_() for name in ("B", "C")}
    tensors |= {name: random(H).float().detach().requires_grad_() for name in ("D", "dt_bias")}
    if case.variant == "documents":
        ends = [S * i // _DOCUMENTS for i in range(_DOCUMENTS + 1)]
        tensors["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=random.device)
    return Inputs(tensors, frozenset({"x", "dt", "B", "C"}), {"y": random(B, S, H, _HEAD)})


def _keywords(case: BenchCase) -> tuple[str, ...]:
    return ("D", "dt_bias", *(("cu_seqlens",) if case.variant == "documents" else ()))


def _formula(case: BenchCase) -> Call:
    def call(*given: Tensor) -> Tensor:
        named = dict(zip(_keywords(case), given[5:], strict=True))
        return mamba_chunk_scan(*given[:5], **named, dt_softplus=True, backend="torch")  # type: ignore[arg-type, return-value]

    return call


def _baseline(case: BenchCase) -> Call:
    """The formula with operands of products rounded to the case's type, as kernels round them."""

    def call(*given: Tensor) -> Tensor:
        cu_seqlens = given[7] if len(given) > 7 else None
        with torch.autocast(given[0].device.type, case.dtype, enabled=given[0].is_cuda and case.dtype is not torch.float32):
            x, dt, A, B, C, D, dt_bias = given[:7]
            inputs = ScanInputs(x, dt, A, B, C, D, dt_bias, None, cu_seqlens)
            return scan_as_cast(inputs, ScanOptions(True, 0.0, float("inf"), False))[0]

    return call


def _by_mamba(case: BenchCase) -> Call:
    scan = imported("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")

    def call(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, *documents: Tensor) -> Tensor:
        seq_idx = document_of(documents[0], x.shape[1])[None] if documents else None
        return scan(x, dt, A, B, C, _CHUNK, D=D, dt_bias=dt_bias, dt_softplus=True, seq_idx=seq_idx)  # type: ignore[no-any-return]

    return call


def _by_fla(case: BenchCase) -> Call:
    attend = imported("fla.ops.simple_gla", "chunk_simple_gla")

    def call(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, *documents: Tensor) -> Tensor:
        steps, serves = F.softplus(dt.float() + dt_bias), x.shape[2] // B.shape[2]
        keys, queries = (t.repeat_interleave(serves, 2) for t in (B, C))
        values = (steps[..., None] * x).to(x.dtype)
        y = attend(queries, keys, values, steps * A, scale=1.0, cu_seqlens=documents[0] if documents else None)[0]
        return (y + D[:, None] * x).to(x.dtype)  # type: ignore[no-any-return]

    return call


def _peers(case: BenchCase) -> list[Contender]:
    return [
        Contender("formula", _formula),
        Contender("mamba-ssm", _by_mamba, package="mamba-ssm"),
        Contender("FLA", _by_fla, package="FLA"),
    ]


BENCH = OpBench(
    "mamba_chunk_scan", _SHAPES, (1, 64, 2, 1, 16), _bytes_moved, _inputs, _peers,
    options=lambda case: {"dt_softplus": True}, keywords=_keywords, baseline=_baseline,
)  # fmt: skip
