"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.calls import caught
from ops.rope_oracle import judge_case, small_cases

import onepass.ops.attention.rope as module

pytest.importorskip("triton")
from onepass.kernels import launch, rows
from onepass.ops.attention import rope_kernels as kernels
from onepass.testing.mutants import mutate

CASES = small_cases()
MUTANTS = {  # name: module, what is there, what stands there instead[, how often it is there]
    # ---- what is turned ----
    "turned the other way": (kernels, "    if BACK:\n        sin = -sin\n", "    if not BACK:\n        sin = -sin\n"),
    "backward turns on": (kernels, "    if BACK:\n        sin = -sin\n", "    if BACK:\n        sin = sin\n"),
    "backward mirrors": (kernels, "tl.fma(x2, cos, x1 * sin)", "tl.fma(x2, -cos if BACK else cos, x1 * sin)"),
    "backward is the inverse": (kernels, "        sin = -sin\n", "        cos, sin = cos / (cos * cos + sin * sin), -sin / (cos * cos + sin * sin)\n"),
    "sin for cos": (kernels, "cos = _angles(cos_ptr, sequence, tokens, real, COS_M, COS_S", "cos = _angles(sin_ptr, sequence, tokens, real, COS_M, COS_S"),
    "sin read at cos's strides": (kernels, "real, SIN_M, SIN_S, P", "real, COS_M, COS_S, P"),
    "tables rounded to bf16": (kernels, "mask=inside, other=0.0).to(tl.float32)\n\n\n@device_function\ndef _turn(", "mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)\n\n\n@device_function\ndef _turn("),
    "interleaved: x rounded to bf16": (kernels, "x = tl.load(x_head + columns, mask=inside, other=0.0).to(tl.float32)", "x = tl.load(x_head + columns, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)"),
    "halves: y1 rounded twice": (kernels, "tl.store(y_head + columns, y1, mask=inside)", "tl.store(y_head + columns, y1.to(tl.bfloat16).to(tl.float32), mask=inside)"),
    "halves: the same half twice": (kernels, "x2 = tl.load(x_head + P + columns", "x2 = tl.load(x_head + columns"),
    "halves: of the whole head": (kernels, "x2 = tl.load(x_head + P + columns", "x2 = tl.load(x_head + D // 2 + columns"),
    "halves: stored in each other's place": (kernels, "y1, y2 = _turn(x1, x2, cos, sin, BACK)\n            tl.store", "y2, y1 = _turn(x1, x2, cos, sin, BACK)\n            tl.store"),
    "interleaved: stored in each other's place": (kernels, "tl.join(y1, y2)", "tl.join(y2, y1)"),
    "interleaved taken for halves": (kernels, "if INTERLEAVED:\n", "if INTERLEAVED and BACK:\n"),
    "backward in halves": (module, "dk, interleaved, True)", "dk, False, True)"),
    "rest forgotten": (kernels, "tl.store(y_head + 2 * P + columns, rest, mask=inside)", "tl.store(y_head + 2 * P + columns, rest, mask=inside & (columns < 0))"),
    "rest one too far": (kernels, "inside_row(columns, D - 2 * P, D - 2 * P == BLOCK_R)", "inside_row(columns, D - 2 * P + 1, D - 2 * P == BLOCK_R)"),
    "rest at the half": (kernels, "rest = tl.load(x_head + 2 * P + columns", "rest = tl.load(x_head + P + columns"),
    # ---- where it lies ----
    "a pair too many": (rows, "if WHOLE else columns < H\n", "if WHOLE else columns <= H\n"),
    "lanes past the pairs taken for pairs": (kernels, "inside = there & inside_row(columns, P, P == BLOCK_P)", "inside = there & inside_row(columns, P, True)"),
    "interleaved: lanes past the pairs taken for pairs": (kernels, "inside_row(columns, 2 * P, P == BLOCK_P)", "inside_row(columns, 2 * P, True)"),
    "heads past the last": (kernels, "inside_row(heads, HEADS, HEADS % BLOCK_H == 0)", "inside_row(heads, HEADS, True)"),
    "tokens past the last": (kernels, "real = (tokens < S) & (sequence < M)", "real = (tokens <= S) & (sequence < M)"),
    "only the first heads": (kernels, "for first in range(0, HEADS, BLOCK_H):", "for first in range(0, BLOCK_H, BLOCK_H):"),
    "k with q's heads": (kernels, "            HK, D, P, INTERLEAVED", "            HQ, D, P, INTERLEAVED"),
    "k at q's strides": (kernels, "sin, K_M, K_S, K_H,", "sin, Q_M, Q_S, Q_H,"),
    "heads evenly after each other": (kernels, "x_head = x_token + (heads.to(tl.int64) * X_H)", "x_head = x_token + (heads.to(tl.int64) * D)"),
    "tokens evenly after each other": (kernels, "sequence * X_M + tokens * X_S", "sequence * X_M + tokens * (HEADS * D)"),
    "sequences evenly after each other": (kernels, "sequence * X_M + tokens * X_S", "(sequence + tokens) * X_S"),
    "all sequences in the first's place": (kernels, "(y_ptr + sequence * Y_M", "(y_ptr + sequence * 0"),
    "all tokens in the first's place": (kernels, "sequence * Y_M + tokens * Y_S", "sequence * Y_M + tokens * 0"),
    "the first sequence's angles for all": (kernels, "sequence * TABLE_M + tokens * TABLE_S", "tokens * TABLE_S"),
    "programs a token apart": (kernels, "tl.program_id(0).to(tl.int64) * BLOCK_S + ", "tl.program_id(0).to(tl.int64) + "),
    "too few programs": (kernels, "grid_of(ceil_div(S, tiles.block_s), M)", "grid_of(max(1, S // tiles.block_s), M)"),
    "multiples of 8 promised": (kernels, "align = known_align(*flat)", "align = 8"),
    "tables' multiples of 8 promised": (kernels, "known_align(*table_strides)", "8"),
    # ---- layouts ----
    "dimensions merged by the first tensor": (kernels, "if found and all(outer == size * inner for outer, inner in zip(found[-1][1], each, strict=True)):", "if found and found[-1][1][0] == size * each[0]:"),
    "merged dimensions all in one place": (kernels, "found[-1] = found[-1][0] * size, each", "found[-1] = found[-1][0] * size, (0,) * len(each)"),
    "all dimensions merged": (kernels, "if found and all(", "if found and any("),
    "broadcast tables at a stride": (kernels, "[0 if size == 1 else stride for size, stride", "[stride for size, stride"),
    "tables aligned on the left": (kernels, "return (0,) * (len(tokens) - len(own)) + tuple(own)", "return tuple(own) + (0,) * (len(tokens) - len(own))"),
    "numbers apart taken for neighbours": (kernels, "any(stride[-1] != 1 for _, stride in given) or ", ""),
    "tables' numbers apart taken for neighbours": (kernels, " or (P > 1 and cos[1][-1] * sin[1][-1] != 1)", ""),
    "one plan for all tables": (kernels, "table_strides = by_sequence[0], by_token[0], by_sequence[1], by_token[1]", "table_strides = by_sequence[0], by_token[0], by_sequence[0], by_token[0]"),
    # ---- autograd ----
    "gradients exchanged": (module, "_backward)(ctx, dq, dk)", "_backward)(ctx, dk, dq)"),
    "gradients unturned": (module, "dk, interleaved, True)", "dk, interleaved, False)"),
    "sin kept as cos": (module, "ctx.save_for_backward(cos, sin)", "ctx.save_for_backward(sin, cos)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    changed, old, new, *times = MUTANTS[name]
    mutant = mutate(changed, old, new, room=module, times=times[0] if times else 1)
    assert caught(mutant, CASES, judge_case), "no case catches it"


def test_a_copy_without_a_change_passes():
    copy = mutate(launch, "_INT32_MAX = 0x7FFFFFFF", "_INT32_MAX = 2147483647", room=module)
    assert copy is not module
    assert copy.rope is not module.rope
    for case in CASES[::3]:
        report = judge_case(copy, case)
        assert report, report
