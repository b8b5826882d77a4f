"""bias_activation of a gate and a linear part in two tensors: as of the halves of one, without copying them into one."""

import pytest
import torch
from ops.bias_activation_oracle import GATED, judge_case, small_tiles, two_tensor_cases
from ops.calls import Operators, backends, equal, gradients, needs_triton
from ops.oracle import BF16, DEVICE, FP16, FP32

import onepass
import onepass.ops.activation.bias_activation as module
from onepass.testing.poison import bytes_kept, saved_tensors


@pytest.fixture(autouse=True)
def _small():
    with small_tiles(module):
        yield


def halves(lead=(5, 3), H=40, dtype=FP32):
    """Return a tensor, and the two halves of its rows, which are strided."""
    x = torch.randn(*lead, 2 * H, device=DEVICE, dtype=dtype)
    return x, x[..., :H], x[..., H:]


def op(activation="swiglu", **options):
    return lambda gate, linear, weight=None: onepass.bias_activation(
        gate, None, activation, linear=linear, token_weight=weight, **options
    )


@pytest.mark.parametrize("case", two_tensor_cases(), ids=str)
def test_the_formula_within_the_budget(case):
    report = judge_case(module, case, "torch")
    assert report, report


@backends
@pytest.mark.parametrize("dtype", (FP32, FP16, BF16))
@pytest.mark.parametrize("activation", GATED)
def test_the_same_as_of_the_halves_of_one_tensor(activation, dtype, backend):
    x, gate, linear = halves(dtype=dtype)
    weight = torch.rand(5, 3, device=DEVICE)
    for options in ({}, {"clamp": 1.0, "linear_offset": 0.5}):
        one = lambda x, weight: onepass.bias_activation(x, None, activation, token_weight=weight, backend=backend, **options)  # noqa: B023, E731
        y, dx, dweight = gradients(one, [x.requires_grad_(), weight.requires_grad_()])
        given = [t.detach().requires_grad_() for t in (gate, linear, weight)]
        found = gradients(op(activation, backend=backend, **options), given)
        expected = [y, *dx.split(40, -1), dweight]
        if backend == "triton" and DEVICE == "cpu":  # a compiler may contract differently, and vector units sum in other orders
            assert equal(found, expected)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@backends
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (0, 0), (2, 0, 8), (1,), (1, 1)])
def test_nothing_and_one_number(shape, backend):
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for _ in range(2)]
    y, dgate, dlinear = gradients(op(backend=backend), inputs)
    assert y.shape == dgate.shape == dlinear.shape == shape
    expected = gradients(lambda gate, linear: torch.nn.functional.silu(gate) * linear, inputs)
    for ours, theirs in zip((y, dgate, dlinear), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@needs_triton
def test_one_kernel_each_way_and_no_copy(kernels_launched):
    _, gate, linear = halves()
    with Operators() as watched, torch.no_grad():
        op(backend="triton")(gate, linear)
    assert kernels_launched == ["_forward_kernel"] and not any("clone" in name or "cat" in name for name in watched.names)
    gate, linear = (t.detach().requires_grad_() for t in (gate, linear))
    with saved_tensors() as kept:
        y = op(backend="triton")(gate, linear)
    assert bytes_kept(kept, gate, linear) == 0
    assert {t.untyped_storage().data_ptr() for t in kept} == {gate.untyped_storage().data_ptr()}
    kernels_launched.clear()
    grads = torch.autograd.grad(y, (gate, linear), torch.ones_like(y))
    assert kernels_launched == ["_backward_kernel"] and all(grad.is_contiguous() for grad in grads)


@needs_triton
@pytest.mark.parametrize("frozen", ("gate", "linear"))
def test_a_frozen_tensor_gets_no_gradient_in_memory(frozen, launched):
    _, gate, linear = (t.detach() for t in halves())
    (linear if frozen == "gate" else gate).requires_grad_()
    y = op(backend="triton")(gate, linear)
    launched.clear()
    y.backward(torch.ones_like(y))
    ((dy, x, _, _, _, dgate, *_, seed, linear_part, dlinear, _, _, _, _, _, _, _),) = launched
    assert seed is None and x.shape == linear_part.shape == dy.shape
    assert (dgate is None) is (frozen == "gate") and (dlinear is None) is (frozen == "linear")


@needs_triton
def test_compiling_for_any_number_of_rows():
    torch._dynamo.reset()
    compiled = torch.compile(op(backend="triton"), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 7):
        inputs = [t.detach().requires_grad_() for t in halves((rows, 2))[1:]]
        assert equal(gradients(op(backend="triton"), inputs), gradients(compiled, inputs))


@needs_triton
def test_explain_says_the_tiles_of_one_tensor():
    x, gate, linear = halves((300,), 512)
    one = onepass.explain("bias_activation", x, None, "swiglu")
    assert one.backend == "triton" and str(onepass.explain("bias_activation", gate, None, "swiglu", linear=linear)) == str(one)
