"""Grouped products in eight bits: near fp64 on the same codes, of any groups, by codes of the weight as it is; mutants."""

import logging
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from ops.calls import backends, relative
from ops.fp8_calls import BF16, DEVICE, FP32, GRADIENT, OUTPUT, decibels
from ops.mutants import mutants_of

import onepass
from onepass.kernels import grouped_product
from onepass.ops.activation import grouped as activation_grouped
from onepass.ops.activation.formula import ActivationOptions, activation_formula
from onepass.ops.linear import grouped as linear_grouped
from onepass.parallel import MainGrads
from onepass.product import grouped
from onepass.runtime.dispatch import TORCH
from onepass.runtime.fp8 import E4M3, finite_amax, quantise, scale_for

SIZES = ((37, 0, 1, 90, 0), (1,), (0, 0, 3), (16, 16))
sizes = pytest.mark.parametrize("sizes", SIZES, ids=str)
N, K = 96, 64
ROW = "fp8", onepass.FP8Recipe(scaling="row"), onepass.FP8Recipe(scaling="current", format="e4m3")  # which change nothing here


@pytest.fixture(autouse=True)
def _experts_of_any_size(monkeypatch):
    """On a GPU small ones would run in bf16, which is faster."""
    monkeypatch.setattr(grouped_product, "_SCALED_LEAST", 16)


def ends_of(sizes):
    return torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def drawn(sizes, dtype=BF16, seed=0):
    """x, weight, dy: experts' weights and rows have sizes of their own, which scales of others would lose or saturate."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(sum(sizes), K, generator=generator), torch.randn(sum(sizes), N, generator=generator)
    weight = torch.randn(len(sizes), N, K, generator=generator) / 8
    weight *= (64.0 ** torch.randn(len(sizes), generator=generator))[:, None, None]
    x, dy = (t * (16.0 ** torch.randn(len(t), 1, generator=generator)) for t in (x, dy))
    return [t.to(DEVICE, dtype).requires_grad_(t is not dy) for t in (x, weight, dy)]


def rounded(x, dim=-1):
    """x in eight bits at the scales of its rows or columns, in fp64."""
    scale = scale_for(finite_amax(x, dim), E4M3)
    return quantise(x, scale, E4M3).double() / scale.double()


def by_expert(a, b, sizes):
    """a @ b[e] for each expert's rows, in their type."""
    return torch.cat([part @ each for part, each in zip(a.split(sizes), b, strict=True)])


def results(x, weight, dy, sizes, precision="fp8", module=linear_grouped):
    y = module.grouped_linear(x, weight, ends_of(sizes), precision)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


def within_budget(sizes, dtype=FP32, module=linear_grouped):
    """Whether y and dx are as near as fp32 arithmetic, and dweight as a product in its type, to fp64 on the same codes."""
    x, weight, dy = drawn(sizes, dtype)
    y, dx, dweight = results(x, weight, dy, sizes, module=module)
    forward = rounded(x), rounded(weight).mT
    backward = rounded(dy), rounded(weight, 1)
    near = []
    for found, (a, b) in ((y, forward), (dx, backward)):
        exact, plain = by_expert(a, b, sizes), by_expert(a.float(), b.float(), sizes).to(dtype)
        near.append(relative(found, exact) <= 1.25 * relative(plain, exact) + 1e-6)
    wide = [part.mT @ rows for part, rows in zip(dy.double().split(sizes), x.detach().double().split(sizes), strict=True)]
    exact = torch.stack(wide)
    near.append(relative(dweight, exact) <= 1.25 * relative(exact.float().to(dtype), exact) + 1e-6)
    return all(near)


# ---- numbers ----


@backends
@sizes
@pytest.mark.parametrize("dtype", (BF16, FP32) if DEVICE.type == "cpu" else (BF16,), ids=str)
def test_products_are_those_of_the_rounded_operands(sizes, dtype, backend):
    assert within_budget(sizes, dtype)


