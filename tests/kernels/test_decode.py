"""Decoding weights of few bits: the kernels against the formulas, bit for bit."""

import pytest
import torch

from onepass.kernels import decode
from onepass.kernels.language import triton
from onepass.testing.mutants import mutate
from onepass.testing.poison import poisoned, unchanged

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)

pytestmark = pytest.mark.skipif(triton is None, reason="triton is not installed")


def four_bits(count, block, nested_block):
    """Return what `decode_four_bits` takes after out. Without a nested block scales are fp32."""
    generator = torch.Generator().manual_seed(count)
    codes = torch.randint(0, 256, (-(-count // 2),), dtype=torch.uint8, generator=generator)
    blocks = -(-count // block)
    table, absmax, of_scales = torch.randn(273, generator=generator), torch.rand(blocks, generator=generator), None
    if nested_block:
        absmax = torch.randint(0, 256, (blocks,), dtype=torch.uint8, generator=generator)
        of_scales = torch.rand(-(-blocks // nested_block), generator=generator)
    tensors = [None if t is None else t.to(DEVICE) for t in (codes, table, absmax, of_scales)]
    return *tensors, block, nested_block or 1


def four_bits_are_right(count, block, nested_block, dtype, module=decode):
    given = four_bits(count, block, nested_block)
    tensors = {f"tensor {i}": t for i, t in enumerate(given[:4]) if t is not None}
    with poisoned(), unchanged(**tensors):
        out = torch.empty(count, dtype=dtype, device=DEVICE)
        module.decode_four_bits(out, *given)
    exact = decode._four_bits_formula(*given[:4], count, *given[4:]).to(dtype)
    return torch.equal(out, exact) and not out.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nested_block", (0, 4, 256))
@pytest.mark.parametrize(
    ("count", "block"), [(1, 64), (4096, 64), (7 * 13, 64), (6500, 64), (9000, 32), (12288, 4096), (5000, 4096)]
)
def test_four_bits_are_the_formula(count, block, nested_block, dtype):
    assert four_bits_are_right(count, block, nested_block, dtype)


def test_the_formula_by_hand():
    """The first code of a byte is the high one. A scale is code * scale of scales + offset."""
    table = torch.arange(16.0)
    out = torch.empty(36)
    codes = torch.tensor([0x12, 0x3F, *[0] * 14, 0xA0, 0x01], dtype=torch.uint8)
    decode._decode_four_bits(out, codes, table, torch.tensor([2.0, 10.0]), None, 32, 1)
    assert out[:4].tolist() == [2, 4, 6, 30] and out[32:].tolist() == [100, 0, 0, 10]
    table = torch.cat([table, torch.tensor([0.0, 3.0, 5.0]), torch.zeros(253), torch.tensor([0.5])])
    decode._decode_four_bits(out, codes, table, torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([2.0, 4.0]), 32, 1)
    assert out[:2].tolist() == [6.5, 13] and out[32] == 205


def int8_is_right(groups, length, factor, dtype, module=decode):
    generator = torch.Generator().manual_seed(groups)
    codes = torch.randint(-128, 128, (groups, length), dtype=torch.int8, generator=generator).to(DEVICE)
    scale = torch.rand(groups, generator=generator).to(DEVICE)
    with poisoned(), unchanged(codes=codes, scale=scale):
        out = torch.empty(groups, length, dtype=dtype, device=DEVICE)
        module.decode_int8(out, codes, scale, factor)
    exact = codes * scale[:, None]
    exact = exact if factor is None else exact * factor
    return torch.equal(out, exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", (None, 7.874015718698502e-3))
@pytest.mark.parametrize(("groups", "length"), [(1, 1), (37, 203), (3, 9000), (700, 32), (1, 8192), (5, 1)])
def test_int8_is_the_formula(groups, length, factor, dtype):
    assert int8_is_right(groups, length, factor, dtype)


def test_nothing_is_decoded_of_nothing():
    decode.decode_four_bits(torch.empty(0, device=DEVICE), *four_bits(0, 64, 0))
    decode.decode_int8(torch.empty(0, 4, device=DEVICE), *(torch.empty(n, device=DEVICE) for n in (0, 0)), None)


FOUR_BITS, INT8 = "_four_bits_kernel", "_int8_kernel"
MUTANTS = {
    "nibbles swapped": (FOUR_BITS, "tl.join(first, second)", "tl.join(second, first)"),
    "a neighbour's scale": (FOUR_BITS, "absmax_ptr + blocks", "absmax_ptr + blocks - (blocks > 0).to(tl.int64)"),
    "the offset left out": (FOUR_BITS, "nested + tl.load(table_ptr + 272)", "nested"),
    "one scale of scales": (FOUR_BITS, "blocks // NESTED_BLOCK", "blocks * 0"),
    "nested scales by number": (FOUR_BITS, "blocks // NESTED_BLOCK", "tl.minimum(blocks, (M - 1) // BLOCK // NESTED_BLOCK)"),
    "the high code twice": (FOUR_BITS, "pairs & 15", "pairs >> 4"),
    "half of an odd end": (FOUR_BITS, "places * 2 < M", "places * 2 + 1 < M"),
    "past the end": (FOUR_BITS, "there[:, None] if WHOLE else places < M", "there[:, None]"),
    "a row's neighbour": (INT8, "scale_ptr + groups", "scale_ptr + M - 1 - groups"),
    "no factor": (INT8, "values *= FACTOR", "values *= 1.0"),
    "unsigned": (INT8, ".to(tl.float32) * scale", ".to(tl.uint8, bitcast=True).to(tl.float32) * scale"),
    "columns past a row": (INT8, "(columns < LENGTH)[None, :]", "(columns <= LENGTH)[None, :]"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    kernel, *change = MUTANTS[name]
    mutant = mutate(decode, kernel, *change)
    try:
        if kernel == INT8:
            right = [int8_is_right(37, 203, 0.1, FP32, mutant)]
        else:
            right = [four_bits_are_right(6501, 64, nested, FP32, mutant) for nested in (0, 4)]
    except (AssertionError, IndexError):
        return
    assert not all(right)
