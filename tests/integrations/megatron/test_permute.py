"""moe_permute_fusion without Transformer Engine, beside Megatron's unfused functions."""

from contextlib import contextmanager

import pytest
import torch
from integrations.megatron.test_megatron import KINDS, config_of, model_of, step

from onepass.integrations import megatron

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("on_cpu")]

T, E, H, CAPACITY = 23, 6, 40, 5
MAPS = {  # which tokens have a row of which expert
    "top 2": lambda scores: scores >= scores.topk(2, 1).values[:, -1:],
    "any number": lambda scores: scores > 0.7,
    "padded to capacity": lambda scores: scores >= scores.topk(CAPACITY, 0).values[-1:],
    "no rows": lambda scores: scores > 2,
    "one token": lambda scores: scores[:1] > 0.3,
    "no tokens": lambda scores: scores[:0] > 0.3,
}
FUSED = (False, True)
TYPES = (True, torch.bfloat16), (False, torch.float64)


@contextmanager
def installed():
    seams = megatron.install()
    try:
        yield seams
    finally:
        seams.undo()


def drawn(name):
    scores = torch.rand(T, E, generator=torch.Generator().manual_seed(2))
    return MAPS[name](scores)


def numbers(*shape, dtype=torch.float64, seed=0):
    """Return numbers that 16 bits have."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return made.to(dtype).requires_grad_()


def weights_of(taken, dtype):
    return numbers(*taken.shape, dtype=torch.promote_types(dtype, torch.float32), seed=1)


def backward(results, inputs):
    """Return results, and the gradients of inputs for incoming ones that are the same in each call."""
    incoming = [numbers(*each.shape, dtype=each.dtype, seed=3).detach() for each in results]
    return [*results, *torch.autograd.grad(results, inputs, incoming, allow_unused=True)]


def permuted(fused, taken, with_probs, padded=False, dtype=torch.float64):
    from megatron.core.transformer.moe.moe_utils import permute

    x, probs = numbers(taken.shape[0], H, dtype=dtype), weights_of(taken, dtype)
    with installed():
        rows, weights, row_map, pads, counts = permute(
            x, taken, probs if with_probs else None, int(taken.sum()), fused=fused, drop_and_pad=padded
        )
    assert pads is None and counts is None and isinstance(row_map, torch.Tensor)
    results = [rows, weights] if with_probs else [rows]
    return backward(results, [x, probs] if with_probs else [x])


def unpermuted(fused, taken, with_probs, padded=False, dtype=torch.float64):
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    rows, probs = numbers(int(taken.sum()), H, dtype=dtype), weights_of(taken, dtype)
    x = torch.zeros(taken.shape[0], H)
    options = {"probs": probs if with_probs else None, "routing_map": taken, "drop_and_pad": padded}
    with installed():
        row_map = permute(x, taken, num_out_tokens=int(taken.sum()), fused=fused, drop_and_pad=padded)[2]
        y = unpermute(rows, row_map, x.shape, fused=fused, **options)
    assert y.dtype is dtype
    return backward([y], [rows, probs] if with_probs else [rows])


@pytest.mark.parametrize("with_probs", [False, True], ids=["rows", "probs"])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("function", [permuted, unpermuted])
def test_as_stock(function, name, with_probs):
    taken = drawn(name)
    found, expected = (function(fused, taken, with_probs, "padded" in name and not fused) for fused in FUSED[::-1])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("with_probs", [False, True], ids=["rows", "probs"])
@pytest.mark.parametrize("function", [permuted, unpermuted])
def test_sixteen_bits_are_rounded_once(function, with_probs):
    """By kernels. Stock's sums round after each row."""
    pytest.importorskip("triton")
    found, exact = (function(fused, drawn("any number"), with_probs, dtype=dtype) for fused, dtype in TYPES)
    for ours, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("sizes", [[4, 0, 7, 1, 3, 8], [0, 0, 0, 0, 0, 0], [0, 23, 0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("with_probs", [False, True], ids=["rows", "probs"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_chunks_as_stock(sizes, with_probs, dtype):
    from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

    sizes, order, found = torch.tensor(sizes), torch.arange(6).view(2, 3).T.ravel(), []
    for fused in FUSED:
        x, probs = numbers(int(sizes.sum()), H, dtype=dtype), numbers(int(sizes.sum()), seed=1)
        with installed():
            y, weights = sort_chunks_by_idxs(x, sizes, order, probs if with_probs else None, fused=fused)
        results, inputs = ([y, weights], [x, probs]) if with_probs else ([y], [x])
        found.append(backward(results, inputs))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("number", [None, -1])
def test_the_number_of_rows_is_asked_for(number):
    from megatron.core.transformer.moe.moe_utils import permute

    with installed(), pytest.raises(ValueError, match=r"num_out_tokens must be the number of .* that are set, but is"):
        permute(torch.zeros(T, H), drawn("top 2"), num_out_tokens=number, fused=True)


def test_the_number_of_rows_may_be_a_tensor():
    """As with capacities, where a count comes from the device."""
    from megatron.core.transformer.moe.moe_utils import permute

    taken = drawn("top 2")
    with installed():
        rows = permute(torch.zeros(T, H), taken, num_out_tokens=taken.sum(), fused=True)[0]
    assert rows.shape == (2 * T, H)


def test_by_the_configs_name(by_formula):
    """A configuration that asks for it is refused before install, and after undo."""
    options = KINDS["experts"] | {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_grouped_gemm": True}
    config = config_of(**options)
    stock = step(model_of(config, megatron.gpt_layer_spec(config)))
    with installed() as seams:
        fused = config_of(**options, moe_permute_fusion=True)
        assert step(model_of(fused, megatron.gpt_layer_spec(fused))) == pytest.approx(stock, rel=2e-6)
        assert "moe_utils.fused_permute: onepass" in str(seams)
    with pytest.raises(ValueError, match="fused permutation is not available"):
        config_of(**options, moe_permute_fusion=True)


def test_transformer_engines_are_left(monkeypatch):
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(moe_utils, "fused_permute", len)
    with installed() as seams:
        assert "left: moe_permute_fusion: Transformer Engine's is there" in str(seams)
        assert moe_utils.fused_permute is len and moe_utils.fused_unpermute is None
