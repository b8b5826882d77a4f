"""LoRA around a layer's products: the exact formula's values and gradients, what is kept and multiplied, several adapters."""

import pytest
import torch
from ops.calls import relative
from ops.norm_oracle import BF16, DEVICE, FP32
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from onepass import LoRA
from onepass.gradients.deferred import DeferredWgrad

K, N, M = 160, 96, 70


def numbers(*shape, seed=0, scale=1.0, dtype=FP32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype)


def parts(rank=8, dtype=FP32, adapter=None, frozen=True, lead=(7, 10)):
    """x, weight, a, b and dy. The adapter adds about as much as the layer makes."""
    x = numbers(*lead, K, seed=1, dtype=dtype).requires_grad_()
    weight = nn.Parameter(numbers(N, K, seed=2, scale=K**-0.5, dtype=dtype), requires_grad=not frozen)
    a = nn.Parameter(numbers(rank, K, seed=3, scale=K**-0.5, dtype=adapter or dtype))
    b = nn.Parameter(numbers(N, rank, seed=4, scale=rank**-0.5, dtype=adapter or dtype))
    return x, weight, a, b, numbers(*lead, N, seed=5, dtype=dtype)


def exact(x, weight, a, b, dy, scale, dtype=torch.float64, rounded=None):
    """Return y, dx, dweight, da and db by the formula, in fp64; `rounded`: operands of products are first."""
    x, weight, a, b, dy = (t.detach().to(rounded or t.dtype).to(dtype) for t in (x, weight, a, b, dy))

    def operand(t):
        return t if rounded is None else t.to(rounded).to(dtype)

    t, u = operand(scale * x @ a.T), operand(scale * dy @ b)
    rows, of_dy = x.flatten(0, -2), dy.flatten(0, -2)
    of_weight, of_a, of_b = of_dy.T @ rows, u.flatten(0, -2).T @ rows, of_dy.T @ t.flatten(0, -2)
    return x @ weight.T + t @ b.T, dy @ weight + u @ a, of_weight, of_a, of_b


