"""Ops with `precision=`: who asks for which gradient, main_grad, checkpointing, failures, errors, and mutants."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from ops.calls import backends, needs_triton, says
from ops.fp8_calls import (
    BF16,
    CASES,
    DEVICE,
    ONE_OF_EACH,
    RECIPES,
    cases,
    check_decibels,
    decibels,
    equal_bits,
    give_main_grads,
    one_of_each,
    recipes,
)  # fmt: skip
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import FP8Recipe
from onepass.runtime.op import OPS
from onepass.runtime.samples import Sample, random_tensors
from onepass.testing import contract
from onepass.testing.contract import Subject
from onepass.testing.mutants import copy_package, mutate
from onepass.testing.row_contract import gives_rows_the_same_bits

linear, norm_linear, activation_linear = (
    import_module(OPS[name].function.__module__) for name in ("linear", "norm_linear", "activation_linear")
)
fp8, function, precision = (import_module(f"onepass.product.{name}") for name in ("fp8.product", "function", "precision"))
norm_rows, activation_rows = (import_module(f"onepass.ops.{name}.{name}_rows") for name in ("norm", "activation"))

# ---- the contract of every op holds with precision too ----

SHAPES = {
    "linear": (((11, 32), (48, 32), (48,)), (), {}),
    "norm_linear": (((11, 32), (32,), (48, 32), (48,), (11, 32)), ("residual",), {}),
    "norm_linear: all outputs": (
        ((11, 32), (32,), (48, 32), (48,), (32,), (11, 32)),
        ("norm_bias", "residual"),
        {"norm": "layer_norm", "return_norm_output": True},
    ),
    "activation_linear": (((11, 64), (48, 32), (48,), (64,), (11,)), ("bias", "activation_bias", "token_weight"), {}),
    "activation_linear: fp8": (((11, 64), (48, 32)), (), {"save": "fp8"}),
}
REFUSED = (
    contract.refuses_second_derivatives,
    contract.follows_transforms,
    contract.can_be_compiled,
    contract.registers_sound_ops,
)
KINDS = ("delayed", "row", "current", "16-bit wgrad")  # of recipes, of which other formats run the same code
FAILS = contract.leaves_main_grad_alone_where_it_fails  # has a test of its own
AUTOCAST = contract.works_under_autocast  # rounds before codes: test_fp8_precision.py
HELD = tuple(check for check in contract.CHECKS if check not in (*REFUSED, FAILS, AUTOCAST))


def subject(name, backend, recipe):
    shapes, keywords, options = SHAPES[name]
    sample = Sample(partial(random_tensors, shapes), None, options | {"precision": recipe}, keywords)
    return Subject(OPS[name.partition(":")[0]], backend, DEVICE, sample)


@pytest.mark.parametrize("check", HELD, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("recipe", "backend"), (pytest.param("delayed", "triton", marks=needs_triton), ("row", "torch")))
def test_an_op_holds_the_contract(name, recipe, backend, check):
    given = subject(name, backend, RECIPES[recipe])
    if check is gives_rows_the_same_bits and recipe == "delayed":
        with pytest.raises(RuntimeError, match=r"delayed scales can't run under onepass\.batch_invariant"):
            check(given)
    else:
        check(given)


@backends
@pytest.mark.parametrize("name", SHAPES)
def test_a_second_derivative_raises(name, backend):
    given = subject(name, backend, RECIPES["delayed"])
    tensors = given.tensors()
    with pytest.raises(RuntimeError, match="differentiable once"):
        given.gradients(tensors, create_graph=True)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("delayed", "torch"), ("row", "torch"), ("16-bit wgrad", "torch"), pytest.param("delayed", "triton", marks=needs_triton)],
)
def test_a_failed_call_writes_no_main_grad_or_says_so(recipe, backend, name):
    """In 16 bits, but for the formula's calls with scales of each row."""
    given = subject(name, backend, RECIPES[recipe])
    dtype = torch.float32 if (recipe, backend) == ("row", "torch") else BF16
    FAILS(replace(given, sample=replace(given.sample, dtype=dtype)))


