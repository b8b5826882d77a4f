"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.calls import caught
from ops.rope_oracle import judge_case, small_cases

import onepass.ops.attention.rope as module

pytest.importorskip("triton")
from onepass.kernels import rows
from onepass.ops.attention import rope_kernels as kernels
from onepass.testing.mutants import copy_package, mutate

CASES = small_cases()
MUTANTS = {  # name: module, function, what is there, what stands there instead
    # ---- what is turned ----
    "turned the other way": (kernels, "_turn", "if BACK:", "if not BACK:"),
    "backward turns on": (kernels, "_turn", "sin = -sin", "sin = sin"),
    "backward mirrors": (kernels, "_turn", "cos, x1 *", "-cos if BACK else cos, x1 *"),
    "backward is the inverse": (kernels, "_turn", "sin = -sin", "cos, sin = cos / (cos * cos + sin * sin), -sin / (cos * cos + sin * sin)"),
    "sin for cos": (kernels, "_rope_kernel", "cos_ptr, sequence", "sin_ptr, sequence"),
    "sin read at cos's strides": (kernels, "_rope_kernel", "SIN_M, SIN_S, P", "COS_M, COS_S, P"),
    "tables rounded to bf16": (kernels, "_angles", "(tl.float32)", "(tl.bfloat16).to(tl.float32)"),
    "interleaved: x rounded to bf16": (kernels, "_turn_heads", "x = tl.load(x_head + columns, mask=inside, other=0.0).to(tl.float32)", "x = tl.load(x_head + columns, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)"),
    "halves: y1 rounded twice": (kernels, "_turn_heads", "y1, mask", "y1.to(tl.bfloat16).to(tl.float32), mask"),
    "halves: the same half twice": (kernels, "_turn_heads", "x_head + P + ", "x_head + "),
    "halves: of the whole head": (kernels, "_turn_heads", "x_head + P", "x_head + D // 2"),
    "halves: stored in each other's place": (kernels, "_turn_heads", "y1, y2 = _turn(x1, x2, cos, sin, BACK)\n            tl", "y2, y1 = _turn(x1, x2, cos, sin, BACK)\n            tl"),
    "interleaved: stored in each other's place": (kernels, "_turn_heads", "(y1, y2)", "(y2, y1)"),
    "interleaved taken for halves": (kernels, "_turn_heads", "INTERLEAVED:\n", "INTERLEAVED and BACK:\n"),
    "backward in halves": (module, "_backward", "dk, interleaved", "dk, False"),
    "rest forgotten": (kernels, "_turn_heads", "rest, mask=inside", "rest, mask=inside & (columns < 0)"),
    "rest one too far": (kernels, "_turn_heads", "P, D - 2", "P + 1, D - 2"),
    "rest at the half": (kernels, "_turn_heads", "x_head + 2 * ", "x_head + "),
    # ---- where it lies ----
    "a pair too many": (rows, "inside_row", "columns <", "columns <="),
    "lanes past the pairs taken for pairs": (kernels, "_turn_heads", "columns, P, P == BLOCK_P", "columns, P, True"),
    "interleaved: lanes past the pairs taken for pairs": (kernels, "_turn_heads", " * P, P == BLOCK_P", " * P, True"),
    "heads past the last": (kernels, "_turn_heads", "HEADS % BLOCK_H == 0", "True"),
    "tokens past the last": (kernels, "_rope_kernel", "tokens <", "tokens <="),
    "only the first heads": (kernels, "_turn_heads", "0, HEADS", "0, BLOCK_H"),
    "k with q's heads": (kernels, "_rope_kernel", "HK, D, P", "HQ, D, P"),
    "k at q's strides": (kernels, "_rope_kernel", "sin, K_M, K_S, K_H", "sin, Q_M, Q_S, Q_H"),
    "heads evenly after each other": (kernels, "_turn_heads", "(tl.int64) * X_H", "(tl.int64) * D"),
    "tokens evenly after each other": (kernels, "_turn_heads", "tokens * X_S", "tokens * (HEADS * D)"),
    "sequences evenly after each other": (kernels, "_turn_heads", "sequence * X_M + tokens", "(sequence + tokens)"),
    "all sequences in the first's place": (kernels, "_turn_heads", "sequence * Y_M", "sequence * 0"),
    "all tokens in the first's place": (kernels, "_turn_heads", "tokens * Y_S", "tokens * 0"),
    "the first sequence's angles for all": (kernels, "_angles", "sequence * TABLE_M + ", ""),
    "programs a token apart": (kernels, "_rope_kernel", " * BLOCK_S ", " "),
    "too few programs": (kernels, "_plan", "ceil_div(S, tiles.block_s)", "max(1, S // tiles.block_s)"),
    "multiples of 8 promised": (kernels, "_plan", "known_align(*flat)", "8"),
    "tables' multiples of 8 promised": (kernels, "_plan", "known_align(*table_strides)", "8"),
    # ---- layouts ----
    "dimensions merged by the first tensor": (kernels, "_merge_dims", "all(outer == size * inner for outer, inner in zip(found[-1][1], each, strict=True))", "found[-1][1][0] == size * each[0]"),
    "merged dimensions all in one place": (kernels, "_merge_dims", " * size, each", " * size, (0,) * len(each)"),
    "all dimensions merged": (kernels, "_merge_dims", "found and all", "found and any"),
    "broadcast tables at a stride": (kernels, "_token_strides", "0 if size == 1 else ", ""),
    "tables aligned on the left": (kernels, "_token_strides", "(0,) * (len(tokens) - len(own)) + tuple(own)", "tuple(own) + (0,) * (len(tokens) - len(own))"),
    "numbers apart taken for neighbours": (kernels, "_plan", "any(stride[-1] != 1 for _, stride in given) or ", ""),
    "tables' numbers apart taken for neighbours": (kernels, "_plan", " or (P > 1 and cos[1][-1] * sin[1][-1] != 1)", ""),
    "one plan for all tables": (kernels, "_plan", "by_sequence[1], by_token[1]", "by_sequence[0], by_token[0]"),
    # ---- autograd ----
    "gradients exchanged": (module, "_RopeFunction.backward", "ctx, dq, dk", "ctx, dk, dq"),
    "gradients unturned": (module, "_backward", "interleaved, True", "interleaved, False"),
    "sin kept as cos": (module, "_RopeFunction.forward", "(cos, sin)", "(sin, cos)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    assert caught(mutate(*MUTANTS[name], entry=module), CASES, judge_case), "no case catches it"


def test_a_copy_without_a_change_passes():
    copy = copy_package(module)
    assert copy is not module
    assert copy.rope is not module.rope
    for case in CASES[::3]:
        report = judge_case(copy, case)
        assert report, report
