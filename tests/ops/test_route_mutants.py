"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.mutants import mutant_tests
from ops.route_oracle import judge_case, main_cases

import onepass.ops.routing.route as module

pytest.importorskip("triton")
from onepass.kernels import column_reduce
from onepass.ops.routing import kernels

CASES = main_cases()
TIES, NANS = 25, 29  # places of cases
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    # ---- choosing ----
    "the last of equal experts": (kernels, "_take_best", "tl.min(tl.where(key == best[:, None], numbers[None, :], END), 1)", "tl.max(tl.where(key == best[:, None], numbers[None, :], -1), 1)", TIES),
    "-0.0 below 0.0": (kernels, "_as_key", "x = x + 0.0", "x = x", TIES),
    "negative numbers the other way round": (kernels, "_as_key", " ^ ((bits >> 31) & 0x7FFFFFFF)", "", 4),
    "NaN below all": (kernels, "_as_key", "x != x, 0x7FFFFFFF", "x != x, -2147483647", NANS + 1),
    "an expert may be taken again": (kernels, "_places", "key = tl.where(taken, LOWEST, key)", "key = key", 0),
    "the second best first": (kernels, "_places", "tl.where(taken, j, place)", "tl.where(taken, K - 1 - j, place)", 0),
    "no bias in the choice": (kernels, "_route_kernel", "terms = scores + bias[None, :]", "terms = scores + 0 * bias[None, :]", 9),
    "bias in the weights": (kernels, "_route_kernel", "        else:\n            w = scores", "        else:\n            w = terms", 10),
    "bias in the weights of sigmoids": (kernels, "_route_kernel", "if SIGMOID:\n            w = scores", "if SIGMOID:\n            w = scores if bias_ptr is None else terms", 12),
    "experts past the last": (kernels, "_route_kernel", "key = tl.where(within[None, :], key, LOWEST)", "key = key", 38),
    "all groups": (kernels, "_route_kernel", "if GROUPS > 1:\n            key", "if GROUPS > 100:\n            key", 15),
    "a group by its best alone": (kernels, "_chosen_groups", "two = is_first | (columns[None, :] == second[:, None])", "two = is_first", 15),
    "a group by its best twice": (kernels, "_chosen_groups", "tl.where(is_first, LOWEST, here)", "here", 15),
    "a group too many": (kernels, "_chosen_groups", "range(TOP_GROUPS)", "range(TOP_GROUPS + 1)", 15),
    "groups of neighbours shifted": (kernels, "_chosen_groups", "columns // SIZE", "(columns + 1) // SIZE", 15),
    # ---- weights ----
    "normalisation left out": (kernels, "_route_kernel", "w = w * _reciprocal(sum_w)[:, None]", "w = w", 0),
    "sigmoids not normalised": (kernels, "_route_kernel", "            if NORMALISE:\n                w =", "            if K == 0:\n                w =", 4),
    "normalised over all experts": (kernels, "_route_kernel", "tl.sum(tl.where(taken, w, 0.0), 1) + TINY", "tl.sum(w, 1) + TINY", 4),
    "no scale": (kernels, "_route_kernel", "w * scale", "w", 2),
    "the sigmoid of -x": (kernels, "_sigmoid", "x >= 0, large, small", "x < 0, large, small", 4),
    "a reciprocal two units off": (kernels, "_reciprocal", "tl.fma(y, tl.fma(-x, y, 1.0), y), y", "y * 1.000002, y", 2),
    # ---- sums over tokens ----
    "count off by one": (kernels, "_route_kernel", "tl.store(counts_ptr + columns, counts,", "tl.store(counts_ptr + columns, counts + 1,", 0),
    "tokens past the end are counted": (kernels, "_route_kernel", "count_sums += stored", "count_sums += taken", 0),
    "counters are left as they are": (kernels, "_route_kernel", "tl.store(counters_ptr + columns, 0, mask=within)", "", 0),
    "the last program is a program early": (kernels, "_route_kernel", "== programs - 1", "== programs - 2", 0),
    "a program skips a block": (kernels, "_route_kernel", "range(program, tl", "range(program + programs, tl", 0),
    "tokens past the end have shares": (kernels, "_route_kernel", "tl.where(inside, shares, 0.0)", "shares", 1),
    "tokens past the end have a logsumexp": (kernels, "_route_kernel", "tl.where(real, lse * lse, 0.0)", "lse * lse", 1),
    "partial sums read on": (column_reduce, "add_strips", "strips < STRIPS", "strips <= STRIPS", 1),
    "sigmoids' shares are not shares": (kernels, "_route_kernel", "scores * _reciprocal(tl.sum(scores, 1) + TINY)[:, None] if SIGMOID else scores", "scores", 5),
    "logsumexp without the largest": (kernels, "_route_kernel", "lse = most + ", "lse = ", 1),
    "the losses' mean is a sum": (kernels, "_route_kernel", "(z / tokens)", "z", 1),
    "the coefficient without experts": (kernels, "_forward_plan", "* C / options.k", "/ options.k", 1),
    # ---- backward ----
    "gradients without the scale": (kernels, "_route_backward_kernel", "(incoming * scale - best)", "(incoming - best)", 2),
    "not less the likeliest's": (kernels, "_route_backward_kernel", "tl.where(taken, dw - tl.max(tl.where(likeliest, dw, float(\"-inf\")), 1)[:, None], 0.0)", "dw", 0),
    "not less the best sigmoid's": (kernels, "_route_backward_kernel", "(incoming * scale - best)", "(incoming * scale)", 21),
    "no mean taken away": (kernels, "_route_backward_kernel", "dx = q * (dw - tl.sum(q * dw, 1)[:, None])", "dx = q * dw", 0),
    "a gradient through the chosen alone": (kernels, "_route_backward_kernel", "dx += p * (dp - tl.sum(p * dp, 1)[:, None])", "dx += p * dp", 2),
    "sigmoid's derivative without the rest": (kernels, "_route_backward_kernel", "ds * (s * rest)", "ds * s", 6),
    "not chosen, but with a gradient": (kernels, "_route_backward_kernel", "ds = tl.where(taken, (dw - mean[:, None]) * inverse[:, None], 0.0)", "ds = (dw - mean[:, None]) * inverse[:, None]", 4),
    "aux forgets its mean": (kernels, "_route_backward_kernel", "ds += (dshare - mean[:, None]) * inverse[:, None]", "ds += dshare * inverse[:, None]", 5),
    "half of the z-loss's gradient": (kernels, "_route_backward_kernel", "(2.0 * z / tokens)", "(z / tokens)", 1),
    "z without its logsumexp": (kernels, "_route_backward_kernel", "(lse * (tl.load(dz_ptr)", "((1.0 + 0.0 * lse) * (tl.load(dz_ptr)", 1),
    "dweights read at k": (kernels, "route_backward", "dweights, dw_row = as_rows(dweights)", "dweights, dw_row = as_rows(dweights)[0], 1", 0),
    "backward: a store one token too far": (kernels, "_route_backward_kernel", "real = rows < M", "real = rows <= M", 0),
    "op: backward's options are others": (module, "_Route.backward", "ctx.options)", "ctx.options._replace(aux=1.0))", 1),
    "op: gradients of the losses swapped": (module, "_Route.backward", "dweights, daux, dz,", "dweights, dz, daux,", 1),
}  # fmt: skip

test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge_case, CASES[:6])
