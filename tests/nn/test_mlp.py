"""The MLP on one rank, against plain formulas in fp64: its numbers, start, state, gradients, what it keeps, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.bias_activation_oracle import GATED, PLAIN, small_tiles
from ops.calls import backends, equal, gradients, relative
from ops.oracle import BF16, DEVICE, FP16, FP32
from torch import nn
from torch.nn import functional as F

import onepass
import onepass.ops.activation.activation_linear as module
from onepass.nn import MLP, sharded_state_dict
from onepass.ops.activation import activations
from onepass.parallel import DeferredWgrad
from onepass.testing.budget import compare, run
from onepass.testing.poison import bytes_kept, saved_tensors, unchanged

FP64 = torch.float64
KEYS = ["linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias"]
kinds = pytest.mark.parametrize("activation", ("swiglu", "gelu"))
CLAMPED = {"clamp": 1.0, "linear_offset": 0.5}


@pytest.fixture(autouse=True)
def _small():
    with small_tiles(module):
        yield


# ---- the formula ----


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


FORMULAS = {
    "gelu": lambda z: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "gelu_exact": lambda z: 0.5 * z * (1 + torch.erf(z / math.sqrt(2))),
    "quick_gelu": lambda z: z * sigmoid(1.702 * z),
    "silu": lambda z: z * sigmoid(z),
    "relu": lambda z: torch.where(z > 0, z, 0),
    "squared_relu": lambda z: torch.where(z > 0, z, 0) ** 2,
}
GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_exact": "gelu_exact", "quick_geglu": "quick_gelu", "reglu": "relu"}


def formula(x, w1, b1, w2, b2, scale=None, *, activation, clamp=None, linear_offset=0.0):
    """What the MLP is to be. In 16 bits, what a layer leaves in memory is rounded, and nothing else."""
    stored = x.dtype
    wide = torch.promote_types(stored, FP32)
    z = (x @ w1.T).to(wide)
    z = z if b1 is None else z + b1.to(wide)
    if activation in GATES:
        gate, linear = z.chunk(2, -1)
        if clamp is not None:
            gate, linear = torch.minimum(gate, torch.full_like(gate, clamp)), linear.clamp(-clamp, clamp)
        a = FORMULAS[GATES[activation]](gate) * (linear + linear_offset)
    else:
        a = FORMULAS[activation](z)
    factor = 1 if scale is None else scale.view(*x.shape[:-1], 1).to(wide)
    y = ((a * factor).to(stored) @ w2.T).to(wide)
    return (y if b2 is None else y + b2.to(wide) * factor).to(stored)


def parameters(mlp):
    return mlp.linear_fc1.weight, mlp.linear_fc1.bias, mlp.linear_fc2.weight, mlp.linear_fc2.bias


def call(mlp):
    """The module as a function of what the formula takes."""

    def function(x, w1, b1, w2, b2, scale=None):
        given = {key: t for key, t in zip(KEYS, (w1, b1, w2, b2), strict=True) if t is not None}
        return torch.func.functional_call(mlp, given, (x, scale))

    return function


def inputs_of(mlp, lead=(3, 5), scaled=True, column=False, dtype=None):
    """x, the parameters, which are random, and a scale."""
    w1, b1, w2, b2 = parameters(mlp)
    with torch.no_grad():
        for bias in (b1, b2):
            if bias is not None:
                bias.normal_()
    x = torch.randn(*lead, mlp.hidden_size, device=DEVICE).to(w1.dtype)
    scale = 0.5 + torch.rand((*lead, 1) if column else tuple(lead), device=DEVICE) if scaled else None
    given = {"x": x, "w1": w1, "b1": b1, "w2": w2, "b2": b2, "scale": scale if scale is None else scale.to(dtype or FP32)}
    return {name: t if t is None else t.detach() for name, t in given.items()}


def made(activation="swiglu", hidden=24, ffn=40, dtype=FP32, **options):
    return MLP(hidden, ffn, activation, device=DEVICE, dtype=dtype, **options)


def options_of(mlp):
    return {"activation": mlp.activation, "clamp": mlp.clamp, "linear_offset": mlp.linear_offset}


def results(mlp, given, backend):
    """Ours and those in fp64: y and every gradient."""
    x = given["x"]
    dy = torch.randn(*x.shape[:-1], mlp.hidden_size, device=DEVICE, dtype=x.dtype)
    with onepass.use_backend(backend), unchanged(**given, dy=dy):
        ours = run(call(mlp), given, dy)
    exact = run(lambda *args: formula(*args, **options_of(mlp)), given, dy, FP64)
    assert list(ours) == list(exact)
    for name, value in ours.items():
        source = given["x" if name == "y" else name[1:]]
        assert value.dtype == source.dtype and value.shape == exact[name].shape, name
    return {name: (ours[name], exact[name]) for name in exact}


def errors(mlp, given, backend):
    return {name: relative(*pair) for name, pair in results(mlp, given, backend).items()}


# ---- what it computes ----


@backends
@pytest.mark.parametrize("activation", (*PLAIN, *GATED))
def test_values_and_gradients_in_fp32(activation, backend):
    cases = [({}, True, True), ({}, True, False), ({}, False, True), ({}, False, False)]
    for options, bias, scaled in [(CLAMPED, True, True), *cases[1:]] if activation in GATED else cases:
        mlp = made(activation, bias=bias, **options)
        found = errors(mlp, inputs_of(mlp, scaled=scaled), backend)
        assert all(error <= 2e-6 for error in found.values()), (options, bias, scaled, found)


@backends
@kinds
@pytest.mark.parametrize(("dtype", "scale"), ((BF16, None), (BF16, FP32), (BF16, BF16), (FP16, FP32)))
def test_values_and_gradients_in_16_bits(activation, dtype, scale, backend):
    mlp = made(activation, 48, 40, dtype)
    given = inputs_of(mlp, (3, 33), scaled=scale is not None, dtype=scale)
    dy = torch.randn(3, 33, 48, device=DEVICE).to(dtype)
    with onepass.use_backend(backend):
        ours = run(call(mlp), given, dy)
    plain = [run(lambda *args: formula(*args, **options_of(mlp)), given, dy, wide) for wide in (None, FP64)]
    report = compare([(ours, *plain)], dtype)
    assert report, report


@backends
@settings(max_examples=40, deadline=None)
@given(
    lead=st.lists(st.sampled_from((0, 1, 2, 3, 7)), max_size=3),
    hidden=st.sampled_from((1, 2, 3, 17)),
    ffn=st.sampled_from((1, 2, 5, 33)),
    activation=st.sampled_from(("swiglu", "gelu", "reglu")),
    bias=st.booleans(),
    scaled=st.booleans(),
    column=st.booleans(),
)
def test_every_size(backend, lead, hidden, ffn, activation, bias, scaled, column):
    dtype, close = (FP64, 1e-11) if backend == "torch" else (FP32, 1e-4)
    mlp = made(activation, hidden, ffn, dtype, bias=bias)
    for name, (ours, exact) in results(mlp, inputs_of(mlp, lead, scaled, column, dtype), backend).items():
        torch.testing.assert_close(ours.double(), exact, rtol=close, atol=close, msg=lambda said, name=name: f"{name}: {said}")


@backends
def test_a_scale_scales_all_of_y(backend):
    mlp = made("quick_geglu", **CLAMPED)
    given = inputs_of(mlp)
    scale = given["scale"]
    with onepass.use_backend(backend):
        y, whole = mlp(given["x"], scale), mlp(given["x"])
    torch.testing.assert_close(y, whole * scale.unsqueeze(-1), rtol=1e-5, atol=1e-6)
    assert not mlp(given["x"], torch.zeros_like(scale)).any()


@backends
@pytest.mark.parametrize("gated", (True, False))
def test_a_registered_activation(gated, backend, monkeypatch):
    monkeypatch.setattr(activations, "ACTIVATIONS", dict(activations.ACTIVATIONS))
    onepass.register_activation("cubed", lambda z: z**3, gated=gated)
    monkeypatch.setitem(FORMULAS, "cubed", lambda z: z * z * z)
    if gated:
        monkeypatch.setitem(GATES, "cubed", "cubed")
    mlp = made("cubed")
    assert mlp.linear_fc1.weight.shape == ((2 if gated else 1) * 40, 24)
    found = errors(mlp, inputs_of(mlp), "torch" if backend == "torch" else "auto")
    assert all(error <= 2e-6 for error in found.values()), found


# ---- what comes back ----


@pytest.mark.parametrize("scaled", (True, False))
@pytest.mark.parametrize("bias", (True, False))
def test_a_bias_left_to_the_caller_comes_back_unless_it_is_scaled(bias, scaled):
    mlp, other = made(bias=bias, skip_bias_add=True), made(bias=bias)
    other.load_state_dict(mlp.state_dict())
    given = inputs_of(mlp, scaled=scaled)
    other.load_state_dict(mlp.state_dict())
    y, left = mlp(given["x"], given["scale"])
    whole = other(given["x"], given["scale"])
    assert left is (None if scaled or not bias else mlp.linear_fc2.bias)
    assert isinstance(whole, torch.Tensor)
    torch.testing.assert_close(y if left is None else y + left, whole)


def test_what_hangs_on_both_linear_layers_is_called():
    mlp, seen = made(), []
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        layer.register_forward_pre_hook(lambda layer, _: seen.append(layer))
        layer.register_full_backward_hook(lambda layer, *_: seen.append(layer))
    mlp(torch.randn(3, 24, device=DEVICE, requires_grad=True)).sum().backward()
    assert seen == [mlp.linear_fc1, mlp.linear_fc2, mlp.linear_fc2, mlp.linear_fc1]


# ---- parameters ----


def seeded(make, seed=5):
    torch.manual_seed(seed)
    return make()


@kinds
@pytest.mark.parametrize("bias", (True, False))
def test_it_starts_as_torchs_linear_layers(activation, bias):
    ours = seeded(lambda: made(activation, bias=bias))
    after = torch.get_rng_state()
    wide = 80 if activation == "swiglu" else 40
    options = {"bias": bias, "device": DEVICE}
    theirs = seeded(
        lambda: nn.ModuleDict({"linear_fc1": nn.Linear(24, wide, **options), "linear_fc2": nn.Linear(40, 24, **options)})
    )
    assert torch.equal(torch.get_rng_state(), after)
    state, expected = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(expected) == (KEYS if bias else KEYS[::2])
    assert equal(list(state.values()), list(expected.values()))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    assert equal(list(ours.state_dict().values()), list(theirs.state_dict().values()))


def test_its_own_starts():
    one = made(init_method=lambda weight: nn.init.constant_(weight, 2.0))
    assert all((weight == 2).all() for weight in (one.linear_fc1.weight, one.linear_fc2.weight))
    two = made(
        init_method=lambda weight: nn.init.ones_(weight), output_layer_init_method=lambda weight: nn.init.constant_(weight, 3.0)
    )
    assert (two.linear_fc1.weight == 1).all() and (two.linear_fc2.weight == 3).all()
    down = made(output_layer_init_method=nn.init.ones_)
    assert (down.linear_fc2.weight == 1).all() and not (down.linear_fc1.weight == 1).any() and down.linear_fc1.bias.any()
    for mlp in (one, two, down):
        assert not mlp.linear_fc2.bias.any()
    assert not one.linear_fc1.bias.any() and not two.linear_fc1.bias.any()


def marks(mlp):
    w1, b1, w2, b2 = parameters(mlp)
    divided = [(t.tensor_model_parallel, t.partition_dim, t.partition_stride) for t in (w1, b1, w2)]
    return divided, b2.sequence_parallel, hasattr(b2, "tensor_model_parallel")


@kinds
def test_its_parameters_are_marked(activation):
    mlp = made(activation)
    stride = 2 if activation == "swiglu" else 1
    expected = [(True, 0, stride), (True, 0, stride), (True, 1, 1)], False, False
    assert marks(mlp) == expected


def test_a_sharded_state_dict_of_one_rank_has_the_gates_apart():
    mlp = made()
    state = sharded_state_dict(mlp, prefix="mlp.")
    blocks = [f"mlp.linear_fc1.{name}.{at}" for name in ("weight", "bias") for at in (0, 1)]
    assert set(state) == {*blocks, "mlp.linear_fc2.weight", "mlp.linear_fc2.bias"}
    assert torch.equal(torch.cat([state[key] for key in blocks[:2]]), mlp.linear_fc1.weight)
    plain = sharded_state_dict(made("gelu"))
    assert list(plain) == KEYS


def test_reprs():
    assert made(clamp=7.0, linear_offset=1.0, save="fp8").extra_repr() == (
        "24, 40, activation='swiglu', clamp=7.0, linear_offset=1.0, save='fp8'"
    )
    assert repr(made("gelu", bias=False, skip_bias_add=True)) == (
        "MLP(\n"
        "  24, 40, activation='gelu'\n"
        "  (linear_fc1): ColumnParallelLinear(24, 40, bias=False, tp=1, skip_bias_add=True)\n"
        "  (linear_fc2): ActivationRowParallelLinear(40, 24, bias=False, tp=1, skip_bias_add=True)\n"
        ")"
    )


# ---- main_grad ----


def gathering(mlp):
    for parameter in mlp.parameters():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.randn_like(parameter, dtype=FP32), False
    return mlp


@backends
@kinds
@pytest.mark.parametrize("scaled", (True, False))
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_four_main_grads_over_three_microbatches(activation, dtype, scaled, backend):
    mlp = gathering(made(activation, dtype=dtype))
    exact = [t.main_grad.double() for t in parameters(mlp)]
    for _ in range(3):
        given = inputs_of(mlp, (6, 4), scaled)
        dy = torch.randn(6, 4, 24, device=DEVICE).to(dtype)
        with onepass.use_backend(backend):
            mlp(given["x"].requires_grad_(), given["scale"]).backward(dy)
        grads = run(lambda *args: formula(*args, **options_of(mlp)), given, dy, FP64)
        exact = [total + grads[name] for total, name in zip(exact, ("dw1", "db1", "dw2", "db2"), strict=True)]
    for name, parameter, total in zip(KEYS, parameters(mlp), exact, strict=True):
        assert relative(parameter.main_grad, total) <= (2e-6 if dtype is FP32 else 1e-2), name
        assert parameter.grad_added_to_main_grad is True and not parameter.grad.any(), name


@backends
@pytest.mark.parametrize("scaled", (True, False))
def test_a_bias_gets_its_main_grad_in_fp32(scaled, backend):
    """Of bf16 numbers whose sum bf16 can't hold."""
    mlp = gathering(made(ffn=8, dtype=BF16))
    before, given = mlp.linear_fc2.bias.main_grad.double(), inputs_of(mlp, (200,), scaled)
    dy = torch.randn(200, 24, device=DEVICE).to(BF16)
    with onepass.use_backend(backend):
        mlp(given["x"], given["scale"]).backward(dy)
    exact = before + (dy.double() * (given["scale"].double().unsqueeze(-1) if scaled else 1)).sum(0)
    assert relative(mlp.linear_fc2.bias.main_grad, exact) <= 1e-6


