"""One product of several layers' weights in eight bits: results, scales and gradients are those of a layer that has all rows."""

from functools import cache, partial

import pytest
import torch
from ops.fp8_calls import decibels
from ops.test_fp8_compiled import RECIPES, recipes

import onepass
from onepass.gradients.packed_params import pack
from onepass.kernels.language import triton
from onepass.ops.norm import compiled_projections
from onepass.ops.norm.formula import NormOptions
from onepass.product import function
from onepass.product.fp8 import in_graph
from onepass.product.fp8 import updates as fp8_updates
from onepass.testing.mutants import copy_package, mutate

pytestmark = [
    pytest.mark.skipif(triton is None, reason="the ops are of kernels"),
    pytest.mark.usefixtures("graphs_by_kernels"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, K, TOKENS = (32, 16, 48), 64, 20


class Layers:
    """Several layers of one input and the norm before it, or one that has all rows."""

    def __init__(self, several, norm, biased=True, together=False):
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape):
            return (torch.randn(*shape, generator=generator) / (8 if len(shape) == 2 else 1)).to(DEVICE, torch.bfloat16)

        weight, bias, gain, shift = drawn(sum(ROWS), K), drawn(sum(ROWS)), drawn(K), drawn(K)
        parts = ROWS if several else (sum(ROWS),)
        self.weights = [torch.nn.Parameter(part.clone()) for part in weight.split(parts)]
        self.biases = [torch.nn.Parameter(part.clone()) for part in bias.split(parts)] if biased else []
        if together:
            assert pack(self.weights)
        self.norm = norm
        self.vectors = [] if norm is None else [torch.nn.Parameter(gain)]
        if norm == "layer_norm":
            self.vectors.append(torch.nn.Parameter(shift))

    @property
    def parameters(self):
        return [*self.weights, *self.biases, *self.vectors]

    def of_several(self, x, residual, recipe, library=compiled_projections, options=NormOptions):
        if self.norm is None:
            return library.projections(x, self.weights, self.biases, recipe), x
        gain, shift = (*self.vectors, None)[:2]
        norm = options(self.norm == "layer_norm", 1e-6, False)
        return library.norm_projections(x, residual, gain, shift, norm, self.weights, self.biases, recipe)

    def of_one(self, x, residual, recipe):
        weight, bias = self.weights[0], self.biases[0] if self.biases else None
        if self.norm is None:
            return onepass.linear(x, weight, bias, precision=recipe), x
        gain, shift = (*self.vectors, None)[:2]
        options = {"residual": residual, "norm": self.norm, "norm_bias": shift, "precision": recipe, "return_input": True}
        return onepass.norm_linear(x, gain, weight, bias, **options)


def steps(call, layers, residual=True, microbatches=2):
    """Return results and gradients of three steps, between which weights change, after the second some rows, and x grows."""
    found = []
    for step in range(3):
        for microbatch in range(microbatches):
            generator = torch.Generator().manual_seed(10 * step + microbatch)
            given = [torch.randn(2, TOKENS, K, generator=generator).to(DEVICE, torch.bfloat16) * 4**step for _ in range(2)]
            given = [each.requires_grad_() for each in given[: 1 + (residual and layers.norm is not None)]]
            y, h = call(given[0], given[1] if len(given) > 1 else None)
            dy = torch.randn(*y.shape, generator=generator).to(DEVICE, torch.bfloat16)
            torch.autograd.backward([y, h] if layers.norm else [y], [dy, h.detach()] if layers.norm else [dy])
            found += [y.detach(), *(each.grad for each in given)]
        for kind in (layers.weights, layers.biases, layers.vectors[:1], layers.vectors[1:]):
            found += [torch.cat([parameter.grad for parameter in kind])] if kind else []
            for parameter in kind:
                parameter.grad = None
        with torch.no_grad():
            if step == 1:
                first, *others = layers.weights
                (others[0] if others else first[ROWS[0] : sum(ROWS[:2])]).mul_(-3)
            else:
                torch._foreach_mul_(layers.parameters, -1.5)
    return found


def compiled(layers, recipe):
    return torch.compile(partial(layers.of_several, recipe=recipe), fullgraph=True, backend="aot_eager")


def states(layers):
    weight = layers.weights[0]
    return weight.fp8.state_dict(weight)


@cache
def steps_of_one(recipe, norm):
    """Return what `steps` finds of a layer that has all rows, and the state of its scales."""
    one = Layers(False, norm)
    return steps(partial(one.of_one, recipe=recipe), one, microbatches=microbatches_of(recipe)), states(one)


def microbatches_of(recipe):
    """Two where scales are of all of a step's microbatches."""
    return 2 if recipe.scaling == "delayed" else 1


WAYS = {"called": (False, True), "apart": (True, False), "together": (True, True)}  # in a graph, in one place in memory
NORMS = (None, "rms_norm", "layer_norm")
# each recipe, each norm and each way with each of the others
PAIRS = [(recipe, norm, list(WAYS)[(i + j) % 3]) for i, recipe in enumerate(RECIPES) for j, norm in enumerate(NORMS)]


@pytest.mark.parametrize(("recipe", "norm", "way"), PAIRS)
def test_they_are_as_one_layer(recipe, norm, way):
    recipe, (graph, together) = RECIPES[recipe], WAYS[way]
    several = Layers(True, norm, together=together)
    expected, theirs = steps_of_one(recipe, norm)
    call = compiled(several, recipe) if graph else partial(several.of_several, recipe=recipe)
    found = steps(call, several, microbatches=microbatches_of(recipe))
    least = [decibels(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    assert min(least) > 48, least  # sums of another order at most
    ours = states(several)
    if recipe.scaling == "delayed":  # measured once, and then of the history
        assert torch.equal(ours["scale"], theirs["scale"]) and torch.equal(ours["steps"], theirs["steps"])


@pytest.mark.parametrize(
    ("frozen", "biased", "residual"),
    [
        ("nothing", True, False),
        ("weights", True, True),
        ("weights", True, False),
        ("the second", True, True),
        ("biases", True, False),
        ("norm", True, True),
        ("norm", True, False),
        ("nothing", False, True),
        ("norm", False, True),
    ],
)
def test_what_is_frozen_gets_nothing(frozen, residual, biased):
    one, several = (Layers(kind, "rms_norm", biased) for kind in (False, True))
    chosen = {"weights": several.weights, "the second": several.weights[1:2], "biases": several.biases, "norm": several.vectors}
    for parameter in chosen.get(frozen, []):
        parameter.requires_grad_(False)
    x, late = (torch.randn(TOKENS, K, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    late = late if residual else None
    found = []
    for layers, call in ((one, one.of_one), (several, compiled(several, RECIPES["delayed"]))):
        y, h = call(x, late, recipe=RECIPES["delayed"]) if layers is one else call(x, late)
        needs = any(parameter.requires_grad for parameter in layers.parameters)
        if needs:
            y.float().square().sum().backward()
        found.append((y, h, layers))
    assert decibels(found[1][0], found[0][0]) > 48 and torch.equal(found[0][1], found[1][1])
    for ours, theirs in zip(*[(layers.weights, layers.biases, layers.vectors) for _, _, layers in reversed(found)], strict=True):
        for parameter in ours:
            assert (parameter.grad is None) == (not parameter.requires_grad)
        if ours and all(parameter.requires_grad for parameter in ours):
            assert decibels(torch.cat([p.grad for p in ours]), torch.cat([p.grad for p in theirs])) > 48


@recipes
def test_without_gradients_nothing_is_noted(recipe):
    layers = Layers(True, "rms_norm")
    x = torch.randn(TOKENS, K, dtype=torch.bfloat16, device=DEVICE)
    call = compiled(layers, recipe)
    with torch.no_grad():
        first = call(x, None)[0]
        call(x * 100, None)
        assert torch.equal(call(x, None)[0], first)


def test_nothing_joined_is_kept_for_backward():
    """Of the graph's inputs and what its forward hands to backward, no tensor has all rows of the weights."""
    layers, shapes = Layers(True, "rms_norm"), []
    x = torch.randn(TOKENS, K, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: shapes.append(tuple(each.shape)) or each, lambda each: each):
        compiled(layers, RECIPES["delayed"])(x, None)
    assert (ROWS[0], K) in shapes and (sum(ROWS), K) not in shapes


@pytest.mark.parametrize("rows", [(32, 16), (24, 8), (8, 16)], ids=str)
def test_whether_they_fit(rows):
    """The sum of rows must be a multiple of 16, each layer's need not."""
    weights = [torch.randn(n, K, dtype=torch.bfloat16, device=DEVICE) for n in rows]
    x = torch.randn(TOKENS, K, dtype=torch.bfloat16, device=DEVICE)
    fits = not sum(rows) % 16
    assert compiled_projections.use_compiled_projections(x, None, weights, [], "fp8") is fits
    assert compiled_projections.use_compiled_projections(x, None, weights, [])


def test_a_type_without_eight_bits():
    weights = [torch.randn(n, K, dtype=torch.float64, device=DEVICE) for n in ROWS]
    x = torch.randn(TOKENS, K, dtype=torch.float64, device=DEVICE)
    with pytest.raises(TypeError, match="x must be fp32, bf16 or fp16 with precision='fp8', but is fp64"):
        compiled_projections.projections(x, weights, [], "fp8")


def test_an_update_between_forward_and_backward_raises():
    layers = Layers(True, None)
    x = torch.randn(TOKENS, K, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    y, _ = compiled(layers, RECIPES["delayed"])(x, None)
    with torch.no_grad():
        layers.weights[1].mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|must not be updated"):
        y.sum().backward()


MUTANTS = {
    "updates of the first alone are seen": (fp8_updates, "version_of", ", *[parameter._version for parameter in packed[1:]]", ""),
    "copies that nobody recognises": (in_graph, "as_one", "whole.packed = tensors", "whole.copied = tensors"),
    "weights in another order": (in_graph, "as_one", "concat_no_grad(tensors)", "concat_no_grad(tensors[::-1])"),
    "biases left out": (in_graph, "CompiledFP8Product.forward", "weights, biases, recipe", "weights, [], recipe"),
    "products in sixteen bits": (compiled_projections, "_product", "recipe_of(precision)", "None"),
    "gradients of a norm without its weight": (
        function, "_alone", "start_input(prologue, kept,", "start_input(prologue, (kept[0], None, *kept[2:]),"
    ),
    "no gradient of the residual stream": (function, "_alone", "dx, of_inputs,", "None, of_inputs,"),
    "gradients of each other's rows": (function, "_of_parts", "grad.split(row_counts)", "grad.roll(1, 0).split(row_counts)"),
}  # fmt: skip


@pytest.mark.parametrize("name", (None, *MUTANTS))
def test_a_mutant_is_found(name):
    expected, theirs = steps_of_one(RECIPES["delayed"], "rms_norm")

    def found(library):
        layers = Layers(True, "rms_norm")
        recipe = type(library.recipe_of("fp8"))(**vars(RECIPES["delayed"]))  # of a copied package, as the options are
        call = partial(layers.of_several, recipe=recipe, options=library.NormOptions, library=library)
        results = steps(call, layers)
        close = all(decibels(ours, theirs) > 48 for ours, theirs in zip(results, expected, strict=True))
        if not close or not hasattr(layers.weights[0], "fp8"):
            return False
        return all(torch.equal(states(layers)[name], theirs[name]) for name in ("scale", "steps"))

    if name is None:
        assert found(copy_package(compiled_projections))
        return
    mutant = mutate(*MUTANTS[name], entry=compiled_projections)
    try:
        assert not found(mutant)
    except (RuntimeError, ValueError, TypeError):  # one that gradients of another count betray
        assert name == "biases left out"
