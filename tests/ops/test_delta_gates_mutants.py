"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.gates_oracle import judge_case, small_cases
from ops.mutants import mutant_tests

import onepass.ops.delta.delta_gates as module

pytest.importorskip("triton")
from onepass.kernels import column_reduce, layout
from onepass.ops.delta import gate_kernels as kernels

CASES = small_cases()
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    "softplus: without x itself": (kernels, "softplus", "tl.where(x > 0, x, 0.0)", "0.0", 0),
    "softplus: of -x": (kernels, "softplus", "tl.where(x > 0, x, 0.0)", "tl.where(x < 0, -x, 0.0)", 0),
    "softplus: two terms of the series": (kernels, "softplus", "t * series", "t / 3", 0),
    "softplus: a term a place off": (kernels, "softplus", "(11 - 2 * k)", "(13 - 2 * k)", 0),
    "groups: plain": (kernels, "_load_gates", "heads // R, heads % R", "heads * 0, heads", 4),
    "groups: a's distance for b": (kernels, "_load_gates", "rows[:, None] * B_ROW + (group * B_GROUP", "rows[:, None] * A_ROW + (group * A_GROUP + 1", 4),
    "no exponential": (kernels, "_load_decay", "tl.exp(a_log)", "a_log", 0),
    "a power of two": (kernels, "_load_decay", "tl.exp(a_log)", "tl.exp2(a_log)", 0),
    "forward: dt_bias is lost": (kernels, "_gates_forward_kernel", "a + dt_bias", "a", 0),
    "forward: the sign": (kernels, "_gates_forward_kernel", " * -1.0", "", 0),
    "forward: beta of a": (kernels, "_gates_forward_kernel", "-LOG2_E * b", "-LOG2_E * a", 0),
    "forward: the last rows are lost": (kernels, "gates_forward", "ceil_div(M, tiles.block_m)", "(M // tiles.block_m)", 0),
    "backward: db of beta squared": (kernels, "_gates_backward_kernel", "beta * rest", "beta * beta", 0),
    "backward: da by a's sigmoid": (kernels, "_gates_backward_kernel", "sigmoid(-LOG2_E * x)", "sigmoid(-LOG2_E * a)", 0),
    "backward: da without the decay": (kernels, "_gates_backward_kernel", "-decay * tl.load", "-tl.load", 0),
    "backward: da_log of the slope": (kernels, "_gates_backward_kernel", "scaled * softplus(x)", "scaled * slope", 0),
    "backward: sums in bf16": (kernels, "_gates_backward_kernel", "tl.where(inside, da, 0.0)", "tl.where(inside, da, 0.0).to(tl.bfloat16).to(tl.float32)", 0),
    "backward: the last turn alone": (kernels, "_gates_backward_kernel", "ddt_bias += ", "ddt_bias = ", 0),
    "backward: rows past the end count": (kernels, "_gates_backward_kernel", "(rows < M)[:, None]", "(rows < first + ROWS)[:, None]", 0),
    "backward: strips overlap": (kernels, "_gates_backward_kernel", "tl.minimum(first + ROWS, M)", "M", 0),
    "backward: strips share a row of sums": (kernels, "_gates_backward_kernel", "(2 * H if BOTH else H)", "H", 0),
    "backward: ddt_bias where da_log is": (kernels, "_gates_backward_kernel", "(H if BOTH else 0)", "0", 0),
    "backward: the vectors swapped": (kernels, "_gates_backward_kernel", "da_log_ptr, ddt_bias_ptr, helper", "ddt_bias_ptr, da_log_ptr, helper", 0),
    "helpers do not wait": (column_reduce, "join_helpers", "programs:", "0:", 0),
    "layout: groups evenly spaced through": (layout, "as_grouped_rows", "levels[0][1], levels[1][1]", "levels[1][1] * groups, levels[1][1]", 6),
    "layout: rows as far apart as groups": (layout, "as_grouped_rows", "levels[0][1] * groups, levels", "levels[0][1], levels", 4),
    "layout: gaps are not seen": (layout, "as_grouped_rows", "if not x.is_contiguous()", "if x.dim() == 1", 2),
    "op: plain rows are one of its groups": (module, "delta_gates", "GateOptions(H, a.shape[-1])", "GateOptions(H, H)", 4),
    "op: backward reads dbeta for dg": (module, "_GatesFunction.backward", "GatesKept(dg, dbeta,", "GatesKept(dbeta, dg,", 0),
}  # fmt: skip

test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge_case, CASES[:8])
