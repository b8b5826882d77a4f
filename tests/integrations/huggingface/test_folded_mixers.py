"""Norms before mixers: within the mixer's first product where that is all that reads them, and apart in all other calls."""

import copy
import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, batch, made, mutant_tests, step
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import delta_mixers, layers, mixers
from onepass.integrations.huggingface.mixers import CONVOLUTION

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
if not hasattr(modeling, CONVOLUTION):
    pytest.skip(f"transformers' models have no {CONVOLUTION}", allow_module_level=True)
causal_conv1d_fn = getattr(modeling, CONVOLUTION)
FAMILIES = {  # the layer with a mixer, and the mixer's place in it
    "NemotronH": "model.layers.0.mixer", "Mamba2": "backbone.layers.1.mixer", "Bamba": "model.layers.0.mamba",
    "GraniteMoeHybrid": "model.layers.0.mamba", "Zamba2": "model.layers.0.mamba", "Lfm2": "model.layers.0.conv",
    "Qwen3_5Text": "model.layers.0.linear_attn", "Qwen3Next": "model.layers.0.linear_attn",
}  # fmt: skip
WHOLE = {"use_cache": False}


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def pair(family, apply=huggingface.apply):
    """A model with onepass, the same without, its mixer, and the norm before it."""
    model = made(family)
    before, _ = copy.deepcopy(model), apply(model)
    place, _, name = FAMILIES[family].rpartition(".")
    layer = model.get_submodule(place)
    folds = (step for step in layer._onepass.program.steps if type(step).__name__ == "FoldedCall")  # a mutant has its own class
    (folded,) = (step for step in folds if step.call.name == name)
    return model, before, layer.get_submodule(name), layer.get_submodule(folded.norm.name)


@pytest.fixture
def norms(monkeypatch):
    """The modules of norms that ran apart."""
    found, stock = [], layers.NormMatch.__call__
    monkeypatch.setattr(layers.NormMatch, "__call__", lambda self, *given: found.append(self.module) or stock(self, *given))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_padded_and_checkpointed_batches(family, norms):
    model, before, _, norm = pair(family)
    assert_alike(step(model, **batch() | WHOLE), step(before, **batch()))
    assert norm not in norms
    padded = batch(masked=True) | WHOLE
    assert_alike(step(model, **padded), step(before, **padded))  # the mixer hides the norm's output of padded tokens
    assert norm in norms
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_alike(step(other, **batch() | WHOLE), step(before, **batch()))
    for each in (model, before):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_alike(step(model, **batch() | WHOLE), step(before, **batch()))


@pytest.mark.parametrize("family", ("NemotronH", "Lfm2", "Qwen3_5Text"))
def test_a_hook_sees_what_it_saw(family, norms):
    """Of the mixer, of its first layer and of the norm."""
    model, before, mixer, norm = pair(family)
    linear = (mixer._onepass.first or mixer._onepass.whole.inputs).linears[0]
    names = {each: name for name, each in model.named_modules()}
    for watched in (mixer, linear, norm):
        seen = []

        def keep(module, args, y, seen=seen):
            seen.append(y.detach())

        hooks = [each.get_submodule(names[watched]).register_forward_hook(keep) for each in (model, before)]
        norms.clear()
        assert_alike(step(model, **batch() | WHOLE), step(before, **batch()))
        torch.testing.assert_close(*seen)
        assert norm in norms
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", ("NemotronH", "Bamba"))
def test_adapters_read_the_norm_s_output(family):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["in_proj"], init_lora_weights=False)
    for applied_first in (True, False):
        torch.manual_seed(3)
        model = made(family)
        before = copy.deepcopy(model)
        if applied_first:
            huggingface.apply(model)
        torch.manual_seed(4)
        model = peft.get_peft_model(model, config)
        torch.manual_seed(4)
        before = peft.get_peft_model(before, config)
        if not applied_first:
            huggingface.apply(model)
        assert_alike(step(model, **batch() | WHOLE), step(before, **batch()))


@pytest.mark.parametrize("family", ("Bamba", "Qwen3_5Text"))
def test_main_grad(family):
    model = made(family)
    before, applied = copy.deepcopy(model), huggingface.apply(model, main_grad=True)
    torch.testing.assert_close(step(model, **batch() | WHOLE)[0], step(before, **batch())[0])
    for (name, found), expected in zip(model.named_parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(found.main_grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)
    applied.undo()


class Mixer(nn.Module):
    def __init__(self, twice):
        super().__init__()
        self.in_proj, self.out_proj, self.twice = nn.Linear(16, 24), nn.Linear(24, 16), twice
        self.conv1d = nn.Conv1d(24, 24, 4, groups=24)

    def forward(self, x, cache=None):
        y = causal_conv1d_fn(self.in_proj(x).transpose(1, 2), self.conv1d.weight.squeeze(1), self.conv1d.bias, "silu")
        y = self.out_proj(y.transpose(1, 2))
        return y * x.mean(-1, keepdim=True) if self.twice else y


class Layer(nn.Module):
    def __init__(self, twice):
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(16, eps=1e-6), Mixer(twice)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


@pytest.mark.parametrize("twice", (True, False))
def test_what_reads_its_input_twice(twice):
    assert_read(twice, huggingface.apply)


def assert_read(twice, apply):
    layer = Layer(twice)
    model = nn.Sequential(layer)
    model.layers = nn.ModuleList([layer])
    before, applied = copy.deepcopy(layer), apply(model)
    (row,) = (row for row in applied.rows if row.kind == "Layer")
    assert (row.by is None) is twice
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(layer(x), before(x))
    for each in (layer, before):
        each.mixer.twice = True
    torch.testing.assert_close(layer(x), before(x))


def all_is_right(applied):
    for twice in (True, False):
        assert_read(twice, applied.apply)
    for family in ("NemotronH", "Qwen3_5Text"):
        model, before, _, _ = pair(family, applied.apply)
        for masked in (False, True):
            given = batch(masked) | WHOLE
            assert_alike(step(model, **given), step(before, **given))


MUTANTS = {
    "no norm": (mixers, "MixerMatch.product", "self.first(x, folded)", "self.first(folded.unfold(x) * 0 + x)"),
    "padding or not": (mixers, "MixerMatch.folds", "any(options.get(name) is not None", "any(False"),
    "whatever the module has become": (mixers, "MixerMatch.folds", "self.read.unchanged(self.module) and", ""),
    "whatever else reads the input": (mixers, "_reader_of_input", "or not y.isfinite().all()", ""),
    "the norm twice, in one": (delta_mixers, "DeltaMixer.__call__", "folded.unfold(x), None", "folded.unfold(x), folded"),
}


test_a_mutant_is_found, test_what_mutants_are_tried_on_is_right = mutant_tests(MUTANTS, all_is_right, AttributeError)
