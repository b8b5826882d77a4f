"""Eight-bit operands: scales and rounding by PyTorch, kernels that equal them bit for bit, and products of codes."""

import math
from itertools import product

import pytest
import torch

from onepass.kernels import cublaslt, fp8_cast
from onepass.kernels import fp8 as device_functions
from onepass.kernels.cublaslt import add_scaled_product, scaled_product
from onepass.kernels.language import triton
from onepass.runtime import fp8
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target
from onepass.testing.mutants import mutate
from onepass.testing.poison import poisoned, unchanged

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")
formats = pytest.mark.parametrize("dtype", (E4M3, E5M2), ids=("e4m3", "e5m2"))
SHAPES = ((37, 203), (1, 1), (64, 64), (65, 16), (3, 5, 130), (0, 8), (4, 0), (2, 9000))


def every_bf16():
    return torch.arange(65536, device=DEVICE, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)


def bits(codes):
    """The codes as numbers, with one NaN."""
    return torch.where(codes.float().isnan(), 0x7F, codes.view(torch.uint8).int())


def at(scale):
    return torch.tensor(scale, device=DEVICE)


# ---- the formula ----


@formats
def test_rounding_is_pytorchs_cast_where_that_is_finite(dtype):
    x = every_bf16().float()
    held = x.abs() <= fp8.largest(dtype)
    assert bits(fp8.quantise(x, at(1.0), dtype))[held].equal(bits(x.to(dtype))[held])
    doubled = fp8.quantise(x, at(0.5), dtype)
    assert bits(doubled)[held].equal(bits((x * 0.5).to(dtype))[held])


@formats
def test_what_is_past_the_largest_saturates_and_no_nan_becomes_a_number(dtype):
    most = fp8.largest(dtype)
    x = torch.tensor([most, most * 1.5, -1e38, math.inf, -math.inf, math.nan, 0.0, -0.0], device=DEVICE)
    codes = fp8.quantise(x, at(1.0), dtype)
    infinity = math.inf if dtype is E5M2 else math.nan
    torch.testing.assert_close(
        codes.float(), torch.tensor([most, most, -most, infinity, -infinity, math.nan, 0.0, -0.0], device=DEVICE), equal_nan=True
    )
    assert codes.view(torch.uint8)[-1] == 0x80
    assert fp8.quantise(at(3e38), at(2.0**100), dtype).float() == most  # the product is past fp32's largest, x is not
    assert fp8.saturated(x, at(1.0), dtype) == 2


@formats
@pytest.mark.parametrize("margin", (0, 2))
def test_a_scale_is_the_largest_power_of_two_that_fits(dtype, margin):
    amax = torch.tensor([1.75, 1.7500001, 1.0, 448.0, 57344.0, 1e-20, 3e38], device=DEVICE)
    scale, most = fp8.scale_for(amax, dtype, margin), fp8.largest(dtype) / 2**margin
    assert scale.log2().frac().abs().sum() == 0
    assert (amax.double() * scale <= most).all() and (amax.double() * scale * 2 > most).all()
    assert fp8.scale_for(torch.tensor([0.0, 1e-45]), dtype).tolist() == [1.0, 2.0**126]


def test_amax_leaves_out_what_is_not_finite():
    x = torch.tensor([[1.0, -3.0], [math.inf, 2.0], [math.nan, -math.inf]])
    assert fp8.finite_amax(x) == 3
    assert fp8.finite_amax(x, -1).flatten().tolist() == [3, 2, 0]
    assert fp8.finite_amax(x[:0]) == 0 and fp8.finite_amax(x[:, :0], -1).shape == (3, 1)


# ---- kernels ----


def by_rows(x, dtype, module=fp8_cast):
    with poisoned(), unchanged(x=x):
        codes, inverse = module.cast_rows(x, dtype)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    scale = fp8.scale_for(fp8.finite_amax(rows, -1), dtype)
    assert codes.shape == x.shape and codes.dtype == dtype
    exact = fp8.quantise(rows, scale, dtype)
    return bits(codes).view(exact.shape).equal(bits(exact)) and inverse.equal(1 / scale)


