"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.mutants import mutant_tests
from ops.rope_oracle import judge_case, small_cases, small_normed_cases

import onepass.ops.attention.rope as module

pytest.importorskip("triton")
from onepass.kernels import column_reduce, rows
from onepass.ops.attention import rope_kernels as kernels
from onepass.ops.attention import rope_norm, rope_norm_kernels

CASES, NORMED = small_cases(), small_normed_cases()
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    # ---- what is rotated ----
    "rotated the other way": (kernels, "rotate_pair", "if BACK:", "if not BACK:", 21),
    "backward turns on": (kernels, "rotate_pair", "sin = -sin", "sin = sin", 21),
    "backward mirrors": (kernels, "rotate_pair", "cos, x1 *", "-cos if BACK else cos, x1 *", 21),
    "backward is the inverse": (kernels, "rotate_pair", "sin = -sin", "cos, sin = cos / (cos * cos + sin * sin), -sin / (cos * cos + sin * sin)", 13),
    "sin for cos": (kernels, "_rope_kernel", "cos_ptr, sequence", "sin_ptr, sequence", 21),
    "sin read at cos's strides": (kernels, "_rope_kernel", "SIN_M, SIN_S, P", "COS_M, COS_S, P", 9),
    "tables rounded to bf16": (kernels, "load_angles", "(tl.float32)", "(tl.bfloat16).to(tl.float32)", 21),
    "interleaved: x rounded to bf16": (kernels, "load_pairs", "x = tl.load(x_head + columns, mask=inside, other=0.0).to(tl.float32)", "x = tl.load(x_head + columns, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)", 21),
    "halves: y1 rounded twice": (kernels, "store_pairs", "y1, mask", "y1.to(tl.bfloat16).to(tl.float32), mask", 20),
    "halves: the same half twice": (kernels, "load_pairs", "x_head + P + ", "x_head + ", 20),
    "halves: of the whole head": (kernels, "_rotate_heads", "load_pairs(x_head, there, P,", "load_pairs(x_head, there, D // 2,", 20),
    "halves: stored in each other's place": (kernels, "_rotate_heads", "y_head, there, y1, y2,", "y_head, there, y2, y1,", 21),
    "interleaved: stored in each other's place": (kernels, "store_pairs", "(y1, y2)", "(y2, y1)", 21),
    "interleaved taken for halves": (kernels, "_rotate_heads", "there, P, INTERLEAVED", "there, P, INTERLEAVED and BACK", 21),
    "backward in halves": (module, "_backward", "dk, interleaved", "dk, False", 21),
    "rest forgotten": (kernels, "store_rest", "rest, mask=there", "rest, mask=there & (columns < 0)", 21),
    "rest one too far": (kernels, "load_rest", "* P + columns", "* P + 1 + columns", 21),
    "rest at the half": (kernels, "load_rest", "x_head + 2 * ", "x_head + ", 21),
    # ---- where it lies ----
    "a pair too many": (rows, "inside_row", "columns <", "columns <=", 5),
    "lanes past the pairs taken for pairs": (kernels, "store_pairs", "columns, P, P == BLOCK_P", "columns, P, True", 4),
    "interleaved: lanes past the pairs taken for pairs": (kernels, "store_pairs", " * P, P == BLOCK_P", " * P, True", 5),
    "heads past the last": (kernels, "_rotate_heads", "HEADS % BLOCK_H == 0", "True", 5),
    "tokens past the last": (kernels, "_rope_kernel", "tokens <", "tokens <=", 21),
    "only the first heads": (kernels, "_rotate_heads", "0, HEADS", "0, BLOCK_H", 1),
    "k with q's heads": (kernels, "_rope_kernel", "HK, D, P", "HQ, D, P", 5),
    "k at q's strides": (kernels, "_rope_kernel", "eps, K_M, K_S, K_H", "eps, Q_M, Q_S, Q_H", 5),
    "heads evenly after each other": (kernels, "_rotate_heads", "(tl.int64) * X_H", "(tl.int64) * D", 11),
    "tokens evenly after each other": (kernels, "_rotate_heads", "tokens * X_S", "tokens * (HEADS * D)", 11),
    "sequences evenly after each other": (kernels, "_rotate_heads", "sequence * X_M + tokens", "(sequence + tokens)", 21),
    "all sequences in the first's place": (kernels, "_rotate_heads", "sequence * Y_M", "sequence * 0", 21),
    "all tokens in the first's place": (kernels, "_rotate_heads", "tokens * Y_S", "tokens * 0", 21),
    "the first sequence's angles for all": (kernels, "load_angles", "sequence * TABLE_M + ", "", 13),
    "programs a token apart": (kernels, "_rope_kernel", " * BLOCK_S ", " ", 21),
    "too few programs": (kernels, "_plan", "ceil_div(layout.S, tiles.block_s)", "max(1, layout.S // tiles.block_s)", 21),
    "multiples of 8 promised": (kernels, "TokenLayout.aligns", "known_align(*self.flat)", "8", 5),
    "tables' multiples of 8 promised": (kernels, "TokenLayout.aligns", "known_align(*self.tables)", "8", 21),
    # ---- layouts ----
    "dimensions merged by the first tensor": (kernels, "_merge_dims", "all(outer == size * inner for outer, inner in zip(merged[-1][1], each, strict=True))", "merged[-1][1][0] == size * each[0]", 13),
    "merged dimensions all in one place": (kernels, "_merge_dims", " * size, each", " * size, (0,) * len(each)", 5),
    "all dimensions merged": (kernels, "_merge_dims", "merged and all", "merged and any", 21),
    "broadcast tables at a stride": (kernels, "_token_strides", "0 if size == 1 else ", "", 11),
    "tables aligned on the left": (kernels, "_token_strides", "(0,) * (len(tokens) - len(own)) + tuple(own)", "tuple(own) + (0,) * (len(tokens) - len(own))", 21),
    "numbers apart taken for neighbours": (kernels, "token_layout", "any(stride[-1] != 1 for _, stride in present) or ", "", 17),
    "tables' numbers apart taken for neighbours": (kernels, "token_layout", " or (P > 1 and cos[1][-1] * sin[1][-1] != 1)", "", 19),
    "one plan for all tables": (kernels, "token_layout", "by_sequence[1], by_token[1]", "by_sequence[0], by_token[0]", 9),
    # ---- autograd ----
    "gradients exchanged": (module, "_RopeFunction.backward", "ctx, dq, dk", "ctx, dk, dq", 21),
    "gradients unturned": (module, "_backward", "interleaved, True", "interleaved, False", 21),
    "sin kept as cos": (module, "_RopeFunction.forward", "(cos, sin)", "(sin, cos)", 21),
}  # fmt: skip