@backends
@pytest.mark.parametrize("scaled", (True, False))
def test_both_weights_gradients_can_be_put_off(scaled, backend):
    mlp = gathering(made())
    given, before = inputs_of(mlp, scaled=scaled), [t.main_grad.clone() for t in parameters(mlp)]
    deferred = DeferredWgrad()
    deferred.attach(mlp)
    with onepass.use_backend(backend):
        mlp(given["x"], given["scale"]).backward(torch.ones_like(given["x"]))
        expected = run(call(made()), given, torch.ones_like(given["x"]))
    changed = [not torch.equal(t.main_grad, was) for t, was in zip(parameters(mlp), before, strict=True)]
    assert changed == [False, True, False, True] and len(deferred) == 2  # the biases' are sums, which nobody puts off
    deferred.flush()
    for parameter, was, name in zip(parameters(mlp), before, ("dw1", "db1", "dw2", "db2"), strict=True):
        torch.testing.assert_close(parameter.main_grad, was + expected[name], rtol=1e-5, atol=1e-5)


# ---- what people wrap around it ----


def all_gradients(function, mlp, given):
    """y and the gradients of x, of the scale, and of the parameters: the weights' in main_grad."""
    mlp.zero_grad()
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    some = [t if t is None else t.detach().requires_grad_() for t in (given["x"], given["scale"])]
    found = gradients(function, some)
    return [*found, *(getattr(t, "main_grad", t.grad).clone() for t in mlp.parameters())]


