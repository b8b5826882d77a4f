"""The loss made in the head of transformers' models: against an untouched copy of the model, and where it must step aside."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5")

from integrations.huggingface import families  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402

import onepass  # noqa: E402
from onepass.integrations.huggingface.loss import replace_loss  # noqa: E402
from onepass.integrations.huggingface.patches import Patches  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # transformers' and PEFT's own

VOCABULARY = 307
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96}
SMALL, MOE = families.SMALL | SIZES, families.MOE | SIZES
FAMILIES = {
    "Llama": SMALL,
    "Qwen2": SMALL,
    "Qwen3": {**SMALL, "head_dim": 16},
    "Mistral": SMALL,
    "Gemma2": {**SMALL, "head_dim": 16, "final_logit_softcapping": 0.5},  # so low that it tells
    "Gemma3Text": {**SMALL, "head_dim": 16, "final_logit_softcapping": 0.5},
    "Phi3": SMALL,
    "GPT2": {
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
    "GPTNeoX": {**SMALL, "rotary_pct": 0.5},
    "OPT": {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    "Mixtral": {**MOE, "num_local_experts": 4},
    "Qwen3Moe": {**MOE, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "Granite": {**SMALL, "logits_scaling": 0.25},
    "Cohere": {**SMALL, "logit_scale": 3.0},
    "StableLm": SMALL,
}
SAID = {"Gemma2": ", softcap 0.5", "Gemma3Text": ", softcap 0.5", "Granite": ", logit_scale 4", "Cohere": ", logit_scale 3"}


def made(family="Llama", **options):
    options = {**families.SPECIAL, **FAMILIES[family], **options}
    config = getattr(transformers, f"{family}Config")(**options)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def replaced(family="Llama", **options):
    """A model that makes its loss in its head, what it was, and what takes it back."""
    model, patches = made(family, **options), Patches()
    before = copy.deepcopy(model)
    (row,) = replace_loss(model, patches)
    assert row.by is not None, row
    return model, before, patches


def batch(ignored=3):
    ids = torch.randint(3, VOCABULARY, (2, 12))
    labels = ids.clone()
    labels[0, :ignored] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def step(model, **given):
    """The outputs of a step in training, and each gradient."""
    with onepass.use_backend("torch"):
        outputs = model(**given)
        outputs.loss.backward()
    return outputs, {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters() if p.grad is not None}


def agree(model, before, fused=True, tolerance=None, **given):
    given = given or batch()
    got, grads = step(model, **given)
    wanted, expected = step(before, **given)
    width = given["labels"].shape[1]
    assert got.logits.shape == (2, width, 0 if fused else VOCABULARY)
    assert got.loss.dtype == wanted.loss.dtype and got.loss.shape == wanted.loss.shape
    tolerance = tolerance or {}
    torch.testing.assert_close(got.loss, wanted.loss, **tolerance)
    torch.testing.assert_close(grads, expected, **tolerance)
    return got, wanted


# ---- values ----


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_each_family(family):
    model = made(family)
    before = copy.deepcopy(model)
    (row,) = replace_loss(model, Patches())
    assert (row.name, row.kind, row.part, row.why) == ("lm_head", "Linear", "loss", None)
    assert row.by == "linear_cross_entropy" + SAID.get(family, "")
    got, wanted = agree(model, before)
    if "router_aux_loss_coef" in FAMILIES[family]:
        assert wanted.aux_loss > 0
        torch.testing.assert_close(got.aux_loss, wanted.aux_loss)


def test_by_kernels():
    """In Triton's interpreter where there is no GPU."""
    model, before, _ = replaced("Gemma2")
    given = batch()
    with onepass.use_backend("triton"):
        loss = model(**given).loss
    loss.backward()
    wanted, expected = step(before, **given)
    torch.testing.assert_close(loss, wanted.loss)
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("items", (7, torch.tensor(7), torch.tensor(7.0)))
def test_num_items_in_batch(items):
    model, before, _ = replaced()
    agree(model, before, **batch(), num_items_in_batch=items)


