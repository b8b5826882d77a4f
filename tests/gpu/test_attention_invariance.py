"""Under batch_invariant() the real tiles give a document the bits that it has alone, packed, in a batch and padded."""

import importlib

import pytest
import torch
from gpu.calls import memory_goes_back  # noqa: F401
from ops.oracle import BF16, FP16
from ops.packing_ways import check_ways

import onepass
from onepass.ops.attention.choice import ONEPASS, forward_kernels

module = importlib.import_module("onepass.ops.attention.attention")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (1, 7, 64, 100, 500, 2049)
OPTIONS = [
    {},
    {"window": 100},
    {"window": 1000},
    {"softcap": 20.0},
    {"sinks": True},
    {"window": 130, "sinks": True, "softcap": 9.0},
]
SIZES = [(8, 2, 64), (4, 4, 128), (2, 1, 256)]  # heads, groups and D


def documents(columns, dtype=BF16, seed=3):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [[torch.randn(length, columns, generator=generator, device="cuda").to(dtype)] for length in LENGTHS]


def tables(R):
    angles = torch.outer(torch.arange(4096.0, device="cuda"), 1e4 ** (-torch.arange(0, R, 2, device="cuda") / R))
    return angles.cos(), angles.sin()


def check(heads, groups, D, dtype=BF16, padded=True, **options):
    cos, sin = tables(D)

    def call(qkv, boundaries):
        longest = cos.shape[0] if boundaries is not None else qkv.shape[1]
        given = {"cos": cos[:longest], "sin": sin[:longest], "cu_seqlens": boundaries, "deterministic": False}
        return onepass.attention(qkv, heads, groups, overwrite=True, **given, **options)

    columns = (heads + 2 * groups + heads * options.get("gated", False)) * D
    check_ways(call, documents(columns, dtype), documents(heads * D, dtype, 5), padded)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "plain")
@pytest.mark.parametrize(("heads", "groups", "D"), SIZES)
def test_documents_have_the_bits_that_they_have_alone(heads, groups, D, options):
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 2, heads, device="cuda")
    check(heads, groups, D, **options)


@pytest.mark.parametrize(("heads", "groups", "D"), SIZES)
@pytest.mark.parametrize("options", ({"gated": True}, {"by_group": True}, {"norm": True}), ids=str)
def test_gates_groups_and_norms(heads, groups, D, options):
    if options.get("norm"):
        options = {name: torch.linspace(0.5, 2, D, device="cuda") for name in ("q_weight", "k_weight")}
    check(heads, groups, D, **options)


@pytest.mark.parametrize(("heads", "groups", "D"), SIZES)
def test_what_is_not_causal(heads, groups, D):
    check(heads, groups, D, FP16, padded=False, causal=False)
    check(heads, groups, D, padded=False, causal=False, window=(130, 20))


def test_latent_attention():
    heads, nope, rope, V, (cos, sin) = 4, 128, 64, 128, tables(64)

    def call(x, boundaries):
        q, kv, k_rope = x.split((heads * (nope + rope), heads * (nope + V), rope), -1)
        q, kv = (t.unflatten(-1, (heads, -1)) for t in (q, kv))
        longest = cos.shape[0] if boundaries is not None else x.shape[1]
        given = {"cos": cos[:longest], "sin": sin[:longest], "cu_seqlens": boundaries, "deterministic": False}
        return onepass.latent_attention(q, kv, k_rope, **given).flatten(2)

    check_ways(call, documents(heads * (2 * nope + rope + V) + rope), documents(heads * V, seed=5))


def test_fp32_by_tiles_of_a_batch():
    """Without documents, which no host reads there."""
    qkv, dy = (torch.randn(3, 300, columns, device="cuda") for columns in (6 * 64, 4 * 64))
    results = []
    with onepass.batch_invariant():
        for rows, tokens in ((slice(0, 3), 300), (slice(1, 2), 300), (slice(1, 3), 130)):
            leaf = qkv[rows, :tokens].clone().requires_grad_()
            y = onepass.attention(leaf * 1, 4, 1)
            within = dy[rows, :tokens].clone()
            within[:, 130:] = 0
            results.append((y[-2 if rows.stop == 3 else 0, :130], torch.autograd.grad(y, leaf, within)[0]))
    (y, dqkv), (one, done), (short, dshort) = results
    assert torch.equal(y, one) and torch.equal(one, short)
    assert torch.equal(dqkv[1], done[0]) and torch.equal(done[0, :130], dshort[0])


def test_convolutions_and_gates():
    C, H = 4096 + 64, 48
    weight, bias = torch.randn(C, 4, device="cuda"), torch.randn(C, device="cuda")
    split = {"split": (1024, 1024, C - 2048), "l2_norm": (128, 128, None)}
    call = lambda x, bounds: onepass.causal_conv1d(x, weight, bias, cu_seqlens=bounds, **split)  # noqa: E731
    dys = [[*dy.split(split["split"], -1)] for (dy,) in documents(C, seed=5)]
    check_ways(call, documents(C), dys)
    vectors = torch.linspace(-1, 1, H, device="cuda"), torch.linspace(1, 2, H, device="cuda")
    both = lambda seed: [[a, b] for (a,), (b,) in zip(documents(H, seed=seed), documents(H, seed=seed + 1), strict=True)]  # noqa: E731
    check_ways(lambda a, b, _: onepass.delta_gates(a, b, *vectors), both(1), both(7))


def test_the_fastest_kernels_of_others_differ_and_stay_out():
    qkv = torch.empty(1, 4096, 12 * 128, dtype=BF16, device="cuda")
    options = module.make_options(module.AttentionCall(qkv, 8, 2), in_order=False)
    with onepass.batch_invariant():
        assert forward_kernels(qkv, 128, options) == ONEPASS
        assert "cuDNN" not in onepass.explain(onepass.attention, qkv, 8, 2, deterministic=False).variant
