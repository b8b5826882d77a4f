"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.conv_oracle import judge_case, small_cases
from ops.mutants import mutant_tests

import onepass.ops.convolution.causal_conv1d as module

pytest.importorskip("triton")
from onepass.kernels import column_reduce
from onepass.ops.convolution import kernels, norm_factors

CASES = small_cases()
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    # ---- tiles ----
    "the second piece has the first one's size": (kernels, "_tile", "tl.where(second < 0, size, SIZE1)", "size", 6),
    "the second piece begins where the first does": (kernels, "_tile", "tl.where(second < 0, begin, SIZE0)", "begin", 6),
    "the third piece begins after the first": (kernels, "_tile", "SIZE0 + SIZE1)", "SIZE0)", 6),
    "a partial tile of the first piece is the second's": (kernels, "_tile", "tile - (SIZE0 + COLUMNS - 1) // COLUMNS", "tile - SIZE0 // COLUMNS", 7),
    "the third piece has the second's bit": (kernels, "_tile", "bit, 4)", "bit, 2)", 7),
    "columns past the piece": (kernels, "_columns", "(columns, size, WHOLE)", "(columns, size + 1, WHOLE)", 4),
    "columns past the head": (kernels, "_columns", " & (within < HEAD)", "", 9),
    "heads a block apart": (kernels, "_columns", "[:, None] * HEAD", "[:, None] * BLOCK", 8),
    "the weight the other way round": (kernels, "_taps", "(W - 1 - j)", "j", 0),
    # ---- documents and sequences ----
    "boundaries between sequences are not seen": (kernels, "_position", "tl.maximum(row, 0) % S", "tl.maximum(row, 0)", 1),
    "a turn is whole a row too early": (kernels, "_is_whole", "position >= W - 1", "position >= W - 2", 1),
    "a turn is whole though a sequence ends in it": (kernels, "_is_whole", " & (position + COUNT <= S)", "", 1),
    "a turn is whole though a document begins in it": (kernels, "_is_whole", "last_position >= COUNT + W - 2", "last_position >= COUNT + W - 3", 10),
    "a turn is whole by the turn before": (kernels, "_forward_chunk", "row + 2 * COUNT - 1", "row + COUNT - 1", 10),
    "the first turn is whole by its first row": (kernels, "_backward_chunk", "first + COUNT - 1, M", "first, M", 10),
    "a row sees the last of another document": (kernels, "_convolve", "position >= j", "position >= j - 1", 1),
    "no row sees the first of its document": (kernels, "_convolve", "position >= j", "position > j", 1),
    "the bias is lost": (kernels, "_convolve", " + bias", "", 0),
    "taps of another row": (kernels, "_convolve", "rows[AT - j]", "rows[AT - 1]", 0),
    # ---- forward ----
    "a row too few is there": (kernels, "_load_rows", "row + u < end", "row + u < end - 1", 0),
    "forward: rows are handed on a row late": (kernels, "_forward_turn", "rows[COUNT + j]", "rows[COUNT + j - 1]", 0),
    "forward: silu of -p": (kernels, "_forward_turn", "-LOG2_E * s", "LOG2_E * s", 0),
    "forward: no eps": (kernels, "_forward_turn", " + eps", "", 6),
    "forward: a mean of squares": (kernels, "_forward_turn", "tl.sum(s * s, 1)", "tl.sum(s * s, 1) / 8", 6),
    "forward: rounded before the norm": (kernels, "_forward_turn", "        if NORMED:", "        s = s.to(tl.bfloat16).to(tl.float32)\n        if NORMED:", 0),
    "chunks begin with zeros": (kernels, "_rows_before", "(at >= 0)", "(at >= row)", 0),
    "rows before a chunk in reverse": (kernels, "_rows_before", "row - (W - 1) + j", "row - 1 - j", 0),
    "forward: a turn's rows are those of the turn before": (kernels, "_forward_chunk", "ROW, row + COUNT, last", "ROW, row, last", 0),
    "forward: places a row short": (kernels, "_forward_chunk", "position += COUNT", "position += COUNT + 1", 2),
    "forward: the wrong pieces are normalised": (kernels, "_conv_forward_kernel", "(bit & NORMED) != 0", "(bit & NORMED) == 0", 6),
    # ---- backward ----
    "backward: slope of the sigmoid": (kernels, "_backward_turn", "tl.fma(s, 1.0 - gate, gate)", "gate", 0),
    "backward: slope without the gate": (kernels, "_backward_turn", "tl.fma(s, 1.0 - gate, gate)", "tl.fma(s, 1.0 - gate, 1.0)", 0),
    "backward: the norm's projection is lost": (norm_factors, "norm_factors", "-(tl.sum", "-0.0 * (tl.sum", 6),
    "backward: the projection scaled once": (norm_factors, "norm_factors", "* r * r)", "* r)", 6),
    "backward: no scale of the norm": (kernels, "_backward_turn", "g) * inverses[v]", "g)", 6),
    "backward: no eps": (norm_factors, "norm_factors", ", 1) + eps", ", 1)", 6),
    "backward: rows of the next chunk are counted too": (kernels, "_backward_turn", "tl.where(row + start + v < last, c, 0.0) if MASKED else c", "c", 0),
    "backward: dweight of the row itself": (kernels, "_backward_turn", "tl.fma(own, all_taps[v][j], sums[j])", "tl.fma(own, all_taps[v][0], sums[j])", 0),
    "backward: dweight in bf16": (kernels, "_backward_turn", "tl.fma(own, all_taps[v][j], sums[j])", "tl.fma(own, all_taps[v][j], sums[j]).to(tl.bfloat16).to(tl.float32)", 0),
    "backward: dx from the next document": (kernels, "_backward_turn", "positions[start + v + j] >= j", "positions[start + v + j] >= j - 1", 10),
    "backward: dx asks of another row": (kernels, "_backward_turn", "positions[start + v + j] >= j", "positions[start + v] >= j", 1),
    "backward: dx of the first weight": (kernels, "_backward_turn", "tl.fma(weights[j], c, dx)", "tl.fma(weights[0], c, dx)", 0),
    "backward: dx as wide as pieces": (kernels, "_backward_turn", "(start + v) * DX_ROW", "(start + v) * (DX_ROW + 1)", 0),
    "backward: dx before the chunk": (kernels, "_backward_turn", "inside & (out >= first)", "inside", 0),
    "backward: gradients are handed on a row late": (kernels, "_backward_turn", "(grads[COUNT + j],)", "(grads[COUNT + j - 1],)", 0),
    "backward: the last rows have no dx": (kernels, "_backward_chunk", "last + (W - 1 if DX else 0)", "last", 0),
    "backward: a turn's rows are those of the turn before": (kernels, "_backward_chunk", "SIZE, row + COUNT, M", "SIZE, row, M", 0),
    "backward: rows left over are not taken": (kernels, "_backward_chunk", "tl.minimum(row + COUNT, end)", "tl.minimum(row + COUNT, last)", 0),
    "backward: sums the other way round": (kernels, "_backward_chunk", "(W - 1 - j), sums", "j, sums", 0),
    "backward: dbias where dweight is": (kernels, "_backward_chunk", "(C * W if DW else 0) + columns", "columns", 0),
    "backward: chunks share a row of sums": (kernels, "_conv_backward_kernel", "partial_ptr + _offset(strip, WIDTH)", "partial_ptr", 0),
    "backward: dbias reads dweight's sums": (kernels, "_conv_backward_kernel", "partial_ptr + WIDTH - C, ", "partial_ptr, ", 0),
    "backward: the last strip is lost": (kernels, "_conv_backward_kernel", "programs // TILES", "programs // TILES - 1", 0),
    "backward: the wrong pieces are normalised": (kernels, "_conv_backward_kernel", "(bit & NORMED) != 0", "(bit & NORMED) == 0", 6),
    "helpers do not wait": (column_reduce, "join_helpers", "programs:", "0:", 0),
    "only one pass over strips": (column_reduce, "add_strips", "0, STRIPS", "0, tl.minimum(STRIPS, BLOCK_S)", 14),
    # ---- plans, autograd ----
    "plan: the last chunk is lost": (kernels, "conv_forward", "ceil_div(M, rows)", "(M // rows)", 0),
    "plan: x's rows are as far apart as its columns": (kernels, "conv_forward", "x, row = as_rows(x)", "x, row = as_rows(x)[0], x.shape[-1]", 2),
    "op: the pieces' heads in reverse": (module, "_options", "enumerate(heads)", "enumerate(reversed(heads))", 6),
    "op: no activation in backward": (module, "_ConvFunction.backward", "kept, ctx.options", "kept, ctx.options._replace(silu=False)", 0),
    "op: no documents in backward": (module, "_ConvFunction.backward", "x, weight, bias, since)", "x, weight, bias, None)", 10),
}  # fmt: skip

test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge_case, CASES[:8])
