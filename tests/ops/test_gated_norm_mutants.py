"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.gated_norm_oracle import judge_case, real_cases, small_cases
from ops.mutants import mutant_tests

import onepass.ops.norm.gated_norm as module

pytest.importorskip("triton")
from onepass.kernels import column_reduce, rows, sigmoid
from onepass.ops.norm import backward
from onepass.ops.norm import gated_kernels as gated

CASES = small_cases() + [case for case in real_cases() if case.path]
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    # ---- rows ----
    "1 - s where the exponential overflows": (sigmoid, "sigmoid", "tl.minimum(e, 1e38)", "e", 29),
    "the gate of -z": (gated, "gate_and_slope", "-LOG2_E * z", "LOG2_E * z", 22),
    "silu's slope is the sigmoid": (gated, "gate_and_slope", "tl.fma(z * s, rest, s)", "s", 22),
    "the sigmoid's slope without 1 - s": (gated, "gate_and_slope", "s * rest", "s", 30),
    "silu for the sigmoid": (gated, "gate_and_slope", "return s, ", "return z * s, ", 30),
    "eps inside out": (gated, "inverse_rms", "tl.sqrt(tl.sum(h * h, 1) / H + eps)", "(tl.sqrt(tl.sum(h * h, 1) / H) + eps)", 22),
    "the variance of a sample": (gated, "inverse_rms", "/ H", "/ (H - 1)", 22),
    "forward: the norm of x where the gate is first": (gated, "gated_output", "else x * gate", "else x", 22),
    "forward: gated before and after": (gated, "gated_output", "else n * weight", "else n * weight * gate", 22),
    "forward: no gate after": (gated, "gated_output", "n * weight * gate if", "n * weight if", 10),
    "forward: the norm's output rounded": (gated, "gated_output", "n * weight * gate", "(n * weight).to(tl.bfloat16).to(tl.float32) * gate", 10),
    "backward: the norm of x where the gate is first": (gated, "gated_gradients", "h = x if NORM_FIRST else x * gate", "h = x", 22),
    "backward: d without the gate": (gated, "gated_gradients", "d = dy * gate if NORM_FIRST else dy", "d = dy", 10),
    "backward: d gated twice": (gated, "gated_gradients", "if NORM_FIRST else dy\n", "if NORM_FIRST else dy * gate\n", 22),
    "backward: no mean": (gated, "gated_gradients", "-product", "0.0 * product", 22),
    "backward: the mean without the weight": (gated, "gated_gradients", "d * weight * h", "d * h", 22),
    "backward: the mean of h, not of n": (gated, "gated_gradients", "[:, None] * rstd", "[:, None]", 22),
    "backward: no scale of the norm": (gated, "gated_gradients", "d * weight) * rstd", "d * weight)", 22),
    "backward: dx past the gate": (gated, "gated_gradients", "dh * gate, ", "dh, ", 22),
    "backward: dz without the weight": (gated, "gated_gradients", "n * weight * dslope", "n * dslope", 10),
    "backward: dz of n": (gated, "gated_gradients", "else x * slope", "else h * slope", 22),
    "backward: dweight of h": (gated, "gated_gradients", "dslope, d, n\n    else", "dslope, d, h\n    else", 10),
    # ---- kernels ----
    "forward: a row too many": (gated, "_gated_forward_kernel", "rows < M", "rows <= M", 22),
    "forward: z read as x": (gated, "_gated_forward_kernel", "Z_ROW, inside", "X_ROW, inside", 7),
    "forward: z's groups are x's": (gated, "_gated_forward_kernel", "Z_GAP, Z_INNER)", "X_GAP, X_INNER)", 3),
    "forward: each group has the first one's weight": (gated, "_gated_forward_kernel", "weight_ptr + group if", "weight_ptr if", 11),
    "forward: y a group after another": (gated, "_gated_forward_kernel", "(GROUPS * H)", "H", 11),
    "forward: y rounded through bf16": (gated, "_gated_forward_kernel", "[None, :], y,", "[None, :], y.to(tl.bfloat16).to(tl.float32),", 33),
    "backward: rows past the end are counted": (gated, "_gated_backward_kernel", "rows < M", "rows <= M", 22),
    "backward: turns too far apart": (gated, "_gated_backward_kernel", "programs * BLOCK_M,", "(programs + 1) * BLOCK_M,", 0),
    "backward: dy read as x": (gated, "_gated_backward_kernel", "DY_ROW, inside", "X_ROW, inside", 6),
    "backward: dy's groups are x's": (gated, "_gated_backward_kernel", "DY_GAP, DY_INNER)", "X_GAP, X_INNER)", 3),
    "backward: z read as x": (gated, "_gated_backward_kernel", "Z_ROW, inside", "X_ROW, inside", 7),
    "backward: dz where dx is": (gated, "_gated_backward_kernel", "else at), dz", "else at), dx", 22),
    "backward: dz rounded through bf16": (gated, "_gated_backward_kernel", "at), dz", "at), dz.to(tl.bfloat16).to(tl.float32)", 33),
    "backward: all groups' dweight in the first": (gated, "_gated_backward_kernel", "dweight_ptr + group", "dweight_ptr", 11),
    "backward: groups share their partial sums": (gated, "_gated_backward_kernel", " + group.to(tl.int64) * programs", "", 2),
    "backward: groups share a counter": (gated, "_gated_backward_kernel", " + 2 * tl.program_id(1)", "", 2),
    "backward: the last block of rows lost": (gated, "gated_backward", "ceil_div(blocks, programs)", "(blocks // programs)", 0),
    "each program is alone": (backward, "finish_sums", "programs == 1", "programs > 0", 33),
    "partial sums in bf16": (backward, "_store_sums", "partial_ptr + columns, total", "partial_ptr + columns, total.to(tl.bfloat16).to(tl.float32)", 33),
    "helpers do not wait": (column_reduce, "join_helpers", "programs:", "0:", 0),
    "only one pass over strips": (column_reduce, "add_strips", "0, STRIPS", "0, tl.minimum(STRIPS, BLOCK_S)", 9),
    "zero_centered_gamma forgotten": (rows, "load_scale", " + 1.0 if CENTERED else weight", "", 1),
    # ---- plans, autograd ----
    "plan: z's gap a multiple of 8": (gated, "_forward_plan", ", z_gap or 0", "", 4),
    "plan: backward's rows multiples of 8": (gated, "_backward_plan", "*(row for row, _, _ in lies), ", "", 7),
    "op: the sigmoid in forward, silu in backward": (module, "_GatedNormFunction.backward", "ctx.options, *needs", "ctx.options._replace(activation='silu'), *needs", 30),
}  # fmt: skip

test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge_case, CASES[:8])
