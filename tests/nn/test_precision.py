"""Eight bits of any module: its state, codes that follow its weights, and deliberately broken copies."""

import pytest
import torch
from train.checkpoint_runs import alone, batch, configured
from train.fp8_runs import FP8, FreshCodes

import onepass
from onepass.gpt import Model
from onepass.kernels.language import triton
from onepass.nn.precision import fp8_layers
from onepass.parallel import AdamW, MainGrads, MasterWeights
from onepass.product.fp8 import scales as fp8_scales
from onepass.product.fp8 import updates as fp8_updates
from onepass.product.fp8 import weight as weight_module
from onepass.product.fp8.weight import fp8_weight
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.testing.mutants import copy_package, mutate


@pytest.fixture(autouse=True, scope="module")
def _by_pytorch():
    """Not in the interpreter, in which models would take minutes."""
    with onepass.use_backend("torch"):
        yield


# ---- a module's state ----


def tiny(**settings):
    return Model(configured(**FP8 | settings)[0], seed=1)


def test_a_modules_state_is_plain_and_goes_on_to_the_bit(tmp_path):
    model, other = tiny(), tiny()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, other)]

    def step(model, optimizer, number):
        tokens = batch(number, alone())
        optimizer.zero_grad()
        loss = model(tokens.tokens, tokens.labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    for number in range(2):
        step(model, optimizers[0], number)
    torch.save({"model": model.state_dict(), "fp8": onepass.nn.fp8_state_dict(model)}, tmp_path / "it")
    torch.save(optimizers[0].state_dict(), tmp_path / "optimizer")
    read = torch.load(tmp_path / "it")  # weights_only: nothing in it is a class of ours
    assert list(read["model"]) == list(Model(configured(ffn_hidden_size=32)[0], seed=1).state_dict())
    assert all(type(tensor) is torch.Tensor for tensor in read["model"].values())
    step(other, optimizers[1], 7)
    other.load_state_dict(read["model"])
    onepass.nn.load_fp8_state_dict(other, read["fp8"])
    optimizers[1].load_state_dict(torch.load(tmp_path / "optimizer"))
    for number in range(2, 4):
        assert step(model, optimizers[0], number) == step(other, optimizers[1], number)
    one, two = (onepass.nn.fp8_state_dict(each) for each in (model, other))
    assert list(one) == [each.name for each in fp8_layers(model)] and one.keys() == two.keys()
    for name, state in one.items():
        assert all(torch.equal(v, two[name][k]) if isinstance(v, torch.Tensor) else v == two[name][k] for k, v in state.items())


def test_a_modules_state_of_another_recipe_or_weight_raises_and_changes_nothing():
    model, other = tiny(), tiny(fp8_amax_history_len=3)
    tokens = batch(0, alone())
    for each in (model, other):
        assert onepass.nn.fp8_state_dict(each) == {} == onepass.nn.fp8_saturations(each)
        each(tokens.tokens, tokens.labels).backward()
    state, name = onepass.nn.fp8_state_dict(model), "layers.0.self_attention.linear_qkv.weight"
    before = other.get_parameter(name).fp8
    with pytest.raises(ValueError, match=f"amax_history_len must be 16 for {name}, as in the state, but is 3"):
        onepass.nn.load_fp8_state_dict(other, state)
    with pytest.raises(ValueError, match=r"state must be of the module's parameters, but has nowhere"):
        onepass.nn.load_fp8_state_dict(model, {"nowhere": state[name]})
    assert other.get_parameter(name).fp8 is before
    onepass.nn.load_fp8_state_dict(model, {name: state[name]})
    assert list(onepass.nn.fp8_state_dict(model)) == [name]  # the others start anew


def test_codes_are_made_anew_after_a_load():
    model, other = tiny(), tiny()
    tokens = batch(0, alone())
    loss = model(tokens.tokens, tokens.labels)
    other.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})
    large = other(tokens.tokens, tokens.labels)
    assert large != loss
    other.load_state_dict(model.state_dict())
    onepass.nn.load_fp8_state_dict(other, onepass.nn.fp8_state_dict(model))
    assert other(tokens.tokens, tokens.labels) == loss


# ---- codes follow the weights ----


