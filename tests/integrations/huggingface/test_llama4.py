"""Llama 4's and Ministral 3's attention: chunks, norms after rotation, and a factor of queries by their positions."""

import copy
from dataclasses import astuple
from functools import cache
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

import transformers
from integrations.huggingface.families import VOCABULARY, assert_alike, batch, made, mutant_tests, step
from integrations.huggingface.test_packing import BATCHES, error

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import attention_trials, attentions, documents, masks, query_factors
from onepass.integrations.huggingface.documents import chunks_of
from onepass.integrations.huggingface.families import FAMILIES
from onepass.integrations.huggingface.interfaces import KeyRange
from onepass.integrations.huggingface.query_factors import QueryFactor

pytestmark = pytest.mark.filterwarnings("ignore:.*RoPE scaling factor", "ignore:.*gradient_checkpointing.*:FutureWarning")
NORMED, SCALED = "attention, qk_norm", "attention, queries scaled by position"
DENSE = {"moe_layers": [], "attention_chunk_size": 5, "floor_scale": 4}
KINDS = {  # options, what runs in each layer, and the chunks of each
    "chunks": (DENSE, [NORMED, SCALED], [5, None]),
    "mixtures": ({"attention_chunk_size": 5, "floor_scale": 4}, [NORMED, SCALED], [5, None]),
    "long chunks": (DENSE | {"attention_chunk_size": 12, "floor_scale": 8192}, [NORMED, SCALED], [12, None]),
    "no chunks": (DENSE | {"attention_chunk_size": None}, [NORMED, SCALED], [None, None]),
    "no norms": (DENSE | {"use_qk_norm": False}, ["attention", SCALED], [5, None]),
    "no temperature": (DENSE | {"attn_temperature_tuning": False}, [NORMED, "attention"], [5, None]),
    "all rotated": (DENSE | {"no_rope_layers": [1, 1], "attention_chunk_size": 1}, [NORMED] * 2, [1, 1]),
    "none rotated": (DENSE | {"no_rope_layers": [0, 0], "attention_bias": True}, [SCALED] * 2, [None, None]),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "rope_theta": 1e4}
LATE_IDS = {"position_ids": torch.arange(30, 42)[None], "use_cache": False}


@pytest.fixture(autouse=True)
def _by_pytorch(request):
    if "by_kernels" in request.node.name:
        yield
        return
    with onepass.use_backend("torch"):
        yield


def counted(monkeypatch):
    calls, stock = [], attentions.attention
    monkeypatch.setattr(attentions, "attention", lambda *a, **k: calls.append(k) or stock(*a, **k))
    return calls


def factor_of(layer):
    factor = layer.self_attn._onepass.whole.factor
    return None if factor is None else astuple(factor)


@cache
def usual(kind):
    """Return a model of a kind, batches, and the steps that it makes of them."""
    model, batches = made("Llama4Text", **KINDS[kind][0]), (batch(), batch(tokens=13), *BATCHES.values())
    steps = [step(model, **given) for given in batches]
    model.zero_grad()
    return model, batches, steps


def assert_kind(kind, apply=huggingface.apply):
    options, words, chunks = KINDS[kind]
    before, batches, steps = usual(kind)
    model = copy.deepcopy(before)
    applied = apply(model)
    assert [row.by for row in applied.rows if row.part == "qkv" and row.name.endswith("self_attn")] == words
    assert [layer.self_attn._onepass.reach.chunk for layer in model.model.layers] == chunks
    assert not [row for row in applied.rows if row.part == "rope"]  # attention rotates
    for layer, by in zip(model.model.layers, words, strict=True):
        assert factor_of(layer) == ((0.1, options["floor_scale"], 1, False) if by == SCALED else None)
    for given, expected in zip(batches, steps, strict=True):
        assert_alike(step(model, **given), expected)
    assert not model.model._onepass.refused  # markers have stood for masks in all of these


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_layers(kind, monkeypatch):
    calls = counted(monkeypatch)
    assert_kind(kind)
    assert len(calls) == 2 * (2 + len(BATCHES))
    for at, chunk in enumerate(KINDS[kind][2]):  # whole rows have boundaries where they are longer than a chunk
        assert [call["cu_seqlens"] is not None for call in calls[at : at + 3 : 2]] == [chunk in (1, 5), chunk is not None]


def ministral(apply=huggingface.apply, **options):
    model = made("Ministral3", rope_parameters=YARN | {"llama_4_scaling_beta": 0.5}, **options)
    before, applied = copy.deepcopy(model), apply(model)
    assert {row.by for row in applied.rows if row.name.endswith("self_attn")} == {"rope", SCALED}
    assert [factor_of(layer) for layer in model.model.layers] == [(0.5, 4, 0, True)] * 2
    for given in (batch(), *BATCHES.values(), batch() | LATE_IDS):
        assert_alike(step(model, **given), step(before, **given))
    assert not model.model._onepass.refused


