"""What gated_rms_norm is, and how it behaves under autograd and with what people hand to it."""

import math

import pytest
import torch
import torch.nn.functional as F
from ops.calls import backends, equal, gradients, needs_triton, refused
from ops.gated_norm_oracle import judge_case, real_cases, small_cases
from ops.oracle import BF16, DEVICE, FP32

import onepass
import onepass.ops.norm.gated_norm as module
from onepass.ops.norm import gated_kernels
from onepass.testing.poison import bytes_kept, saved_tensors, unchanged

paths = pytest.mark.parametrize("path", ("", "rows", "single"))


def tensors(*lead, H=24, dtype=FP32):
    """x, z and weight, which ask for a gradient."""
    drawn = (torch.randn(*size, H, device=DEVICE, dtype=dtype) for size in (lead or (3, 5), lead or (3, 5), ()))
    return [t.requires_grad_() for t in drawn]


def op(backend, **options):
    return lambda x, z, weight=None: onepass.gated_rms_norm(x, z, weight, backend=backend, **options)


# ---- what it computes ----


@backends
def test_the_formula_by_hand(backend):
    x, z, weight, eps = [1.0, -2.0, 4.0, 0.5], [0.5, -1.0, 0.0, 3.0], [0.5, 1.0, -1.0, 2.0], 0.25
    given = [torch.tensor(t, device=DEVICE) for t in (x, z, weight)]

    def rms(values):
        return math.sqrt(sum(a * a for a in values) / len(values) + eps)

    for activation in ("silu", "sigmoid"):
        sigmoids = [1 / (1 + math.exp(-b)) for b in z]
        gate = [b * s for b, s in zip(z, sigmoids, strict=True)] if activation == "silu" else sigmoids
        call = op(backend, eps=eps, activation=activation)
        expected = [a / rms(x) * w * g for a, w, g in zip(x, weight, gate, strict=True)]
        torch.testing.assert_close(call(*given), torch.tensor(expected, device=DEVICE))
        expected = [a / rms(x) * (w + 1) * g for a, w, g in zip(x, weight, gate, strict=True)]
        call = op(backend, eps=eps, activation=activation, zero_centered_gamma=True)
        torch.testing.assert_close(call(*given), torch.tensor(expected, device=DEVICE))
        h = [a * g for a, g in zip(x, gate, strict=True)]
        call = op(backend, eps=eps, activation=activation, norm_before_gate=False)
        expected = [a / rms(h) * w for a, w in zip(h, weight, strict=True)]
        torch.testing.assert_close(call(*given), torch.tensor(expected, device=DEVICE))
        call = op(backend, eps=eps, activation=activation, norm_before_gate=False, group_size=2)
        expected = [a / rms(half) * w for a, half, w in zip(h, (h[:2], h[:2], h[2:], h[2:]), weight, strict=True)]
        torch.testing.assert_close(call(*given), torch.tensor(expected, device=DEVICE))


@backends
def test_what_models_write(backend):
    """Qwen3-Next's norm of heads and Mamba 2's of groups, in fp32, where their own roundings are none."""
    x, z, weight = tensors(2, 5, 3, H=16)
    heads = weight * F.rms_norm(x, (16,), eps=1e-6) * F.silu(z)
    torch.testing.assert_close(op(backend)(x, z, weight), heads)
    x, z, weight = tensors(2, 5, H=48)
    groups = F.rms_norm((x * F.silu(z)).unflatten(-1, (3, 16)), (16,), eps=1e-5).flatten(-2) * weight
    torch.testing.assert_close(op(backend, eps=1e-5, norm_before_gate=False, group_size=16)(x, z, weight), groups)


@needs_triton
@pytest.mark.parametrize("case", [*small_cases(), *real_cases()], ids=str)
def test_within_the_budget(case):
    report = judge_case(module, case)
    assert report, f"{case}\n{report}"


@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_the_torch_backend_is_within_the_budget(case):
    report = judge_case(module, case, "torch")
    assert report, f"{case}\n{report}"


# ---- where tensors lie ----


