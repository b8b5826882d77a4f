"""Layers whose norms join sums or products, whatever else their code makes of its children; and others that only look so."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, batch, made, mutant_tests, step

import onepass
from onepass.integrations import delta_net, huggingface
from onepass.integrations.huggingface import delta_rules, layer_steps, layer_trace, layers
from onepass.integrations.huggingface.layer_steps import FoldedCall
from onepass.integrations.huggingface.layers import LayerMatch

pytestmark = pytest.mark.filterwarnings("ignore:.*RoPE scaling factor", "ignore:.*gradient_checkpointing:FutureWarning")
RESIDUAL = "with the residual's sums"


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


class Mixer(nn.Module):
    """Adds up the tokens so far."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 16)

    def forward(self, hidden_states, scale=1.0):
        return self.out(hidden_states.cumsum(1)) * scale


class Widen(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Pair(nn.Module):
    """Returns a tuple, as experts do with their scores."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        return self.out(x).flatten(0, 1), x.mean()


class Whole(Pair):
    def forward(self, x):
        return self.out(x), x.mean()


class Scores(nn.Module):
    """A router: returns scores, weights and choices."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 16)

    def forward(self, rows):
        scores = self.out(rows)
        return scores, scores.sigmoid(), scores.cos()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 16)

    def forward(self, rows, choices, weights):
        assert rows.dim() == 2
        return self.out(rows * choices) + 0.5 * weights


def layer_of(formula, second=Widen, **more):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.norm_2, self.mix = nn.LayerNorm(16), nn.LayerNorm(16), Mixer()
            self.mlp, self.factor, self.gain = second(), 0.5, nn.Parameter(torch.full((16,), 0.7))
            self.register_buffer("scalar", torch.full((1,), 1.5))
            for name, kind in more.items():
                setattr(self, name, kind())

        def forward(self, x, scale=1.0):
            return formula(self, x, scale)

    return Layer()


