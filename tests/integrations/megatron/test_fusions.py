"""Functions of megatron.core.fusions beside ours, with each of their arguments."""

import pytest
import torch

from onepass.integrations.megatron import fusions as ours

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("on_cpu", "by_formula")]

X, BIAS, WEIGHTS = (5, 2, 16), (16,), (5, 2, 1)
CALLS = {
    "bias_swiglu_impl": ("fused_bias_swiglu", "bias_swiglu_impl", (X, BIAS), {}),
    "bias_swiglu_impl without": ("fused_bias_swiglu", "bias_swiglu_impl", (X, None), {}),
    "weighted_bias_swiglu_impl": ("fused_bias_swiglu", "weighted_bias_swiglu_impl", ((10, 16), None, (10, 1)), {}),
    "bias_gelu_impl": ("fused_bias_gelu", "bias_gelu_impl", (X, None), {}),
    "bias_geglu_impl": ("fused_bias_geglu", "bias_geglu_impl", (X, BIAS), {}),
    "quick_geglu": (
        "fused_bias_geglu", "weighted_bias_quick_geglu_impl", ((10, 16), None, (10, 1)),
        {"linear_offset": 1.0, "clamp_value": 0.7},
    ),
    "squared_relu": ("fused_weighted_squared_relu", "weighted_squared_relu_impl", ((10, 16), (10, 1)), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_as_stock(name):
    module, function, shapes, options = CALLS[name]
    theirs = getattr(__import__(f"megatron.core.fusions.{module}", fromlist=["x"]), function)
    if function == "bias_gelu_impl":
        shapes = (X, BIAS)
    tensors = [None if shape is None else torch.randn(shape) for shape in shapes]
    found = []
    for call in (theirs, getattr(ours, function)):
        own = [None if t is None else t.clone().requires_grad_() for t in tensors]
        y = call(*own, **options)
        y.square().sum().backward()
        found.append([y, *(t.grad for t in own if t is not None)])
    for stock, our in zip(*found, strict=True):
        torch.testing.assert_close(our.reshape(stock.shape), stock, rtol=2e-4, atol=2e-5)


def test_fp8_store_and_clamp_after_the_bias():
    x, bias = torch.randn(X), torch.randn(BIAS)
    y = ours.bias_swiglu_impl(x, bias, clamp_value=0.5)
    gate, linear = (x + bias).chunk(2, -1)
    torch.testing.assert_close(y, torch.nn.functional.silu(gate.clamp(max=0.5)) * linear.clamp(-0.5, 0.5))
    x.requires_grad_()
    ours.bias_swiglu_impl(x, bias, fp8_input_store=True).sum().backward()
    assert x.grad.isfinite().all()
    with pytest.raises(NotImplementedError, match="activation_func_fp8_input_store"):
        ours.bias_swiglu_impl(x, bias, True, True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [8, 4])
def test_rope(interleaved, turned):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    t, angles = torch.randn(6, 2, 3, 8), torch.randn(6, turned // 2)
    freqs = (torch.stack([angles, angles], -1).flatten(1) if interleaved else torch.cat([angles, angles], -1))[:, None, None]
    stock = _apply_rotary_pos_emb_bshd(t, freqs, interleaved)
    torch.testing.assert_close(ours.fused_apply_rotary_pos_emb(t, freqs, interleaved=interleaved), stock)
    packed, bounds = t[:, 0], torch.tensor([0, 2, 6])
    whole = torch.cat([_apply_rotary_pos_emb_bshd(p[:, None], freqs[: len(p)], interleaved) for p in packed.split([2, 4])])
    torch.testing.assert_close(
        ours.fused_apply_rotary_pos_emb_thd(packed, bounds, freqs[:4], interleaved=interleaved), whole[:, 0]
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_bias_dropout_add(training, bias):
    from megatron.core.fusions.fused_bias_dropout import _bias_dropout_add_func

    x, residual, b = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8) if bias else None
    stock = _bias_dropout_add_func((x.clone(), b), residual, 0.0, training)
    torch.testing.assert_close(ours.get_bias_dropout_add(training, True)((x, b), residual, 0.0), stock)


def test_rope_lies_in_memory_as_asked():
    y = ours.fused_apply_rotary_pos_emb(torch.randn(6, 2, 1, 4), torch.randn(6, 1, 1, 4), transpose_output_memory=True)
    assert y.transpose(0, 1).is_contiguous()


def test_what_rope_refuses():
    with pytest.raises(NotImplementedError, match="start_positions"):
        ours.fused_apply_rotary_pos_emb(torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4), start_positions=True)
