"""What only a GPU shows of rope: real sizes, past 32 bits and a grid; that tensors are read in place; graphs, streams, memory."""

import pytest
import torch
from gpu.calls import (  # noqa: F401
    at_the_side,
    captured,
    launched,
    memory_goes_back,
    needs_60_gib,
    nobody_waits,
    other_stream,
    replays_on_any_stream,
    taken,
)
from ops.calls import equal
from torch.nn import functional as F

import onepass
import onepass.ops.attention.rope as module
from onepass.ops.attention import attention_reference
from onepass.testing.budget import judge

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
HEADS = (  # of q, of k, their width, and how much is rotated
    (32, 8, 128, 128), (12, 12, 64, 64), (71, 1, 64, 64), (40, 40, 128, 128), (16, 16, 80, 32), (32, 32, 80, 80), (24, 8, 96, 96),
    (8, 4, 256, 256), (64, 8, 256, 64), (3, 1, 10, 6), (1, 1, 2, 2), (2, 1, 4096, 4096),
)  # fmt: skip
kinds = pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))


def inputs(lead=(2, 300), HQ=32, HK=8, D=128, R=128, dtype=BF16, table=FP32, seed=0):
    """q, k, cos, sin, and the gradients of what comes of q and k."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

    q, k, dq, dk = (randn(*lead, H, D) for H in (HQ, HK) * 2)
    angles = torch.randn(lead[-1], R // 2, device="cuda", generator=generator)
    return [q, k, angles.cos().to(table), angles.sin().to(table)], [dq, dk]


def step(given, dys, **options):
    """Both results and both gradients, on leaves of the current stream."""
    q, k = (x.detach().requires_grad_() for x in given[:2])
    ys = onepass.rope(q, k, *given[2:], backend="triton", **options)
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, (q, k), dys)]


# ---- right ----


@kinds
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=("bf16", "fp16", "fp32"))
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_kind_of_heads(heads, dtype, interleaved):
    HQ, HK, D, R = heads
    for lead in ((1, 1), (3, 37), (2, 1000) if D < 4096 else (2, 9)):
        given, dys = inputs(lead, HQ, HK, D, R, dtype, table=FP32 if lead[-1] > 1 else dtype)
        cos, sin = given[2:]
        report = judge(
            lambda q, k, cos=cos, sin=sin: onepass.rope(q, k, cos, sin, interleaved=interleaved, backend="triton"),
            lambda q, k, cos=cos, sin=sin: module.rope_reference(q, k, cos, sin, interleaved=interleaved),
            dict(zip("qk", given, strict=False)), dys,
        )  # fmt: skip
        assert report, f"{lead}\n{report}"


@kinds
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_where_it_lies_makes_no_difference(heads, interleaved):
    """Heads before tokens, parts of a projection, from an odd element on, tables of their own, and those with strides."""
    HQ, HK, D, R = heads
    given, dys = inputs((3, 50), HQ, HK, D, R)
    expected = step(given, dys, interleaved=interleaved)

    def first(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def odd(x):
        return torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x)

    fused = torch.cat([*given[:2], given[1]], 2).split((HQ, HK, HK), 2)[:2]
    wide = [torch.cat([t, t], -1)[:, : R // 2] for t in given[2:]]
    each = [t.expand(3, 50, R // 2).contiguous() for t in given[2:]]
    for q, k, tables in (
        (*map(first, given[:2]), wide), (*fused, each), (*map(odd, given[:2]), map(odd, given[2:])), (*given[:2], each),
    ):  # fmt: skip
        assert equal(step([q, k, *tables], dys, interleaved=interleaved), expected)
    for other in ([first(dy) for dy in dys], [odd(dy) for dy in dys]):
        assert equal(step(given, other, interleaved=interleaved), expected)
    same = [dy[:, :, :1].expand_as(dy) for dy in dys]
    assert equal(
        step(given, same, interleaved=interleaved), step(given, [dy.contiguous() for dy in same], interleaved=interleaved)
    )


def test_attention_takes_what_comes_out():
    """And its gradients come back as they lie."""
    (q, k, cos, sin), _ = inputs((2, 256))
    v, dy = torch.randn_like(k), torch.randn(2, 32, 256, 128, device="cuda", dtype=BF16)

    def attention(rotate_heads):
        leaves = [x.detach().requires_grad_() for x in (q, k)]
        heads = [y.transpose(1, 2) for y in rotate_heads(*leaves)]
        y = F.scaled_dot_product_attention(*heads, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return torch.autograd.grad(y, leaves, dy)

    ours = attention(lambda q, k: onepass.rope(q, k, cos, sin, backend="triton"))
    for a, b in zip(ours, attention(lambda q, k: module.rope_reference(q, k, cos, sin)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


# ---- with a norm of each head ----

NORMED = (*HEADS[1:-2], (16, 8, 128, 128), (4, 1, 256, 256), (16, 2, 256, 64), (32, 8, 192, 192), (2, 1, 4096, 4096))


def normed_step(given, dys, weights, **options):
    """Both results and all four gradients."""
    leaves = [x.detach().requires_grad_() for x in (*given[:2], *weights)]
    named = {"q_weight": leaves[2], "k_weight": leaves[3]}
    ys = onepass.rope(*leaves[:2], *given[2:], **named, backend="triton", **options)
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, leaves, dys)]


@kinds
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=("bf16", "fp16", "fp32"))
@pytest.mark.parametrize("heads", NORMED, ids=str)
def test_every_kind_of_heads_normed(heads, dtype, interleaved):
    HQ, HK, D, R = heads
    for lead in ((1, 1), (3, 37), (2, 1000) if D < 4096 else (2, 9)):
        given, dys = inputs(lead, HQ, HK, D, R, dtype)
        weights = [1 + torch.randn(D, device="cuda") / 4 for _ in range(2)]
        options = {"interleaved": interleaved, "zero_centered_gamma": HK == 1}

        def call(function, cos=given[2], sin=given[3], options=options, **more):
            return lambda q, k, a, b: function(q, k, cos, sin, q_weight=a, k_weight=b, **options, **more)

        tensors = dict(zip(("q", "k", "q_weight", "k_weight"), (*given[:2], *weights), strict=True))
        report = judge(call(onepass.rope, backend="triton"), call(module.rope_reference), tensors, dys)
        assert report, f"{lead}\n{report}"


def test_normed_every_time_and_in_a_graph_and_elsewhere_the_same():
    given, dys = inputs((4, 1024), 16, 8)
    weights = [torch.randn(128, device="cuda", dtype=BF16) for _ in range(2)]
    first = normed_step(given, dys, weights)
    with nobody_waits():
        again = [normed_step(given, dys, weights) for _ in range(20)]
    assert all(equal(first, each) for each in again)
    results, graph = captured(lambda: normed_step(given, dys, weights))
    for t in results:
        t.fill_(float("nan"))
    graph.replay()
    assert equal(results, first)
    fused = torch.cat([*given[:2], given[1]], 2).split((16, 8, 8), 2)[:2]
    laid = [dy.transpose(1, 2).contiguous().transpose(1, 2) for dy in dys]
    assert equal(normed_step([*fused, *given[2:]], laid, weights), first)


def test_attention_with_norms_of_heads():
    """By our kernels and by PyTorch's attention between them."""
    cos, sin = inputs((2, 256), 16, 8)[0][2:]
    qkv, dy = (torch.randn(2, 256, n * 128, device="cuda", dtype=BF16) for n in (32, 16))
    weights = [1 + torch.randn(128, device="cuda") / 4 for _ in range(2)]

    def found(function, **more):
        leaves = [x.detach().requires_grad_() for x in (qkv, *weights)]
        y = function(leaves[0], 16, 8, cos=cos, sin=sin, q_weight=leaves[1], k_weight=leaves[2], **more)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    leaves = [x.double().requires_grad_() for x in (qkv, *weights)]
    y = attention_reference(leaves[0], 16, 8, cos=cos, sin=sin, q_weight=leaves[1], k_weight=leaves[2])
    exact = [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]
    for deterministic in (True, False):
        for got, right in zip(found(onepass.attention, deterministic=deterministic), exact, strict=True):
            assert ((got.double() - right).norm() / right.norm()).item() < 1e-2


