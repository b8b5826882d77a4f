"""bias_activation's dropout: the last step of forward, the first of backward, by the random numbers of dropout_add."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from ops.bias_activation_oracle import CLAMPS, GATED, PLAIN, call, cubed, cubed_derivative, plain_formula, small_tiles, wide
from ops.bias_activation_oracle import Case as ActivationCase
from ops.bias_activation_oracle import draw as drawn
from ops.calls import backends, equal, gradients, needs_triton, refused
from ops.dropout_add_oracle import SEED, halves
from ops.mutants import mutant_tests
from ops.oracle import BF16, DEVICE, FP16, FP32, LAYOUTS, judge_call, replaced
from torch.utils.checkpoint import checkpoint

import onepass
import onepass.ops.activation.bias_activation as module
from onepass.kernels import column_reduce as strips
from onepass.kernels.language import triton
from onepass.nn import BiasActivation
from onepass.ops.activation import activations, kernels
from onepass.runtime.saved import SAVES
from onepass.testing.poison import bytes_kept, saved_tensors

P = 0.3
THRESHOLD = round(P * 65536)


@pytest.fixture(autouse=True)
def _small():
    with small_tiles(module):
        yield


# ---- the oracle ----


@dataclass(frozen=True)
class Drops:
    """An activation's case, and how its seed is given."""

    case: ActivationCase
    in_memory: bool = True

    def __str__(self):
        return f"{self.case}-{'memory' if self.in_memory else 'number'}"


def formula(case):
    rows = case.W and torch.Size(case.lead).numel()
    kept = (halves(SEED, 0, rows, case.H) >= THRESHOLD).view(*case.lead, case.H).to(DEVICE)
    plain = plain_formula(case)
    return lambda *inputs: torch.where(kept, plain(*inputs) * (65536 / (65536 - THRESHOLD)), 0.0)


def judged(module, drops, backend="triton"):
    case = drops.case
    seed = torch.tensor([SEED], device=DEVICE) if drops.in_memory else SEED
    with small_tiles(module) as counters, replaced(vars(module), draw_seed=lambda *_: seed):
        by, exact = call(module, case, backend, dropout=P), partial(wide, case, formula=formula(case))
        return judge_call(by, exact, partial(drawn, case), case.dtype, counters, case.H < 32)


