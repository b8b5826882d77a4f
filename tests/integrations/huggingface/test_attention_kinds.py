"""Kinds of attention that `apply` makes one op, and those that only look so in a short trial."""

import copy
from functools import cache

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, batch, made, mutant_tests, step

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import attention_trials, attentions, rotation

pytestmark = pytest.mark.filterwarnings("ignore:.*RoPE scaling factor")


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


SCALED = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5, "rope_theta": 1e4,
}  # fmt: skip
KINDS = {  # a family's options; whether attention is one op in each layer; the pairs that are rotated, and their tables
    "GptOss": ({}, [True, True], (False, "once")),
    "Glm4": ({}, [True, True], (True, "halves")),
    "Ernie4_5_Moe": ({}, [True, True], (True, "halves")),
    "SmolLM3": ({}, [True, True], (False, "halves")),
    "GraniteMoeHybrid": ({"layer_types": ["attention"] * 2}, [True, True], None),
    "Olmo3": ({}, [True, True], (False, "halves")),
    "MiniMaxM2": ({}, [True, True], (False, "halves")),
    "Qwen3_5Text": ({"layer_types": ["full_attention"] * 2}, [True, True], (False, "halves")),
    "Ministral3": ({"rope_parameters": SCALED}, [True, True], (False, "halves")),
    "Llama4Text": ({"floor_scale": 4, "attention_chunk_size": 5}, [True, True], None),
}  # fmt: skip


@cache
def usual(family, **options):
    """Return a model of a family, batches, and the steps that it makes of them."""
    model, batches = made(family, **KINDS[family][0] | options), (batch(), batch(masked=True))
    steps = [step(model, **given) for given in batches]
    model.zero_grad()
    return model, batches, steps


def assert_kind(family, apply=huggingface.apply, **options):
    _, one_op, how = KINDS[family]
    before, batches, steps = usual(family, **options)
    model = copy.deepcopy(before)
    apply(model)
    matches = [layer.self_attn._onepass for layer in model.model.layers]
    assert [match.whole is not None for match in matches] == one_op
    found = [match.rotation and (match.rotation.interleaved, match.rotation.layout) for match in matches]
    assert found == [how, how]
    for given, expected in zip(batches, steps, strict=True):
        assert_alike(step(model, **given), expected)


@pytest.mark.parametrize("family", KINDS)
def test_attention_of_a_family(family, monkeypatch):
    calls, stock = [], attentions.attention

    def counted(*args, **options):
        calls.append(options)
        return stock(*args, **options)

    monkeypatch.setattr(attentions, "attention", counted)
    assert_kind(family)
    assert len(calls) == (2 + 2 if KINDS[family][1][0] else 0)  # of two steps
    assert all((options["sinks"] is not None) is (family == "GptOss") for options in calls)
    if family == "SmolLM3":  # its second layer rotates nothing
        assert [options["cos"] is None for options in calls] == [False, True] * 2


@pytest.mark.parametrize("family", ("Olmo3", "MiniMaxM2", "Qwen3_5Text"))
@pytest.mark.parametrize("how", ("packed", "hooked", "another norm"))
def test_norms_of_rows_and_gates(family, how, monkeypatch):
    model = made(family, **KINDS[family][0])
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    expected = "attention, q_norm and k_norm, gated" if family == "Qwen3_5Text" else "attention, q_norm and k_norm of rows"
    assert expected in {row.by for row in applied.rows}
    calls, stock = [], attentions.attention
    monkeypatch.setattr(attentions, "attention", lambda *a, **k: calls.append(k["cu_seqlens"]) or stock(*a, **k))
    given = batch()
    for each in (model, before):
        norm = each.model.layers[0].self_attn.q_norm
        if how == "hooked":
            norm.register_forward_hook(lambda _, args, y: 2 * y)
        elif how == "another norm":
            each.model.layers[0].self_attn.q_norm = torch.nn.LayerNorm(norm.weight.shape[0])
    if how == "packed":
        given |= {"position_ids": torch.tensor([[*range(5), *range(7)], [*range(12)]]), "use_cache": False}
    assert_alike(step(model, **given), step(before, **given))
    assert len(calls) == (1 if how in ("hooked", "another norm") else 2)
    assert all((documents is not None) is (how == "packed") for documents in calls)


@pytest.mark.parametrize(
    ("family", "options", "by"),
    (
        ("DeepseekV3", {"rope_interleave": True}, []),  # another function among its globals: the op rotates
        ("DeepseekV3", {"rope_interleave": False}, ["rope", "rope"]),
        ("SmolLM3", {}, ["rope"]),  # its second layer has no positions
        ("Llama", {}, ["rope", "rope"]),
    ),
    ids=str,
)
def test_a_rotation_that_is_not_called_is_not_reported(family, options, by):
    model = made(family, **options)
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    assert [row.by for row in applied.rows if row.part == "rope"] == by
    assert_alike(step(model, **batch()), step(before, **batch()))


def test_other_sinks_are_seen():
    model = made("GptOss")
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    for each in (model, before):
        with torch.no_grad():
            each.model.layers[0].self_attn.sinks.fill_(2.0)
    found, expected = step(model, **batch()), step(before, **batch())
    assert_alike(found, expected)
    assert found[1]["model.layers.0.self_attn.sinks"].abs().sum() > 0


def all_kinds_are_right(applied):
    for family in ("GptOss", "SmolLM3", "GraniteMoeHybrid", "Llama4Text", "Glm4", "Olmo3", "Qwen3_5Text"):
        assert_kind(family, applied.apply)
    assert_kind("Llama4Text", applied.apply, floor_scale=8192)


MUTANTS = {
    "early positions": (attention_trials, "_LatePositions.__torch_function__", "made + self._at if", "made if"),
    "no sinks": (attentions, "AttentionMatch.at_once", "self.module._parameters[whole.sinks]", "None"),
    "any sinks": (attention_trials, "_as_attention", "call, None, logits, weights", "call, None, None, weights"),
    "tables where there are none": (attention_trials, "_as_attention", "of_tables) if tables else None", "of_tables)"),
    "no gate": (attentions, "AttentionMatch.at_once", "gated=whole.gated", "gated=False"),
    "rows by one norm": (attention_trials, "FusedAttention.arranged", "norms[0](q), norms[1](k)", "norms[0](q), k"),
    "rows without norms": (attentions, "AttentionMatch.at_once", "if whole.rows else ()", "if False else ()"),
    "tables of pairs": (rotation, "Rotation.half", 'self.layout == "pairs"', "self.interleaved"),
    "tables once are halves": (rotation, "Rotation.half", 'self.layout == "once"', "None"),
}


test_a_mutant_is_found, test_what_mutants_are_tried_on_is_right = mutant_tests(MUTANTS, all_kinds_are_right)
