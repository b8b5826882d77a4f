"""A mixture of experts: against each token's experts one by one, the grouped product, balance, main_grad, empty experts."""

import pytest
import torch
import torch.nn.functional as F
from ops.calls import relative
from ops.fp8_calls import decibels

import onepass
from onepass.gpt import Config
from onepass.gpt.moe import MoE
from onepass.gpt.parts import Initializer
from onepass.ops.linear.grouped import grouped_linear
from onepass.ops.linear.routing import gather_tokens, scatter_tokens, sort_rows
from onepass.product import grouped as grouped_products

H, E, SIZE = 12, 5, 8


def config(**options):
    shape = {"hidden_size": H, "num_attention_heads": 2, "num_moe_experts": E, "moe_ffn_hidden_size": SIZE}
    return Config(**shape | options)


def made(dtype=torch.float64, **options):
    return MoE(config(init_method_std=0.5, **options), None, Initializer(2, 0.5), "cpu").to(dtype)


def tokens(*shape, dtype=torch.float64):
    x = torch.randn(*shape, H, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def one_by_one(moe, x, k):
    """y of each token by itself, and the loss of an uneven spread, in plain operators."""
    w = dict(moe.named_parameters())
    flat = x.reshape(-1, H)
    probabilities = (flat @ w["router.weight"].t()).softmax(-1)
    ys, counts = [], [0] * E
    for row, shares in zip(flat, probabilities, strict=True):
        chosen = shares.argsort(descending=True)[:k]
        total = shares[chosen].sum() if k > 1 else 1.0
        y = 0
        for expert in chosen.tolist():
            counts[expert] += 1
            gate, linear = (w["experts.weight1"][expert] @ row).chunk(2)
            y = y + shares[expert] / total * (w["experts.weight2"][expert] @ (F.silu(gate) * linear))
        ys.append(y)
    share = torch.tensor(counts, dtype=x.dtype) / (len(flat) * k)
    return torch.stack(ys).view(x.shape), E * (share * probabilities.mean(0)).sum()


@pytest.mark.parametrize("k", (1, 2, 5))
@pytest.mark.parametrize("fused", (True, False))
def test_each_token_by_its_experts(k, fused):
    moe, x = made(moe_router_topk=k, moe_aux_loss_coeff=0.25, bias_activation_fusion=fused), tokens(3, 7)
    y, aux_loss = moe(x)
    expected, own = one_by_one(moe, x, k)
    assert relative(y.detach(), expected.detach()) < 1e-14
    assert relative(aux_loss.detach(), 0.25 * own.detach()) < 1e-14
    inputs = [x, *moe.parameters()]
    dy = torch.randn_like(y)
    got = torch.autograd.grad((y * dy).sum() + aux_loss, inputs)
    wanted = torch.autograd.grad((expected * dy).sum() + 0.25 * own, inputs)
    assert all(relative(one, other) < 1e-12 for one, other in zip(got, wanted, strict=True))


def test_without_a_coefficient_there_is_no_loss_of_its_own():
    assert made()(tokens(2, 3))[1] is None


def test_the_router_is_fp32_in_a_model_of_16_bits():
    moe, x = made(torch.bfloat16), tokens(64, dtype=torch.bfloat16)
    logits = moe.router(x)
    exact = x.double() @ moe.router.weight.double().t()
    assert logits.dtype == torch.float32
    assert relative(logits.detach(), exact.detach()) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(moe.router(x), logits)


def test_even_is_one_and_uneven_more():
    even = torch.eye(E).repeat(3, 1)
    assert onepass.route(even, 1, aux=1.0).aux_loss.item() == pytest.approx(1.0)
    assert onepass.route(100 * torch.eye(E)[:1].repeat(6, 1), 1, aux=1.0).aux_loss.item() == pytest.approx(E)
    assert onepass.route(torch.zeros(0, E), 2, aux=1.0).aux_loss == 0


def test_routes_are_sorted_by_expert_and_lead_back():
    probabilities = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.1, 0.4], [0.2, 0.1, 0.7]])
    weights, chosen = probabilities.topk(2)
    routes = sort_rows(weights, chosen, 3)
    assert routes.ends.tolist() == [2, 3, 6] and routes.ends.dtype == torch.int32
    by_expert = [sorted(part.tolist()) for part in routes.tokens.tensor_split(routes.ends[:-1].long())]
    assert by_expert == [[1, 2], [0], [0, 1, 2]]
    x = torch.randn(3, 4)
    assert torch.equal(scatter_tokens(x, routes)[routes.rows], x.unsqueeze(1).expand(3, 2, 4))
    assert torch.allclose(gather_tokens(scatter_tokens(x, routes), routes), 2 * x)


