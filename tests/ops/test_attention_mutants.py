"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import importlib

import pytest
from ops.attention_oracle import judge_case, small_cases
from ops.mutants import mutant_tests

pytest.importorskip("triton")
from onepass.ops.attention import arguments, backward, formula, forward, gate_kernels, grouped, layout, scores
from onepass.ops.attention import document_kernels as kernels
from onepass.runtime import documents

module = importlib.import_module("onepass.ops.attention.attention")

CASES = small_cases()
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    # ---- forward ----
    "a token does not see itself": (scores, "sees", "queries >= keys", "queries > keys", 23),
    "the largest key forgotten": (forward, "_mix", "highest >", "highest <", 23),
    "the sum not shrunk": (forward, "_mix", " * shrink ", " ", 23),
    "the result not shrunk": (forward, "_mix", " * shrink[:, None]", "", 23),
    "not divided by the sum": (forward, "_attend_kernel", " / total[:, None]", "", 23),
    "the sum's logarithm without the maximum": (forward, "_attend_kernel", "m + tl.log2", "tl.log2", 23),
    "keys past the sequence's end": (scores, "load_tokens", "tokens < end", "tokens <= end", 23),
    "powers of e": (scores, "", "math.log2(math.e)", "1.0", 23),
    # ---- backward ----
    "dq not scaled": (backward, "_dq_kernel", "dq * scale", "dq", 23),
    "dk not scaled": (backward, "_dk_dv_kernel", "dk * scale", "dk", 23),
    "delta left out": (backward, "_into_dq", "(dp - delta[:, None])", "dp", 23),
    "delta left out of dk": (backward, "_into_dk_dv", "- delta[None, :]", "", 23),
    # ---- documents ----
    "a document sees its neighbour's last token": (scores, "document_tile", "return begin, end", "return tl.maximum(begin - 1, 0), end", 8),
    "a document sees its neighbour's first token": (scores, "document_tile", "return begin, end", "return begin, end + 1", 18),
    "a boundary off by one": (kernels, "_ranges", "tl.where(wrong, 0, first)", "tl.where(wrong, 0, first + (documents == 1).to(tl.int32))", 18),
    "the last block forgotten": (kernels, "_document_tiles_kernel", "count = tl.cdiv(end - first, BLOCK)", "count = (end - first) // BLOCK", 18),
    "tiles in each other's place": (kernels, "_document_tiles_kernel", "(others < document)", "(others > document + 1)", 18),
    "places that are left are not empty": (kernels, "_document_tiles_kernel", "left < tl.cdiv(S, BLOCK) + M", "left < 0", 18),
    "statistics over each other": (scores, "document_tile", "4 * document", "0 * document", 18),
    "positions of the whole row": (documents, "positions_within", "dtype=torch.int32) - first", "dtype=torch.int32) - 0 * first", 8),
    "positions from 1": (documents, "positions_within", "dtype=torch.int32) - first", "dtype=torch.int32) - first + 1", 8),
    # ---- windows ----
    "a window one too long": (arguments, "make_options", "window - 1, 0", "window, 0", 19),
    "a window one too short": (arguments, "make_options", "window - 1, 0", "max(0, window - 2), 0", 20),
    "a window's far end not cut": (scores, "sees", "return queries - keys <= LEFT", "return queries - keys <= LEFT + 1", 20),
    "a window's far end not cut on the diagonal": (scores, "sees", "seen & (queries - keys <= LEFT)", "seen & (queries - keys <= LEFT + 1)", 19),
    "keys inside from one block too early": (scores, "key_ranges", "first + BLOCK_M - 1 - LEFT", "first - 1 - LEFT", 20),
    "queries inside up to one block too late": (scores, "query_ranges", "// BLOCK_M  # blocks", "// BLOCK_M + 1  # blocks", 20),
    "queries from one block too late": (scores, "query_ranges", "tl.maximum(first - RIGHT - begin, 0)", "tl.maximum(first - begin, 0)", 27),
    "the right side not bounded": (scores, "sees", "(queries + RIGHT >= keys)", "(queries + RIGHT + 1 >= keys)", 27),
    "keys past the end seen": (scores, "sees", "keys < end", "keys < end + 1", 26),
    # ---- softcaps ----
    "a cap's derivative left out of dq": (backward, "_into_dq", "1.0 - scores * scores", "1.0", 23),
    "a cap's derivative left out of dk": (backward, "_into_dk_dv", "1.0 - scores * scores", "1.0", 23),
    "a cap before the scale": (scores, "scales_of", "2 * LOG2E * scale / softcap", "2 * LOG2E / softcap", 23),
    "half a cap": (scores, "scales_of", "softcap * LOG2E,", "softcap * LOG2E / 2,", 23),
    # ---- sinks ----
    "sinks to base e": (forward, "_attend_kernel", " * 1.4426950408889634", "", 8),
    "sinks counted twice": (forward, "_attend_kernel", "total = tl.full([BLOCK_M], 1.0, tl.float32)", "total = tl.full([BLOCK_M], 2.0, tl.float32)", 8),
    "the sinks' gradient rotated": (backward, "_dsinks_kernel", "total -=", "total +=", 8),
    "the sinks' gradient of one sequence": (backward, "_dsinks_kernel", "range(0, M)", "range(0, 1)", 24),
    "statistics between documents taken for some": (forward, "attend", "torch.full(shape, torch.inf,", "torch.full(shape, -1.0,", 8),
    # ---- by group ----
    "a group's key and value exchanged": (grouped, "group_parts", "return q, k.squeeze(3), v.squeeze(3)", "return q, v.squeeze(3), k.squeeze(3)", 11),
    "a group's queries after its key and value": (grouped, "group_parts", "((share, 1, 1), 3)", "((1, 1, share), 3)[::-1]", 11),
    "a group's values not kept": (grouped, "rotate_groups", "parts[2].copy_(v)", "parts[2].zero_()", 11),
    "queries by group not moved": (grouped, "rotate_groups", "parts[0].view(q.shape).copy_(q)", "parts[0].view(q.shape).zero_()", 13),
    "gradients by group not rotated back": (grouped, "rotate_groups_back", "True, out", "False, out", 11),
    "gradients by group in halves": (grouped, "rotate_groups_back", "options.interleaved, True", "False, True", 9),
    "the queries' gradient not moved": (grouped, "rotate_groups_back", "into[0].copy_(gradients[0].view(into[0].shape))", "pass", 13),
    "dk in dv's place": (grouped, "empty_gradients", "(q), dk, dv", "(q), dv, dk", 11),
    "the first sequence's tables for all": (grouped, "_table_by_group", ".unsqueeze(2)", ".unsqueeze(2)[:1]", 10),
    "results not in the projection's order": (layout, "is_sequence_first", "x.stride(0) < x.stride(1)", "False", 13),
    # ---- gates ----
    "the gate itself": (gate_kernels, "_gate_forward_kernel", "y * s, mask", "y * gate, mask", 34),
    "the query for the gate": (formula, "gates_of", "select(-2, 1)", "select(-2, 0)", 34),
    "the slope without the sigmoid": (gate_kernels, "_gate_backward_kernel", "dy * y * rest", "dout * y * rest", 34),
    "dy not gated": (gate_kernels, "_gate_backward_kernel", "dy = dout * s", "dy = dout", 34),
    "gates of neighbours": (gate_kernels, "_tile", "columns // D * (2 * D)", "columns // D * D", 34),
    "the last token left out": (gate_kernels, "_launch", "*tensors, M)", "*tensors, M - 1)", 34),
    "gates not kept": (grouped, "rotated_copy", ".copy_(gates_of(qkv, options))", ".zero_()", 36),
    "gates' gradient in another tensor": (module, "_backward", "dqkv if of_qkv else None, options", "None, options", 34),
    # ---- the op ----
    "gradients not rotated back": (module, "_backward", "True, places[:2]", "False, places[:2]", 31),
    "gradients in halves": (module, "_backward", "*gradients[:2], options.interleaved", "*gradients[:2], False", 5),
    "k not rotated": (grouped, "rotated_copy", "(into_q, into_k)", "(into_q, into_k.clone())", 19),
    "v not kept": (grouped, "rotated_copy", "copy_(v)", "zero_()", 19),
    "overwritten unasked": (module, "_forward", "if overwrite", "if True", 19),
    "half a scale": (arguments, "make_options", "0.5", "1.0", 23),
    "the scale not taken": (arguments, "make_options", "scale is None", "True", 3),
    "keys and values exchanged": (formula, "parts_of", "return q, k, v", "return q, v, k", 23),
    "values after the queries": (formula, "parts_of", "((heads, groups, groups), 2)", "((groups, groups, heads), 2)[::-1]", 23),
}  # fmt: skip

test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge_case, CASES[::3])
