"""Causal convolutions of models, by `onepass.causal_conv1d`: the same numbers, documents apart, and what is left."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, assert_documents_are_apart, batch, made, mutant_of, step
from transformers.models.lfm2 import modeling_lfm2

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import applied as applied_module
from onepass.integrations.huggingface import convolutions, mixers
from onepass.integrations.huggingface.convolutions import is_causal_convolution

HYBRIDS = ("Qwen3Next", "NemotronH", "GraniteMoeHybrid", "FalconH1", "Lfm2")
LENGTHS = (7, 5, 1, 11)


@pytest.fixture(autouse=True)
def _by_pytorch(monkeypatch):
    monkeypatch.setattr(mixers, "find_delta_mixer", lambda *given: None)  # test_delta_mixers.py has mixers as a whole
    with onepass.use_backend("torch"):
        yield


def stock(x, weight, bias=None, activation=None, **_):
    y = F.conv1d(x, weight[:, None], bias, padding=weight.shape[-1] - 1, groups=x.shape[1])[..., : x.shape[-1]]
    return y if activation is None else F.silu(y)


NEARLY = {
    "later tokens": lambda x, weight, *a, **k: stock(x.flip(2), weight, *a, **k).flip(2),
    "no bias": lambda x, weight, bias=None, activation=None: stock(x, weight, None, activation),
    "no activation": lambda x, weight, bias=None, activation=None: stock(x, weight, bias),
    "gelu": lambda x, w, bias=None, activation=None: F.gelu(stock(x, w, bias)) if activation else stock(x, w, bias),
    "weights from behind": lambda x, weight, *a, **k: stock(x, weight.flip(1), *a, **k),
    "a pair": lambda *a, **k: (stock(*a, **k), None),
    "other arguments": lambda x, weight, bias=None: stock(x, weight, bias),
}


def test_what_is_a_causal_convolution():
    assert is_causal_convolution(stock)


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_one(name, monkeypatch):
    assert not is_causal_convolution(NEARLY[name])
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", NEARLY[name])
    (row,) = (row for row in huggingface.apply(made("Lfm2")).rows if row.kind == "Lfm2ShortConv")
    assert row.why == "its causal_conv1d_fn computes something else"


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_model_calls_it(family, monkeypatch):
    calls, stock = [], convolutions.causal_conv1d
    monkeypatch.setattr(convolutions, "causal_conv1d", lambda *a, **k: calls.append(k["activation"]) or stock(*a, **k))
    model = made(family)
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    rows = [row for row in applied.rows if (row.by or "").startswith("causal_conv1d")]
    calls.clear()  # of trials
    for given in (batch(), batch(masked=True)):
        assert_alike(step(model, **given), step(before, **given))
    assert calls == [None if family == "Lfm2" else "silu"] * 2 * len(rows) and rows
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model.model.layers[0]))
    assert_alike(step(copies[0], **batch()), step(before, **batch()))
    calls.clear()
    applied.undo()
    step(model, **batch())
    assert not calls


def test_documents_are_apart():
    assert_documents_are_apart("Lfm2", LENGTHS, 1e-5)


@pytest.mark.parametrize(("width", "activation"), [(9, "silu"), (4, "gelu")])
def test_what_onepass_has_not_is_the_models_own(width, activation):
    def own(x, weight, bias, activation, **_):
        return {"gelu": F.gelu, "silu": F.silu}[activation](stock(x, weight, bias))

    x, weight = torch.randn(2, 3, 12), torch.randn(3, width)
    found = convolutions.convolution_of(own)(x, weight, None, activation=activation)
    torch.testing.assert_close(found, own(x, weight, None, activation))


def test_packing_of_another_kind_is_the_models_own():
    """Marks of documents."""

    def own(*_, **given):
        return given

    x, others = torch.randn(1, 3, 4), {"seq_idx": torch.zeros(1, 4)}
    assert convolutions.convolution_of(own)(x, torch.randn(3, 4), None, "silu", **others) == {"activation": "silu", **others}


def test_a_forward_of_its_own_is_kept():
    model = made("Lfm2")
    model.model.layers[0].conv.forward = lambda *a, **k: modeling_lfm2.Lfm2ShortConv.forward(model.model.layers[0].conv, *a, **k)
    (row,) = (row for row in huggingface.apply(model).rows if row.kind == "Lfm2ShortConv")
    assert row.why == "it has a forward of its own already"
    assert isinstance(model.model.layers[0].conv, nn.Module)


def all_is_right(applied):
    assert_documents_are_apart("Lfm2", LENGTHS, 1e-5, applied.apply)
    for family in ("NemotronH", "Lfm2"):
        model = made(family)
        before = copy.deepcopy(model)
        assert any((row.by or "").startswith("causal_conv1d") for row in applied.apply(model).rows)
        assert_alike(step(model, **batch()), step(before, **batch()))
    stock, modeling_lfm2.causal_conv1d_fn = modeling_lfm2.causal_conv1d_fn, NEARLY["no activation"]
    try:
        assert "causal_conv1d" not in {row.by for row in applied.apply(made("Lfm2")).rows}
    finally:
        modeling_lfm2.causal_conv1d_fn = stock


MUTANTS = {
    "documents see each other": ("convolution_of", "cu_seqlens=documents", "cu_seqlens=None"),
    "no activation": ("convolution_of", "bias, activation=activation, cu", "bias, activation=None, cu"),
    "no bias": ("convolution_of", "weight, bias, activation=activation, cu", "weight, None, activation=activation, cu"),
    "any function": ("is_causal_convolution", "or not close(", "or None is close("),
    "not tried with SiLU": ("is_causal_convolution", "in _ACTIVATIONS:", "in (None,):"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    mutant = mutant_of(monkeypatch, convolutions, *MUTANTS[name])
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        all_is_right(mutant)


def test_what_mutants_are_tried_on_is_right():
    all_is_right(applied_module)
