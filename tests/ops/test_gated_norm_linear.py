"""gated_norm_linear has the bits of gated_rms_norm and the product after it, and keeps what their input is alone."""

import importlib
from functools import partial

import pytest
import torch
from ops.calls import backends, equal, gradients, needs_triton, says
from ops.fp8_calls import RECIPES, decibels
from ops.gated_norm_oracle import small_tiles
from ops.oracle import BF16, DEVICE, FP32

import onepass
from onepass.ops.norm import gated_rows
from onepass.ops.norm.gated_norm_linear import gated_norm_linear_reference
from onepass.parallel import DeferredWgrad
from onepass.testing.poison import bytes_kept, saved_tensors, unchanged

LINEAR = importlib.import_module("onepass.ops.norm.gated_norm_linear")  # the package has a function of this name
K, HEAD, N = 48, 16, 32
OPTIONS = {
    "rows": {},
    "heads": {"group_size": HEAD, "zero_centered_gamma": True},
    "groups": {"group_size": HEAD, "norm_before_gate": False},
    "a sigmoid": {"activation": "sigmoid", "norm_before_gate": False, "eps": 0.1},
}
options_of = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def tensors(*lead, dtype=FP32, shared=False, bias=True, weight_type=None):
    """x, z, norm_weight, weight and bias, which ask for a gradient."""
    rows = lead or (3, 5)
    sizes = (*rows, K), (*rows, K), (HEAD if shared else K,), (N, K), (N,)
    types = dtype, dtype, weight_type or dtype, dtype, dtype
    drawn = [torch.randn(*size, device=DEVICE).to(to) for size, to in zip(sizes, types, strict=True)]
    drawn[3] /= K**0.5
    return [t.requires_grad_() for t in drawn[: 4 + bias]]


def op(backend, library=onepass, **options):
    return lambda x, z, norm_weight, weight, bias=None: library.gated_norm_linear(
        x, z, norm_weight, weight, bias, backend=backend, **options
    )


def apart(backend, **options):
    """The two ops, one after the other."""

    def call(x, z, norm_weight, weight, bias=None):
        if norm_weight is not None and norm_weight.shape[0] != K:
            x, z = (t.unflatten(-1, (-1, norm_weight.shape[0])) for t in (x, z))
        rows = onepass.gated_rms_norm(x, z, norm_weight, backend=backend, **options).reshape(*x.shape[:-1], -1)
        return onepass.linear(rows.flatten(rows.dim() - 2) if rows.shape[-1] != K else rows, weight, bias)

    return call


def is_right(library, backend="triton", **given):
    """Whether results and gradients are those of the two ops, bit for bit."""
    for options in OPTIONS.values():
        for shared in (False, "group_size" in options):
            for path in ("", "rows"):
                inputs = tensors(37, shared=shared, **given)
                with small_tiles(library, path):
                    ours = gradients(op(backend, library, **options), inputs)
                with small_tiles(importlib.import_module("onepass.ops.norm.gated_norm"), path):
                    both = gradients(apart(backend, **options), inputs)
                if not equal(ours, both):
                    return False
    return True


@backends
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_bits_are_those_of_the_two_ops(dtype, backend):
    assert is_right(LINEAR, backend, dtype=dtype)


@needs_triton
def test_wide_rows_are_made_again_by_forwards_kernel(monkeypatch):
    monkeypatch.setattr(gated_rows, "WIDEST_REBUILT", HEAD - 1)
    assert is_right(LINEAR, dtype=BF16)


@backends
@options_of
def test_it_is_the_formula(options, backend):
    inputs = tensors(weight_type=FP32, shared="group_size" in options)
    exact = gradients(partial(gated_norm_linear_reference, **options), [t.detach().double().requires_grad_() for t in inputs])
    for ours, expected in zip(gradients(op(backend, **options), inputs), exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


@backends
def test_what_is_kept_is_its_input(backend):
    inputs = tensors(dtype=BF16)
    with saved_tensors() as kept:
        y = op(backend)(*inputs)
    assert bytes_kept(kept, y, *inputs) == 0
    with unchanged(x=inputs[0], z=inputs[1], norm_weight=inputs[2], weight=inputs[3]):
        y.square().sum().backward()


@needs_triton
def test_rows_are_rebuilt_over_their_gradient(monkeypatch):
    module = importlib.import_module("onepass.ops.norm.gated_norm")
    places, run = [], module.gated_backward

    def watched(dy, *args, **named):
        found = run(dy, *args, **named)
        places.append((dy.data_ptr(), found[-1].data_ptr()))
        return found

    monkeypatch.setattr(module, "gated_backward", watched)
    op("triton", group_size=HEAD)(*tensors(dtype=BF16)).sum().backward()
    ((gradient, rows),) = places
    assert gradient == rows


# ---- eight bits, and graphs ----


@needs_triton
@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_in_eight_bits(recipe, backend):
    inputs = tensors(64, dtype=BF16, shared=True)
    formula = partial(gated_norm_linear_reference, group_size=HEAD)
    exact = gradients(formula, [t.detach().double().requires_grad_() for t in inputs])
    found = gradients(op(backend, precision=recipe, group_size=HEAD), inputs)
    plain = gradients(op(backend, group_size=HEAD), inputs)
    assert not torch.equal(found[0], plain[0])
    for ours, expected in zip(found, exact, strict=True):
        assert decibels(ours, expected) > 18


@needs_triton
@pytest.mark.parametrize("precision", (None, "fp8"))
@pytest.mark.parametrize("backend", ("torch", "triton"))
def test_compiled(backend, precision, monkeypatch):
    """As one graph, by the formula or by kernels."""
    torch._dynamo.reset()
    if backend == "triton":
        monkeypatch.setattr("onepass.runtime.backend.choose", lambda *_: "triton")
    inputs = tensors(64, dtype=BF16, shared=True)
    call = op(backend, group_size=HEAD, precision=precision)
    expected = gradients(call, inputs)
    found = gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), inputs)
    assert all(decibels(ours, theirs) > 28 for ours, theirs in zip(found, expected, strict=True))


