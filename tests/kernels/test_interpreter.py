"""The interpreter, repaired: what it got wrong, each with a kernel that shows it."""

import contextlib

import pytest
import torch

triton = pytest.importorskip("triton")
interpreter_bounds = pytest.importorskip("onepass.testing.interpreter_bounds")
tl = pytest.importorskip("triton.language")
if torch.cuda.is_available():
    pytest.skip("a GPU runs the real kernels", allow_module_level=True)


@triton.jit
def _round_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.float32))


@triton.jit
def _cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.bfloat16).to(tl.float32))


@triton.jit
def _add_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i) + tl.load(x_ptr + i))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def _double(x):
    return x + x


@triton.jit
def _range_kernel(x_ptr, y_ptr, times, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    for _ in range(times):
        x = _double(x)
    tl.store(y_ptr + i, x)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_round_to_nearest_even(given, to):
    x = torch.cat(
        [
            torch.randn(56),
            torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, float("inf"), -float("inf"), float("nan"), 1e-40, 3.4e38, -0.0]),
        ]
    )
    x = x.to(given)
    y = torch.empty(64, dtype=to)
    _round_kernel[(1,)](x, y, 64)
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y.nan_to_num(0.5), x.to(to).nan_to_num(0.5))


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.int32, torch.bfloat16, torch.uint8])
def test_casts_to_bf16_convert_values_not_bits(given):
    x = torch.arange(64).to(given) * 3
    y = torch.empty(64)
    _cast_kernel[(1,)](x, y, 64)
    assert torch.equal(y, x.bfloat16().float())


def test_arithmetic_on_bf16_raises_rather_than_add_bit_patterns():
    with pytest.raises(triton.runtime.errors.InterpreterError, match="go to fp32 right after the load"):
        _add_kernel[(1,)](torch.ones(8).bfloat16(), torch.ones(8), 8)


def test_dot_of_bf16():
    a, b, c = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16(), torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, c, 16)
    torch.testing.assert_close(c, a.float() @ b.float())


def test_a_range_given_at_run_time():
    x, y = torch.ones(8), torch.empty(8)
    for times in (0, 1, 5):
        _range_kernel[(1,)](x, y, times, 8)
        assert torch.equal(y, x * 2**times)


def test_the_language_is_itself_again_after_a_launch():
    before = tl.load, tl.range, tl.core.load, tl.tensor.__dict__.get("__index__")
    _range_kernel[(1,)](torch.ones(8), torch.empty(8), 1, 8)
    with pytest.raises(triton.runtime.errors.InterpreterError):
        _add_kernel[(1,)](torch.ones(8).bfloat16(), torch.ones(8), 8)
    assert before == (tl.load, tl.range, tl.core.load, tl.tensor.__dict__.get("__index__"))
    y = torch.empty(8)
    _range_kernel[(1,)](torch.ones(8), y, 3, 8)
    assert torch.equal(y, torch.full((8,), 8.0))


def test_overflow_is_no_warning(recwarn):
    y = torch.empty(8, dtype=torch.float16)
    _round_kernel[(1,)](torch.full((8,), 1e30), y, 8)
    assert y.isinf().all() and not recwarn.list


def test_types_are_made_once_for_each_element_and_shape():
    made = tl.block_type(tl.float32, [8, 16])
    assert tl.block_type(tl.float32, (tl.constexpr(8), 16)) is made and tl.block_type(tl.float32, made.shape) is made
    others = tl.block_type(tl.int32, [8, 16]), tl.block_type(tl.float32, [16, 8]), tl.block_type(tl.float32, [8])
    assert all(other is not made and other != made for other in others)
    assert [other.numel for other in others] == [128, 128, 8]
    pointers = [tl.block_type(tl.pointer_type(to), [8]) for to in (tl.float32, tl.int32)]
    assert [pointer.scalar.element_ty for pointer in pointers] == [tl.float32, tl.int32]


@pytest.mark.parametrize(("sizes", "error"), [([8.0, 16], TypeError), ([3], ValueError), ([], TypeError)])
def test_no_sizes_raise_though_equal_ones_were_seen(sizes, error):
    tl.block_type(tl.float32, [8, 16])
    with pytest.raises(error):
        tl.block_type(tl.float32, sizes)


def test_shapes_compare_as_their_numbers_do():
    shape = tl.block_type(tl.float32, [8, 16]).shape
    for same in ([8, 16], (8, 16), tl.tuple([8, 16]), [tl.constexpr(8), 16]):
        assert shape == same
    for other in ([16, 8], [8], [8, 16, 1], tl.tuple([8]), [tl.constexpr(16), 8]):
        assert shape != other


