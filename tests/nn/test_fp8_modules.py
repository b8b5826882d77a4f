"""Modules with `precision`: results, what they show, and what becomes of a weight's scales and codes when modules are copied."""

import copy
import io
import pickle

import pytest
import torch
from ops.fp8_calls import decibels

import onepass
from onepass import FP8Recipe
from onepass.nn import MLP, ColumnParallelLinear, Linear, NormLinear, RowParallelLinear, set_precision

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODULES = {
    "Linear": lambda **how: Linear(64, 96, **how),
    "ColumnParallelLinear": lambda **how: ColumnParallelLinear(64, 96, **how),
    "RowParallelLinear": lambda **how: RowParallelLinear(64, 96, **how),
    "NormLinear": lambda **how: NormLinear(64, 96, norm="layer_norm", **how),
    "MLP": lambda **how: MLP(64, 96, **how),
}
modules = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


def run(module, x):
    y = module(x)
    return y[0] if isinstance(y, tuple) else y


def drawn(make, precision="fp8", **how):
    torch.manual_seed(1)
    return make(precision=precision, device=DEVICE, **how), torch.randn(3, 25, 64, device=DEVICE)


def states(module):
    return [p.fp8 for p in module.parameters() if hasattr(p, "fp8")]


def near(module, make, x):
    """Whether the module's result is that of its parameters now, as far as eight bits allow."""
    exact, _ = drawn(make, None)
    exact.load_state_dict(module.state_dict())
    return decibels(run(module, x).detach(), run(exact, x).detach()) > 20


@modules
@pytest.mark.parametrize("fused", (True, False))
def test_modules_run_in_eight_bits(make, fused):
    module, x = drawn(make)
    for each in module.modules():
        each.gradient_accumulation_fusion = fused
    for microbatches in (1, 2):
        for _ in range(microbatches):
            run(module, x).sum().backward()
        assert len(states(module)) == (2 if isinstance(module, MLP) else 1)
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(0.01)
    assert all(p.grad is not None for p in module.parameters())
    plain, _ = drawn(make, None)
    assert not run(plain, x).equal(run(module, x)) and near(module, make, x)


@modules
def test_precision_is_set_shown_and_checked(make):
    module, _ = drawn(make, None)
    layers = 2 if isinstance(module, MLP) else 1
    assert "precision" not in repr(module)
    recipe = FP8Recipe(scaling="row")
    for precision in ("fp8", recipe):
        assert set_precision(module, precision) == layers
        assert repr(module).count(f"precision={precision!r}") == layers
        assert repr(drawn(make, precision)[0]) == repr(module)
    assert set_precision(module, None) == layers and "precision" not in repr(module)
    for function in (lambda: set_precision(module, "fp4"), lambda: make(precision="fp4")):
        with pytest.raises(ValueError, match="precision must be None, 'fp8' or an FP8Recipe, but is 'fp4'"):
            function()


def test_another_precision_starts_other_scales():
    module, x = drawn(MODULES["Linear"])
    run(module, x)
    first = module.weight.fp8
    set_precision(module, None)
    run(module, x)
    assert module.weight.fp8 is first
    set_precision(module, FP8Recipe(margin=1))
    run(module, x)
    assert module.weight.fp8 is not first and module.weight.fp8.recipe.margin == 1


# ---- copies ----


@modules
@pytest.mark.parametrize("updated", (False, True), ids=("as it ran", "updated since"))
def test_a_deep_copy_has_the_scales_and_shares_nothing(make, updated):
    module, x = drawn(make, FP8Recipe(amax_history_len=2))
    for factor in (1, 4):
        run(module, x * factor).sum().backward()
        with torch.no_grad():
            for p in module.parameters() if updated or factor == 1 else ():
                p.mul_(0.5)
    copied = copy.deepcopy(module)
    before = run(module, x)
    assert len(states(copied)) == len(states(module)) and run(copied, x).equal(before)
    for ours, theirs in zip(states(module), states(copied), strict=True):
        theirs_now = theirs.scales.state_dict()
        for name, t in ours.scales.state_dict().items():
            assert t.equal(theirs_now[name]) and (name != "steps" or t.tolist() == [1 + updated] * 3)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(0.5)
    run(copied, x * 100).sum().backward()
    assert run(module, x).equal(before) and near(copied, make, x)


def saved(module):
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def pickled(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize(("scaling", "how"), (("delayed", saved), ("current", pickled), ("row", saved)))
@modules
def test_a_saved_module_goes_on_with_the_same_bits(make, scaling, how):
    module, x = drawn(make, FP8Recipe(scaling=scaling, amax_history_len=2))
    run(module, x).sum().backward()
    loaded = how(module)
    assert len(states(loaded)) == len(states(module))
    for step in range(3):
        ours, theirs = (run(each, x * 3**step) for each in (module, loaded))
        assert ours.equal(theirs)
        for y in (ours, theirs):
            y.sum().backward()
        with torch.no_grad():
            for p in (*module.parameters(), *loaded.parameters()):
                p.sub_(0.01)


def test_a_file_has_no_codes():
    module, x = drawn(MODULES["Linear"], bias=False)
    sizes = []
    for _ in range(2):
        stream = io.BytesIO()
        torch.save(module, stream)
        sizes.append(stream.tell())
        run(module, x)
    state = sum(t.untyped_storage().nbytes() for t in module.weight.fp8.scales.state_dict().values())
    assert sizes[1] - sizes[0] < state + 8000


@modules
def test_a_state_dict_has_parameters_only_and_loading_one_starts_scales_anew(make):
    module, x = drawn(make)
    run(module, x).sum().backward()
    assert all(isinstance(t, torch.Tensor) and t.dtype is torch.float32 for t in module.state_dict().values())
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    stream.seek(0)
    larger = {name: 5 * t for name, t in torch.load(stream, weights_only=True).items()}
    for assign in (False, True):
        module.load_state_dict(larger, assign=assign)
        assert not states(module) and near(module, make, x)
        larger = {name: 5 * t for name, t in larger.items()}


@modules
def test_weights_that_are_moved_or_replaced_get_codes_of_their_own(make):
    module, x = drawn(make)
    run(module, x)
    for p in module.parameters():
        p.data = p.data.roll(1, 0)
    assert near(module, make, x)
    if isinstance(module, Linear):
        module.weight.data = module.weight.data * 5
        assert near(module, make, x)
    module.to(torch.bfloat16)
    assert run(module, x.bfloat16()).dtype is torch.bfloat16
    module.double().float()
    assert near(module, make, x)
    moved = module.to_empty(device="meta").to_empty(device=DEVICE)
    moved.load_state_dict(drawn(make)[0].state_dict())
    assert near(moved, make, x)


# ---- inference ----


@modules
def test_inference_before_training_changes_nothing(make):
    module, x = drawn(make)
    with torch.inference_mode():
        first = run(module, x)
    run(module, x).sum().backward()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.5)
    with torch.inference_mode():
        run(module, x)
    run(module, x).sum().backward()
    fresh, _ = drawn(make)
    assert run(fresh, x).equal(first)


def test_a_weight_of_inference_mode_is_named():
    with torch.inference_mode():
        module, x = drawn(MODULES["Linear"])
        with pytest.raises(RuntimeError, match="weight must not be made in inference_mode with precision='fp8'"):
            onepass.linear(x, module.weight, precision="fp8")
