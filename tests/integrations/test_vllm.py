"""The plugin for vLLM, on a stub of its interface: how it registers, and what its layers compute."""

import importlib
import re
import sys
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from onepass.integrations import vllm as plugin
from onepass.integrations.seams import SeamError
from onepass.runtime.batch_invariance import invariant

H, FFN, VOCABULARY = 32, 48, 301


def stub():
    """The names that the plugin needs. A class's instances are of the one that is registered by its name, as vLLM's are."""
    registry = {}

    class CustomOp(nn.Module):
        def __new__(cls, *args, **options):
            return super().__new__(registry.get(cls.__name__, cls))

        def forward(self, *args, **options):
            return self.forward_native(*args, **options)

        @classmethod
        def register_oot(cls, _decorated_op_cls=None, name=None):
            def registered(made):
                assert name not in registry, f"Duplicate op name: {name}"
                registry[name] = made
                return made

            return registered

    class RMSNorm(CustomOp):
        def __init__(self, hidden_size, eps=1e-6, var_hidden_size=None, has_weight=True, dtype=None):
            super().__init__()
            self.variance_epsilon, self.has_weight = eps, has_weight
            self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size
            weight = torch.linspace(0.5, 1.5, hidden_size, dtype=dtype)
            self.weight = nn.Parameter(weight) if has_weight else weight

        def forward_native(self, x, residual=None):
            return "vLLM's own"

    class SiluAndMul(CustomOp):
        def forward_native(self, x):
            return "vLLM's own"

    class Sampler(nn.Module):
        @staticmethod
        def compute_logprobs(logits):
            return "vLLM's own"

    return {
        "vllm.model_executor.custom_op": {"CustomOp": CustomOp, "op_registry_oot": registry},
        "vllm.model_executor.layers.layernorm": {"RMSNorm": RMSNorm},
        "vllm.model_executor.layers.activation": {"SiluAndMul": SiluAndMul},
        "vllm.v1.sample.sampler": {"Sampler": Sampler},
    }


@pytest.fixture
def vllm(monkeypatch):
    """The stub's names, in sys.modules until the test ends. What the plugin has turned on is turned off."""
    names = {}
    for title, members in stub().items():
        for parent in accumulate(title.split("."), "{}.{}".format):
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        for name, value in members.items():
            setattr(sys.modules[title], name, value)
            names[name] = value
    yield names
    if plugin._registered is not None:
        plugin._registered.undo()
        plugin._registered = None
    assert not invariant()


@pytest.fixture
def registered(vllm, monkeypatch):
    monkeypatch.setenv("ONEPASS_VLLM", "1")
    plugin.register()
    return vllm


# ---- registering ----


