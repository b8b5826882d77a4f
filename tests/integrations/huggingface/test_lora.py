"""Layers that PEFT wraps run by `onepass.linear(lora=...)`, where an adapter is plain; everything else is PEFT's."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

import peft
from integrations.huggingface.families import FAMILIES, assert_alike, batch, made, step
from integrations.huggingface.test_wrapped_layers import with_lora
from safetensors.torch import load_file

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import linear_layers, linears, mlps
from onepass.ops.activation import activation_rows
from onepass.product.lora import LowRankRows

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning",  # transformers' and PEFT's own
    "ignore:fan_in_fan_out is set to False:UserWarning",
    "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning",
)
LAYERS = 2 * 7  # q, k, v, o, gate, up, down
TAKES = {(linear_layers, "linear"), (linears, "linear"), (linears, "norm_linear"), (mlps, "activation_linear")}  # lora=
PRODUCTS = 2 * [["norm_linear", 3], ["linear", 1], ["norm_linear", 2], ["activation_linear", 1]]  # and adapters of each


@pytest.fixture
def calls(monkeypatch):
    """Record the ops' calls with adapters, and how many each has."""
    found = []

    def watch(module, name):
        stock = getattr(module, name)

        def call(*args, lora=None, **options):
            if lora:
                found.append([name, len(lora)])
            return stock(*args, lora=lora, **options)

        monkeypatch.setattr(module, name, call)

    for module, name in TAKES:
        watch(module, name)
    return found


def rows(applied):
    return [(row.by, row.why) for row in applied.rows if row.part == "lora"]


def replaced(applied):
    """Return what stands for each part of the model, and what was left of it."""
    rows = [row for row in applied.rows if row.part != "lora"]
    names = [row.name.removeprefix("base_model.model.").replace(".base_layer", "") for row in rows]
    return {(name, row.part, row.by, row.why) for name, row in zip(names, rows, strict=True)}


def both(family="Llama", **options):
    """A model with PEFT, and the same with onepass."""
    head = {} if made(family).get_output_embeddings() is None else {"exclude_modules": ["lm_head", "embed_out"]}
    model = with_lora(made(family, tie_word_embeddings=False), **head, **options)
    before = copy.deepcopy(model)
    return model, before, huggingface.apply(model)


def assert_steps_alike(model, before):
    torch.manual_seed(5)
    found = step(model, **batch())
    torch.manual_seed(5)
    assert_alike(found, step(before, **batch()))


def test_a_layer_is_four_products_and_undo_gives_peft_back(calls):
    model, before, applied = both()
    assert rows(applied) == [("lora_linear", None)] * LAYERS
    assert_steps_alike(model, before)
    assert calls == PRODUCTS
    assert all(p.grad is None for name, p in model.named_parameters() if "lora_" not in name)
    applied.undo()
    calls.clear()
    model.zero_grad(set_to_none=True)
    before.zero_grad(set_to_none=True)
    assert_steps_alike(model, before)
    assert not calls


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_replaced_as_without_adapters(family):
    """PEFT's layers change nothing of what is recognised, whether PEFT or onepass comes first."""
    plain = made(family, tie_word_embeddings=False)
    after, first = copy.deepcopy(plain), with_lora(copy.deepcopy(plain))
    before = copy.deepcopy(first)
    expected = replaced(huggingface.apply(plain))
    applied, later = huggingface.apply(first), huggingface.apply(after)
    after = with_lora(after)
    assert replaced(applied) == expected
    moved = {row for row in replaced(later) if row[0].endswith("experts")}  # whose parameters PEFT wraps: it says so
    assert replaced(later) - moved == {row for row in expected if not row[0].endswith("experts")}
    for model in (first, after):
        before.zero_grad(set_to_none=True)
        assert_alike(step(model, **batch()), step(before, **batch()), 5e-4)  # Qwen2's gradients are small differences


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"use_dora": True}, "its LoRA is a variant, DoraLinearVariant"),
        ({"lora_bias": True}, "its LoRA is made of other than torch.nn.Linear without a bias"),
    ],
)
def test_what_is_no_plain_adapter_runs_by_peft_and_is_named(options, why, calls):
    model, before, applied = both(**options)
    assert rows(applied) == [(None, why)] * LAYERS
    assert not any(row.by for row in applied.rows if row.part == "qkv" and row.kind.endswith("Attention"))
    assert_steps_alike(model, before)
    assert not calls


def test_dropout(calls, monkeypatch):
    """A mask for each product in training, which a recomputed layer draws again, and none in evaluation."""
    model, before, applied = both(lora_dropout=0.3)
    rates = set()
    for module, name in TAKES:
        stock = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *a, lora=None, stock=stock, **kw: rates.update(x.dropout for x in lora or ()) or stock(*a, lora=lora, **kw),
        )
    assert not [row for row in applied.left if row.part != "norm"]
    steps = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        steps.append(step(model, **batch()))
    assert rates == {0.3} and calls == 3 * PRODUCTS
    assert steps[0][0] == steps[1][0] != steps[2][0]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    assert_alike(step(model, **batch()), steps[0], 0)
    rates.clear()
    assert_alike(step(model.eval(), **batch()), step(before.eval(), **batch()))
    assert rates == {0.0}


