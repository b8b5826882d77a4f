"""The gated delta rule of models, by `onepass.gated_delta_rule`: the same numbers, documents apart, and what is left."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import VOCABULARY, assert_alike, assert_documents_are_apart, batch, made, mutant_of, step
from transformers.models.qwen3_next import modeling_qwen3_next

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import applied as applied_module
from onepass.integrations.huggingface import delta_rules, mixers
from onepass.integrations.huggingface.delta_rules import DELTA_RULE, delta_rule_of, is_delta_rule

if not hasattr(modeling_qwen3_next, DELTA_RULE):
    pytest.skip(f"transformers' models have no {DELTA_RULE}", allow_module_level=True)
stock = getattr(modeling_qwen3_next, DELTA_RULE).__wrapped__
BOTH = "causal_conv1d, gated_delta_rule"
LENGTHS = (7, 5, 1, 70)


@pytest.fixture(autouse=True)
def _by_pytorch(monkeypatch):
    monkeypatch.setattr(mixers, "find_delta_mixer", lambda *given: None)  # test_delta_mixers.py has mixers as a whole
    with onepass.use_backend("torch"):
        yield


def _changed(**changes):
    return lambda q, k, v, **given: stock(q, k, v, **given | {name: change(given.get(name)) for name, change in changes.items()})


NEARLY = {
    "no decay": _changed(g=torch.zeros_like),
    "all is written": _changed(beta=torch.ones_like),
    "no state": _changed(initial_state=lambda _: None),
    "lengths of q and k stay": _changed(use_qk_l2norm_in_kernel=lambda _: False),
    "lengths are always one": _changed(use_qk_l2norm_in_kernel=lambda _: True),
    "a state always": _changed(output_final_state=lambda _: True),
    "another scale": lambda q, k, v, **given: stock(2 * q, k, v, **given | {"use_qk_l2norm_in_kernel": False}),
    "no states": lambda q, k, v, **given: stock(q, k, v, **given)[0],
    "other arguments": lambda q, k, v, g, beta: stock(q, k, v, g=g, beta=beta),
    "a state transposed": lambda *a, **k: [y if y is None or i == 0 else y.mT for i, y in enumerate(stock(*a, **k))],
}


def test_what_is_the_rule():
    assert is_delta_rule(stock)


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_the_rule(name):
    assert not is_delta_rule(NEARLY[name])


def test_a_function_that_is_another_is_the_models_own(monkeypatch):
    monkeypatch.setattr(modeling_qwen3_next, DELTA_RULE, NEARLY["no decay"])
    rows = [row for row in huggingface.apply(made("Qwen3Next")).rows if row.kind.endswith("GatedDeltaNet")]
    assert {row.why or row.by for row in rows} == {f"its {DELTA_RULE} computes something else", "causal_conv1d"}


def test_a_model_calls_it(monkeypatch):
    calls, ours = [], delta_rules.gated_delta_rule
    monkeypatch.setattr(delta_rules, "gated_delta_rule", lambda *a, **k: calls.append(1) or ours(*a, **k))
    model = made("Qwen3Next")
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    rows = [row for row in applied.rows if row.by == BOTH]
    calls.clear()  # of trials
    for given in (batch(), batch(masked=True)):
        assert_alike(step(model, **given), step(before, **given))
    assert len(calls) == 2 * len(rows) and rows
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_alike(step(other, **batch()), step(before, **batch()))
    calls.clear()
    applied.undo()
    step(model, **batch())
    assert not calls


def test_documents_are_apart():
    assert_documents_are_apart("Qwen3Next", LENGTHS, 1e-4)


def test_a_prompt_s_states_are_the_model_s():
    model = made("Qwen3Next").eval()
    ids = torch.randint(3, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    huggingface.apply(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)


def test_states_of_documents_in_several_rows_are_the_models_own():
    def own(*operands, **given):
        return given

    x, g = torch.randn(2, 4, 1, 4), torch.zeros(2, 4, 1)
    boundaries = torch.tensor([0, 4])
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "chunk_size": 32}
    given = delta_rule_of(own)(x, x, x, g=g, beta=g, cu_seqlens=boundaries, **options)
    assert given == {
        "g": g, "beta": g, "cu_seqlens": boundaries, "use_qk_l2norm_in_kernel": True, "chunk_size": 32, "initial_state": None,
        "output_final_state": True,
    }  # fmt: skip


def all_is_right(applied):
    assert_documents_are_apart("Qwen3Next", LENGTHS, 1e-4, applied.apply)
    model = made("Qwen3Next")
    before = copy.deepcopy(model)
    assert BOTH in {row.by for row in applied.apply(model).rows}
    assert_alike(step(model, **batch()), step(before, **batch()))
    for name in ("no state", "a state transposed", "no decay"):
        model, function = made("Qwen3Next"), NEARLY[name]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(modeling_qwen3_next, DELTA_RULE, function)
            assert BOTH not in {row.by for row in applied.apply(model).rows}


MUTANTS = {
    "documents see each other": ("delta_rule_of", "cu_seqlens=cu_seqlens.int()", "cu_seqlens=None"),
    "lengths of q and k stay": ("delta_rule_of", "if use_qk_l2norm_in_kernel:", "if not use_qk_l2norm_in_kernel:"),
    "lengths of K": ("_of_length_one", "K**-0.5", "1.0"),
    "any function": ("is_delta_rule", "if not close(y", "if None is close(y"),
    "any state": ("is_delta_rule", "else close(final, states, 1e-4)", "else True"),
    "not tried with a state": ("is_delta_rule", "= ({}, {", "= ({},) or ({"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    mutant = mutant_of(monkeypatch, delta_rules, *MUTANTS[name])
    monkeypatch.setitem(mutant.replace_mixers.__globals__, "find_delta_mixer", lambda *given: None)
    with pytest.raises((AssertionError, RuntimeError, ValueError, pytest.fail.Exception)):
        all_is_right(mutant)


def test_nothing_is_found_without_a_mutant():
    all_is_right(applied_module)