@backends
@kinds
@pytest.mark.parametrize("scaled", (True, False))
def test_compiling_gives_the_same(activation, scaled, backend):
    mlp = made(activation)
    given = inputs_of(mlp, scaled=scaled)

    def block(x, scale=None):
        return mlp(x * 2, scale) * 3

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with onepass.use_backend(backend):
        pairs = zip(*(all_gradients(function, mlp, given) for function in (block, compiled)), strict=True)
    for eager, got in pairs:
        torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-6 * eager.abs().max().item())


@backends
@kinds
@pytest.mark.parametrize("scaled", (True, False))
def test_autocast_rounds_the_operands_of_the_products(activation, scaled, backend):
    mlp = made(activation)
    given = inputs_of(mlp, scaled=scaled)
    dy = torch.randn(3, 5, 24, device=DEVICE).to(BF16)

    def block(*args):
        with onepass.use_backend(backend), torch.autocast(DEVICE, BF16):
            return call(mlp)(*args)

    ours = run(block, given, dy)
    exact = run(lambda *args: formula(*args, **options_of(mlp)), given, dy, FP64)
    assert ours["y"].dtype is BF16
    for name, value in exact.items():
        assert relative(ours[name], value) < 2e-2, name
        assert name == "y" or ours[name].dtype is FP32, name


