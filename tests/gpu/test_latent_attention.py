"""What only a GPU shows of latent_attention: real sizes and tiles, cuDNN's kernels, the same bits every time, graphs."""

import importlib

import pytest
import torch
from gpu.calls import captured, deterministic_algorithms, memory_goes_back, nobody_waits, other_stream  # noqa: F401
from ops.calls import equal, gradients, relative
from ops.latent_oracle import BF16, FP16, Case, judge_case, packed

import onepass
from onepass.ops.attention.by_cudnn import has_cudnn

module = importlib.import_module("onepass.ops.attention.latent_attention")

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
SIZES = ((128, 64, 128), (192, 64, 256), (64, 32, 64), (64, 64, 128), (10, 6, 80), (24, 8, 16), (48, 16, 32), (64, 16, 16))


def inputs(B=2, S=2048, heads=16, nope=128, rope=64, V=128, dtype=BF16):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (heads, nope + rope), (heads, nope + V), (rope,)
    made = [torch.randn(B, S, *s, device="cuda", dtype=dtype, generator=generator).requires_grad_() for s in shapes]
    angles = torch.randn(S, rope // 2, device="cuda", generator=generator)
    return made, {"cos": angles.cos(), "sin": angles.sin(), "interleaved": True}


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("S", (1, 63, 65, 129, 257, 1000))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_kind_of_heads_and_ends(sizes, S, dtype):
    nope, rope, V = sizes
    case = Case(S=S, heads=5, nope=nope, rope=rope, V=V, dtype=dtype, interleaved=S % 2 == 0, rotates=S != 63, small=False)
    report = judge_case(module, case)
    assert report, report


@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_documents(sizes):
    nope, rope, V = sizes
    report = judge_case(module, packed((300, 1, 0, 129, 64, 700, 513), nope=nope, rope=rope, V=V, small=False))
    assert report, report


@pytest.mark.parametrize("S", (130, 512, 2048, 2051))
@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
def test_cudnn_is_as_near(sizes, S):
    nope, rope, V = sizes
    made, options = inputs(S=S, nope=nope, rope=rope, V=V)
    if not has_cudnn(made[0], newest=10):
        pytest.skip("no cuDNN attention here")
    assert "cuDNN" in str(onepass.explain(onepass.latent_attention, *made, **options, deterministic=False))
    ours, theirs = (
        gradients(lambda *ts, how=how: onepass.latent_attention(*ts, **options, deterministic=how), made) for how in (True, False)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert relative(other, one) < 1e-2


def test_the_same_bits_every_time_and_alone():
    made, options = inputs()

    def step(*ts):
        return onepass.latent_attention(*ts, **options)

    whole = gradients(step, made)
    assert equal(gradients(step, made), whole)
    with deterministic_algorithms():
        assert equal(gradients(lambda *ts: onepass.latent_attention(*ts, **options, deterministic=False), made), whole)
    y = step(*(t[1:] for t in made))
    assert y.equal(whole[0][1:])


@pytest.mark.parametrize("deterministic", (True, False))
def test_nothing_waits_and_graphs_replay(deterministic):
    made, options = inputs()
    dy = torch.randn(2, 2048, 16, 128, device="cuda", dtype=BF16)

    def step():
        leaves = [t.detach().requires_grad_() for t in made]
        y = onepass.latent_attention(*leaves, **options, deterministic=deterministic)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    expected = step()
    with nobody_waits():
        step()
    found, graph = captured(step)
    graph.replay()
    for one, other in zip(found, expected, strict=True):
        assert one.equal(other) if deterministic else relative(one, other) < 1e-2
