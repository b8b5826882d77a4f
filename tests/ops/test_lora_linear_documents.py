"""Adapters by document: each document against a layer of its own weight in fp64, what ends may be, and who reaches whom."""

import pytest
import torch
from ops.calls import relative
from ops.norm_oracle import BF16, DEVICE, FP16, FP32
from ops.test_lora_linear import K, N, numbers
from torch.nn import functional as F

import onepass
from onepass import LoRA

FP64 = torch.float64
M = 70  # rows
ENDS = {"four": (9, 31, 40, 70), "empty ones, rows left": (0, 20, 20, 20, 64), "one": (70,), "nothing": (0, 0)}
OPS = {
    "linear": lambda x, weight, bias, lora: onepass.linear(x, weight, bias, lora=lora),
    "norm_linear": lambda x, weight, bias, lora: onepass.norm_linear(x, None, weight, bias, lora=lora),
    "activation_linear": lambda x, weight, bias, lora: onepass.activation_linear(x, weight, bias, "gelu", lora=lora),
}


def ends_of(name, dtype=torch.int32):
    return torch.tensor(ENDS[name], dtype=dtype, device=DEVICE)


def parts(name, rank=5, dtype=FP32, adapter=None, lead=(7, 10)):
    """x, weight, a, b, dy and the ends."""
    ends, adapter = ends_of(name), adapter or dtype
    E = len(ends)
    x = numbers(*lead, K, seed=1, dtype=dtype).requires_grad_()
    weight = numbers(N, K, seed=2, scale=K**-0.5, dtype=dtype).requires_grad_()
    a = numbers(E, rank, K, seed=3, scale=K**-0.5, dtype=adapter).requires_grad_()
    b = numbers(E, N, rank, seed=4, scale=rank**-0.5, dtype=adapter).requires_grad_()
    return x, weight, a, b, numbers(*lead, N, seed=5, dtype=dtype), ends


def exact(x, weight, a, b, dy, ends, scales, rounded=None):
    """y, dx, dweight, da and db, each document by itself, in fp64; `rounded`: operands of products are first."""
    x, weight, a, b, dy = (t.detach().to(rounded or t.dtype).double() for t in (x, weight, a, b, dy))
    rows, of_dy = x.flatten(0, -2), dy.flatten(0, -2)
    y, dx, da, db = rows @ weight.T, of_dy @ weight, torch.zeros_like(a), torch.zeros_like(b)

    def operand(t):
        return t if rounded is None else t.to(rounded).double()

    first = 0
    for e, end in enumerate(ends.tolist()):
        own = slice(first, end)
        t, u = operand(scales[e] * rows[own] @ a[e].T), operand(scales[e] * of_dy[own] @ b[e])
        y[own] += t @ b[e].T
        dx[own] += u @ a[e]
        da[e], db[e] = u.T @ rows[own], of_dy[own].T @ t
        first = end
    return y.view(dy.shape), dx.view(x.shape), of_dy.T @ rows, da, db


SCALES = {
    "one": lambda E: 0.7,
    "a list": lambda E: [0.5 + e for e in range(E)],
    "a tensor": lambda E: torch.arange(1, E + 1, device=DEVICE) / 4,
}


