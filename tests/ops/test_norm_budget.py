"""layer_norm and rms_norm against fp64, by every kernel and in the combinations of their features."""

import pytest
from ops.norm_oracle import judge_case, real_cases, small_cases

import onepass.ops.norm.norm as module

pytest.importorskip("triton")


@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_every_kernel_in_small_tiles(case):
    report = judge_case(module, case)
    assert report, report


@pytest.mark.parametrize("case", real_cases(), ids=str)
def test_sizes_and_numbers_made_to_break_it(case):
    report = judge_case(module, case)
    assert report, report


@pytest.mark.parametrize("case", small_cases()[:8], ids=str)
def test_the_torch_backend(case):
    report = judge_case(module, case, backend="torch")
    assert report, report
