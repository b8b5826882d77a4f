"""Turning codes of eight-bit products: the kernel against the formula, bit for bit."""

import math

import pytest
import torch

from onepass.kernels import fp8 as device_functions
from onepass.kernels import fp8_cast, fp8_transpose
from onepass.kernels.language import triton
from onepass.runtime import fp8
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target
from onepass.testing.mutants import mutate
from onepass.testing.poison import poisoned, unchanged

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((37, 203), (1, 1), (128, 128), (129, 130), (16, 256), (3, 5, 130), (0, 8), (4, 0), (300, 16))

pytestmark = pytest.mark.skipif(triton is None, reason="triton is not installed")


def drawn(shape, dtype=E4M3):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE).view(dtype)


def is_transposed(codes, module=fp8_transpose):
    with poisoned(), unchanged(codes=codes):
        transposed = module.transpose_codes(codes)
    exact = fp8.transpose(codes)
    assert transposed.dtype == codes.dtype and transposed.is_contiguous() and transposed.shape == exact.shape
    return transposed.view(torch.uint8).equal(exact.view(torch.uint8))


@pytest.mark.parametrize("dtype", (E4M3, E5M2), ids=("e4m3", "e5m2"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_is_the_formula(shape, dtype):
    codes = drawn(shape, dtype)
    assert is_transposed(codes)
    rows = codes.view(torch.uint8).view(math.prod(shape[:-1]), shape[-1])
    transposed = fp8_transpose.transpose_codes(codes).view(torch.uint8)
    assert transposed[:, : len(rows)].equal(rows.t()) and not transposed[:, len(rows) :].any()


def test_wherever_they_lie():
    codes = drawn((40, 72))
    wide = drawn((37, 80)).view(torch.uint8)
    unaligned = torch.empty(codes.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(40, 72).copy_(codes.view(torch.uint8))
    for lies in (codes.view(torch.uint8).t().contiguous().t(), wide[:, 3:75], unaligned, wide[:1].expand(37, 80)):
        assert is_transposed(lies.view(E4M3))


def test_gathered_codes_turn_to_what_a_cast_turns():
    x, target = torch.randn(50, 96, device=DEVICE), FP8Target(E4M3, torch.tensor(16.0, device=DEVICE))
    _, transposed = fp8_cast.cast_tensor(x, target, codes=False, transposed=True)
    parts = [fp8_cast.cast_tensor(part, target)[0].view(torch.uint8) for part in x.split(25)]
    assert fp8_transpose.transpose_codes(torch.cat(parts).view(E4M3)).view(torch.uint8).equal(transposed.view(torch.uint8))


MUTANTS = {
    "rows past the last": (device_functions, "store_transposed", "(quads < long)[None, :]", "(quads * 4 < M)[None, :]"),
    "what lies after the last": (fp8_transpose, "_turn_kernel", "(rows < M)[:, None]", "(rows <= M)[:, None]"),
    "the first tiles": (fp8_transpose, "_turn_kernel", "65535 * tl.program_id(2)", "0 * tl.program_id(2) - tl.program_id(1)"),
    "strided codes as they lie": (fp8_transpose, "transpose_codes", "codes.contiguous()", "codes"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    mutant = mutate(*MUTANTS[name], entry=fp8_transpose)
    room = drawn((400, 256))  # what lies after the last row is no zero
    parts = room[:300], room[:37, :203], room.view(-1)[: 37 * 256].view(37, 256)
    assert not all(is_transposed(codes, mutant) for codes in parts)
