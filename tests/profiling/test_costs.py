"""Bytes and flops of operators that really ran: recorded here, counted by hand."""

import json

import pytest
import torch
from torch.nn import functional as F

from onepass.profiling.costs import cost, is_known
from onepass.profiling.record import recording
from onepass.profiling.trace import read

BF16 = torch.bfloat16


def recorded(name, function):
    """The cost of the operator of that name, in what the function runs."""
    with recording() as found:
        function()
    ops = [op for op in read(json.loads(found.trace())).ops if op.name == name]
    assert ops, f"{name} did not run"
    return cost(name, ops[0].inputs())


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


N = 8 * 16  # elements of an [8, 16] tensor
BYTES = {
    "add": ("aten::add", lambda: randn(8, 16) + randn(8, 16), 3 * 4 * N),
    "add broadcast": ("aten::add", lambda: randn(8, 16) + randn(16), 4 * (2 * N + 16)),
    "add expanded": ("aten::add", lambda: randn(8, 16) + randn(1, 16).expand(8, 16), 4 * (2 * N + 16)),
    "add number": ("aten::add", lambda: randn(8, 16) + 1, 2 * 4 * N),
    "add mixed": ("aten::add", lambda: randn(8, 16) + randn(8, 16, dtype=BF16), (4 + 2 + 4) * N),
    "add in place": ("aten::add_", lambda: randn(8, 16).add_(randn(8, 16, dtype=BF16)), (4 + 4 + 2) * N),
    "add out": ("aten::add", lambda: torch.add(randn(8, 16), randn(8, 16), out=torch.empty(8, 16)), 3 * 4 * N),
    "mul bf16": ("aten::mul", lambda: randn(8, 16, dtype=BF16) * randn(8, 16, dtype=BF16), 3 * 2 * N),
    "mul strided": ("aten::mul", lambda: randn(16, 8).t() * 2.0, 2 * 4 * N),
    "tensor number": ("aten::mul", lambda: randn(8, 16, dtype=BF16) * torch.tensor(2.0), 2 * 2 * N),
    "compare": ("aten::gt", lambda: randn(8, 16) > 0, 5 * N),
    "where": ("aten::where", lambda: torch.where(torch.ones(8, 16, dtype=torch.bool), randn(8, 16), randn(8, 16)), 13 * N),
    "copy": ("aten::copy_", lambda: torch.empty(8, 16, dtype=BF16).copy_(randn(8, 16)), (4 + 2) * N),
    "cast": ("aten::copy_", lambda: randn(8, 16).to(BF16), (4 + 2) * N),
    "fill": ("aten::fill_", lambda: torch.empty(8, 16).fill_(1.0), 4 * N),
    "gelu": ("aten::gelu", lambda: F.gelu(randn(8, 16, dtype=BF16)), 2 * 2 * N),
    "sum": ("aten::sum", lambda: randn(8, 16).sum(0), 4 * (N + 16)),
    "sum all": ("aten::sum", lambda: randn(8, 16).sum(), 4 * (N + 1)),
    "sum last": ("aten::sum", lambda: randn(8, 16).sum(-1, keepdim=True), 4 * (N + 8)),
    "sum to fp32": ("aten::sum", lambda: randn(8, 16, dtype=BF16).sum(1, dtype=torch.float32), 2 * N + 4 * 8),
    "softmax": ("aten::_softmax", lambda: F.softmax(randn(8, 16), -1), 2 * 4 * N),
    "log_softmax": ("aten::_log_softmax", lambda: F.log_softmax(randn(8, 16, dtype=BF16), -1), 2 * 2 * N),
    "layer_norm": ("aten::native_layer_norm", lambda: F.layer_norm(randn(8, 16), (16,), randn(16), randn(16)), 4 * (2 * N + 32)),
    "rms_norm": ("aten::_fused_rms_norm", lambda: F.rms_norm(randn(8, 16), (16,), randn(16)), 4 * (2 * N + 16)),
    "mm": ("aten::mm", lambda: randn(8, 16) @ randn(16, 4), 4 * (N + 64 + 32)),
    "mm bf16": ("aten::mm", lambda: randn(8, 16, dtype=BF16) @ randn(16, 4, dtype=BF16), 2 * (N + 64 + 32)),
    "mm out": ("aten::mm", lambda: torch.mm(randn(8, 16), randn(16, 4), out=torch.empty(8, 4)), 4 * (N + 64 + 32)),
    "addmm": ("aten::addmm", lambda: F.linear(randn(8, 16), randn(4, 16), randn(4)), 4 * (N + 64 + 4 + 32)),
    "bmm": ("aten::bmm", lambda: torch.bmm(randn(2, 8, 16), randn(2, 16, 4)), 4 * 2 * (N + 64 + 32)),
    "sum of one": ("aten::sum", lambda: torch.ones(()).sum(), 4),
    "none": ("aten::add", lambda: randn(0, 16) + randn(0, 16), 0),
}  # fmt: skip