def _stepped_by(kind, layer):
    """Return a function that steps the layer, by this kind of optimizer."""
    if kind.startswith("torch"):
        options = {} if kind == "torch" else {kind.split()[1]: True}
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)
        return optimizer.step
    if kind == "by .data":
        return ByData(layer.parameters()).step
    main_grads = MainGrads(layer)
    if kind == "masters":
        optimizer = MasterWeights(main_grads, lambda groups: torch.optim.AdamW(groups, lr=0.1))
    else:
        optimizer = AdamW(main_grads, lr=0.1)

    def step():
        main_grads.finish()
        optimizer.step()
        main_grads.zero_()

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["torch", "torch foreach", "torch fused", "by .data", "onepass", "masters", "kernels"])
def test_codes_are_those_of_the_weight_after_each_step(kind, dtype, monkeypatch):
    if kind == "kernels" and triton is None:
        pytest.skip("triton is not installed")
    layer = onepass.nn.Linear(32, 48, bias=False, dtype=dtype, precision=FP8Recipe(amax_history_len=2))
    fresh, x = FreshCodes(monkeypatch), torch.randn(8, 32, dtype=dtype)
    with onepass.use_backend("triton" if kind == "kernels" else "torch"):
        step = _stepped_by(kind, layer)
        for _ in range(3):
            before = layer.weight.detach().clone()
            layer(x).float().square().mean().backward()
            step()
            assert not layer.weight.equal(before)
    assert fresh.used >= 3 and not fresh.stale


def test_a_view_has_the_state_of_its_parameter():
    layer = onepass.nn.ColumnParallelLinear(32, 48, precision="fp8")
    layer.gradient_accumulation_fusion = False  # its op gets a view, made anew each time
    for _ in range(2):
        layer(torch.randn(4, 32))[0].sum().backward()
    state = layer.weight.fp8
    with torch.no_grad():
        layer(torch.randn(4, 32))
        assert fp8_weight(layer.weight.view_as(layer.weight), state.recipe) is state
        part = layer.weight[:16]
    assert fp8_weight(part, state.recipe) is not state and layer.weight.fp8 is state


# ---- mutants ----


class ByData(torch.optim.SGD):
    """Writes weights past their versions, so large that some saturate."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(2.2).sub_(parameter.grad * (0.3 * parameter.data.norm() / parameter.grad.norm()))


def _goes_on(nn):
    """Whether a layer of this `onepass.nn` that is saved and loaded goes on as it was, before scales are refreshed and after."""
    found = []
    for refreshed in (False, True):
        made = [nn.ColumnParallelLinear(32, 48, bias=False, precision="fp8") for _ in range(2)]
        made[1].load_state_dict(made[0].state_dict())

        def step(layer, number):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(number)) * 2**number
            layer.weight.grad = None
            y = layer(x)[0]
            (y * y).mean().backward()
            ByData(layer.parameters()).step()
            return y.detach()

        made[0].gradient_accumulation_fusion = False
        for number in range(2):
            step(made[0], number)
        if refreshed:
            with torch.no_grad():
                made[0](torch.ones(16, 32))
        state = nn.fp8_state_dict(made[0])
        if not state:
            return False
        state = {name: dict(each) for name, each in state.items()}
        weights = {name: tensor.clone() for name, tensor in made[0].state_dict().items()}
        made[1].load_state_dict(weights)
        nn.load_fp8_state_dict(made[1], state)
        for number in range(2, 5):
            found.append(step(made[0], number).equal(step(made[1], number)))
        one, two = (layer.weight.fp8.scales.state_dict() for layer in made)
        found += [tensor.equal(two[name]) for name, tensor in one.items()]
        exact = torch.nn.functional.linear(torch.ones(16, 32), made[0].weight)
        found.append((made[0](torch.ones(16, 32))[0] - exact).norm().item() < 0.3 * exact.norm().item())
    return all(found)


MUTANTS = {
    "a refresh more": (weight_module, "FP8Weight.load_state_dict", "else None", "else BEFORE_ANY"),
    "a refresh less": (weight_module, "FP8Weight.load_state_dict", 'BEFORE_ANY if state["updated"]', 'None if state["updated"]'),
    "what was noted is lost": (fp8_scales, "FP8Scales.load_state_dict", '[:, 0] = state["amax"]', "[:, 0] = 0"),
    "scales without inverses": (fp8_scales, "FP8Scales.load_state_dict", "1 / self.factors[:, 0]", "1"),
    "scales start anew": (fp8_scales, "FP8Scales.load_state_dict", 'state["started"].to(self.steps.device)', "False"),
    "steps of optimizers are not counted": (fp8_updates, "version_of", "weight._version, _steps", "weight._version, 0"),
    "a view has a state of its own": (weight_module, "fp8_weight", "owner = whole_of(weight)", "owner = weight"),
}


def test_a_layer_goes_on():
    assert _goes_on(copy_package(onepass.nn))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    assert not _goes_on(mutate(*MUTANTS[name], entry=onepass.nn))
