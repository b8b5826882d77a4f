"""Products in eight bits under torch.compile(fullgraph=True): the results of uncompiled calls, also after updates."""

from functools import partial

import pytest
import torch
from ops.fp8_calls import LINEAR, decibels, fp8_names

import onepass
from onepass.kernels.language import triton
from onepass.product.fp8 import in_graph
from onepass.product.fp8 import weight as fp8_weight
from onepass.testing.mutants import copy_package, mutate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RECIPES = {
    "delayed": onepass.FP8Recipe(amax_history_len=2),
    "current": onepass.FP8Recipe(scaling="current"),
    "by row": onepass.FP8Recipe(scaling="row"),
    "16-bit wgrad": onepass.FP8Recipe(wgrad=False),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
BACKENDS = ("torch",) if triton is None else ("torch", "triton")


@pytest.fixture(autouse=True)
def _compiles_anew():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def parameters(dtype=torch.bfloat16, main_grad=False):
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, *shape in (("gain", 64), ("up", 96, 64), ("up_bias", 96), ("down", 64, 48), ("out", 32, 64)):
        values = torch.randn(*shape, generator=generator) / (8 if len(shape) == 2 else 1)
        found[name] = torch.nn.Parameter(values.to(DEVICE, dtype))
        if main_grad:
            found[name].main_grad = torch.zeros(shape, device=DEVICE)
    return found


def block(x, p, recipe, library=onepass):
    up, h = library.norm_linear(x, p["gain"], p["up"], p["up_bias"], residual=x.sin(), precision=recipe)
    down = library.activation_linear(up, p["down"], precision=recipe)
    return library.linear(down + h, p["out"], precision=recipe)


def steps(call, p, recipe, microbatches=2, dtype=torch.bfloat16):
    """Return outputs and gradients of three steps, between which the weights change and x grows."""
    found = []
    for step in range(3):
        for microbatch in range(microbatches):
            generator = torch.Generator().manual_seed(10 * step + microbatch)
            x = torch.randn(2, 10, 64, generator=generator).to(DEVICE, dtype) * 4**step
            y = call(x.requires_grad_(), p, recipe)
            y.backward(torch.randn(y.shape, generator=generator).to(DEVICE, dtype))
            found += [y.detach(), x.grad]
        for parameter in p.values():
            grad = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
            found.append(grad.clone())
            parameter.grad = None
            grad.zero_()
            with torch.no_grad():
                parameter.mul_(-1.5)
    return found


def alike(ours, theirs, least):
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if decibels(a, b) < least]


@pytest.mark.parametrize(
    ("name", "main_grad", "backend"),
    [
        ("delayed", False, BACKENDS[0]),
        ("delayed", True, BACKENDS[-1]),
        ("current", False, BACKENDS[-1]),
        ("by row", False, BACKENDS[0]),
        ("by row", False, BACKENDS[-1]),
        ("16-bit wgrad", True, BACKENDS[-1]),
    ],
)
def test_compiled_calls_are_uncompiled_ones(name, main_grad, backend):
    recipe = RECIPES[name]
    with onepass.use_backend(backend):
        plain = steps(block, parameters(main_grad=main_grad), recipe)
        call = torch.compile(block, fullgraph=True, backend="aot_eager")  # the graph is Inductor's too, in a tenth of the time
        compiled = steps(call, parameters(main_grad=main_grad), recipe)
    # a compiler leaves out the rounding of h to 16 bits between formulas: some codes are the next ones
    assert not alike(compiled, plain, 36 if backend == "triton" else 24)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_fp32_codes_and_scales_are_those_of_uncompiled_calls(backend):
    """By kernels in Inductor, with main_grad."""
    plain, compiled = (parameters(torch.float32, main_grad=backend == "triton") for _ in range(2))
    recipe = RECIPES["delayed"]
    with onepass.use_backend(backend):
        expected = steps(block, plain, recipe, dtype=torch.float32)
        call = torch.compile(block, fullgraph=True, backend="inductor" if backend == "triton" else "aot_eager")
        found = steps(call, compiled, recipe, dtype=torch.float32)
    assert not alike(found, expected, 60)
    for name in ("up", "down", "out"):
        ours, theirs = (each[name].fp8.state_dict(each[name]) for each in (compiled, plain))
        assert torch.equal(ours["scale"], theirs["scale"]) and torch.equal(ours["steps"], theirs["steps"])
        torch.testing.assert_close(ours["history"], theirs["history"])


