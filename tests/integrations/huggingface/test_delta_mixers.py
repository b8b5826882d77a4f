"""Linear attention that `apply` computes whole: the same numbers, in fewer ops, and what is left to the model's code."""

import copy
import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import VOCABULARY, assert_alike, assert_documents_are_apart, batch, made, mutant_of, step
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

import onepass
from onepass.integrations import delta_net, huggingface
from onepass.integrations.huggingface import applied as applied_module
from onepass.integrations.huggingface import delta_mixers
from onepass.integrations.huggingface.delta_mixers import DeltaMixer, find_delta_mixer
from onepass.integrations.huggingface.norms import replace_norms
from onepass.integrations.huggingface.patches import Patches

WHOLE = "causal_conv1d, gated_delta_rule, delta_gates, gated_norm_linear"
LENGTHS = (7, 5, 1, 70)


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


@pytest.fixture
def calls(monkeypatch):
    asked, stock = [], DeltaMixer.__call__
    monkeypatch.setattr(DeltaMixer, "__call__", lambda self, *given: (asked.append(1), stock(self, *given))[1])
    return asked


def mixers_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet")]


@pytest.mark.parametrize("family", ("Qwen3_5Text", "Qwen3_5MoeText", "Qwen3Next"))
def test_a_model_calls_it(family, calls):
    model = made(family, num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"])
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    assert [row.by for row in applied.rows if row.kind.endswith("GatedDeltaNet")] == [WHOLE] * 2
    for given in (batch(), batch(masked=True)):
        assert_alike(step(model, **given), step(before, **given))
    assert len(calls) == 4
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_alike(step(other, **batch(), use_cache=False), step(before, **batch()))
    assert len(calls) == 8
    left = batch() | {"attention_mask": torch.ones(2, 12, dtype=torch.long)}
    left["attention_mask"][0, :4] = 0  # padding before a text would be in its states
    assert_alike(step(model, **left), step(before, **left))
    applied.undo()
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert len(calls) == 10


@pytest.mark.parametrize("family", ("Qwen3_5Text", "Qwen3Next"))
def test_documents_are_apart(family, calls):
    assert_documents_are_apart(family, LENGTHS, 1e-4)
    assert len(calls) == 1 + len(LENGTHS)


def test_a_prompt_s_states_are_the_models(calls):
    model = made("Qwen3_5Text").eval()
    ids = torch.randint(3, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    huggingface.apply(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected) and not calls


CHANGES = {
    "a hook on the convolution": lambda mixer: mixer.conv1d.register_forward_hook(lambda *_: None),
    "a hook on a layer": lambda mixer: mixer.in_proj_b.register_forward_hook(lambda *_: None),
    "a hook on the last layer": lambda mixer: mixer.out_proj.register_forward_hook(lambda *_: None),
    "a hook on the norm": lambda mixer: mixer.norm.register_forward_hook(lambda *_: None),
    "another epsilon": lambda mixer: setattr(mixer.norm, "variance_epsilon", 0.5),
    "another gate": lambda mixer: setattr(mixer.norm, "activation", "sigmoid"),
    "other heads": lambda mixer: setattr(mixer, "head_k_dim", 4),
    "another layer": lambda mixer: setattr(mixer, "out_proj", nn.Linear(32, 32)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_was_changed_runs_its_own_code(name, calls):
    model = made("Qwen3_5Text")
    before = copy.deepcopy(model)
    huggingface.apply(model)
    torch.manual_seed(0)
    CHANGES[name](mixers_of(model)[0])
    torch.manual_seed(0)
    CHANGES[name](mixers_of(before)[0])
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert not calls


NEARLY = {
    "torch_chunk_gated_delta_rule": lambda rule: lambda *given, **options: (1.01 * rule(*given, **options)[0], None),
    "causal_conv1d_fn": lambda convolve: lambda *given, **options: -convolve(*given, **options),
    "apply_mask_to_padding_states": lambda mask: lambda hidden_states, mask: hidden_states,
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_such_a_module(name, monkeypatch):
    stock = getattr(modeling_qwen3_5, name)
    monkeypatch.setattr(modeling_qwen3_5, name, NEARLY[name](getattr(stock, "__wrapped__", stock)))
    model = made("Qwen3_5Text")
    replace_norms(model, Patches())
    assert find_delta_mixer(mixers_of(model)[0]) is None


ORDERS = {
    "gates": lambda q, k, v, z, b, a: (q, k, v, z, a, b),
    "keys": lambda q, k, v, z, b, a: (k, q, v, z, b, a),
    "heads": lambda q, k, v, z, b, a: (q, k, v.flip(2), z, b, a),
    "the output's gate": lambda q, k, v, z, b, a: (q, k, v, z.flip(2), b, a),
}


@pytest.mark.parametrize("name", (*ORDERS, None))
def test_groups_in_another_order(name, monkeypatch):
    stock, order = modeling_qwen3_next.Qwen3NextGatedDeltaNet.fix_query_key_value_ordering, ORDERS.get(name, lambda *parts: parts)
    monkeypatch.setattr(
        modeling_qwen3_next.Qwen3NextGatedDeltaNet, "fix_query_key_value_ordering", lambda *given: order(*stock(*given))
    )
    model = made("Qwen3Next")
    replace_norms(model, Patches())
    assert (find_delta_mixer(mixers_of(model)[0]) is None) is (name is not None)


def all_is_right(applied):
    assert_documents_are_apart("Qwen3_5Text", LENGTHS, 1e-4, applied.apply)
    model = made("Qwen3_5Text")
    before = copy.deepcopy(model)
    assert WHOLE in {row.by for row in applied.apply(model).rows}
    for given in (batch(), batch(masked=True)):
        given.setdefault("attention_mask", torch.ones(2, 12, dtype=torch.long))[1, :3] = 0
        assert_alike(step(model, **given), step(before, **given))
    other = made("Qwen3Next")
    before = copy.deepcopy(other)
    assert WHOLE in {row.by for row in applied.apply(other).rows}
    assert_alike(step(other, **batch()), step(before, **batch()))
    mixer = mixers_of(model)[0]
    x, whole = torch.randn(2, 5, 32), mixer._onepass.whole
    assert whole.suits(x, (), {}) and not whole.suits(x, (1,), {}) and not whole.suits(x, (), {"past_key_values": object()})


MUTANTS = {
    "documents see each other": (delta_net, "DeltaNet.__call__", "beta, cu_seqlens=cu_seqlens", "beta, cu_seqlens=None"),
    "a convolution over documents": (delta_net, "DeltaNet.__call__", "cu_seqlens=cu_seqlens, split", "cu_seqlens=None, split"),
    "padding is seen": (delta_mixers, "DeltaMixer.__call__", "(x * mask[:, :, None]).to(x.dtype)", "x"),
    "groups by values": (
        delta_mixers,
        "DeltaRoles.ordered",
        "part.unflatten(-1, (self.key_heads, -1))",
        "part.unflatten(-1, (sizes.heads, -1))",
    ),
    "the gates of groups": (delta_mixers, "DeltaRoles.ordered", "b, a = gates", "a, b = gates"),
    "another order": (delta_mixers, "DeltaMixer.__call__", "qkv, z, b, a =", "qkv, z, a, b ="),
    "caches": (delta_mixers, "DeltaMixer.suits", "and name not in _KNOWN", "and name not in (*_KNOWN, 'past_key_values')"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    mutant = mutant_of(monkeypatch, *MUTANTS[name])
    with pytest.raises((AssertionError, RuntimeError, ValueError, TypeError, pytest.fail.Exception)):
        all_is_right(mutant)


def test_nothing_is_found_without_a_mutant():
    all_is_right(applied_module)
