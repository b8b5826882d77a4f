"""Functions that install() puts in place, where megatron-core is not installed: what Megatron's code after them relies on."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from onepass.integrations.megatron import fusions, permute
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


def test_a_bias_may_have_the_shape_of_x(by_formula):
    """Megatron-LM's trainer warms bias, dropout and residual up with one."""
    x, residual = torch.randn(S, B, D), torch.randn(S, B, D, requires_grad=True)
    bias = torch.randn(D).expand_as(x).requires_grad_()
    y = fusions.bias_dropout_add((x, bias), residual, 0.0, True)
    torch.testing.assert_close(y, x + bias + residual)
    for gradient in torch.autograd.grad(y.sum(), (bias, residual)):
        assert gradient.shape == x.shape and (gradient == 1).all()


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["formula", "kernels"])
def test_permuted_there_and_back(dtype):
    """Each token's row, times the sum of its experts' weights, whichever function multiplies by them."""
    if dtype is torch.float32:
        pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    taken = torch.rand(23, 6, generator=generator) > 0.6
    x, probs, dy = (torch.randn(23, n, generator=generator, dtype=torch.float64) for n in (40, 6, 40))
    shape, count = x.shape, int(taken.sum())
    exact = (probs * taken).sum(1, keepdim=True)
    expected = [x * exact, dy * exact, (dy * x).sum(1, keepdim=True) * taken]
    given = [each.to(dtype).requires_grad_() for each in (x, probs)]
    rows, weights, row_map = permute.fused_permute_with_probs(*given, taken, count)
    before = permute.fused_unpermute(rows * weights.unsqueeze(-1), row_map, restore_shape=shape)
    rows, row_map = permute.fused_permute(given[0], taken, count)
    after = permute.fused_unpermute(rows, row_map, given[1], shape)
    for y in (before, after):
        found = [y, *torch.autograd.grad(y, given, dy.to(dtype))]
        torch.testing.assert_close([each.double() for each in found], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["formula", "kernels"])
def test_chunks_change_places(dtype):
    sizes, order = torch.tensor([4, 0, 7, 1, 3]), torch.tensor([2, 4, 1, 0, 3])
    x, probs = torch.randn(15, 40).to(dtype).requires_grad_(), torch.rand(15)
    y, weights = permute.fused_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    rows = torch.cat([torch.arange(15).split(sizes.tolist())[chunk] for chunk in order.tolist()])
    assert torch.equal(y, x[rows]) and torch.equal(weights, probs[rows])
    (dx,) = torch.autograd.grad(y, x, y.detach())
    assert torch.equal(dx, x)


def test_permutations_compile():
    taken = torch.rand(9, 4, generator=torch.Generator().manual_seed(0)) > 0.5
    count, order = int(taken.sum()), torch.tensor([1, 0])
    sizes = torch.tensor([2, count - 2])

    def there_and_back(x, probs):
        rows, weights, row_map = permute.fused_permute_with_probs(x, probs, taken, count)
        moved = permute.fused_sort_chunks_by_index(rows, sizes, order)
        return permute.fused_unpermute(rows * weights[:, None], row_map, restore_shape=x.shape), moved

    given, found = [torch.randn(9, n).requires_grad_() for n in (8, 4)], []
    for function in (there_and_back, torch.compile(there_and_back, backend="aot_eager", fullgraph=True)):
        y, moved = function(*given)
        found.append([y, moved, *torch.autograd.grad(y.square().sum() + moved.sum(), given)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
