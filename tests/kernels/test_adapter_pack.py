"""LoRA adapters as two matrices: kernels and PyTorch have the same bits, there and back."""

import pytest
import torch

from onepass.kernels import adapter_pack
from onepass.kernels.adapter_pack import AdapterShapes, pack_adapters, unpack_adapters
from onepass.testing.poison import assert_written, poisoned, unchanged

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = [
    ((3, 8, 1, 5, 2), ((0, 20), (20, 31), (31, 40), (0, 40), (5, 6)), 37, 40),
    ((4,), ((0, 3000),), 8, 3000),
    ((16, 16), ((0, 8), (8, 24)), 2050, 24),
]


def drawn(shapes, a_type, b_type):
    generator, lead = torch.Generator().manual_seed(0), (shapes.groups,) if shapes.groups else ()
    tensors = []
    for rank, (first, last) in zip(shapes.ranks, shapes.rows, strict=True):
        tensors += [torch.randn(*lead, rank, shapes.K, generator=generator).to(DEVICE, a_type)]
        tensors += [torch.randn(*lead, last - first, rank, generator=generator).to(DEVICE, b_type)]
    return tensors


def by_pytorch(monkeypatch, function, *args):
    with monkeypatch.context() as patch:
        patch.setattr(adapter_pack, "triton_unsupported", lambda x: "for this test")
        return function(*args)


@pytest.mark.parametrize("groups", (0, 3))
@pytest.mark.parametrize("sizes", SHAPES, ids=("five", "one", "two"))
@pytest.mark.parametrize(("a_type", "b_type", "dtype"), [(FP32, FP32, BF16), (BF16, FP32, BF16), (FP32, FP32, FP32)], ids=str)
def test_there_and_back(monkeypatch, groups, sizes, a_type, b_type, dtype):
    shapes = AdapterShapes(groups, *sizes)
    tensors = drawn(shapes, a_type, b_type)
    with poisoned(), unchanged(**{f"tensor {i}": t for i, t in enumerate(tensors)}):
        a, b = pack_adapters(tensors, dtype, shapes)
    assert_written(a=a, b=b)
    for mine, other in zip((a, b), by_pytorch(monkeypatch, pack_adapters, tensors, dtype, shapes), strict=True):
        assert mine.dtype is dtype and torch.equal(mine, other)
    dtypes = [t.dtype for t in tensors]
    with poisoned():
        found = unpack_adapters(a, b, dtypes, shapes)
    others = by_pytorch(monkeypatch, unpack_adapters, a, b, dtypes, shapes)
    for back, other, tensor in zip(found, others, tensors, strict=True):
        assert back.dtype is tensor.dtype and torch.equal(back, tensor.to(dtype).to(tensor.dtype)) and torch.equal(back, other)


def test_one_matrix_alone():
    shapes = AdapterShapes(0, *SHAPES[0])
    tensors = drawn(shapes, FP32, FP32)
    a, b = pack_adapters(tensors, FP32, shapes)
    for first, given in ((0, (a, None)), (1, (None, b))):
        found = unpack_adapters(*given, [FP32] * 5, shapes)
        assert len(found) == 5 and all(map(torch.equal, found, tensors[first::2]))


def test_adapters_that_are_not_contiguous():
    shapes = AdapterShapes(0, (4, 4), ((0, 8), (8, 16)), 12, 16)
    tensors = drawn(shapes, FP32, FP32)
    strided = [torch.stack([t, t], -1)[..., 0] for t in tensors]
    assert all(map(torch.equal, pack_adapters(tensors, BF16, shapes), pack_adapters(strided, BF16, shapes)))