@backends
@sizes
def test_results_are_near_fp64(sizes, backend):
    x, weight, dy = drawn(sizes)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = results(*wide, dy.double(), sizes, None)
    for found, value, bar in zip(results(x, weight, dy, sizes), exact, (OUTPUT, GRADIENT["e4m3"], 40), strict=True):
        assert decibels(found, value) >= bar


@pytest.mark.parametrize("precision", ROW, ids=str)
def test_every_recipe_has_scales_by_row(precision):
    given = *drawn(SIZES[0]), SIZES[0]
    assert all(one.equal(other) for one, other in zip(results(*given), results(*given, precision), strict=True))


def chain(activation, precision, x, up, down, token_weight, ends, **options):
    h = linear_grouped.grouped_linear(x, up, ends, precision)
    return activation_grouped.activation_grouped_linear(
        h, down, ends, activation, token_weight=token_weight, precision=precision, **options
    )


def experts(sizes, activation="swiglu", dtype=BF16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parts, E = 2 if activation == "swiglu" else 1, len(sizes)
    shapes = (sum(sizes), K), (E, parts * 48, K), (E, K, 48), (sum(sizes),), (sum(sizes), K)
    x, up, down, token_weight, dy = (torch.randn(*shape, generator=generator) for shape in shapes)
    given = x, up / 8, down / 7, token_weight.sigmoid().float()
    tensors = [t.to(DEVICE, dtype if t.dim() > 1 else FP32).requires_grad_() for t in given]
    return tensors, dy.to(DEVICE, dtype)


OPTIONS = {"swiglu": {"clamp": 4.0, "linear_offset": 1.0}, "gelu": {"save": "offload"}, "squared_relu": {"save": "fp8"}}
activations = pytest.mark.parametrize("activation", ("swiglu", "gelu", "squared_relu"))


@backends
@activations
def test_an_experts_mlp_is_near_fp64(activation, backend):
    """Of one op 25 and 18 decibels, of a block of two products 20 and 16."""
    sizes = SIZES[0]
    for options in ({}, OPTIONS[activation]):
        tensors, dy = experts(sizes, activation)
        exact_options = {name: value for name, value in options.items() if name != "save"}
        with onepass.use_backend(backend):
            y = chain(activation, "fp8", *tensors, ends_of(sizes), **options)
            found = [y.detach(), *torch.autograd.grad(y, tensors, dy)]
        wide = [t.detach().double().requires_grad_() for t in tensors]
        y = chain(activation, None, *wide, ends_of(sizes), **exact_options)
        exact = [y.detach(), *torch.autograd.grad(y, wide, dy.double())]
        least = [OUTPUT - 5] + [GRADIENT["hybrid"] - 2] * 4
        far = [round(decibels(one, other), 1) for one, other in zip(found, exact, strict=True)]
        assert all(each >= bar for each, bar in zip(far, least, strict=True)), far
        assert [t.dtype for t in found] == [BF16, BF16, BF16, BF16, FP32]


@backends
@activations
def test_the_activation_goes_to_codes_without_16_bits(activation, backend):
    """y is that of the fp32 activation, rounded once; dx and the weight's gradient are those of the activation's own backward."""
    sizes, dtype = SIZES[0], BF16 if DEVICE.type == "cuda" else FP32
    tensors, dy = experts(sizes, activation, dtype, seed=1)
    _, up, down, token_weight = tensors
    x = torch.randn(sum(sizes), up.shape[1], generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype).requires_grad_()
    with onepass.use_backend(backend):
        y = activation_grouped.activation_grouped_linear(
            x, down, ends_of(sizes), activation, token_weight=token_weight, precision="fp8"
        )
        dx, dweight = torch.autograd.grad(y, (x, down), dy)
    leaf = x.detach().double().requires_grad_()
    activated = activation_formula(leaf, None, token_weight.detach().double(), ActivationOptions(activation, None, None))
    exact = by_expert(rounded(activated.detach().float()), rounded(down).mT, sizes)
    assert decibels(y.detach(), exact) > 40  # a code in some thousands is the next one
    through = by_expert(rounded(dy), rounded(down, 1), sizes)
    assert decibels(dx, torch.autograd.grad(activated, leaf, through.double())[0]) > 40
    pairs = zip(dy.double().split(sizes), activated.detach().split(sizes), strict=True)
    assert decibels(dweight, torch.stack([part.mT @ rows for part, rows in pairs])) > 40


@backends
@pytest.mark.parametrize("bad", (math.nan, math.inf), ids=str)
def test_nan_and_infinities_never_become_numbers(bad, backend):
    for place in range(3):
        given = drawn(SIZES[0])
        with torch.no_grad():
            given[place].flatten()[5] = bad
        for found, exact in zip(results(*given, SIZES[0]), results(*given, SIZES[0], None), strict=True):
            assert (~found.isfinite() | exact.isfinite()).all(), place


# ---- which calls ----


def test_sizes_that_do_not_fit_keep_their_type_and_the_log_says_so(caplog):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 40, generator=generator).to(DEVICE, BF16)
    weight, ends = torch.randn(2, 32, 40, generator=generator).to(DEVICE, BF16), ends_of((4, 5))
    grouped._say.cache_clear()
    with caplog.at_level(logging.INFO, "onepass"):
        for _ in range(2):
            y = linear_grouped.grouped_linear(x, weight, ends, "fp8")
    assert y.equal(linear_grouped.grouped_linear(x, weight, ends))
    said = "and not in eight bits: the experts' sizes, 32 x 40, are not multiples of 16"
    assert len(caplog.messages) == 1 and caplog.messages[0].endswith(said)
    assert not hasattr(weight, "fp8")


