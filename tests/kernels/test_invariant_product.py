"""Products under batch_invariant(): a row's bits in parts of any size, what is PyTorch's, and that nothing is left."""

import threading

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass.kernels import invariant_product
from onepass.runtime.batch_invariance import invariant, refuse

PARTS = (1, 2, 3, 7, 16, 63, 64, 65, 100)
TYPES = (torch.float32, torch.bfloat16, torch.float64)


def operands(dtype, M=150, K=96, N=40, seed=0):
    torch.manual_seed(seed)
    return torch.randn(M, K, dtype=dtype), torch.randn(N, K, dtype=dtype), torch.randn(N, dtype=dtype)


def ways(w, bias):
    """Every form of mm and addmm that a CPU has, of rows x and what is added to them."""

    def into(call):
        def run(x, s):
            return call(x, s, torch.empty(len(x), len(w), dtype=x.dtype))

        return run

    return {
        "linear": lambda x, s: F.linear(x, w, bias),
        "linear of three dimensions": lambda x, s: F.linear(x[None], w)[0],
        "linear of one dimension": lambda x, s: torch.stack([F.linear(row, w) for row in x]),
        "mm": lambda x, s: x @ w.t(),
        "mm, weight by rows": lambda x, s: x @ w.t().contiguous(),
        "mm of strided rows": lambda x, s: torch.cat([x, x], 1)[:, : x.shape[1]] @ w.t(),
        "mm.out": into(lambda x, s, out: torch.mm(x, w.t(), out=out)),
        "mm.out of strided rows": into(lambda x, s, out: torch.mm(x, w.t(), out=torch.cat([out, out], 1)[:, : len(w)])),
        "addmm": lambda x, s: torch.addmm(s, x, w.t(), beta=0.5, alpha=2),
        "addmm of a column": lambda x, s: torch.addmm(s[:, :1], x, w.t()),
        "addmm.out": into(lambda x, s, out: torch.addmm(s, x, w.t(), out=out)),
        "addmm_": lambda x, s: s.clone().addmm_(x, w.t(), beta=2),
        "addmm without start": lambda x, s: torch.addmm(s * float("nan"), x, w.t(), beta=0),
    }


@pytest.mark.parametrize("way", ways(None, None))
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_its_bits_in_any_part(dtype, way):
    x, w, bias = operands(dtype)
    start = torch.randn(len(x), len(w), dtype=dtype)
    call = ways(w, bias)[way]
    expected = call(x, start)
    with onepass.batch_invariant():
        whole = call(x, start)
        for size in PARTS:
            at = (len(x) - size) // 2
            assert torch.equal(call(x[at : at + size], start[at : at + size]), whole[at : at + size]), size
        order = torch.randperm(len(x))
        assert torch.equal(call(x[order], start[order]), whole[order])
    torch.testing.assert_close(whole, expected)


def test_the_inputs_gradient_too_and_the_weights_is_pytorchs():
    x, w, _ = operands(torch.float32)
    dy = torch.randn(len(x), len(w))
    weight = w.clone().requires_grad_()

    def gradients(rows):
        given = x[rows].clone().requires_grad_()
        return torch.autograd.grad(F.linear(given, weight), (given, weight), dy[rows])

    expected = gradients(slice(None))
    with onepass.batch_invariant():
        whole, dw = gradients(slice(None))
        for size in PARTS:
            assert torch.equal(gradients(slice(5, 5 + size))[0], whole[5 : 5 + size])
    torch.testing.assert_close(whole, expected[0])
    assert torch.equal(dw, expected[1])


def test_sizes_of_zero_and_wrong_ones_are_pytorchs():
    with onepass.batch_invariant():
        assert torch.equal(torch.ones(2, 0) @ torch.ones(0, 3), torch.zeros(2, 3))
        assert (torch.ones(0, 4) @ torch.ones(4, 3)).shape == (0, 3)
        assert torch.equal(torch.ones(2, 3, dtype=torch.int64) @ torch.ones(3, 2, dtype=torch.int64), torch.full((2, 2), 3))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(torch.ones(2, 3), torch.ones(4, 5))
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(torch.ones(2, 3), torch.ones(3, 5, dtype=torch.float64))
        assert torch.mm(torch.ones(2, 3), torch.ones(3, 5), out=torch.empty(0)).shape == (2, 5)
        assert torch.ones(1, 3) @ torch.ones(3, 1) == 3
        assert torch.equal(F.linear(torch.ones(2, 4, 3), torch.ones(3)), torch.full((2, 4), 3.0))


def test_rows_depend_on_their_number_without_it():
    """Else these tests prove nothing: on a CPU few rows take another path."""
    x, w, _ = operands(torch.float32, K=1000)
    assert any(not torch.equal(x[5 : 5 + size] @ w.t(), (x @ w.t())[5 : 5 + size]) for size in PARTS)


def test_nothing_is_left_behind():
    x, w, _ = operands(torch.float32)
    replaced = invariant_product._replacement
    assert replaced._library is None and not invariant()
    try:
        onepass.batch_invariant()
        assert replaced._library is not None and invariant()
        with onepass.batch_invariant(False):
            assert not invariant()
            x @ w.t()
        with onepass.batch_invariant(), onepass.batch_invariant():
            assert invariant()
        assert invariant()
    finally:
        onepass.batch_invariant(False)
    assert replaced._library is None
    with pytest.raises(ZeroDivisionError), onepass.batch_invariant():
        1 / (replaced._library is None)
    assert replaced._library is None