@pytest.mark.parametrize("value", (None, "0"))
def test_it_is_inert_unless_asked_for(value, vllm, monkeypatch):
    monkeypatch.delenv("ONEPASS_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("ONEPASS_VLLM", value)
    plugin.register()
    assert not invariant() and vllm["op_registry_oot"] == {}
    assert vllm["RMSNorm"](H)(torch.ones(2, H)) == vllm["Sampler"]().compute_logprobs(None) == "vLLM's own"


def test_it_may_be_called_again(registered):
    before = dict(registered["op_registry_oot"])
    plugin.register()
    assert before == registered["op_registry_oot"] and before.keys() == {"RMSNorm", "SiluAndMul"} and invariant()


def test_another_value_is_refused(vllm, monkeypatch):
    monkeypatch.setenv("ONEPASS_VLLM", "yes")
    with pytest.raises(ValueError, match="ONEPASS_VLLM must be 0 or 1, but is 'yes'"):
        plugin.register()


@pytest.mark.parametrize(
    ("module", "name"),
    [("vllm.model_executor.layers.layernorm", "RMSNorm"), ("vllm.v1.sample.sampler", "Sampler")],
)
def test_a_name_that_moved_changes_nothing(module, name, vllm, monkeypatch):
    monkeypatch.setenv("ONEPASS_VLLM", "1")
    monkeypatch.delattr(sys.modules[module], name)
    with pytest.raises(SeamError, match=f"vLLM lacks what onepass replaces .*{name}.* unset ONEPASS_VLLM"):
        plugin.register()
    assert vllm["op_registry_oot"] == {} and not invariant()


def test_a_switch_that_raises_changes_nothing(vllm, monkeypatch):
    def switch():
        raise RuntimeError("there is no library")

    monkeypatch.setenv("ONEPASS_VLLM", "1")
    monkeypatch.setattr(plugin, "batch_invariant", switch)
    with pytest.raises(RuntimeError, match="no library"):
        plugin.register()
    assert vllm["op_registry_oot"] == {} and vllm["Sampler"].compute_logprobs(None) == "vLLM's own"


def test_vllm_finds_it_by_its_entry_point():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (found,) = re.findall(r'^\[project\.entry-points\."vllm\.general_plugins"\].*\nonepass = "(.*)"$', text, re.MULTILINE)
    module, _, name = found.partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


# ---- layers ----


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_norms(dtype, registered):
    x, residual = torch.randn(7, H, dtype=dtype), torch.randn(7, H, dtype=dtype)
    layer = registered["RMSNorm"](H, 1e-5, dtype=dtype)
    assert isinstance(layer, registered["RMSNorm"])
    with torch.inference_mode():
        assert torch.equal(layer(x), onepass.rms_norm(x, layer.weight, 1e-5))
        y, total = layer(x, residual)
        assert torch.equal(total, x + residual) and torch.equal(y, onepass.rms_norm(x + residual, layer.weight, 1e-5))
        plain = registered["RMSNorm"](H, has_weight=False)(x.float())
        torch.testing.assert_close(plain, F.rms_norm(x.float(), (H,), eps=1e-6))
    assert registered["RMSNorm"](H, var_hidden_size=16)(x) == "vLLM's own"


def test_activations(registered):
    x = torch.randn(7, 2 * FFN)
    with torch.inference_mode():
        torch.testing.assert_close(registered["SiluAndMul"]()(x), F.silu(x[:, :FFN]) * x[:, FFN:])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_log_probabilities(dtype, registered):
    logits = (8 * torch.randn(9, VOCABULARY)).to(dtype)
    logits[3, 5:] = -torch.inf  # a token that may not be
    with torch.inference_mode():
        found = registered["Sampler"]().compute_logprobs(logits)
        parts = [registered["Sampler"].compute_logprobs(part) for part in logits.split(2)]
    assert torch.equal(torch.cat(parts), found)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), logits.double().log_softmax(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_all_but_attention_has_the_bits_of_training(dtype, registered):
    """A norm, an MLP and a head by the engine's layers, a few rows at a time, and by the trainer's ops, all rows at once."""
    x, residual = torch.randn(70, H, dtype=dtype), torch.randn(70, H, dtype=dtype)
    up, down, head = (torch.randn(size, dtype=dtype) / 8 for size in ((2 * FFN, H), (H, FFN), (VOCABULARY, H)))
    norm, activation = registered["RMSNorm"](H, dtype=dtype), registered["SiluAndMul"]()

    def by_engine(x, residual):
        y, h = norm(x, residual)
        y, h = norm(F.linear(activation(F.linear(y, up)), down), h)
        return h, F.linear(y, head)

    y, h = onepass.norm_linear(x, norm.weight, up, residual=residual, return_input=True, eps=1e-6)
    h = h + onepass.activation_linear(y, down, activation="swiglu")
    logits = onepass.norm_linear(h, norm.weight, head, eps=1e-6)
    for size in (1, 3, 32):
        with torch.inference_mode():
            parts = [by_engine(*part) for part in zip(x.split(size), residual.split(size), strict=True)]
        found = [torch.cat(each) for each in zip(*parts, strict=True)]
        assert torch.equal(found[0], h) and torch.equal(found[1], logits)
