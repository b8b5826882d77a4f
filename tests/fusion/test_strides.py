"""Strides that fusion changes: whoever depends on them, however far behind, reads what eager code would have given it."""

import pytest
import torch
import torch.nn.functional as F
from fusion.programs import FREE_COPIES, check, same
from torch import nn

from onepass.fusion.fused import fuse

F64 = torch.float64


@pytest.fixture(autouse=True)
def free_copies(machine):
    machine(FREE_COPIES)


def transposed(*sizes, **options):
    return torch.randn(*reversed(sizes), dtype=F64).transpose(0, -1).requires_grad_(**options)


@torch.library.custom_op("onepass_tests::strides_of", mutates_args=())
def strides_of(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(x.stride())


@strides_of.register_fake
def _(x):
    return torch.empty(x.dim(), dtype=torch.int64)


def slices_one_wide(x):
    y = x * 0.5
    return torch.tanh(y[:, 0:1] / 3), torch.tanh(y[:, 1:2] / 3)


def casts_of_slices_one_wide(x):
    lanes = [torch.exp(-x.narrow(1, i, 1).abs()) for i in (0, 1)]
    return tuple(F.softplus(lane).to(torch.float32).to(x.dtype) for lane in lanes)


def norms_of_a_batch_of_one(x):
    return tuple(F.layer_norm(x.narrow(2, i, 1), (1,)) for i in (1, 0))


@pytest.mark.parametrize(
    ("program", "x"),
    (
        (slices_one_wide, transposed(2, 2, 8)),
        (casts_of_slices_one_wide, transposed(3, 2, 6)),
        (norms_of_a_batch_of_one, torch.randn(1, 3, 2, dtype=F64, requires_grad=True)),
    ),
)
def test_lanes_next_to_dimensions_of_one_element(program, x):
    fused = check(program, x)
    assert sum(fused.inference.values())
    for mine, theirs in zip(fused(x), program(x), strict=True):
        assert [s for s, n in zip(mine.stride(), mine.shape, strict=True) if n > 1] == [
            s for s, n in zip(theirs.stride(), theirs.shape, strict=True) if n > 1
        ]


def test_a_view_behind_an_operator_that_passes_strides_on():
    def viewed(a, b, c):
        a, b, c = (torch.tanh(t.t()) for t in (a, b, c))
        return torch.sin(a).t().view(-1), torch.cos(b).t().view(-1), torch.atan(c).t().view(-1)

    assert check(viewed, *(torch.randn(3, 4, dtype=F64) for _ in range(3))).inference["tanh", 3] == 1


@pytest.mark.parametrize("grad", (False, True))
def test_an_operator_of_others_gets_the_strides_it_was_traced_with(grad):
    def asked(a, b, c):
        lanes = [torch.tanh(t.t()) for t in (a, b, c)]
        found = [strides_of(view) for lane in lanes for view in (lane.detach(), lane.detach()[:, ::2], lane.detach()[1:].t())]
        return [*found, *lanes]

    tensors = [torch.randn(4, 6, dtype=F64, requires_grad=grad) for _ in range(3)]
    fused = fuse(asked, compiler="none")
    found, wanted = fused(*tensors), asked(*tensors)
    assert fused.report().found
    same(found, wanted, 0, 0)
    assert [t.stride() for t in found] == [t.stride() for t in wanted]


@pytest.mark.parametrize("between", (lambda y: y, torch.sin), ids=("lane", "behind"))
def test_dropout_drops_the_elements_that_eager_code_drops(between):
    def dropped(a, b, c):
        torch.manual_seed(0)
        return [F.dropout(between(torch.tanh(t.t())), 0.5) for t in (a, b, c)]

    tensors = [torch.randn(5, 7, dtype=F64) for _ in range(3)]
    fused = fuse(dropped, compiler="none")
    same(fused(*tensors), dropped(*tensors), 0, 0)
    assert any(f.operator == "tanh" for f in fused.report().found)


def test_a_cat_of_lanes_in_another_order():
    def joined(x):
        lanes = [torch.tanh(part) for part in x.split(2, 0)]
        return strides_of(torch.cat(lanes, 0)), torch.cat(lanes, 0).view(-1)

    x = transposed(4, 3)
    fused = fuse(joined, compiler="none")
    same(fused(x), joined(x), 0, 0)


def test_widths_that_change_from_call_to_call():
    def lanes(x):
        y = x.cumsum(1) * 1.0
        return tuple(torch.tanh(F.gelu(F.layer_norm(t, t.shape[-1:]))) for t in (y[:, 0::2], y[:, 1::2]))

    fused = fuse(lanes, compiler="none", dynamic=True)
    for width in (4, 6):
        x = torch.randn(width, width, dtype=F64)
        same(fused(x), lanes(x), 1e-12, 1e-12)


@pytest.mark.parametrize("frozen", (False, True))
def test_the_report_counts_the_bytes_of_one_cat(frozen):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.requires_grad_(not frozen)

        def forward(self, x):
            return self.a(x).cumsum(0), self.b(x).cumsum(0)

    x = torch.randn(6, 8, requires_grad=True)
    fused = fuse(Pair(), compiler="none")
    sum(y.sin().sum() for y in fused(x)).backward()
    copied = {f.operator: f.copied for f in fused.report().found if f.operator.startswith("linear's")}
    assert copied["linear's input gradient"] == (2 * 6 * 8 * 4 if frozen else 0)
    assert sum(copied.values()) == 2 * 6 * 8 * 4
