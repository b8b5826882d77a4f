"""Embeddings by `onepass.embedding`, in training alone."""

from unittest import mock

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, batch, both, made, step  # noqa: E402

import onepass  # noqa: E402
from onepass.integrations import huggingface  # noqa: E402
from onepass.integrations.huggingface import embeddings as module  # noqa: E402


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


@pytest.fixture
def calls():
    with mock.patch.object(module, "embedding", wraps=module.embedding) as called:
        yield called


@pytest.mark.parametrize("options", [{}, {"pad_token_id": 3}], ids=["", "padding"])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_loss_and_gradients_are_the_familys(family, options, calls):
    model, before, applied = both(family, **options)
    rows = [row.name for row in applied.replaced if row.by == "embedding"]
    assert rows == {"Llama": ["model.embed_tokens"], "GPT2": ["transformer.wte", "transformer.wpe"]}[family]
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert calls.call_count == len(rows)


def test_without_a_gradient_pytorchs_own_runs(calls):
    model = made("Llama")
    applied = huggingface.apply(model)
    with torch.no_grad():
        model(**batch())
    model.model.embed_tokens.weight.requires_grad_(False)
    model(**batch()).loss.backward()
    assert not calls.called
    applied.undo()
    assert "forward" not in vars(model.model.embed_tokens)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_other_tables_are_left(option, calls):
    model = made("Llama")
    model.model.embed_tokens = nn.Embedding(model.config.vocab_size, model.config.hidden_size, **option)
    applied = huggingface.apply(model)
    assert not [row for row in applied.rows if row.by == "embedding"]


def test_a_changed_table_runs_its_own_code(calls):
    model = made("Llama")
    applied = huggingface.apply(model)
    model.model.embed_tokens.max_norm = 1.0
    (row,) = [row for row in applied.rows if row.name == "model.embed_tokens"]
    assert row.by is None and "options that onepass.embedding lacks" in row.why
    model(**batch()).loss.backward()
    assert not calls.called


def test_nothing_but_an_embedding_is_nothing_to_replace():
    with pytest.raises(ValueError, match="there is nothing to replace"):
        huggingface.apply(nn.Sequential(nn.Embedding(8, 4)), norm=False, mlp=False, rope=False, qkv=False)
