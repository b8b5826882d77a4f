"""layer_norm and rms_norm of heads that are a part of a product's rows: read where they lie, there and back."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.calls import equal, nearly_equal, needs_triton
from ops.norm_oracle import Case, heads_laid_out, judge_case
from ops.oracle import BF16, DEVICE, FP16, FP32

import onepass
import onepass.ops.norm.norm as module
from onepass.ops.norm import backward as norm_backward
from onepass.ops.norm import forward as norm_forward
from onepass.testing.poison import bytes_kept, saved_tensors

pytestmark = needs_triton
kinds = pytest.mark.parametrize("layer", (True, False), ids=("layer", "rms"))


def norm(layer, x, weight, bias=None, **options):
    if layer:
        return onepass.layer_norm(x, weight, bias, backend="triton", **options)
    return onepass.rms_norm(x, weight, backend="triton", **options)


def there_and_back(layer, x, dy, **options):
    """y, and the gradients of x and of a weight."""
    x, weight = x.detach().requires_grad_(), torch.linspace(-1, 2, x.shape[-1], device=DEVICE).requires_grad_()
    y = norm(layer, x, weight, **options)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


def cases():
    shapes = [
        ((2, 7, 5), 33),
        ((3, 1, 4), 64),
        ((1, 9, 16), 128),
        ((4, 3, 1), 100),
        ((2, 3, 2, 3), 16),
        ((5, 2, 3), 1),
        ((2, 2, 128), 8),
    ]
    layouts = (("part", "contiguous"), ("part", "heads first"), ("contiguous", "part"), ("heads first", "part"))
    for ((lead, H), (layout, dy_layout)), layer in itertools.product(itertools.product(shapes, layouts), (False, True)):
        yield Case(layer, lead=lead, H=H, bias=FP32 if layer else None, eps=0.25, layout=layout, dy_layout=dy_layout)
    plain = Case(lead=(2, 3, 5), H=128, dtype=BF16, weight=BF16, layout="part", dy_layout="part")
    more = {"memory_efficient": True}, {"weight": None}, {"centered": True}, {"residual": BF16}, {"dtype": FP16, "H": 1024}
    for options in ({}, *more):
        for layer in (False, True):
            yield replace(plain, layer=layer, **options)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_within_the_budget(case):
    report = judge_case(module, case)
    assert report, report


@kinds
@pytest.mark.parametrize("memory_efficient", (False, True), ids=("", "memory_efficient"))
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_nothing_is_copied_and_nothing_more_is_kept(dtype, memory_efficient, layer, launched):
    product = torch.randn(2, 5, 7 * 24, device=DEVICE, dtype=dtype)
    x = product[..., 24 : 5 * 24].view(2, 5, 4, 24).requires_grad_()
    weight = torch.randn(24, device=DEVICE, requires_grad=True)
    with saved_tensors() as kept:
        y = norm(layer, x, weight, memory_efficient=memory_efficient)
    dy = heads_laid_out(torch.randn_like(y), "part")
    dx, _ = torch.autograd.grad(y, (x, weight), dy)
    (forward, backward) = launched
    assert [forward[0].data_ptr(), backward[0].data_ptr(), backward[2].data_ptr()] == [x.data_ptr(), dy.data_ptr(), x.data_ptr()]
    assert bytes_kept(kept, product, weight) == (0 if memory_efficient else 40 * 4 * (2 if layer else 1))
    assert y.is_contiguous() and dx.is_contiguous()


@kinds
def test_what_can_not_be_read_where_it_lies_is_copied(layer, launched):
    product = torch.randn(3, 4, 130 * 8, device=DEVICE)
    for x in (
        product[..., 8:].view(3, 4, 129, 8),  # more than 128 heads
        product[..., :800].view(3, 4, 100, 8)[:, :, 1::3].transpose(0, 1),  # three strides
        product[..., :40].view(12, 5, 8),  # or a sequence: its length is no part of a kernel
        product[..., :800].view(3, 4, 100, 8)[..., ::2],
        product[..., :8].view(3, 4, 1, 8).expand(3, 4, 2, 8),
        torch.randn(2, 3, 3, 1025, device=DEVICE)[:, :, :2],  # long rows
    ):
        launched.clear()
        dy = torch.randn_like(x).contiguous()
        got = there_and_back(layer, x, dy)
        assert [launched[0][0].is_contiguous(), launched[1][2].is_contiguous()] == [True, True] and not x.is_contiguous()
        assert equal(got, there_and_back(layer, x.contiguous(), dy))


@kinds
def test_another_number_of_tokens_binds_nothing(layer):
    norm_forward._bind.cache_clear()
    norm_backward._plan.cache_clear()
    for B, S in ((2, 3), (2, 4), (3, 3)):
        x = torch.randn(B, S, 60, device=DEVICE)[..., 8:48].view(B, S, 5, 8)
        there_and_back(layer, x, torch.randn_like(x))
    assert norm_forward._bind.cache_info().currsize == norm_backward._plan.cache_info().currsize == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_strides_give_what_contiguous_rows_give(data):
    draw = data.draw
    shape = *draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)), draw(st.integers(1, 40))
    x, dy = (_spread(draw, torch.randn(shape, device=DEVICE)) for _ in range(2))
    layer, memory_efficient = draw(st.booleans()), draw(st.booleans())
    got = there_and_back(layer, x, dy, memory_efficient=memory_efficient)
    expected = there_and_back(layer, x.contiguous(), dy.contiguous(), memory_efficient=memory_efficient)
    assert nearly_equal(got, expected)


def _spread(draw, t):
    """The same numbers, with dimensions but the last in any order in memory, and something between any of them."""
    order = draw(st.permutations(range(t.dim() - 1)))
    strides, end = [0] * (t.dim() - 1) + [1], t.shape[-1]
    for i in order:
        strides[i] = end + draw(st.sampled_from((0, 0, 1, 8)))
        end = strides[i] * t.shape[i]
    return torch.full((end,), float("nan"), device=DEVICE).as_strided(t.shape, strides).copy_(t)