@recipes
def test_without_gradients_nothing_is_noted(recipe):
    p = parameters()
    x = torch.randn(20, 64, device=DEVICE, dtype=torch.bfloat16)
    call = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        first = call(x, p, recipe)
        call(x * 100, p, recipe)
        assert decibels(call(x, p, recipe), first) > 60
        assert decibels(first, block(x, p, recipe)) > 28


def test_modules_and_any_number_of_tokens():
    torch.manual_seed(0)
    mlp = onepass.nn.MLP(64, 128, precision="fp8").to(DEVICE)
    call = torch.compile(mlp, fullgraph=True, dynamic=True)
    for tokens in (16, 7, 33):
        x = torch.randn(tokens, 64, device=DEVICE)
        assert decibels(call(x), mlp(x)) > 36
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_checkpointed_block():
    def checkpointed(x, p, recipe):
        return torch.utils.checkpoint.checkpoint(block, x, p, recipe, use_reentrant=False)

    with onepass.use_backend("torch"):
        plain = steps(block, parameters(), RECIPES["delayed"])
        call = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
        assert not alike(steps(call, parameters(), RECIPES["delayed"]), plain, 24)


@pytest.mark.parametrize("kind", ("delayed", "by row"))
def test_a_weight_that_the_graph_makes(kind):
    """As packed parameters are: backward may get another tensor of the same values."""

    def of_parts(x, p, recipe):
        weight = torch.cat([p["up"], p["out"]])
        return torch.utils.checkpoint.checkpoint(onepass.linear, x, weight, precision=recipe, use_reentrant=False)

    drawn = [{name: parameters(torch.float32)[name] for name in ("up", "out")} for _ in range(2)]
    plain, compiled = (
        steps(call, p, RECIPES[kind], dtype=torch.float32)
        for call, p in zip((of_parts, torch.compile(of_parts, fullgraph=True, backend="aot_eager")), drawn, strict=True)
    )
    assert not alike(compiled, plain, 24)


def test_an_update_between_forward_and_backward_raises():
    p = parameters()
    x = torch.randn(20, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = torch.compile(block, fullgraph=True, backend="aot_eager")(x, p, RECIPES["delayed"])
    with torch.no_grad():
        p["down"].mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|must not be updated"):
        y.sum().backward()


def test_under_autocast():
    p = {name: torch.nn.Parameter(each.detach().float()) for name, each in parameters().items()}
    x = torch.randn(20, 64, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        plain = block(x, p, RECIPES["delayed"])
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x, p, RECIPES["delayed"])
    assert plain.dtype is compiled.dtype is torch.bfloat16
    assert decibels(compiled, plain) > 28


MUTANTS = {
    "x's inverse is another": (in_graph, "forward_in_graph", "call.x_inverse.clone(), ", "call.x_inverse.clone() * 2, "),
    "x's scale is another": (in_graph, "CompiledFP8Product.forward", "E4M3, x_scale", "E4M3, 4 * x_scale"),
    "dy's scale is another": (in_graph, "_output_gradient", "operand.inverse.clone()", "operand.inverse * 2"),
    "magnitudes are not noted": (in_graph, "forward_in_graph", "if noted else None", "if not noted else None"),
    "an update is not seen": (fp8_weight, "FP8Weight.update", "not in (None, version) and", "is None and"),
}  # fmt: skip


def product(x, p, recipe, library):
    """What a graph runs of a product: a compiler would follow a copied package into the real one."""
    return library.multiply_rows(x, p["out"], None, fp8_names(library)["CompiledFP8Product"](recipe), x.dtype)


def product_steps(library):
    p = {"out": parameters(torch.float32)["out"]}
    recipe = fp8_names(library)["FP8Recipe"](amax_history_len=2)
    return steps(partial(product, library=library), p, recipe, dtype=torch.float32)


def test_mutants_are_found():
    p = {"out": parameters(torch.float32)["out"]}
    plain = steps(lambda x, p, recipe: onepass.linear(x, p["out"], precision=recipe), p, RECIPES["delayed"], dtype=torch.float32)
    assert not alike(product_steps(copy_package(LINEAR)), plain, 100)
    assert not [name for name, change in MUTANTS.items() if not alike(product_steps(mutate(*change, entry=LINEAR)), plain, 100)]