# ---- what is said ----


@needs_triton
def test_explain_names_the_kernels():
    x, z, norm_weight, weight = tensors(4, 8, dtype=BF16, bias=False, shared=True)
    explain = partial(onepass.explain, "gated_norm_linear", backend="triton")
    said = explain(x, z, norm_weight, weight, group_size=HEAD).variant
    assert "forward with 128 rows a program" in said and "products by PyTorch; the gated rows are rebuilt in backward" in said
    assert "products in eight bits" in explain(x, z, norm_weight, weight, group_size=HEAD, precision="fp8").variant
    assert "nothing to do" in explain(x[:0], z[:0], None, weight).variant


_X, _W = torch.ones(2, 6), torch.ones(4, 6)


@pytest.mark.parametrize(
    ("raised", "words", "norm_weight", "weight", "options"),
    [
        (ValueError, ("norm_weight", "[K] = [6]", "is [3]", "give group_size=3"), torch.ones(3), _W, {}),
        (ValueError, ("norm_weight", "(6,)", "(4,)"), torch.ones(4), _W, {}),
        (ValueError, ("norm_weight", "(6,)", "(2,)"), torch.ones(2), _W, {"group_size": 3}),
        (ValueError, ("zero_centered_gamma", "no norm_weight"), None, _W, {"zero_centered_gamma": True}),
        (ValueError, ("weight", "6", "5"), None, _W[:, :5], {}),
        (ValueError, ("activation", "silu, sigmoid", "'gelu'"), None, _W, {"activation": "gelu"}),
        (ValueError, ("group_size", "divide", "6", "4"), None, _W, {"group_size": 4}),
        (ValueError, ("z", "x's shape (2, 6)", "(2, 5)"), None, _W, {"z": _X[:, :5]}),
        (ValueError, ("eps", "above 0", "0.0"), None, _W, {"eps": 0.0}),
        (ValueError, ("deferred", "main_grad"), None, torch.nn.Parameter(_W), {"deferred": DeferredWgrad()}),
        (ValueError, ("backend", "auto", "nonsense"), None, _W, {"backend": "nonsense"}),
    ],
)
def test_what_is_wrong_is_said(raised, words, norm_weight, weight, options):
    with pytest.raises(raised) as caught:
        onepass.gated_norm_linear(_X, options.pop("z", _X), norm_weight, weight, **options)
    says(words, caught)


# ---- over ranks ----


def test_ranks_have_heads(group):
    """Each of two ranks has a head and the columns of the weight that take it, and y is summed."""
    torch.manual_seed(0)
    x, z, norm_weight, weight, bias = tensors(4, 2, shared=True)

    def columns(heads):
        divided = [t.detach()[..., heads].clone().requires_grad_() for t in (x, z, weight)]
        return [*divided[:2], norm_weight, divided[2], bias]

    whole = gradients(op("torch", group_size=HEAD), columns(slice(0, 2 * HEAD)))
    mine = slice(HEAD * group.rank(), HEAD * (group.rank() + 1))
    own = columns(mine)
    y, dx, dz, dnorm, dweight, dbias = gradients(op("torch", group_size=HEAD, tp_group=group), own)
    torch.distributed.all_reduce(dnorm, group=group)
    for ours, expected in zip((y, dx, dz, dnorm, dweight, dbias), whole, strict=True):
        if ours.shape != expected.shape:
            expected = expected[..., mine]
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="group_size must be given with a tp_group"):
        onepass.gated_norm_linear(*own, tp_group=group)