def test_ignore_index():
    model, before, _ = replaced()
    given = batch()
    given["labels"][0, :3] = given["labels"][1, 4:9] = 5
    agree(model, before, **given, ignore_index=5)


def test_labels_that_are_shifted_already():
    model, before, _ = replaced()
    given = batch()
    shifted = torch.randint(VOCABULARY, given["labels"].shape)
    shifted[1, 2] = -100
    agree(model, before, **given, shift_labels=shifted)


def test_all_ignored():
    """F.cross_entropy's mean of nothing is NaN, and would be every weight after it."""
    model, _, _ = replaced()
    given = batch()
    given["labels"].fill_(-100)
    outputs, grads = step(model, **given)
    assert outputs.loss == 0 and all((grad == 0).all() for grad in grads.values())
    outputs, _ = step(model, **given, num_items_in_batch=3)
    assert outputs.loss == 0


def test_labels_by_position_and_outputs_as_a_tuple():
    model, before, _ = replaced()
    given = batch()
    place = list(inspect.signature(before.forward).parameters).index("labels")
    args = [given["input_ids"], given["attention_mask"], *[None] * (place - 2), given["labels"]]
    with onepass.use_backend("torch"):
        got, wanted = model(*args, return_dict=False), before(*args, return_dict=False)
    assert isinstance(got, tuple) and got[1].shape == (2, 12, 0)
    torch.testing.assert_close(got[0], wanted[0])


def test_frozen_head_and_frozen_below():
    for freeze in (lambda model: model.lm_head, lambda model: model.model):
        model, before, _ = replaced()
        for each in (model, before):
            freeze(each).requires_grad_(False)
        agree(model, before)


def test_bias_of_the_head():
    model = made()
    model.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY))
    before = copy.deepcopy(model)
    replace_loss(model, Patches())
    agree(model, before)


def test_two_steps_are_a_step_each():
    model, before, _ = replaced()
    for _ in range(2):
        agree(model, before)
    assert model._onepass.call is None


# ---- everything else is as before ----


def test_evaluation_has_logits():
    model, before, _ = replaced()
    given = batch()
    for each in (model, before):
        each.eval()
    got, wanted = model(**given), before(**given)
    assert torch.equal(got.logits, wanted.logits) and torch.equal(got.loss, wanted.loss)


def test_logits_without_labels_without_gradients_and_a_part_of_them():
    model, before, _ = replaced()
    given = batch()
    labels = given.pop("labels")
    assert torch.equal(model(**given).logits, before(**given).logits)
    with torch.no_grad():
        got, wanted = model(**given, labels=labels), before(**given, labels=labels)
    assert torch.equal(got.logits, wanted.logits) and torch.equal(got.loss, wanted.loss)
    part = {"logits_to_keep": 4, "shift_labels": labels[:, -4:].contiguous()}
    got, wanted = model(**given, labels=labels, **part), before(**given, labels=labels, **part)
    assert got.logits.shape == (2, 4, 0)  # as many labels as hidden states are left
    torch.testing.assert_close(got.loss, wanted.loss)


def test_more_labels_than_hidden_states_is_the_models_own_error():
    model, _, _ = replaced()
    with pytest.raises(ValueError, match=r"input batch_size \(8\)"):
        model(**batch(), logits_to_keep=4)


def test_an_option_that_we_do_not_know_goes_the_models_way():
    model, before, _ = replaced()
    agree(model, before, fused=False, **batch(), label_smoothing=0.1)
    agree(model, before, fused=True, **batch(), output_hidden_states=True)


def test_a_loss_function_set_later():
    model, before, _ = replaced()
    for each in (model, before):
        each.loss_function = lambda logits, labels, vocab_size, **options: logits.square().mean()
    agree(model, before, fused=False)


def test_a_hook_on_the_head_sees_logits():
    model, before, _ = replaced()
    seen = []
    handle = model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits.shape))
    agree(model, before, fused=False)
    assert seen == [(2, 12, VOCABULARY)]
    handle.remove()
    agree(model, before)


