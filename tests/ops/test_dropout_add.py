"""What dropout_add computes and keeps, and how it behaves under autograd, the compiler and whatever else people do to an op."""

import pytest
import torch
from ops.calls import backends, equal, gradients, needs_triton
from ops.dropout_add_oracle import Case, judge_case, known_seed, main_cases, small_tiles
from ops.oracle import BF16, DEVICE, FP32
from torch.utils.checkpoint import checkpoint

import onepass
import onepass.ops.dropout.dropout_add as module
from onepass.testing.poison import bytes_kept, saved_tensors, unchanged


@pytest.fixture(autouse=True)
def _small():
    with small_tiles(module):
        yield


def tensors(lead=(5, 3), H=40, dtype=FP32, residual=None):
    x, bias = torch.randn(*lead, H, device=DEVICE, dtype=dtype), torch.randn(H, device=DEVICE, dtype=dtype)
    return [t.requires_grad_() for t in (x, torch.randn(*lead, H, device=DEVICE, dtype=residual or dtype), bias)]


def op(p=0.3, **options):
    """Each call drops the same."""

    def call(x, residual, bias=None):
        torch.manual_seed(11)
        return onepass.dropout_add(x, residual, p, bias=bias, **options)

    return call


def dropped(x, residual, p=0.3, **options):
    """Which elements a call drops, of numbers none of which is 0."""
    return onepass.dropout_add(torch.ones_like(x), torch.zeros_like(residual), p, **options) == 0


# ---- what it computes ----


@backends
@pytest.mark.parametrize("case", main_cases(), ids=str)
def test_budget(case, backend):
    report = judge_case(module, case, backend)
    assert report, report


@backends
def test_by_hand(backend):
    x, residual = torch.tensor([[1.0, -2.0, 4.0]] * 64, device=DEVICE), torch.full((64, 3), 10.0, device=DEVICE)
    y = onepass.dropout_add(x, residual, 0.5, bias=torch.tensor([1.0, 0.0, -1.0], device=DEVICE), backend=backend)
    for column, value in enumerate((14.0, 6.0, 16.0)):
        assert set(y[:, column].tolist()) == {10.0, value}


@backends
@pytest.mark.parametrize("options", [{"p": 0.0}, {"p": 0.9, "training": False}, {"p": 1e-6}], ids=str)
def test_where_nothing_is_dropped_no_random_state_is_used(options, backend):
    x, residual, bias = tensors()
    state = torch.get_rng_state()
    y = onepass.dropout_add(x, residual, bias=bias, backend=backend, **options)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(y, residual + (x + bias), rtol=1e-6, atol=1e-6)
    onepass.dropout_add(x, residual, 0.5, backend=backend)
    assert DEVICE == "cuda" or not torch.equal(state, torch.get_rng_state())


@backends
def test_where_everything_is_dropped_the_residual_is_left(backend):
    x, residual, bias = tensors()
    x.data[0, 0, 0], x.data[1, 1, 1] = float("nan"), float("inf")
    y, dx, dresidual, dbias = gradients(op(1.0, backend=backend), (x, residual, bias))
    assert torch.equal(y, residual.detach()) and dresidual.any() and not dx.any() and not dbias.any()


@backends
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (0, 0), (2, 0, 8)])
def test_nothing_in_nothing_out(shape, backend):
    inputs = [torch.randn(size, device=DEVICE, requires_grad=True) for size in (shape, shape, shape[-1:])]
    y, dx, dresidual, dbias = gradients(op(backend=backend), inputs)
    assert y.shape == dx.shape == dresidual.shape == shape and dbias.shape == shape[-1:] and not dbias.any()


@backends
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinities_reach_the_result_where_they_are_kept(value, backend):
    x, residual, bias = tensors((64,), 8)
    gone = dropped(x, residual, backend=backend) if torch.manual_seed(11) else None
    x = torch.full_like(x, value).requires_grad_()
    y, dx, _, dbias = gradients(op(backend=backend), (x, residual, bias))
    assert torch.equal(y.isfinite(), gone) and torch.equal(y[gone], residual.detach()[gone])
    assert dx.isfinite().all() and dbias.isfinite().all()


@backends
def test_fp64_on_any_backend_that_takes_it(backend):
    inputs = tensors(dtype=torch.float64)
    y = op()(*inputs)
    assert y.dtype == torch.float64
    if backend == "triton":
        with pytest.raises(RuntimeError, match=r"x is torch\.float64"):
            op(backend="triton")(*inputs)


# ---- random numbers ----


