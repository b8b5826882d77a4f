"""PyTorch's grouped product in eight bits on a GPU: the loop's numbers for any groups, no waiting, equal bits, CUDA graphs."""

import pytest
import torch
from gpu.calls import captured, nobody_waits, other_stream
from ops.calls import relative

from onepass.kernels import grouped_product
from onepass.kernels.fp8_cast import cast_rows
from onepass.kernels.grouped_product import scaled_grouped_product, unfit_for_scaled_groups
from onepass.ops.activation.grouped import activation_grouped_linear
from onepass.ops.linear.grouped import grouped_linear

_UNFIT = "needs a GPU"
if torch.cuda.is_available():
    _UNFIT = unfit_for_scaled_groups((8, 4096, 4096), torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
pytestmark = pytest.mark.skipif(_UNFIT is not None, reason=str(_UNFIT))


@pytest.fixture(autouse=True)
def _experts_of_any_size(monkeypatch):
    """On a GPU small ones would run in bf16, which is faster."""
    monkeypatch.setattr(grouped_product, "_SCALED_LEAST", 16)

# groups that begin anywhere, at tiles' edges, without rows at both ends and in a row, of one row, and one group alone
SIZES = ((30, 0, 1, 69, 0), (0, 0, 8), (1,), (128, 256, 64), (127, 129, 3, 0, 0, 1000), (0, 2049, 2047), (5,) * 64)
SHAPES = ((64, 48), (16, 16), (2048, 4096), (4096, 256))  # K, N: tiles that PyTorch chooses by size


def drawn(sizes, K, N, seed=0, spread=8.0):
    """Rows and experts whose magnitudes differ, so that another's scale is seen."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(sum(sizes), K, device="cuda", generator=generator)
    x *= spread ** torch.randn(sum(sizes), 1, device="cuda", generator=generator)
    weight = torch.randn(len(sizes), N, K, device="cuda", generator=generator) / K**0.5
    weight *= spread ** torch.randn(len(sizes), 1, 1, device="cuda", generator=generator)
    return x.bfloat16(), weight.bfloat16(), torch.tensor(sizes, device="cuda").cumsum(0).int()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_product_is_the_loops(sizes, shape):
    x, weight, ends = drawn(sizes, *shape)
    for b in (weight, weight.mT):  # as forward and as x's gradient take it
        a = x if b is weight else drawn(sizes, shape[1], shape[0])[0]
        codes = *cast_rows(a), *cast_rows(b)
        wide = [each.double() for each in (codes[0].float() * codes[1], codes[2].float() * codes[3].view(*b.shape[:2], 1))]
        exact = torch.cat([part @ each.mT for part, each in zip(wide[0].split(sizes), wide[1], strict=True)])
        plain = relative(exact.bfloat16(), exact)
        with nobody_waits():
            y = scaled_grouped_product(*codes, ends, torch.bfloat16)
        assert relative(y, exact) <= 1.25 * plain + 1e-6
        rows = y.double().sub(exact).norm(dim=1) <= 0.02 * exact.norm(dim=1)
        assert rows.all(), rows.logical_not().nonzero().flatten().tolist()[:8]
        assert y.equal(scaled_grouped_product(*codes, ends, torch.bfloat16))


def experts(sizes=(200, 0, 1, 69, 0, 242), K=256, inner=384):
    x, up, ends = drawn(sizes, K, 2 * inner, spread=1.0)  # else few rows' token_weights would make the whole error
    generator = torch.Generator("cuda").manual_seed(1)
    down = (torch.randn(len(sizes), K, inner, device="cuda", generator=generator) / inner**0.5).bfloat16()
    token_weight = torch.rand(sum(sizes), device="cuda", generator=generator)
    dy = torch.randn(sum(sizes), K, device="cuda", generator=generator).bfloat16()
    up, down = torch.nn.Parameter(up), torch.nn.Parameter(down)
    return x.requires_grad_(), up, down, token_weight.requires_grad_(), ends, dy


def mlp(x, up, down, token_weight, ends, precision="fp8"):
    h = grouped_linear(x, up, ends, precision)
    return activation_grouped_linear(h, down, ends, "swiglu", token_weight=token_weight, precision=precision)


def test_nobody_waits_and_bits_are_equal():
    *tensors, ends, dy = experts()
    found = []
    for _ in range(3):
        with nobody_waits():
            y = mlp(*tensors, ends)
            found.append([y.detach(), *torch.autograd.grad(y, tensors, dy)])
    for other in found[1:]:
        assert all(one.equal(value) for one, value in zip(found[0], other, strict=True))
    expected = torch.autograd.grad(mlp(*tensors, ends, None), tensors, dy)
    for one, other in zip(found[0][1:], expected, strict=True):
        assert 0.003 < relative(one, other.double()) < 0.16  # 16 decibels


@other_stream
def test_a_graphs_replays_see_updates():
    *tensors, ends, dy = experts()
    for weight in tensors[1:3]:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)

    def step():
        y = mlp(*tensors, ends)
        y.backward(dy)
        return y.detach()

    y, graph = captured(step)
    for _ in range(2):
        with torch.no_grad():
            for weight in tensors[1:3]:
                weight.mul_(1.5)
                weight.main_grad.zero_()
        graph.replay()
        replayed = [y.clone(), *(weight.main_grad.clone() for weight in tensors[1:3])]
        for weight in tensors[1:3]:
            weight.main_grad.zero_()
        expected = [step(), *(weight.main_grad for weight in tensors[1:3])]
        assert all(one.equal(other) for one, other in zip(replayed, expected, strict=True))