class Quantised(torch.Tensor):
    """A weight that isn't only its numbers."""


def test_a_weight_of_another_kind():
    model, _, _ = replaced()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Quantised))
    assert type(model.lm_head.weight) is Quantised
    assert model(**batch()).logits.shape == (2, 12, VOCABULARY)


def test_a_failed_call_leaves_nothing():
    model, before, _ = replaced()
    given = batch()
    with onepass.use_backend("torch"), pytest.raises((ValueError, IndexError, RuntimeError)):
        model(**{**given, "labels": given["labels"] + VOCABULARY})
    assert model._onepass.call is None
    assert torch.equal(model.lm_head(torch.ones(1, 64)), before.lm_head(torch.ones(1, 64)))


def test_signature_and_name():
    model, before, _ = replaced()
    assert inspect.signature(model.forward) == inspect.signature(before.forward)
    assert model.forward.__name__ == "forward" and not hasattr(model.forward, "__wrapped__")


@pytest.mark.parametrize("family", ("Llama", "GPT2", "Gemma2"))
def test_undo(family):
    model = made(family)
    head = model.get_output_embeddings()
    was = dict(vars(model)), dict(vars(head))
    patches = Patches()
    replace_loss(model, patches)
    assert vars(model) != was[0] and vars(head) != was[1]
    step(model, **batch())
    patches.undo()
    assert vars(model) == was[0] and vars(head) == was[1]
    assert model.loss_function is ForCausalLMLoss
    assert model(**batch()).logits.shape == (2, 12, VOCABULARY)


def test_a_pickled_model_makes_its_loss_as_before(tmp_path):
    model, before, _ = replaced()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    agree(loaded, before)
    assert loaded.forward.__self__ is loaded and loaded.forward != model.forward
    assert inspect.signature(loaded.forward) == inspect.signature(before.forward)


@pytest.mark.slow
def test_compiled_as_one_graph():
    model, before, _ = replaced("Gemma2", num_hidden_layers=1)
    torch._dynamo.reset()
    agree(torch.compile(model, fullgraph=True, backend="aot_eager"), before)


def test_accelerates_wrapper_comes_and_goes():
    accelerate = pytest.importorskip("accelerate")
    model, before, _ = replaced()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the process
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare_model(model)
    with onepass.use_backend("torch"):
        outputs = prepared(**batch())
    assert outputs.logits.shape == (2, 12, 0)
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    agree(plain, before)


# ---- PEFT ----


def lora(model, modules, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=modules, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).train()


def test_lora_on_attention_before():
    model = lora(made(), ["q_proj"])
    before = copy.deepcopy(model)
    (row,) = replace_loss(model, Patches())
    assert row.by == "linear_cross_entropy" and row.name.endswith("lm_head")
    agree(model, before)


def test_lora_on_the_head_and_off_again():
    model, before, _ = replaced()
    wrapped, plain = (lora(each, ["lm_head"]).unload().requires_grad_() for each in (model, before))
    agree(wrapped, plain)


@pytest.mark.parametrize("options", ({"modules": ["q_proj", "lm_head"]}, {"modules": ["q_proj"], "modules_to_save": ["lm_head"]}))
def test_lora_on_the_head_after(options):
    model, before, _ = replaced()
    wrapped, plain = lora(model, **options), lora(before, **options)
    agree(wrapped, plain, fused=False)


def lora_head(dtype=torch.float32, **options):
    """A model whose head LoRA wraps, which makes its loss in its head, and what it was."""
    model = lora(made(dtype=dtype), ["lm_head"], r=4, lora_alpha=6, **options)
    before, patches = copy.deepcopy(model), Patches()
    (row,) = replace_loss(model, patches)
    return model, before, row, patches


