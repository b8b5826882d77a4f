"""Gemma 4's attention: one op where a layer has its own keys and values, the model's code by onepass's kernels elsewhere."""

import copy
from functools import cache

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, assert_documents_are_apart, batch, made, mutant_tests, step

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import attention_trials, attentions, interfaces, masks, rotation

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
ONE, NORMS = "attention, q_norm and k_norm, v_norm", {"attention_k_eq_v": False}
KINDS = {  # options, and what runs in each layer: the last of each kind stores its keys and values
    "wide keys as values": ({}, [ONE, f"{ONE}, keys as values", "linear", "linear"]),
    "values of their own": (NORMS, [ONE, ONE, "linear", "linear"]),
    "shared": (NORMS | {"num_kv_shared_layers": 2}, ["linear"] * 4),
    "mixtures": (
        NORMS | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
        [ONE, ONE, "linear", "linear"],
    ),
}
PACKED = {"position_ids": torch.tensor([[*range(5), *range(7)], [*range(12)]]), "use_cache": False}


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def counted(monkeypatch, module, name):
    calls, stock = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: calls.append((a, k)) or stock(*a, **k))
    return calls


@cache
def usual(kind):
    """Return a model of a kind, batches, and the steps that it makes of them."""
    model, batches = made("Gemma4Text", **KINDS[kind][0]), (batch(), batch(masked=True), batch() | PACKED)
    steps = [step(model, **given) for given in batches]
    model.zero_grad()
    return model, batches, steps


def assert_kind(kind, apply=huggingface.apply):
    words = KINDS[kind][1]
    before, batches, steps = usual(kind)
    model = copy.deepcopy(before)
    applied = apply(model)
    assert [row.by for row in applied.rows if row.part == "qkv" and row.name.endswith("self_attn")] == words
    assert {row.by for row in applied.rows if row.part == "rope"} == {"rope"}
    (stack,) = (row for row in applied.rows if row.name == "model")
    assert stack.by == "documents for packed and padded masks, windows of 5"
    for given, expected in zip(batches, steps, strict=True):
        assert_alike(step(model, **given), expected)
    assert not model.model._onepass.refused  # markers have stood for masks in all of these
    return words


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_layers(kind, monkeypatch):
    whole, heads = counted(monkeypatch, attentions, "attention"), counted(monkeypatch, interfaces, "attend_heads")
    words = assert_kind(kind)
    ones = sum(word != "linear" for word in words)
    assert len(whole) == 3 * ones
    assert len(heads) == 3 * 4 - 3 * ones - (2 if kind == "shared" else 1)  # without a window whole rows are PyTorch's
    assert {options["window"] for _, options in heads} == {5, None}


def test_documents_are_apart():
    assert_documents_are_apart("Gemma4Text", (7, 5, 1, 11), 1e-4)


def test_only_layers_with_windows_need_kernels_for_whole_rows(monkeypatch):
    """On a GPU heads that no kernel takes have PyTorch's attention where they see whole rows, and windows are still windows."""
    model = made("Gemma4Text")
    huggingface.apply(model)
    stack = model.model._onepass
    seen = []
    monkeypatch.setattr(masks, "choose", lambda *_: "triton")
    monkeypatch.setattr(masks, "attention_unsupported", lambda qkv, *_: seen.append(qkv.shape[-1] // 3))
    stack._check_kernels(1, 12, None)
    assert seen == [16, 16]
    stack._check_kernels(1, 12, torch.tensor([0, 12], dtype=torch.int32))
    assert seen == [16, 16, 16, 32, 16, 32]


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing(reentrant):
    model = made("Gemma4Text")
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    for each in (model, before):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        each.enable_input_require_grads()
    assert_alike(step(model, **batch()), step(before, **batch()))


@pytest.mark.parametrize("shared", (0, 2))
def test_generation(shared):
    model = made("Gemma4Text", attention_k_eq_v=False, num_kv_shared_layers=shared)
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    ids = batch()["input_ids"]
    one, other = (each.eval().generate(ids, max_new_tokens=6, do_sample=False) for each in (model, before))
    assert one.equal(other)
    applied.undo()
    assert_alike(step(model.train(), **batch()), step(before.train(), **batch()), 1e-6)


def test_a_hook_on_the_values_norm_is_called(monkeypatch):
    model = made("Gemma4Text")
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    whole = counted(monkeypatch, attentions, "attention")
    for each in (model, before):
        each.model.layers[0].self_attn.v_norm.register_forward_hook(lambda _, args, y: 2 * y)
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert len(whole) == 1


def test_rotation_of_one_tensor():
    single = rotation.SINGLE
    x, angles = torch.randn(2, 5, 3, 8), torch.randn(1, 5, 4)
    cos, sin = (single.doubled(table) for table in (angles.cos(), angles.sin()))
    y = single.function(x, cos, sin, unsqueeze_dim=2)
    half = torch.cat([-x[..., 4:], x[..., :4]], -1)
    torch.testing.assert_close(y, x * cos[:, :, None] + half * sin[:, :, None])
    assert single.function(x.transpose(1, 2), cos, sin).transpose(1, 2).equal(y)


def all_kinds_are_right(applied):
    for kind in KINDS:
        assert_kind(kind, applied.apply)


MUTANTS = {
    "values not normalised": (attention_trials, "FusedAttention.arranged", "v = of_values(", "v = (lambda x: x)("),
    "keys for values": (attention_trials, "FusedAttention.arranged", "k if self.shares else values[0]", "k"),
    "shared states not looked for": (attention_trials, "_as_attention", "shared=_Unshared()", "shared=None"),
    "windows forgotten": (interfaces, "Interfaces.get_interface", "window=window", "window=None"),
    "sines for cosines": (rotation, "_function_of_one", "how.tables((cos, sin))", "how.tables((sin, cos))"),
}  # fmt: skip


test_a_mutant_is_found, test_what_mutants_are_tried_on_is_right = mutant_tests(
    MUTANTS, all_kinds_are_right, AttributeError, KeyError
)
