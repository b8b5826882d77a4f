"""The adapters of other packages' norms: what they are given, what they refuse, and that nothing of theirs is loaded unasked.

The packages are stand-ins that compute in plain PyTorch and note what they were given; on a CPU these adapters see a GPU.
"""

import importlib.util
import subprocess
import sys
import time
import types
from importlib.machinery import ModuleSpec

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import onepass
from onepass.integrations import norm_backends
from onepass.ops.norm.norm import layer_norm_reference, rms_norm_reference
from onepass.runtime import op as op_records

NAMES = [package.name for package in norm_backends.PACKAGES]
PACKAGES = {package.name: package for package in norm_backends.PACKAGES}
OPS = ["rms_norm", "layer_norm"]
H = 8


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Registered for a test, and afterwards as before."""
    for op in OPS:
        monkeypatch.setattr(op_records.OPS[op], "others", dict(op_records.OPS[op].others))
    norm_backends.register()


@pytest.fixture
def given(monkeypatch):
    """All the packages' stand-ins; what they are given is noted here, with the function's name before it."""
    calls = []
    monkeypatch.setattr(norm_backends, "_on_gpu", lambda x: True)

    def package(name, **functions):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)

    def noted(function):
        def call(*args):
            calls.append((function.__name__, *args))
            return function(*args)

        return call

    def applied(function):
        return types.SimpleNamespace(apply=noted(function))

    package("liger_kernel")
    package("liger_kernel.ops")
    package("liger_kernel.ops.rms_norm", LigerRMSNormFunction=applied(LigerRMSNorm))
    package("liger_kernel.ops.layer_norm", LigerLayerNormFunction=applied(LigerLayerNorm))
    package("liger_kernel.ops.fused_add_rms_norm", LigerFusedAddRMSNormFunction=applied(LigerFusedAddRMSNorm))
    functions = (fused_layer_norm_affine, fused_layer_norm, fused_rms_norm_affine, fused_rms_norm)
    package("apex")
    package("apex.normalization")
    package("apex.normalization.fused_layer_norm", **{function.__name__: noted(function) for function in functions})
    package("fused_layer_norm_cuda")
    functions = (rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd)
    package("transformer_engine")
    package("transformer_engine.pytorch")
    package("transformer_engine.pytorch.constants", TE_DType={torch.float32: "kFloat32", torch.bfloat16: "kBFloat16"})
    package("transformer_engine_torch", **{function.__name__: noted(function) for function in functions})
    return calls


# ---- the stand-ins, with the packages' own signatures ----


def LigerRMSNorm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
    return rms_norm_reference(X, None if W is None else W + offset, eps=eps)


def LigerLayerNorm(X, W, B, eps):
    return layer_norm_reference(X, W, B, eps=eps)


def LigerFusedAddRMSNorm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
    return rms_norm_reference(X, W + offset, R, eps=eps)


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    assert not torch.is_autocast_enabled("cuda")
    return layer_norm_reference(input, weight, bias, eps=eps)


def fused_layer_norm(input, normalized_shape, eps=1e-6, memory_efficient=False):
    return layer_norm_reference(input, eps=eps)


def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    assert not torch.is_autocast_enabled("cuda")
    return rms_norm_reference(input, weight, eps=eps)


def fused_rms_norm(input, normalized_shape, eps=1e-6, memory_efficient=False):
    return rms_norm_reference(input, eps=eps)


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    rstd = torch.rsqrt(input.float().square().mean(-1) + eps)
    return rms_norm_reference(input, weight, eps=eps, zero_centered_gamma=zero_centered_gamma), None, rstd


def layernorm_fwd(input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    wide = input.float()
    mean, rstd = wide.mean(-1), torch.rsqrt(wide.var(-1, correction=0) + eps)
    return layer_norm_reference(input, weight, bias, eps=eps, zero_centered_gamma=zero_centered_gamma), mean, rstd


def _backward(dz, normalised, rsigma, gamma, centered, layer):
    g = dz * (gamma + 1 if centered else gamma)
    dx = g - normalised * (g * normalised).mean(-1, keepdim=True)
    dx = dx - g.mean(-1, keepdim=True) if layer else dx
    return [dx * rsigma[:, None], (dz * normalised).sum(0)]


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    return _backward(dz, x * rsigma[:, None], rsigma, gamma, zero_centered_gamma, False)


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    return [*_backward(dz, (x - mu[:, None]) * rsigma[:, None], rsigma, gamma, zero_centered_gamma, True), dz.sum(0)]


# ---- the calls ----

x = torch.randn(3, 2, H, generator=torch.Generator().manual_seed(1))
residual = torch.randn(3, 2, H, generator=torch.Generator().manual_seed(2))
weight = torch.randn(H, generator=torch.Generator().manual_seed(3))
bias = torch.randn(H, generator=torch.Generator().manual_seed(4))


def test_liger_is_asked_for_fp32_and_to_leave_gradients_alone(given):
    onepass.rms_norm(x, weight, 1e-3, backend="liger")
    onepass.rms_norm(x, weight, zero_centered_gamma=True, backend="liger")
    onepass.rms_norm(x, backend="liger")
    onepass.rms_norm(x, weight, residual=residual, backend="liger")
    onepass.layer_norm(x, weight, bias, 1e-3, backend="liger")
    assert given == [
        ("LigerRMSNorm", x, weight, 1e-3, 0.0, "gemma", False),
        ("LigerRMSNorm", x, weight, 1e-6, 1.0, "gemma", False),
        ("LigerRMSNorm", x, None, 1e-6, 0.0, "gemma", False),
        ("LigerFusedAddRMSNorm", x, residual, weight, 1e-6, 0.0, "gemma", False),
        ("LigerLayerNorm", x, weight, bias, 1e-3),
    ]


def test_apex_gets_the_last_dimension_and_no_autocast(given):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.set_autocast_enabled("cuda", True)
        onepass.rms_norm(x, weight, 1e-3, backend="apex")
        onepass.layer_norm(x, weight, bias, 1e-3, backend="apex")
        assert torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", False)
    onepass.rms_norm(x, backend="apex")
    onepass.layer_norm(x, backend="apex")
    assert given == [
        ("fused_rms_norm_affine", x, weight, (H,), 1e-3),
        ("fused_layer_norm_affine", x, weight, bias, (H,), 1e-3),
        ("fused_rms_norm", x, (H,), 1e-6),
        ("fused_layer_norm", x, (H,), 1e-5),
    ]


@pytest.mark.parametrize("centered", [False, True])
def test_transformer_engine_gets_two_dimensions_and_every_multiprocessor(given, centered):
    strided = x.transpose(0, 1)
    y = onepass.rms_norm(strided, weight, 1e-3, zero_centered_gamma=centered, backend="transformer_engine")
    z = onepass.layer_norm(strided, weight, bias, 1e-3, zero_centered_gamma=centered, backend="transformer_engine")
    assert y.shape == z.shape == strided.shape
    (first, rows, *rest), (second, rows_too, *rest_too) = given
    assert (first, second) == ("rmsnorm_fwd", "layernorm_fwd")
    assert all(t.is_contiguous() and torch.equal(t, strided.reshape(-1, H)) for t in (rows, rows_too))
    end = [1e-3, None, None, "kFloat32", 0, centered]
    assert rest[1:] == end and rest_too[2:] == end
    assert torch.equal(rest[0], weight) and torch.equal(rest_too[1], bias)


CALLS = {
    "liger": [
        ("rms_norm", (), {}),
        ("rms_norm", ("weight",), {"zero_centered_gamma": True}),
        ("rms_norm", ("weight", "residual"), {}),
        ("layer_norm", ("weight", "bias"), {}),
    ],
    "apex": [("rms_norm", ("weight",), {}), ("rms_norm", (), {}), ("layer_norm", ("weight", "bias"), {}), ("layer_norm", (), {})],
    "transformer_engine": [
        ("rms_norm", ("weight",), {}),
        ("rms_norm", ("weight",), {"zero_centered_gamma": True}),
        ("layer_norm", ("weight", "bias"), {}),
        ("layer_norm", ("weight", "bias"), {"zero_centered_gamma": True}),
    ],
}


@pytest.mark.parametrize(("name", "call"), [(name, call) for name, calls in CALLS.items() for call in calls])
def test_the_values_and_gradients_are_the_formulas(given, name, call):
    op, tensors, options = call
    found = []
    for chosen in (name, "torch"):
        leaves = {key: value.clone().requires_grad_() for key, value in {"x": x, **named(tensors)}.items()}
        y = getattr(onepass, op)(**leaves, **options, eps=1e-3, backend=chosen)
        y = y if isinstance(y, tuple) else (y,)
        dy = [torch.randn(t.shape, generator=torch.Generator().manual_seed(5)) for t in y]
        found.append((y, torch.autograd.grad(y, list(leaves.values()), dy)))
    torch.testing.assert_close(found[0], found[1])
    assert given


def named(tensors):
    return {name: globals()[name] for name in tensors}


def test_transformer_engine_says_that_it_differentiates_once(given):
    leaf = x.clone().requires_grad_()
    y = onepass.rms_norm(leaf, weight, backend="transformer_engine")
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(y.square().sum(), leaf, create_graph=True)


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_frozen_inputs_get_nothing(given, frozen):
    leaves = {"x": x.clone(), "weight": weight.clone(), "bias": bias.clone()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    onepass.layer_norm(**leaves, backend="transformer_engine").sum().backward()
    assert [name for name, leaf in leaves.items() if leaf.grad is None] == [frozen]


# ---- what is refused ----

REFUSALS = [
    ("all", "rms_norm", {"x": x.double(), "weight": weight}, "x is torch.float64"),
    ("all", "rms_norm", {"x": x[:0], "weight": weight}, "x has no rows"),
    ("all", "rms_norm", {"weight": weight, "memory_efficient": True}, "memory_efficient keeps no statistics"),
    ("all", "layer_norm", {"weight": weight, "bias": bias, "residual": residual}, "takes no residual"),
    ("apex", "rms_norm", {"weight": weight, "residual": residual}, "Apex takes no residual"),
    ("apex", "rms_norm", {"weight": weight, "zero_centered_gamma": True}, "Apex has no zero_centered_gamma"),
    ("apex", "rms_norm", {"weight": weight.bfloat16()}, "weight is torch.bfloat16 and x torch.float32, and Apex takes one type"),
    ("apex", "layer_norm", {"weight": weight}, "needs weight and bias, or neither"),
    ("apex", "layer_norm", {"weight": weight, "bias": bias.half()}, "bias is torch.float16"),
    ("apex", "rms_norm", {"x": x[:1, :1].expand(2**24, 2**5, H)}, "Apex counts to"),
    ("liger", "layer_norm", {"weight": weight}, "needs a weight and a bias"),
    ("liger", "layer_norm", {"bias": bias}, "needs a weight and a bias"),
    ("liger", "layer_norm", {"weight": weight, "bias": bias, "zero_centered_gamma": True}, "has no zero_centered_gamma"),
    ("liger", "rms_norm", {"residual": residual}, "residual needs a weight"),
    ("liger", "rms_norm", {"weight": weight, "residual": residual.bfloat16()}, "residual is torch.bfloat16 and x torch.float32"),
    ("liger", "rms_norm", {"weight": weight.double()}, "weight is torch.float64"),
    ("liger", "rms_norm", {"x": torch.zeros(1, 65537)}, "rows of 65537 are longer than Liger's 65536"),
    ("transformer_engine", "rms_norm", {}, "needs a weight"),
    ("transformer_engine", "layer_norm", {"weight": weight}, "needs a weight and a bias"),
    ("transformer_engine", "rms_norm", {"weight": weight, "residual": residual}, "takes no residual"),
    ("transformer_engine", "rms_norm", {"weight": weight.half()}, "weight is torch.float16 and x torch.float32"),
]
CASES = [(name, *rest) for which, *rest in REFUSALS for name in (NAMES if which == "all" else [which])]


@pytest.mark.parametrize(("name", "op", "arguments", "words"), CASES)
def test_a_call_that_it_cannot_do_is_refused(given, name, op, arguments, words):
    with pytest.raises(RuntimeError, match=f"backend '{name}' can't take this call of {op}: .*{words}"):
        getattr(onepass, op)(**{"x": x, **arguments}, backend=name)
    assert not given


def test_liger_takes_weights_of_another_type(given):
    y = onepass.rms_norm(x.bfloat16(), weight, backend="liger")
    assert y.dtype == torch.bfloat16 and given[0][2] is weight


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", OPS)
def test_tensors_on_a_cpu_are_refused(given, name, op, monkeypatch):
    monkeypatch.setattr(norm_backends, "_on_gpu", lambda x: x.is_cuda)
    title = PACKAGES[name].title
    with pytest.raises(RuntimeError, match=f"x is on cpu, and {title} needs a CUDA device"):
        getattr(onepass, op)(x, weight, backend=name)


# ---- where they are not installed ----


@pytest.mark.parametrize(("name", "install"), [(p.name, p.install) for p in norm_backends.PACKAGES])
@pytest.mark.parametrize("op", OPS)
def test_a_missing_package_is_named_with_what_to_install(name, install, op, monkeypatch):
    monkeypatch.setattr(norm_backends, "_on_gpu", lambda x: True)
    for module in PACKAGES[name].modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RuntimeError, match=f"backend '{name}' can't take this call of {op}: .* is not installed") as error:
        getattr(onepass, op)(x, weight, backend=name)
    assert install in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_nobody_is_told_to_install_what_cannot_run_here(name, monkeypatch):
    for module in PACKAGES[name].modules:
        monkeypatch.setitem(sys.modules, module, None)
    reason = onepass.explain("rms_norm", x, weight).reasons[name]
    assert reason == f"x is on cpu, and {PACKAGES[name].title} needs a CUDA device"


def test_an_apex_without_its_extensions_is_not_enough(given, monkeypatch):
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", None)
    with pytest.raises(RuntimeError, match="no module fused_layer_norm_cuda"):
        onepass.rms_norm(x, weight, backend="apex")


@pytest.mark.parametrize("op", OPS)
def test_explain_lists_them_and_auto_takes_none(given, op):
    found = onepass.explain(op, x, weight, memory_efficient=True)
    assert set(NAMES) < set(found.reasons) and found.backend not in NAMES
    assert all("memory_efficient" in found.reasons[name] for name in NAMES)
    arguments = (weight,) if op == "rms_norm" else (weight, bias)
    for name in NAMES:
        chosen = onepass.explain(op, x, *arguments, backend=name)
        assert chosen.backend == name and chosen.reasons[name] is None
        assert name in str(chosen)
    assert not given


def test_use_backend_chooses_them_too(given):
    with onepass.use_backend("liger"):
        onepass.rms_norm(x, weight)
        with pytest.raises(RuntimeError, match="takes no residual"):
            onepass.layer_norm(x, weight, bias, residual=residual)
    assert len(given) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", OPS)
def test_the_input_is_returned_beside_what_they_return(given, name, op):
    arguments = (weight,) if op == "rms_norm" else (weight, bias)
    assert onepass.explain(op, x, *arguments, return_input=True, backend=name).backend == name
    y, returned = getattr(onepass, op)(x, *arguments, return_input=True, backend=name)
    assert returned is x and len(given) == 1
    torch.testing.assert_close(y, getattr(onepass, op)(x, *arguments, backend="torch"))


@pytest.mark.parametrize("name", NAMES)
def test_dtensors_reach_them_as_plain_parts(given, name, one_rank):
    def shared(t):
        return DTensor.from_local(t.clone().requires_grad_(), one_rank, [Replicate()], run_check=False)

    assert onepass.explain("rms_norm", shared(x), shared(weight), backend=name).reasons[name] is None
    y = onepass.rms_norm(shared(x), shared(weight), backend=name)
    assert isinstance(y, DTensor) and len(given) == 1
    assert not any(isinstance(argument, DTensor) for argument in given[0])
    torch.testing.assert_close(y.to_local(), onepass.rms_norm(x, weight, backend="torch"))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_registering_loads_nothing_and_takes_no_time():
    script = (
        "import sys, time, onepass; from onepass.ops import norm\n"
        "before, start = set(sys.modules), time.process_time()\n"
        "from onepass.integrations import norm_backends; norm_backends.register()\n"
        "print(time.process_time() - start, *set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, *loaded = done.stdout.split()
    assert {name.split(".")[0] for name in loaded} <= {"onepass"}
    assert float(seconds) < 0.1


def test_asking_whether_it_is_there_costs_little(given):
    start = time.process_time()
    for _ in range(100):
        norm_backends._installed("liger_kernel")
    assert time.process_time() - start < 0.1


# ---- the real ones, where they and a GPU are ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "call"), [(name, call) for name, calls in CALLS.items() for call in calls])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_real_package_agrees_with_the_formula(name, call, dtype):
    if not all(importlib.util.find_spec(module) for module in PACKAGES[name].modules):
        pytest.skip(f"{name} is not installed")
    op, tensors, options = call
    found = []
    for chosen in (name, "torch"):
        leaves = {key: value.to("cuda", dtype).requires_grad_() for key, value in {"x": x, **named(tensors)}.items()}
        y = getattr(onepass, op)(**leaves, **options, eps=1e-3, backend=chosen)
        y = y if isinstance(y, tuple) else (y,)
        dy = [torch.randn(t.shape, generator=torch.Generator().manual_seed(5)).to(t) for t in y]
        kept = [t.clone() for t in dy]
        found.append((y, torch.autograd.grad(y, list(leaves.values()), dy)))
        assert all(torch.equal(now, was) for now, was in zip(dy, kept, strict=True))
    loose = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(found[0], found[1], **loose)
