"""What only a GPU shows of linear_cross_entropy as a policy's head: cuBLAS's bits, memory, and counts that are fetched."""

import pytest
import torch
from gpu.calls import other_stream  # noqa: F401

import onepass

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
BF16 = torch.bfloat16
SHAPES = [(8192, 4096, 151936), (16384, 2048, 248320), (5000, 768, 50257), (3001, 1024, 32000)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def policy(N, D, V, dtype=BF16):
    """hidden, weight and labels, of which half are ignored."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(N, D, device="cuda", generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, D, device="cuda", generator=generator) / D**0.5).to(dtype).requires_grad_()
    labels = torch.randint(V, (N,), device="cuda", generator=generator)
    labels[torch.rand(N, device="cuda", generator=generator) < 0.5] = -100
    return hidden, weight, labels


@shapes
@pytest.mark.parametrize("budget", (None, 256 << 20), ids=str)
def test_a_ratio_of_policies_starts_at_1(shape, budget):
    """A budget of 256 MiB makes logits again, in blocks; none lets them wait."""
    inputs = policy(*shape)
    options = {"reduction": "none", "chunk_bytes": budget}
    for asked in (("log_prob",), ("log_prob", "entropy")):
        with torch.no_grad():
            old = onepass.linear_cross_entropy(*inputs, return_stats=asked, **options)[1].log_prob
        new = onepass.linear_cross_entropy(*inputs, return_stats=("log_prob", "entropy"), **options)[1].log_prob
        assert new.requires_grad and torch.equal(old, new)


@shapes
def test_a_pass_without_gradients_takes_half_a_gib(shape):
    """An odd vocabulary's copy of the weight comes on top."""
    hidden, weight, labels = policy(*shape)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        onepass.linear_cross_entropy(hidden, weight, labels, reduction="none", return_stats=("log_prob", "entropy"))
    copy = weight.numel() * 2 if weight.shape[0] % 8 else 0
    assert torch.cuda.max_memory_allocated() - before <= (512 << 20) + 1.01 * copy