def test_lora_on_the_head_before():
    model, before, row, patches = lora_head()
    assert row.by == "linear_cross_entropy, LoRA" and row.name.endswith("lm_head")
    agree(model, before)
    assert set(name for name, p in model.named_parameters() if p.grad is not None) == {
        f"base_model.model.lm_head.lora_{part}.default.weight" for part in "AB"
    }
    given = batch()
    evaluated = [each.eval()(**given).logits for each in (model, before)]
    assert torch.equal(*evaluated) and evaluated[0].shape[-1] == VOCABULARY
    patches.undo()
    agree(model.train(), before.train(), fused=False)


def test_lora_on_the_head_and_elsewhere_with_a_trained_head():
    model = lora(made(), ["q_proj", "lm_head"], use_rslora=True)
    for each in (model.get_base_model().lm_head.base_layer, model.get_base_model().model.norm):
        each.requires_grad_(True)
    before = copy.deepcopy(model)
    assert replace_loss(model, Patches())[0].by == "linear_cross_entropy, LoRA"
    agree(model, before)


def test_lora_on_the_head_in_bf16_with_adapters_in_fp32():
    model, before, _, _ = lora_head(torch.bfloat16)
    head = model.get_base_model().lm_head
    assert (head.weight.dtype, head.lora_A["default"].weight.dtype) == (torch.bfloat16, torch.float32)
    agree(model, before, tolerance={"rtol": 3e-2, "atol": 2e-3})


def test_lora_on_the_head_under_autocast():
    model, before, _, _ = lora_head()
    with torch.autocast("cpu", torch.bfloat16):
        agree(model, before, tolerance={"rtol": 3e-2, "atol": 2e-3})


def test_lora_on_the_head_by_main_grad():
    model, before, _, _ = lora_head()
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter)
    given = batch()
    for _ in range(2):
        model(**given).loss.backward()
    before(**given).loss.backward()
    expected = [p.grad for p in before.parameters() if p.requires_grad]
    assert all(p.grad is None for p in parameters)
    torch.testing.assert_close([p.main_grad / 2 for p in parameters], expected)


@pytest.mark.parametrize("state", ("disabled", "merged", "switched", "unloaded"))
def test_what_lora_on_the_head_is_now_counts(state):
    model, before, _, _ = lora_head()
    for each in (model, before):
        if state == "disabled":
            each.base_model.disable_adapter_layers()
        elif state == "merged":
            each.merge_adapter()
        elif state == "switched":
            torch.manual_seed(2)
            each.add_adapter("other", type(each.peft_config["default"])(r=2, target_modules=["lm_head"], init_lora_weights=False))
            each.set_adapter("other")
        elif state == "unloaded":
            each.unload()
    if state in ("disabled", "merged", "unloaded"):
        model, before = (each.get_base_model().requires_grad_() for each in (model, before))
    agree(model, before, fused=state != "unloaded")


def test_two_loras_on_the_head():
    model, before, _, _ = lora_head()
    for each in (model, before):
        torch.manual_seed(2)
        each.add_adapter("other", type(each.peft_config["default"])(r=2, target_modules=["lm_head"], init_lora_weights=False))
        each.base_model.set_adapter(["default", "other"])
    agree(model, before, fused=False)
    (row,) = replace_loss(before, Patches())
    assert row.by is None and row.why == "it has 2 active LoRAs: default, other"


@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
@pytest.mark.parametrize(
    ("options", "why"),
    (
        ({"use_dora": True}, "its LoRA is a variant, DoraLinearVariant"),
        ({"lora_dropout": 0.1}, "its LoRA has dropout, which the loss of a head has not"),
        ({"lora_bias": True}, "its LoRA is made of other than torch.nn.Linear without a bias"),
    ),
)
def test_what_is_no_plain_lora_is_left(options, why):
    _, _, row, patches = lora_head(**options)
    assert (row.by, row.why) == (None, why)
    assert not len(patches)


def test_adapters_by_row():
    model, before, _, _ = lora_head()
    given = batch() | {"adapter_names": ["default", "__base__"]}
    model, before = model.eval(), before.eval()
    assert torch.equal(*[each(**given).logits for each in (model, before)])


# ---- what is left as it is ----