@pytest.mark.parametrize("options", ({}, {"sliding_window": 5}), ids=str)
def test_a_factor_by_positions(options, monkeypatch):
    calls = counted(monkeypatch)
    ministral(**options)
    assert len(calls) == 2 * (2 + len(BATCHES))


@pytest.mark.parametrize("family", ("Llama4Text", "Ministral3"))
@pytest.mark.parametrize("kind", (None, "right", "packed"))
def test_in_bf16_by_kernels_it_is_as_near(family, kind):
    options = DENSE if family == "Llama4Text" else {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}}
    model = made(family, **options | {"head_dim": 16})
    before, given = copy.deepcopy(model), BATCHES[kind] if kind else batch(tokens=13)
    huggingface.apply(model)
    with onepass.use_backend("torch"):
        exact = step(copy.deepcopy(model), **given)
    assert error(step(model.bfloat16(), **given), exact) < 1.25 * error(step(before.bfloat16(), **given), exact)


@pytest.mark.parametrize("family", ("Llama4Text", "Ministral3"))
def test_each_document_is_as_it_is_alone(family):
    """Llama 4's factor goes by the place in the row, in transformers too: here it is 1."""
    model = made(family, **(DENSE | {"floor_scale": 8192} if family == "Llama4Text" else {})).eval()
    huggingface.apply(model)
    lengths = 7, 5, 1, 11
    ids = torch.randint(3, VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(5))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "cu_seq_lens_q": bounds, "use_cache": False}
    other = ids.clone()
    other[:, :7] = 3  # another first document
    with torch.no_grad():
        together, changed = (model(input_ids=each, **packed).logits for each in (ids, other))
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)
    assert together[:, 7:].equal(changed[:, 7:]) and not together[:, :7].equal(changed[:, :7])


def test_documents_that_begin_elsewhere_are_transformers():
    """It begins chunks at multiples of the positions then."""
    model = made("Llama4Text", **DENSE)
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    given = batch() | {"position_ids": torch.tensor([[*range(7, 12), *range(7)], [*range(12)]]), "use_cache": False}
    assert_alike(step(model, **given), step(before, **given))
    assert "documents that don't begin at 0" in str([row.why for row in applied.rows])


@pytest.mark.parametrize("bounds", ((0, 7, 7, 12, 24), (0, 24), (0, 0, 5, 24, 24), (0, 8, 16, 24)), ids=str)
@pytest.mark.parametrize("chunk", (1, 5, 7, 23))
def test_chunks(bounds, chunk):
    given = torch.tensor(bounds, dtype=torch.int32)
    found = [chunks_of(given, 1, 24, chunk, given.device)]
    assert len(found[0]) == 1 + KeyRange(chunk=chunk).count(given, 1, 24)
    if bounds == (0, 8, 16, 24):  # whole rows
        found.append(chunks_of(None, 3, 8, chunk, given.device))
        assert chunk > 8 or len(found[1]) == 1 + KeyRange(chunk=chunk).count(None, 3, 8)
    expected = {at for first, end in pairwise(bounds) for at in range(first, end, chunk)} | {24}
    for each in found:
        assert each.dtype == torch.int32 and each.diff().min() >= 0
        assert set(each.tolist()) == expected


def test_boundaries_that_are_wrong_stay_wrong():
    for wrong in ((0, 9, 4, 24), (1, 24), (0, 5)):
        assert set(chunks_of(torch.tensor(wrong, dtype=torch.int32), 1, 24, 4, torch.device("cpu")).tolist()) == {-1}


def norms_after_rotation_by_tables_with_a_factor_stay(apply=huggingface.apply):
    model = made("Llama4Text", **DENSE)
    model.model.rotary_emb.attention_scaling = 1.5
    before, applied = copy.deepcopy(model), apply(model)
    assert [row.by for row in applied.rows if row.name.endswith("self_attn") and row.part == "qkv"] == ["linear", SCALED]
    assert_alike(step(model, **batch()), step(before, **batch()))


def test_norms_after_rotation_by_tables_with_a_factor_stay():
    norms_after_rotation_by_tables_with_a_factor_stay()


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing(reentrant):
    model = made("Llama4Text", **DENSE)
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    for each in (model, before):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        each.enable_input_require_grads()
    assert_alike(step(model, **BATCHES["left"]), step(before, **BATCHES["left"]))


def test_generation_past_a_chunk_and_undo():
    model = made("Llama4Text", **DENSE)
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    ids = batch()["input_ids"]
    one, other = (each.eval().generate(ids, max_new_tokens=6, do_sample=False) for each in (model, before))
    assert one.equal(other)
    applied.undo()
    assert_alike(step(model.train(), **batch()), step(before.train(), **batch()), 1e-6)


