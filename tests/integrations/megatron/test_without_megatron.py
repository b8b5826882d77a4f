"""Functions that install() puts in place, where megatron-core is not installed: what Megatron's code after them relies on."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from onepass.integrations.megatron import fusions
from onepass.integrations.megatron.norms import FusedLayerNorm
from onepass.integrations.megatron.wgrad import drain_embedding_wgrad_compute

S, B, HEADS, D = 5, 2, 3, 8


def sliced(dtype=torch.float32):
    """Keys within linear_qkv's output ``[s, b, heads * (q, k, v)]``."""
    return torch.randn(S, B, HEADS, 3 * D).to(dtype)[..., D : 2 * D]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_attention_can_view_what_rope_turned(backend, dtype):
    """DotProductAttention does ``key.view(s, b * heads, -1)``."""
    if backend == "triton":
        pytest.importorskip("triton")
    from onepass import use_backend

    keys = sliced(dtype).requires_grad_()
    angles = torch.randn(S, D // 2)
    freqs = torch.cat([angles, angles], -1)[:, None, None]
    with use_backend(backend):
        turned = fusions.fused_apply_rotary_pos_emb(keys, freqs)
        transposed = fusions.fused_apply_rotary_pos_emb(keys, freqs, transpose_output_memory=True)
        (grad,) = torch.autograd.grad(turned.view(S, B * HEADS, D).square().sum(), keys)
    assert turned.dtype is dtype and turned.is_contiguous() and transposed.transpose(0, 1).is_contiguous()
    k1, k2 = keys.detach().double().chunk(2, -1)
    cos, sin = angles.double().cos()[:, None, None], angles.double().sin()[:, None, None]
    expected = torch.cat([k1 * cos - k2 * sin, k2 * cos + k1 * sin], -1)
    far = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(turned.double(), expected, **far)
    torch.testing.assert_close(transposed, turned)
    torch.testing.assert_close(grad.double(), 2 * keys.detach().double(), **far)  # a rotation keeps lengths


@pytest.mark.parametrize("name", ["swiglu", "geglu", "quick_geglu", "gelu", "squared_relu", "dropout"])
def test_results_are_contiguous_and_of_the_inputs_type(name, by_formula):
    """Also where token weights are fp32; dropout's result has the residual's type."""
    x, bias, tokens = (torch.randn(shape).bfloat16() for shape in ((S, B, 16), (16,), (S * B, 16)))
    weights = torch.rand(S * B, 1)
    call = {
        "swiglu": lambda: fusions.bias_swiglu_impl(x, bias),
        "geglu": lambda: fusions.bias_geglu_impl(x, bias),
        "gelu": lambda: fusions.bias_gelu_impl(x, bias),
        "quick_geglu": lambda: fusions.weighted_bias_quick_geglu_impl(tokens, None, weights),
        "squared_relu": lambda: fusions.weighted_squared_relu_impl(tokens, weights),
        "dropout": lambda: fusions.get_bias_dropout_add(True, True)((x, bias), x.float(), 0.0),
    }
    y = call[name]()
    assert y.is_contiguous() and y.dtype is (torch.float32 if name == "dropout" else torch.bfloat16)


def test_the_loss_is_fp32_of_labels_shape(by_formula):
    logits, labels = torch.randn(S, B, 16).bfloat16().requires_grad_(), torch.randint(16, (S, B))
    loss = fusions.fused_vocab_parallel_cross_entropy(logits, labels, None)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view(S, B))
    loss.sum().backward()
    assert loss.is_contiguous() and logits.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("persist", [False, True])
def test_norms_are_memory_efficient_whether_persistent_or_not(persist, by_formula):
    config = SimpleNamespace(
        normalization="LayerNorm", use_cpu_initialization=True, params_dtype=torch.float32, layernorm_zero_centered_gamma=False,
        memory_efficient_layer_norm=True, persist_layer_norm=persist, sequence_parallel=True,
    )  # fmt: skip
    norm = FusedLayerNorm(config, 16, 1e-5, persist, False, "LayerNorm")
    x = torch.randn(S, B, 16)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (16,)))
    assert norm.memory_efficient and norm.weight.sequence_parallel and norm.bias.sequence_parallel


@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_drain_empties_its_buffers(microbatches):
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    weight.main_grad = torch.zeros(6, 4)
    x, dy = ([torch.randn(S, B, size) for _ in range(microbatches)] for size in (4, 6))
    expected = sum(torch.einsum("sbo,sbi->oi", b, a) for a, b in zip(x, dy, strict=True))
    drain_embedding_wgrad_compute(SimpleNamespace(sequence_parallel=True), x, dy, weight, None)
    torch.testing.assert_close(weight.main_grad, expected)
    assert not x and not dy
