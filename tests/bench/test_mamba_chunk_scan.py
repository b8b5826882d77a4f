"""The case file of mamba_chunk_scan: every contender is called rightly."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from bench import benching
from bench.benching import check_contenders, made, stand_in, wrong
from torch import Tensor
from torch.nn import functional as F

from onepass.bench import mamba_chunk_scan
from onepass.ops.scan.mamba_chunk_scan import mamba_chunk_scan_reference

given = partial(benching.given, mamba_chunk_scan, (1, 150, 4, 2, 16))


def _combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, seq_idx: Tensor | None = None, **options: Any
) -> Any:
    assert chunk_size == 256
    ends = None if seq_idx is None else F.pad(seq_idx[0].long().bincount().cumsum(0), (1, 0)).int()
    return mamba_chunk_scan_reference(x, dt, A, B, C, cu_seqlens=ends, **options)


def _attend(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, cu_seqlens: Tensor | None) -> Any:
    """A scan of steps of 1 in a head by itself, whose A changes: the gate is in dt, and x is divided by it."""
    assert scale == 1.0
    x = v / g[..., None]
    return mamba_chunk_scan_reference(x, g, torch.ones_like(g[0, 0]), k, q, cu_seqlens=cu_seqlens, dt_limit=(-1e9, 0.0)), None


@pytest.fixture(autouse=True)
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": _combined},
        "fla.ops.simple_gla": {"chunk_simple_gla": _attend},
    }
    stand_in(monkeypatch, modules)


@pytest.mark.parametrize("variant", ("plain", "documents"))
def test_every_contender_is_called_rightly(variant: str) -> None:
    case, inputs = given(variant)
    names = [contender.name for contender in mamba_chunk_scan.BENCH.contenders(case)]
    assert names == ["onepass", "formula", "mamba-ssm", "FLA"]
    check_contenders(mamba_chunk_scan, case, inputs)


def test_documents_are_looked_at() -> None:
    case, inputs = given("documents")
    whole = made(mamba_chunk_scan, given("plain")[0])
    assert wrong(mamba_chunk_scan, case, inputs, lambda *tensors: whole(*tensors[:7]))
