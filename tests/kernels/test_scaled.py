"""scaled: values times a number in memory, rounded once to another type or written over themselves."""

import pytest
import torch

from onepass.testing.poison import assert_written, poisoned, unchanged

pytest.importorskip("triton")
from onepass.ops.loss.head.autograd import scale_into

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 128), (2048,), (2049,), (4095, 2), (100, 128)])
def test_into_another_type(shape, dtype):
    values, factor = torch.randn(shape, device=DEVICE), torch.tensor(0.3, device=DEVICE)
    with poisoned(), unchanged(values=values, factor=factor):
        out = torch.empty(shape, device=DEVICE, dtype=dtype)
        assert scale_into(values, factor, out) is out
    assert_written(out=out)
    assert torch.equal(out, (values * factor).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_over_themselves(dtype):
    values = torch.randn(777, 5, device=DEVICE, dtype=dtype)
    asked = (values.float() * 0.3).to(dtype)
    assert torch.equal(scale_into(values, torch.tensor(0.3, device=DEVICE), values), asked)


def test_as_they_lie():
    """Of a weight that lies the other way, what waits does too."""
    values = torch.randn(40, 24, device=DEVICE).t()
    out = torch.empty_like(values, dtype=torch.bfloat16)
    assert torch.equal(scale_into(values, torch.tensor(2.0, device=DEVICE), out), (values * 2.0).bfloat16())


def test_nothing():
    values = torch.empty(0, 5, device=DEVICE)
    assert scale_into(values, torch.tensor(2.0, device=DEVICE), values) is values