# ---- what is kept, and what nobody asks for ----


@backends
@kinds
@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("scaled", (True, False))
def test_keeps_the_first_layers_output_only(activation, dtype, scaled, backend):
    rows, ffn = 15, 128
    wide = 2 * ffn if activation == "swiglu" else ffn
    for save, a_number in (("input", dtype.itemsize), ("fp8", 1 + 1 / 64)):
        mlp = made(activation, 16, ffn, dtype, save=save)
        given = inputs_of(mlp, scaled=scaled)
        with onepass.use_backend(backend), saved_tensors() as kept:
            mlp(given["x"].requires_grad_(), given["scale"])
        small = mlp.linear_fc2.bias.numel() * 4 if scaled else 0  # the bias in fp32
        assert bytes_kept(kept, given["x"], given["scale"], *mlp.parameters()) <= rows * wide * a_number + small


@backends
def test_nothing_is_kept_where_nothing_asks(backend):
    mlp = made()
    given = inputs_of(mlp)
    with onepass.use_backend(backend), saved_tensors() as kept:
        with torch.no_grad():
            first = mlp(given["x"], given["scale"])
        second = mlp.requires_grad_(False)(given["x"], given["scale"])
    assert not kept and torch.equal(first, second) and not second.requires_grad


# ---- errors ----