@triton.jit
def _four_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x + x * 3)


def test_integers_wrap_as_they_do_on_a_gpu():
    x, y = torch.tensor([2**31 - 1, -(2**31), 2**30, 5], dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    _four_kernel[(1,)](x, y, 4)
    assert torch.equal(y, x * 4)


# ---- operators that are numpy's from the second time on ----


@triton.jit
def _operators_kernel(a_ptr, b_ptr, y_ptr, given, NUMBER: tl.constexpr, INTEGERS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b, at = tl.load(a_ptr + i), tl.load(b_ptr + i), y_ptr + i
    for found in (a + b, a - b, a * b, a + NUMBER, NUMBER + a, a * NUMBER, NUMBER * a, a - NUMBER, a + given, a * given):
        tl.store(at, found.to(tl.float64))
        at += N
    for found in (a < b, a <= b, a > b, a >= b, a == b, a != b, a < NUMBER, a >= NUMBER, a == given, (a < b) & (a > given)):
        tl.store(at, found.to(tl.float64))
        at += N
    tl.store(at, tl.sum((a[:, None] * b[None, :]).to(tl.float64), 1))
    at += N
    if INTEGERS:
        for found in (a & b, a | b, a ^ b, a & NUMBER, a >> 3, a << 2, a // (b | 1), a % (b | 1), a // 7, a % 7):
            tl.store(at, found.to(tl.float64))
            at += N


_SCALARS = (tl.int1, tl.int32, tl.int64, tl.uint32, tl.uint64, tl.float16, tl.float32, tl.float64)
_PAIRS = [
    (torch.float32, torch.float32, 0.1), (torch.float32, torch.float16, 3), (torch.float16, torch.float32, -2.5),
    (torch.int32, torch.int32, -7), (torch.int32, torch.int64, 5), (torch.int64, torch.int32, -1),
    (torch.int32, torch.float32, 2), (torch.uint32, torch.uint32, 2654435769), (torch.uint32, torch.uint32, 3),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "number"), _PAIRS, ids=str)
def test_operators_are_the_languages(one, other, number, monkeypatch):
    from onepass.testing import interpreter_types

    def numbers(dtype, seed):
        wide = torch.randn(16, generator=torch.Generator().manual_seed(seed)) * (1 if dtype.is_floating_point else 1e9)
        return wide.to(torch.int64).to(dtype) if dtype is torch.uint32 else wide.to(dtype)

    def run(seed):
        y = torch.full((40, 16), -1.0, dtype=torch.float64)
        integers = not (one.is_floating_point or other.is_floating_point)
        _operators_kernel[(1,)](numbers(one, seed), numbers(other, seed + 1), y, 3, number, integers, 16)
        return y

    def forget():
        interpreter_types._learnt.clear()
        for scalar in _SCALARS:
            vars(scalar).pop(interpreter_types._KEPT, None)

    forget()
    run(0)  # learns
    learnt = run(2)
    forget()
    monkeypatch.setattr(interpreter_types, "_compute_of", lambda *_: None)
    assert torch.equal(learnt, run(2)) and (learnt[:21] != -1).any(1).all()
    forget()


@triton.jit
def _calls_kernel(x_ptr, y_ptr, rows, A: tl.constexpr, B: tl.constexpr, FLOATS: tl.constexpr):
    """Loads with a mask of the pointers' shape, of one dimension and of none; choices; stores that convert."""
    i, j = tl.arange(0, A)[:, None], tl.arange(0, B)[None, :]
    at, inside = i * B + j, i < rows
    whole = tl.load(x_ptr + at)
    some = tl.load(x_ptr + at, mask=inside, other=0)
    last = tl.load(x_ptr + at, mask=inside & (j > 1), other=7)
    one = tl.load(x_ptr + rows)
    if FLOATS:
        whole, some, last, one = whole.to(tl.float32), some.to(tl.float32), last.to(tl.float32), one.to(tl.float32)
    size: tl.constexpr = A * B
    tl.store(y_ptr + at, some)
    tl.store(y_ptr + size + at, last, mask=j < 3)
    tl.store(y_ptr + 2 * size + at, tl.where(inside, whole, last))
    tl.store(y_ptr + 3 * size + at, tl.where(whole > 0, whole, 0))
    tl.store(y_ptr + 4 * size + at, tl.where(inside & (j != 2), -3, whole))
    tl.store(y_ptr + 5 * size + at, tl.where(rows > 3, one, whole), mask=inside)


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16, torch.int32], ids=str)
def test_loads_stores_and_choices_are_the_languages(given, to):
    """The first launch learns. In later ones numbers, rows and NaN are others."""
    floats = given.is_floating_point
    i, j = torch.arange(8)[:, None], torch.arange(4)[None, :]
    for seed, rows in ((0, 5), (1, 2), (2, 7)):
        x = (torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) * 9).to(given)
        if floats and to.is_floating_point and seed:
            x[seed, 1:3] = torch.tensor([float("nan"), float("inf")])
        y = torch.full((6, 8, 4), 99, dtype=to)
        _calls_kernel[(1,)](x, y, rows, 8, 4, floats)
        wide, nothing = x.float() if floats else x, torch.tensor(99).to(to)
        last = torch.where((i < rows) & (j > 1), wide, 7)
        expected = [
            torch.where(i < rows, wide, 0), last, torch.where(i < rows, wide, last), torch.where(wide > 0, wide, 0),
            torch.where((i < rows) & (j != 2), -3, wide), (wide.flatten()[rows] if rows > 3 else wide).expand(8, 4),
        ]  # fmt: skip
        written = [i < 8, j < 3, i < 8, i < 8, i < 8, i < rows]
        for mine, right, where in zip(y, expected, written, strict=True):
            torch.testing.assert_close(mine, torch.where(where, right.to(to), nothing), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _choice_kernel(x_ptr, y_ptr, number: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.where(i < 2, tl.load(x_ptr + i), number))


def test_a_number_beside_bf16_is_no_bit_pattern():
    """0 is one, of which the first launch learns. Other numbers are right or raise: some versions of Triton know none."""
    x, y = torch.randn(4).bfloat16(), torch.empty(4).bfloat16()
    _choice_kernel[(1,)](x, y, 0, 4)
    assert y.tolist() == [*x[:2].tolist(), 0, 0]
    y.fill_(2)
    with contextlib.suppress(triton.runtime.errors.InterpreterError):
        _choice_kernel[(1,)](x, y, 2, 4)
    assert y.tolist()[2:] == [2, 2]


@triton.jit
def _copy_kernel(x_ptr, y_ptr, begin, end, first, N: tl.constexpr):
    i = begin + tl.arange(0, N)
    tl.store(y_ptr + first + i, tl.load(x_ptr + i, mask=i < end, other=0.0), mask=i < end)


@triton.jit
def _count_kernel(x_ptr, at):
    tl.atomic_add(x_ptr + at, 1.0)


@triton.jit
def _mask_kernel(x_ptr, y_ptr, bound, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x, mask=(tl.sum(x, 0) > bound) & (i.to(tl.uint64) < N - 1) & (x == x))


def test_accesses_out_of_bounds_raise():
    x, y = torch.randn(2, 12)[0], torch.zeros(8)  # of one storage x has only the first half, and all of it may be read
    _copy_kernel[(1,)](x, y, 16, 24, -16, 16)
    assert torch.equal(y, x.as_strided((8,), (1,), 16))
    for begin, end, first in ((20, 25, -20), (-1, 7, 1), (0, 9, 0), (0, 8, 1), (0, 8, -1)):
        with pytest.raises(AssertionError, match=r"_copy_kernel (reads|writes) 1 of . values outside of its tensors"):
            _copy_kernel[(1,)](x, y, begin, end, first, 16)
    _count_kernel[(1,)](y, 7)
    for at in (8, -1):
        with pytest.raises(AssertionError, match="_count_kernel updates 1 of 1 values"):
            _count_kernel[(1,)](y, at)


def test_a_tensor_is_reached_by_its_distance():
    from onepass.kernels.layout import distance

    x, y, near = torch.randn(8), torch.zeros(8), torch.zeros(8)
    with pytest.raises(AssertionError, match="writes 8 of 8 values"):
        _copy_kernel[(1,)](x, y, 0, 8, (near.data_ptr() - y.data_ptr()) // 4, 8)
    far = distance(near, y)
    _copy_kernel[(1,)](x, y, 0, 8, far, 8)
    assert torch.equal(near, x) and not y.any()
    del near  # and others may get its memory
    with pytest.raises(AssertionError, match="writes 8 of 8 values"):
        _copy_kernel[(1,)](x, y, 0, 8, far, 8)


def test_masks_of_any_comparison():
    x, y = torch.arange(8.0), torch.zeros(8)
    _mask_kernel[(1,)](x, y, 0.5, 8)
    assert torch.equal(y, torch.cat([x[:7], torch.zeros(1)]))
