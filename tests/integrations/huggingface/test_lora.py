"""Layers that PEFT wraps run by `onepass.linear(lora=...)`, where an adapter is plain; everything else is PEFT's."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

import peft
from integrations.huggingface.families import assert_alike, batch, made, step
from integrations.huggingface.test_wrapped_layers import with_lora

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import lora

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning",  # transformers' and PEFT's own
    "ignore:fan_in_fan_out is set to False:UserWarning",
)
LAYERS = 2 * 7  # q, k, v, o, gate, up, down


@pytest.fixture
def calls(monkeypatch):
    """Count the layers' calls of the op."""
    made_calls = []
    stock = lora.linear

    def call(x, weight, bias, **options):
        made_calls.append(options["lora"])
        return stock(x, weight, bias, **options)

    monkeypatch.setattr(lora, "linear", call)
    return made_calls


def rows(applied):
    return [(row.by, row.why) for row in applied.rows if row.part == "lora"]


def both(**options):
    """A model with PEFT, and the same with onepass."""
    model = with_lora(made(tie_word_embeddings=False), exclude_modules=["lm_head"], **options)
    before = copy.deepcopy(model)
    return model, before, huggingface.apply(model)


def assert_steps_alike(model, before):
    torch.manual_seed(5)
    found = step(model, **batch())
    torch.manual_seed(5)
    assert_alike(found, step(before, **batch()))


def test_every_layer_runs_by_the_op_and_undo_gives_peft_back(calls):
    model, before, applied = both()
    assert rows(applied) == [("lora_linear", None)] * LAYERS
    assert_steps_alike(model, before)
    assert len(calls) == LAYERS
    assert all(p.grad is None for name, p in model.named_parameters() if "lora_" not in name)
    applied.undo()
    model.zero_grad(set_to_none=True)
    before.zero_grad(set_to_none=True)
    assert_steps_alike(model, before)
    assert len(calls) == LAYERS


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lora_dropout": 0.3}, "its LoRA has dropout, which it applies to the hidden states of its own product alone"),
        ({"use_dora": True}, "its LoRA is a variant, DoraLinearVariant"),
    ],
)
def test_what_is_no_plain_adapter_runs_by_peft_and_is_named(options, why, calls):
    model, before, applied = both(**options)
    assert rows(applied) == [(None, why)] * LAYERS
    assert_steps_alike(model, before)
    assert not calls


def test_what_changes_later_is_seen_in_the_next_call(calls):
    model, before, _ = both()
    for each in (model, before):
        torch.manual_seed(7)
        each.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["lm_head"]))
    for change in (
        lambda m: m.base_model.set_adapter(["default", "second"]),
        lambda m: m.base_model.disable_adapter_layers(),
        lambda m: (m.base_model.enable_adapter_layers(), m.base_model.set_adapter("default"), m.base_model.merge_adapter()),
    ):
        change(model)
        change(before)
        with torch.no_grad():
            torch.testing.assert_close(model(**batch()).loss, before(**batch()).loss)
        calls.clear()
        for each in (model, before):
            each.get_input_embeddings().requires_grad_()  # else nothing asks for a gradient
            each.zero_grad(set_to_none=True)
        assert_steps_alike(model, before)
        assert not calls
    for each in (model, before):
        each.base_model.unmerge_adapter()
        each.zero_grad(set_to_none=True)
    assert_steps_alike(model, before)
    assert len(calls) == LAYERS


def test_hooks_and_adapters_by_row_run_by_peft(calls):
    model, before, _ = both()
    seen = []
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    layer.base_layer.register_forward_hook(lambda *_: seen.append(1))
    assert_steps_alike(model, before)
    assert seen and len(calls) == LAYERS - 1
    calls.clear()
    model.eval()
    before.eval()
    inputs = {k: v for k, v in batch().items() if k != "labels"}
    names = ["default", "__base__"] * (len(inputs["input_ids"]) // 2)
    found, expected = (each(**inputs, adapter_names=names).logits for each in (model, before))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not calls


def test_adapters_in_fp32_beside_a_bf16_model(calls):
    """Their gradients are fp32. PEFT makes the adapters' products in fp32, and the op makes them in bf16, as under autocast."""
    exact = with_lora(made(tie_word_embeddings=False), exclude_modules=["lm_head"])
    model = copy.deepcopy(exact)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                setattr(module, name, nn.Parameter(parameter.detach().bfloat16(), requires_grad=False))
    before = copy.deepcopy(model)
    huggingface.apply(model)

    def gradients(each):
        each(**batch()).loss.backward()
        return torch.cat([p.grad.flatten() for p in each.parameters() if p.requires_grad])

    truth, mine, stock = gradients(exact), gradients(model), gradients(before)
    assert calls and mine.dtype is torch.float32
    assert (mine - truth).norm() < 2 * (stock - truth).norm()


def test_in_eight_bits(calls):
    model = with_lora(made(tie_word_embeddings=False).bfloat16(), exclude_modules=["lm_head"])
    huggingface.apply(model, precision="fp8")
    with onepass.use_backend("torch"):
        loss = model(**batch()).loss
        loss.backward()
    assert len(calls) == LAYERS
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
