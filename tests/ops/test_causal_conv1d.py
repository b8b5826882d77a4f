"""What causal_conv1d is, and how it behaves under autograd and with what people hand to it."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from ops.calls import backends, equal, gradients, needs_triton, outputs, refused
from ops.conv_oracle import judge_case, real_cases, small_cases, small_tiles
from ops.oracle import BF16, DEVICE, FP32

import onepass
import onepass.ops.convolution.causal_conv1d as module
from onepass.ops.convolution import kernels
from onepass.testing.poison import bytes_kept, saved_tensors, unchanged


def tensors(*lead, C=24, W=4, dtype=FP32):
    """x, weight and bias, which ask for a gradient."""
    drawn = [torch.randn(*shape, device=DEVICE, dtype=dtype) for shape in ((*(lead or (3, 11)), C), (C, 1, W), (C,))]
    return [t.requires_grad_() for t in drawn]


def op(backend, **options):
    return lambda *given: onepass.causal_conv1d(*given, backend=backend, **options)


def boundaries(*ends):
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


# ---- what it computes ----


@backends
def test_the_formula_by_hand(backend):
    x, weight, bias, eps = [[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]], [[0.5, 2.0], [-1.0, 1.5]], [0.25, -0.5], 0.5
    given = [torch.tensor(t, device=DEVICE) for t in (x, weight, bias)]
    rows = [[0.0, 0.0], *x]
    pre = [[bias[c] + weight[c][1] * rows[t + 1][c] + weight[c][0] * rows[t][c] for c in range(2)] for t in range(3)]
    torch.testing.assert_close(op(backend, activation=None)(*given), torch.tensor(pre, device=DEVICE))
    act = [[p / (1 + math.exp(-p)) for p in row] for row in pre]
    torch.testing.assert_close(op(backend)(*given), torch.tensor(act, device=DEVICE))
    normed = [[p / math.sqrt(sum(q * q for q in row) + eps) for p in row] for row in act]
    torch.testing.assert_close(op(backend, l2_norm=2, eps=eps)(*given), torch.tensor(normed, device=DEVICE))


@backends
def test_what_models_write(backend):
    """Qwen3-Next's convolution, its split into q, k and v, and the norms of q's and k's heads, in fp32."""
    x, weight, bias = tensors(2, 9, C=80)
    S = x.shape[1]
    y = F.silu(F.conv1d(x.transpose(1, 2), weight, bias, groups=80, padding=3)[..., :S]).transpose(1, 2)
    q, k, v = y.split((16, 16, 48), -1)
    q, k = (t * torch.rsqrt(t.unflatten(-1, (-1, 8)).pow(2).sum(-1, keepdim=True) + 1e-6).expand(-1, -1, -1, 8).flatten(-2)
            for t in (q, k))  # fmt: skip
    found = op(backend, split=(16, 16, 48), l2_norm=(8, 8, None))(x, weight, bias)
    assert isinstance(found, tuple) and all(t.is_contiguous() for t in found)
    for one, other in zip(found, (q, k, v), strict=True):
        torch.testing.assert_close(one, other)


@needs_triton
@pytest.mark.parametrize("case", [*small_cases(), *real_cases()], ids=str)
def test_within_the_budget(case):
    report = judge_case(module, case)
    assert report, f"{case}\n{report}"


@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_the_torch_backend_is_within_the_budget(case):
    report = judge_case(module, case, "torch")
    assert report, f"{case}\n{report}"


# ---- documents and sequences ----


@needs_triton
@pytest.mark.parametrize("W", (2, 4, 8))
def test_a_document_has_the_bits_that_it_has_alone(W):
    """And so has a sequence: y, and x's gradient."""
    backend = "triton"
    ends = (0, 1, 1, 7, 9, 40, 73, 90)
    x, weight, bias = tensors(1, 90, C=48, W=W)
    options = {"split": (16, 16, 16), "l2_norm": (8, None, 8)}
    with small_tiles(module):
        *ys, dx, _, _ = gradients(op(backend, cu_seqlens=boundaries(*ends), **options), (x, weight, bias))
        dys = [torch.linspace(-1, 2 + i, y.numel(), device=DEVICE).view(y.shape) for i, y in enumerate(ys)]
        for first, end in pairwise(ends):
            if first == end:
                continue
            alone = x[:, first:end].detach().requires_grad_()
            found = op(backend, **options)(alone, weight, bias)
            (grad,) = torch.autograd.grad(found, alone, [dy[:, first:end] for dy in dys])
            assert equal([*found, grad], [*(y[:, first:end] for y in ys), dx[:, first:end]]), (first, end)
    rows = x.detach().view(6, 15, 48)
    assert torch.equal(op(backend)(rows, weight, bias), torch.cat([op(backend)(row[None], weight, bias) for row in rows]))


@needs_triton
def test_wrong_boundaries_make_nan_where_nobody_reads_them(monkeypatch):
    monkeypatch.setattr("onepass.runtime.documents.are_readable", lambda cu_seqlens: False)
    for activation in ("silu", None):
        y, *grads = gradients(op("triton", cu_seqlens=boundaries(0, 9, 5, 11), activation=activation), tensors(1, 11))
        assert all(t.isnan().all() for t in (y, *grads))