@needs_triton
def test_slices_of_a_projection_are_read_where_they_lie(monkeypatch):
    """Heads of x and z as parts of each token's row, and z of Qwen3-Next's order: by key heads, each with its value heads."""
    heads, H = 4, 16
    projection = torch.randn(2, 3, 2 * heads * H + 7, device=DEVICE, dtype=BF16)
    x, z = projection[..., : heads * H].unflatten(-1, (heads, H)), projection[..., heads * H : -7].unflatten(-1, (heads, H))
    by_key = torch.randn(2, 3, 2, 5 * H, device=DEVICE, dtype=BF16)[..., 3 * H :].unflatten(-1, (2, H))
    weight = torch.randn(H, device=DEVICE, dtype=BF16, requires_grad=True)
    expected = [gradients(op("triton"), [x.clone().requires_grad_(), gate.clone().requires_grad_(), weight])
                for gate in (z, by_key.reshape(z.shape))]  # fmt: skip
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda *_: pytest.fail("a copy"))
    x, z, by_key = (t.requires_grad_() for t in (x, z, by_key))
    given = torch.linspace(-1, 2, x.numel(), device=DEVICE).view(x.shape).to(BF16)
    for gate, (y, dx, dz, dweight) in zip((z, by_key), expected, strict=True):
        rows = x if gate is z else x.view(gate.shape) if x.is_contiguous() else x.unflatten(2, gate.shape[2:4])
        found = op("triton")(rows, gate, weight)
        grads = torch.autograd.grad(found, (rows, gate, weight), given.view(found.shape))
        assert equal([found.view(y.shape), *(t.view(e.shape) for t, e in zip(grads, (dx, dz, dweight), strict=True))],
                     [y, dx, dz, dweight])  # fmt: skip


@backends
def test_outputs_are_tensors_of_their_own(backend):
    x, z, weight = tensors(4, 3)
    y = op(backend)(x.detach().transpose(0, 1), z.detach().transpose(0, 1), weight.detach())
    assert y._base is None and y.untyped_storage().nbytes() == y.nbytes


# ---- autograd ----


@backends
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_x_and_z_are_kept_and_nothing_else(dtype, backend):
    x, z, weight = tensors(dtype=dtype)
    with saved_tensors() as kept:
        y = op(backend)(x, z, weight)
    assert bytes_kept(kept, y, x, z, weight) == 0
    with unchanged(x=x, z=z, weight=weight):
        y.square().sum().backward()


# ---- what people wrap around it ----


@needs_triton
def test_a_new_number_of_rows_binds_nothing_new():
    for plan in (gated_kernels._forward_plan, gated_kernels._backward_plan):
        plan.cache_clear()
    for rows in (1, 2, 5, 9):
        gradients(op("triton"), tensors(2, rows))
    assert gated_kernels._forward_plan.cache_info().currsize == gated_kernels._backward_plan.cache_info().currsize == 1


# ---- what is said of a call ----


@needs_triton
def test_explain_names_the_kernels():
    x, z, weight = tensors(4, 8, H=128, dtype=BF16)
    said = onepass.explain(onepass.gated_rms_norm, x, z, weight, backend="triton").variant
    assert "forward with 16 rows a program" in said and "keeps x and z" in said and "3 programs a multiprocessor" in said
    assert "as many programs as that takes" in onepass.explain("gated_rms_norm", x, z, backend="triton").variant
    said = onepass.explain("gated_rms_norm", x, z, weight, group_size=32, backend="triton").variant
    assert "64 groups a program" in said
    assert "z copied" in onepass.explain("gated_rms_norm", x, z.mT.contiguous().mT, weight, backend="triton").variant
    assert "nothing to do" in onepass.explain("gated_rms_norm", x[:0], z[:0], weight, backend="triton").variant


@needs_triton
def test_what_the_kernels_do_not_take():
    x, z = torch.randn(2, 2, 8193, device=DEVICE).unbind()
    assert "rows of 8193 are longer than 8192" in onepass.explain("gated_rms_norm", x, z).reasons["triton"]
    torch.testing.assert_close(onepass.gated_rms_norm(x, z), F.rms_norm(x, (8193,), eps=1e-6) * F.silu(z))
    with pytest.raises(RuntimeError, match="rows of 8193"):
        onepass.gated_rms_norm(x, z, backend="triton")
    with pytest.raises(RuntimeError, match=r"x is torch\.float64"):
        onepass.gated_rms_norm(x[:, :8].double(), z[:, :8], backend="triton")


_X = torch.ones(2, 6)


@pytest.mark.parametrize(
    ("raised", "words", "x", "z", "options"),
    [
        (ValueError, ("z", "x's shape (2, 6)", "(2, 5)"), _X, _X[:, :5], {}),
        (ValueError, ("weight", "(6,)", "(3,)"), _X, _X, {"weight": torch.ones(3), "group_size": 3}),
        (ValueError, ("zero_centered_gamma", "no weight"), _X, _X, {"zero_centered_gamma": True}),
        (ValueError, ("eps", "above 0", "0.0"), _X, _X, {"eps": 0.0}),
        (ValueError, ("activation", "silu, sigmoid", "'gelu'"), _X, _X, {"activation": "gelu"}),
        (ValueError, ("group_size", "divide", "6", "4"), _X, _X, {"group_size": 4}),
        (ValueError, ("group_size", "divide", "0"), _X, _X, {"group_size": 0}),
        (ValueError, ("group_size", "divide", "2.0"), _X, _X, {"group_size": 2.0}),
    ],
)
def test_what_is_wrong_is_said(raised, words, x, z, options):
    refused(onepass.gated_rms_norm, (x, z), options, raised, words)
