"""An activation's result and gradients as codes: the formula, kernels, and that both passes write the same bits."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from ops.bias_activation_oracle import GATED, PLAIN
from ops.calls import needs_triton
from ops.mutants import mutant_tests
from ops.oracle import BF16, FP16, FP32, laid_out

from onepass.kernels import column_reduce
from onepass.kernels import fp8 as device_functions
from onepass.ops.activation import fp8 as real
from onepass.ops.activation import fp8_kernels
from onepass.ops.activation import kernels as activation_kernels
from onepass.ops.activation.formula import ActivationOptions, activation_formula
from onepass.ops.activation.fp8_kernels import ActivationNeeds
from onepass.runtime import fp8
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target
from onepass.testing.poison import poisoned, unchanged

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ways = pytest.mark.parametrize("use_triton", (False, pytest.param(True, marks=needs_triton)), ids=("torch", "triton"))
FEW = 0.004  # of codes that may differ by a step: fp32 arithmetic differs in its last bits


@dataclass(frozen=True)
class Case:
    """One call. H is y's last dimension, `lead` the others."""

    activation: str = "swiglu"
    lead: tuple[int, ...] = (37,)
    H: int = 80
    dtype: torch.dtype = BF16
    bias: torch.dtype | None = FP32
    weight: torch.dtype | None = None
    clamp: float | None = None
    offset: float | None = None
    to: torch.dtype = E4M3  # of dx; y is E4M3
    layout: str = "contiguous"
    dy_layout: str = "contiguous"
    special: bool = False  # infinities and NaN in x and dy

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def options(self) -> ActivationOptions:
        return ActivationOptions(self.activation, self.clamp, self.offset)

    def __str__(self) -> str:
        return "-".join(str(value).replace("torch.", "") for value in vars(self).values())