# ---- main_grad and microbatches ----


@cases
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("delayed", "torch"), *(pytest.param(recipe, "triton", marks=needs_triton) for recipe in ("row", "16-bit wgrad"))],
)
def test_microbatches_are_summed_in_main_grad(case, recipe, backend):
    tensors, dys = case.draw()
    parameters = give_main_grads(tensors, 1.0)
    exact = case.exact(tensors, dys)
    for _ in range(3):
        ys = case(tensors, precision=RECIPES[recipe], backend=backend)
        torch.autograd.backward(ys, dys[: len(ys)])
    for name, t in tensors.items():
        found = t.main_grad - 1 if name in parameters else t.grad
        assert decibels(found, 3 * exact[name]) >= 18, name
        assert (t.grad is None) is (name in parameters)


@backends
@one_of_each
@recipes
def test_asking_for_gradients_leaves_main_grad_as_it_was(case, recipe, backend):
    tensors, dys = case.draw()
    plain = case.results(tensors, dys, precision=recipe, backend=backend)
    tensors, dys = case.draw()
    parameters = give_main_grads(tensors, 1.0)
    assert equal_bits(case.results(tensors, dys, precision=recipe, backend=backend), plain)
    assert all(bool((t.main_grad == 1).all()) for t in parameters.values())


@backends
@one_of_each
@pytest.mark.parametrize("kind", KINDS)
def test_one_gradient_alone_is_that_of_all(case, kind, backend):
    recipe = RECIPES[kind]
    whole = case.results(*case.draw(), precision=recipe, backend=backend)
    for name in case.tensors:
        tensors, dys = case.draw()
        for other, t in tensors.items():
            t.requires_grad_(other == name)
        some = case(tensors, precision=recipe, backend=backend)
        ys = [y for y in some if y.requires_grad]
        (found,) = torch.autograd.grad(ys, [tensors[name]], [dy for dy, y in zip(dys, some, strict=False) if y.requires_grad])
        assert decibels(found, whole[name]) > 45, name


# ---- scales ----


@backends
@one_of_each
@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointing_gives_equal_bits_and_scales(case, reentrant, backend):
    """Both forwards run before both backwards. Their inputs differ in size."""
    for recipe in (RECIPES[kind] for kind in KINDS[:3]):
        found, scales = zip(*(two_passes(case, recipe, backend, how) for how in (None, reentrant)), strict=True)
        assert all(map(torch.equal, *found))
        plain, again = (state.state_dict() for state in scales)
        for name in ("scale", "history", "steps", "amax"):
            assert plain[name].equal(again[name])


def two_passes(case, recipe, backend, reentrant):
    """Return outputs and gradients of two microbatches, and the scales. `reentrant`: None is without checkpoints."""
    tensors, dys = case.draw()

    def run(x):
        return case({**tensors, "x": x}, precision=recipe, backend=backend)

    passes = []
    for factor in (1, 8):
        x = (tensors["x"].detach() * factor).requires_grad_()
        passes.append((x, run(x) if reentrant is None else checkpoint(run, x, use_reentrant=reentrant)))
    for _, ys in passes:
        torch.autograd.backward(ys, dys[: len(ys)])
    parameters = [t.grad for name, t in tensors.items() if name != "x"]
    return [*(t for x, ys in passes for t in (x.grad, *ys)), *parameters], tensors["weight"].fp8.scales


