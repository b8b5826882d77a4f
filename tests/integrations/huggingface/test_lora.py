"""Layers that PEFT wraps run by `onepass.linear(lora=...)`, where an adapter is plain; everything else is PEFT's."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

import peft
import transformers
from integrations.huggingface.families import MOE, VOCABULARY, assert_alike, batch, made, step
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


@pytest.mark.parametrize("family", ("Llama", "Qwen2", "Gemma2", "Phi3", "GPT2", "GPTNeoX", "OPT", "Mixtral", "Cohere", "GptOss"))
def test_a_family_is_replaced_as_without_adapters(family):
    """PEFT's layers change nothing of what is recognised, whether PEFT or onepass comes first."""
    plain = made(family, tie_word_embeddings=False)
    after, first = copy.deepcopy(plain), with_lora(copy.deepcopy(plain))
    before = copy.deepcopy(first)
    expected = replaced(huggingface.apply(plain))
    applied, later = huggingface.apply(first), huggingface.apply(after)
    after = with_lora(after)
    assert replaced(applied) == expected
    assert not [row for row in applied.left if row.part == "lora"]
    wrapped = ("experts", "mlp.gate")  # whose parameters PEFT wraps: it says so
    moved = {row for row in replaced(later) if row[0].endswith(wrapped)}
    assert replaced(later) - moved == {row for row in expected if not row[0].endswith(wrapped)}
    as_it_was = step(before, **batch())
    for model in (first, after):
        assert_alike(step(model, **batch()), as_it_was, 5e-4)  # Qwen2's gradients are small differences


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


NAMES = ["second", "default", "__base__", "second", "second", "part", "default", "__base__"]


def several():
    """Adapters of other ranks and scales, one of them of some layers alone, and a batch with a sample for each of NAMES."""
    model, before, _ = both()
    for each in (model, before):
        torch.manual_seed(7)
        options = {"init_lora_weights": False, "exclude_modules": ["lm_head"]}
        each.add_adapter("second", peft.LoraConfig(r=6, lora_alpha=3, target_modules="all-linear", **options))
        each.add_adapter("part", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **options))
        each.eval()
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("lora_" in name)
    return model, before


def samples(tokens):
    ids = torch.randint(3, VOCABULARY, (len(NAMES), tokens), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "labels": ids}


def watched_orders(monkeypatch):
    """Return a list that gets the orders that samples are taken in."""
    orders, stock = [], linear_layers._taken
    monkeypatch.setattr(linear_layers, "_taken", lambda x, order: orders.append(order) or stock(x, order))
    return orders


@pytest.mark.parametrize("names", (NAMES, sorted(NAMES), ["__base__"] * 7 + ["part"]))
@pytest.mark.parametrize(("tokens", "ordered"), ((12, False), (3, True)))
def test_adapters_by_sample(tokens, ordered, names, calls, monkeypatch):
    """Samples are taken in order of their adapters where there are fewer rows than copies of adapters have."""
    model, before = several()
    orders = watched_orders(monkeypatch)
    found, expected = (step(each, **samples(tokens), adapter_names=names) for each in (model, before))
    assert_alike(found, expected)
    assert any(order != sorted(order) for order in orders) is (ordered and names is NAMES)
    assert len(calls) == (LAYERS if "second" in names else 4)  # q and down alone
    with torch.no_grad():
        found, expected = (each(**samples(tokens), adapter_names=names).logits for each in (model, before))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beams", (1, 2))
def test_generation_by_sample(beams, calls):
    model, before = several()
    given = {"input_ids": samples(5)["input_ids"], "max_new_tokens": 4, "do_sample": False, "num_beams": beams}
    found, expected = (each.generate(**given, adapter_names=NAMES) for each in (model, before))
    assert torch.equal(found, expected)
    assert len(calls) == 4 * LAYERS
    with onepass.use_backend("torch"):
        before.set_adapter("second")
        alone = before.generate(**given)
    second = [i for i, name in enumerate(NAMES) if name == "second"]
    assert torch.equal(found[second], alone[second])


def test_more_runs_than_the_op_takes(calls, monkeypatch):
    monkeypatch.setattr(linear_layers, "MOST_DOCUMENTS", 5)
    model, before = several()
    orders = watched_orders(monkeypatch)
    found, expected = (each(**samples(12), adapter_names=NAMES).logits for each in (model, before))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert calls and [3, 4, 5] not in [order[3:6] for order in orders]


def test_names_that_peft_refuses_are_refused(calls):
    model, before = several()
    for each in (model, before):
        with pytest.raises(ValueError, match="should be the same as the number of inputs"):
            each(**samples(12), adapter_names=NAMES[:-1])
        for layer in each.modules():  # PEFT leaves its hooks where a call has failed
            layer._forward_pre_hooks.clear()
        each.base_model.merge_adapter(["second"])
        with pytest.raises(ValueError, match="there are merged adapters"):
            each(**samples(12), adapter_names=NAMES)
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


def test_shared_experts():
    """Attention and the shared expert are as without adapters, beside experts whose weights are one parameter."""
    sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1, "num_experts": 4}
    config = transformers.Qwen2MoeConfig(**MOE | sizes)
    model = with_lora(transformers.AutoModelForCausalLM.from_config(config), exclude_modules=["lm_head"])
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    assert not applied.left
    assert {row.by for row in applied.rows if "shared_expert" in row.name and row.part == "mlp"} == {"activation_linear, swiglu"}
    assert_alike(step(model, **batch()), step(before, **batch()), 1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled(calls):
    """A compiled graph has PEFT's layers, between what else is onepass's."""
    model, before, _ = both()
    torch._dynamo.reset()
    given = batch() | {"use_cache": False}
    assert_alike(step(torch.compile(model, fullgraph=True, backend="aot_eager"), **given), step(before, **given))
    assert not calls
    assert_alike(step(model, **given), step(before, **given))
    assert calls == PRODUCTS


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


@pytest.mark.parametrize("first", ("onepass", "PEFT"))
@pytest.mark.parametrize("options", ({}, {"main_grad": True}, {"precision": "fp8"}), ids=str)
def test_a_weight_that_peft_makes_for_each_call(first, options):
    """`target_parameters` of a linear layer, whose weight is no parameter while it runs."""
    model = made("Qwen3")
    targets = {"target_modules": [], "target_parameters": [f"{name}.weight" for name in ("q_proj", "o_proj", "up_proj")]}
    before = with_lora(copy.deepcopy(model), **targets)
    if first == "PEFT":
        model = with_lora(model, **targets)
    applied = huggingface.apply(model, **options)
    model = with_lora(model, **targets) if first == "onepass" else model
    if options:
        losses = [each(**batch()).loss for each in (model, before)]
        torch.testing.assert_close(*losses, rtol=1e-2 if "precision" in options else 1e-5, atol=0)
        losses[0].backward()
    else:
        assert_steps_alike(model, before)
    applied.undo()


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
    backward, gradient_beside = activation_rows.lora_backward, LowRankRows.gradient_beside
    monkeypatch.setattr(activation_rows, "lora_backward", lambda *args: sums.append(1) or backward(*args))
    monkeypatch.setattr(LowRankRows, "gradient_beside", lambda *args: asked.append(gradient_beside(*args)) or asked[-1])
    model = with_lora(made().to(torch.bfloat16))
    huggingface.apply(model)
    with onepass.use_backend("triton"):
        step(model, **batch())
    assert len(sums) == 2
    assert sum(db is not None for db in asked) == 2