@pytest.mark.parametrize("case", BYTES)
def test_bytes(case):
    name, function, expected = BYTES[case]
    assert recorded(name, function).bytes == expected


def test_bytes_of_a_layer_norms_backward():
    x, weight = randn(8, 16).requires_grad_(), randn(16).requires_grad_()
    y = F.layer_norm(x, (16,), weight)
    found = recorded("aten::native_layer_norm_backward", lambda: y.backward(randn(8, 16)))
    assert found.bytes == 4 * (N + N + 8 + 8 + 16 + N + 16)  # dy, x, mean, rstd, weight; dx and dweight, no bias


def test_bytes_of_a_frozen_weights_backward():
    x = randn(8, 16).requires_grad_()
    y = F.layer_norm(x, (16,), randn(16))
    found = recorded("aten::native_layer_norm_backward", lambda: y.backward(randn(8, 16)))
    assert found.bytes == 4 * (N + N + 8 + 8 + 16 + N)


UNKNOWN = {
    "division of whole numbers": ("aten::div", lambda: torch.ones(4, dtype=torch.long) / 2),
    "lists": ("aten::cat", lambda: torch.cat([randn(4), randn(4)])),
    "not counted here": ("aten::cumsum", lambda: randn(4).cumsum(0)),
    "gather": ("aten::index_select", lambda: randn(4, 4).index_select(0, torch.tensor([1]))),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_bytes_are_unknown(case):
    name, function = UNKNOWN[case]
    assert recorded(name, function).bytes is None


def test_somebody_elses_operator_is_unknown():
    assert not is_known("mine::add")
    assert cost("mine::add", ()).bytes is None
    assert cost("aten::add", ()).bytes is None  # no overload has no arguments


def attention(causal=False, heads=4):
    q, kv = randn(2, 4, 32, 8), randn(2, heads, 32, 8)
    return lambda: F.scaled_dot_product_attention(q, kv, kv, is_causal=causal, enable_gqa=heads != 4)


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
FLOPS = {
    "mm": ("aten::mm", lambda: randn(8, 16) @ randn(16, 4), 2 * 8 * 16 * 4),
    "addmm": ("aten::addmm", lambda: F.linear(randn(8, 16), randn(4, 16), randn(4)), 2 * 8 * 16 * 4),
    "bmm": ("aten::bmm", lambda: torch.bmm(randn(3, 8, 16), randn(3, 16, 4)), 3 * 2 * 8 * 16 * 4),
    "baddbmm": ("aten::baddbmm", lambda: torch.baddbmm(randn(3, 8, 4), randn(3, 8, 16), randn(3, 16, 4)), 3 * 2 * 8 * 16 * 4),
    "attention": (ATTENTION, attention(), 2 * 2 * (2 * 4) * 32 * 32 * 8),
    "causal": (ATTENTION, attention(causal=True), 2 * (2 * 4) * 32 * 32 * 8),
    "add": ("aten::add", lambda: randn(4) + 1, None),
}


@pytest.mark.parametrize("case", FLOPS)
def test_flops(case):
    name, function, expected = FLOPS[case]
    assert recorded(name, function).flops == expected


def test_flops_of_attentions_backward():
    q = randn(2, 4, 32, 8).requires_grad_()
    y = F.scaled_dot_product_attention(q, q, q)
    found = recorded(f"{ATTENTION}_backward", lambda: y.backward(torch.ones_like(y)))
    assert found.flops == 5 * 2 * (2 * 4) * 32 * 32 * 8  # five products, one of them the scores once more
    assert found.bytes is not None


def test_a_products_type_is_its_operands():
    assert recorded("aten::mm", lambda: randn(8, 16, dtype=BF16) @ randn(16, 4, dtype=BF16)).dtype == "bfloat16"
    assert recorded("aten::add", lambda: randn(4) + 1).dtype is None
