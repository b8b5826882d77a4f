"""What rope is, and how it behaves under autograd, the compiler and whatever else people do to an op."""

import math

import pytest
import torch
from ops.calls import backends, equal, gradients, incoming, needs_triton
from ops.oracle import BF16, DEVICE, FP32
from ops.rope_oracle import heads_laid_out, judge_case, real_cases, small_cases, small_tiles

import onepass
import onepass.ops.attention.rope as module
from onepass.ops.attention import rope_kernels as kernels
from onepass.testing.poison import poisoned, saved_tensors

kinds = pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))


def tensors(lead=(2, 5), HQ=4, HK=2, D=12, R=8, dtype=FP32):
    """q and k, which ask for a gradient, and tables for all sequences alike."""
    q, k = (torch.randn(*lead, H, D, device=DEVICE, dtype=dtype, requires_grad=True) for H in (HQ, HK))
    angles = torch.randn(lead[-1], R // 2, device=DEVICE)
    return q, k, angles.cos(), angles.sin()


def op(cos, sin, **options):
    return lambda q, k: onepass.rope(q, k, cos, sin, **options)


def asked_gradients(function, inputs):
    """`gradients`, through the outputs that have some."""
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    ys = function(*leaves)
    asked = [(y, incoming(y, i)) for i, y in enumerate(ys) if y.requires_grad]
    torch.autograd.backward(*zip(*asked, strict=True))
    return [*(y.detach() for y in ys), *(t.grad for t in leaves if t.requires_grad)]


# ---- what it computes ----


@backends
@kinds
def test_the_formula_by_hand(interleaved, backend):
    q, k, cos, sin = tensors()
    got = onepass.rope(q, k, cos, sin, interleaved=interleaved, backend=backend)
    for x, y in zip((q, k), got, strict=True):
        for b, s, h in ((0, 0, 0), (1, 4, 1)):
            before, after = x[b, s, h].tolist(), y[b, s, h].tolist()
            expected = before[:]
            for i in range(4):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
                c, d = cos[s, i].item(), sin[s, i].item()
                expected[first] = before[first] * c - before[second] * d
                expected[second] = before[second] * c + before[first] * d
            assert after == pytest.approx(expected, rel=1e-6, abs=1e-6)


@backends
def test_what_models_write(backend):
    """Halves with tables that have each number twice; neighbours as complex numbers; positions of each token's own."""
    q, k, cos, sin = tensors((2, 6), D=8)
    twice = [torch.cat([t, t], -1)[:, None] for t in (cos, sin)]

    def written(x):
        first, second = x.chunk(2, -1)
        return x * twice[0] + torch.cat([-second, first], -1) * twice[1]

    for y, x in zip(op(cos, sin, backend=backend)(q, k), (q, k), strict=True):
        torch.testing.assert_close(y, written(x))
    turns = torch.complex(cos, sin)[:, None]
    for y, x in zip(op(cos, sin, interleaved=True, backend=backend)(q, k), (q, k), strict=True):
        torch.testing.assert_close(y, torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2))
    positions = torch.randint(6, (2, 6), device=DEVICE)
    got = op(cos[positions], sin[positions], backend=backend)(q, k)
    for b in range(2):
        expected = op(cos[positions[b]], sin[positions[b]], backend=backend)(q[b], k[b])
        assert equal([y[b] for y in got], expected)


@backends
@pytest.mark.parametrize("case", small_cases() + real_cases(), ids=str)
def test_within_the_budget(case, backend):
    report = judge_case(module, case, backend)
    assert report, report


@backends
@kinds
def test_nan_and_infinities_stay_in_their_pairs(interleaved, backend):
    q, k, cos, sin = (t.detach() for t in tensors(D=12, R=8))
    for value in (math.nan, math.inf):
        q[1, 2, 3, 1] = value
        y, other = onepass.rope(q, k, cos, sin, interleaved=interleaved, backend=backend)
        where = (~y.isfinite()).nonzero().tolist()
        assert where == [[1, 2, 3, i] for i in ((0, 1) if interleaved else (1, 5))]
        assert other.isfinite().all()