class Odd(nn.Module):
    """As transformers' models are, but for what it does with the head's products, which is each case's own."""

    loss_function, loss_type = transformers.PreTrainedModel.loss_function, "ForCausalLM"

    def __init__(self):
        super().__init__()
        self.model, self.lm_head, self.norm = nn.Embedding(9, 4), nn.Linear(4, 9), nn.LayerNorm(9)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("factor", torch.ones(()))

    def get_output_embeddings(self):
        return self.lm_head


def ends(self, logits, labels, options, columns=9):
    return {"loss": self.loss_function(logits, labels, columns, **options)}


def odd(body):
    def forward(self, input_ids=None, labels=None, **options):
        return body(self, self.model(input_ids).last_hidden_state, labels, options)

    return type("Odd", (Odd,), {"forward": forward})()


def assert_left(model, why):
    head = model.get_output_embeddings()
    was = dict(vars(model)), dict(vars(head))
    (row,) = replace_loss(model, patches := Patches())
    assert row.by is None and why in row.why
    assert not len(patches) and (vars(model), vars(head)) == was


LEFT = {
    "squared": (lambda self, h, y, o: ends(self, self.lm_head(h) ** 2, y, o), "than to scale or to cap"),
    "in place": (lambda self, h, y, o: ends(self, self.lm_head(h).mul_(2), y, o), "than to scale or to cap"),
    "clamped": (lambda self, h, y, o: ends(self, self.lm_head(h).clamp(-9, 9), y, o), "than to scale or to cap"),
    "a learnt scale": (lambda self, h, y, o: ends(self, self.lm_head(h) * self.scale, y, o), "than to scale or to cap"),
    "a factor that is 1 by now": (lambda self, h, y, o: ends(self, self.lm_head(h) * self.factor, y, o), "a buffer of its own"),
    "a normed product": (lambda self, h, y, o: ends(self, self.norm(self.lm_head(h)), y, o), "than to scale or to cap"),
    "a bias that is zero": (lambda self, h, y, o: ends(self, self.lm_head(h) + torch.zeros(9), y, o), "can't be followed"),
    "fewer columns": (lambda self, h, y, o: ends(self, self.lm_head(h)[..., :8], y, o, 8), "not over the 9 columns"),
    "other labels": (lambda self, h, y, o: ends(self, self.lm_head(h), y.clone(), o), "as they are"),
    "no options": (lambda self, h, y, o: ends(self, self.lm_head(h), y, {}), "as they are"),
    "twice": (lambda self, h, y, o: ends(self, (self.lm_head(h) + self.lm_head(h)) / 2, y, o), "its head once"),
    "none": (lambda self, h, y, o: ends(self, h, y, o), "its head once"),
    "its own loss": (lambda self, h, y, o: {"loss": self.lm_head(h).mean()}, "doesn't leave the loss"),
    "more loss": (lambda self, h, y, o: {"loss": ends(self, z := self.lm_head(h), y, o)["loss"] + z.mean()}, "alone"),
    "unknown": (lambda self, h, y, o: h.nothing, "can't be followed (AttributeError"),
}


@pytest.mark.parametrize("case", LEFT)
def test_a_forward_that_needs_its_logits(case):
    body, why = LEFT[case]
    assert_left(odd(body), why)


def test_a_forward_that_needs_none():
    (row,) = replace_loss(odd(lambda self, h, y, o: ends(self, self.lm_head(h) * 3.0, y, o)), Patches())
    assert row.by == "linear_cross_entropy, logit_scale 3"


def test_a_forward_that_looks_at_its_tokens():
    model = odd(None)

    def forward(self, input_ids=None, labels=None, **options):
        return ends(self, self.lm_head(self.model(input_ids).last_hidden_state[:, -input_ids.shape[1] :]), labels, options)

    type(model).forward = forward
    (row,) = replace_loss(model, Patches())
    assert row.by == "linear_cross_entropy"


def test_a_head_with_a_forward_of_its_own():
    model = made()
    model.lm_head.__class__ = type("Scaled", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})
    assert_left(model, "its head is no plain torch.nn.Linear, but ")


