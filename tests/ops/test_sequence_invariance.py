"""Under batch_invariant() what passes along a sequence (convolution, gates, states) depends on a document alone."""

import pytest
import torch
from ops.calls import backends
from ops.oracle import BF16, DEVICE, FP32
from ops.packing_ways import check_ways

import onepass

LENGTHS = (1, 7, 64, 70, 131)


def rows(*widths, dtype=FP32, lengths=LENGTHS, seed=1):
    """For each document, a tensor of each width."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(length, width, generator=generator).to(DEVICE, dtype) for width in widths] for length in lengths]


@backends
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(FP32, {}), (BF16, {}), (BF16, {"split": (14, 7, 8), "l2_norm": (7, 7, None)}), (FP32, {"activation": None})],
    ids=str,
)
def test_causal_conv1d(backend, dtype, options):
    if backend == "torch" and DEVICE == "cuda":
        pytest.skip("no host reads where documents begin there")
    C = 29
    generator = torch.Generator().manual_seed(2)
    weight, bias = (torch.randn(shape, generator=generator).to(DEVICE) for shape in ((C, 4), (C,)))

    def call(x, boundaries):
        return onepass.causal_conv1d(x, weight, bias, cu_seqlens=boundaries, backend=backend, **options)

    check_ways(call, rows(C, dtype=dtype), rows(*options.get("split", (C,)), dtype=dtype, seed=3))


@backends
@pytest.mark.parametrize("H", (3, 16))
def test_delta_gates(backend, H):
    if backend == "torch" and DEVICE == "cuda":
        pytest.skip("its formula is refused there")
    vectors = torch.linspace(-1, 1, H, device=DEVICE), torch.linspace(1, 2, H, device=DEVICE)
    check_ways(lambda a, b, _: onepass.delta_gates(a, b, *vectors, backend=backend), rows(H, H), rows(H, H, seed=3))


on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="no host reads where documents begin there")


@on_cpu
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_gated_delta_rule(dtype):
    H, K, V = 3, 8, 5
    inputs = rows(2 * K + 3 * V + 2 * 3, dtype=dtype)

    def call(x, boundaries):
        q, k, v, g, beta = x.split((K, K, H * V, H, H), -1)
        q, k = (torch.tanh(t.unflatten(-1, (1, K))) / 3 for t in (q.detach(), k.detach()))
        return onepass.gated_delta_rule(
            q + x[..., :K, None].mT, k + x[..., K : 2 * K, None].mT / 9, v.unflatten(-1, (H, V)), -g.abs() / 9, beta.tanh(),
            cu_seqlens=boundaries, backend="torch",
        ).flatten(2)  # fmt: skip

    check_ways(call, inputs, rows(H * V, dtype=dtype, seed=3))


@on_cpu
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_mamba_chunk_scan(dtype):
    H, P, N = 3, 5, 8
    vectors = {name: torch.linspace(-1, 1, H, device=DEVICE) for name in ("D", "dt_bias")}
    A = -torch.linspace(0.1, 2, H, device=DEVICE)

    def call(x, boundaries):
        x, dt, B, C = x.split((H * P, H, N, N), -1)
        B, C = (t.unflatten(-1, (1, N)) for t in (B, C))
        return onepass.mamba_chunk_scan(
            x.unflatten(-1, (H, P)), dt, A, B, C, **vectors, dt_softplus=True, cu_seqlens=boundaries, backend="torch"
        ).flatten(2)

    check_ways(call, rows(H * P + H + 2 * N, dtype=dtype), rows(H * P, dtype=dtype, seed=3))


@on_cpu
def test_chunks_give_what_the_rules_give():
    """Documents without tokens, first and last states, and gradients: those of all chunks at once, but for rounding."""
    lengths, H, K, V = (0, 70, 1, 0, 64), 2, 4, 3
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    shapes = (1, 135, 1, K), (1, 135, 1, K), (1, 135, H, V), (1, 135, H), (1, 135, H), (5, H, K, V)
    q, k, v, g, beta, states = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    leaves = [q, k, v, g, beta, states]

    def delta():
        made = onepass.gated_delta_rule(
            q, k / 4, v, -g.exp(), beta, cu_seqlens=bounds, initial_state=states, output_final_state=True, backend="torch"
        )
        return [*made, *torch.autograd.grad([y.square().sum() for y in made], leaves)]

    def scan():
        made = onepass.mamba_chunk_scan(
            v, g, -torch.ones(H).double(), q, k, dt_bias=torch.ones(H).double(), dt_softplus=True, cu_seqlens=bounds,
            initial_states=states.mT, return_final_states=True, backend="torch",
        )  # fmt: skip
        return [*made, *torch.autograd.grad([y.square().sum() for y in made], [q, k, v, g, states])]

    for rule in (delta, scan):
        expected = rule()
        with onepass.batch_invariant():
            found = rule()
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