# ---- sizes past what 32 bits and a grid hold ----


@kinds
def test_more_sequences_than_a_grid_dimension(interleaved):
    given, dys = inputs((70001, 3), 2, 1, 16, 16)
    whole = step(given, dys, interleaved=interleaved)
    for at in (slice(0, 5), slice(65530, 65540), slice(69996, 70001)):
        some = step([x[at] for x in given[:2]] + given[2:], [dy[at] for dy in dys], interleaved=interleaved)
        assert equal([t[at] for t in whole], some)


@needs_60_gib
def test_more_numbers_than_31_bits():
    S = 2**31 // (8 * 128) + 1000
    given, dys = inputs((S,), 8, 1)
    whole = step(given, dys)
    for at in (slice(0, 5), slice(S // 2, S // 2 + 5), slice(S - 5, S)):
        assert equal([t[at] for t in whole], step([t[at] for t in given], [dy[at] for dy in dys]))


@needs_60_gib
@pytest.mark.parametrize("dimension", (0, 1, 2), ids=("sequences", "tokens", "heads"))
def test_strides_past_31_bits(dimension):
    wide = torch.empty(2, 2**31 + 4096, device="cuda", dtype=BF16)
    given, dys = inputs((2, 2), 2, 2)
    rest = wide[:, : 4 * 128].unflatten(1, (2, 2, 128))
    x = rest.movedim(0, dimension)
    assert x.stride(dimension) > 2**31
    x.copy_(given[0])
    assert equal(step([x, x, *given[2:]], dys), step([x.contiguous(), x.contiguous(), *given[2:]], dys))


# ---- the same, every time and everywhere ----


@kinds
def test_nobody_waits_and_every_time_is_the_same(interleaved):
    given, dys = inputs()
    first = step(given, dys, interleaved=interleaved)
    with nobody_waits():
        again = [step(given, dys, interleaved=interleaved) for _ in range(20)]
    assert all(equal(first, each) for each in again)


def test_one_launch_forward_and_one_back():
    given, dys = inputs()
    assert launched(lambda: step(given, dys)) == ["_rope_kernel"] * 2


def test_graphs_replay():
    given, dys = inputs()
    assert replays_on_any_stream(lambda: step(given, dys))


def test_on_another_stream():
    given, dys = inputs()
    expected = step(given, dys)
    with at_the_side():
        got = step(given, dys)
    assert equal(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one():
    given, dys = inputs()
    got = step([t.to("cuda:1") for t in given], [t.to("cuda:1") for t in dys])
    assert equal([t.to("cuda:0") for t in got], step(given, dys))


def test_compiled_by_inductor():
    given, dys = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, cos, sin: onepass.rope(q, k, cos, sin, backend="triton"), fullgraph=True)
    q, k = (x.detach().requires_grad_() for x in given[:2])
    ys = compiled(q, k, *given[2:])
    assert equal([*(y.detach() for y in ys), *torch.autograd.grad(ys, (q, k), dys)], step(given, dys))


def test_memory_is_the_results():
    given, dys = inputs((4, 1024))
    q, k = (x.detach().requires_grad_() for x in given[:2])
    size = sum(2 * x.numel() for x in (q, k))
    step(given, dys)
    ahead, ys = taken(lambda: onepass.rope(q, k, *given[2:], backend="triton"))
    back, _ = taken(lambda: torch.autograd.grad(ys, (q, k), dys))
    assert size <= ahead <= size + 2**21  # an allocator's blocks
    assert size <= back <= size + 2**21
