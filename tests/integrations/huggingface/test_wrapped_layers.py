"""MLPs whose layers can't be one product: those that PEFT wraps, quantised ones, those with hooks. The activation is ours."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, batch, made, step

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import mlps
from onepass.integrations.huggingface.linears import LINEARS_CHANGED

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning",  # transformers' and PEFT's own
    "ignore:fan_in_fan_out is set to False:UserWarning",
)


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


@pytest.fixture
def calls(monkeypatch):
    """Record the activations of bias_activation's calls by MLPs, and whether there were two tensors."""
    found = []
    stock = mlps.bias_activation

    def call(x, bias, activation, *, linear):
        found.append((activation, linear is not None))
        return stock(x, bias, activation, linear=linear)

    monkeypatch.setattr(mlps, "bias_activation", call)
    return found


def with_lora(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options)
    return peft.get_peft_model(model, config)


def mlp_rows(applied):
    return {(row.kind.endswith("MLP"), row.by, row.why) for row in applied.rows if row.part == "mlp"}


# ---- LoRA ----


@pytest.mark.parametrize("options", ({"use_dora": True}, {"lora_bias": True}))
def test_other_adapters(options, calls):
    model = with_lora(made(tie_word_embeddings=False), **options)
    before = copy.deepcopy(model)
    applied = huggingface.apply(model)
    found = []
    for each in (model, before):
        torch.manual_seed(5)
        found.append(step(each, **batch()))
    assert_alike(*found)
    assert calls == [("swiglu", True)] * 2 and mlp_rows(applied) == {(True, "bias_activation, swiglu", None)}


def test_compiled_with_lora(calls):
    model = with_lora(made(num_hidden_layers=1))
    before = copy.deepcopy(model)
    huggingface.apply(model)
    torch._dynamo.reset()
    given = batch() | {"use_cache": False}
    assert_alike(step(torch.compile(model, fullgraph=True, backend="aot_eager"), **given), step(before, **given))
    assert calls


def test_unloaded_layers_are_one_product_again(calls):
    model = made()
    before = copy.deepcopy(model)
    applied = huggingface.apply(model)
    unloaded = with_lora(model).unload()
    for parameter in unloaded.parameters():
        parameter.requires_grad_()
    assert_alike(step(unloaded, **batch()), step(before, **batch()))
    assert not calls and mlp_rows(applied) == {(True, "activation_linear, swiglu", None)}


# ---- quantised layers ----


class CodesLinear(nn.Linear):
    """A linear layer that keeps its weight as codes, as bitsandbytes' do."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        scale = layer.weight.detach().abs().amax() / 127
        self.weight = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class Codes(torch.Tensor):
    """A weight as codes in a plain nn.Linear, as torchao's are."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.codes.to(x.dtype) * weight.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{function} of codes")


def with_codes(layer):
    scale = layer.weight.detach().abs().amax() / 127
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(Codes((layer.weight.detach() / scale).round().to(torch.int8), scale), requires_grad=False)
    return made


def by_torchao(layer):
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(nn.Sequential(layer), config=Float8LinearConfig(emulate=True))[0]


QUANTISED = {"codes in a module": CodesLinear, "codes in a tensor": with_codes, "torchao, float8": by_torchao}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_layers(kind, calls):
    model = made(attention_bias=False, mlp_bias=False, tie_word_embeddings=False)
    for parent in [module for name, module in model.named_modules() if name.endswith(("mlp", "self_attn"))]:
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear):
                setattr(parent, name, QUANTISED[kind](layer))
    before = copy.deepcopy(model) if kind != "codes in a tensor" else None
    expected = step(model, **batch()) if before is None else step(before, **batch())
    applied = huggingface.apply(model)
    assert_alike(step(model, **batch()), expected)
    assert calls == [("swiglu", True)] * 2 and mlp_rows(applied) == {(True, "bias_activation, swiglu", None)}
    assert {row.by for row in applied.replaced} == {
        "rms_norm", "rms_norm, with the residual's sums", "bias_activation, swiglu", "rope", "no masks",
        "linear_cross_entropy", "embedding",
    }  # fmt: skip


# ---- hooks, wrappers, and what the code does with its layers ----


class Gated(nn.Module):
    def __init__(self, size=16, inner=24):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(size, inner), nn.Linear(size, inner), nn.Linear(inner, size)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class ByWeights(Gated):
    """Its code reads a layer's weight, and does not call the layer."""

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * F.linear(x, self.up.weight, self.up.bias))


class Wider(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x).double()


def test_hooks_and_wrappers_run(calls):
    model = nn.Sequential(Gated())
    before, x = copy.deepcopy(model), torch.randn(3, 16)
    applied = huggingface.apply(model)
    for each in (model, before):
        each[0].up.register_forward_hook(lambda module, args, y: 3 * y)
    torch.testing.assert_close(model(x), before(x))
    assert calls == [("swiglu", True)]
    assert mlp_rows(applied) == {(False, "bias_activation, swiglu", LINEARS_CHANGED)}
    for each in (model, before):
        each[0].act = nn.ReLU()
    torch.testing.assert_close(model(x), before(x))
    assert len(calls) == 1 and mlp_rows(applied) == {(False, None, "changed since: its act is another module")}


class Dropping(Gated):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(super().forward(x))


def test_dropout_at_the_end(calls):
    model = nn.Sequential(Dropping())
    model[0].down.register_forward_hook(lambda module, args, y: 2 * y)
    before, x = copy.deepcopy(model), torch.randn(3, 16)
    huggingface.apply(model)
    found = []
    for each in (model, before):
        torch.manual_seed(1)
        found.append(each(x))
    torch.testing.assert_close(*found)
    assert calls and (found[0] == 0).any()


def test_layers_of_two_types(calls):
    """To the wider type, as PyTorch promotes them."""
    model = nn.Sequential(Gated())
    model[0].down = model[0].down.double()
    before, x = copy.deepcopy(model), torch.randn(3, 16)
    huggingface.apply(model)
    for each in (model, before):
        each[0].up = Wider(each[0].up)
    assert model(x).dtype == torch.float64 and len(calls) == 1
    torch.testing.assert_close(model(x), before(x), rtol=1e-6, atol=1e-6)


def test_code_that_does_not_call_its_layers_runs_itself(calls):
    model = nn.Sequential(ByWeights())
    before, x = copy.deepcopy(model), torch.randn(3, 16)
    applied = huggingface.apply(model)
    assert mlp_rows(applied) == {(False, "activation_linear, swiglu", None)}
    torch.testing.assert_close(model(x), before(x))
    for each in (model, before):
        each[0].up.register_forward_hook(lambda module, args, y: 3 * y)  # which the code never runs
    torch.testing.assert_close(model(x), before(x))
    assert not calls and mlp_rows(applied) == {(False, None, f"changed since: {LINEARS_CHANGED}")}


def test_copies_and_undo(calls):
    model = nn.Sequential(Gated())
    model[0].gate.register_forward_hook(lambda module, args, y: 2 * y)
    before, x = copy.deepcopy(model), torch.randn(3, 16)
    applied = huggingface.apply(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model[0].up.weight.zero_()
    torch.testing.assert_close(copied(x), before(x))
    assert len(calls) == 1
    applied.undo()
    assert "forward" not in vars(model[0])
    model(x)
    assert len(calls) == 1