def twice(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    return h + s.mlp(s.norm_2(h))


def scaled(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale) * s.factor
    return h + s.factor * s.mlp(s.norm_2(h))


def summed(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    n = s.norm_2(h)
    return h + s.mlp(n) + s.other(n)


def of_tuples(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    return h + s.mlp(s.norm_2(h))[0].view(h.shape)


def only_one_scaled(s, x, scale):
    h = x + s.factor * s.mix(s.norm(x), scale=scale)
    return h + s.mlp(s.norm_2(h))


def second_reads_x(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    return h + s.mlp(s.norm_2(h)) + s.other(s.norm(x))


def normed_residual(s, x, scale):
    n = s.norm(x)
    h = n + s.mix(n, scale=scale)
    return h + s.mlp(s.norm_2(h))


def scaled_whole(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    return s.factor * (h + s.mlp(s.norm_2(h)))


def with_a_gain(s, x, scale):
    h = x + s.gain * s.mix(s.norm(x), scale=scale)
    h = h + s.mlp(s.norm_2(h))
    h *= s.scalar
    return h


def with_routed_experts(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    rows = h.reshape(-1, h.shape[-1])
    _, weights, choices = s.router(rows)
    return h + s.mlp(s.norm_2(h)) + s.experts(rows, choices, weights).view(h.shape)


def of_the_norms_type(s, x, scale):
    h = x + s.mix(s.norm(x.to(s.norm.weight.dtype)), scale=scale)
    return h + s.mlp(s.norm_2(h))


def beside_each_other(s, x, scale):
    n = s.norm(x)
    h = x + (s.mix(n, scale=scale) * s.factor + s.other(n * 2))
    return (h + s.mlp(s.norm_2(h)),)


def in_fp32(s, x, scale):
    rest = x.to(torch.float32)
    h = rest + s.mix(s.norm(x), scale=scale)
    return h.float() + s.mlp(s.norm_2(h.to(s.norm_2.weight.dtype))), None


def returning_either(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    made = s.mlp(s.norm_2(h))
    return h + (made[0] if isinstance(made, tuple) else made)


def scale_by_another_name(s, x, scale):
    h = x + s.other(s.mix(s.norm(x), scale))
    return s.norm_2(h.contiguous()) + nn.functional.dropout(h, 0.0, s.training)


def another_child_for_a_scale(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    return h + (s.mlp if scale == 1.0 else s.other)(s.norm_2(h))


def post_norms(s, x, scale):
    h = x + s.norm(s.mix(x, scale=scale))
    return h + s.norm_2(s.mlp(h))


def norms_before_and_after(s, x, scale):
    h = x + s.post(s.mix(s.norm(x), scale=scale))
    return h + s.post_2(s.mlp(s.norm_2(h)))


RMS = partial(nn.RMSNorm, 16, eps=1e-6)
LAYERS = {
    "RMSNorms after": lambda: layer_of(post_norms, norm=RMS, norm_2=RMS),
    "norms before and after": lambda: layer_of(norms_before_and_after, norm=RMS, post=RMS, post_2=RMS),
    "another mixer": lambda: layer_of(twice),
    "a factor": lambda: layer_of(scaled),
    "two MLPs": lambda: layer_of(summed, other=Widen),
    "a tuple, of rows": lambda: layer_of(of_tuples, Pair),
    "one of two scaled": lambda: layer_of(only_one_scaled),
    "the second MLP reads x": lambda: layer_of(second_reads_x, other=Widen),
    "a normed residual": lambda: layer_of(normed_residual),
    "scaled whole": lambda: layer_of(scaled_whole),
    "parameters and buffers": lambda: layer_of(with_a_gain),
    "experts beside the MLP": lambda: layer_of(with_routed_experts, router=Scores, experts=Experts),
    "the norm's type": lambda: layer_of(of_the_norms_type),
    "two mixers, and a tuple of its own": lambda: layer_of(beside_each_other, other=Widen),
    "a sum in fp32, and nothing beside": lambda: layer_of(in_fp32),
    "a tuple or not: a tuple": lambda: layer_of(returning_either, Whole),
    "a tuple or not: none": lambda: layer_of(returning_either),
    "an argument that changes it": lambda: layer_of(another_child_for_a_scale, other=Widen),
    "arguments by place": lambda: layer_of(scale_by_another_name, other=Widen),
}


def a_difference(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    n = s.norm_2(h)
    return h + s.mlp(n) - s.other(n)


def another_function(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale).sigmoid()
    return h + s.mlp(s.norm_2(h))


def as_a_tensor_says(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    return h + s.mlp(s.norm_2(h)) * (2.0 if s.scalar.item() > 1 else 3.0)


def less_in_training(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale) * (0.5 if s.training else 1.0)
    return h + s.mlp(s.norm_2(h))


def as_many_as_tokens(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale) * (1.0 / x.shape[1])
    return h + s.mlp(s.norm_2(h))


def in_another_type(s, x, scale):
    h = x.double() + s.mix(s.norm(x), scale=scale)
    return (h + s.mlp(s.norm_2(h.float()))).float()


def a_mean_of_its_own(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    return h + s.mlp(s.norm_2(h)) * h.mean()


def otherwise_of_tuples(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    made = s.mlp(s.norm_2(h))
    return h + (made[0].view(h.shape) if isinstance(made, tuple) else made)


NEARLY = {
    "another shape of a tuple's": lambda: layer_of(otherwise_of_tuples, Pair),
    "LayerNorms after": lambda: layer_of(post_norms),
    "a difference of MLPs": lambda: layer_of(a_difference, other=Widen),
    "another function": lambda: layer_of(another_function),
    "what a tensor says": lambda: layer_of(as_a_tensor_says),
    "less in training": lambda: layer_of(less_in_training),
    "a factor of the tokens": lambda: layer_of(as_many_as_tokens),
    "a sum in another type": lambda: layer_of(in_another_type),
    "a mean of its own": lambda: layer_of(a_mean_of_its_own),
}


def assert_layer(layer, known, apply=huggingface.apply):
    model = nn.Sequential(layer)
    model.layers = nn.ModuleList([layer])
    before = copy.deepcopy(layer)
    applied = apply(model)
    (row,) = (row for row in applied.rows if row.kind == "Layer")
    assert (RESIDUAL in (row.by or "")) is known
    assert known or row.why.startswith("its norms stay apart: ")
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3))
    for options in ({}, {"scale": 2.0}):
        ys = []
        for each in (layer, before):
            each.zero_grad()
            given = x.clone().requires_grad_()
            y = each(given, **options)
            y = y[0] if isinstance(y, tuple) else y
            y.square().sum().backward()
            ys.append([y.detach(), given.grad, *(p.grad for p in each.parameters() if p.grad is not None)])
        for found, expected in zip(*ys, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_nobody_has_heard_of(name):
    assert_layer(LAYERS[name](), True)


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_one_is_left(name):
    assert_layer(NEARLY[name](), False)


def test_what_layers_are_given():
    """Cross-attention's layers read something else than the norm's output, and a tensor may not be there."""
    from transformers import MBartConfig, MBartForConditionalGeneration

    config = MBartConfig(
        vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = MBartForConditionalGeneration(config).train()
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    assert {row.kind for row in applied.replaced if RESIDUAL in row.by} == {"MBartEncoderLayer", "MBartDecoderLayer"}
    folded = {step.call.name for step in model.model.decoder.layers[0]._onepass.program.steps if isinstance(step, FoldedCall)}
    assert folded == {"self_attn"}
    assert_alike(step(model, **batch()), step(before, **batch()))


def beside_one_norm(s, x, scale):
    n = s.norm(x)
    return x + s.mix(n, scale=scale) + s.mlp(n)


@pytest.mark.parametrize(("formula", "why"), [(beside_one_norm, "several layers read one's result"), (twice, None)])
def test_why_a_norm_that_several_layers_read_stays_apart(formula, why):
    layer = layer_of(formula)
    del layer.norm_2
    layer.norm_2 = nn.LayerNorm(16) if why is None else nn.Identity()
    model = nn.Sequential(layer)
    model.layers = nn.ModuleList([layer])
    (row,) = (row for row in huggingface.apply(model).rows if row.kind == "Layer")
    assert row.why == why or why in row.why


class Output(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, hidden_states, other=None):
        return self.norm(self.dense(hidden_states) + (0.0 if other is None else other))


def test_a_layer_of_two_inputs():
    model = nn.Sequential(Output())
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    assert [row.by for row in applied.replaced] == ["layer_norm", f"layer_norm, {RESIDUAL}"]
    x, other = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    for given in (other, None, 2.0):  # by its own code where it is no tensor
        expected = before[0](x, given)
        torch.testing.assert_close(model[0](x, other=given), expected)
        torch.testing.assert_close(model[0](hidden_states=x, other=given), expected)
    assert model[0]._onepass.given((other,), {}) == {"other": other}
    assert model[0]._onepass.given((), {"other": None}) is None


def test_inputs_that_broadcast():
    model = nn.Sequential(Output())
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    x, other = torch.randn(2, 1, 16), torch.randn(2, 16)
    torch.testing.assert_close(model[0](x, other), before[0](x, other))


def test_code_that_does_more_in_fp16_runs_there():
    """MBart's encoder clamps sums that overflow."""
    transformers = pytest.importorskip("transformers")
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in SIZES_OF_A_STACK.items()}
    config = transformers.MBartConfig(vocab_size=97, d_model=32, dropout=0.0, max_position_embeddings=64, **sizes)
    model = transformers.MBartModel(config).eval()
    with torch.no_grad():
        layer = model.encoder.layers[0]
        layer.self_attn.out_proj.bias[0], layer.fc2.bias[0] = 6e3, 6.5e4
    before, applied = copy.deepcopy(model).half(), huggingface.apply(model)
    (row,) = [row for row in applied.replaced if row.name == "encoder.layers.0"]
    assert row.by == f"norm_linear, {RESIDUAL}" and row.why is None
    model.half()
    (row,) = [row for row in applied.rows if row.name == "encoder.layers.0"]
    assert row.why == "in fp16 its own code, which does something else there"
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        found, expected = (each.encoder(ids).last_hidden_state for each in (model, before))
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


SIZES_OF_A_STACK = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


def test_a_type_that_the_norm_has_not():
    another_type_is_right(huggingface.apply)


def another_type_is_right(apply):
    layer = layer_of(of_the_norms_type)
    before, _ = copy.deepcopy(layer).double(), apply(nn.Sequential(layer))
    x = torch.randn(2, 5, 16)
    layer.double()
    assert layer._onepass.given((), {}) == {}
    torch.testing.assert_close(layer(x), before(x))


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # PyTorch's own, of the layer as it was
def test_a_norm_after_with_a_hook_or_of_another_type_is_its_own():
    layer = layer_of(post_norms, norm=RMS, norm_2=RMS)
    before, _ = copy.deepcopy(layer), huggingface.apply(nn.Sequential(layer))
    x = torch.randn(2, 5, 16)
    for each in (layer, before):
        each.norm.register_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(layer(x), before(x))
    for each in (layer, before):
        each.mlp.register_forward_hook(lambda module, args, y: y.bfloat16())
    y = layer(x)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, before(x), rtol=1e-2, atol=1e-2)


def test_another_factor_is_noticed():
    layer = layer_of(scaled)
    model = nn.Sequential(layer)
    model.layers = nn.ModuleList([layer])
    before, applied = copy.deepcopy(layer), huggingface.apply(model)
    layer.factor = before.factor = 0.25
    assert "changed since: its factor was 0.5 and is 0.25" in {row.why for row in applied.left}
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(layer(x), before(x))


UNPACKED = ("GptOss", "GraniteMoeHybrid", "Qwen3Next", "Qwen3_5Text", "Lfm2")  # whose own code parts not all
HYBRIDS = ("Qwen3Next", "Qwen3_5Text", "GptOss", "Granite", "GraniteMoeHybrid", "Lfm2", "Llama4Text")


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_layer_of_a_hybrid(family, monkeypatch):
    """Whole, padded, packed and checkpointed batches."""
    model = made(family)
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    calls, stock = [], LayerMatch.__call__
    monkeypatch.setattr(LayerMatch, "__call__", lambda self, *args, **given: calls.append(self) or stock(self, *args, **given))
    packed = {"position_ids": torch.tensor([[*range(5), *range(7)], [*range(12)]]), "use_cache": False}
    batches = [batch(), batch(masked=True), *([] if family in UNPACKED else [batch() | packed])]
    for given in batches:
        assert_alike(step(model, **given), step(before, **given))
    assert len(calls) == len(model.model.layers) * len(batches)
    for each in (model, before):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_alike(step(model, **batch()), step(before, **batch()))


@pytest.mark.parametrize("family", ("Qwen3_5Text", "Lfm2", "Granite"))
def test_in_bf16_by_kernels_it_is_as_near(family, monkeypatch):
    by_formula = partial(delta_rules.gated_delta_rule, backend="torch")  # whose kernels are wheels', and want a GPU
    for code in (delta_rules, delta_net):
        monkeypatch.setattr(code, "gated_delta_rule", by_formula)
    model = made(family)
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    given = batch() | {"use_cache": False}
    exact = step(before, **given)
    with onepass.use_backend("triton"):
        found = step(model.bfloat16(), **given)
    plain = step(before.bfloat16(), **given)

    def error(result):
        return sum((result[1][name].float() - grad).square().sum() for name, grad in exact[1].items()).sqrt()

    assert error(found) < 1.25 * error(plain)


def all_layers_are_right(applied):
    for name in LAYERS:
        assert_layer(LAYERS[name](), True, applied.apply)
    for name in NEARLY:
        assert_layer(NEARLY[name](), False, applied.apply)
    another_type_is_right(applied.apply)


MUTANTS = {
    "a factor of another": (layer_steps, "Scaled", "* self.factor", "* (self.factor or 1) ** 2"),
    "a sum of one": (layer_steps, "Sum", "values[self.a] + values[self.b]", "values[self.a] + values[self.a]"),
    "rows as they come": (layer_steps, "Shaped", "a.flatten(0, -2)", "a"),
    "the tuple's second": (layer_steps, "ChildCall.keep", "made[item] if items", "made[item + 1] if items"),
    "a tuple whole": (layer_steps, "ChildCall.keep", "self.is_tuple or (self.may_be_tuple and", "self.is_tuple or (False and"),
    "the sum without the residual": (layer_steps, "ChildNorm.run", "self.match(x, residual)", "self.match(x), x"),
    "the sum with itself": (layer_steps, "PostNorm.run", "self.match.plus(x, residual)", "self.match.plus(x, x)"),
    "any result": (layer_trace, "_alike", "all(close(each, other) for each, other in pairs)", "True"),
    "what a tensor says": (layers, "replace_layers", ".own_tensors:", ".own_tensors and False:"),
    "whatever an argument does": (layer_trace, "_places", "if one != two:", "if False:"),
    "the first shape that comes": (layer_trace, "_verified", "or as_before != base.steps", ""),
    "no arguments": (layer_trace, "LayerArguments.given", "passed[name] = value", "pass"),
    "the input as it is": (layer_steps, "Cast.run", "if child is None else child.weight.dtype", ""),
    "the other's type": (layer_steps, "Cast.run", "self.child is None", "True"),
}


test_a_mutant_is_found, test_what_mutants_are_tried_on_is_right = mutant_tests(MUTANTS, all_layers_are_right, AttributeError)