@backends
@one_of_each
def test_no_grad_leaves_no_trace_in_scales(case, backend):
    tensors, dys = case.draw()
    case.results(tensors, dys, precision="fp8", backend=backend)
    state = tensors["weight"].fp8.scales
    before = {name: t.clone() for name, t in state.state_dict().items()}
    with torch.no_grad():
        case({**tensors, "x": tensors["x"] * 100}, precision="fp8", backend=backend)
    assert all(t.equal(before[name]) for name, t in state.state_dict().items() if name not in ("saturated", "underflowed"))
    if case is CASES["linear"]:
        case({**tensors, "x": tensors["x"] * 100}, precision="fp8", backend=backend)
        assert state.amax[0].view(torch.float32).max() > 90 * before["amax"][0].view(torch.float32).max()


@backends
@one_of_each
def test_calls_before_the_first_step_leave_no_trace(case, backend):
    """Scales are each call's own until a step is over. Reentrant checkpoints run all forwards of a step without gradients."""
    tensors, dys = case.draw()
    plain = case.results(tensors, dys, precision="fp8", backend=backend)
    tensors, dys = case.draw()
    for factor in (0.0, 1e-3, 1e3):
        given = {**tensors, "x": tensors["x"] * factor}
        with torch.no_grad():
            small = case(given, precision="fp8", backend=backend)
        if factor:
            exact = case.exact(given, dys)
            assert decibels(small[0], exact[0]) > 20
    assert not tensors["weight"].fp8.scales.amax.any() and not tensors["weight"].fp8.scales.counts()[0].any()
    assert equal_bits(case.results(tensors, dys, precision="fp8", backend=backend), plain)


@backends
@one_of_each
def test_a_delayed_scale_follows_what_was_seen(case, backend):
    recipe = FP8Recipe(amax_history_len=1)
    tensors, dys = case.draw()
    wide, scales = [dy * 2**12 for dy in dys], []
    for given in (dys, wide, wide):
        found = case.results(tensors, given, precision=recipe, backend=backend)
        exact = case.exact(tensors, given)
        scales.append(tensors["weight"].fp8.scales.factors[2, 0].item())
        with torch.no_grad():
            tensors["weight"].neg_()
    check_decibels(found, exact, recipe)
    assert scales[1] / 2**14 < scales[2] < scales[1] / 2**10


# ---- errors ----


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_errors_name_what_was_wrong(case):
    tensors, _ = case.draw()
    for precision in ("fp4", "FP8", 8, True, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="precision must be None, 'fp8' or an FP8Recipe, but is"):
            case(tensors, precision=precision)
    wide = {name: t.detach().double() for name, t in tensors.items()}
    with pytest.raises(TypeError, match="must be fp32, bf16 or fp16 with precision='fp8', but is fp64"):
        case(wide, precision="fp8", backend="torch")
    assert not hasattr(tensors["weight"], "fp8")


@pytest.mark.parametrize("name", ("linear", "rms", "gelu"))
def test_transforms_raise(name):
    case = CASES[name]
    tensors, _ = case.draw()
    frozen = {name: t.detach() for name, t in tensors.items()}

    def total(x):
        return case({**frozen, "x": x}, precision="fp8")[0].float().sum()

    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(RuntimeError) as raised:
            transform(total)(frozen["x"])
        says(("precision must be None under vmap and functional derivatives",), raised)
    with pytest.raises(RuntimeError) as raised:
        torch.func.jvp(total, (frozen["x"],), (frozen["x"],))
    says(("precision must be None under vmap and functional derivatives",), raised)


# ---- what looks at options ----


@backends
@one_of_each
@recipes
def test_explain_says_how_products_run(case, recipe, backend):
    tensors, _ = case.draw()

    def said(precision):
        return onepass.explain(case.function, **case.given(tensors), **case.options, precision=precision, backend=backend).variant

    assert "eight bits" not in said(None)
    kinds = "e4m3" if recipe.format == "e4m3" else "e4m3, gradients in e5m2"
    wgrad = "" if recipe.has_wgrad else ", the weight's gradient in 16 bits"
    assert f"products in eight bits ({kinds}; {recipe.scaling} scales{wgrad})" in said(recipe)
    assert not hasattr(tensors["weight"], "fp8")


