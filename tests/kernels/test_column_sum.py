"""column_sum: fp32 partials over their rows, rounded once, always in the same order."""

import pytest
import torch

from onepass.testing.budget import compare
from onepass.testing.poison import assert_written, poisoned, unchanged

pytest.importorskip("triton")
from onepass.kernels.column_reduce import column_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 37), (5, 16), (64, 33), (128, 40), (129, 37), (300, 3)])
def test_sums(rows, columns, dtype):
    partial = torch.randn(rows, columns, device=DEVICE)
    with poisoned(), unchanged(partial=partial):
        out = torch.empty(columns, device=DEVICE, dtype=dtype)
        assert column_sum(partial, out) is out
        again = column_sum(partial, torch.empty_like(out))
    assert_written(out=out)
    assert torch.equal(out, again)
    exact, baseline = (partial.to(wide).sum(0) for wide in (torch.float64, torch.float32))
    report = compare([({"sum": out}, {"sum": baseline}, {"sum": exact})], dtype)
    assert report, report


def test_nothing_to_sum_is_zero():
    assert not column_sum(torch.empty(0, 5, device=DEVICE), torch.full((5,), 7.0, device=DEVICE)).any()


def test_one_rounding_not_two():
    """256 + 1 + 1/2 ... in bf16 a partial sum rounded on the way would lose the small ones."""
    partial = torch.tensor([[256.0], [0.75], [0.75], [0.75]], device=DEVICE)
    assert column_sum(partial, torch.empty(1, device=DEVICE, dtype=torch.bfloat16)).item() == 258
