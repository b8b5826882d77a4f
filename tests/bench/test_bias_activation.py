"""The case file of bias_activation: every peer is called rightly, and one that writes over its arguments gets its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bench import benching
from bench.benching import cute, stand_in, wrong
from torch import Tensor

from onepass.bench import bias_activation

given = partial(benching.given, bias_activation, (20, 48))


class _Swiglu(torch.autograd.Function):
    """As Liger's: writes the gradients over the arguments."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, linear: Tensor) -> Tensor:
        ctx.save_for_backward(gate, linear)
        return F.silu(gate) * linear

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            given = [x.detach().float().requires_grad_() for x in ctx.saved_tensors]
            grads = torch.autograd.grad(F.silu(given[0]) * given[1], given, dy.float())
        return tuple(x.copy_(grad) for x, grad in zip(ctx.saved_tensors, grads, strict=True))


def _geglu(gate: Tensor, linear: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * linear


class _Whole:
    @staticmethod
    def apply(x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, -1)
        return F.silu(gate) * linear


@pytest.mark.parametrize("variant", ["swiglu", "geglu", *bias_activation._PAIRS])
def test_every_function_of_liger_is_called_rightly(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swiglu = {"LigerSiLUMulFunction": _Swiglu, "LigerFusedGateUpSiLUMulFunction": _Whole}
    geglu = {"LigerGELUMulFunction": type("Function", (), {"apply": staticmethod(_geglu)})}
    modules = {"liger_kernel.ops.swiglu": swiglu, "liger_kernel.ops.geglu": geglu, **cute(swiglu=_Swiglu.apply, geglu=_geglu)}
    stand_in(monkeypatch, modules)
    case, inputs = given(variant)
    before = {name: tensor.detach().clone() for name, tensor in inputs.tensors.items()}
    found = [contender for contender in bias_activation.BENCH.contenders(case) if contender.package == "Liger"]
    assert [contender.name for contender in found] == ["Liger", "Liger CuTe", *(["Liger, one tensor"] * (variant == "swiglu"))]
    for contender in found:
        assert not wrong(bias_activation, case, inputs, contender.make(case)), contender.name
        assert all(torch.equal(inputs.tensors[name], tensor) for name, tensor in before.items()), contender.name