@pytest.mark.parametrize("scale", (1.0, 0.5, 0.7))
@pytest.mark.parametrize("rank", (1, 8, 64, 256))
@pytest.mark.parametrize(("dtype", "adapter"), [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
def test_errors_are_those_of_rounding(rank, scale, dtype, adapter):
    """At most 1.25 times the error of the exact formula of rounded operands, whose results are rounded once.

    y and dx are rounded twice, and what adapters add to them before.
    """
    x, weight, a, b, dy = parts(rank, dtype, adapter, frozen=False)
    y = onepass.lora_linear(x, weight, a, b, scale=scale)
    found = y, *torch.autograd.grad(y, (x, weight, a, b), dy)
    truth, once = exact(x, weight, a, b, dy, scale), exact(x, weight, a, b, dy, scale, rounded=dtype)
    for name, mine, true, one in zip(("y", "dx", "dweight", "da", "db"), found, truth, once, strict=True):
        kept = mine.dtype
        assert kept is (adapter if name in ("da", "db") else dtype)
        floor = relative(one.to(kept), true)
        times = 1.25 if name not in ("y", "dx") or dtype is FP32 else 1.25 * 2**0.5
        assert relative(mine, true) < times * floor + 1e-6, (name, relative(mine, true), floor)


@pytest.mark.parametrize("zero", ("a", "b", "scale"))
def test_nothing_is_added_by_zeros(zero):
    x, weight, a, b, dy = parts(dtype=BF16)
    scale = 1.5
    if zero == "scale":
        scale = 0.0
    else:
        nn.init.zeros_({"a": a, "b": b}[zero])
    y = onepass.lora_linear(x, weight, a, b, scale=scale)
    assert torch.equal(y, F.linear(x, weight))
    dx, da, db = torch.autograd.grad(y, (x, a, b), dy)
    assert torch.equal(dx, dy @ weight)
    assert bool(da.any()) == (zero == "a")
    assert bool(db.any()) == (zero == "b")


class Products(TorchDispatchMode):
    """Records the shapes of what matrix products read."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.linear):
            self.shapes += [tuple(t.shape) for t in args if isinstance(t, torch.Tensor)]
        return function(*args, **(kwargs or {}))


def test_a_frozen_weight_makes_no_gradient():
    """Backward reads the weight once, for dx. Without a gradient of x it does not."""
    for asks_x, times in ((True, 1), (False, 0)):
        x, weight, a, b, dy = parts(rank=3)
        y = onepass.lora_linear(x.detach().requires_grad_(asks_x), weight, a, b)
        with Products() as backward:
            y.backward(dy)
        assert sum(shape == (N, K) for shape in backward.shapes) == times
        assert weight.grad is None
        assert a.grad is not None and b.grad is not None


def test_keeps_rows_once_and_a_number_of_rank_a_row():
    x, weight, a, b, _ = parts(rank=3, dtype=BF16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        onepass.lora_linear(x, weight, a, b)
    assert sorted(t.numel() for t in kept) == sorted([x.numel(), weight.numel(), M * 3, a.numel(), b.numel()])
    assert {t.data_ptr() for t in (x, weight, a, b)} < {t.data_ptr() for t in kept}


def test_only_what_asks_has_a_gradient():
    inputs = parts()[:4]
    names = "x", "weight", "a", "b"
    whole = {}
    for asking in range(1, 16):
        x, weight, a, b, dy = parts()
        tensors = [t.detach().requires_grad_(bool(asking >> i & 1)) for i, t in enumerate((x, weight, a, b))]
        onepass.lora_linear(*tensors, scale=0.7).backward(dy)
        for name, t in zip(names, tensors, strict=True):
            assert (t.grad is not None) == t.requires_grad
            if t.grad is not None:
                assert torch.equal(whole.setdefault(name, t.grad), t.grad), (name, asking)
    assert len(whole) == len(inputs)


def test_a_deferred_weight_beside_adapters():
    x, weight, a, b, dy = parts(frozen=False)
    weight.main_grad = torch.zeros(weight.shape, device=DEVICE)
    deferred = DeferredWgrad()
    onepass.lora_linear(x, weight, a, b, deferred=deferred).backward(dy)
    assert not weight.main_grad.any()
    deferred.flush()
    _, _, dweight, da, _ = exact(x, weight, a, b, dy, 1.0)
    assert relative(weight.main_grad, dweight) < 1e-5
    assert relative(a.grad, da) < 1e-5


# ---- several adapters, and other ops ----


def rows_of(lora):
    return slice(None) if lora.rows is None else slice(*lora.rows)


def merged(weight, adapters):
    """The weight that the adapters stand for."""
    weight = weight.clone()
    for lora in adapters:
        weight[rows_of(lora)] += lora.scale * lora.b.to(weight.dtype) @ lora.a.to(weight.dtype)
    return weight


SETS = {
    "q, k, v": [(0, 64, 1.0), (64, 80, 1.0), (80, 96, 1.0)],
    "q and v": [(80, 96, 0.5), (0, 64, 0.5)],
    "two of all rows": [(0, 96, 1.0), (0, 96, 2.0)],
    "two of one part, one of another": [(0, 64, 1.0), (0, 64, 1.0), (64, 96, 3.0)],
    "one of some rows": [(20, 50, 0.5)],
    "five": [(40, 70, 0.5), (0, 20, 0.5), (20, 39, 0.5), (39, 40, 0.5), (70, 96, 0.5)],
}


def adapters_of(name, dtype=torch.float64):
    found = []
    for i, (first, last, scale) in enumerate(SETS[name]):
        rank = 3 + i
        a, b = numbers(rank, K, seed=10 + i, scale=0.1).to(dtype), numbers(last - first, rank, seed=20 + i).to(dtype)
        found.append(LoRA(a.requires_grad_(), b.requires_grad_(), scale, (first, last)))
    return found


def linear(x, weight, bias, **options):
    return onepass.linear(x, weight, bias, **options)


def norm_linear(x, weight, bias, **options):
    return onepass.norm_linear(x, None, weight, bias, **options)


def activation_linear(x, weight, bias, **options):
    return onepass.activation_linear(torch.cat([x, x.flip(0)], -1), weight, bias, "swiglu", **options)


def gated_norm_linear(x, weight, bias, **options):
    return onepass.gated_norm_linear(x, x.flip(0), None, weight, bias, group_size=40, **options)


@pytest.mark.parametrize("with_bias", (False, True))
@pytest.mark.parametrize("op", (linear, norm_linear, activation_linear, gated_norm_linear))
@pytest.mark.parametrize("name", SETS)
def test_adapters_are_a_change_of_the_weight(op, name, with_bias):
    """In fp64: results and all gradients, those of parts of the rows and of several adapters of one part too."""
    x = numbers(7, 10, K, seed=1).double().requires_grad_()
    weight, bias = numbers(N, K, seed=2).double().requires_grad_(), numbers(N, seed=3).double().requires_grad_()
    adapters = adapters_of(name)
    asked = [x, weight, *([bias] if with_bias else []), *[t for lora in adapters for t in lora[:2]]]
    bias = bias if with_bias else None
    y, expected = op(x, weight, bias, lora=adapters), op(x, merged(weight, adapters), bias)
    dy = numbers(7, 10, N, seed=4).double()
    torch.testing.assert_close(y, expected)
    for mine, other in zip(torch.autograd.grad(y, asked, dy), torch.autograd.grad(expected, asked, dy), strict=True):
        torch.testing.assert_close(mine, other)


class Functions(TorchDispatchMode):
    """Counts what PyTorch computes: views and empty tensors are nothing."""

    NOTHING = ("t", "transpose", "view", "_unsafe_view", "detach", "empty", "new_empty", "empty_like", "slice", "alias", "expand")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.names += [] if name in self.NOTHING else [name]
        return function(*args, **(kwargs or {}))


def test_several_adapters_take_as_many_products_as_one():
    """Two and three more than the frozen layer's own, and one pass that joins the adapters, or takes the gradients apart."""
    x, weight, *_, dy = parts(dtype=BF16)
    adapters = [LoRA(a.float().detach().requires_grad_(), b.float().detach().requires_grad_(), 1.0, rows)
                for a, b, _, rows, *_ in adapters_of("q, k, v")]  # fmt: skip
    with Functions() as forward:
        y = onepass.linear(x, weight, lora=adapters)
    assert sorted(forward.names) == ["addmm_", "mm", "mm", "pack_adapters"]
    with Functions() as backward:
        y.backward(dy)
    sums = ["mm", "mm"] if DEVICE == "cuda" else ["_to_copy"] * 4 + ["mm"] * 2  # a CPU has no sums of 16 bits in fp32
    assert sorted(backward.names) == sorted(["mm", "mm", "addmm_", "unpack_adapters", *sums])
    assert all(lora.a.grad.is_contiguous() and lora.b.grad.is_contiguous() for lora in adapters)


@pytest.mark.parametrize("op", (linear, norm_linear, activation_linear, gated_norm_linear))
def test_an_option_of_ops_has_the_bits_of_the_op(op):
    """The prologue's rows, and then lora_linear of these."""
    x, weight, a, b, _ = parts(dtype=BF16)
    rows = op(x, torch.eye(K, device=DEVICE, dtype=BF16), None)
    lora = LoRA(a, b, 0.7)
    assert torch.equal(op(x, weight, None, lora=lora), onepass.lora_linear(rows, weight, a, b, scale=0.7))
    with torch.no_grad():
        assert torch.equal(op(x, weight, None, lora=[lora]), onepass.lora_linear(rows, weight, a, b, scale=0.7))


@pytest.mark.parametrize("frozen", (True, False))
@pytest.mark.parametrize("recipe", (onepass.FP8Recipe(), onepass.FP8Recipe(scaling="row")), ids=lambda r: r.scaling)
def test_the_weight_in_eight_bits(recipe, frozen):
    """Adapters' products stay in 16 bits: what they add is what they add to a layer of 16 bits."""
    x, weight, a, b, dy = parts(dtype=BF16, frozen=frozen)
    asked = [t for t in (x, weight, a, b) if t.requires_grad]
    y = onepass.lora_linear(x, weight, a, b, precision=recipe)
    plain = onepass.linear(x, weight, precision=recipe)
    t = (x @ a.T).float()
    assert relative(y - plain.float(), t @ b.float().T) < 2e-2
    found, truth = torch.autograd.grad(y, asked, dy), exact(x, weight, a, b, dy, 1.0)
    assert relative(found[-2], truth[-2]) < 6e-3
    assert relative(found[-1], truth[-1]) < 6e-3
    assert relative(found[0], truth[1]) < 0.06


# ---- wrong arguments ----


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"a": torch.zeros(0, K), "b": torch.zeros(N, 0)}, ValueError, "lora.a must have at least one row"),
        ({"a": torch.zeros(2, K + 1)}, ValueError, r"lora.a must have shape \(2, 160\), but has \(2, 161\)"),
        ({"b": torch.zeros(8, N)}, ValueError, r"lora.b must have shape \(96, 8\), but has \(8, 96\)"),
        ({"a": torch.zeros(8, K, dtype=torch.float64)}, TypeError, "lora.a must have x's type torch.float32, but is"),
        ({"scale": float("nan")}, ValueError, "lora.scale must be finite"),
        ({"scale": "1"}, TypeError, "lora.scale must be a number"),
        ({"rows": (4, 4)}, ValueError, "lora.rows must be two of the weight's 96 rows, the first below the last"),
        ({"rows": (0, 32)}, ValueError, r"lora.b must have shape \(32, 8\)"),
    ],
)
def test_errors_name_the_part(change, error, words):
    x, weight, a, b, _ = parts()
    lora = LoRA(a, b)._replace(**{k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in change.items()})
    with pytest.raises(error, match=words):
        onepass.norm_linear(x, None, weight, lora=lora)


