"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.mutants import mutant_tests
from ops.norm_oracle import judge_case, real_cases, small_cases
from ops.oracle import DEVICE

import onepass.ops.norm.norm as module

pytest.importorskip("triton")
from onepass.kernels import column_reduce as strips
from onepass.kernels import grid_sync as meeting
from onepass.kernels import layout, rows
from onepass.ops.norm import backward as norm_backward
from onepass.ops.norm import few_rows
from onepass.ops.norm import forward as norm_forward

HARD = [case for case in real_cases() if case.path and case.dtype.itemsize == 4]
CASES = small_cases() + HARD
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    # ---- forward ----
    "weight rounded to bf16": (rows, "load_scale", "(tl.float32)", "(tl.bfloat16).to(tl.float32)", 68),
    "1 + weight rounded to the weight's type": (rows, "load_scale", "weight + 1.0", "(weight + 1.0).to(tl.bfloat16).to(tl.float32)", 33),
    "zero_centered_gamma forgotten": (rows, "load_scale", " + 1.0 if CENTERED else weight", "", 33),
    "short: h not rounded before it is normalised": (norm_forward, "short_rows", " = h.to(tl.float32)", " += load_block(residual_ptr, rows, columns, R_ROW, inside)", 37),
    "long: h not rounded before it is normalised": (norm_forward, "row_piece", "(x.to(tl.float32) + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)", "x.to(tl.float32) + residual.to(tl.float32)", 21),
    "short: residual read at x's stride": (norm_forward, "short_rows", "R_ROW, inside", "X_ROW, inside", 49),
    "long: residual read at x's stride": (norm_forward, "_long_kernel", "residual_ptr += row * aligned(R_ROW", "residual_ptr += row * aligned(X_ROW", 18),
    "short: x read without its stride": (norm_forward, "short_rows", "X_ROW, inside", "H, inside", 48),
    "short: columns outside count in the variance": (norm_forward, "short_rows", "tl.where(within[None, :], x - mean[:, None], 0.0)", "x - mean[:, None]", 48),
    "long: columns outside count in the variance": (norm_forward, "long_statistics", " = tl.where(inside_row(AGAIN + i * BLOCK_H + lanes, H, AGAIN + (i + 1) * BLOCK_H <= H), x - mean, 0.0)", " -= mean", 55),
    "short: eps inside out": (norm_forward, "short_rows", "tl.sqrt(tl.sum(x * x, 1) / H + eps)", "(tl.sqrt(tl.sum(x * x, 1) / H) + eps)", 67),
    "long: eps inside out": (norm_forward, "long_statistics", "tl.sqrt(tl.sum(squares, 0) / H + eps)", "(tl.sqrt(tl.sum(squares, 0) / H) + eps)", 96),
    "short: the variance of a sample": (norm_forward, "short_rows", "(x * x, 1) / H", "(x * x, 1) / (H - 1)", 39),
    "long: the first piece is not normalised": (norm_forward, "_long_kernel", "back in range(0, AGAIN, BLOCK_H)", "back in range(0, AGAIN - BLOCK_H, BLOCK_H)", 57),
    "long: variance as a difference": (norm_forward, "_add_groups", "(away * away, 1)", "(x * x, 1) - GROUP * mean * mean", 82),
    "long: the square of the first step": (norm_forward, "_add_groups", "tl.fma(step, step * (GROUP * met * part), squares + tl.sum(away * away, 1))", "squares + tl.sum(away * away, 1) + step * step * (GROUP * met * part)", 84),
    "long: groups join as if they were the first": (norm_forward, "_add_groups", " / (met + 1.0)", "", 55),
    "long: a group's distance from the others is forgotten": (norm_forward, "_add_groups", "tl.fma(step, step * (GROUP * met * part), squares + tl.sum(away * away, 1))", "squares + tl.sum(away * away, 1)", 55),
    "long: the groups' distances from the row's mean are forgotten": (norm_forward, "long_statistics", "        squares += (means - mean) * (means - mean) * EACH\n", "", 55),
    "long: what is held is not in the mean": (norm_forward, "long_statistics", "sums += tl.sum(_groups(held[i], GROUP), 1)", "pass", 55),
    "long: what is held is normalised in another's place": (norm_forward, "_long_kernel", " = still_packed(held[i])", " = still_packed(held[0])", 55),
    "a store one column too far": (rows, "inside_row", "columns <", "columns <=", 39),
    "short: a row too many": (norm_forward, "short_rows", "rows < M", "rows <= M", 39),
    "short: y rounded through bf16": (norm_forward, "_short_kernel", "tl.fma(x * rstd, weight, bias)", "tl.fma(x * rstd, weight, bias).to(tl.bfloat16).to(tl.float32)", 39),
    # ---- heads that are a part of wider rows ----
    "heads: groups a row apart": (rows, "block_offsets", "INNER * GAP", "INNER * ROW", 62),
    "heads: a group one row longer": (rows, "block_offsets", " // INNER", " // (INNER + 1)", 62),
    "heads: each row a group": (rows, "block_offsets", " // INNER ", " ", 62),
    "heads: a gap from start to start": (layout, "groups_of", " - inner * row", "", 62),
    "heads: groups in rows' place": (layout, "groups_of", "row, outer - inner * row", "outer, row - inner * outer", 62),
    "heads: one too few": (layout, "groups_of", "row, inner", "row, inner - 1", 62),
    "heads: merged with a gap between": (layout, "_levels", " == size *", " >= size *", 58),
    "heads: forward reads whole rows": (norm_forward, "short_rows", "inside, X_GAP, X_INNER", "inside", 62),
    "heads: forward's gap a multiple of 8": (norm_forward, "_bind", "x_gap or 0, ", "", 60),
    "heads: dy read as x": (norm_backward, "_rows_kernel", "DY_GAP, DY_INNER", "X_GAP, X_INNER", 62),
    "heads: statistics again of whole rows": (norm_backward, "_rows_kernel", "H, X_GAP, X_INNER)", "H)", 60),
    "heads: x read again as whole rows": (norm_backward, "_rows_kernel", "H, X_GAP, X_INNER\n", "H\n", 62),
    "heads: backward's gaps multiples of 8": (norm_backward, "_plan", "dy_gap or 0, dh_row, x_row, x_gap or 0", "dh_row, x_row", 62),
    # ---- backward, whole rows ----
    "reloaded weights without their 1": (norm_backward, "_rows_kernel", "load_scale(weight_ptr, columns, columns < H, CENTERED)[None, :] ", "load_vector(weight_ptr, columns, columns < H)[None, :] ", 44),
    "rows: dh forgotten": (norm_backward, "_rows_kernel", "rstd, _chunk", "rstd, 0.0 * _chunk", 34),
    "rows: dh goes through the norm's scale": (norm_backward, "_rows_kernel", "rstd, _chunk", "rstd, rstd * _chunk", 34),
    "rows: no mean of g": (norm_backward, "_rows_kernel", " -= mean_g", " -= 0.0 * mean_g", 42),
    "rows: dweight of weighted dy": (norm_backward, "_rows_kernel", "[i], dy, z, FOLD", "[i], dy * weights[i], z, FOLD", 68),
    "rows: dweight of the first chunk for all": (norm_backward, "_rows_kernel", "dweights[i]", "dweights[0]", 86),
    "rows: folded sums of the first row alone": (norm_backward, "_add_rows", "if FOLD else", "* 0.5 if FOLD else", 42),
    "rows: folded products of a row too few": (norm_backward, "_add_products", "tl.sum(a * b, 0)", "0.5 * tl.sum(a * b, 0)", 57),
    "rows: last block of rows lost": (norm_backward, "norm_backward", "ceil_div(blocks, programs)", "(blocks // programs)", 1),
    "rows: a block counted twice": (norm_backward, "_rows_kernel", "programs * BLOCK_M,", "(programs - 1) * BLOCK_M,", 68),
    "rows: rows past the end are counted": (norm_backward, "_rows_kernel", "rows < M", "rows <= M", 68),
    "rows: statistics again without eps": (norm_backward, "_statistics", " / H + eps", " / H", 70),
    "rows: statistics again count columns outside": (norm_backward, "_statistics", "tl.where((i * BLOCK_H + tl.arange(0, BLOCK_H) < H)[None, :], away - mean, 0.0)", "away - mean", 65),
    "rows: statistics again of the first chunk": (norm_backward, "_statistics", "1, CHUNKS", "2, CHUNKS", 89),
    "rows: dbias's sums where dweight's are": (norm_backward, "finish_sums", " + (PARTS - 1) * H", "", 42),
    "rows: partial sums in bf16": (norm_backward, "_store_sums", "partial_ptr + columns, total", "partial_ptr + columns, total.to(tl.bfloat16).to(tl.float32)", 68),
    "rows: one program's sums are nobody's": (norm_backward, "_store_sums", "(columns < H) & alone", "(columns < 0) & alone", 57),
    "rows: one program's sums in bf16": (norm_backward, "_store_sums", "out_ptr + columns, total", "out_ptr + columns, total.to(tl.bfloat16).to(tl.float32)", 55),
    "rows: each program is alone": (norm_backward, "finish_sums", "programs == 1", "programs > 0", 68),
    "rows: dx rounded through bf16": (norm_backward, "_rows_kernel", "real, dx", "real, dx.to(tl.bfloat16).to(tl.float32)", 67),
    # ---- backward, few rows ----
    "few: dh forgotten": (few_rows, "_row_gradient", "rstd, tl.load(dh_ptr", "rstd, 0.0 * tl.load(dh_ptr", 49),
    "few: no scale of the norm": (few_rows, "_row_gradient", "            dx *= rstd\n", "            pass\n", 39),
    "few: x without its stride": (few_rows, "_row_gradient", "row * X_ROW", "row * H", 48),
    "few: no mean of g": (few_rows, "_row_gradient", "dx -= tl.sum(g, 0) / H", "dx -= 0.0", 48),
    "few: x' without its mean": (few_rows, "_row_gradient", "(x - tl.load(stats_ptr + M + row) if LAYER else x)", "x", 48),
    "few: the mean of the row before": (few_rows, "_few_rows_kernel", "stats_ptr + M + rows", "stats_ptr + M - 1 + rows", 48),
    "few: weight as it is stored": (few_rows, "_row_gradient", "columns < H, CENTERED", "columns < H, False", 33),
    "few: dx rounded through bf16": (few_rows, "_row_gradient", "columns, dx,", "columns, dx.to(tl.bfloat16).to(tl.float32),", 39),
    "few: the last row is nobody's": (few_rows, "few_rows_backward", "else M\n", "else M - 1\n", 39),
    "few: rows from the second on": (few_rows, "_few_rows_kernel", "(program - TILES)", "(program - TILES + 1)", 39),
    "few: rows past the end are counted": (few_rows, "_few_rows_kernel", "rows < M", "rows <= M", 48),
    "few: the first block of rows alone": (few_rows, "_few_rows_kernel", "range(0, M, TILE_M)", "range(0, tl.minimum(M, TILE_M), TILE_M)", 48),
    "few: dweight of dx's weight": (few_rows, "_few_rows_kernel", "tl.fma(dy, z, dweight)", "tl.fma(2.0 * dy, z, dweight)", 48),
    "few: dweight of x as it is": (few_rows, "_few_rows_kernel", "                z *= tl.load(stats_ptr + rows, mask=real, other=0.0)[:, None]\n", "", 48),
    "few: dbias of one row too many": (few_rows, "_few_rows_kernel", "dbias += dy", "dbias += dy * (1 + (rows == 0))[:, None]", 48),
    "few: last tile of columns left out": (few_rows, "_plan", "ceil_div(H, tiles.block_h)", "max(1, H // tiles.block_h)", 48),
    "few: a column past the row": (few_rows, "_store_columns", "columns < H)", "columns <= H)", 48),
    "few: sums in bf16": (few_rows, "_store_columns", "columns, total, mask", "columns, total.to(tl.bfloat16).to(tl.float32), mask", 48),
    # ---- backward, shared rows ----
    "shared: dh forgotten": (norm_backward, "_shared_kernel", "rstd, _tile", "rstd, 0.0 * _tile", 26),
    "shared: dh of the next row": (norm_backward, "_shared_kernel", "dh_ptr, row", "dh_ptr, row + groups", 26),
    "shared: product not of distances from the mean": (norm_backward, "_publish_parts", "(z - mean if LAYER else z)", "z", 98),
    "shared: no mean of g": (norm_backward, "_shared_kernel", ", -sum_g / H", ", 0.0 * sum_g", 98),
    "shared: one slot too few": (norm_backward, "", "SLOTS = 4", "SLOTS = 1", 96),
    "shared: reads this round's slot, writes the same": (norm_backward, "_shared_kernel", "(turn + 1)", "turn", 96),
    "shared: a round behind": (norm_backward, "_shared_kernel", "words, turn + 1", "words, turn", 96),
    "shared: waits a round too far": (norm_backward, "_shared_kernel", "words, turn + 1", "words, turn + 2", 96),
    "shared: the tiles that are not there count": (norm_backward, "_shared_kernel", "others < USED", "others < TILES", 96),
    "shared: sum of g where the products are": (norm_backward, "_publish_parts", " + SLOT, sum_g", ", sum_g", 98),
    "shared: groups share their words": (norm_backward, "_shared_kernel", " + group * (SLOTS * MEANS * SLOT)", "", 97),
    "shared: some words not cleared": (norm_backward, "_shared_kernel", "groups * (SLOTS * MEANS * SLOT)", "groups * (SLOTS * SLOT)", 98),
    "shared: nobody clears": (norm_backward, "_shared_kernel", "(arrived_ptr, helpers)", "(arrived_ptr, helpers) < 0", 96),
    "shared: last row lost": (norm_backward, "_shared_kernel", " - group,", " - 1 - group,", 96),
    "shared: next row is the neighbour group's": (norm_backward, "_shared_kernel", "x_ptr, row + groups", "x_ptr, row + 1", 98),
    "shared: last tile's columns past the row": (norm_backward, "_shared_kernel", "H % BLOCK_H == 0", "True", 96),
    # ---- programs that meet ----
    "meeting: the number sign-extended over its round": (meeting, "publish", " & 0xFFFFFFFF", "", 96),
    "meeting: does not wait": (meeting, "await_all", " < round:", " < 0:", 96),
    "meeting: one there is enough": (meeting, "await_all", "min", "max", 96),
    "meeting: leaves a slot as it is": (meeting, "clear", "at < count", "at < count - 16", 31),
    "meeting: clears a word too many": (meeting, "clear", "mask=at <", "mask=at <=", 96),
    "strips: helpers do not wait": (strips, "join_helpers", "programs:", "0:", 96),
    "strips: helpers wait for one too many": (strips, "join_helpers", "programs:", "programs + 1:", 68),
    "strips: a helper too few": (strips, "join_helpers", " - helpers", " - helpers + 1", 68),
    "strips: one helper's tiles left out": (strips, "share_columns", "(H, BLOCK_H), helpers", "(H, BLOCK_H), helpers + 1", 68),
    "strips: last tile of columns left out": (strips, "share_columns", "tl.cdiv(H, BLOCK_H)", "H // BLOCK_H", 68),
    "strips: dbias of dweight's partials": (strips, "share_tiles", " + WIDTH - H", "", 42),
    "strips: partials as wide as one sum": (strips, "share_tiles", " * 2 if out_ptr is not None and other_ptr is not None else H", "", 42),
    "strips: a strip too few": (strips, "add_strips", " < STRIPS", " < STRIPS - 1", 68),
    "strips: only one pass over them": (strips, "add_strips", "0, STRIPS", "0, tl.minimum(STRIPS, BLOCK_S)", 42),
    "strips: the last to leave is the one before": (strips, "leave_helpers", "helpers - 1", "helpers - 2", 68),
    "strips: counter of arrivals not set back": (strips, "leave_helpers", "arrived_ptr, 0)\n        tl.store(arrived_ptr", "arrived_ptr", 68),
    "strips: counter of leavers not set back": (strips, "leave_helpers", "        tl.store(arrived_ptr + 1, 0)\n", "", 68),
    "shared: sums of the strips of one program alone": (norm_backward, "_shared_kernel", "num_programs(0)  ", "num_programs(0) // 2 + 1  ", 96),
    "shared: only the first strips are summed": (norm_backward, "_shared_kernel", "groups, H", "tl.minimum(groups, 3), H", 98),
    # ---- autograd ----
    "op: the residual's gradient without h's own": (module, "_NormFunction.backward", "dy, dh, x", "dy, None, x", 49),
    "op: x kept in the place of h": (module, "_NormFunction.forward", "x if residual is None else h", "x", 49),
    "op: eps of the default in backward": (module, "_NormFunction.backward", "options, *", "options._replace(eps=1e-6), *", 70),
    "op: centered forgotten in backward": (module, "_NormFunction.backward", "options, *", "options._replace(zero_centered_gamma=False), *", 33),
}  # fmt: skip


test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(
    module, MUTANTS, CASES, judge_case, CASES[::5], errors=AssertionError
)
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="some wait for ever on a GPU, where nobody takes the turn from them")