@backends
@pytest.mark.parametrize(
    ("q_shape", "HK"), [((0, 3, 2, 8), 2), ((2, 0, 2, 8), 2), ((2, 3, 0, 8), 2), ((2, 3, 2, 8), 0), ((2, 3, 0, 8), 0)]
)
def test_nothing_to_do_launches_nothing(q_shape, HK, backend, launched):
    q = torch.randn(q_shape, device=DEVICE, requires_grad=True)
    k = torch.randn(*q_shape[:2], HK, 8, device=DEVICE, requires_grad=True)
    cos = torch.ones(q_shape[1], 4, device=DEVICE)
    ys = gradients(op(cos, cos, backend=backend), (q, k))
    assert [y.shape for y in ys] == [q.shape, k.shape] * 2
    some = bool(q.numel() or k.numel()) and backend == "triton"
    assert len(launched) == (2 if some else 0)


# ---- where it is read ----


@needs_triton
@kinds
@pytest.mark.parametrize("layout", ("contiguous", "fused", "heads first", "one head", "sliced", "unaligned"))
@pytest.mark.parametrize("tables", ("for all", "each"))
def test_tensors_are_read_where_they_lie(layout, tables, interleaved, launched):
    q, k, cos, sin = (t.detach() for t in tensors((3, 5)))
    cos, sin = (t.expand(3, 5, 4).contiguous() if tables == "each" else t for t in (cos, sin))
    laid = [heads_laid_out(x, layout) for x in (q, k)]
    with poisoned() as allocations:
        got = op(cos, sin, interleaved=interleaved, backend="triton")(*laid)
    assert [args[:4] for args in launched] == [(cos, sin, *laid)]
    assert [size for _, size, _ in allocations.made if size] == [4 * x.numel() for x in (q, k)]
    assert equal(got, op(cos, sin, interleaved=interleaved, backend="triton")(*(x.contiguous() for x in laid)))
    assert all(y.is_contiguous() for y in got)


@needs_triton
def test_gradients_are_read_where_they_lie_and_come_back_contiguous(launched):
    q, k, cos, sin = tensors((3, 5))
    ys = op(cos, sin, backend="triton")(q, k)
    dys = [heads_laid_out(torch.randn_like(y), "heads first") for y in ys]
    launched.clear()
    got = torch.autograd.grad(ys, (q, k), dys)
    (args,) = launched
    assert [t.data_ptr() for t in args[:4]] == [t.data_ptr() for t in (cos, sin, *dys)]
    assert all(dx.is_contiguous() for dx in got)


@needs_triton
def test_only_what_is_not_in_rows_is_copied(launched):
    q, k, cos, sin = (t.detach() for t in tensors((3, 5)))
    strided = heads_laid_out(q, "strided")
    for inputs in ((strided, k, cos, sin), (q, k, heads_laid_out(cos, "strided"), sin)):
        launched.clear()
        expected = onepass.rope(q, k, cos, sin, backend="torch")
        torch.testing.assert_close(onepass.rope(*inputs, backend="triton"), expected)
        ((c, s, *rest),) = launched
        same = [a is b for a, b in zip((*rest[:2], c, s), inputs, strict=True)]
        assert same == [t.stride(-1) == 1 for t in inputs]


@needs_triton
def test_leading_dimensions_merge():
    lies = lambda *shape: (shape, torch.empty(shape, device="meta").stride())  # noqa: E731

    def plan(tokens, q_stride=None, tables=None):
        q, k = (lies(*tokens, H, 8) for H in (4, 2))
        q = q if q_stride is None else (q[0], q_stride)
        found = kernels._plan(q, k, *[tables or lies(tokens[-1], 4)] * 2, False, False)
        return found and (found.M, found.S)

    assert plan((7,)) == (1, 7)
    assert plan((3, 7)) == (3, 7)
    assert plan((2, 3, 7)) == (6, 7)
    assert plan((3, 1)) == (1, 3)
    assert plan((1, 7)) == plan((1, 1, 7)) == (1, 7)
    assert plan((3, 7), tables=lies(3, 7, 4)) == (1, 21)
    assert plan((3, 7), tables=lies(1, 7, 4)) == (3, 7)
    assert plan((2, 3, 7), tables=lies(2, 3, 7, 4)) == (1, 42)
    assert plan((2, 3, 7), tables=lies(2, 1, 7, 4)) is None
    assert plan((3, 7), (8, 24, 168, 1), lies(3, 7, 4)) == (3, 7)  # q's tokens before its sequences


