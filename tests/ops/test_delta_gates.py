"""What delta_gates is, and how it behaves under autograd and with what people hand to it."""

import math

import pytest
import torch
import torch.nn.functional as F
from ops.calls import backends, equal, gradients, needs_triton, refused
from ops.gates_oracle import judge_case, real_cases, small_cases, small_tiles
from ops.oracle import BF16, DEVICE, FP16, FP32

import onepass
import onepass.ops.delta.delta_gates as module
from onepass.ops.delta import gate_kernels as kernels
from onepass.testing.poison import bytes_kept, saved_tensors, unchanged


def tensors(*shape, H=None, dtype=FP32):
    """a, b, a_log and dt_bias, which ask for a gradient."""
    H = shape[-1] if H is None else H
    shapes = [shape] * 2 + [(H,)] * 2
    return [torch.randn(*of, device=DEVICE, dtype=dtype).requires_grad_() for of in shapes]


def op(backend):
    return lambda *given: onepass.delta_gates(*given, backend=backend)


# ---- what it computes ----


@backends
def test_the_formula_by_hand(backend):
    a, b, a_log, dt_bias = [[1.0, -2.0], [0.5, 30.0]], [[0.0, 3.0], [-1.0, 0.25]], [0.25, -0.5], [1.0, 0.5]
    g, beta = op(backend)(*(torch.tensor(t, device=DEVICE) for t in (a, b, a_log, dt_bias)))
    expected = [[-math.exp(a_log[h]) * math.log1p(math.exp(row[h] + dt_bias[h])) for h in range(2)] for row in a]
    torch.testing.assert_close(g, torch.tensor(expected, device=DEVICE))
    torch.testing.assert_close(beta, torch.tensor([[1 / (1 + math.exp(-x)) for x in row] for row in b], device=DEVICE))


@backends
def test_what_models_write(backend):
    """Qwen3-Next's gates in 16 bits, of a projection of both. Its parameters are in the model's type, or in fp32."""
    projected = torch.randn(2, 9, 64, device=DEVICE, dtype=BF16)
    b, a = projected.unflatten(-1, (16, 4)).split([2, 2], -1)
    for dtype in (FP32, BF16):
        a_log, dt_bias = torch.randn(2, 32, device=DEVICE, dtype=dtype)
        g, beta = op(backend)(a, b, a_log, dt_bias)
        expected = -a_log.float().exp() * F.softplus(a.reshape(2, 9, 32).float() + dt_bias)
        assert g.dtype is FP32 and beta.dtype is BF16 and g.is_contiguous() and beta.is_contiguous()
        torch.testing.assert_close(g.flatten(-2), expected)
        torch.testing.assert_close(beta.flatten(-2), b.reshape(2, 9, 32).sigmoid())


@needs_triton
@pytest.mark.parametrize("case", [*small_cases(), *real_cases()], ids=str)
def test_within_the_budget(case):
    report = judge_case(module, case)
    assert report, f"{case}\n{report}"


@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_the_torch_backend_is_within_the_budget(case):
    report = judge_case(module, case, "torch")
    assert report, f"{case}\n{report}"


@needs_triton
def test_small_decays_are_right_to_their_last_bits():
    """softplus(x) is exp(x) where x is far below 0, which 1 + exp(x) would lose."""
    a = torch.linspace(-60, 30, 512, device=DEVICE)[None]
    zeros = torch.zeros(512, device=DEVICE)
    g, _ = op("triton")(a, a, zeros, zeros)
    torch.testing.assert_close(g.double(), -F.softplus(a.double(), threshold=50), rtol=1e-5, atol=0)


@backends
def test_nan_and_infinities_stay_where_they_are(backend):
    inf = math.inf
    a = torch.tensor([[0.0, inf, -inf, math.nan], [1.0, 2.0, 3.0, 4.0]], device=DEVICE)
    zeros = torch.zeros(4, device=DEVICE)
    g, beta = op(backend)(a, a, zeros, zeros)
    assert g[0, 1] == -inf and g[0, 2] == 0 and g[0, 3].isnan() and g[1].isfinite().all()
    assert beta[0, 1] == 1 and beta[0, 2] == 0 and beta[0, 3].isnan()
    g, beta = op(backend)(a[1:], a[1:], a[0], zeros)
    assert g[0, 1] == -inf and g[0, 2] == 0 and g[0, 3].isnan() and beta.isfinite().all()


# ---- where tensors lie ----


@needs_triton
@pytest.mark.parametrize("groups", (1, 4, 16))
@pytest.mark.parametrize("more", (0, 5))
def test_slices_of_a_projection_are_read_where_they_lie(monkeypatch, groups, more):
    projected = torch.randn(2, 11, 64 + more, device=DEVICE, dtype=BF16)[..., :64]
    b, a = projected.unflatten(-1, (groups, -1)).chunk(2, -1)
    if groups == 1:
        a, b = a.squeeze(-2), b.squeeze(-2)
    vectors = tensors(1, 32)[2:]
    expected = op("triton")(a.contiguous(), b.contiguous(), *vectors)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda *_: pytest.fail("a copy"))
    assert equal(op("triton")(a, b, *vectors), expected)


# ---- autograd ----