def test_what_pytorch_has_no_product_for_says_so(monkeypatch):
    unfit, cuda = grouped_product.unfit_for_scaled_groups, torch.device("cuda", 0)

    class Gpu:
        major, minor = 9, 0

    monkeypatch.setattr(grouped_product, "compute_capability", lambda device: (Gpu.major, Gpu.minor))
    if hasattr(F, "scaled_grouped_mm"):
        assert unfit((8, N, K), BF16, cuda) is None
        monkeypatch.setattr(grouped_product, "_SCALED_LEAST", K + 1)
        assert f"is slower than in bf16 where a size is below {K + 1}: {N} x {K}" in unfit((8, N, K), BF16, cuda)
        monkeypatch.setattr(grouped_product, "_SCALED_LEAST", 16)
        assert "fewer than 1024 experts, but there are 1024" in unfit((1024, N, K), BF16, cuda)
        assert "returns bf16, but the product's type is torch.float16" in unfit((8, N, K), torch.float16, cuda)
        Gpu.major = 10  # PyTorch lets it call a kernel that it has not
        assert "needs compute capability 9.0, but the GPU has 10.0" in unfit((8, N, K), BF16, cuda)
        monkeypatch.delattr(F, "scaled_grouped_mm")
    assert unfit((8, N, K), BF16, cuda) == f"PyTorch {torch.__version__} has no grouped product in eight bits"
    assert unfit((8, N, K), BF16, torch.device("cpu")) is None


def test_bad_input():
    x, weight, _ = drawn((3, 4))
    with pytest.raises(ValueError, match="precision must be None, 'fp8' or an FP8Recipe, but is 'fp4'"):
        linear_grouped.grouped_linear(x, weight, ends_of((3, 4)), "fp4")
    with pytest.raises(TypeError, match="x must be fp32, bf16 or fp16 with precision='fp8', but is fp64"):
        linear_grouped.grouped_linear(x.double(), weight.double(), ends_of((3, 4)), "fp8")
    with pytest.raises(RuntimeError, match="precision must be None under vmap and functional derivatives"):
        torch.func.grad(lambda x: linear_grouped.grouped_linear(x, weight, ends_of((3, 4)), "fp8").sum())(x)
    y = linear_grouped.grouped_linear(x, weight, ends_of((3, 4)), "fp8")
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_no_rows():
    for function in (linear_grouped.grouped_linear, activation_grouped.activation_grouped_linear):
        x, weight, ends = drawn((0, 0))[0], drawn((0, 0))[1], ends_of((0, 0))
        y = function(x, weight, ends, *(("gelu",) if function is not linear_grouped.grouped_linear else ()), precision="fp8")
        y.sum().backward()
        assert y.shape == (0, N) and x.grad.shape == (0, K) and not weight.grad.any()