def test_what_is_replaced_already():
    model, _, _ = replaced()
    assert_left(model, "its head's forward has been replaced already")


def test_another_loss_function():
    model = made()
    model.loss_function = lambda logits, labels, vocab_size: logits.mean()
    assert_left(model, "its loss is another than transformers' ForCausalLMLoss")


def test_a_class_with_its_own_loss_function():
    model = odd(lambda self, h, y, o: ends(self, self.lm_head(h), y, o))
    type(model).loss_function = staticmethod(ForCausalLMLoss)
    assert_left(model, "its class has a loss_function of its own")


@pytest.mark.parametrize("whose", (__name__, "torch.distributed.tensor.parallel.style"))
def test_a_hooked_head(whose):
    model = made()

    def hook(*args):
        return None

    hook.__module__ = whose
    model.lm_head.register_forward_hook(hook)
    assert_left(model, "its head has hooks, which may want the logits")


def test_a_model_without_a_head():
    (row,) = replace_loss(transformers.LlamaModel(transformers.LlamaConfig(**SMALL)), Patches())
    assert (row.name, row.kind, row.by, row.why) == ("", "LlamaModel", None, "it has no head")


LATE = {
    "labels": (
        lambda self, h, y, o: ends(self, self.lm_head(h), y.clone(), o),
        r"Odd.forward gave its loss function other labels",
    ),
    "options": (lambda self, h, y, o: ends(self, self.lm_head(h), y, {"ignore_index": 3}), r"Odd.forward gave its loss function"),
    "head": (lambda self, h, y, o: ends(self, self.lm_head(h) + self.lm_head(h), y, o), r"the head was called again"),
    "columns": (lambda self, h, y, o: ends(self, self.lm_head(h), y, o, 8), r"vocab_size must be the head's 9, but is 8"),
}


@pytest.mark.parametrize("case", LATE)
def test_what_only_a_call_can_show(case):
    late, said = LATE[case]

    def body(self, hidden, labels, options):
        if labels.shape[1] > 2:
            return late(self, hidden, labels, options)
        return ends(self, self.lm_head(hidden), labels, options)

    model = odd(body)
    model.model.forward = lambda ids: SimpleNamespace(last_hidden_state=torch.randn(*ids.shape, 4))
    (row,) = replace_loss(model, Patches())
    assert row.by == "linear_cross_entropy"
    ids = torch.zeros(1, 5, dtype=torch.int64)
    with onepass.use_backend("torch"), pytest.raises((RuntimeError, ValueError), match=said):
        model(ids, labels=ids)
    assert model._onepass.call is None


# ---- memory ----


@pytest.mark.parametrize(
    ("sizes", "memory", "way", "rows"),
    [
        ((16384, 128256, 2048), 150e9, "grad_in_forward", 4096),  # an H200; by itself one chunk of 4 GiB
        ((16384, 151936, 1024), 150e9, "grad_in_forward", 4096),
        ((16384, 128256, 4096), 150e9, "grad_in_forward", 4096),
        ((8192, 128256, 4096), 150e9, "keep_logits", 8192),  # of as little memory as chunks with their sums
        ((8192, 128256, 4096), 85e9, "keep_logits", 8192),  # chunks don't fit: as the op has it
        ((16384, 128256, 2048), 25e9, "recompute", 16384),
    ],
)
def test_the_room_that_the_loss_is_given(sizes, memory, way, rows):
    from onepass.integrations.huggingface.loss import _room_of
    from onepass.ops.loss.head.plan import MachineSpeed, PlanInputs, make_plan

    (N, V, D), memory = sizes, int(memory)
    asked = PlanInputs(N, D, V, 2, False, True, True, True, False, False, None, False, _room_of(N, V, D, 2, memory // 32))
    plan = make_plan(asked, MachineSpeed(7e14, 4e12, memory, memory // 32, memory // 16))
    assert (plan.mode, plan.rows) == (way, rows)