@backends
@pytest.mark.parametrize("dtype", (FP32, FP16))
def test_inputs_are_kept_and_nothing_else(dtype, backend):
    given = tensors(3, 24, dtype=dtype)
    with saved_tensors() as kept:
        g, beta = op(backend)(*given)
    assert bytes_kept(kept, g, beta, *given) == 0
    with unchanged(**dict(zip("abcd", given, strict=True))):
        (g.square().sum() + beta.square().sum()).backward()


@backends
def test_an_unused_gate_has_zeros_for_a_gradient(backend):
    given = tensors(3, 24)
    op(backend)(*given)[1].sum().backward()
    assert not any(t.grad.any() for t in (given[0], *given[2:])) and given[1].grad.all()


@backends
@pytest.mark.parametrize(("shape", "H"), (((0, 24), 24), ((2, 0, 24), 24), ((3, 0), 0), ((2, 0, 4, 6), 24)))
def test_nothing_to_do(backend, shape, H):
    g, beta, *grads = gradients(op(backend), tensors(*shape, H=H))
    assert g.shape == beta.shape == shape and not any(t.any() for t in grads)


@backends
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_main_grad_of_the_vectors(backend, dtype):
    """Several passes add up in fp32. One that has no main_grad gets its gradient."""
    a, b, *plain = tensors(37, 24, dtype=dtype)
    a_log, dt_bias = (torch.nn.Parameter(t.detach().clone()) for t in plain)
    a_log.main_grad, a_log.grad_added_to_main_grad = torch.ones_like(a_log, dtype=FP32), False
    wide = [t.detach().to(FP32).requires_grad_() for t in (a, b, *plain)]
    with small_tiles(module):
        for _ in range(2):
            op(backend)(a, b, a_log, dt_bias)[0].square().sum().backward()
    (2 * op("torch")(*wide)[0].square().sum()).backward()
    assert a_log.grad_added_to_main_grad
    torch.testing.assert_close(a_log.main_grad, 1 + wide[2].grad, rtol=2e-5, atol=2e-3)
    torch.testing.assert_close(dt_bias.grad.float(), wide[3].grad, rtol=2e-5 if dtype is FP32 else 2e-2, atol=2e-3)
    (da_log,) = torch.autograd.grad(op(backend)(a, b, a_log, dt_bias)[0].sum(), a_log)
    assert da_log.any() and da_log.dtype is dtype


# ---- what people wrap around it ----


@needs_triton
def test_a_new_number_of_rows_binds_nothing_new():
    for plan in (kernels._forward_plan, kernels._backward_plan):
        plan.cache_clear()
    for lead in ((1,), (5,), (2, 3), (3, 40)):
        gradients(op("triton"), tensors(*lead, 24))
    assert kernels._forward_plan.cache_info().currsize == kernels._backward_plan.cache_info().currsize == 1


# ---- what is said of a call ----


@needs_triton
def test_explain_names_the_kernels():
    said = onepass.explain(onepass.delta_gates, *tensors(4, 64, 32), backend="triton").variant
    assert "forward with 32 rows a program" in said and said.endswith("keeps a and b")
    assert "nothing to do" in onepass.explain("delta_gates", *tensors(0, 32), backend="triton").variant


@needs_triton
def test_what_the_kernels_do_not_take():
    many = tensors(2, 4100)
    assert "4100 heads are more than 4096" in onepass.explain("delta_gates", *many).reasons["triton"]
    assert equal(op(None)(*many), op("torch")(*many))
    a, *others = tensors(2, 8)
    with pytest.raises(RuntimeError, match=r"a is torch\.float64"):
        op("triton")(a.double(), *others)
    with pytest.raises(RuntimeError, match=r"b is torch\.float64"):
        op("triton")(a, others[0].double(), *others[1:])


_A, _V = torch.ones(5, 4, 6), torch.ones(6)


@pytest.mark.parametrize(
    ("raised", "words", "given"),
    [
        (TypeError, ("a must be a floating-point tensor",), (_A.long(), _A, _V, _V)),
        (TypeError, ("dt_bias must be a floating-point tensor", "NoneType"), (_A, _A, _V, None)),
        (ValueError, ("a must have shape", "a number"), (_A.sum(), _A.sum(), _V, _V)),
        (ValueError, ("b must have a's shape (5, 4, 6)", "(5, 6)"), (_A, _A[:, 0], _V, _V)),
        (ValueError, ("b must be on cpu, as a", "meta"), (_A, _A.to("meta"), _V, _V)),
        (ValueError, ("a_log must have shape (6,) or (24,)", "(4,)"), (_A, _A, _V[:4], _V)),
        (ValueError, ("a_log must have shape (6,) or (24,)", "(4, 6)"), (_A, _A, _A[0], _V)),
        (ValueError, ("dt_bias must have shape (6,),", "(24,)"), (_A, _A, _V, torch.ones(24))),
        (ValueError, ("dt_bias must have shape (24,),", "(6,)"), (_A, _A, torch.ones(24), _V)),
        (ValueError, ("a_log must be on cpu", "meta"), (_A, _A, _V.to("meta"), _V)),
    ],
)
def test_what_is_wrong_is_said(raised, words, given):
    refused(onepass.delta_gates, given, {}, raised, words)