@backends
@pytest.mark.parametrize("documents", (False, True))
def test_nan_and_infinities_stay_within_reach(backend, documents):
    options = {"cu_seqlens": boundaries(0, 20, 41, 60)} if documents else {}
    x, weight, bias = tensors(1, 60, C=32)
    for value in (math.nan, math.inf):
        bad = x.detach().clone()
        bad[:, 39, 5] = value
        with small_tiles(module):
            (y, dx, *_), (good, dgood, *_) = (
                gradients(op(backend, l2_norm=8, **options), (rows.requires_grad_(), weight, bias)) for rows in (bad, x)
            )
        end = 41 if documents else 43
        assert not y[:, 39:end, :8].isfinite().all(-1).any()
        for found, expected, first in ((y, good, 39), (dx, dgood, 36)):
            found, expected = found.clone(), expected.clone()
            found[:, first:end, :8] = expected[:, first:end, :8] = 0
            assert equal([found], [expected])


# ---- where tensors lie ----


@needs_triton
def test_a_slice_of_a_projection_is_read_where_it_lies(monkeypatch):
    projection = torch.randn(2, 11, 24 + 13, device=DEVICE, dtype=BF16)
    x, (_, weight, bias) = projection[..., 8:32], tensors(dtype=BF16)
    expected = op("triton")(x.contiguous(), weight, bias)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda *_: pytest.fail("a copy"))
    assert torch.equal(op("triton")(x, weight, bias), expected)


# ---- autograd ----


@backends
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_x_is_kept_and_nothing_else(dtype, backend):
    x, weight, bias = tensors(dtype=dtype)
    with saved_tensors() as kept:
        ys = op(backend, split=(8, 16), l2_norm=(4, None))(x, weight, bias)
    assert bytes_kept(kept, *ys, x, weight, bias) == 0
    with unchanged(x=x, weight=weight, bias=bias):
        sum(y.square().sum() for y in ys).backward()


@backends
def test_an_unused_piece_has_zeros_for_a_gradient(backend):
    given = tensors()
    whole = [t.detach().requires_grad_() for t in given]
    op(backend, split=(8, 16))(*given)[1].sum().backward()
    op(backend)(*whole)[..., 8:].sum().backward()
    for one, other in zip(given, whole, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@backends
@pytest.mark.parametrize("shape", ((0, 24), (2, 0, 24), (0, 3, 24), (3, 0)))
def test_nothing_to_do(backend, shape):
    x = torch.ones(shape, device=DEVICE, requires_grad=True)
    weight = torch.ones(shape[-1], 4, device=DEVICE, requires_grad=True)
    y, dx, dweight = gradients(op(backend), (x, weight))
    assert y.shape == dx.shape == shape and not dweight.any()


@backends
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_main_grad_of_weight_and_bias(backend, dtype):
    """Several passes add up in fp32, and a 16-bit main_grad is rounded once a pass."""
    x, *plain = tensors(C=40, dtype=dtype)
    weight, bias = (torch.nn.Parameter(t.detach().clone()) for t in plain)
    for parameter in (weight, bias):
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones_like(parameter, dtype=FP32), False
    wide = [t.detach().to(FP32).requires_grad_() for t in (x, *plain)]
    with small_tiles(module):
        for _ in range(2):
            op(backend, split=(16, 24), l2_norm=(8, None))(x, weight, bias)[1].float().square().sum().backward()
        y = op("torch")(*wide)[..., 16:]
        y.backward(4 * y.detach().to(dtype).float())
    for parameter, expected in zip((weight, bias), wide[1:], strict=True):
        assert parameter.grad_added_to_main_grad
        torch.testing.assert_close(parameter.main_grad, 1 + expected.grad, rtol=2e-5 if dtype is FP32 else 2e-2, atol=2e-2)
    (dweight,) = torch.autograd.grad(op(backend)(x, weight, bias).sum(), weight)
    assert dweight.any() and dweight.dtype is dtype


# ---- what people wrap around it ----


@needs_triton
def test_a_new_number_of_rows_binds_nothing_new():
    for plan in (kernels._forward_plan, kernels._backward_plan):
        plan.cache_clear()
    for lead in ((1,), (5,), (2, 3), (3, 40)):
        gradients(op("triton"), tensors(*lead))
    assert kernels._forward_plan.cache_info().currsize == kernels._backward_plan.cache_info().currsize == 1


@backends
def test_autocast_leaves_the_type_of_x(backend):
    given = tensors()
    with torch.autocast(DEVICE, BF16):
        assert torch.equal(op(backend)(*given), op(backend)(*given)) and op(backend)(*given).dtype is FP32


# ---- what is said of a call ----


@needs_triton
def test_explain_names_the_kernels():
    x, weight, bias = tensors(4, 64, C=1024)
    said = onepass.explain(onepass.causal_conv1d, x, weight, bias, backend="triton").variant
    assert "forward in chunks of" in said and said.count("x 128 columns") == 2 and said.endswith("keeps x")
    said = onepass.explain("causal_conv1d", x[:1], weight, cu_seqlens=boundaries(0, 64), backend="triton").variant
    assert "position in its document" in said
    assert "nothing to do" in onepass.explain("causal_conv1d", x[:0], weight, backend="triton").variant


@needs_triton
@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("split has 4 pieces", {"split": (128,) * 4}),
        ("heads are of 32 and 64 columns", {"split": (256, 256), "l2_norm": (32, 64)}),
        ("heads of 512 are longer than 256", {"l2_norm": 512}),
    ],
)
def test_what_the_kernels_do_not_take(words, options):
    x, weight, _ = tensors(2, 3, C=512)
    assert words in onepass.explain("causal_conv1d", x, weight, **options).reasons["triton"]
    found, expected = (outputs(op(backend, **options)(x, weight)) for backend in (None, "torch"))
    assert equal(found, expected)
    with pytest.raises(RuntimeError, match=words):
        op("triton", **options)(x, weight)
    rows = torch.empty(1, 1, device=DEVICE).expand(2**31, 512)
    assert "x has 2147483648 rows" in onepass.explain("causal_conv1d", rows, weight).reasons["triton"]
    with pytest.raises(RuntimeError, match=r"x is torch\.float64"):
        op("triton")(x.double(), weight)


