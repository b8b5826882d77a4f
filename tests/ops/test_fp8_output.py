"""`out=` of norms and bias_activation: results as codes with their scales, for whoever multiplies them."""

from importlib import import_module

import pytest
import torch
from ops.calls import Operators, backends, needs_triton

import onepass
from onepass import FP8Target, FP8Tensor
from onepass.kernels.cublaslt import scaled_product
from onepass.ops.activation import fp8 as activation_fp8
from onepass.ops.activation.bias_activation import bias_activation_reference
from onepass.ops.norm import fp8 as norm_fp8
from onepass.ops.norm.norm import layer_norm_reference, rms_norm_reference
from onepass.runtime.fp8 import E4M3, E5M2, dequantise, quantise, scale_for
from onepass.runtime.op import OPS
from onepass.testing.mutants import copy_package, mutate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
dtypes = pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
OPTIONS = {
    "rms_norm": [{}, {"weight": True}, {"weight": True, "zero_centered_gamma": True}, {"weight": True, "residual": True}],
    "layer_norm": [{}, {"weight": True, "bias": True}, {"weight": True, "bias": True, "residual": True}],
    "bias_activation": [
        {"activation": "gelu", "bias": True},
        {"activation": "squared_relu", "token_weight": True},
        {"activation": "swiglu", "bias": True, "token_weight": True, "clamp": 1.5, "linear_offset": 1.0},
    ],
}
CALLS = [(name, options) for name, each in OPTIONS.items() for options in each]
calls = pytest.mark.parametrize(("name", "options"), CALLS, ids=[" ".join(map(str, (name, *options))) for name, options in CALLS])
REFERENCES = {"rms_norm": rms_norm_reference, "layer_norm": layer_norm_reference, "bias_activation": bias_activation_reference}


def drawn(options, dtype=BF16, lead=(3, 7), width=80):
    """Return x and all keywords of a call."""
    shapes = {"weight": (width,), "bias": (width,), "residual": (*lead, width), "token_weight": lead}
    given = {name: torch.randn(shapes[name], device=DEVICE).to(dtype) if value is True and name in shapes else value
             for name, value in options.items()}  # fmt: skip
    return torch.randn(*lead, width, device=DEVICE).to(dtype), given


def formula(name, x, given, kind=FP32):
    """Return y, computed in a wide type, and h."""
    wide = {option: t.to(kind) if isinstance(t, torch.Tensor) else t for option, t in given.items()}
    h = None
    if "residual" in given:
        h = (x.float() + wide.pop("residual").float()).to(x.dtype)
        x = h
    return REFERENCES[name](x.to(kind), **wide).float(), h


def steps(codes):
    """Return codes as whole numbers in the order of their values."""
    whole = codes.view(torch.uint8).int()
    return torch.where(whole >= 0x80, 0x80 - whole, whole)


def few_differ(codes, exact):
    """Whether codes are equal, but for a few that are neighbours: sums in fp32 differ in their last bits."""
    away = (steps(codes) - steps(exact)).abs()
    return away.max() <= 1 and away.count_nonzero() <= 0.004 * away.numel() + 1


def judge(function, name, options, dtype=BF16, target=None, backend=None, **how):
    """Whether codes are those of the fp32 formula, at a scale a row or at the target's."""
    x, given = drawn(options, dtype, **how)
    found = function(x, **given, out=target or "fp8", backend=backend)
    y, h = found if h_is_returned(given) else (found, None)
    # PyTorch's gelu in fp32 loses a tail that e5m2 can hold, and kernels keep
    exact, its = formula(name, x, given, torch.float64 if backend == "triton" else FP32)
    to = E4M3 if target is None else target.dtype
    assert type(y).__name__ == "FP8Tensor" and y.codes.dtype is to and y.inverse.dtype is FP32
    assert y.codes.shape == exact.shape and y.codes.is_contiguous()
    if target is None or target.scale is None:
        scale = scale_for(exact.abs().amax(-1, keepdim=True), to)
        assert y.inverse.shape == (*x.shape[:-1], 1)
    else:
        scale = target.scale
        assert y.inverse.shape == scale.shape
    return (
        y.inverse.equal(1 / scale)
        and few_differ(y.codes, quantise(exact, scale, to))
        and y.dequantise(BF16).equal(dequantise(y.codes, 1 / scale, BF16))
        and (h is None if its is None else h.equal(its))
    )


