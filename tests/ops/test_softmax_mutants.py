"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import math

import pytest
from ops.mutants import mutant_tests
from ops.softmax_oracle import judge_case, main_cases

import onepass.ops.softmax.softmax as module

pytest.importorskip("triton")
from onepass.kernels import layout
from onepass.ops.softmax import kernels

CASES = sorted(main_cases(), key=lambda case: math.prod(case.shape[:-1]))  # programs cost: most are caught by a few
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    # ---- forward ----
    "scale forgotten": (kernels, "_softmax_rows", "(tl.float32) * scale", "(tl.float32)", 2),
    "scores rounded once more": (kernels, "_softmax_rows", "x.to(tl.float32) * scale", "(x.to(tl.float32) * scale).to(tl.bfloat16).to(tl.float32)", 4),
    "scores to the base 2 overflow": (kernels, "_softmax_rows", "(tl.float32) * scale", "(tl.float32) * (scale * LOG2_E) / LOG2_E", 4),
    "nothing taken away": (kernels, "_softmax_rows", "(z - tl.max(z, 1)[:, None])", "z", 0),
    "the largest of scores left out too": (kernels, "_softmax_rows", "max(z, 1)", "max(x.to(tl.float32) * scale, 1)", 4),
    "columns past the row's end count": (kernels, "_softmax_rows", " or not WHOLE", "", 5),
    "the diagonal is left out": (kernels, "_softmax_rows", " > last[:, None]", " >= last[:, None]", 3),
    "one right of the diagonal is left in": (kernels, "_softmax_rows", "last[:, None]", "last[:, None] + 1", 3),
    "rows past the last column read on": (kernels, "_softmax_rows", "tl.minimum((narrow_rows % S).to(tl.int32), C - 1)", "(narrow_rows % S).to(tl.int32)", 33),
    "rows counted over all matrices": (kernels, "_softmax_rows", "(narrow_rows % S)", "narrow_rows", 21),
    "a run starts at its end": (kernels, "_reached", "RUN * RUN", "RUN * RUN + RUN", 3),
    "half a row is enough for one row more": (kernels, "_softmax_kernel", "S < HALF", "S <= HALF", 33),
    "the other half is left as it was": (kernels, "_softmax_kernel", "columns < C", "columns < C - 1", 6),
    "a store past the row's end": (kernels, "_softmax_kernel", "columns <", "columns <=", 6),
    "a store one row too far": (kernels, "_softmax_rows", "rows < M", "rows <= M", 3),
    "rows with nothing left in are NaN": (kernels, "_softmax_rows", "(nan.to(tl.int32), 0) > 0", "(nan.to(tl.int32), 0) > 1", 4),
    "rows with nothing left in are 0 all at once": (kernels, "_softmax_rows", "max(nan.to(tl.int32), 0)", "min(nan.to(tl.int32), 0)", 4),
    "NaN rows are 0": (kernels, "_softmax_rows", 'float("nan")', "0.0", 2),
    "rows that are right are NaN beside one that is not": (kernels, "_softmax_rows", "inside & nan[:, None]", "inside", 4),
    "the mask is not asked again": (kernels, "_softmax_rows", " | tl.load(mask_ptr + at, mask=there & nan[:, None], other=False)", "", 4),
    "causality is not asked again": (kernels, "_softmax_rows", "nan, last", "nan, BLOCK_C", 26),
    "x read without its stride": (kernels, "_softmax_rows", "rows[:, None] * X_ROW", "rows[:, None] * C", 9),
    "y rounded through bf16": (kernels, "_softmax_rows", "e * inverse[:, None]", "(e * inverse[:, None]).to(tl.bfloat16).to(tl.float32)", 3),
    # ---- masks ----
    "True is left in": (kernels, "_softmax_rows", "other=True)", "other=True) == 0", 4),
    "the mask's rows are x's": (kernels, "_mask_rows", "rows.to(tl.int64) * ROW", "rows.to(tl.int64) * INNER", 4),
    "the middle level forgotten": (kernels, "_mask_rows", "middle * MIDDLE_STEP + ", "", 12),
    "the outer level of the middle's number": (kernels, "_mask_rows", "outermost.", "outer.", 26),
    "rows not counted within their level": (kernels, "_mask_rows", "(rows - outer * INNER)", "rows", 26),
    "one of a row read as a row": (kernels, "_softmax_rows", "MASK_COLUMN:  ", "True:  ", 37),
    "a transposed mask read as it lies": (kernels, "mask_layout", " or steps[-1] > 1", "", 10),
    "four levels are one too many for three": (kernels, "mask_layout", "(levels) > 3", "(levels) > 4", 58),
    "broadcast dimensions keep their stride": (kernels, "mask_layout", "0 if size == 1 else ", "", 26),
    "levels merged with a gap between": (kernels, "mask_layout", " == size *", " >= size *", 26),
    # ---- backward ----
    "backward without the scale": (kernels, "_softmax_backward_kernel", " * scale", "", 3),
    "backward without the row's sum": (kernels, "_softmax_backward_kernel", "(dy - total[:, None])", "dy", 3),
    "the row's sum of dy alone": (kernels, "_softmax_backward_kernel", "y.to(tl.float32) * ", "", 3),
    "NaN in dy where y is 0 counts": (kernels, "_softmax_backward_kernel", "tl.where(y.to(tl.float32) == 0, 0.0, y.to(tl.float32) * dy.to(tl.float32))", "y.to(tl.float32) * dy.to(tl.float32)", 10),
    "dy read at y's stride": (kernels, "_softmax_backward_kernel", " * DY_ROW", " * Y_ROW", 26),
    "backward: a store one row too far": (kernels, "_softmax_backward_kernel", "rows < M", "rows <= M", 3),
    "backward: rows counted over all matrices": (kernels, "_softmax_backward_kernel", " % S, RUN", " % (S - 1), RUN", 3),
    # ---- autograd, layout ----
    "op: forward's scale, backward's one": (module, "_Softmax.backward", "ctx.options", "ctx.options._replace(scale=1.0)", 3),
    "op: causal in forward alone": (kernels, "softmax_backward", "y.shape[-2] if options.causal else ", "", 3),
    "op: the mask dropped where a gradient is asked for": (module, "_Softmax.forward", "x, mask,", "x, None,", 4),
    "layout: rows a multiple of their gap apart": (layout, "_levels", " == size *", " >= size *", 10),
}  # fmt: skip

test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge_case, CASES[:8])
