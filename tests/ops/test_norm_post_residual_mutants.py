"""Mutants of the residual that is added to rms_norm's result: the oracle must catch each."""

import pytest
from ops.mutants import mutant_tests
from ops.test_norm_post_residual import CASES, judge_case

import onepass.ops.norm.norm as module

pytest.importorskip("triton")
from onepass.ops.norm import forward as norm_forward

MUTANTS = {
    "short: not added": (norm_forward, "_short_kernel", "if post_ptr is not None", "if False"),
    "short: in x's place": (norm_forward, "_short_kernel", "aligned(R_ROW, ALIGN), inside", "aligned(X_ROW, ALIGN), inside"),
    "long: the held part alone": (norm_forward, "_long_kernel", "CENTERED, post_ptr)\n            store_piece(y_ptr, columns, whole", "CENTERED)\n            store_piece(y_ptr, columns, whole"),
    "long: what is read again alone": (norm_forward, "_long_kernel", "CENTERED, post_ptr)\n            store_piece(y_ptr, columns, inside", "CENTERED)\n            store_piece(y_ptr, columns, inside"),
    "long: x's stride": (norm_forward, "_long_kernel", "post_ptr += row * aligned(R_ROW", "post_ptr += row * aligned(X_ROW"),
    "y rounded before": (norm_forward, "_short_kernel", "y = tl.fma(x * rstd, weight, bias)", "y = tl.fma(x * rstd, weight, bias).to(y_ptr.dtype.element_ty).to(tl.float32)"),
    "its gradient is dx": (module, "_NormFunction.backward", "dx if need_x else None, None, dweight, dbias, dpost", "dx if need_x else None, None, dweight, dbias, dx"),
}  # fmt: skip


test_a_mutant_is_caught, test_a_copy_passes = mutant_tests(module, MUTANTS, CASES, judge_case, CASES[:2])