def h_is_returned(given):
    return "residual" in given


@backends
@dtypes
@calls
def test_codes_are_those_of_the_fp32_formula(name, options, dtype, backend):
    function = getattr(onepass, name)
    assert judge(function, name, options, dtype, backend=backend)
    assert judge(function, name, options, dtype, FP8Target(E5M2), backend=backend)
    for target in (FP8Target(scale=torch.tensor(16.0, device=DEVICE)), FP8Target(E5M2, torch.full((1,), 0.5, device=DEVICE))):
        assert judge(function, name, options, dtype, target, backend=backend)
    assert judge(function, name, options, dtype, lead=(1,), width=66, backend=backend)


@backends
@calls
def test_layouts_and_empty_inputs(name, options, backend):
    x, given = drawn(options)
    function = getattr(onepass, name)
    expected = function(x, **given, out="fp8", backend=backend)
    for lay in (lambda t: torch.stack([t, t], -1)[..., 0], lambda t: t.transpose(0, -1).contiguous().transpose(0, -1)):
        strided = {option: lay(t) if isinstance(t, torch.Tensor) else t for option, t in given.items()}
        found = function(lay(x), **strided, out="fp8", backend=backend)
        for a, b in zip(flat(found), flat(expected), strict=True):
            assert a.shape == b.shape and few_differ(a, b) if a.element_size() == 1 else torch.allclose(a, b)
    x, given = drawn(options, lead=(2, 0))
    y = flat(function(x, **given, out="fp8", backend=backend))
    assert y[0].shape[:2] == (2, 0) and y[0].dtype is E4M3 and y[1].shape == (2, 0, 1)


def flat(found):
    return torch.utils._pytree.tree_leaves(found)


@backends
@pytest.mark.parametrize(("counts", "before"), ((torch.int32, 0), (torch.int64, 2**31 - 1)))
def test_the_largest_magnitude_and_what_saturates_are_noted(counts, before, backend):
    x, given = drawn({"weight": True})
    amax, past = torch.zeros(64, dtype=torch.int32, device=DEVICE), torch.full((64,), before, dtype=counts, device=DEVICE)
    target = FP8Target(E4M3, torch.tensor(256.0, device=DEVICE), amax, past)
    y = onepass.rms_norm(x, **given, out=target, backend=backend)
    exact = formula("rms_norm", x, given)[0]
    torch.testing.assert_close(amax.view(FP32).max(), exact.abs().max())
    assert (past - before).sum() == (exact.abs() * 256 > 448).sum() > 0
    assert y.codes.float().abs().max() == 448


@backends
def test_codes_are_operands_of_a_product(backend):
    x, given = drawn({"weight": True}, lead=(32,))
    weight = torch.randn(48, 80, device=DEVICE, dtype=BF16)
    y = onepass.rms_norm(x, **given, out="fp8", backend=backend)
    w = onepass.rms_norm(weight, out="fp8", backend=backend)  # a matrix of codes like any other
    found = scaled_product(y.codes, y.inverse, w.codes, w.inverse, BF16)
    assert ((found.float() - y.dequantise() @ w.dequantise().t()).norm() / found.float().norm()) < 0.01
    plain = onepass.rms_norm(x, **given).float() @ onepass.rms_norm(weight).float().t()
    assert ((found - plain).norm() / plain.norm()) < 0.06


# ---- autograd, compilation, transforms ----