x = torch.ones(2, 3, 8)
BAD = {
    "hidden_size 0": (lambda: MLP(0, 4), ValueError, "hidden_size must be a size of at least 1, but is 0"),
    "ffn_hidden_size -1": (lambda: MLP(4, -1), ValueError, "ffn_hidden_size must be a size of at least 1, but is -1"),
    "ffn_hidden_size no size": (lambda: MLP(4, 8.0), ValueError, "ffn_hidden_size must be a size of at least 1, but is 8.0"),
    "activation": (lambda: MLP(8, 8, "mish"), ValueError, "activation must be one of .*swiglu.*, but is 'mish'"),
    "activation a function": (lambda: MLP(8, 8, F.silu), ValueError, "activation must be one of"),
    "clamp": (lambda: MLP(8, 8, "gelu", clamp=1.0), ValueError, r"clamp \(1.0\) needs a gated activation, but .* 'gelu'"),
    "offset": (lambda: MLP(8, 8, "gelu", linear_offset=1.0), ValueError, "linear_offset must be a number, and 0 if not gated"),
    "save": (lambda: MLP(8, 8, save="disk"), ValueError, "save must be one of input, fp8, offload, but is 'disk'"),
    "init": (lambda: MLP(8, 8, init_method=1.0), TypeError, "^init_method must be a function of the weight or None, but is 1"),
    "output init": (lambda: MLP(8, 8, output_layer_init_method="normal"), TypeError, "^output_layer_init_method must be"),
    "group": (lambda: MLP(8, 8, tp_group=-100), TypeError, "tp_group must be None or a torch.distributed.ProcessGroup"),
    "x's width": (lambda: MLP(6, 8)(x), ValueError, r"x's last dimension must be 6, hidden_size, but x has shape \(2, 3, 8\)"),
    "x a number": (lambda: MLP(8, 8)(1.0), TypeError, "x must be a tensor, but is a float"),
    "x a scalar": (lambda: MLP(8, 8)(torch.ones(())), ValueError, r"x's last dimension must be 8, hidden_size, but .* \(\)"),
    "x's type": (lambda: MLP(8, 8)(x.double()), TypeError, "weight must have x's type torch.float64, but is torch.float32"),
    "integer x": (lambda: MLP(8, 8)(x.int()), TypeError, "x must be a floating-point tensor"),
    "scale's shape": (
        lambda: MLP(8, 8)(x, torch.ones(3)), ValueError,
        r"per_token_scale must have shape \(2, 3\) or \(2, 3, 1\), one number a token, but has \(3,\)",
    ),
    "scale of columns": (lambda: MLP(8, 8)(x, x), ValueError, r"per_token_scale must have shape .*, but has \(2, 3, 8\)"),
    "scale a number": (lambda: MLP(8, 8)(x, 2.0), TypeError, "per_token_scale must be .* tensor .* but is a float"),
    "integer scale": (lambda: MLP(8, 8)(x, x[..., 0].int()), TypeError, "per_token_scale must be a floating-point tensor"),
    "scale elsewhere": (lambda: MLP(8, 8)(x, x[..., 0].to("meta")), ValueError, "per_token_scale must be on cpu, as x"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_errors_say_what_to_do(what):
    make, error, words = BAD[what]
    with pytest.raises(error, match=words):
        make()


def test_a_wrong_scale_is_seen_before_anything_is_computed():
    mlp = MLP(8, 8)
    mlp.linear_fc1.register_forward_pre_hook(lambda *_: pytest.fail("it was called"))
    with pytest.raises(ValueError, match="per_token_scale"):
        mlp(x, torch.ones(3))


def test_a_bad_main_grad_is_named():
    mlp = MLP(8, 8)
    mlp.linear_fc2.bias.main_grad = torch.zeros(3)
    for scale in (None, torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"main_grad must have its weight's shape \(8,\), but has \(3,\)"):
            mlp(x, scale)