OF_NORM = {
    # ---- forward ----
    "the weight left out": (kernels, "_rotate_heads", "x2 * rstd * weight2", "x2 * rstd", 17),
    "the rest's weight left out": (kernels, "_rotate_heads", "rest * rstd * weight_rest", "rest * rstd", 3),
    "the neighbour head's deviation": (kernels, "_rotate_heads", "BLOCK_R)\n            x1, x2", "BLOCK_R)\n            rstd = tl.sum(rstd, 1)[:, :, None] / BLOCK_H\n            x1, x2", 5),
    "rotated before it is normalised": (kernels, "_rotate_heads", "x1, x2 = x1 * rstd * weight1, x2 * rstd * weight2", "x1, x2 = rotate_pair(x1, x2, cos, sin, BACK)\n            cos, sin = cos * 0 + 1, sin * 0\n            x1, x2 = x1 * rstd * weight1, x2 * rstd * weight2", 17),
    "the mean without the rest": (kernels, "rstd_of_heads", "squares += tl.sum(rest * rest, 2)", "squares += 0", 3),
    "the mean of what is rotated": (kernels, "rstd_of_heads", "squares / D", "squares / (D if BLOCK_R == 0 else 2 * x1.shape[2])", 3),
    "the mean of one half": (kernels, "rstd_of_heads", "x1 * x1 + x2 * x2", "2 * x1 * x1", 17),
    "no eps": (kernels, "rstd_of_heads", "D + eps)", "D + 0 * eps)", 17),
    "eps outside of the root": (kernels, "rstd_of_heads", "tl.sqrt(squares / D + eps)", "(tl.sqrt(squares / D) + eps)", 17),
    "centred weights as they are": (kernels, "load_weight", "weight1 + 1.0, weight2 + 1.0", "weight1, weight2 + 1.0", 9),
    "the rest's centred weight as it is": (kernels, "load_weight", "rest.to(tl.float32) + 1.0 if", "rest.to(tl.float32) if", 3),
    "weights in halves": (kernels, "load_weight", "there, P, INTERLEAVED", "there, P, False", 17),
    "q's weight for k": (kernels, "_rope_kernel", "k_out_ptr, k_weight_ptr, sequence", "k_out_ptr, q_weight_ptr, sequence", 17),
    # ---- backward ----
    "dx without its mean": (rope_norm_kernels, "_back_through_heads", "g2 - z2 * mean", "g2", 17),
    "the rest's dx without its mean": (rope_norm_kernels, "_back_through_heads", "g_rest - z_rest * mean", "g_rest", 3),
    "the mean without what is not rotated": (rope_norm_kernels, "_back_through_heads", "products += tl.sum(g_rest * z_rest, 2)", "products += 0", 3),
    "dx without the deviation": (rope_norm_kernels, "_back_through_heads", "(g1 - z1 * mean) * rstd", "(g1 - z1 * mean)", 17),
    "dweight of what has the weight already": (rope_norm_kernels, "_back_through_heads", "sum1 += g1 * z1", "sum1 += g1 * weight1 * z1", 17),
    "dweight of rows that are not normalised": (rope_norm_kernels, "_back_through_heads", "sum2 += g2 * z2", "sum2 += g2 * x2", 17),
    "the rest's dweight left out": (rope_norm_kernels, "_back_through_heads", "sum_rest += g_rest * z_rest", "sum_rest += 0", 3),
    "dweight of a program's last tile": (rope_norm_kernels, "_back_through_heads", "sum1 += g1", "sum1 = g1", 5),
    "not rotated back": (rope_norm_kernels, "_back_through_heads", "sin, True", "sin, False", 17),
    "the weight left out of dx": (rope_norm_kernels, "_back_through_heads", "g1 * weight1, g2", "g1, g2", 17),
    "tokens past the last": (rope_norm_kernels, "_back_through_heads", "tokens < S", "tokens <= S", 17),
    "a tile too few": (rope_norm_kernels, "_back_through_heads", "tl.cdiv(S, BLOCK_S)", "tl.maximum(1, S // BLOCK_S)", 5),
    "tiles of the first heads": (rope_norm_kernels, "_back_through_heads", "tile % ACROSS * BLOCK_H", "0 * BLOCK_H", 5),
    "x at dy's strides": (rope_norm_kernels, "_back_through_heads", "sequence * X_M + tokens * X_S", "sequence * DY_M + tokens * DY_S", 11),
    "all programs' sums in one place": (rope_norm_kernels, "_rope_norm_backward_kernel", "program.to(tl.int64) * D", "program.to(tl.int64) * 0", 17),
    "k's sums from q's programs on": (rope_norm_kernels, "_rope_norm_backward_kernel", "FIRST.to(tl.int64) * D", "0", 17),
    "a program's sums too few": (rope_norm_kernels, "_rope_norm_backward_kernel", "programs - FIRST, D", "programs - FIRST - 1, D", 17),
    "k's tiles from q's programs on": (rope_norm_kernels, "_rope_norm_backward_kernel", "program - FIRST, programs - FIRST, M", "program, programs, M", 17),
    "strips past the last": (column_reduce, "add_strips", "(strips < STRIPS)[:, None]", "(strips <= STRIPS)[:, None]", 17),
    # ---- autograd ----
    "weights' gradients exchanged": (rope_norm, "_NormedRopeFunction.backward", "grads.put(dweights)", "grads.put(dweights[::-1])", 17),
}  # fmt: skip

test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge_case, CASES[::3])
test_mutants_of_the_norm_are_caught, test_a_copy_passes_with_the_norm = mutant_tests(module, OF_NORM, NORMED, judge_case, NORMED[::3])