# ---- updates ----


def test_an_update_is_seen_and_one_before_backward_raises():
    x, weight, dy = drawn(SIZES[0])
    results(x, weight, dy, SIZES[0])
    with torch.no_grad():
        weight.mul_(2)
    again = [t.detach().clone().requires_grad_(t.requires_grad) for t in (x, weight)]
    for one, other in zip(results(x, weight, dy, SIZES[0]), results(*again, dy, SIZES[0]), strict=True):
        assert one.equal(other)
    y = linear_grouped.grouped_linear(x, weight, ends_of(SIZES[0]), "fp8")
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_another_models_step_between_forward_and_backward_changes_nothing():
    x, weight, dy = drawn(SIZES[0])
    expected = results(x, weight, dy, SIZES[0])
    y = linear_grouped.grouped_linear(x, weight, ends_of(SIZES[0]), "fp8")
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([other]).step()
    assert all(one.equal(wanted) for one, wanted in zip(torch.autograd.grad(y, (x, weight), dy), expected[1:], strict=True))


# ---- where gradients go ----


@pytest.mark.parametrize("main_grad", (FP32, BF16), ids=str)
def test_main_grad_gets_what_autograd_would(main_grad):
    tensors, dy = experts(SIZES[0])
    weights = [torch.nn.Parameter(t.detach()) for t in tensors[1:3]]
    expected = torch.autograd.grad(chain("swiglu", "fp8", *tensors, ends_of(SIZES[0])), tensors[1:3], dy)
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape, dtype=main_grad, device=DEVICE)
    for _ in range(2):
        chain("swiglu", "fp8", tensors[0], *weights, tensors[3], ends_of(SIZES[0])).backward(dy)
    for weight, grad in zip(weights, expected, strict=True):
        assert weight.grad is None and decibels(weight.main_grad, 2 * grad) > 40


def test_what_is_frozen_costs_nothing_and_changes_nothing():
    tensors, dy = experts(SIZES[0])
    expected = torch.autograd.grad(chain("swiglu", "fp8", *tensors, ends_of(SIZES[0])), tensors, dy)
    for frozen in range(4):
        given = [t.detach().requires_grad_(i != frozen) for i, t in enumerate(tensors)]
        y = chain("swiglu", "fp8", *given, ends_of(SIZES[0]))
        found = torch.autograd.grad(y, [t for t in given if t.requires_grad], dy)
        wanted = [grad for i, grad in enumerate(expected) if i != frozen]
        assert all(one.equal(other) for one, other in zip(found, wanted, strict=True))


@backends
def test_bits_are_equal_again_and_under_checkpointing(backend):
    found = []
    for reentrant in (None, None, False, True):
        tensors, dy = experts(SIZES[0])
        with onepass.use_backend(backend):
            given = "swiglu", "fp8", *tensors, ends_of(SIZES[0])
            run = chain if reentrant is None else partial(torch.utils.checkpoint.checkpoint, chain, use_reentrant=reentrant)
            y = run(*given)
            y.backward(dy)
        found.append([y.detach(), *(t.grad for t in tensors)])
    for other in found[1:]:
        assert all(one.equal(value) for one, value in zip(found[0], other, strict=True))


