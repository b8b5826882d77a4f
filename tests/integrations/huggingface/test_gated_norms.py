"""Gated norms of linear attention and of Mamba 2 in models, and modules that are nearly some."""

import copy
import importlib

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import gated_norms, norms
from onepass.integrations.huggingface.families import assert_alike, batch, step, tiny_model
from onepass.integrations.huggingface.patches import Patches
from onepass.testing.mutants import mutate


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def named(family, kind, *args, **options):
    return lambda: getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), kind)(*args, **options)


KINDS = {  # a module, and what the report says of it
    "Qwen3Next": (named("qwen3_next", "Qwen3NextRMSNormGated", 16), "gated_rms_norm"),
    "KimiLinear": (named("kimi_linear", "KimiLinearRMSNormGated", 16), "gated_rms_norm, sigmoid"),
    "Mamba2": (named("mamba2", "MambaRMSNormGated", 16, 16), "gated_rms_norm, of gated rows"),
    "NemotronH": (named("nemotron_h", "NemotronHRMSNormGated", 16, 4), "gated_rms_norm, of gated rows, in groups of 4"),
    "FalconH1": (
        named("falcon_h1", "FalconH1RMSNormGated", 16, n_groups=2, norm_before_gate=False),
        "gated_rms_norm, of gated rows, in groups of 8",
    ),
    "FalconH1, first": (
        named("falcon_h1", "FalconH1RMSNormGated", 16, n_groups=2, norm_before_gate=True), "gated_rms_norm, in groups of 8"
    ),
}  # fmt: skip


class Gated(nn.Module):
    """`formula` of the module, its rows and their gate."""

    def __init__(self, formula, width=16, bias=False):
        super().__init__()
        self.weight, self.eps, self.formula = nn.Parameter(torch.rand(width) + 0.5), 1e-5, formula
        if bias:
            self.bias = nn.Parameter(torch.rand(width))

    def forward(self, x, gate):
        return self.formula(self, x, gate)


def normed(s, x, mean=True):
    squares = x.square()
    return x * ((squares.mean(-1, keepdim=True) if mean else squares.sum(-1, keepdim=True)) + s.eps).rsqrt()


NEARLY = {
    "the gate as it is": lambda s, x, z: normed(s, x) * s.weight * z,
    "gelu": lambda s, x, z: normed(s, x) * s.weight * nn.functional.gelu(z),
    "a sum for a mean": lambda s, x, z: normed(s, x, mean=False) * s.weight * nn.functional.silu(z),
    "the weight twice": lambda s, x, z: normed(s, x) * s.weight.square() * nn.functional.silu(z),
    "a norm of the gate": lambda s, x, z: normed(s, z) * s.weight * nn.functional.silu(x),
    "no weight": lambda s, x, z: normed(s, x) * nn.functional.silu(z),
}
TRIED = {
    "zero-centred": (lambda s, x, z: normed(s, x) * (1 + s.weight) * nn.functional.silu(z), "gated_rms_norm, zero-centred"),
    "sigmoid before": (lambda s, x, z: normed(s, x * z.sigmoid()) * s.weight, "gated_rms_norm, sigmoid, of gated rows"),
}


def gated_step(module, *given):
    x, z = (torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in (1, 2))
    y = module(x, z, *given)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    return [y.detach(), x.grad, z.grad, module.weight.grad]


def assert_same(module, by):
    with torch.no_grad():
        module.weight.add_(0.3 * torch.randn_like(module.weight))
    before = copy.deepcopy(module)
    model = nn.Sequential(module)
    (row,) = norms.replace_norms(model, Patches())[1]
    assert row.by == by and row.kind == type(module).__name__
    for found, expected in zip(gated_step(module), gated_step(before), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    return module, before


@pytest.mark.parametrize("kind", KINDS)
def test_gated_norms_of_families(kind):
    made, by = KINDS[kind]
    assert_same(made(), by)


@pytest.mark.parametrize("kind", TRIED)
def test_gated_norms_that_nobody_has_heard_of(kind):
    assert_same(Gated(TRIED[kind][0]), TRIED[kind][1])


@pytest.mark.parametrize("kind", NEARLY)
def test_what_is_nearly_one_is_left(kind):
    assert gated_norms.find_gated_norm(Gated(NEARLY[kind])) is None


def test_one_with_a_bias_is_left():
    assert gated_norms.find_gated_norm(Gated(lambda s, x, z: normed(s, x) * s.weight * nn.functional.silu(z), bias=True)) is None


def test_without_a_gate_its_own_code_runs():
    made, by = KINDS["NemotronH"]
    module, before = assert_same(made(), by)
    x = torch.randn(2, 16)
    assert module(x).equal(before(x))
    z = torch.randn(2, 16)
    torch.testing.assert_close(module(hidden_states=x, gate=z), before(x, z))


def test_a_change_is_noticed():
    model = tiny_model("Qwen3_5Text")
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    for each in (model, before):
        each.model.layers[0].linear_attn.norm.variance_epsilon = 0.1
    whys = [row.why for row in applied.left if row.name.endswith("linear_attn.norm")]
    assert whys == ["changed since: its variance_epsilon was 1e-06 and is 0.1"]
    assert_alike(step(model, **batch()), step(before, **batch()))


# ---- mutants ----


def is_right(mutant):
    for made, by in KINDS.values():
        assert mutant.find_gated_norm(made()).name == by
    for formula, by in TRIED.values():
        assert mutant.find_gated_norm(Gated(formula)).name == by
    assert all(mutant.find_gated_norm(Gated(formula)) is None for formula in NEARLY.values())
    module = KINDS["NemotronH"][0]()
    module._onepass = mutant.find_gated_norm(module)
    x, z = torch.randn(2, 16), torch.randn(2, 16)
    for given in ((x,), (x, z)):
        torch.testing.assert_close(mutant.gated_norm_forward(module, *given), module(*given))
    module.variance_epsilon = 1.0
    torch.testing.assert_close(mutant.gated_norm_forward(module, x, z), module(x, z))


MUTANTS = {
    "silu alone": ("_by_trial", '"activation": activation', '"activation": "silu"'),
    "another epsilon": ("_by_trial", '"eps": eps, "act', '"eps": 1e-2, "act'),
    "no groups": ("_sizes", "yield from (number, width // number)", "yield None"),
    "any result": ("_by_trial", "if close(y,", "if y is not None or close(y,"),
    "the gate for the rows": ("gated_norm_forward", "gated_rms_norm(x, z,", "gated_rms_norm(z, x,"),
    "no look at changes": ("gated_norm_forward", " or not match.snapshot.unchanged(self)", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    monkeypatch.setenv("ONEPASS_BACKEND", "torch")
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        is_right(mutate(gated_norms, *MUTANTS[name]))


def test_what_mutants_are_tried_on_is_right():
    with onepass.use_backend("torch"):
        is_right(gated_norms)