@calls
def test_what_asks_for_gradients_raises(name, options):
    x, given = drawn(options)
    function = getattr(onepass, name)
    tensors = {"x": x, **{option: t for option, t in given.items() if isinstance(t, torch.Tensor)}}
    for asking in tensors:
        some = {option: t.clone().requires_grad_(option == asking) for option, t in tensors.items()}
        with pytest.raises(RuntimeError, match="out must be None where inputs require grad: codes can't be differentiated"):
            function(**given | some, out="fp8")
        with torch.no_grad():
            assert (
                flat(function(**given | some, out="fp8"))[0]
                .view(torch.uint8)
                .equal(flat(function(x, **given, out="fp8"))[0].view(torch.uint8))
            )


@backends
@calls
def test_a_compiled_call_has_the_same_codes(name, options, backend):
    x, given = drawn(options)
    function = getattr(onepass, name)
    noted = torch.zeros(2, 64, dtype=torch.int32, device=DEVICE)
    targets = "fp8", FP8Target(E5M2), FP8Target(E4M3, torch.tensor(4.0, device=DEVICE), *noted)
    for out in targets[::2] if backend == "triton" else targets[1:]:
        expected = flat(function(x, **given, out=out, backend=backend))
        before = noted.clone()
        noted.zero_()

        def call(x, **given):
            found = function(x, **given, out=out, backend=backend)  # noqa: B023
            y = found[0] if "residual" in given else found
            return found, y.dequantise()

        torch._dynamo.reset()
        found, wide = torch.compile(call, fullgraph=True, backend="aot_eager")(x, **given)
        y = found[0] if "residual" in given else found
        assert isinstance(y, FP8Tensor) and wide.equal(y.dequantise())
        for a, b in zip(flat(found), expected, strict=True):
            assert a.equal(b) if a.element_size() > 1 else a.view(torch.uint8).equal(b.view(torch.uint8))
        assert noted.equal(before)
        noted.zero_()


@backends
@calls
def test_registered_ops_are_sound(name, options, backend):
    x, given = drawn(options)
    seen = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "onepass":
                seen.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorder():
        getattr(onepass, name)(x, **given, out="fp8", backend=backend)
    assert len(seen) == 1
    torch.library.opcheck(*seen[0], test_utils=("test_schema", "test_faketensor"))


def test_watchers_see_one_op():
    x, _ = drawn({})
    with Operators() as seen:
        onepass.rms_norm(x, out="fp8", backend="torch")
    assert [name for name in seen.names if "onepass" in name] == ["onepass.norm_codes.default"]


@calls
def test_transforms_raise(name, options):
    x, given = drawn({**options, "token_weight": None} if "token_weight" in options else options, lead=(4,))
    given.pop("residual", None)
    with pytest.raises(RuntimeError, match="out must be None under vmap and functional derivatives"):
        torch.func.vmap(lambda x: getattr(onepass, name)(x, **given, out="fp8")[0].float())(x)


# ---- errors, explain, other backends ----


@calls
def test_errors_name_what_was_wrong(name, options):
    x, given = drawn(options)
    scale, noted = torch.ones((), device=DEVICE), torch.zeros(64, dtype=torch.int32, device=DEVICE)
    wrong = {
        "out must be None, 'fp8' or an FP8Target, but is 'e4m3'": "e4m3",
        "out must be None, 'fp8' or an FP8Target, but is True": True,
        "out.dtype must be torch.float8_e4m3fn or torch.float8_e5m2, but is torch.bfloat16": FP8Target(BF16),
        "out.scale must be a tensor, torch.float32 of 1, but is a float": FP8Target(E4M3, 2.0),
        "out.scale must be a tensor, torch.float32 of 1, but is torch.float32 of 3": FP8Target(E4M3, scale.expand(3)),
        "out.amax and out.saturated must be given together": FP8Target(E4M3, scale, noted),
        "out.scale must be given with out.amax": FP8Target(E4M3, None, noted, noted),
        "out.amax must be a tensor, torch.int32 of 64, but is torch.int32 of 32": FP8Target(E4M3, scale, noted[:32], noted),
        "out.saturated must be a tensor, torch.int64 or torch.int32 of 64, but is torch.float32 of 1": FP8Target(
            E4M3, scale, noted, scale
        ),
        "out.saturated must be contiguous": FP8Target(E4M3, scale, noted, noted.repeat_interleave(2)[::2]),
        "out.scale must be on": FP8Target(E4M3, torch.ones((), device="meta")),
    }
    function = getattr(onepass, name)
    for message, out in wrong.items():
        for call in (function, lambda *args, **how: onepass.explain(function, *args, **how)):
            with pytest.raises((ValueError, TypeError)) as raised:
                call(x, **given, out=out)
            assert message in str(raised.value)
    with pytest.raises(TypeError, match="x must be fp32, bf16 or fp16 with out='fp8', but is fp64"):
        function(x.double(), **given, out="fp8")