@backends
def test_a_seed_repeats_and_each_call_draws_anew(backend):
    x, residual, _ = tensors((16,), 64)
    torch.manual_seed(5)
    first, second = (dropped(x, residual, backend=backend) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(dropped(x, residual, backend=backend), first) and not torch.equal(first, second)
    torch.manual_seed(6)
    assert not torch.equal(dropped(x, residual, backend=backend), first)


@backends
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_drops_the_same_again(reentrant, backend):
    inputs = tensors()

    def layer(*t):
        return onepass.dropout_add(t[0] * 2, t[1], 0.3, bias=t[2], backend=backend)

    def run(function):
        torch.manual_seed(2)
        return gradients(function, inputs)

    assert equal(run(layer), run(lambda *t: checkpoint(layer, *t, use_reentrant=reentrant)))


# ---- autograd ----


@backends
def test_the_residuals_gradient_is_the_incoming_one(backend):
    x, residual, bias = tensors()
    dy = torch.randn(x.shape, device=DEVICE)
    dresidual, dx = torch.autograd.grad(op(backend=backend)(x, residual, bias), (residual, x), dy)
    assert dresidual.data_ptr() == dy.data_ptr() != dx.data_ptr()
    (dx,) = torch.autograd.grad(op(0.0, backend=backend)(x, residual, bias), x, dy)
    assert dx.data_ptr() == dy.data_ptr()


@backends
def test_it_keeps_a_seed_and_nothing_else(backend):
    inputs = tensors()
    with saved_tensors() as kept:
        y = op(backend=backend)(*inputs)
    assert bytes_kept(kept) <= 8
    with unchanged(**{f"kept{i}": t for i, t in enumerate(kept)}):
        y.sum().backward()
    with saved_tensors() as kept, known_seed(module, Case(in_memory=False)):  # as it is on a GPU in eager mode
        op(backend=backend)(*inputs).sum().backward()
        op(0.0, backend=backend)(*inputs)
    assert not kept


@backends
def test_inputs_may_be_written_before_backward(backend):
    x, residual, bias = tensors()
    leaf = x.detach().requires_grad_()
    y = op(backend=backend)(leaf * 1, residual, bias)
    expected = torch.autograd.grad(op(backend=backend)(leaf * 1, residual, bias).sum(), leaf)[0]
    h = leaf * 1
    y = op(backend=backend)(h, residual, bias)
    h.zero_()
    assert torch.equal(torch.autograd.grad(y.sum(), leaf)[0], expected)


# ---- what people wrap around it ----


@backends
def test_compiled_it_drops_what_eager_code_does_and_draws_anew(backend):
    inputs = tensors(dtype=BF16)

    def layer(x, residual, bias):
        return onepass.dropout_add(x, residual, 0.3, bias=bias, backend=backend) * 2

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.manual_seed(4)
    found = gradients(compiled, inputs)
    torch.manual_seed(4)
    assert equal(found, gradients(layer, inputs)) and not equal(found, gradients(compiled, inputs))


@needs_triton
def test_somebody_may_watch_backward_only():
    from torch.utils.flop_counter import FlopCounterMode

    inputs = tensors()
    expected = gradients(op(backend="triton"), inputs)
    with known_seed(module, Case(in_memory=False)):
        y = op(backend="triton")(*inputs)
        dy = torch.randn_like(y)
        single = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        with FlopCounterMode(display=False):
            watched = torch.autograd.grad(y, inputs, dy)
    assert equal(single, watched) and len(expected) == 4


def test_transforms_take_the_formula():
    x, residual, bias = (t.detach() for t in tensors((4,)))
    y = torch.func.vmap(lambda a, b: onepass.dropout_add(a, b, 0.5), randomness="different")(torch.ones_like(x), 0 * residual)
    assert set(y.flatten().tolist()) == {0.0, 2.0} and not torch.equal(y[0], y[1])
    _, tangent = torch.func.jvp(lambda t: op(0.5)(t, residual, bias), (x,), (torch.ones_like(x),))
    assert set(tangent.flatten().tolist()) == {0.0, 2.0}


@backends
def test_a_tensor_that_is_its_own_residual(backend):
    x, _, _ = tensors()
    y = op(0.5, backend=backend)(x, x)
    dy = torch.randn_like(y)
    expected = torch.where(y == x, dy, 3 * dy)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], expected)


def test_explain_says_what_is_kept_and_dropped():
    x, residual, bias = tensors()
    said = str(onepass.explain(onepass.dropout_add, x, residual, 0.25, bias=bias, backend="triton"))
    assert "16384 of 65536 dropped, the seed kept and no mask" in said and "the bias gradient in the same kernel" in said
    assert "nothing dropped" in str(onepass.explain("dropout_add", x, residual, 0.25, training=False, backend="triton"))
    assert "no backward to do" in str(onepass.explain("dropout_add", x, residual, 0.0, backend="triton"))