def test_autocast_and_masters():
    """fp32 weights go to codes directly."""
    tensors, dy = experts(SIZES[0], dtype=FP32)
    with torch.autocast(DEVICE.type, BF16):
        y = chain("swiglu", "fp8", *tensors, ends_of(SIZES[0]))
    found = torch.autograd.grad(y, tensors, dy.to(BF16))
    assert y.dtype is BF16 and [t.dtype for t in found] == [FP32] * 4
    narrow = [t.detach().to(BF16 if t.dim() > 1 else FP32).requires_grad_() for t in tensors]
    expected = chain("swiglu", "fp8", *narrow, ends_of(SIZES[0]))
    assert decibels(y.detach(), expected.detach()) > 20


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler of PyTorch 2.9 reads it after a graph break
@pytest.mark.parametrize("elsewhere", (False, True), ids=("", "beside a model whose gradients are released"))
@pytest.mark.parametrize("main_grad", (False, True))
def test_compiled_as_one_graph(main_grad, elsewhere):
    torch._dynamo.reset()
    released = MainGrads(torch.nn.Linear(8, 8, device=DEVICE), release=True) if elsewhere else None

    def steps(call):
        tensors, dy = experts(SIZES[0])
        weights, found = [torch.nn.Parameter(t.detach()) for t in tensors[1:3]], []
        for weight in weights if main_grad else ():
            weight.main_grad = torch.zeros(weight.shape, device=DEVICE)
        for _ in range(3):
            x, token_weight = (t.detach().requires_grad_() for t in (tensors[0], tensors[3]))
            y = call("swiglu", "fp8", x, *weights, token_weight, ends_of(SIZES[0]))
            y.backward(dy)
            found += [y.detach(), x.grad, token_weight.grad]
            found += [(w.main_grad if main_grad else w.grad).clone() for w in weights]
            with torch.no_grad():
                for weight in weights:
                    weight.mul_(1.25)
        return found

    whole = TORCH >= (2, 10)  # before, the compiler can't take rows between numbers that it doesn't know
    if not whole:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"from PyTorch 2\.10 on"):
            steps(torch.compile(chain, fullgraph=True, backend="aot_eager"))
    compiled = torch.compile(chain, fullgraph=whole, backend="aot_eager")
    for one, other in zip(steps(compiled), steps(chain), strict=True):
        assert decibels(one, other) > 35  # the compiled activation is the formula's
    del released


# ---- mutants ----

MUTANTS = {
    "scale of the wrong expert": (grouped_product, "scaled_grouped_product", "* inverses[group]", "* inverses[group - 1]"),
    "codes of the wrong expert": (grouped_product, "scaled_grouped_product", "(b[group]", "(b[group - 1]"),
    "offsets off by one": (grouped_product, "group_rows", "yield slice(start, end)", "yield slice(start, max(end - 1, start))"),
    "an expert begins where the one before began": (grouped_product, "group_rows", "start = end", "start = start"),
    "a row's scale forgotten": (grouped_product, "scaled_grouped_product", " * a_inverse.view(-1, 1)", ""),
    "x's scales transposed around": (grouped_product, "scaled_grouped_product", "view(-1, 1)", "view(-1, 1).flip(0)"),
    "rows' scales for columns": (grouped, "_input_gradient", "cast_columns(weight.detach())", "cast_rows(weight.detach(), E4M3)"),
    "dy in e5m2": (grouped, "_input_gradient", "cast_rows(dy, E4M3)", "cast_rows(dy, torch.float8_e5m2)"),
    "the rows before": (grouped, "grouped_weight_gradient", "dy[rows], x[rows]", "dy[rows], x.roll(1, 0)[rows]"),
}  # fmt: skip


def is_right(module):
    return all(within_budget(each, module=module) for each in SIZES)


def on_a_cpu(test):
    skip = pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU's product is PyTorch's")
    return pytest.mark.usefixtures("fp8_by_formula")(skip(test))


test_a_mutant_is_found, test_what_is_right_passes = map(on_a_cpu, mutants_of(linear_grouped, MUTANTS, is_right))