def cases() -> list[Case]:
    """Every activation, with the other features in turn."""
    found, turn = [], itertools.count()
    shapes = ((37,), 80), ((3, 7), 48), ((130,), 65), ((5, 4), 1), ((16,), 208), ((1,), 16)
    for activation, dtype in itertools.product((*PLAIN, *GATED), (BF16, FP16, FP32)):
        i = next(turn)
        clamp, offset = ((None, None), (1.0, None), (None, 1.0), (0.75, 0.5))[i % 4] if activation in GATED else (None, None)
        found.append(
            Case(
                activation, *shapes[(i + i // 6) % 6], dtype, (FP32, dtype, None)[(i + i // 3) % 3],
                (None, FP32, BF16)[i // 2 % 3], clamp, offset, (E4M3, E5M2)[i % 2],
                ("contiguous", "sliced", "transposed", "unaligned")[i % 4],
                ("contiguous", "unaligned", "sliced", "strided", "expanded")[i % 5], i % 3 == 1,
            )
        )  # fmt: skip
    found += [Case(weight=FP32, clamp=0.75, offset=0.5), Case(lead=(), weight=FP32)]
    return [*found, Case("swiglu", (16,), 208, special=True), Case("relu", to=E5M2)]


def draw(case: Case):
    W = case.H * (2 if case.gated else 1)
    x, dy = 1.5 * torch.randn(*case.lead, W), torch.randn(*case.lead, case.H)
    if case.special:
        for t in (x, dy):
            t.view(-1)[:: max(5, t.numel() // 7)] = math.nan
            t.view(-1)[1 :: max(7, t.numel() // 5)] = math.inf
            t.view(-1)[2 :: max(7, t.numel() // 5)] = -math.inf
    x, dy = laid_out(x.to(DEVICE, case.dtype), case.layout), laid_out(dy.to(DEVICE, case.dtype), case.dy_layout)
    bias = None if case.bias is None else torch.randn(W, device=DEVICE).to(case.bias)
    weight = None if case.weight is None else (0.5 + torch.rand(case.lead, device=DEVICE)).to(case.weight)
    return x, bias, weight, dy


def target(dtype, scale, noted=True):
    amax, past, _ = device_functions.new_notes(DEVICE)
    scale = torch.tensor(scale, device=DEVICE)
    return FP8Target(dtype, scale, amax, past) if noted else FP8Target(dtype, scale)


def bits(codes):
    """The codes as numbers in their order, with one NaN."""
    code = codes.view(torch.uint8).int()
    return torch.where(codes.float().isnan(), 1000, torch.where(code >= 128, 128 - code, code))


def alike(codes, exact):
    """Whether codes are those of the formula, but for a few that are one step off."""
    if codes.shape != exact.shape or codes.dtype != exact.dtype:
        return False
    apart = (bits(codes) - bits(exact)).abs()
    return bool((apart <= 1).all()) and int((apart > 0).sum()) <= max(1, FEW * apart.numel())


def close_amax(noted, exact):
    amax = noted.amax.view(torch.float32).max()
    return bool((amax - exact).abs() <= 4e-6 * exact)


def close_count(noted, exact):
    return abs(int(noted.saturated.sum()) - int(exact)) <= 1 + 0.01 * int(exact)


def wide_type(use_triton):
    """The formula's own type, or fp64 for kernels: in fp32 PyTorch's tanh loses all of gelu's tail, which E5M2 can hold."""
    return torch.float64 if use_triton else FP32


def exact(case, x, bias, weight, dy, dtype=torch.float64):
    """y and the gradients by the formula, in a wide type."""
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in (x, bias, weight)]
    y = activation_formula(*leaves, case.options)
    grads = iter(torch.autograd.grad(y, [t for t in leaves if t is not None], dy.to(dtype)))
    return y.detach(), *(None if t is None else next(grads) for t in leaves)


def rows_of(t):
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def transposed_right(transposed, rows):
    """Whether codes are those of rows, bit for bit, transposed, with zeros after the last row."""
    return (
        transposed.shape == (rows.shape[1], -(-len(rows) // 16) * 16)
        and transposed.is_contiguous()
        and transposed[:, : len(rows)].view(torch.uint8).equal(rows.view(torch.uint8).t())
        and not transposed[:, len(rows) :].view(torch.uint8).any()
    )


def forward_right(case, module=real, use_triton=True):
    x, bias, weight, dy = draw(case)
    noted, by_formula = target(E4M3, 64.0), target(E4M3, 64.0)
    with poisoned(), unchanged(x=x, bias=bias, weight=weight):
        own, inverse = module.activation_codes(x, bias, weight, case.options, FP8Target(case.to), use_triton=use_triton)
        codes, none = module.activation_codes(x, bias, weight, case.options, noted, use_triton=use_triton)
    y = exact(case, x, bias, weight, dy, wide_type(use_triton))[0]
    scale = fp8.scale_for(fp8.finite_amax(rows_of(y), -1), case.to)
    return (
        none is None
        and own.shape == codes.shape == y.shape
        and alike(codes, fp8.quantise(y, by_formula.scale, E4M3))
        and inverse.equal(1 / scale)
        and alike(rows_of(own), fp8.quantise(rows_of(y), scale, case.to))
        and close_amax(noted, fp8.finite_amax(y))
        and close_count(noted, fp8.saturated(y, noted.scale, E4M3))
    )


def backward_right(case, module=real, use_triton=True):
    x, bias, weight, dy = draw(case)
    dx_target, y_target = target(case.to, 256.0 if case.to is E4M3 else 2.0**15), target(E4M3, 64.0)
    with poisoned(), unchanged(x=x, bias=bias, weight=weight, dy=dy):
        ours = module.activation_backward_codes(
            dy, x, bias, weight, case.options, dx_target, y_target,
            ActivationNeeds(dbias=bias is not None, dtoken_weight=weight is not None), use_triton=use_triton,
        )  # fmt: skip
        assert not y_target.amax.any() and not y_target.saturated.any()
        y_codes, _ = module.activation_codes(x, bias, weight, case.options, y_target, use_triton=use_triton)
    _, dx, dbias, dweight = exact(case, x, bias, weight, dy, wide_type(use_triton))
    return (
        alike(ours.dx, fp8.quantise(dx, dx_target.scale, case.to))
        and transposed_right(ours.dx_transposed, rows_of(ours.dx))
        and transposed_right(ours.y_transposed, rows_of(y_codes))
        and close_amax(dx_target, fp8.finite_amax(dx))
        and close_count(dx_target, fp8.saturated(dx, dx_target.scale, case.to))
        and sums_right(ours.dbias, dbias, bias, len(rows_of(x)))
        and sums_right(ours.dtoken_weight, dweight, weight, case.H)
    )


def sums_right(ours, wide, parameter, terms):
    if parameter is None:
        return ours is None
    rtol, atol = (2e-5 if parameter.dtype is FP32 else 2**-7), 2e-6 * terms
    same = torch.isclose(ours.float(), wide.float(), rtol=rtol, atol=atol, equal_nan=True)
    return ours.dtype == parameter.dtype and ours.shape == parameter.shape and bool(same.all())


@ways
@pytest.mark.parametrize("case", cases(), ids=str)
def test_codes_are_those_of_the_formula(case, use_triton):
    assert forward_right(case, use_triton=use_triton)
    assert backward_right(case, use_triton=use_triton)


@needs_triton
@pytest.mark.parametrize("H", (9001, 16400, 17001))
def test_long_rows_are_held_and_longer_ones_read_again(H):
    assert forward_right(Case(H=H, lead=(3,), weight=FP32))
    assert forward_right(Case("gelu", H=H, lead=(3,)))


@ways
def test_an_expanded_x(use_triton):
    case = Case(layout="expanded", weight=FP32)
    assert forward_right(case, use_triton=use_triton) and backward_right(case, use_triton=use_triton)


@ways
@pytest.mark.parametrize("case", (Case(lead=(0,)), Case(lead=(3, 0), weight=FP32), Case("gelu", H=0)), ids=str)
def test_nothing(case, use_triton):
    x, bias, weight, dy = draw(case)
    M = math.prod(case.lead)
    noted = target(E4M3, 1.0)
    codes, inverse = real.activation_codes(x, bias, weight, case.options, FP8Target(), use_triton=use_triton)
    assert codes.shape == dy.shape and inverse.shape == (M, 1) and (inverse == 1).all()
    ours = real.activation_backward_codes(
        dy, x, bias, weight, case.options, noted, noted,
        ActivationNeeds(dbias=True, dtoken_weight=weight is not None), use_triton=use_triton,
    )  # fmt: skip
    assert ours.dx.shape == x.shape and ours.dx_transposed.shape == (x.shape[-1], -(-M // 16) * 16)
    assert ours.y_transposed.shape == (case.H, -(-M // 16) * 16)
    assert ours.dbias.equal(torch.zeros_like(bias)) and not noted.amax.any()


@ways
@pytest.mark.parametrize("activation", (*PLAIN, *GATED))
def test_no_infinity_and_no_nan_becomes_a_number(activation, use_triton):
    case = Case(activation, special=True, weight=FP32)
    x, bias, weight, dy = draw(case)
    y, dx, *_ = exact(case, x, bias, weight, dy)
    codes, _ = real.activation_codes(x, bias, weight, case.options, target(E4M3, 1.0), use_triton=use_triton)
    own, inverse = real.activation_codes(x, bias, weight, case.options, FP8Target(E5M2), use_triton=use_triton)
    assert codes.float().isnan().equal(~y.isfinite()) and own.float().isfinite().equal(y.isfinite()) and inverse.isfinite().all()
    ours = real.activation_backward_codes(
        dy, x, bias, weight, case.options, target(E5M2, 1.0), target(E4M3, 1.0), use_triton=use_triton
    )
    assert ours.dx.float().isfinite().equal(dx.isfinite())
    assert ours.y_transposed[:, : len(y)].float().isnan().equal(~y.isfinite().t())


@ways
def test_what_saturates_is_counted(use_triton):
    case = Case(lead=(70,), H=100)
    x, bias, weight, dy = draw(case)
    y, dx, *_ = exact(case, x, bias, weight, dy, FP32)
    y_target, dx_target = target(E4M3, 1024.0), target(E4M3, 1024.0)
    real.activation_codes(x, bias, weight, case.options, y_target, use_triton=use_triton)
    real.activation_backward_codes(dy, x, bias, weight, case.options, dx_target, None, use_triton=use_triton)
    for noted, wide in ((y_target, y), (dx_target, dx)):
        assert fp8.saturated(wide, noted.scale, E4M3) > 100
        assert close_count(noted, fp8.saturated(wide, noted.scale, E4M3)) and close_amax(noted, fp8.finite_amax(wide))
    before = y_target.amax.clone()
    real.activation_codes(x * 0.1, bias, weight, case.options, y_target, use_triton=use_triton)
    assert y_target.amax.equal(before), "an amax only rises"


@ways
def test_outputs_are_left_out_one_by_one(use_triton):
    case = Case(weight=FP32, clamp=2.0)
    x, bias, weight, dy = draw(case)

    def backward(dy, dx_target, y_target, **needs):
        given = dy, x, bias, weight, case.options, dx_target, y_target
        return real.activation_backward_codes(*given, ActivationNeeds(**needs), use_triton=use_triton)

    quiet = target(E4M3, 64.0, noted=False)
    whole = backward(dy, quiet, quiet, dbias=True, dtoken_weight=True)
    for name, found in {
        "dx": backward(dy, quiet, None, dx_transposed=False),
        "dx_transposed": backward(dy, quiet, None, dx=False),
        "y_transposed": backward(None, None, quiet),
        "dbias": backward(dy, None, None, dbias=True),
        "dtoken_weight": backward(dy, None, None, dtoken_weight=True),
    }.items():
        assert [field for field, value in found._asdict().items() if value is not None] == [name]
        ours, all_at_once = getattr(found, name), getattr(whole, name)
        assert ours.view(torch.uint8).equal(all_at_once.view(torch.uint8)), name


@ways
@pytest.mark.parametrize("activation", (*PLAIN, *GATED))
def test_the_error_against_fp64(activation, use_triton):
    case = Case(activation, lead=(130,), H=144, weight=FP32)
    x, bias, weight, dy = draw(case)
    y, dx, dbias, dweight = exact(case, x, bias, weight, dy)
    own, inverse = real.activation_codes(x, bias, weight, case.options, FP8Target(), use_triton=use_triton)
    to = target(E4M3, fp8.scale_for(fp8.finite_amax(dx), E4M3).item())
    ours = real.activation_backward_codes(
        dy, x, bias, weight, case.options, to, None, ActivationNeeds(dbias=True, dtoken_weight=True), use_triton=use_triton
    )
    assert sqnr(y, fp8.dequantise(own, inverse, torch.float64)) > 28
    assert sqnr(dx, fp8.dequantise(ours.dx, 1 / to.scale, torch.float64)) > 28
    assert sqnr(dbias, ours.dbias.double()) > 110 and sqnr(dweight, ours.dtoken_weight.double()) > 110


def sqnr(exact, ours):
    return 10 * math.log10((exact.square().sum() / (exact - ours).square().sum()).item())


def test_wrong_arguments():
    case = Case()
    x, bias, weight, dy = draw(case)
    noted = target(E4M3, 1.0)

    def backward(dy, dx_target, y_target, options=case.options):
        real.activation_backward_codes(dy, x, bias, weight, options, dx_target, y_target, use_triton=False)

    with pytest.raises(ValueError, match="dx_target must have a scale"):
        backward(dy, FP8Target(), None)
    with pytest.raises(ValueError, match="y_target must have a scale"):
        backward(dy, None, FP8Target())
    with pytest.raises(ValueError, match="dy must be a tensor"):
        backward(None, noted, None)
    with pytest.raises(ValueError, match="without dropout"):
        backward(dy, noted, None, case.options._replace(threshold=1))


BACKWARD = "_backward_codes_kernel"
NOTED = "past = 0\n        for i in tl.static_range"
MUTANTS = {
    "an offset of its own": (fp8_kernels, "_activated", "y = ACT(z) * linear", "y = ACT(z) * (linear + 1e-3)"),
    "no bias on the linear half": (fp8_kernels, "_load_part", "bias_ptr, columns + PART * H,", "bias_ptr, columns,"),
    "no token weight in y": (fp8_kernels, BACKWARD, "y = y * weight", "y = y * 1.0"),
    "y past the last row": (fp8_kernels, BACKWARD, "y = tl.where(inside, y, 0.0)", "y = y * 1.0"),
    "transposed past the last row": (device_functions, "store_transposed", "(quads < long)[None, :]", "(quads * 4 < M)[None, :]"),
    "halves of dx transposed over each other": (fp8_kernels, BACKWARD, "quads, columns + part * H, M", "quads, columns, M"),
    "halves of dx in one place": (fp8_kernels, BACKWARD, "(columns + part * H)[None, :]", "columns[None, :]"),
    "the other half's clamp": (fp8_kernels, BACKWARD, "tl.where(passes, dz, 0.0)", "tl.where(passes2, dz, 0.0)"),
    "the second half isn't noted": (device_functions, "note_tiles", f"{NOTED}(COUNT)", f"{NOTED}(COUNT - 1)"),
    "the derivative where nothing was clamped": (fp8_kernels, BACKWARD, "z, linear = clamp_halves", "_, linear = clamp_halves"),
    "a masked NaN comes back": (fp8_kernels, BACKWARD, "derivative == 0.0, 0.0, dz", "derivative == 0.0, dz, dz"),
    "the bias's second half": (fp8_kernels, BACKWARD, "sums2 += tl.sum(dz2, 0)", "sums2 += tl.sum(dz, 0)"),
    "the token weight twice": (fp8_kernels, BACKWARD, "tl.sum(y * dy, 1)", "tl.sum(y * dy * weight, 1)"),
    "an infinite magnitude": (fp8_kernels, "_rows_kernel", "finite_sizes(y)", "tl.abs(y)"),
    "a long row isn't read again": (fp8_kernels, "_rows_kernel", "H > BLOCK_H", "H < BLOCK_H"),
    "clamped on one side": (activation_kernels, "clamp_halves", "linear < -clamp, -clamp, linear", "linear < -9, -9, linear"),
    "a block of rows is left out": (column_reduce, "_column_sum_kernel", "rows < S", "rows < S - 1"),
}
FINDERS = (
    Case(lead=(70,), weight=FP32, clamp=1.0, offset=0.5),
    Case("geglu", (33,), 72, special=True),
    Case("silu", (2,), 16400),
    Case("relu", (20,), 48, special=True),
)  # fmt: skip


def both_right(module, case):
    return forward_right(case, module) and backward_right(case, module)


MUTANT_TESTS = mutant_tests(real, MUTANTS, FINDERS, both_right, FINDERS, (AssertionError,))
test_a_mutant_is_found, test_the_cases_that_find_mutants_pass = map(needs_triton, MUTANT_TESTS)


@needs_triton
def test_calls_repeat_bit_for_bit():
    case = Case(lead=(200,), weight=FP32)
    x, bias, weight, dy = draw(case)
    first, second = (
        real.activation_backward_codes(
            dy, x, bias, weight, case.options, target(E4M3, 64.0), target(E4M3, 64.0),
            ActivationNeeds(dbias=True, dtoken_weight=True), use_triton=True,
        )
        for _ in range(2)
    )  # fmt: skip
    assert all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(first, second, strict=True))