@pytest.mark.parametrize("name", ("attn_scale", "floor_scale", "config.attention_chunk_size", "config.rope_parameters"))
def test_a_number_that_is_changed_later_has_its_effect(name):
    family = "Ministral3" if "rope" in name else "Llama4Text"
    model = made(family, **(DENSE if family == "Llama4Text" else {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}}))
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    for each in (model, before):
        if name == "config.rope_parameters":
            each.config.rope_parameters["llama_4_scaling_beta"] = 2.0
        elif name == "config.attention_chunk_size":
            each.config.attention_chunk_size = 3
        else:
            setattr(each.model.layers[1].self_attn, name, 2)
    assert_alike(step(model, **batch()), step(before, **batch()))


def test_the_text_of_a_model_of_images_too():
    """Its text alone is run: transformers 5.24's forward of the whole raises AttributeError."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vision_output_dim", "projector_input_dim"), 32)
    tower = sizes | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "projector_output_dim": 32}
    config = transformers.Llama4Config(text_config=FAMILIES["Llama4Text"] | DENSE, vision_config=tower)
    model = transformers.Llama4ForConditionalGeneration(config).train()
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    text = [row for row in applied.rows if "language_model.model" in row.name and row.part == "qkv"]
    assert [row.by for row in text] == [NORMED, SCALED, "documents for packed and padded masks, chunks of 5"]
    for given in (batch(tokens=13), *BATCHES.values()):
        assert_alike(step(model.language_model, **given), step(before.language_model, **given))
    tower = [row for row in applied.rows if "vision" in row.name and row.part in ("qkv", "rope")]
    assert tower and not any(row.by for row in tower)


@pytest.mark.slow
@pytest.mark.parametrize("family", ("Llama4Text", "Ministral3"))
def test_compiled(family):
    torch._dynamo.reset()
    model = made(family, **(DENSE if family == "Llama4Text" else {"num_hidden_layers": 1}))
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    given = batch(tokens=13) | {"use_cache": False}
    assert_alike(step(compiled, **given), step(before, **given))


def test_the_multiplication():
    factor = QueryFactor(0.5, 4, 1, False)
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    y = factor.applied(x, 4, None)
    steps = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2]).double()
    expected = torch.cat([x[..., :4] * (1 + 0.5 * torch.log1p(steps))[None, :, None], x[..., 4:]], -1)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: factor.applied(x, 4, None), (x,), atol=1e-4)
    assert torch.autograd.gradgradcheck(lambda x: factor.applied(x, 4, None), (x,), atol=1e-4)
    assert factor.applied(x[:, :3], 4, None).shape == (2, 3, 6) and factor.applied(y, 4, None) is not y
    short = x[:, :3]
    assert factor.applied(short, 4, None) is short  # all factors are 1
    _, tangent = torch.func.jvp(lambda x: factor.applied(x, 4, None), (x.detach(),), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, factor.applied(torch.ones_like(x), 4, None))


def all_kinds_are_right(applied):
    for kind in KINDS:
        assert_kind(kind, applied.apply)
    ministral(applied.apply)
    norms_after_rotation_by_tables_with_a_factor_stay(applied.apply)


MUTANTS = {
    "no factor": (attentions, "AttentionMatch.at_once", "if whole.factor is not None:", "if False:"),
    "positions of rows": (query_factors, "QueryFactor.applied", "if self.by_ids:", "if False:"),
    "a factor too late": (query_factors, "QueryFactor.applied", "tokens - 1 + self.first <", "tokens // 4 <"),
    "keys scaled too": (attentions, "AttentionMatch.at_once", "whole.heads * self.head_size", "qkv.shape[-1] - self.head_size"),
    "a gradient without its factor": (query_factors, "_ScaledColumns.backward", "ctx.columns", "0"),
    "the step's place not looked at": (query_factors, "find_factor", "step * length - ahead - 2", "step * length + 2 ** 20"),
    "chunks from the row's start": (documents, "chunks_of", "number - (ends - parts)[document]", "number"),
    "a chunk too long": (masks, "_found", "stack.config.attention_chunk_size if", "stack.config.attention_chunk_size + 1 if"),
    "chunks of rows": (documents, "chunks_of", "torch.arange(0, tokens, chunk, device=device)", "torch.zeros(1, device=device)"),
    "any tables": (attention_trials, "_as_attention", "not fits(names, value_norm, 2.0)", "False"),
}  # fmt: skip


test_a_mutant_is_found, test_what_mutants_are_tried_on_is_right = mutant_tests(
    MUTANTS, all_kinds_are_right, AttributeError, IndexError, KeyError
)