def test_errors_name_one_of_several_and_what_overlaps():
    x, weight, a, b, _ = parts()
    with pytest.raises(TypeError, match=r"lora\[1\] must be an onepass.LoRA or None, but is a tuple"):
        onepass.norm_linear(x, None, weight, lora=[LoRA(a, b), (a, b)])
    with pytest.raises(TypeError, match=r"lora must be an onepass.LoRA or None, but is a dict"):
        onepass.norm_linear(x, None, weight, lora={"a": a, "b": b})
    some = b[:64]
    halves = [LoRA(a, some, rows=(0, 64)), LoRA(a, some, rows=(32, 96))]
    with pytest.raises(ValueError, match=r"\(0, 64\) and \(32, 96\) overlap"):
        onepass.norm_linear(x, None, weight, lora=halves)
    labels = torch.zeros(10, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match=r"lora\.rows must be None, as a head is one weight"):
        onepass.linear_cross_entropy(x[0], weight, labels, lora=halves[0])


def test_explain_says_what_is_around_the_products():
    x, weight, a, b, _ = parts()
    assert "LoRA of rank 8 around them" in str(onepass.explain("lora_linear", x, weight, a, b))
    assert "LoRA of rank 8 around them" in str(onepass.explain("norm_linear", x, None, weight, lora=LoRA(a, b), backend="triton"))