@pytest.mark.parametrize(("of_scales", "rank"), [("one", 16), ("a list", 5), ("a tensor", 1)])
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(("dtype", "adapter"), [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP32), (FP64, FP64)], ids=str)
def test_errors_are_those_of_rounding(name, rank, of_scales, dtype, adapter):
    """As of one adapter for all rows: 1.25 times those of rounded operands, and y and dx are rounded twice."""
    x, weight, a, b, dy, ends = parts(name, rank, dtype, adapter)
    scale = SCALES[of_scales](len(ends))
    each = [float(scale if isinstance(scale, float) else scale[e]) for e in range(len(ends))]
    y = onepass.lora_linear(x, weight, a, b, scale=scale, ends=ends)
    found = y, *torch.autograd.grad(y, (x, weight, a, b), dy)
    truth, once = exact(x, weight, a, b, dy, ends, each), exact(x, weight, a, b, dy, ends, each, rounded=dtype)
    for what, mine, true, one in zip(("y", "dx", "dweight", "da", "db"), found, truth, once, strict=True):
        assert mine.dtype is (adapter if what in ("da", "db") else dtype) and mine.shape == true.shape
        if not true.any():
            assert not mine.any()
            continue
        times = 1.25 if what not in ("y", "dx") or dtype.itemsize > 2 else 1.25 * 2**0.5
        assert relative(mine, true) < times * relative(one.to(mine.dtype), true) + 1e-6, what


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("several", (False, True))
def test_each_document_is_a_layer_of_its_own_weight(op, several):
    """In fp64, results and all gradients; of one adapter, and of two that change parts of the weight's rows."""
    x, weight, a, b, dy, ends = parts("empty ones, rows left", dtype=torch.float64)
    bias = numbers(N, seed=7).double().requires_grad_()
    adapters = [LoRA(a, b, 0.7, ends=ends)]
    if several:
        last = numbers(5, 30, 3, seed=9).double().requires_grad_()
        more = numbers(5, 3, K, seed=8).double().requires_grad_()
        first = b.detach()[:, :50].requires_grad_()
        adapters = [LoRA(a, first, 0.7, (0, 50), ends=ends), LoRA(more, last, [1.0, 2.0, 3.0, 4.0, 5.0], (66, 96), ends=ends)]
    asked = [x, weight, bias, *[t for lora in adapters for t in lora[:2]]]
    y = OPS[op](x, weight, bias, adapters)
    rows, expected, first = x.view(M, K), [], 0
    for e, end in enumerate(ends.tolist()):
        own = weight.clone()
        for lora in adapters:
            scale = lora.scale if isinstance(lora.scale, float) else lora.scale[e]
            own[slice(*(lora.rows or (0, N)))] += scale * lora.b[e] @ lora.a[e]
        expected.append(OPS[op](rows[first:end], own, bias, None))
        first = end
    expected = torch.cat([*expected, OPS[op](rows[first:], weight, bias, None)]).view_as(y)
    torch.testing.assert_close(y, expected)
    for mine, other in zip(torch.autograd.grad(y, asked, dy), torch.autograd.grad(expected, asked, dy), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_equal_adapters_are_one(dtype):
    x, weight, a, b, dy, ends = parts("four", dtype=BF16)
    same = [t.detach()[:1] for t in (a, b)]
    shared = [t.expand(4, *t.shape[1:]).contiguous().requires_grad_() for t in same]
    one = [t[0].requires_grad_() for t in same]
    y = onepass.lora_linear(x, weight, *shared, scale=2.0, ends=ends.to(dtype))
    z = onepass.lora_linear(x, weight, *one, scale=2.0)
    assert relative(y, z) < 4e-3
    for mine, whole in zip(torch.autograd.grad(y, shared, dy), torch.autograd.grad(z, one, dy), strict=True):
        assert relative(mine.float().sum(0), whole) < 6e-3


def test_a_diverged_adapter_is_its_documents_own_matter():
    x, weight, a, b, dy, ends = parts("four", dtype=BF16)
    clean = onepass.lora_linear(x, weight, a, b, ends=ends)
    of_clean = torch.autograd.grad(clean, (x, a, b), dy)
    with torch.no_grad():
        a[1], b[1] = torch.nan, torch.inf
    y = onepass.lora_linear(x, weight, a, b, ends=ends)
    dx, da, db = torch.autograd.grad(y, (x, a, b), dy)
    others = [*range(9), *range(31, M)]
    assert torch.equal(y.view(M, N)[others], clean.view(M, N)[others]) and y.view(M, N)[9:31].isnan().all()
    assert torch.equal(dx.view(M, K)[others], of_clean[0].view(M, K)[others])
    for mine, was in ((da, of_clean[1]), (db, of_clean[2])):
        assert torch.equal(mine[[0, 2, 3]], was[[0, 2, 3]])


def test_rows_after_the_last_end_are_the_layers_alone():
    x, weight, a, b, _, ends = parts("empty ones, rows left")
    y = onepass.lora_linear(x, weight, a, b, ends=ends).view(M, N)
    torch.testing.assert_close(y[64:], F.linear(x.view(M, K)[64:], weight))
    assert not torch.allclose(y[:64], F.linear(x.view(M, K)[:64], weight))


def test_main_grad_of_documents_gathers():
    x, weight, a, b, dy, ends = parts("four", dtype=BF16)
    for parameter in (a, b):
        parameter.main_grad = torch.zeros(parameter.shape, device=DEVICE)
    for _ in range(2):
        onepass.lora_linear(x, weight, a, b, scale=0.5, ends=ends).backward(dy)
    *_, da, db = exact(x, weight, a, b, dy, ends, [0.5] * 4)
    assert a.grad is None and relative(a.main_grad, 2 * da) < 4e-3 and relative(b.main_grad, 2 * db) < 4e-3


def test_ends_are_read_by_nobody_in_a_graph_of_a_compiler():
    x, weight, a, b, dy, ends = parts("four")

    def call(x, a, b, ends):
        return onepass.norm_linear(x, None, weight, lora=LoRA(a, b, 0.7, ends=ends))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for given in (ends, torch.tensor([1, 2, 50, 60], dtype=torch.int32, device=DEVICE)):
        y, z = compiled(x, a, b, given), call(x, a, b, given)
        torch.testing.assert_close(y, z)
        for mine, other in zip(torch.autograd.grad(y, (x, a, b), dy), torch.autograd.grad(z, (x, a, b), dy), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_the_weight_in_eight_bits():
    x, weight, a, b, dy, ends = parts("four", dtype=BF16)
    y = onepass.lora_linear(x, weight, a, b, precision="fp8", ends=ends)
    plain = onepass.linear(x, weight, precision="fp8")
    truth = exact(x, weight, a, b, dy, ends, [1.0] * 4)
    added = truth[0] - x.double() @ weight.double().T
    assert relative(y.double() - plain.double(), added) < 2e-2
    for mine, true in zip(torch.autograd.grad(y, (a, b), dy), truth[3:], strict=True):
        assert relative(mine, true) < 6e-3


# ---- wrong arguments ----


@pytest.mark.skipif(DEVICE == "cuda", reason="the host does not read ends there")
@pytest.mark.parametrize(
    ("ends", "words"),
    [((9, 8, 40, 70), "ends must not fall, nor be below 0, but go from 9 to 8"), ((-1, 8, 40, 70), "from 0 to -1"),
     ((9, 31, 40, 71), "ends must be at most 70, the number of rows, but the last is 71")],
)  # fmt: skip
def test_wrong_ends_raise(ends, words):
    x, weight, a, b, *_ = parts("four")
    with pytest.raises(ValueError, match=words):
        onepass.lora_linear(x, weight, a, b, ends=torch.tensor(ends))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"ends": torch.zeros(4)}, TypeError, "lora.ends must be a tensor of torch.int32 or torch.int64, or None, but is one of"),
        ({"ends": [1, 2]}, TypeError, "lora.ends must be a tensor of torch.int32 or torch.int64, or None, but is a list"),
        ({"ends": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, r"lora.ends must have shape \[E\], of 1 to 1024 documents"),
        ({"ends": torch.zeros(3, dtype=torch.int32)}, ValueError, r"lora.a must have shape \(3, 5, 160\), but has \(4, 5, 160\)"),
        ({"ends": None}, ValueError, r"lora.a must have shape \(5, 160\), but has \(4, 5, 160\)"),
        ({"scale": [1.0, 2.0]}, ValueError, "lora.scale must be one number, or one for each of 4 documents, but has 2"),
        ({"scale": [1.0, 2.0, 3.0, float("inf")]}, ValueError, "lora.scale must be finite"),
        ({"scale": torch.ones(3)}, ValueError, r"lora.scale must be floating-point numbers, \(4,\) as ends"),
        ({"scale": torch.ones(4, requires_grad=True)}, ValueError, "which asks for one"),
        ({"ends": None, "a": torch.zeros(5, K), "b": torch.zeros(N, 5), "scale": [1.0]}, TypeError, "scale must be a number"),
    ],
)  # fmt: skip
def test_errors_name_the_part(change, error, words):
    x, weight, a, b, _, ends = parts("four")
    given = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=words):
        onepass.norm_linear(x, None, weight, lora=LoRA(a, b, ends=ends)._replace(**given))


def test_adapters_of_one_call_have_the_same_ends():
    x, weight, a, b, _, ends = parts("four")
    first, last = LoRA(a, b[:, :50], rows=(0, 50), ends=ends), LoRA(a, b[:, 50:], rows=(50, N), ends=ends.clone())
    with pytest.raises(ValueError, match=r"lora\[1\].ends must be lora\[0\].ends itself"):
        onepass.linear(x, weight, lora=[first, last])
    labels = torch.zeros(10, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match="a head has one adapter for all rows, without dropout"):
        onepass.linear_cross_entropy(x[0], weight, labels, lora=LoRA(a[:1], b[:1], ends=ends[:1]))


def test_explain_counts_documents():
    x, weight, a, b, _, ends = parts("four")
    assert "LoRA of rank 5 for each of 4 documents around them" in str(onepass.explain("lora_linear", x, weight, a, b, ends=ends))