# ---- the grouped product ----


def grouped(dtype=torch.float64, sizes=(3, 0, 5, 1, 0), N=6):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(len(sizes), N, 4, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, weight, torch.tensor(sizes).cumsum(0).int()


@pytest.mark.parametrize("sizes", ((3, 0, 5, 1, 0), (0, 0, 4), (0, 0)), ids=str)
def test_the_product_of_each_experts_rows(sizes):
    x, weight, ends = grouped(sizes=sizes)
    y = grouped_linear(x, weight, ends)
    expected = torch.cat([part @ w.t() for part, w in zip(x.split(sizes), weight, strict=True)])
    dy = torch.randn_like(y)
    got, wanted = (torch.autograd.grad(each, (x, weight), dy) for each in (y, expected))
    assert torch.equal(y, expected)
    assert all(torch.allclose(one, other, rtol=1e-13, atol=1e-15) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("marked", (True, False))
def test_the_weights_gradient_is_added_to_main_grad(dtype, marked):
    x, weight, ends = grouped(dtype)
    weight = torch.nn.Parameter(weight.detach())
    weight.main_grad = torch.ones(weight.shape)
    if marked:
        weight.grad_added_to_main_grad = False
    y = grouped_linear(x, weight, ends)
    y.backward(torch.ones_like(y))
    sums = torch.stack([part.double().sum(0) for part in x.detach().split((3, 0, 5, 1, 0))])
    assert relative(weight.main_grad, 1 + sums.unsqueeze(1).expand_as(weight)) < 1e-6
    assert weight.grad is None if not marked else weight.grad_added_to_main_grad and not weight.grad.any()


def test_grad_asks_for_the_gradient_itself():
    x, weight, ends = grouped(torch.float32)
    weight = torch.nn.Parameter(weight.detach())
    weight.main_grad = torch.zeros(weight.shape)
    (grad,) = torch.autograd.grad(grouped_linear(x, weight, ends).sum(), weight)
    assert grad.any() and not weight.main_grad.any()
    (dx,) = torch.autograd.grad(grouped_linear(x, weight, ends).sum(), x)
    assert dx.any() and not weight.main_grad.any()


def test_a_frozen_weight_costs_no_gradient_and_loses_none():
    x, weight, ends = grouped()
    y = grouped_linear(x, weight.detach(), ends)
    expected = grouped_linear(x, weight, ends)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])


def test_an_expert_nobody_goes_to():
    moe, x = made(moe_router_topk=1), tokens(2, 3)
    with torch.no_grad():
        moe.router.weight[1:] = 0
        moe.router.weight[0] = x.detach().sum((0, 1)) * 100
        x.copy_(x[:1, :1].sign() * moe.router.weight[0].sign())
    y, _ = moe(x)
    y.sum().backward()
    idle = [expert for expert in range(E) if not moe.experts.weight1.grad[expert].any()]
    assert len(idle) == E - 1 and not moe.experts.weight2.grad[idle].any()


def test_set_precision_runs_both_products_in_eight_bits_but_not_the_router(monkeypatch):
    moe, x = made(torch.bfloat16, hidden_size=32, moe_ffn_hidden_size=48), torch.randn(64, 32).bfloat16()
    (expected, _), logits = moe(x), moe.router(x)
    multiply, multiplied = grouped_products.scaled_grouped_product, []

    def watched(codes, inverse, weight_codes, *rest):
        multiplied.append(tuple(weight_codes.shape))
        return multiply(codes, inverse, weight_codes, *rest)

    monkeypatch.setattr(grouped_products, "scaled_grouped_product", watched)
    assert onepass.nn.set_precision(moe, "fp8") == 1
    y, _ = moe(x.requires_grad_())
    assert 20 < decibels(y.detach(), expected.detach()) < 45
    y.sum().backward()
    assert multiplied == [(E, 96, 32), (E, 32, 48), (E, 48, 32), (E, 32, 96)]  # by both weights, then by their transposes
    assert moe.router(x).equal(logits)
    assert onepass.nn.fp8_state_dict(moe) == {}  # no scale outlasts a call
    onepass.nn.set_precision(moe, None)
    assert moe(x)[0].equal(expected) and len(multiplied) == 4


def test_no_tokens():
    moe = made(moe_aux_loss_coeff=0.1)
    y, aux_loss = moe(tokens(0, 3))
    assert y.shape == (0, 3, H)
    (y.sum() + aux_loss).backward()
    assert all(not t.grad.any() for t in moe.parameters())