@needs_triton
def test_another_batch_binds_nothing():
    q, k, cos, sin = (t.detach() for t in tensors((3, 5)))
    kernels._bind.cache_clear()
    for rows in (1, 2, 3):
        onepass.rope(q[:rows], k[:rows], cos, sin, backend="triton")
    assert kernels._bind.cache_info().currsize <= 2  # one sequence is a kind of its own: it has no stride


@pytest.mark.parametrize("D", (64, 80, 96, 128, 256))
@pytest.mark.parametrize(("HQ", "HK"), [(32, 8), (12, 12), (71, 1), (1, 1), (40, 40), (0, 8), (128, 1)])
def test_tiles_are_full_and_not_too_large(HQ, HK, D):
    for P in (D // 2, D // 4, 1):
        t = kernels.rope_tiles(HQ, HK, D, P)
        width = 2 * t.block_p + t.block_r
        assert t.block_p >= P
        assert t.block_r >= D - 2 * P
        assert max(t.block_hq, t.block_hk) * t.block_s * width <= max(kernels._VALUES, width)
        assert 2 * max(t.block_hq if HQ else 1, t.block_hk) * t.block_s * width > kernels._VALUES // 2
        used = sum(H for H in (HQ, HK)) / sum(-(-H // b) * b for H, b in ((HQ, t.block_hq), (HK, t.block_hk)))
        assert used > 0.6


@needs_triton
@kinds
@pytest.mark.parametrize("back", (False, True), ids=("there", "back"))
@pytest.mark.parametrize("R", (12, 8))
def test_results_may_lie_in_their_place_or_anywhere(R, back, interleaved, launched):
    """Of parts of a projection, which are the same as contiguous ones' bit for bit; what is beside them stays."""
    wide = torch.randn(3, 5, 4 + 2 + 2, 12, device=DEVICE).bfloat16()
    cos, sin = tensors((3, 5), R=R)[2:]
    q, k, v = wide.split((4, 2, 2), 2)
    expected = kernels.rotate(cos, sin, q, k, interleaved, back)
    elsewhere = torch.full_like(wide, math.nan)
    into = elsewhere.split((4, 2, 2), 2)[:2]
    rest, before = v.clone(), [x.clone() for x in (q, k)]
    for small in (False, True):
        for x, was in zip((q, k), before, strict=True):
            x.copy_(was)
        with small_tiles(module, small), poisoned() as allocations:
            assert equal(kernels.rotate(cos, sin, q, k, interleaved, back, into), expected)
            assert equal((q, k), before)
            assert kernels.rotate(cos, sin, q, k, interleaved, back, (q, k)) == (q, k)
        assert equal((q, k), expected) and not any(size for _, size, _ in allocations.made)
    assert torch.equal(v, rest) and elsewhere[:, :, 6:].isnan().all()


@kinds
def test_pytorch_turns_in_place_too(interleaved):
    from onepass.ops.attention.rope_formula import rope_blocks

    q, _, cos, sin = tensors()
    for x in (q.detach(), q.detach().bfloat16()):
        expected = rope_blocks(x, cos, sin, interleaved, True)
        assert rope_blocks(x, cos, sin, interleaved, True, x) is x and torch.equal(x, expected)


# ---- autograd ----


@backends
@kinds
def test_what_is_frozen_costs_nothing(interleaved, backend, launched):
    q, k, cos, sin = tensors()
    call = op(cos, sin, interleaved=interleaved, backend=backend)
    whole = asked_gradients(call, (q, k))
    for frozen, inputs in enumerate(((q.detach(), k), (q, k.detach()))):
        launched.clear()
        ys = call(*inputs)
        assert [y.requires_grad for y in ys] == [i != frozen for i in range(2)]
        assert equal(asked_gradients(call, inputs), [whole[0], whole[1], whole[3 - frozen]])
        if backend == "triton":
            assert [[t is None for t in args[2:4]] for args in launched] == [[False] * 2] * 2 + [[i == frozen for i in range(2)]]


@backends
@kinds
def test_one_output_used_alone(interleaved, backend, launched):
    q, k, cos, sin = tensors()
    for i in range(2):
        ys = op(cos, sin, interleaved=interleaved, backend=backend)(q, k)
        launched.clear()
        dy = torch.randn_like(ys[i])
        grads = torch.autograd.grad(ys[i], (q, k), dy, allow_unused=True)
        assert grads[1 - i] is None
        other = torch.zeros_like(ys[1 - i])
        both = op(cos, sin, interleaved=interleaved, backend=backend)(q, k)
        dys = (dy, other) if i == 0 else (other, dy)
        torch.testing.assert_close(grads[i], torch.autograd.grad(both, (q, k), dys)[i])
        if backend == "triton":
            assert launched[0][3 - i] is None


@backends
def test_only_the_tables_are_kept(backend):
    q, k, cos, sin = tensors(dtype=BF16)
    with saved_tensors() as kept:
        op(cos, sin, backend=backend)(q, k)
    assert [t.data_ptr() for t in kept] == [cos.data_ptr(), sin.data_ptr()]


# ---- what people wrap around it ----


@backends
@kinds
def test_compiling_with_one_frozen(interleaved, backend):
    *_, cos, sin = tensors()
    call = op(cos, sin, interleaved=interleaved, backend=backend)

    def block(q, k):
        return tuple(y * 2 for y in call(q.transpose(1, 2), k.transpose(1, 2)))

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    inputs = [torch.randn(2, H, 5, 12, device=DEVICE, requires_grad=True) for H in (4, 2)]
    for some in ([inputs[0].detach(), inputs[1]], [inputs[0], inputs[1].detach()]):
        want, got = (asked_gradients(f, some) for f in (block, compiled))
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b) if backend == "triton" else torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@needs_triton
@kinds
@pytest.mark.parametrize("layout", ("heads first", "strided"))
def test_the_registered_op_of_one_tensor_is_sound(layout, interleaved):
    q, k, cos, sin = (t.detach() for t in tensors())
    q, k = (heads_laid_out(x, layout) for x in (q, k))
    for some in ((None, k), (q, None), (q[:0], k[:0])):
        for back in (False, True):
            torch.library.opcheck(
                module._rotate_op.op, (cos, sin, *some, interleaved, back),
                test_utils=("test_schema", "test_faketensor")
            )


@backends
def test_under_autocast(backend):
    q, k, cos, sin = tensors()
    plain = gradients(op(cos, sin, backend=backend), (q, k))
    with torch.autocast(DEVICE, BF16):
        assert equal(plain, gradients(op(cos, sin, backend=backend), (q, k)))
        hidden = torch.nn.functional.linear(q, torch.ones(12, 12, device=DEVICE))
        y, other = op(cos, sin, backend=backend)(hidden, k)
    assert (hidden.dtype, y.dtype, other.dtype) == (BF16, BF16, FP32)


def test_the_torch_backend_in_many_blocks(monkeypatch):
    from onepass.ops.attention import rope_formula

    q, k, cos, sin = tensors((2, 9))
    whole = gradients(op(cos, sin, backend="torch"), (q, k))
    monkeypatch.setattr(rope_formula, "_BLOCK", 2 * 4 * 12 * 2)  # two tokens of q, four of k
    assert equal(whole, gradients(op(cos, sin, backend="torch"), (q, k)))


# ---- what is said of a call ----


@needs_triton
def test_explain_names_the_kernel():
    q, k = (torch.empty(2, 16, H, 128, device=DEVICE, dtype=BF16) for H in (32, 8))
    cos = torch.empty(16, 64, device=DEVICE)
    said = onepass.explain("rope", q, k, cos, cos, interleaved=True)
    assert said.backend == "triton"
    for words in ("one kernel, 1 token a program, 32 of q's and 8 of k's heads at a time", "keeps cos and sin"):
        assert words in said.variant
    assert "copies" not in said.variant
    assert "copies" in onepass.explain("rope", q, k, cos[:, ::2], cos[:, ::2]).variant
    assert "nothing to do" in onepass.explain("rope", q[:0], k[:0], cos, cos).variant
    assert "8 of k's heads" in onepass.explain("rope", q[..., :0, :], k, cos, cos).variant


@needs_triton
def test_what_the_kernel_can_not_take():
    q, k, cos, sin = (t.detach() for t in tensors())
    for inputs, reason in (((q.double(), k), "q is torch.float64"), ((q, k.double()), "k is torch.float64")):
        assert onepass.explain("rope", *inputs, cos, sin).backend == "torch"
        with pytest.raises(RuntimeError, match=reason):
            onepass.rope(*inputs, cos, sin, backend="triton")
        assert [y.dtype for y in onepass.rope(*inputs, cos, sin)] == [x.dtype for x in inputs]
    wide = torch.empty(1, 1, 4098, device=DEVICE)
    assert "4098" in onepass.explain("rope", wide, wide, cos[:1], sin[:1]).reasons["triton"]
