"""What only a GPU shows of gated_norm_linear: real tiles, cuBLAS's products, the memory that is kept, and graphs."""

import pytest
import torch
from gpu.calls import captured
from ops.calls import equal

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BF16 = torch.bfloat16
HEADS = {"heads": (32, 128), "small heads": (16, 64), "wide groups": (2, 4096)}
heads_of = pytest.mark.parametrize(("heads", "size"), HEADS.values(), ids=HEADS)


def inputs(heads, size, rows=1031, N=512, seed=0):
    """x, z, norm_weight, weight and dy."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = (rows, heads * size), (rows, heads * size), (size,), (N, heads * size), (rows, N)
    drawn = [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]
    drawn[3] /= (heads * size) ** 0.5
    return [t.to(BF16) for t in drawn]


def step(x, z, norm_weight, weight, dy, **options):
    """y and all gradients."""
    leaves = [t.detach().requires_grad_() for t in (x, z, norm_weight, weight)]
    y = onepass.gated_norm_linear(*leaves, group_size=norm_weight.shape[0], backend="triton", **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def apart(x, z, norm_weight, weight, dy):
    """The same by gated_rms_norm and linear."""
    leaves = [t.detach().requires_grad_() for t in (x, z, norm_weight, weight)]
    by_head = [t.unflatten(-1, (-1, norm_weight.shape[0])) for t in leaves[:2]]
    y = onepass.linear(onepass.gated_rms_norm(*by_head, leaves[2], backend="triton").flatten(-2), leaves[3])
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@heads_of
def test_bits_are_those_of_the_two_ops(heads, size):
    for rows in (1, 37, 4099):
        given = inputs(heads, size, rows)
        assert equal(step(*given), apart(*given))


@heads_of
def test_rows_are_not_kept(heads, size):
    x, z, norm_weight, weight, _ = inputs(heads, size, 4096)
    leaves = [t.requires_grad_() for t in (x, z, norm_weight, weight)]
    onepass.gated_norm_linear(*leaves, group_size=size)
    before = torch.cuda.memory_allocated()
    y = onepass.gated_norm_linear(*leaves, group_size=size)
    assert torch.cuda.memory_allocated() - before < y.nbytes + (1 << 20)


def test_in_a_graph():
    given = inputs(32, 128, 1024)
    expected = step(*given)
    found, graph = captured(lambda: step(*given))
    graph.replay()
    assert equal(found, expected)
