"""Each mutant is a small, plausible slip, and the oracle that the real room passes must catch it."""

import pytest
from ops.norm_oracle import DEVICE, judge_case, real_cases, small_cases

import onepass.ops.norm.norm as room

pytest.importorskip("triton")
from onepass.kernels import column_reduce as strips
from onepass.kernels import grid_sync as meeting
from onepass.kernels import launch, layout, rows
from onepass.ops.norm import backward as norm_backward
from onepass.ops.norm import forward as norm_forward
from onepass.testing.mutants import mutate

ROWS, CHUNKS, FOLD, SHARED = "rows", "chunks", "fold", "shared"
ALONE, LARGE, HEADS = "one program", "large mean", "heads"  # kinds of cases too
HARD = [case for case in real_cases() if case.path and case.dtype.itemsize == 4]
CASES = small_cases() + HARD
MUTANTS = {  # name: module, what is there, what stands there instead, the kind of cases that are tried first[, how often it is there]
    # ---- forward ----
    "weight rounded to bf16": (
        rows,
        "weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)",
        "weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)",
        ROWS,
    ),
    "1 + weight rounded to the weight's type": (
        rows,
        "return weight + 1.0 if CENTERED",
        "return (weight + 1.0).to(tl.bfloat16).to(tl.float32) if CENTERED",
        ROWS,
    ),
    "zero_centered_gamma forgotten": (rows, "return weight + 1.0 if CENTERED else weight", "return weight", ROWS),
    "short: h not rounded before it is normalised": (
        norm_forward,
        "        x = h.to(tl.float32)\n",
        "        x += load_block(residual_ptr, rows, columns, R_ROW, inside)\n",
        ROWS,
    ),
    "long: h not rounded before it is normalised": (
        norm_forward,
        "return (x.to(tl.float32) + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)",
        "return x.to(tl.float32) + residual.to(tl.float32)",
        CHUNKS,
    ),
    "short: residual read at x's stride": (norm_forward, "columns, R_ROW, inside)", "columns, X_ROW, inside)", ROWS),
    "long: residual read at x's stride": (norm_forward, "residual_ptr + row * R_ROW", "residual_ptr + row * X_ROW", CHUNKS),
    "short: x read without its stride": (
        norm_forward,
        "x = load_block(x_ptr, rows, columns, X_ROW, inside",
        "x = load_block(x_ptr, rows, columns, H, inside",
        ROWS,
    ),
    "short: columns outside count in the variance": (
        norm_forward,
        "x = tl.where(within[None, :], x - mean[:, None], 0.0)",
        "x = x - mean[:, None]",
        ROWS,
    ),
    "long: columns outside count in the variance": (
        norm_forward,
        "x = tl.where(inside_row(AGAIN + i * BLOCK_H + lanes, H, AGAIN + (i + 1) * BLOCK_H <= H), x - mean, 0.0)",
        "x -= mean",
        CHUNKS,
    ),
    "short: eps inside out": (
        norm_forward,
        "1.0 / tl.sqrt(tl.sum(x * x, 1) / H + eps)",
        "1.0 / (tl.sqrt(tl.sum(x * x, 1) / H) + eps)",
        ROWS,
    ),
    "long: eps inside out": (
        norm_forward,
        "1.0 / tl.sqrt(tl.sum(squares, 0) / H + eps)",
        "1.0 / (tl.sqrt(tl.sum(squares, 0) / H) + eps)",
        CHUNKS,
    ),
    "short: the variance of a sample": (norm_forward, "tl.sum(x * x, 1) / H", "tl.sum(x * x, 1) / (H - 1)", ROWS),
    "long: the first piece is not normalised": (norm_forward, "for back in range(0, AGAIN, BLOCK_H)", "for back in range(0, AGAIN - BLOCK_H, BLOCK_H)", CHUNKS),
    "long: variance as a difference": (
        norm_forward,
        "squares + tl.sum(away * away, 1)",
        "squares + tl.sum(x * x, 1) - GROUP * mean * mean",
        LARGE,
    ),
    "long: the square of the first step": (norm_forward, "step * (step * (GROUP * met * part))", "step * step * (GROUP * met * part)", CHUNKS),
    "long: groups join as if they were the first": (norm_forward, "    part = 1.0 / (met + 1.0)\n", "    part = 1.0\n", CHUNKS),
    "long: a group's distance from the others is forgotten": (norm_forward, " + step * (step * (GROUP * met * part))", "", CHUNKS),
    "long: the groups' distances from the row's mean are forgotten": (
        norm_forward,
        "        squares += (means - mean) * (means - mean) * EACH\n",
        "",
        CHUNKS,
    ),
    "long: what is held is not in the mean": (norm_forward, "            sums += tl.sum(_groups(held[i], GROUP), 1)\n", "            pass\n", CHUNKS),
    "long: what is held is normalised in another's place": (norm_forward, "h = still_packed(held[i])", "h = still_packed(held[0])", CHUNKS),
    "a store one column too far": (rows, "if WHOLE else columns < H\n", "if WHOLE else columns <= H\n", CHUNKS),
    "short: a row too many": (norm_forward, "    real = rows < M\n", "    real = rows <= M\n", ROWS),
    "short: y rounded through bf16": (
        norm_forward,
        "x * rstd[:, None] * weight + bias, mask",
        "(x * rstd[:, None] * weight + bias).to(tl.bfloat16).to(tl.float32), mask",
        ROWS,
    ),
    # ---- heads that are a part of wider rows ----
    "heads: groups a row apart": (rows, "rows[:, None] // INNER * GAP", "rows[:, None] // INNER * ROW", HEADS),
    "heads: a group one row longer": (rows, "rows[:, None] // INNER * GAP", "rows[:, None] // (INNER + 1) * GAP", HEADS),
    "heads: each row a group": (rows, "rows[:, None] // INNER * GAP", "rows[:, None] * GAP", HEADS),
    "heads: a gap from start to start": (layout, "(row, outer - inner * row, inner)", "(row, outer, inner)", HEADS),
    "heads: groups in rows' place": (layout, "(row, outer - inner * row, inner)", "(outer, row - inner * outer, inner)", HEADS),
    "heads: one too few": (layout, "(row, outer - inner * row, inner)", "(row, outer - inner * row, inner - 1)", HEADS),
    "heads: merged with a gap between": (layout, "levels[-1][1] == size * stride", "levels[-1][1] >= size * stride", HEADS),
    "heads: forward reads whole rows": (norm_forward, "inside, X_GAP, X_INNER)", "inside)", HEADS),
    "heads: forward's gap a multiple of 8": (norm_forward, "known_align(x_row, x_gap or 0, r_row)", "known_align(x_row, r_row)", HEADS),
    "heads: dy read as x": (norm_backward, "DY_GAP, DY_INNER)\n", "X_GAP, X_INNER)\n", HEADS),
    "heads: statistics again of whole rows": (norm_backward, "<= H, X_GAP, X_INNER),)", "<= H),)", HEADS),
    "heads: x read again as whole rows": (norm_backward, "(i + 1) * BLOCK_H <= H, X_GAP, X_INNER\n", "(i + 1) * BLOCK_H <= H\n", HEADS),
    "heads: backward's gaps multiples of 8": (norm_backward, "dy_row, dy_gap or 0, dh_row, x_row, x_gap or 0)", "dy_row, dh_row, x_row)", HEADS),
    # ---- backward, whole rows ----
    "late weights without their 1": (
        norm_backward,
        "load_scale(weight_ptr, columns, columns < H, CENTERED)[None, :] if LATE",
        "load_vector(weight_ptr, columns, columns < H)[None, :] if LATE",
        "late",
    ),
    "rows: dh forgotten": (
        norm_backward,
        "dx += _chunk(dh_ptr, rows, columns, DH_ROW, real, H, (i + 1) * BLOCK_H <= H)",
        "dx += 0.0 * _chunk(dh_ptr, rows, columns, DH_ROW, real, H, (i + 1) * BLOCK_H <= H)",
        ROWS,
    ),
    "rows: dh goes through the norm's scale": (
        norm_backward,
        "                dx *= rstd\n                if dh_ptr is not None:\n                    dx += _chunk(dh_ptr, rows, columns, DH_ROW, real, H, (i + 1) * BLOCK_H <= H)\n",
        "                if dh_ptr is not None:\n                    dx += _chunk(dh_ptr, rows, columns, DH_ROW, real, H, (i + 1) * BLOCK_H <= H)\n                dx *= rstd\n",
        ROWS,
    ),
    "rows: no mean of g": (norm_backward, "dx -= mean_g\n", "dx -= 0.0 * mean_g\n", CHUNKS),
    "rows: dweight of weighted dy": (norm_backward, "_add_rows(dweights[i], dy * z, FOLD)", "_add_rows(dweights[i], dy * weights[i] * z, FOLD)", ROWS),
    "rows: dweight of the first chunk for all": (norm_backward, "_add_rows(dweights[i], dy * z, FOLD)", "_add_rows(dweights[0], dy * z, FOLD)", FOLD),
    "rows: folded sums of the first row alone": (norm_backward, "(tl.sum(values, 0)[None, :] if FOLD else values)", "(tl.sum(values, 0)[None, :] * 0.5 if FOLD else values)", FOLD),
    "rows: last block of rows lost": (norm_backward, "ceil_div(blocks, programs) * tiles.block_m", "(blocks // programs) * tiles.block_m", ROWS),
    "rows: a block counted twice": (norm_backward, "programs.to(tl.int64), programs * BLOCK_M,", "programs.to(tl.int64), (programs - 1) * BLOCK_M,", ROWS),
    "rows: rows past the end are counted": (norm_backward, "        real = rows < M\n", "        real = rows <= M\n", ROWS),
    "rows: statistics again without eps": (norm_backward, "tl.sum(total, 1) / H + eps)", "tl.sum(total, 1) / H)", ROWS),
    "rows: statistics again count columns outside": (norm_backward, "away = tl.where((i * BLOCK_H + tl.arange(0, BLOCK_H) < H)[None, :], away - mean, 0.0)", "away = away - mean", CHUNKS),
    "rows: statistics again of the first chunk": (norm_backward, "for i in tl.static_range(1, CHUNKS):", "for i in tl.static_range(2, CHUNKS):", CHUNKS),
    "rows: dbias's sums where dweight's are": (norm_backward, "_store_sums(dbias_ptr, at + (PARTS - 1) * H, dbiases", "_store_sums(dbias_ptr, at, dbiases", ROWS),
    "rows: partial sums in bf16": (norm_backward, "tl.store(partial_ptr + columns, total,", "tl.store(partial_ptr + columns, total.to(tl.bfloat16).to(tl.float32),", ROWS),
    "rows: one program's sums are nobody's": (norm_backward, "mask=(columns < H) & alone)", "mask=(columns < 0) & alone)", ALONE),
    "rows: one program's sums in bf16": (norm_backward, "tl.store(out_ptr + columns, total,", "tl.store(out_ptr + columns, total.to(tl.bfloat16).to(tl.float32),", ALONE),
    "rows: each program is alone": (norm_backward, "alone = (programs == 1)", "alone = (programs > 0)", ROWS),
    "rows: dx rounded through bf16": (norm_backward, "_store_chunk(dx_ptr, rows, columns, real, dx, H", "_store_chunk(dx_ptr, rows, columns, real, dx.to(tl.bfloat16).to(tl.float32), H", ROWS),
    # ---- backward, shared rows ----
    "shared: dh forgotten": (norm_backward, "dx += _tile(dh_ptr, row,", "dx += 0.0 * _tile(dh_ptr, row,", SHARED),
    "shared: dh of the next row": (norm_backward, "dx += _tile(dh_ptr, row,", "dx += _tile(dh_ptr, row + groups,", SHARED),
    "shared: product not of distances from the mean": (norm_backward, "g * (z - mean if LAYER else z)", "g * z", SHARED),
    "shared: no mean of g": (norm_backward, " - sum_g / H) * rstd", ") * rstd", SHARED),
    "shared: one slot too few": (norm_backward, "SLOTS = 4 ", "SLOTS = 1 ", SHARED),
    "shared: reads this round's slot, writes the same": (norm_backward, "next_words = words_ptr + (turn + 1) % SLOTS", "next_words = words_ptr + turn % SLOTS", SHARED),
    "shared: a round behind": (norm_backward, "await_all(words, turn + 1)", "await_all(words, turn)", SHARED),
    "shared: waits a round too far": (norm_backward, "await_all(words, turn + 1)", "await_all(words, turn + 2)", SHARED),
    "shared: the tiles that are not there count": (norm_backward, "    there = others < USED\n", "    there = others < TILES\n", SHARED),
    "shared: sum of g where the products are": (norm_backward, "publish(word_ptr + SLOT, sum_g, round)", "publish(word_ptr, sum_g, round)", SHARED),
    "shared: groups share their words": (norm_backward, "words_ptr = all_words_ptr + group * (SLOTS * MEANS * SLOT)", "words_ptr = all_words_ptr", SHARED),
    "shared: some words not cleared": (norm_backward, "clear(all_words_ptr, groups * (SLOTS * MEANS * SLOT))", "clear(all_words_ptr, groups * (SLOTS * SLOT))", SHARED),
    "shared: nobody clears": (norm_backward, "if leave_helpers(arrived_ptr, helpers):", "if leave_helpers(arrived_ptr, helpers) < 0:", SHARED),
    "shared: last row lost": (norm_backward, "tl.cdiv(M - group, groups)", "tl.cdiv(M - 1 - group, groups)", SHARED),
    "shared: next row is the neighbour group's": (norm_backward, "next_x = _tile(x_ptr, row + groups,", "next_x = _tile(x_ptr, row + 1,", SHARED),
    "shared: last tile's columns past the row": (norm_backward, "WHOLE: tl.constexpr = H % BLOCK_H == 0", "WHOLE: tl.constexpr = True", SHARED),
    # ---- programs that meet ----
    "meeting: the number sign-extended over its round": (meeting, ".to(tl.int64) & 0xFFFFFFFF", ".to(tl.int64)", SHARED),
    "meeting: does not wait": (meeting, "while tl.min((words >> 32).to(tl.int32), 0) < round:", "while tl.min((words >> 32).to(tl.int32), 0) < 0:", SHARED),
    "meeting: one there is enough": (meeting, "tl.min((words >> 32)", "tl.max((words >> 32)", SHARED),
    "meeting: leaves a slot as it is": (meeting, "mask=at < count)", "mask=at < count - 16)", SHARED),
    "meeting: clears a word too many": (meeting, "mask=at < count)", "mask=at <= count)", SHARED),
    "strips: helpers do not wait": (strips, "while tl.atomic_add(arrived_ptr, 0, sem=\"acquire\") < programs:", "while tl.atomic_add(arrived_ptr, 0, sem=\"acquire\") < 0:", ROWS),
    "strips: helpers wait for one too many": (strips, "sem=\"acquire\") < programs:", "sem=\"acquire\") < programs + 1:", ROWS),
    "strips: a helper too few": (strips, "- (programs - helpers)", "- (programs - helpers + 1)", ROWS),
    "strips: one helper's tiles left out": (strips, "for tile in range(helper, tl.cdiv(H, BLOCK_H), helpers)", "for tile in range(helper, tl.cdiv(H, BLOCK_H), helpers + 1)", "single"),
    "strips: last tile of columns left out": (strips, "range(helper, tl.cdiv(H, BLOCK_H),", "range(helper, H // BLOCK_H,", ROWS),
    "strips: dbias of dweight's partials": (strips, "_share(partial_ptr + WIDTH - H, other_ptr", "_share(partial_ptr, other_ptr", CHUNKS),
    "strips: partials as wide as one sum": (strips, "WIDTH = H * 2 if out_ptr is not None and other_ptr is not None else H", "WIDTH = H", CHUNKS),
    "strips: a strip too few": (strips, "mask = (strips < STRIPS)", "mask = (strips < STRIPS - 1)", ROWS),
    "strips: only one pass over them": (strips, "for first in range(0, STRIPS, BLOCK_S):", "for first in range(0, tl.minimum(STRIPS, BLOCK_S), BLOCK_S):", "single"),
    "strips: the last to leave is the one before": (strips, "== helpers - 1", "== helpers - 2", ROWS),
    "strips: counter of arrivals not set back": (strips, "        tl.store(arrived_ptr, 0)\n        tl.store(arrived_ptr + 1", "        tl.store(arrived_ptr + 1", ROWS),
    "strips: counter of leavers not set back": (strips, "        tl.store(arrived_ptr + 1, 0)\n", "", ROWS),
    "shared: sums of the strips of one program alone": (norm_backward, "helpers = tl.num_programs(0)  #", "helpers = tl.num_programs(0) // 2 + 1  #", "crowd"),
    "shared: only the first strips are summed": (norm_backward, "helper, helpers, groups, H, ADD, SHARE_S", "helper, helpers, tl.minimum(groups, 3), H, ADD, SHARE_S", "crowd"),
    # ---- autograd ----
    "op: the residual's gradient without h's own": (room, "grads, dy, dh, x, weight", "grads, dy, None, x, weight", ROWS),
    "op: x kept in the place of h": (room, "x if residual is None else h, weight", "x, weight", ROWS),
    "op: eps of the default in backward": (room, "stats, options, *needs, dx_type", "stats, options._replace(eps=1e-6), *needs, dx_type", ROWS),
    "op: centered forgotten in backward": (room, "stats, options, *needs, dx_type", "stats, options._replace(zero_centered_gamma=False), *needs, dx_type", ROWS),
}  # fmt: skip


def kinds(case):
    alone = case.path == CHUNKS and case.lead == (2,)
    heads = "part" in (case.layout, case.dy_layout)
    return {case.path, LARGE if case.mean == 100 else "", ALONE if alone else "", HEADS if heads else ""}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    module, old, new, kind, *times = MUTANTS[name]
    mutant = mutate(module, old, new, room=room, times=times[0] if times else 1)
    for case in sorted(CASES, key=lambda case: kind not in kinds(case)):
        try:
            if not judge_case(mutant, case):
                return
        except Exception as error:
            if "wait for each other" in str(error):
                return
            raise
    pytest.fail("no case catches it")


def test_a_copy_without_a_change_passes():
    copy = mutate(launch, "_INT32_MAX = 0x7FFFFFFF", "_INT32_MAX = 2147483647", room=room)
    assert copy is not room and copy.rms_norm is not room.rms_norm
    for case in CASES[::5]:
        report = judge_case(copy, case)
        assert report, report


pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="some wait for ever on a GPU, where nobody takes the turn from them")