def test_rates_of_dropout_that_differ_have_products_of_their_own(calls):
    model, before, _ = both()
    for each in (model, before):
        block = each.base_model.model.model.layers[0]
        block.mlp.up_proj.lora_dropout["default"] = nn.Dropout(0.5)
    step(model, **batch())
    assert calls == [*PRODUCTS[:2], *[["linear", 1]] * 3, *PRODUCTS[4:]]
    assert_alike(step(model.eval(), **batch()), step(before.eval(), **batch()))


def test_what_changes_later_is_seen_in_the_next_call(calls):
    model, before, applied = both()
    for each in (model, before):
        torch.manual_seed(7)
        each.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["lm_head"]))
        torch.manual_seed(8)
        each.add_adapter("other", peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "down_proj"]))
    twice = [[name, 2 * count] for name, count in PRODUCTS]
    for change, expected in (
        (lambda m: m.base_model.set_adapter("second"), PRODUCTS),
        (lambda m: m.base_model.set_adapter(["default", "second"]), twice),
        (lambda m: m.base_model.disable_adapter_layers(), []),
        (lambda m: (m.base_model.enable_adapter_layers(), m.base_model.set_adapter("default")), PRODUCTS),
        (lambda m: m.base_model.merge_adapter(), []),
        (lambda m: m.base_model.unmerge_adapter(), PRODUCTS),
    ):
        for each in (model, before):
            change(each)
        calls.clear()
        with torch.no_grad():
            torch.testing.assert_close(model(**batch()).loss, before(**batch()).loss)
        assert sum(count for _, count in calls) == sum(count for _, count in expected)  # q, k and v apart, for a cache
        calls.clear()
        for each in (model, before):
            each.get_input_embeddings().requires_grad_()  # else nothing asks for a gradient
            each.zero_grad(set_to_none=True)
        assert_steps_alike(model, before)
        assert calls == expected
        assert not [row for row in applied.left if row.part != "norm"]
    for each in (model, before):
        each.base_model.set_adapter("other")
    changed = {row.name.rpartition(".")[2]: row.why for row in applied.left}
    why = "its LoRA is a variant, DoraLinearVariant"
    assert changed == dict.fromkeys(("q_proj", "self_attn", "down_proj"), f"changed since: {why}")


def test_a_hook_on_one_layer_takes_apart_what_it_is_in(calls):
    model, before, _ = both()
    seen = []
    block = model.base_model.model.model.layers[0]
    block.mlp.down_proj.base_layer.register_forward_hook(lambda *_: seen.append("down"))
    block.self_attn.q_proj.register_forward_hook(lambda *_: seen.append("q"))
    assert_steps_alike(model, before)
    assert seen == ["q", "down"]
    assert calls == [["linear", 1]] * 6 + PRODUCTS[4:]  # q, k, v, o, gate and up


def test_adapters_by_row_run_by_peft(calls):
    model, before, _ = both()
    model.eval()
    before.eval()
    inputs = {k: v for k, v in batch().items() if k != "labels"}
    names = ["default", "__base__"] * (len(inputs["input_ids"]) // 2)
    found, expected = (each(**inputs, adapter_names=names).logits for each in (model, before))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not calls


def test_generation_with_a_cache(calls):
    """A cache wants q, k and v apart: PEFT's layers then read the norm's output."""
    model, before, _ = both()
    prompt = batch()["input_ids"][:, :5]
    found, expected = (each.eval().generate(input_ids=prompt, max_new_tokens=6, do_sample=False) for each in (model, before))
    assert torch.equal(found, expected) and calls


@pytest.mark.parametrize("reentrant", (False, True))
def test_with_gradient_checkpointing(reentrant, calls):
    model, before, _ = both()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_steps_alike(model, before)
    assert calls == 2 * PRODUCTS or calls == PRODUCTS + PRODUCTS[4:] + PRODUCTS[:4]


def test_saved_adapters_are_pefts(tmp_path):
    model, before, _ = both()
    for name, each in (("ours", model), ("stock", before)):
        each.save_pretrained(tmp_path / name)
    found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "stock"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_part_of_the_layers(calls):
    """q and v alone, as in many recipes: k's rows of the product have no adapter."""
    model, before, applied = both(target_modules=["q_proj", "v_proj", "up_proj"])
    assert_steps_alike(model, before)
    assert calls == 2 * [["norm_linear", 2], ["norm_linear", 1]]
    assert not applied.left


def test_modules_to_save_and_biases_that_train(calls):
    model, before, _ = both(target_modules=["q_proj", "down_proj"], modules_to_save=["up_proj"], bias="lora_only")
    assert_steps_alike(model, before)
    assert calls


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
    assert calls == PRODUCTS
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


def test_gradients_that_come_of_the_activations_backward(monkeypatch):
    """Those of down's a, and of gate's and up's b: nobody reads the activation, or its gradient, for them."""
    sums, asked = [], []
    backward, product_with = activation_rows.lora_backward, LowRankRows.product_with
    monkeypatch.setattr(activation_rows, "lora_backward", lambda *args: sums.append(1) or backward(*args))
    monkeypatch.setattr(LowRankRows, "product_with", lambda *args: asked.append(product_with(*args)) or asked[-1])
    model = with_lora(made().to(torch.bfloat16))
    huggingface.apply(model)
    with onepass.use_backend("triton"):
        step(model, **batch())
    assert len(sums) == 2
    assert sum(db is not None for db in asked) == 2