_X, _W = torch.ones(1, 5, 6), torch.ones(6, 4)


@pytest.mark.parametrize(
    ("raised", "words", "x", "weight", "options"),
    [
        (TypeError, ("x must be a floating-point tensor",), _X.long(), _W, {}),
        (ValueError, ("x must have shape [..., S, C]", "(6,)"), _X[0, 0], _W, {}),
        (TypeError, ("weight must be a floating-point tensor", "int64"), _X, _W.long(), {}),
        (TypeError, ("weight must be a floating-point tensor", "NoneType"), _X, None, {}),
        (ValueError, ("weight must have shape [6, W] or [6, 1, W]", "(5, 4)"), _X, _W[:5], {}),
        (ValueError, ("weight must have shape [6, W] or [6, 1, W]", "(6, 2, 4)"), _X, torch.ones(6, 2, 4), {}),
        (ValueError, ("weight must have shape [6, W] or [6, 1, W]", "(6,)"), _X, _W[:, 0], {}),
        (ValueError, ("weight's last dimension must be 2 to 8", "1"), _X, _W[:, :1], {}),
        (ValueError, ("weight's last dimension must be 2 to 8", "9"), _X, torch.ones(6, 1, 9), {}),
        (ValueError, ("weight must be on cpu", "meta"), _X, _W.to("meta"), {}),
        (ValueError, ("bias must have shape (6,)", "(4,)"), _X, _W, {"bias": torch.ones(4)}),
        (ValueError, ("activation must be 'silu' or None", "'gelu'"), _X, _W, {"activation": "gelu"}),
        (ValueError, ("eps", "above 0"), _X, _W, {"eps": 0.0}),
        (ValueError, ("split", "add up to x's last dimension, 6", "(3, 2)"), _X, _W, {"split": (3, 2)}),
        (ValueError, ("split", "above 0", "(6, 0)"), _X, _W, {"split": (6, 0)}),
        (TypeError, ("split must be sizes of pieces", "6"), _X, _W, {"split": 6}),
        (TypeError, ("split must be sizes of pieces", "3.0"), _X, _W, {"split": (3.0, 3)}),
        (ValueError, ("l2_norm", "divides x's last dimension, 6", "4"), _X, _W, {"l2_norm": 4}),
        (ValueError, ("l2_norm", "divides split[1], 2", "3"), _X, _W, {"split": (4, 2), "l2_norm": (2, 3)}),
        (ValueError, ("l2_norm", "each of the 2 pieces", "2"), _X, _W, {"split": (4, 2), "l2_norm": 2}),
        (ValueError, ("l2_norm", "each of the 2 pieces", "(2,)"), _X, _W, {"split": (4, 2), "l2_norm": (2,)}),
        (ValueError, ("l2_norm", "one head width", "(2, 3)"), _X, _W, {"l2_norm": (2, 3)}),
        (ValueError, ("l2_norm", "divides", "0"), _X, _W, {"l2_norm": 0}),
        (TypeError, ("cu_seqlens must be a tensor of torch.int32", "int64"), _X, _W, {"cu_seqlens": torch.tensor((0, 5))}),
        (ValueError, ("cu_seqlens must not fall", "from 4 to 2"), _X, _W, {"cu_seqlens": torch.tensor((0, 4, 2, 5)).int()}),
        (ValueError, ("cu_seqlens must end with 5",), _X, _W, {"cu_seqlens": torch.tensor((0, 4)).int()}),
        (ValueError, ("x must be one row of tokens",), _X.expand(2, 5, 6), _W, {"cu_seqlens": torch.tensor((0, 5)).int()}),
    ],
)
def test_what_is_wrong_is_said(raised, words, x, weight, options):
    refused(onepass.causal_conv1d, (x, weight), options, raised, words)
