"""Models whose frozen weights are in four bits or int8: the same ops as with plain weights, decoded for each product."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

import peft
from integrations.huggingface.families import assert_alike, batch, made, step
from integrations.huggingface.test_lora import PRODUCTS, replaced
from integrations.huggingface.test_wrapped_layers import with_lora
from ops.frozen_calls import decoded, four_bits, int8

from onepass.integrations import huggingface
from onepass.integrations.huggingface import linear_layers, linears, mlps
from onepass.product.frozen.weight import FrozenWeight

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning",  # transformers' and PEFT's own
    "ignore:TorchaoLoraLinear was instantiated without:UserWarning",
)
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False
}  # fmt: skip
OPS = [name for name, _ in PRODUCTS]


class Linear4bit(nn.Linear):
    """Stands in for bitsandbytes' layer, whose name it has."""

    def __init__(self, layer, seed):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = four_bits(layer.out_features, layer.in_features, seed=seed, device="cpu")

    def forward(self, x):
        return F.linear(x, decoded(self.weight, x.dtype))


class Linear8bitLt(nn.Linear):
    """Stands in for bitsandbytes' layer, and quantises no x."""

    def __init__(self, layer, seed):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = int8(layer.out_features, layer.in_features, seed=seed, device="cpu")
        self.state = SimpleNamespace(SCB=None)

    def forward(self, x):
        return F.linear(x, (self.weight.data * self.weight.SCB[:, None] / 127).to(x.dtype))


def theirs(layer, seed):
    bnb = pytest.importorskip("bitsandbytes")
    made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
    return made.to("cpu")


def theirs_in_int8(layer, seed):
    bnb = pytest.importorskip("bitsandbytes")
    made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, bias=False, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
    return made.to("cpu")


def torchaos(layer, seed):
    quantization = pytest.importorskip("torchao.quantization")
    holder = nn.Sequential(layer)
    quantization.quantize_(holder, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    return holder[0]


BITSANDBYTES_INT8 = "bitsandbytes, int8"  # which quantises x, too
KINDS = {
    "a stand-in": Linear4bit, "a stand-in, int8": Linear8bitLt, "bitsandbytes": theirs, BITSANDBYTES_INT8: theirs_in_int8,
    "torchao, int8": torchaos,
}  # fmt: skip


def with_numbers(model):
    """Put plain layers in the place of bitsandbytes' in int8, with the numbers that their codes stand for."""
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if type(layer).__name__ == "Linear8bitLt":
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
                plain.weight.data = layer.weight.data * layer.weight.SCB[:, None] / 127
                setattr(module, name, plain)
    return model


def quantised(kind="a stand-in", family="Llama"):
    model = made(family, **SIZES)
    parents = [module for name, module in model.named_modules() if name.endswith(("mlp", "self_attn"))]
    for parent in parents:
        for seed, (name, layer) in enumerate(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, KINDS[kind](layer, seed))
    return model


@pytest.fixture
def calls(monkeypatch):
    """Record the ops that get a weight in four bits, and how many adapters."""
    found = []

    def watch(module, name, at):
        stock = getattr(module, name)

        def call(*args, lora=None, **options):
            if isinstance(args[at], FrozenWeight):
                found.append([name, len(lora or ())])
            return stock(*args, lora=lora, **options)

        monkeypatch.setattr(module, name, call)

    watch(linear_layers, "linear", 1)
    watch(linears, "linear", 1)
    watch(linears, "norm_linear", 2)
    watch(mlps, "activation_linear", 1)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ("Llama", "Qwen3", "Gemma2"))
def test_with_adapters_a_layer_is_four_products(kind, family, calls):
    expected = replaced(huggingface.apply(made(family, **SIZES)))
    model = quantised(kind, family)
    before = copy.deepcopy(model)
    before = with_lora(with_numbers(before) if kind == BITSANDBYTES_INT8 else before, exclude_modules=["lm_head"])
    model = with_lora(model, exclude_modules=["lm_head"])
    stock = copy.deepcopy(model)
    applied = huggingface.apply(model)
    assert replaced(applied) == expected
    assert not [row for row in applied.left if row.part != "norm"]
    assert_alike(step(model, **batch()), step(before, **batch()), 1e-4)
    assert calls == PRODUCTS or family == "Gemma2"  # whose attention is several ops in older transformers
    applied.undo()
    calls.clear()
    for each in (model, stock):
        each.zero_grad(set_to_none=True)
    assert_alike(step(model, **batch()), step(stock, **batch()))
    assert not calls


def test_without_adapters_norms_and_embeddings_train(calls):
    model = quantised()
    before = copy.deepcopy(model)
    huggingface.apply(model)
    assert_alike(step(model, **batch()), step(before, **batch()), 1e-4)
    assert [name for name, count in calls if not count] == [name for name in OPS if name != "linear"]  # o runs by its own code


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_the_layers_run_by_their_own_code(kind, calls):
    model = with_lora(quantised(kind), exclude_modules=["lm_head"])
    before = copy.deepcopy(model)
    huggingface.apply(model)
    prompt = batch()["input_ids"][:, :5]
    found, expected = (each.eval().generate(input_ids=prompt, max_new_tokens=4, do_sample=False) for each in (model, before))
    assert torch.equal(found, expected) and not calls


@pytest.mark.parametrize("kind", ("a stand-in", "a stand-in, int8"))
def test_prepared_for_training(kind, calls):
    """PEFT's recipe for few bits makes norms and embeddings fp32, so that hidden states are wider than what was quantised."""
    model = quantised(kind)
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.weight.quant_state.dtype = torch.bfloat16
    model.is_loaded_in_4bit = True
    model = peft.prepare_model_for_kbit_training(model.bfloat16(), use_gradient_checkpointing=False)
    model = with_lora(model, exclude_modules=["lm_head"])
    before = copy.deepcopy(model)
    huggingface.apply(model)
    assert_alike(step(model, **batch()), step(before, **batch()), 2e-2)  # numbers of four bits are rounded to bf16 there first
    assert calls == PRODUCTS
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (step(each, **batch())[0] for each in (model, before))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_what_quantises_x_too_runs_by_its_own_code(calls):
    quantization = pytest.importorskip("torchao.quantization")
    model = made(**SIZES)
    quantization.quantize_(model.model.layers, quantization.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    huggingface.apply(model)
    step(model, **batch())
    assert not calls


def test_codes_that_are_loaded_are_seen(calls):
    model, other = (with_lora(quantised(), exclude_modules=["lm_head"]) for _ in range(2))
    huggingface.apply(model)
    step(model, **batch())
    state = other.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            module.weight.data.copy_(other.get_submodule(name).weight.data.bitwise_xor_(0x11))
    model.load_state_dict(state, strict=False)
    for each in (model, other):
        each.zero_grad(set_to_none=True)
    assert_alike(step(model, **batch()), step(other, **batch()), 1e-4)


def test_checkpointed(calls):
    model = with_lora(quantised(), exclude_modules=["lm_head"])
    before = copy.deepcopy(model)
    huggingface.apply(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_alike(step(model, **batch()), step(before, **batch()), 1e-4)
    assert len(calls) == 2 * len(PRODUCTS)


def test_compiled_they_run_by_their_own_code(calls):
    model = with_lora(quantised(), exclude_modules=["lm_head"])
    before = copy.deepcopy(model)
    huggingface.apply(model)
    torch._dynamo.reset()
    given = batch() | {"use_cache": False}
    assert_alike(step(torch.compile(model, backend="aot_eager"), **given), step(before, **given), 1e-4)
    assert not calls
