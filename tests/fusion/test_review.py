"""What a stranger's review found: small programs, each of which once was wrong."""

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
import onepass.fusion.backend
from onepass.fusion import rules

pytestmark = pytest.mark.usefixtures("machine")


def fused(fn):
    return onepass.fuse(fn, compiler="none")


def agree(fn, *args):
    found, wanted = fused(fn)(*args), fn(*args)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


def test_equal_outputs_are_two_tensors():
    a, b = fused(lambda x: (x.sin(), x.sin()))(torch.zeros(3))
    a.add_(1)
    assert b.eq(0).all()
    first, second, _ = fused(lambda x: (torch.zeros(3), torch.zeros(3), x.sin()))(torch.zeros(3))
    first.add_(1)
    assert second.eq(0).all()


def test_an_equal_output_without_gradient():
    def program(x):
        with torch.no_grad():
            without = x.sin()
        return x.sin(), without

    with_gradient, without = fused(program)(torch.zeros(3, requires_grad=True))
    assert with_gradient.requires_grad
    assert not without.requires_grad


@pytest.mark.parametrize(
    ("dtype", "numbers"), [(torch.float16, torch.float32), (torch.float32, torch.float64), (torch.int32, torch.int64)]
)
def test_numbers_take_no_part_in_a_type(dtype, numbers):
    x, s = torch.ones(3, 8).to(dtype), torch.arange(4).to(numbers)
    agree(lambda x, s: [p * q for p, q in zip(x.chunk(4, 1), s.unbind(), strict=True)], x, s)


def test_norms_by_a_number():
    agree(lambda x: [p / p.float().norm() for p in x.chunk(2, 1)], torch.randn(3, 8).bfloat16())


def test_statistics_have_the_operators_type():
    norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2)).bfloat16()
    x = torch.randn(3, 8).bfloat16().requires_grad_()

    def program(x):
        return [norm(part) for norm, part in zip(norms, x.chunk(2, 1), strict=True)]

    found, wanted = (
        torch.autograd.grad(sum(y.float().square().sum() for y in fn(x)), [x, *norms.parameters()])
        for fn in (fused(program), program)
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("compiler", ["none", pytest.param("inductor", marks=pytest.mark.slow)])
def test_lanes_that_leave_are_contiguous(compiler):
    norms, x = nn.ModuleList(nn.LayerNorm(4) for _ in range(2)), torch.randn(3, 8)

    def program(x):
        return [norm(part) for norm, part in zip(norms, x.chunk(2, 1), strict=True)]

    for y, wanted in zip(onepass.fuse(program, compiler=compiler)(x), program(x), strict=True):
        torch.testing.assert_close(y, wanted)
        assert y.is_contiguous()


def test_a_changing_integer():
    program = fused(lambda x, k: [p * k for p in x.chunk(4, 1)])
    x = torch.randn(3, 8)
    for k in (2, 3, 5):
        torch.testing.assert_close(program(x, k), [p * k for p in x.chunk(4, 1)])


def test_a_bias_of_one_number():
    w, v = (nn.Parameter(torch.randn(n, 4)) for n in (3, 5))
    b, c = (nn.Parameter(torch.randn(1)) for _ in range(2))
    agree(lambda x: [torch.addmm(b, x, w.t()), torch.addmm(c, x, v.t())], torch.randn(2, 4))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: [torch.tanh(p).contiguous(memory_format=torch.channels_last) for p in x.view(2, 2, 2, 2).chunk(2, 1)],
        lambda x: [p.softmax(0) for p in x.unbind()],
        lambda x: [torch.cat([torch.empty(0), p]) for p in x.view(4, 4).chunk(2, 1)],
    ],
)
def test_what_no_rule_fits_stays(program):
    agree(program, torch.randn(16))


def test_a_rule_that_is_wrong_costs_a_fusion_only(monkeypatch, caplog):
    def wrong(call):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(rules, "pointwise", wrong)
    program = fused(lambda x: [torch.tanh(p) for p in x.chunk(2, 1)])
    x = torch.randn(3, 4)
    with caplog.at_level(logging.WARNING, "onepass.fusion"):
        torch.testing.assert_close(program(x), [torch.tanh(p) for p in x.chunk(2, 1)])
    assert "please report" in caplog.text
    assert not program.report().found


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return [F.relu(self.a(x)), F.relu(self.b(x))]


def test_parameters_of_several_processes_stay_where_they_are():
    module = Two()
    module.share_memory()
    program, x = fused(module), torch.randn(2, 4)
    torch.testing.assert_close(program(x), module(x))
    assert module.a.weight.is_shared()
    assert "shared with other processes" in str(program.report())


def test_parameters_in_an_array_stay_there():
    module, array = Two(), np.ones((4, 4), dtype=np.float32)
    module.a.weight = nn.Parameter(torch.from_numpy(array))
    program, x = fused(module), torch.randn(2, 4)
    program(x)
    array[:] = 2
    torch.testing.assert_close(program(x), module(x))
    assert module.a.weight.eq(2).all()
