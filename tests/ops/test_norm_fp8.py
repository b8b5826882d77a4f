"""Norms that write eight-bit operands: codes are those of the fp32 formula, and the transposed ones equal them bit for bit."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from ops.calls import needs_triton

from onepass.kernels import fp8 as device_functions
from onepass.kernels.fp8 import new_notes
from onepass.ops.norm import forward as norm_forward
from onepass.ops.norm import fp8 as norm_fp8
from onepass.ops.norm.formula import NormOptions, add_rounded, norm_formula
from onepass.runtime import fp8
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target
from onepass.testing.mutants import mutate
from onepass.testing.poison import poisoned, unchanged

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
formats = pytest.mark.parametrize("dtype", (E4M3, E5M2), ids=("e4m3", "e5m2"))
kinds = pytest.mark.parametrize("layer", (False, True), ids=("rms", "layer"))


@pytest.fixture(autouse=True)
def _wide_tiles_of_wide_rows(request, monkeypatch):
    """The interpreter takes as long for a tile of any size, and 5008 columns have 79 of those that turn codes."""
    given = getattr(request.node, "callspec", None)
    width = given and given.params.get("width", given.params.get("shape", (0,))[-1])
    if DEVICE.type == "cpu" and width and width > 1000:
        monkeypatch.setattr(norm_fp8, "TILE_H", 1024)
        norm_fp8._transposed_plan.cache_clear()
    yield
    norm_fp8._transposed_plan.cache_clear()


class Given(NamedTuple):
    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    options: NormOptions


def draw(layer, *shape, kind=BF16, residual=False, weight=True, centered=False, mean=0.0):
    width = shape[-1]
    return Given(
        torch.randn(shape, device=DEVICE).add(mean).to(kind),
        torch.randn(shape, device=DEVICE).to(kind) if residual else None,
        torch.randn(width, device=DEVICE).to(kind) if weight else None,
        torch.randn(width, device=DEVICE).to(kind) if layer and weight else None,
        NormOptions(layer, 1e-5, centered),
    )


def at(scale):
    return torch.tensor(scale, device=DEVICE)


def noting(dtype, scale):
    return FP8Target(dtype, at(scale), *new_notes(DEVICE)[:2])


def normed(given, wide=torch.float32):
    """y by the formula, as rows."""
    x, residual, weight, bias, (layer, eps, centered) = given
    h = x if residual is None else add_rounded(x, residual, x.dtype).to(x.dtype)
    weight, bias = (None if vector is None else vector.to(wide) for vector in (weight, bias))
    y = norm_formula(h.to(wide), weight, bias, layer=layer, eps=eps, zero_centered_gamma=centered)
    return y.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def bits(codes):
    """The codes as numbers, with one NaN."""
    return torch.where(codes.float().isnan(), 0x7F, codes.view(torch.uint8).int())


def steps(codes):
    """The codes as whole numbers in the order of their values, neighbours one apart."""
    whole = codes.view(torch.uint8).int()
    return torch.where(whole >= 0x80, 0x80 - whole, whole)


def near(codes, exact):
    """Whether codes are the exact ones but for a few per thousand, one step away, none of which is NaN or infinite."""
    a, b = codes.float(), exact.float()
    finite = a.isfinite() & b.isfinite()
    away = (steps(codes) - steps(exact)).abs()[finite]
    few = not (away > 1).any() and away.count_nonzero() <= 0.004 * away.numel() + 1
    return few and a.isnan().equal(b.isnan()) and a[~finite].nan_to_num().equal(b[~finite].nan_to_num())


# ---- what must hold ----


def judge_rows(given, dtype, module=norm_fp8):
    x, residual = given[:2]
    with poisoned(), unchanged(x=x):
        codes, inverse, h, stats = module.norm_codes(*given, FP8Target(dtype), False)
    y = normed(given)
    scale = fp8.scale_for(fp8.finite_amax(y, -1), dtype)
    assert codes.shape == x.shape and codes.dtype == dtype and codes.is_contiguous() and stats is None
    return (
        inverse.equal(1 / scale)
        and near(codes.view(y.shape), fp8.quantise(y, scale, dtype))
        and (h is None if residual is None else h.equal(add_rounded(x, residual, x.dtype).to(x.dtype)))
    )


def judge_tensor(given, dtype, scale, module=norm_fp8):
    x, residual, weight, bias, options = given
    target = noting(dtype, scale)
    with poisoned(), unchanged(x=x):
        codes, inverse, h, stats = module.norm_codes(*given, target, True)
    with poisoned(), unchanged(x=x):
        transposed = module.norm_codes_transposed(x if h is None else h, stats, weight, bias, options, target)
    y = normed(given)
    rows, past = codes.view(y.shape), fp8.saturated(y, target.scale, dtype).item()
    assert inverse is None and transposed.shape == (y.shape[1], -(-len(y) // 16) * 16) and transposed.is_contiguous()
    amax = target.amax.view(torch.float32).max()
    return (
        near(rows, fp8.quantise(y, target.scale, dtype))
        and bits(transposed[:, : len(y)]).equal(bits(rows.t()))
        and not transposed[:, len(y) :].view(torch.uint8).any()
        and torch.allclose(amax, fp8.finite_amax(y), rtol=1e-5)
        and abs(target.saturated.sum().item() - past) <= 0.002 * past
        and (h is None if residual is None else h.equal(add_rounded(x, residual, x.dtype).to(x.dtype)))
    )


def judge(given, dtype, module=norm_fp8):
    """By row, by a scale that leaves nothing past the largest number, and by one that leaves much."""
    most = fp8.largest(dtype)
    scales = 2.0 ** math.floor(math.log2(most / 16)), 2.0 ** math.floor(math.log2(most * 2))
    return judge_rows(given, dtype, module) and all(judge_tensor(given, dtype, scale, module) for scale in scales)


OPTIONS = ({}, {"residual": True}, {"weight": False}, {"centered": True}, {"residual": True, "mean": 3.0})
SHAPES = ((37, 64), (1, 1), (3, 5, 33), (9, 1000), (3, 2048), (3, 5008), (2, 3001), (2, 12304), (2, 20488))


def cases():
    """All options and both formats at one width of each kernel, all types at each width that is not wide."""
    turns, formats = itertools.cycle(OPTIONS), itertools.cycle((E4M3, E5M2))
    for shape in SHAPES:
        for kind in (BF16, FP16, FP32) if shape[-1] <= 5008 else (BF16, FP32):
            yield shape, kind, next(turns), next(formats)
    for shape in ((37, 64), (3, 5008)):
        for options in OPTIONS:
            for dtype in (E4M3, E5M2):
                yield shape, BF16, options, dtype
    yield (1, 32776), FP32, {"residual": True}, E4M3  # in shorter pieces than those of the norm that writes 16 bits


@needs_triton
@kinds
@pytest.mark.parametrize(("shape", "kind", "options", "dtype"), list(cases()), ids=str)
def test_codes_are_the_formulas(shape, kind, options, layer, dtype):
    assert judge(draw(layer, *shape, kind=kind, **options), dtype)


@needs_triton
@kinds
@pytest.mark.parametrize(
    ("layout", "width"),
    [(layout, width) for layout in ("rows apart", "transposed") for width in (64, 5008)]
    + [("unaligned", 64), ("expanded", 5008), ("heads", 64)],
)
def test_wherever_it_lies(layout, width, layer):
    given = draw(layer, 6, width, residual=True)
    x, residual = given.x, given.residual
    lie = {
        "rows apart": lambda x: x.new_full((6, width + 3), 7)[:, 1:-2].copy_(x),
        "transposed": lambda x: x.t().contiguous().t(),
        "unaligned": lambda x: x.new_full((x.numel() + 1,), 7)[1:].view(x.shape).copy_(x),
        "expanded": lambda x: x[:1].expand(6, width),
        "heads": lambda x: x.new_full((3, 1, 2, width + 8), 7)[..., 8:].copy_(x.view(3, 1, 2, width)),
    }[layout]
    assert judge(given._replace(x=lie(x), residual=lie(residual)), E4M3)
    assert judge(given._replace(x=lie(x), residual=None), E4M3)
    options, target = given.options, noting(E4M3, 16.0)
    lies = lie(x)
    _, _, _, stats = norm_fp8.norm_codes(lies, None, given.weight, given.bias, options, target, True)
    plain = norm_fp8.norm_codes_transposed(lies.contiguous(), stats, given.weight, given.bias, options, target)
    transposed = norm_fp8.norm_codes_transposed(lies, stats, given.weight, given.bias, options, target)
    assert bits(transposed).equal(bits(plain))


@needs_triton
@formats
@kinds
@pytest.mark.parametrize("width", (64, 5008))
def test_no_nan_becomes_a_number(width, layer, dtype):
    given = draw(layer, 7, width, kind=FP32)
    given.x[1, 5], given.x[2, width - 1], given.x[3, 0] = math.inf, -math.inf, math.nan
    given.weight[9] = math.inf  # y itself is infinite
    assert judge(given, dtype)
    codes, inverse, _, _ = norm_fp8.norm_codes(*given, FP8Target(dtype), False)
    assert codes[3].float().isnan().all() and inverse[3] == 1
    assert (codes[:, 9].float().isinf() if dtype is E5M2 else codes[:, 9].float().isnan())[[0, 4, 5, 6]].all()


@needs_triton
@kinds
@pytest.mark.parametrize("width", (64, 5008))
def test_amax_and_counts_are_added_to(width, layer):
    given, target = draw(layer, 5, width), noting(E4M3, 2.0**8)
    norm_fp8.norm_codes(*given, target, False)
    once, amax = target.saturated.sum().item(), target.amax.clone()
    norm_fp8.norm_codes(*given, target, False)
    assert once > 0 and target.saturated.sum() == 2 * once and target.amax.equal(amax)
    target.amax.fill_(at(1e9).view(torch.int32))
    norm_fp8.norm_codes(*given, target, False)
    assert (target.amax.view(torch.float32) == 1e9).all()
    counts = target.saturated.clone()
    norm_fp8.norm_codes(*given, target._replace(scale=None), False)  # of a row's own scale nothing is noted
    norm_fp8.norm_codes_transposed(given.x, None, *given[2:], target)
    assert target.saturated.equal(counts)
    bare = target._replace(amax=None, saturated=None)
    assert bits(norm_fp8.norm_codes(*given, bare, False)[0]).equal(bits(norm_fp8.norm_codes(*given, target, False)[0]))


@needs_triton
@kinds
@pytest.mark.parametrize("width", (64, 1000, 5008))
def test_without_statistics_rows_are_read_once_more(width, layer):
    given, target = draw(layer, 5, width, residual=True), noting(E4M3, 16.0)
    codes, _, h, stats = norm_fp8.norm_codes(*given, target, True)
    _, _, stats16 = norm_forward.norm_forward(*given[:4], None, given[4], True)
    torch.testing.assert_close(stats, stats16, rtol=1e-6, atol=1e-6)
    assert near(norm_fp8.norm_codes_transposed(h, None, *given[2:], target)[:, :5].t(), codes)


@formats
@kinds
@pytest.mark.parametrize("by_triton", (pytest.param(True, marks=needs_triton), False), ids=("triton", "torch"))
@pytest.mark.parametrize("width", (1000, 5008))
def test_as_accurate_as_eight_bits_allow(width, by_triton, layer, dtype):
    given = draw(layer, 16, width, kind=FP32)._replace(weight=None, bias=None)
    exact = normed(given._replace(x=given.x.double()), torch.float64)
    call = norm_fp8.norm_codes if by_triton else norm_fp8.norm_codes_formula
    rows, inverse, _, _ = call(*given, FP8Target(dtype), False)
    tensor = call(*given, FP8Target(dtype, at(2.0**6)), False)[0]
    for got in (fp8.dequantise(rows, inverse, torch.float64), fp8.dequantise(tensor, at(2.0**-6), torch.float64)):
        ratio = 10 * math.log10((exact.square().sum() / (exact - got).square().sum()).item())
        assert ratio > (28 if dtype is E4M3 else 22)


@pytest.mark.parametrize("by_triton", (pytest.param(True, marks=needs_triton), False), ids=("triton", "torch"))
def test_no_rows(by_triton):
    given, target = draw(True, 0, 64, residual=True), noting(E4M3, 1.0)
    call, turn = norm_fp8.norm_codes, norm_fp8.norm_codes_transposed
    if not by_triton:
        call, turn = norm_fp8.norm_codes_formula, norm_fp8.norm_codes_transposed_formula
    codes, inverse, h, stats = call(*given, FP8Target(), True)
    assert codes.shape == h.shape == (0, 64) and inverse.shape == (0, 1) and stats.shape == (0,)
    assert call(*given, target, False)[1] is None and not target.amax.any()
    assert turn(h, stats, *given[2:], target).shape == (64, 0)


# ---- the formula ----


@formats
@kinds
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_formula_does_all_that_kernels_do(options, layer, dtype):
    given, target = draw(layer, 3, 7, 65, **options), noting(dtype, 2.0**9)
    y = normed(given)
    codes, inverse, h, stats = norm_fp8.norm_codes_formula(*given, target, True)
    assert codes.shape == given.x.shape and inverse is None and (h is None) is (given.residual is None)
    assert bits(codes).view(y.shape).equal(bits(fp8.quantise(y, target.scale, dtype)))
    assert target.amax.view(torch.float32).max() == fp8.finite_amax(y)
    assert target.saturated.sum() == fp8.saturated(y, target.scale, dtype)
    transposed = norm_fp8.norm_codes_transposed_formula(given.x if h is None else h, stats, *given[2:], target)
    assert transposed.shape == (65, 32) and not transposed[:, 21:].view(torch.uint8).any()
    assert bits(transposed[:, :21]).equal(bits(codes).view(21, 65).t())
    rows = (given.x if h is None else h).float().view(21, 65)
    rstd = 1 / (rows.var(1, correction=0) if layer else rows.square().mean(1)).add(given.options.eps).sqrt()
    torch.testing.assert_close(stats[:21], rstd)
    if layer:
        torch.testing.assert_close(stats[21:], rows.mean(1))
    codes, inverse, _, stats = norm_fp8.norm_codes_formula(*given, FP8Target(dtype), False)
    assert stats is None and inverse.shape == (21, 1)
    assert bits(codes).view(y.shape).equal(bits(fp8.quantise(y, 1 / inverse, dtype)))
    assert inverse.equal(1 / fp8.scale_for(fp8.finite_amax(y, -1), dtype))


def test_rows_with_scales_of_their_own_are_not_transposed():
    given = draw(False, 5, 64)
    for turn in (norm_fp8.norm_codes_transposed, norm_fp8.norm_codes_transposed_formula):
        with pytest.raises(AssertionError, match="scales of their own"):
            turn(given.x, None, *given[2:], FP8Target())


MUTANTS = {  # function, what is there, what stands there instead
    "short: y in 16 bits first": ("short_codes_kernel", "codes(y, scale", "codes(y.to(tl.bfloat16).to(tl.float32), scale"),
    "short: the scale in the inverse's place": ("short_codes_kernel", "power_of_two(254 - biased)", "power_of_two(biased)"),
    "short: rows past the last are noted": ("short_codes_kernel", "ptr, tl.where(inside, y, 0.0)", "ptr, y"),
    "long: y in 16 bits first": (
        "long_codes_kernel",
        "inside, operand_codes(y, scale",
        "inside, operand_codes(y.to(tl.bfloat16).to(tl.float32), scale",
    ),
    "long: h not as it was normalised": (
        "long_codes_kernel",
        "store_piece(h_ptr, columns, inside, x,",
        "store_piece(h_ptr, columns, inside, x.to(tl.float32) * 0.5,",
    ),
    "long: counts of the first piece": (
        "long_codes_kernel",
        "for first in range(0, H, BLOCK_H)",
        "for first in range(0, 1, BLOCK_H)",
    ),
    "long: the largest of the last piece": ("_sizes_of", "tl.maximum(sizes, finite_sizes(", "tl.maximum(0.0, finite_sizes("),
    "long: a scale without what is held": (
        "long_codes_kernel",
        "CENTERED) sizes = _sizes_of(sizes, y, inside,",
        "CENTERED); sizes = _sizes_of(sizes, y * 0.25, inside,",
    ),
    "long: a scale without what is not held": (
        "long_codes_kernel",
        "CENTERED) sizes = _sizes_of(sizes, y, whole,",
        "CENTERED); sizes = _sizes_of(sizes, y * 0.25, whole,",
    ),
    "long: a piece is forgotten": ("long_codes_kernel", "else AGAIN - BLOCK_H - turn", "else 0"),
    "long: a piece is forgotten by row": ("long_codes_kernel", "(turn if", "(0 if"),
    "columns past the last have a size": ("_sizes_of", "y if WHOLE else tl.where(inside, y, 0.0)", "y"),
    "an infinity is the largest": ("_sizes_of", "finite_sizes(", "tl.abs("),
    "transposed: rows past the last are the bias": ("transposed_codes_kernel", "tl.where(real[:, None], y, 0.0)", "y"),
    "transposed: rows past the last aren't written": ("store_transposed", "(quads < long)[None, :]", "(quads * 4 < M)[None, :]"),
    "transposed: 1 / deviation for the mean": ("transposed_codes_kernel", "stats_ptr + M + rows", "stats_ptr + rows"),
}


@pytest.fixture(scope="module")
def hard():
    """Calls at which each mutant must fail."""
    large = draw(True, 3, 3001, weight=False, mean=100.0)
    infinite = draw(False, 3, 5008, kind=FP32)
    infinite.weight[9] = math.inf
    biased = draw(True, 5, 64)
    biased.bias.fill_(1000.0)
    apart = draw(False, 2, 20488, residual=True)
    apart.weight[:17000] *= 8  # the largest is read again, not held
    return biased, draw(True, 9, 1000, residual=True), large, infinite, draw(True, 2, 12304, residual=True), apart


@needs_triton
def test_the_hard_calls_are_right(hard):
    assert all(judge(given, E4M3) for given in hard)


@needs_triton
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, hard):
    module = device_functions if MUTANTS[name][0] == "store_transposed" else norm_fp8
    mutant = mutate(module, *MUTANTS[name], entry=norm_fp8)
    try:
        right = all(judge(given, E4M3, mutant) for given in hard)
    except AssertionError:
        right = False
    assert not right
