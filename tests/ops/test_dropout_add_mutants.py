"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

from functools import partial

import pytest
from ops.dropout_add_oracle import judge_case, main_cases
from ops.mutants import mutant_tests

import onepass.ops.dropout.dropout_add as module

pytest.importorskip("triton")
from onepass.kernels import philox as random
from onepass.ops.dropout import formula, kernels

CASES = main_cases()
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    "a round fewer": (random, "", "_ROUNDS = 7", "_ROUNDS = 6", 9),
    "the key stays as it is": (random, "_philox", "        k0 += _WEYL_0\n", "", 9),
    "multipliers exchanged": (random, "", "0xD2511F53, 0xCD9E8D57", "0xCD9E8D57, 0xD2511F53", 9),
    "row's high half forgotten": (random, "keep_mask", "rows >> 32", "rows >> 63", 15),
    "seed's high half forgotten": (random, "keep_mask", "seed >> 32", "seed >> 63", 9),
    "columns numbered in their tile": (random, "keep_mask", "first // _GROUP_TL + ", "", 9),
    "the edge dropped, low halves": (random, "keep_mask", "low >= threshold", "low > threshold", 22),
    "the edge dropped, high halves": (random, "keep_mask", "high >= threshold", "high > threshold", 23),
    "words in another order": (random, "keep_mask", "(w0, w2), tl.join(w1, w3)", "(w0, w1), tl.join(w2, w3)", 9),
    "halves exchanged": (random, "keep_mask", "low >= threshold, high", "high >= threshold, low", 9),
    "kept and dropped exchanged": (random, "apply_dropout", "values * scale, 0.0", "0.0, values * scale", 9),
    "not scaled": (random, "apply_dropout", " * scale,", ",", 9),
    "scaled by a step too much": (random, "scale_of", " - threshold", " - threshold - 1 / 2", 9),
    "probabilities cut off": (random, "threshold_of", "round(p * STEPS)", "int(p * STEPS)", 9),
    "seed in memory plus one": (random, "load_seed", "(seed_ptr)", "(seed_ptr) + 1", 0),
    "seed as a number of 32 bits": (random, "load_seed", "(tl.int64)", "(tl.int32).to(tl.int64)", 9),
    "first row forgotten in forward": (kernels, "_dropout_kernel", " + tl.load(first_ptr)", "", 15),
    "first row forgotten in backward": (kernels, "_dropout_backward_kernel", " + offset", "", 15),
    "every tile's columns the first's": (kernels, "_dropout_kernel", "numbers, left", "numbers, 0", 9),
    "every tile's columns the first's in backward": (kernels, "_dropout_backward_kernel", "offset, left", "offset, 0", 9),
    "residual dropped too": (kernels, "_dropout_kernel", "z = apply_dropout(z, load_seed(seed_ptr, SEED), numbers, left, threshold, scale, BLOCK_H)\n    if residual_ptr is not None:\n        z += residual", "if residual_ptr is not None:\n            z += residual\n        z = apply_dropout(z, load_seed(seed_ptr, SEED), numbers, left, threshold, scale, BLOCK_H)", 26),
    "bias forgotten": (kernels, "_dropout_kernel", "    z += load_vector(bias_ptr, columns, columns < H)[None, :]\n", "", 27),
    "residual's rows as far apart as x's": (kernels, "_dropout_kernel", "RESIDUAL_ROW, inside", "X_ROW, inside", 9),
    "x rounded with its bias": (kernels, "_dropout_kernel", "if threshold", "z = z.to(tl.bfloat16).to(tl.float32)\n    if threshold", 26),
    "bias gradient of dx as stored": (kernels, "_dropout_backward_kernel", "dbias += dz", "dbias += dz if dx_ptr is None else dz.to(dx_ptr.dtype.element_ty).to(tl.float32)", 27),
    "bias gradient rounded a strip": (kernels, "_dropout_backward_kernel", "(dbias, 0)", "(dbias, 0).to(tl.bfloat16).to(tl.float32)", 27),
    "strips lose their last block": (kernels, "_dropout_backward_kernel", "0, ROWS,", "0, ROWS - BLOCK_M,", 27),
    "strips overlap by a block": (kernels, "_dropout_backward_kernel", "0, ROWS,", "0, ROWS + 1,", 18),
    "last row lost in backward": (kernels, "_dropout_backward_kernel", "rows < M", "rows < M - 1", 27),
    "a store one row too far": (kernels, "_dropout_kernel", "rows < M", "rows <= M", 26),
    "counter not set back": (kernels, "_dropout_backward_kernel", "        tl.store(arrived_ptr + tile, 0)\n", "", 27),
    "dx in the residual's type": (kernels, "dropout_add_backward", "dx_type,", "torch.bfloat16,", 15),
    "dx is dy where something is dropped": (module, "_gradients", "not options.threshold", "options.threshold < 1000", 20),
}  # fmt: skip
OF_FORMULA = {
    "row's high half forgotten": (random, "keep_mask_formula", "rows >> 32", "rows >> 63", 15),
    "words cut off late": (random, "_philox_formula", "(b >> 32) & _LOW ", "(b >> 32) ", 20),
    "the edge dropped": (random, "keep_mask_formula", " >= threshold", " > threshold", 22),
    "rows counted from 0 in every part": (formula, "global_rows", " + first_row.view(())", "", 15),
}
test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge_case, CASES[:8])
by_formula = partial(judge_case, backend="torch")
test_mutants_of_the_formula_are_caught, test_a_copy_passes_by_formula = mutant_tests(module, OF_FORMULA, CASES, by_formula, CASES[:8])
