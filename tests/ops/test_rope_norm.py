"""rope with a norm of each head first: what it computes, what it keeps, and where the weights' gradients go."""

import math

import pytest
import torch
from ops.calls import backends, equal, gradients, needs_triton, refused
from ops.oracle import BF16, DEVICE, FP16, FP32
from ops.rope_oracle import judge_case, normed_cases, small_normed_cases, small_tiles
from torch.nn import functional as F

import onepass
import onepass.ops.attention.rope as module
from onepass.ops.attention import rope_norm_kernels as kernels
from onepass.testing.poison import saved_tensors

kinds = pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))


def tensors(lead=(2, 5), HQ=4, HK=2, D=12, R=8, dtype=FP32, weight=None):
    """q, k and both weights, which ask for a gradient, and tables."""
    q, k = (torch.randn(*lead, H, D, device=DEVICE, dtype=dtype, requires_grad=True) for H in (HQ, HK))
    weights = [torch.randn(D, device=DEVICE, dtype=weight or dtype).requires_grad_() for _ in range(2)]
    angles = torch.randn(lead[-1], R // 2, device=DEVICE)
    return q, k, *weights, angles.cos(), angles.sin()


def op(cos, sin, **options):
    return lambda q, k, q_weight, k_weight: onepass.rope(q, k, cos, sin, q_weight=q_weight, k_weight=k_weight, **options)


# ---- what it computes ----


@backends
@pytest.mark.parametrize("case", small_normed_cases() + normed_cases(), ids=str)
def test_within_the_budget(case, backend):
    report = judge_case(module, case, backend)
    assert report, report


@backends
@kinds
@pytest.mark.parametrize("centered", (False, True))
def test_what_models_write(centered, interleaved, backend):
    """A norm of each, and then rope: Qwen's weight as it is, Gemma's with 1 more."""
    q, k, a, b, cos, sin = tensors()
    call = op(cos, sin, interleaved=interleaved, zero_centered_gamma=centered, eps=1e-3, backend=backend)

    def written(q, k, a, b):
        normed = [F.rms_norm(x, (12,), 1 + w if centered else w, 1e-3) for x, w in ((q, a), (k, b))]
        return onepass.rope(*normed, cos, sin, interleaved=interleaved, backend="torch")

    for found, expected in zip(gradients(call, (q, k, a, b)), gradients(written, (q, k, a, b)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_triton
def test_a_head_depends_on_itself_alone():
    """However heads lie, and whatever is beside them, NaN too."""
    q, k, a, b, cos, sin = (t.detach() for t in tensors((1, 6), HQ=5, HK=3))
    call = op(cos, sin, backend="triton")
    with small_tiles(module):
        expected = call(q, k, a, b)
        q[0, 2, 1] = math.nan
        ys = call(q, k, a, b)
        assert ys[0][0, 2, 1].isnan().all() and equal([ys[1]], [expected[1]])
        ys[0][0, 2, 1] = expected[0][0, 2, 1]
        assert equal(ys, expected)


@backends
def test_documents_restart_the_positions(backend):
    q, k, a, b, _, _ = (t.detach() for t in tensors((1, 9)))
    angles = torch.randn(5, 4, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    boundaries = torch.tensor((0, 4, 4, 9), dtype=torch.int32, device=DEVICE)
    whole = op(cos, sin, cu_seqlens=boundaries, backend=backend)(q, k, a, b)
    parts = [op(cos[: e - s], sin[: e - s], backend=backend)(q[:, s:e], k[:, s:e], a, b) for s, e in ((0, 4), (4, 9))]
    assert equal(whole, [torch.cat(pair, 1) for pair in zip(*parts, strict=True)])


@backends
@pytest.mark.parametrize(
    ("q_shape", "HK"), [((0, 3, 2, 8), 2), ((2, 0, 2, 8), 2), ((2, 3, 0, 8), 2), ((2, 3, 2, 8), 0), ((2, 3, 0, 8), 0)]
)
def test_nothing_to_do(q_shape, HK, backend):
    q = torch.randn(q_shape, device=DEVICE, requires_grad=True)
    k = torch.randn(*q_shape[:2], HK, 8, device=DEVICE, requires_grad=True)
    a, b = (torch.randn(8, device=DEVICE, requires_grad=True) for _ in range(2))
    cos = torch.ones(q_shape[1], 4, device=DEVICE)
    *ys, dq, dk, da, db = gradients(op(cos, cos, backend=backend), (q, k, a, b))
    assert [y.shape for y in (*ys, dq, dk)] == [q.shape, k.shape] * 2
    assert bool(da.any()) is bool(q.numel()) and bool(db.any()) is bool(k.numel())


# ---- one kernel each way ----


@needs_triton
def test_one_launch_each_way_and_nothing_kept_but_what_came(kernels_launched):
    q, k, a, b, cos, sin = tensors(dtype=BF16)
    with saved_tensors() as kept:
        ys = op(cos, sin, backend="triton")(q, k, a, b)
    assert sorted(t.data_ptr() for t in kept) == sorted(t.data_ptr() for t in (cos, sin, q, k, a, b))
    torch.autograd.grad(ys, (q, k, a, b), [torch.randn_like(y) for y in ys])
    assert kernels_launched == ["_rope_kernel", "_rope_norm_backward_kernel"]


@needs_triton
def test_parts_of_a_projection_are_read_where_they_lie(launched):
    a, b, cos, sin = (t.detach() for t in tensors((3, 5))[2:])
    q, k, _ = torch.randn(3, 5, 8, 12, device=DEVICE).requires_grad_().split((4, 2, 2), 2)
    ys = op(cos, sin, backend="triton")(q, k, a, b)
    assert [t.data_ptr() for t in launched[0][2:4]] == [q.data_ptr(), k.data_ptr()]
    torch.autograd.grad(ys, (q, k), [torch.randn_like(y) for y in ys])
    back = launched[1]
    assert [back[3].data_ptr(), back[8].data_ptr()] == [q.data_ptr(), k.data_ptr()]


@needs_triton
@kinds
@pytest.mark.parametrize("R", (12, 8))
def test_gradients_may_overwrite_gradients(R, interleaved):
    q, k, a, b, cos, sin = (t.detach() for t in tensors(R=R))
    norm, needs = kernels.QKNorm(a, b, 1e-6, False), kernels.HeadGradients(True, True, True, True)
    dys = [torch.randn_like(x) for x in (q, k)]
    for small in (False, True):
        with small_tiles(module, small):
            expected = kernels.rotate_back(cos, sin, dys, (q, k), norm, interleaved, needs)
            into = torch.cat([*dys, dys[1]], 2)
            parts = into.split((4, 2, 2), 2)
            found = kernels.rotate_back(cos, sin, parts[:2], (q, k), norm, interleaved, needs, parts[:2])
        assert equal(found, expected) and torch.equal(parts[2], dys[1])


@needs_triton
@pytest.mark.parametrize(("q_tiles", "k_tiles"), [(0, 5), (5, 0), (1, 1), (1, 1000), (1000, 1), (3000, 1500), (20, 10)])
def test_programs_are_shared_by_what_there_is_to_do(q_tiles, k_tiles):
    for most in (1, 2, 264):
        programs, first = kernels._programs(q_tiles, k_tiles, most)
        assert programs <= max(most, 2)
        assert bool(first) is bool(q_tiles) and bool(programs - first) is bool(k_tiles)
        assert first <= max(q_tiles, 1) and programs - first <= max(k_tiles, 1)


# ---- autograd ----


@backends
def test_one_output_used_alone(backend):
    q, k, a, b, cos, sin = tensors()
    for i in range(2):
        ys = op(cos, sin, backend=backend)(q, k, a, b)
        grads = torch.autograd.grad(ys[i], (q, k, a, b), torch.ones_like(ys[i]), allow_unused=True, retain_graph=True)
        assert grads[1 - i] is None and grads[3 - i] is None
        dys = [torch.full_like(y, float(j == i)) for j, y in enumerate(ys)]
        both = torch.autograd.grad(ys, (q, k, a, b), dys)
        assert equal([grads[i]], [both[i]])
        torch.testing.assert_close(grads[2 + i], both[2 + i], rtol=1e-5, atol=1e-5)  # of other programs' sums


@needs_triton
def test_what_is_frozen_is_not_launched(launched):
    q, k, a, b, cos, sin = tensors()
    ys = op(cos, sin, backend="triton")(q, k.detach(), a.detach(), b.detach())
    assert [y.requires_grad for y in ys] == [True, False]
    launched.clear()
    torch.autograd.grad(ys[0], q, torch.ones_like(ys[0]))
    of_q, of_k = launched[0][2:7], launched[0][7:12]
    assert of_q[4] is None and of_k == (None, None, None, launched[0][10], None) and launched[0][12] is None


@needs_triton
def test_the_registered_ops_are_sound():
    from onepass.ops.attention import rope_norm

    q, k, a, b, cos, sin = (t.detach() for t in tensors())
    tests = ("test_schema", "test_faketensor")  # the contract has the rest
    torch.library.opcheck(rope_norm._normed_op.op, (cos, sin, q, k, a, b, True, 1e-6, False), test_utils=tests)
    for needs in ((True,) * 4, (False, True, True, False)):
        for dq in (q, None):
            args = cos, sin, dq, k, q, k, a, b, False, 1e-6, True, *needs
            torch.library.opcheck(rope_norm._normed_back_op.op, args, test_utils=tests)


# ---- main_grad of the weights ----


@backends
def test_one_of_the_two_carries_main_grad(backend):
    q, k, a, b, cos, sin = tensors()
    _, _, dq, dk, da, db = gradients(op(cos, sin, backend=backend), (q, k, a, b))
    weight = torch.nn.Parameter(b.detach().clone())
    weight.main_grad = torch.ones(12, device=DEVICE)
    ys = op(cos, sin, backend=backend)(q, k, a, weight)
    dys = [torch.linspace(-1, 2 + i, y.numel(), device=DEVICE).view(y.shape) for i, y in enumerate(ys)]
    torch.autograd.backward(ys, dys)
    torch.testing.assert_close(weight.main_grad, 1 + db, rtol=1e-5, atol=1e-5)
    for found, expected in ((q.grad, dq), (k.grad, dk), (a.grad, da)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert weight.grad is None


# ---- bad input, and what is said of a call ----


@backends
@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (ValueError, {"q_weight": torch.ones(8)}, ("k_weight must be given where q_weight is",)),
        (ValueError, {"k_weight": torch.ones(8)}, ("q_weight must be given where k_weight is",)),
        (ValueError, {"q_weight": torch.ones(8), "k_weight": torch.ones(8), "eps": 0.0}, ("eps must be above 0",)),
        (ValueError, {"zero_centered_gamma": True}, ("zero_centered_gamma says how", "None")),
    ],
)
def test_bad_input_is_named(error, options, words, backend):
    x, table = torch.ones(2, 3, 4, 8), torch.ones(3, 4)
    refused(onepass.rope, (x, x, table, table), {"backend": backend, **options}, error, words)


@needs_triton
def test_explain_names_both_kernels():
    q, k, a, b, cos, sin = tensors((4, 5), HQ=16, HK=8, D=128, R=128, dtype=FP16)
    with onepass.use_backend("triton"):
        said = str(onepass.explain("rope", q, k, cos, sin, q_weight=a, k_weight=b))
    for words in ("normalised first", "2 x 16 of q's or 4 x 8 of k's tokens x heads", "keeps q, k, cos and sin"):
        assert words in said, said