def by_tensor(x, dtype, scale, module=fp8_cast):
    amax, past, _ = device_functions.new_notes(DEVICE)
    with poisoned(), unchanged(x=x):
        codes, transposed = module.cast_tensor(x, FP8Target(dtype, scale, amax, past), transposed=True)
    exact = fp8.quantise(x, scale, dtype)
    rows = exact.view(math.prod(x.shape[:-1]), x.shape[-1])
    assert transposed.shape == (x.shape[-1], -(-len(rows) // 16) * 16) and transposed.is_contiguous()
    return (
        bits(codes).equal(bits(exact))
        and bits(transposed[:, : len(rows)]).equal(bits(rows.t()))
        and not transposed[:, len(rows) :].view(torch.uint8).any()
        and amax.view(torch.float32).max().equal(fp8.finite_amax(x))
        and past.sum().equal(fp8.saturated(x, scale, dtype).long())
    )


@needs_triton
@formats
def test_kernels_round_every_16_bit_number_as_the_formula(dtype):
    x = every_bf16()
    for scale in (1.0, 2.0**-20, 2.0**90):
        assert by_tensor(x, dtype, at(scale))
    assert by_rows(x, dtype) and by_rows(x[:, :96], dtype)


@needs_triton
@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_kernels_are_the_formula(shape, kind, dtype):
    x = torch.randn(shape, device=DEVICE).mul(3).to(kind)
    assert by_rows(x, dtype)
    assert by_tensor(x, dtype, at(2.0**7))


@needs_triton
@pytest.mark.parametrize("layout", ("rows apart", "transposed", "unaligned", "expanded"))
def test_wherever_it_lies(layout):
    x = torch.randn(37, 72, device=DEVICE, dtype=torch.bfloat16)
    lies = {
        "rows apart": lambda: x.new_full((37, 75), 7)[:, 1:-2].copy_(x),
        "transposed": lambda: x.t().contiguous().t(),
        "unaligned": lambda: x.new_full((x.numel() + 1,), 7)[1:].view(x.shape).copy_(x),
        "expanded": lambda: x[:1].expand(37, 72),
    }[layout]()
    assert by_rows(lies, E4M3) and by_tensor(lies, E4M3, at(16.0))


@needs_triton
def test_one_of_the_two_is_written_without_the_other():
    x = torch.randn(20, 48, device=DEVICE)
    both = fp8_cast.cast_tensor(x, FP8Target(E4M3, at(4.0)), transposed=True)
    plain, none = fp8_cast.cast_tensor(x, FP8Target(E4M3, at(4.0)))
    assert none is None and bits(plain).equal(bits(both[0]))
    none, transposed = fp8_cast.cast_tensor(x, FP8Target(E4M3, at(4.0)), codes=False, transposed=True)
    assert none is None and bits(transposed).equal(bits(both[1]))


COLUMN_SHAPES = ((16, 1), (64, 64), (3, 48, 203), (2, 2, 1040, 72), (5, 600, 136))


def by_columns(x, module=fp8_cast):
    with poisoned(), unchanged(x=x):
        codes, inverse = module.cast_columns(x)
    exact, expected = fp8.quantise_rows(x.mT, E4M3)
    return bits(codes).equal(bits(exact)) and inverse.equal(expected)


@needs_triton
@pytest.mark.parametrize("shape", COLUMN_SHAPES, ids=str)
@pytest.mark.parametrize("kind", (torch.bfloat16, torch.float32), ids=str)
def test_columns_are_the_rows_of_the_transpose(shape, kind):
    x = torch.randn(shape, device=DEVICE).mul(3).to(kind)
    x[..., 5, 0], x[..., 7, -1] = math.inf, math.nan
    assert by_columns(x)
    assert by_columns(x.mT.contiguous().mT) and by_columns(x[..., :9, :]) and by_columns(x[..., :0])


COLUMN_MUTANTS = {
    "another matrix's scales": ("_columns_kernel", "tl.load(amax_ptr + matrix * K", "tl.load(amax_ptr + 0 * K"),
    "rows of the next matrix": ("_column_amax_kernel", "(rows < N)[:, None]", "(rows < N + 1)[:, None]"),
    "only the first rows count": ("_column_amax_kernel", "* STEPS + step", "* STEPS"),
    "another matrix's place": ("_columns_kernel", "_ptr + matrix * K * (N // QUAD)", "_ptr + matrix * (N // QUAD)"),
}


@needs_triton
@pytest.mark.parametrize("name", COLUMN_MUTANTS)
def test_a_mutant_of_the_columns_is_found(name):
    mutant = mutate(fp8_cast, *COLUMN_MUTANTS[name])
    x = torch.randn(3, 1040, 72, device=DEVICE) * torch.tensor([1.0, 64, 4], device=DEVICE)[:, None, None]
    x[:, 700:].mul_(9)
    try:
        right = by_columns(x, mutant)
    except AssertionError:
        right = False
    assert not right


MUTANTS = {
    "the scale's threshold": (device_functions, "exponents_below", "0x1FFFFF", "0x2FFFFF"),
    "ties away from zero": (device_functions, "operand_codes", "(shift - 1)) - 1)", "(shift - 1)))"),
    "no subnormal numbers": (device_functions, "operand_codes", "held < normal_from, small", "held < normal_from, 0"),
    "an infinity saturates": (device_functions, "operand_codes", 'float("inf"), infinite, code)', 'float("inf"), code, code)'),
    "NaN is a number": (device_functions, "operand_codes", "tl.where(x == x, code, 0x7F)", "code"),
    "rows past the last": (device_functions, "store_transposed", "(quads < long)[None, :]", "(quads * 4 < M)[None, :]"),
    "an infinity is the largest": (
        device_functions,
        "finite_sizes",
        'tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)',
        "tl.abs(x)",
    ),
    "what saturates isn't counted": (device_functions, "note_tiles", "slot, past,", "slot, past * 0,"),
    "a long row isn't read again": (fp8_cast, "_rows_kernel", "H > BLOCK_H", "H < BLOCK_H"),
}


@needs_triton
@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU rounds by an instruction of its own")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    module, function, old, new = MUTANTS[name]
    mutant = mutate(module, function, old, new, entry=fp8_cast)
    given = every_bf16()[:, :200], torch.randn(37, 203), torch.randn(2, 9000)
    given[1][3, 5] = math.inf
    try:
        right = all(by_rows(x, to, mutant) and by_tensor(x, to, at(1.0), mutant) for x in given for to in (E4M3, E5M2))
    except AssertionError:
        right = False
    assert not right


# ---- products ----


def operands(M, N, K, dtype, by_row):
    """Codes of a [M, K] and b [N, K], the inverses of their scales, and the product of what they stand for in fp64."""
    a, b = (torch.randn(size, K, device=DEVICE) for size in (M, N))
    if by_row:
        (a, ai), (b, bi) = fp8_cast.cast_rows(a, dtype), fp8_cast.cast_rows(b, E4M3)
    else:
        ai, bi = at(2.0**-5), at(2.0**-6)
        (a, _), (b, _) = fp8_cast.cast_tensor(a, FP8Target(dtype, 1 / ai)), fp8_cast.cast_tensor(b, FP8Target(E4M3, 1 / bi))
    return (a, ai, b, bi), fp8.dequantise(a, ai, torch.float64) @ fp8.dequantise(b, bi, torch.float64).t()


def error(found, exact):
    """The relative error, over what the type allows. Tensor cores keep sums of eight-bit products in fewer bits than fp32."""
    exactly = 3e-4 if found.is_cuda else 2e-6
    return ((found.double() - exact).norm() / exact.norm()).item() / max(torch.finfo(found.dtype).eps, exactly)


PRODUCTS = product(((32, 48, 64), (37, 16, 16), (1, 64, 256)), (torch.bfloat16, torch.float16, torch.float32), (False, True))
LARGE = (300, 512, 2048)


@formats
@pytest.mark.parametrize(
    ("shape", "out", "by_row"), [*PRODUCTS, (LARGE, torch.bfloat16, True), (LARGE, torch.float32, False)], ids=str
)
def test_a_product_is_that_of_the_rounded_operands(shape, out, by_row, dtype):
    given, exact = operands(*shape, dtype, by_row)
    for fast in (False, out is not torch.float32):
        assert error(scaled_product(*given, out, fast=fast), exact) < 1


@formats
@pytest.mark.parametrize("by_row", (False, True), ids=("one scale", "by row"))
@pytest.mark.parametrize("out", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("first", (0, 3))
def test_a_product_is_written_and_added_where_it_belongs(first, out, by_row, dtype):
    """Between rows that have gaps, and where cuBLAS can't write: not at multiples of 16 bytes."""
    given, exact = operands(37, 48, 64, dtype, by_row)
    wide = torch.randn(40, 64 + first, device=DEVICE).to(out)
    for add in (False, True):
        base = wide.clone()
        into = base[2:39, first : first + 48]
        expected = exact + into.double() if add else exact
        assert scaled_product(*given, out, out=into, add=add) is into
        assert error(into, expected) < 1
        into.copy_(wide[2:39, first : first + 48])
        assert base.equal(wide)


def test_where_cublas_can_write():
    whole = torch.zeros(8, 32)
    for out in (whole, whole[2:, 4:], whole.to(torch.bfloat16)[:, 8:]):
        assert cublaslt._is_writable(out)
    for out in (whole[:, 1:], whole[:, ::2], whole.mT, torch.zeros(8, 31), torch.zeros(8 * 32 + 1)[1:].view(8, 32)):
        assert not cublaslt._is_writable(out)


def test_a_sum_is_rounded_once():
    """Rounded by itself, the product would be half of the last place of 1, and be rounded away."""
    a = torch.zeros(16, 16, device=DEVICE)
    a[:, 0], a[:, 1] = 1.0, 2.0**-5
    given = a.to(E4M3), at(2.0**-4), a.to(E4M3), at(2.0**-4)
    into = torch.ones(16, 16, device=DEVICE, dtype=torch.bfloat16)
    scaled_product(*given, torch.bfloat16, out=into, add=True)  # 1 + (1 + 2^-10) / 256
    assert into.eq(1 + 2.0**-7).all()


@pytest.mark.parametrize("out", (torch.bfloat16, torch.float32), ids=str)
def test_a_product_is_added_without_a_pass(out):
    given, exact = operands(48, 64, 96, E4M3, False)
    into = torch.randn(48, 64, device=DEVICE).to(out)
    expected = exact + into.double()
    assert add_scaled_product(into, *given) is into
    assert error(into, expected) < 2  # of the rounded product, and of the sum


def test_columns_apart_are_written_too():
    given, exact = operands(32, 48, 64, E4M3, False)
    into = torch.zeros(48, 32, device=DEVICE).t()
    scaled_product(*given, torch.float32, out=into, add=True)
    assert error(into, exact) < 1


@formats
def test_products_of_rounded_tensors_are_near(dtype):
    a, b = torch.randn(32, 64, device=DEVICE), torch.randn(48, 64, device=DEVICE)
    (a8, a_inverse), (b8, b_inverse) = fp8_cast.cast_rows(a, E4M3), fp8_cast.cast_rows(b, dtype)
    y, exact = scaled_product(a8, a_inverse, b8, b_inverse, torch.bfloat16), a.double() @ b.double().t()
    assert 20 * math.log10(exact.norm() / (y.double() - exact).norm()) > 22


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("by_row", (False, True), ids=("one scale", "by row"))
@pytest.mark.parametrize("shape", ((48, 64, 128), (4096, 6144, 2048), (2048, 1024, 16384), (137, 2048, 8192)), ids=str)
def test_on_a_gpu_it_has_pytorchs_bits(shape, by_row):
    """Whichever algorithm is chosen, at any address that PyTorch takes."""
    for dtype, fast in ((E4M3, True), (E5M2, False)):
        (a, ai, b, bi), _ = operands(*shape, dtype, by_row)
        expected = torch._scaled_mm(
            a, b.t(), scale_a=ai, scale_b=bi.t() if by_row else bi, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        near = torch.empty(a.numel() + 16, device=DEVICE, dtype=torch.uint8)[16:].view(a.shape).view(dtype)  # multiple of 16
        for given in (a, near.copy_(a)):
            assert scaled_product(given, ai, b, bi, torch.bfloat16, fast=fast).equal(expected)
        part = slice(18, 36)  # whose scales cuBLAS can't read where they are
        found = scaled_product(a[part], ai[part] if by_row else ai, b, bi, torch.bfloat16, fast=fast)
        assert found.equal(scaled_product(a[part].clone(), ai[part].clone() if by_row else ai, b, bi, torch.bfloat16, fast=fast))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_on_a_gpu_threads_share_plans():
    from concurrent.futures import ThreadPoolExecutor

    given = [operands(64, 64, 64, E4M3, False) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()

    def work(i):
        (a, ai, b, bi), exact = given[i]
        with torch.cuda.stream(streams[i]):
            return max(error(scaled_product(a, ai * 2**i, b, bi, torch.float32), exact * 2**i) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) < 1
