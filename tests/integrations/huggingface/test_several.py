"""Compiled, several layers of one input are one product of weights that are not copied; by the kernels, in their interpreter."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("triton")

from functorch.compile import make_boxed_func
from integrations.huggingface.families import assert_alike, batch, both, step
from ops.fp8_calls import decibels
from torch._dynamo.backends.common import aot_autograd

import onepass
from onepass.gradients.packed_params import are_packed
from onepass.integrations import huggingface
from onepass.integrations.huggingface.linears import FoldedNorm, LinearsMatch
from onepass.integrations.huggingface.norms import NormMatch
from onepass.integrations.huggingface.patches import Patches
from onepass.product import packed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES, SIZES = ("q", "k", "v"), (12, 4, 8)


class Layers(nn.Module):
    """Layers of one input after a norm; `late` is added to the norm's input first."""

    def __init__(self, bias=True, norm="rms_norm", late=True, together=True):
        super().__init__()
        for name, size in zip(NAMES, SIZES, strict=True):
            setattr(self, name, nn.Linear(16, size, bias=bias))
        norms = {"rms_norm": lambda: nn.RMSNorm(16, eps=1e-6), "layer_norm": lambda: nn.LayerNorm(16), None: nn.Identity}
        self.norm = norms[norm]()
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter, 1.0)
        self.to(DEVICE)
        self.folds = None if norm is None else NormMatch(self.norm, norm == "layer_norm", self.norm.eps, False)
        self.late, self.product = late, LinearsMatch(self, NAMES)
        if together:
            self.product.replace(Patches())

    def forward(self, x, late):
        if self.folds is None:
            return self.product(x * 1), x
        folded = FoldedNorm(self.folds, late if self.late else None)
        return self.product(x * 1, folded), folded.h


def given(**options):
    torch.manual_seed(0)
    model = Layers(**options)
    x, late = (torch.randn(2, 5, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    return model, x, late


def everything(model, function, x, late):
    """What comes of it and every gradient."""
    y, h = function(x, late)
    leaves = [x, late, *model.parameters()]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad((y.sin().sum() + h.cos().sum()), leaves, allow_unused=True)
    return [y.detach(), h.detach(), *grads]


def compiled(function, seen=None):
    """As one graph, of which `seen` gets the operators."""
    torch._dynamo.reset()

    def read(graph, _):
        if seen is not None:
            seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=read, bw_compiler=read))


def assert_close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


OF_SEVERAL = {"onepass.product_of_several.default", "onepass.input_gradient_of_several.default"}
NORMS = (("rms_norm", True), ("rms_norm", False), ("layer_norm", True), (None, False))


@pytest.mark.parametrize("together", (True, False), ids=("together", "apart"))
@pytest.mark.parametrize(("place", "norm", "late"), [(i, *each) for i, each in enumerate(NORMS)])
def test_it_is_as_it_was_and_nothing_of_weights_is_copied(place, norm, late, together, monkeypatch):
    """Where weights lie together; and where they were moved apart after the graph was made, a copy is right."""
    model, x, late = given(bias=place % 2 == together, norm=norm, late=late, together=together)
    seen, ways, stock = [], [], torch.cat
    function = compiled(model, seen)
    assert_close(everything(model, function, x, late), everything(model, model, x, late))
    assert set(seen) >= OF_SEVERAL and not any("aten.cat" in name for name in seen)
    monkeypatch.setattr(torch, "cat", lambda tensors, *rest, **named: ways.append(len(tensors)) or stock(tensors, *rest, **named))
    everything(model, function, x, late)
    assert bool(ways) is not together
    if together:
        model.product.unpack()
        assert not are_packed([model.q.weight, model.k.weight, model.v.weight])
        found = everything(model, function, x, late)
        assert ways
        assert_close(found, everything(model, model, x, late))


@pytest.mark.parametrize("frozen", ("weights", "k", "norm", "x", "x and late", "biases"))
def test_what_is_frozen_gets_nothing(frozen):
    model, x, late = given()
    for name, parameter in model.named_parameters():
        is_norm, is_bias = "norm" in name, name.endswith("bias")
        chosen = {"weights": not is_norm and not is_bias, "k": name.startswith("k."), "norm": is_norm, "biases": is_bias}
        parameter.requires_grad_(not chosen.get(frozen, False))
    if "x" in frozen:
        x.requires_grad_(False)
    if "late" in frozen:
        late.requires_grad_(False)
    assert_close(everything(model, compiled(model), x, late), everything(model, model, x, late))


def test_without_gradients():
    model, x, late = given()
    with torch.no_grad():
        assert_close(list(compiled(model)(x, late)), list(model(x, late)))


@pytest.mark.parametrize("why", ("main_grad", "autocast", "late is fp64", "by PyTorch", "nothing"))
def test_others_are_as_before(why):
    model, x, late = given()
    if why == "main_grad":
        model.k.weight.main_grad = torch.zeros_like(model.k.weight)
    if why == "late is fp64":
        late = late.detach().double()
    if why == "nothing":
        x, late = x[:0].detach().requires_grad_(), late[:0].detach().requires_grad_()
    seen, autocast = [], torch.autocast(DEVICE, torch.bfloat16, enabled=why == "autocast")
    with autocast, onepass.use_backend("torch" if why == "by PyTorch" else "auto"):
        y, h = compiled(model, seen)(x, late)
        expected = model(x, late)
    assert not set(seen) & OF_SEVERAL
    torch.testing.assert_close((y.float(), h.float()), tuple(t.float() for t in expected), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of models on a CPU need the interpreter")
@pytest.mark.parametrize("family", ("Llama", "Qwen3"))
def test_models(family):
    """As one graph, whose weights are the model's."""
    model, before, _ = both(family, num_hidden_layers=1)
    call = batch() | {"use_cache": False}
    seen = []
    assert_alike(step(compiled(model, seen), **call), step(before, **call))
    assert set(seen) >= OF_SEVERAL


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of models on a CPU need the interpreter")
@pytest.mark.parametrize(("scaling", "biased"), [("delayed", False), ("delayed", True), ("current", False)])
def test_models_in_eight_bits(scaling, biased):
    """With scales known before, and without biases, the MLP is one function of the graph."""
    recipe = onepass.FP8Recipe(scaling=scaling)
    model, other, _ = both("Llama", num_hidden_layers=1, mlp_bias=biased, precision=recipe)
    huggingface.apply(other, precision=recipe)
    call, seen = batch() | {"use_cache": False}, []
    with onepass.use_backend("triton"):
        found, expected = step(compiled(model, seen), **call), step(other, **call)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.cat([grads[name].flatten() for name in expected[1]]) for _, grads in (found, expected))
    assert decibels(ours, theirs) > 28
    assert {"onepass.norm_linear_fp8.default", "onepass.fp8_output_gradient.default"} <= set(seen)
    assert ("onepass.gated_mlp_up_gradient.default" in seen) is (scaling == "delayed" and not biased)


def test_the_ops_are_what_they_say():
    model, x, _ = given()
    weights, biases = ([getattr(getattr(model, name), kind).detach() for name in NAMES] for kind in ("weight", "bias"))
    tests = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    for some in (biases, []):
        torch.library.opcheck(packed._product_op, (x.detach(), weights, some), test_utils=tests)
    dy = torch.randn(2, 5, sum(SIZES), device=DEVICE)
    torch.library.opcheck(packed._gradient_op, (dy, weights), test_utils=tests)