@pytest.mark.parametrize("rows", (None, (0, N // 2)))
@pytest.mark.parametrize("trained", (False, True))
def test_a_pass_that_asks_for_no_adapter(rows, trained):
    """Neither adapters that are frozen beside a trained x, nor those that a pass leaves out, are in its way."""
    x, weight = numbers(7, K, seed=1).requires_grad_(), numbers(N, K, seed=2)
    sizes = (3, K), (N if rows is None else rows[1], 3)
    a, b = (numbers(*size, seed=3).requires_grad_(trained) for size in sizes)
    two = [onepass.LoRA(a, b, 0.5, rows), onepass.LoRA(a, b, 2.0, rows)]
    y = onepass.linear(x, weight, lora=two)
    wide = weight.clone()
    wide[: b.shape[0]] += (2.5 * b @ a).detach()
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert relative(dx, wide.sum(0).expand_as(dx).double()) < 1e-5


@pytest.mark.parametrize("rows", ([0, 8], (0.0, 8.0), (0, 8, 9), slice(0, 8), 8), ids=str)
def test_rows_that_are_no_rows(rows):
    lora = onepass.LoRA(numbers(3, K), numbers(8, 3), 1.0, rows)
    with pytest.raises(TypeError, match="rows must be None or a tuple of two ints, but is"):
        onepass.linear(numbers(2, K), numbers(N, K), lora=lora)
