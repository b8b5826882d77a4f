"""Each mutant is a small, plausible slip, and the oracle that the real room passes must catch it."""

import pytest
from ops.calls import caught
from ops.softmax_oracle import judge_case, main_cases

import onepass.ops.softmax.softmax as room

pytest.importorskip("triton")
from onepass.kernels import layout
from onepass.ops.softmax import kernels
from onepass.testing.mutants import mutate

CASES = main_cases()
MUTANTS = {  # name: module, what is there, what stands there instead[, how often it is there]
    # ---- forward ----
    "scale forgotten": (kernels, "    z = x.to(tl.float32) * scale\n", "    z = x.to(tl.float32)\n"),
    "scores rounded once more": (kernels, "    z = x.to(tl.float32) * scale\n", "    z = (x.to(tl.float32) * scale).to(tl.bfloat16).to(tl.float32)\n"),
    "scores to the base 2 overflow": (kernels, "    z = x.to(tl.float32) * scale\n", "    z = x.to(tl.float32) * (scale * LOG2_E) / LOG2_E\n"),
    "nothing taken away": (kernels, "(z - tl.max(z, 1)[:, None])", "z"),
    "the largest of scores left out too": (kernels, "(z - tl.max(z, 1)[:, None])", "(z - tl.max(x.to(tl.float32) * scale, 1)[:, None])"),
    "columns past the row's end count": (kernels, "    if CAUSAL or not WHOLE:\n", "    if CAUSAL:\n"),
    "the diagonal is left out": (kernels, "columns[None, :] > last[:, None], float", "columns[None, :] >= last[:, None], float"),
    "one right of the diagonal is left in": (kernels, "columns[None, :] > last[:, None], float", "columns[None, :] > last[:, None] + 1, float"),
    "rows past the last column read on": (kernels, "last = tl.minimum((narrow_rows % S).to(tl.int32), C - 1)", "last = (narrow_rows % S).to(tl.int32)"),
    "rows counted over all matrices": (kernels, "tl.minimum((narrow_rows % S).to", "tl.minimum(narrow_rows.to"),
    "a run starts at its end": (kernels, "(columns // RUN * RUN)[None, :] <= last", "(columns // RUN * RUN + RUN)[None, :] <= last"),
    "half a row is enough for one row more": (kernels, "if tl.program_id(0) % S < HALF:", "if tl.program_id(0) % S <= HALF:"),
    "the other half is left as it was": (kernels, "zeros, mask=columns < C)", "zeros, mask=columns < C - 1)"),
    "a store past the row's end": (kernels, "zeros, mask=columns < C)", "zeros, mask=columns <= C)"),
    "a store one row too far": (kernels, "    real = (rows < M)[:, None]\n", "    real = (rows <= M)[:, None]\n"),
    "rows with nothing left in are NaN": (kernels, "        if tl.max(nan.to(tl.int32), 0) > 0:\n", "        if tl.max(nan.to(tl.int32), 0) > 1:\n"),
    "rows with nothing left in are 0 all at once": (kernels, "tl.max(nan.to(tl.int32), 0) > 0", "tl.min(nan.to(tl.int32), 0) > 0"),
    "NaN rows are 0": (kernels, 'tl.where(left_out, 0.0, float("nan"))', "tl.where(left_out, 0.0, 0.0)"),
    "rows that are right are NaN beside one that is not": (kernels, "mask=inside & nan[:, None])", "mask=inside)"),
    "the mask is not asked again": (kernels, "left_out = left_out | tl.load(mask_ptr + at, mask=there & nan[:, None], other=False)", "left_out = left_out"),
    "causality is not asked again": (kernels, "tl.where(nan, last, BLOCK_C)[:, None]", "tl.where(nan, BLOCK_C, BLOCK_C)[:, None]"),
    "x read without its stride": (kernels, "x_ptr + rows[:, None] * X_ROW", "x_ptr + rows[:, None] * C"),
    "y rounded through bf16": (kernels, "tl.store(y_at, e * inverse[:, None],", "tl.store(y_at, (e * inverse[:, None]).to(tl.bfloat16).to(tl.float32),"),
    # ---- masks ----
    "True is left in": (kernels, "mask=there, other=True), float", "mask=there, other=True) == 0, float"),
    "the mask's rows are x's": (kernels, "        return rows.to(tl.int64) * ROW\n", "        return rows.to(tl.int64) * INNER\n"),
    "the middle level forgotten": (kernels, "start + middle * MIDDLE_STEP + outermost", "start + outermost"),
    "the outer level of the middle's number": (kernels, "outermost.to(tl.int64) * OUTER_STEP", "outer.to(tl.int64) * OUTER_STEP"),
    "rows not counted within their level": (kernels, "start = (rows - outer * INNER).to(tl.int64) * ROW", "start = rows.to(tl.int64) * ROW"),
    "one of a row read as a row": (kernels, "        if MASK_COLUMN:  #", "        if True:  #"),
    "a transposed mask read as it lies": (kernels, "len(levels) > 3 or steps[-1] > 1", "len(levels) > 3"),
    "four levels are one too many for three": (kernels, "    if len(levels) > 3 or", "    if len(levels) > 4 or"),
    "broadcast dimensions keep their stride": (kernels, "[0 if size == 1 else step for size", "[step for size"),
    "levels merged with a gap between": (kernels, "levels[-1][1] == size * step", "levels[-1][1] >= size * step"),
    # ---- backward ----
    "backward without the scale": (kernels, "y * (dy - total[:, None])) * scale", "y * (dy - total[:, None]))"),
    "backward without the row's sum": (kernels, "y * (dy - total[:, None])) * scale", "y * dy) * scale"),
    "the row's sum of dy alone": (kernels, "y.to(tl.float32) * dy.to(tl.float32)), 1)", "dy.to(tl.float32)), 1)"),
    "NaN in dy where y is 0 counts": (kernels, "tl.where(y == 0, 0.0, y.to(tl.float32) * dy.to(tl.float32))", "y.to(tl.float32) * dy.to(tl.float32)"),
    "dy read at y's stride": (kernels, "dy_ptr + rows[:, None] * DY_ROW", "dy_ptr + rows[:, None] * Y_ROW"),
    "backward: a store one row too far": (kernels, "    inside = (rows < M)[:, None] & inside_row", "    inside = (rows <= M)[:, None] & inside_row"),
    "backward: rows counted over all matrices": (kernels, "_reached(columns, rows.to(M.dtype) % S, RUN)", "_reached(columns, rows.to(M.dtype) % (S - 1), RUN)"),
    # ---- autograd, layout ----
    "op: forward's scale, backward's one": (room, "_backward(dy, y, ctx.options)", "_backward(dy, y, ctx.options._replace(scale=1.0))"),
    "op: causal in forward alone": (kernels, "S = y.shape[-2] if options.causal else 1", "S = 1"),
    "op: the mask dropped where a gradient is asked for": (room, "y: Tensor = _forward(x, mask, options)", "y: Tensor = _forward(x, None, options)"),
    "layout: rows a multiple of their gap apart": (layout, "levels[-1][1] == size * stride", "levels[-1][1] >= size * stride"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    module, *change = MUTANTS[name]
    mutant = mutate(module, *change[:2], room=room, times=change[2] if len(change) > 2 else 1)
    assert caught(mutant, CASES, judge_case), "no case catches it"


def test_a_copy_without_a_change_passes():
    copy = mutate(kernels, "WIDEST = 16384", "WIDEST = 16384 + 0", room=room)
    assert copy is not room and copy.softmax is not room.softmax
    for case in CASES[:8]:
        report = judge_case(copy, case)
        assert report, report
