"""PEFT's LoRA of experts' weights (`target_parameters`) after `apply`: PEFT's losses and gradients, without weights made anew."""

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5")
peft = pytest.importorskip("peft", minversion="0.18")

from integrations.huggingface.families import assert_alike, batch, made, step  # noqa: E402
from ops.calls import Operators  # noqa: E402

import onepass  # noqa: E402
from onepass.integrations import huggingface  # noqa: E402
from onepass.integrations.huggingface import expert_adapters  # noqa: E402
from onepass.testing.mutants import copy_package, mutate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # transformers' and PEFT's own
BOTH = "experts.gate_up_proj", "experts.down_proj"


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def wrapped(model, parameters=BOTH, adapters=("default",), **options):
    """Return the model with experts that PEFT has wrapped. No b is 0."""
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=[], target_parameters=list(parameters), **options)
    model = peft.get_peft_model(model, config, adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, config)
    model.base_model.set_adapter(list(adapters))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model.train()


def both(family="Mixtral", **options):
    """Return a model with onepass applied, its copy from before, and the report."""
    model = wrapped(made(family), **options)
    before = copy.deepcopy(model)
    return model, before, huggingface.apply(model)


def said_of(applied):
    """What the report says of the wrappers by now: what they run by, or why not."""
    return [row.by or row.why for row in applied.rows if row.kind == "ParamWrapper"]


CASES = {
    "Mixtral": {}, "gpt-oss": {"family": "GptOss"}, "up alone": {"parameters": BOTH[:1]}, "down alone": {"parameters": BOTH[1:]},
    "two adapters": {"adapters": ("default", "second")}, "rslora": {"use_rslora": True, "family": "Qwen3Moe"},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_pefts(case):
    model, before, applied = both(**CASES[case])
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert said_of(applied) == ["experts with lora"] * 2


def test_matrices_that_lie_the_other_way():
    """PEFT before it looked at `is_transposed` took a weight's middle dimension for its layer's inputs."""
    plain = made("Mixtral")
    experts = [module for name, module in plain.named_modules() if name.endswith("experts")]
    for module in experts:
        module.is_transposed = True
    model = wrapped(plain)
    for module in experts:
        module.is_transposed = False
    before = copy.deepcopy(model)
    applied = huggingface.apply(model)
    assert said_of(applied) == ["experts with lora"] * 2
    assert_alike(step(model, **batch()), step(before, **batch()))


def test_nothing_of_the_weights_size_is_made():
    """PEFT's code adds b @ a to all experts' weights."""
    seen = []
    for model in both()[:2]:
        with Operators() as operators:
            model(**batch()).loss.backward()
        seen.append(any("baddbmm" in name for name in operators.names))
    assert seen == [False, True]


def test_disabled_merged_and_set_again():
    model, before, applied = both(adapters=("default", "second"))
    for act in (
        lambda m: m.base_model.set_adapter("second"),
        lambda m: m.merge_adapter(),
        lambda m: m.unmerge_adapter(),
        lambda m: m.base_model.set_adapter("default"),
    ):
        act(model), act(before)
        with torch.no_grad():
            torch.testing.assert_close(model(**batch()).loss, before(**batch()).loss)
    with model.disable_adapter(), before.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(**batch()).loss, before(**batch()).loss)
    assert_alike(step(model, **batch()), step(before, **batch()))
    model.merge_adapter()
    assert said_of(applied) == ["changed since: its LoRA is disabled or merged"] * 2


@pytest.mark.parametrize("depth", (1, 2), ids=("a wrapper", "the experts"))
def test_hooks_within_are_called(depth):
    """PEFT's outermost wrapper calls what it wraps."""
    model, before, applied = both()
    for each in (model, before):
        wrapper = next(module for module in each.modules() if type(module).__name__ == "ParamWrapper")
        inner = wrapper.base_layer if depth == 1 else wrapper.get_base_layer()
        inner.register_forward_hook(lambda module, args, y: 2 * y)
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert said_of(applied) == ["changed since: what it wraps has hooks or a forward of its own", "experts with lora"]


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointed(reentrant):
    model, before, _ = both()
    for each in (model, before):
        each.enable_input_require_grads()
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_alike(step(model, **batch()), step(before, **batch()))


def test_undo():
    model, before, applied = both()
    applied.undo()
    assert all("_onepass" not in vars(module) for module in model.modules())
    assert_alike(step(model, **batch()), step(before, **batch()), 0.0)


def test_what_is_left_to_peft_is_named():
    model, before, applied = both(family="GptOss", parameters=("experts.gate_up_proj_bias",))
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert said_of(applied) == ["it adapts a bias of the experts"] * 2


MUTANTS = {
    "b's ranks and experts": (
        "_active", "-1, wrapper.num_experts).permute(2, 0, 1)", "wrapper.num_experts, -1).permute(1, 0, 2)"
    ),
    "up's for down": ("ExpertAdaptersMatch.adapters", "found.get(layout.down)", "found.get(layout.up)"),
    "one of two": ("_active", "if len(parts) < 2", "if parts"),
    "two without their scales": ("_active", "each.b * each.scale", "each.b"),
    "no adapters": ("_forward", "lora=adapters", "lora=None"),
}  # fmt: skip


def is_right(module, monkeypatch):
    from onepass.integrations.huggingface import applied as applied_module

    def replace(model, patches):
        return module.replace_expert_adapters(model, patches)

    monkeypatch.setattr(applied_module, "replace_expert_adapters", replace)
    monkeypatch.setattr(module, "ExpertsMatch", expert_adapters.ExpertsMatch)
    monkeypatch.setattr(module, "LoRA", onepass.LoRA)
    for options in ({"adapters": ("default", "second")}, {}):
        model, before, _ = both(**options)
        try:
            assert_alike(step(model, **batch()), step(before, **batch()))
        except (AssertionError, RuntimeError, ValueError):
            return False
    return True


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    assert not is_right(mutate(expert_adapters, *MUTANTS[name]), monkeypatch)


def test_a_copy_without_a_change_passes(monkeypatch):
    assert is_right(copy_package(expert_adapters), monkeypatch)
