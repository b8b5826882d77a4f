"""Router: the module of route, and DeepSeek V3's rule for its bias."""

import pytest
import torch
from ops.oracle import DEVICE

import onepass
from onepass.nn import Router


def made(**options):
    torch.manual_seed(0)
    return Router(16, 8, 3, device=DEVICE, **options)


def tokens(dtype=torch.float32):
    return torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_it_is_route_of_logits_in_fp32(dtype):
    options = {"score": "sigmoid", "groups": (4, 2), "scale": 2.5, "aux": 0.1, "z": 0.2}
    router, x = made(expert_bias=True, dtype=dtype, **options), tokens(dtype)
    with torch.no_grad():
        router.expert_bias.copy_(torch.linspace(-1, 1, 8))
    logits = x.float() @ router.weight.float().t()
    expected = onepass.route(logits, 3, bias=router.expert_bias, **options)
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        found = router(x)
    assert all(torch.equal(*pair) for pair in zip(found[:5], expected[:5], strict=True))
    (found.weights.sum() + found.aux_loss).backward()
    assert router.weight.grad.any() and router.weight.grad.dtype is dtype


def test_the_bias_moves_towards_an_even_load():
    router = made(expert_bias=True)
    router.update_bias(torch.tensor([0, 4, 8, 4, 4, 4, 4, 4], dtype=torch.int32, device=DEVICE), rate=0.5)
    assert router.expert_bias.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE) + 1
    router = made(score="sigmoid", expert_bias=True)
    before = router(x).counts.float().std()
    for _ in range(200):
        router.update_bias(router(x).counts, rate=0.01)
    assert router(x).counts.float().std() < before / 10


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="expert_bias=True"):
        made().update_bias(torch.zeros(8))
    with pytest.raises(ValueError, match=r"counts must have shape \(8,\), but has \(7,\)"):
        made(expert_bias=True).update_bias(torch.zeros(7))
    with pytest.raises(ValueError, match="hidden_size"):
        made()(torch.zeros(3, 15))


def test_it_says_what_it_is():
    assert str(made(aux=0.1, expert_bias=True)) == ("Router(hidden_size=16, num_experts=8, k=3, expert_bias=True, aux=0.1)")
