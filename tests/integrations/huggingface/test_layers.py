"""Layers whose norms join the residual's sums, with any mixer, two MLPs, tuples or factors; and others that only look so."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, batch, made, mutant_of, step

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import applied as applied_module
from onepass.integrations.huggingface import delta_mixers, delta_rules, layers
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


def layer_of(formula, second=Widen, **more):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.norm_2, self.mix = nn.LayerNorm(16), nn.LayerNorm(16), Mixer()
            self.mlp, self.factor = second(), 0.5
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


LAYERS = {
    "another mixer": lambda: layer_of(twice),
    "a factor": lambda: layer_of(scaled),
    "two MLPs": lambda: layer_of(summed, other=Widen),
    "a tuple, of rows": lambda: layer_of(of_tuples, Pair),
}


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


def post_norms(s, x, scale):
    h = x + s.norm(s.mix(x, scale=scale))
    return h + s.norm_2(s.mlp(h))


def a_difference(s, x, scale):
    h = x + s.mix(s.norm(x), scale=scale)
    n = s.norm_2(h)
    return h + s.mlp(n) - s.other(n)


NEARLY = {
    "one of two scaled": lambda: layer_of(only_one_scaled),
    "the second MLP reads x": lambda: layer_of(second_reads_x, other=Widen),
    "a normed residual": lambda: layer_of(normed_residual),
    "scaled whole": lambda: layer_of(scaled_whole),
    "norms after": lambda: layer_of(post_norms),
    "a difference of MLPs": lambda: layer_of(a_difference, other=Widen),
}


def assert_layer(layer, known, apply=huggingface.apply):
    model = nn.Sequential(layer)
    model.layers = nn.ModuleList([layer])
    before = copy.deepcopy(layer)
    applied = apply(model)
    (row,) = (row for row in applied.rows if row.kind == "Layer")
    assert (RESIDUAL in (row.by or "")) is known
    assert known or row.why == "its norms stay apart: what it makes of its children is not known"
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3))
    for options in ({}, {"scale": 2.0}):
        ys = []
        for each in (layer, before):
            each.zero_grad()
            given = x.clone().requires_grad_()
            y = each(given, **options)
            y.square().sum().backward()
            ys.append([y.detach(), given.grad, *(p.grad for p in each.parameters())])
        for found, expected in zip(*ys, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_nobody_has_heard_of(name):
    assert_layer(LAYERS[name](), True)


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_one_is_left(name):
    assert_layer(NEARLY[name](), False)


def test_another_factor_is_noticed():
    layer = layer_of(scaled)
    model = nn.Sequential(layer)
    model.layers = nn.ModuleList([layer])
    before, applied = copy.deepcopy(layer), huggingface.apply(model)
    layer.factor = before.factor = 0.25
    assert "changed since: its factor was 0.5 and is 0.25" in {row.why for row in applied.left}
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(layer(x), before(x))


UNPACKED = ("GptOss", "GraniteMoeHybrid")  # whose own masks part nothing: onepass warns
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
    for code in (delta_rules, delta_mixers):
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


MUTANTS = {
    "the factor once": ("LayerMatch._then", "x if self.shape.factor is None else", "x if True else"),
    "one MLP": ("LayerMatch._mlp", "made = made + other(normed)", "made = made"),
    "rows as they come": ("LayerMatch._then", "x = x.view(shape)", "x = x"),
    "the tuple's second": ("LayerMatch._then", "made[0] if", "made[1] if"),
    "any result": ("_shape_of", "all(close(each, expected) for each in results)", "True"),
    "the first alone": ("_formula", "h + then(shape.after_mlp", "h + 0 * then(shape.after_mlp"),
    "no arguments": ("AttentionArguments.handed_on", "passed[name] = value", "pass"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    all_layers_are_right(applied_module)
    mutant = mutant_of(monkeypatch, layers, *MUTANTS[name])
    with pytest.raises((AssertionError, AttributeError, RuntimeError, ValueError)):
        all_layers_are_right(mutant)