def test_a_block_is_its_threads_own_and_its_backwards():
    x, w, _ = operands(torch.float32)
    weight, seen = w.clone().requires_grad_(), []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            seen.append(invariant())
            return dy

    with onepass.batch_invariant():
        thread = threading.Thread(target=lambda: seen.append(invariant()))
        thread.start()
        thread.join()
        Look.apply(F.linear(x, weight)).sum().backward()
    assert seen == [False, True]


def test_refusing_names_what_and_why():
    refuse("dropout", "it draws by position")
    with (
        onepass.batch_invariant(),
        pytest.raises(RuntimeError, match=r"dropout can't run under onepass\.batch_invariant\(\): it draws by position"),
    ):
        refuse("dropout", "it draws by position")


def test_compiled_code_runs_it_and_does_not_turn_it_on():
    x, w, bias = operands(torch.float32)
    linear = torch.compile(lambda x: F.linear(x, w, bias), fullgraph=True, backend="aot_eager")
    with onepass.batch_invariant():
        whole = F.linear(x, w, bias)
        for size in (1, 2, 100):
            assert torch.equal(linear(x[:size]), whole[:size])

    def inside(x):
        with onepass.batch_invariant():
            return x + 1

    with pytest.raises(Exception, match="outside of compiled code"):
        torch.compile(inside, fullgraph=True, backend="eager")(x)


def test_undo_takes_the_processes_change_back():
    change = onepass.batch_invariant()
    try:
        assert invariant() and invariant_product._replacement._library is not None
    finally:
        change.undo()
    assert not invariant() and invariant_product._replacement._library is None


# ---- where rows lie ----

LAYOUTS = {  # of a gradient [M, N], from a row's numbers
    "expanded over columns": lambda dy: dy[:, :1].expand(dy.shape),
    "one number": lambda dy: dy[:1, :1].expand(dy.shape),
    "by columns": lambda dy: dy.t().contiguous().t(),
    "every other": lambda dy: torch.stack([dy, dy], 2).flatten(1)[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", (F.linear, onepass.linear), ids=("F.linear", "onepass.linear"))
def test_gradients_that_lie_otherwise(call, layout):
    x, w, _ = operands(torch.float32, K=64, N=1000)
    weight, dy = w.clone().requires_grad_(), torch.randn(len(x), len(w))
    dy = dy[:1].expand(dy.shape).contiguous() if layout == "one number" else dy

    def gradient(rows):
        given = x[rows].clone().requires_grad_()
        return torch.autograd.grad(call(given, weight), given, LAYOUTS[layout](dy[rows]))[0]

    with onepass.batch_invariant():
        whole = gradient(slice(None))
        for size in (1, 2, 3, 5):
            assert torch.equal(gradient(slice(9, 9 + size)), whole[9 : 9 + size])


def normed(x, w):
    return onepass.norm_linear(x, torch.ones(x.shape[1]), w)


@pytest.mark.parametrize("call", (F.linear, onepass.linear, normed))
def test_a_gradient_by_columns_is_not_taken_for_a_weights(call, monkeypatch):
    """A CPU often gives both the same bits, so this looks at what is multiplied."""
    multiplied, product = [], invariant_product._product

    def recorded(raw, keyset, x, b, **options):
        multiplied.append(x.shape)
        return product(raw, keyset, x, b, **options)

    monkeypatch.setattr(invariant_product, "_product", recorded)
    x, w, _ = operands(torch.float32)
    dy = torch.randn(len(w), len(x)).t()
    with onepass.batch_invariant():
        call(x.requires_grad_(), w.requires_grad_()).backward(dy)
    assert multiplied == [x.shape, dy.shape]


@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_that_lie_apart(dtype, biased, frozen):
    """PyTorch calls mm, bmm or addmm for these, by their strides and by who wants gradients."""
    x = operands(dtype, M=60, K=1000)[0].view(5, 12, 1000)
    linear = torch.nn.Linear(1000, 40, bias=biased, dtype=dtype).requires_grad_(not frozen)
    with onepass.batch_invariant(), torch.no_grad():
        whole = linear(x)
        for part in (x[:1, -3:], x[:, -3:], x[1:3, 2:3]):
            at = (part.storage_offset() // 1000 // 12, part.storage_offset() // 1000 % 12)
            expected = whole[at[0] : at[0] + part.shape[0], at[1] : at[1] + part.shape[1]]
            assert torch.equal(linear(part), expected)
            assert biased or torch.equal(part @ linear.weight.t(), expected)


def test_what_pytorch_refuses_it_refuses():
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    wrong = {
        "rows in place": lambda: torch.randn(3, 6).addmm_(a, b),
        "a vector in place": lambda: torch.randn(6).addmm_(a, b),
        "out of another type": lambda: torch.mm(a, b, out=torch.empty(4, 6, dtype=torch.float64)),
        "start of another size": lambda: torch.addmm(torch.randn(3, 6), a, b, beta=0),
        "start of another type": lambda: torch.addmm(torch.randn(6, dtype=torch.float64), a, b),
    }
    for name, call in wrong.items():
        with pytest.raises(RuntimeError) as expected:
            call()
        with onepass.batch_invariant(), pytest.raises(RuntimeError) as found:
            call()
        assert str(found.value) == str(expected.value), name


def test_explain_says_by_what():
    x, w, _ = operands(torch.float32)
    assert "rows " not in str(onepass.explain(onepass.linear, x, w))
    with onepass.batch_invariant():
        assert "  rows   the same bits in any batch: products in blocks of 64 rows" in str(onepass.explain(onepass.linear, x, w))