def test_dropout_and_codes_exclude_each_other():
    x, _ = drawn({})
    for call in (onepass.bias_activation, lambda *args, **how: onepass.explain("bias_activation", *args, **how)):
        with pytest.raises(ValueError, match="dropout must be 0 with out='fp8'"):
            call(x, dropout=0.1, out="fp8")


@calls
@backends
def test_explain_says_what_is_written(name, options, backend):
    x, given = drawn(options)
    scale = torch.ones((), device=DEVICE)

    def said(**how):
        return onepass.explain(name, x, **given, **how, backend=backend).variant

    assert "codes" not in said()
    assert said(out="fp8").endswith("writes e4m3 codes, each row at a scale of its own; no backward")
    assert said(out=FP8Target(E5M2, scale)).endswith("writes e5m2 codes, at the given scale; no backward")


def test_a_registered_backend_gets_the_option():
    given, target = [], FP8Target(E5M2)
    for name in OPTIONS:
        onepass.register_backend(name, "noting", lambda x, *args, **options: given.append(options.get("out")))
        try:
            for out in (None, "fp8", target):
                getattr(onepass, name)(drawn({})[0], out=out, backend="noting")
        finally:
            del OPS[name].others["noting"]
    assert given == [None, "fp8", target] * len(OPTIONS)


def test_other_packages_norms_write_no_codes(monkeypatch):
    from onepass.integrations import norm_backends

    monkeypatch.setattr(norm_backends, "_on_gpu", lambda x: True)
    monkeypatch.setattr(norm_backends, "_installed", lambda module: True)
    reasons = onepass.explain(onepass.rms_norm, drawn({})[0], out="fp8").reasons
    for name in ("liger", "apex", "transformer_engine"):
        assert "out asks for codes" in reasons[name]


# ---- mutants ----

MUTANTS = {
    "the scale for its inverse": ("rms_norm", norm_fp8, "_output", "inverse = 1 / scale", "inverse = 1 * scale"),
    "h is x": ("rms_norm", norm_fp8, "norm_output", "else (y, h)", "else (y, x)"),
    "another type": ("layer_norm", norm_fp8, "_output", "FP8Target(dtype, scale", "FP8Target(E5M2, scale"),
    "an activation's scale for its inverse": ("bias_activation", activation_fp8, "_output", "1 / scale", "1 * scale"),
    "an activation without its bias": ("bias_activation", activation_fp8, "activation_output", "op(x, bias", "op(x, None"),
}  # fmt: skip


def passes(function, name, target_class, backend):
    try:
        return all(
            judge(function, name, options, target=target, backend=backend)
            for options in OPTIONS[name]
            for target in (None, target_class(E4M3, torch.tensor(16.0, device=DEVICE)))
        )
    except AssertionError:
        return False


@needs_triton
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant):
    name, module, *how = MUTANTS[mutant]
    entry = import_module(OPS[name].function.__module__)
    changed = mutate(module, *how, entry=entry)
    for backend in ("torch", "triton"):
        assert not passes(getattr(changed, name), name, changed.FP8Target, backend)


@needs_triton
@pytest.mark.parametrize("name", sorted({name for name, *_ in MUTANTS.values()}))
def test_a_copy_without_a_change_passes(name):
    copy = copy_package(import_module(OPS[name].function.__module__))
    for backend in ("torch", "triton"):
        assert passes(getattr(copy, name), name, copy.FP8Target, backend)