def test_a_registered_backend_gets_the_option():
    given = []

    def run(*args, **options):
        given.append(options.get("precision"))
        return args[0]

    for case in ONE_OF_EACH.values():
        onepass.register_backend(case.function.__name__, "noting", run)
        try:
            tensors, _ = case.draw()
            for precision in (None, "fp8", RECIPES["row"]):
                case(tensors, precision=precision, backend="noting")
            assert given == [None, "fp8", RECIPES["row"]]
            assert not hasattr(tensors["weight"], "fp8")
        finally:
            del OPS[case.function.__name__].others["noting"]
            given.clear()


@one_of_each
def test_validate_changes_nothing(case):
    expected = case.results(*case.draw(), precision="fp8")
    with onepass.validate():
        assert equal_bits(case.results(*case.draw(), precision="fp8"), expected)


# ---- mutants ----

MUTANTS = {  # name: the op, where, what is there, what stands there instead
    "bf16 where eight bits are asked for": (linear, precision, "product_for", "if precision is not None:", "if False:"),
    "a norm's codes transposed, with another scale": (
        norm_linear, norm_rows, "NormRows.transposed_codes", "*kept, target.scale", "*kept, 2 * target.scale",
    ),
    "a norm's codes transposed without its weight": (
        norm_linear, norm_rows, "NormRows.transposed_codes", "*kept, target", "kept[0], None, *kept[2:], target",
    ),
    "x in the place of h": (norm_linear, norm_rows, "NormRows.codes", "x if h is None else h,", "x,"),
    "the gradient of the norm's output is lost": (
        norm_linear, fp8, "FP8Call.output_gradient", "drows.add_(came.view(drows.shape))", "drows",
    ),
    "nothing noted": (
        norm_linear, fp8, "FP8Product.forward",
        "inputs, needs=None), noted=needs is not None", "inputs, needs=None), noted=False",
    ),
    "an activation's codes transposed without token weights": (
        activation_linear, activation_rows, "_transposed", "None, x, bias, token_weight", "None, x, bias, None",
    ),
    "an activation without its bias": (
        activation_linear, activation_rows, "ActivationRows._codes", "(x, bias, token_weight,", "(x, None, token_weight,",
    ),
    "main_grad is not used": (
        activation_linear, function, "_Linear.forward", "main_grad_of(weight) if needs[-2] else None", "None",
    ),
}  # fmt: skip


def passes(op, backend):
    """Whether a function passes, in the place of an op, what the tests above ask: of all of its cases."""
    for stock in CASES.values():
        if stock.function.__name__ != op.__name__:
            continue
        case = stock._replace(function=op)
        tensors, dys = case.draw()
        exact = case.exact(tensors, dys)
        found = case.results(tensors, dys, precision="fp8", backend=backend)
        if any(decibels(value, exact[name]) < (25 if isinstance(name, int) else 18) for name, value in found.items()):
            return False
        if not hasattr(tensors["weight"], "fp8"):
            return False
        before = case(tensors, backend=backend)
        if found[0].equal(before[0].detach()) or not tensors["weight"].fp8.scales.amax[0].any():
            return False
        parameters = give_main_grads(tensors)
        ys = case(tensors, precision="fp8", backend=backend)
        torch.autograd.backward(ys, dys[: len(ys)])
        if any(decibels(t.main_grad, exact[name]) < 18 for name, t in parameters.items()):
            return False
    return True


@needs_triton
@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, backend):
    entry, *how = MUTANTS[name]
    op = entry.__name__.rpartition(".")[2]
    assert not passes(getattr(mutate(*how, entry=entry), op), backend)


@needs_triton
@pytest.mark.parametrize("module", (linear, norm_linear, activation_linear), ids=lambda module: module.__name__)
def test_a_copy_without_change_passes(module):
    copy = copy_package(module)
    assert all(passes(getattr(copy, module.__name__.rpartition(".")[2]), backend) for backend in ("torch", "triton"))
