"""The case file of causal_conv1d: every contender is called rightly."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from bench import benching
from bench.benching import check_contenders, made, stand_in, wrong
from torch import Tensor

from onepass.bench import causal_conv1d
from onepass.ops.convolution.causal_conv1d import causal_conv1d_reference

given = partial(benching.given, causal_conv1d, (1, 128, 512))


def _theirs(x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Tensor | None = None, activation: Any = None) -> Tensor:
    """causal-conv1d's, of columns first. It takes the number of each row's document."""
    assert activation == "silu"
    ends = None
    if seq_idx is not None:
        assert seq_idx.shape == (1, x.shape[-1]) and seq_idx.dtype == torch.int32
        ends = torch.nn.functional.pad(seq_idx[0].bincount().cumsum(0), (1, 0)).int()
    y = causal_conv1d_reference(x.transpose(1, 2), weight, bias, cu_seqlens=ends)
    assert isinstance(y, Tensor)
    return y.transpose(1, 2)


def _fla(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, cu_seqlens: Any = None) -> Any:
    assert activation == "silu"
    return causal_conv1d_reference(x, weight, bias, cu_seqlens=cu_seqlens), None


def _l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


@pytest.fixture(autouse=True)
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, Any]] = {"causal_conv1d": {"causal_conv1d_fn": _theirs}}
    modules |= {"fla.modules.convolution": {"causal_conv1d": _fla}, "fla.modules.l2norm": {"l2norm": _l2norm}}
    stand_in(monkeypatch, modules)


@pytest.mark.parametrize("variant", ("split", "plain", "documents"))
def test_every_contender_is_called_rightly(variant: str) -> None:
    case, inputs = given(variant)
    names = [contender.name for contender in causal_conv1d.BENCH.contenders(case)]
    assert names[3:] == ["causal-conv1d", "FLA"]
    check_contenders(causal_conv1d, case, inputs)


def test_documents_are_looked_at() -> None:
    shape = (1, 1024, 512)  # of several documents
    case, inputs = benching.given(causal_conv1d, shape, "documents")
    whole = made(causal_conv1d, benching.given(causal_conv1d, shape, "split")[0])
    assert wrong(causal_conv1d, case, inputs, lambda *tensors: whole(*tensors[:2]))