def main_cases():
    """Every activation, in every store and type, with the other features in turn; rows shorter than what shares random bits."""
    found = []
    for i, activation in enumerate((*PLAIN, *GATED) * 2):
        dtype = (FP32, BF16, FP16)[i % 3]
        clamp, offset = CLAMPS[i % 4] if activation in GATED else (None, 0.0)
        case = ActivationCase(
            activation, (37,) if i % 2 else (3, 7), (72, 130, 65, 33)[i % 4], dtype, (dtype, FP32, None)[i % 3],
            (FP32, None, dtype)[i % 3 - i % 2], i % 4 < 2, clamp, offset, SAVES[(i + i // 10) % 3], LAYOUTS[i % 7],
            LAYOUTS[(i // 3) % 7],
        )  # fmt: skip
        found.append(Drops(case, i % 2 == 0))
    for H in (1, 2, 5, 8):
        found.append(Drops(ActivationCase("silu", (37,), H, save="input", weight=FP32), H == 1))
        found.append(Drops(ActivationCase("swiglu", (37,), H, save="fp8"), H == 1))
    for H, layout in ((130, "sliced"), (5, "contiguous")):
        found.append(Drops(ActivationCase("geglu", (37,), H, BF16, None, FP32, linear_layout=layout), H == 5))
    return found


CASES = main_cases()


@backends
@pytest.mark.parametrize("drops", CASES, ids=str)
def test_budget(drops, backend):
    report = judged(module, drops, backend)
    assert report, report


MUTANTS = {  # name: module, function, what is there, what stands there instead
    "not in backward": (
        kernels, "_backward_kernel",
        "apply_dropout(dy, seed, rows, tile * BLOCK_H, threshold, scale, BLOCK_H)", "dy * 1.0",
    ),
    "not in forward": (
        kernels, "_forward_kernel",
        "apply_dropout(y, load_seed(seed_ptr, SEED), rows, tile * BLOCK_H, threshold, scale, BLOCK_H)", "y * 1.0",
    ),
    "every tile's columns the first's": (kernels, "_backward_kernel", "seed, rows, tile * BLOCK_H", "seed, rows, 0"),
    "rows numbered in their strip": (kernels, "_backward_kernel", "seed, rows, tile", "seed, rows - strip * ROWS, tile"),
    "seed of another call in backward": (kernels, "_backward_kernel", "(seed_ptr, SEED)", "(seed_ptr, SEED) + 1"),
    "narrow tiles of too few rows": (kernels, "_forward_plan", "ceil_div(M, tiles.block_m)", "tiles.down"),
    "last arriver sums a strip too few": (strips, "add_strips", " < STRIPS", " < STRIPS - 1"),
}


MUTANT_TESTS = mutant_tests(module, MUTANTS, CASES, judged, CASES[:6])
test_mutants_are_caught, test_a_copy_without_a_change_passes = map(needs_triton, MUTANT_TESTS)


# ---- random numbers ----


def tensors(gated=True, lead=(5, 3), H=40, dtype=FP32):
    W = 2 * H if gated else H
    x, bias = torch.randn(*lead, W, device=DEVICE, dtype=dtype), torch.randn(W, device=DEVICE, dtype=dtype)
    return [t.requires_grad_() for t in (x, bias, torch.rand(lead, device=DEVICE))]


def op(activation="swiglu", p=P, **options):
    """Each call drops the same."""

    def call(x, bias=None, weight=None):
        torch.manual_seed(11)
        return onepass.bias_activation(x, bias, activation, token_weight=weight, dropout=p, **options)

    return call


@backends
def test_it_drops_what_dropout_add_drops(backend):
    x, _, _ = tensors(False)
    y = op("silu", backend=backend)(x.detach().abs() + 1)
    torch.manual_seed(11)
    other = onepass.dropout_add(torch.ones_like(x), torch.zeros_like(x), P, backend=backend)
    assert torch.equal(y == 0, other == 0) and (y == 0).any()


@backends
def test_without_it_nothing_is_another(backend):
    inputs, state = tensors(), torch.get_rng_state()
    plain = gradients(lambda *t: onepass.bias_activation(*t[:2], "swiglu", token_weight=t[2], backend=backend), inputs)
    given = gradients(lambda *t: onepass.bias_activation(*t[:2], "swiglu", token_weight=t[2], dropout=0, backend=backend), inputs)
    assert equal(plain, given) and torch.equal(state, torch.get_rng_state())


@backends
@pytest.mark.parametrize("save", SAVES)
def test_everything_dropped(save, backend):
    y, *grads = gradients(op(p=1.0, save=save, backend=backend), tensors())
    assert not y.any() and not any(grad.any() for grad in grads)


# ---- what people wrap around it ----


@backends
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_drops_the_same_again(reentrant, save, backend):
    def layer(x, bias, weight):
        return onepass.bias_swiglu(x * 2, bias, token_weight=weight, dropout=P, save=save, backend=backend)

    def found(function):
        torch.manual_seed(2)
        return gradients(function, inputs)

    inputs = tensors()
    assert equal(found(layer), found(lambda *t: checkpoint(layer, *t, use_reentrant=reentrant)))


@backends
@pytest.mark.parametrize("save", SAVES)
def test_compiling_gives_the_same(save, backend):
    def layer(x, bias, weight):
        return onepass.bias_swiglu(x, bias, token_weight=weight, dropout=P, save=save, backend=backend) * 2

    inputs = tensors(dtype=BF16)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for function in (layer, compiled):
        torch.manual_seed(4)
        found.append(gradients(function, inputs))
    assert equal(*found)
    assert not equal(found[1], gradients(compiled, inputs))


@needs_triton
def test_somebody_may_watch_backward_alone():
    from torch.utils.flop_counter import FlopCounterMode

    inputs = tensors()
    with replaced(vars(module), draw_seed=lambda *_: SEED):  # a number, as it is on a GPU in eager mode
        y = op(backend="triton")(*inputs)
    dy = torch.randn_like(y)
    single = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    with FlopCounterMode(display=False):
        assert equal(single, torch.autograd.grad(y, inputs, dy))


@needs_triton
def test_a_seed_is_all_that_is_kept_beside_the_inputs():
    inputs = tensors()
    with saved_tensors() as kept:
        op(backend="triton")(*inputs)
    assert bytes_kept(kept, *inputs) == 8
    with saved_tensors() as kept, replaced(vars(module), draw_seed=lambda *_: SEED):
        op(backend="triton")(*inputs)
    assert bytes_kept(kept, *inputs) == 0


@backends
def test_a_bias_with_main_grad(backend):
    x, bias, weight = tensors()
    bias = torch.nn.Parameter(bias.detach())
    (expected,) = torch.autograd.grad(op(backend=backend)(x, bias, weight).sum(), bias)
    bias.main_grad = torch.zeros_like(bias)
    op(backend=backend)(x, bias, weight).sum().backward()
    torch.testing.assert_close(bias.main_grad, expected)


@backends
def test_registered_activations_and_shorthands(backend):
    activations.register_activation("cube", lambda z: z**3, cubed if triton else None, cubed_derivative if triton else None)
    try:
        x, _, _ = tensors(False)
        y, dx = gradients(op("cube", backend=backend), (x,))
        torch.testing.assert_close(y, torch.where(y == 0, 0.0, x.detach() ** 3 * (65536 / (65536 - THRESHOLD))))
        assert torch.equal(dx == 0, (y == 0) | (dx == 0)) and (y == 0).any()
    finally:
        del activations.ACTIVATIONS["cube"]
    for name in ("gelu", "swiglu", "geglu", "quick_geglu"):
        torch.manual_seed(11)
        y = getattr(onepass, f"bias_{name}")(x, dropout=P, backend=backend)
        assert torch.equal(y, op(name, backend=backend)(x))


def test_the_module_drops_in_training_only():
    layer, x = BiasActivation(80, "swiglu", dropout=P).to(DEVICE), tensors()[0]
    torch.manual_seed(11)
    y = layer(x)
    assert torch.equal(y, op()(x, layer.bias)) and (y == 0).any() and "dropout=0.3" in repr(layer)
    assert torch.equal(layer.eval()(x), onepass.bias_swiglu(x, layer.bias)) and not (layer(x) == 0).any()
    with pytest.raises(ValueError, match="dropout must be a probability"):
        BiasActivation(80, dropout=1.5)


@pytest.mark.parametrize(("p", "kind"), [(-0.1, ValueError), (1.5, ValueError), (float("nan"), ValueError), ("0.1", TypeError)])
def test_bad_input_is_named(p, kind):
    refused(onepass.bias_activation, (torch.ones(2, 6, device=DEVICE),), {"dropout": p}, kind, ("dropout must be a",))


def test_explain_says_so():
    x = torch.ones(2, 6, device=DEVICE)
    assert "16384 of 65536 dropped" in str(
        onepass.explain("bias_activation", x, dropout=0.25, backend="triton" if triton else None)
    )
