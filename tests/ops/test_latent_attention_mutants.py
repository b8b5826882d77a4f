"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import importlib

import pytest
from ops.latent_oracle import judge_case, small_cases
from ops.mutants import mutant_tests

pytest.importorskip("triton")
from onepass.ops.attention import backward, forward
from onepass.ops.attention import latent_kernels as kernels

module = importlib.import_module("onepass.ops.attention.latent_attention")

CASES = small_cases()
KERNEL = "_arrange_kernel"
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    # ---- arranging ----
    "q not rotated": (kernels, KERNEL, "x1, x2 = rotate_pair(x1, x2, cos, sin, BACK)", "x1, x2 = x1, x2", 0),
    "dq rotated further": (kernels, KERNEL, "rotate_pair(x1, x2, cos, sin, BACK)", "rotate_pair(x1, x2, cos, sin, False)", 0),
    "k not rotated": (kernels, KERNEL, "k1, k2 = rotate_pair(k1, k2, cos, sin, False)", "k1, k2 = k1, k2", 0),
    "dk_rope not rotated back": (kernels, KERNEL, "rotate_pair(k1, k2, cos, sin, True)", "rotate_pair(k1, k2, cos, sin, False)", 0),
    "dk_rope of the last heads alone": (kernels, KERNEL, "k1 += tl.sum(x1, 1)", "k1 = 0 * k1 + tl.sum(x1, 1)", 1),
    "second elements of dk_rope left out": (kernels, KERNEL, "k2 += tl.sum(x2, 1)[:, None, :]", "k2 += 0 * tl.sum(x2, 1)[:, None, :]", 0),
    "each sequence by the first one's tables": (kernels, "_rows", "cos.numel() // cos.shape[-1]", "S", 4),
    "tables not begun again": (kernels, KERNEL, "tokens % ROWS, real, 0, P, P, BLOCK_P)\n        sin", "tokens, real, 0, P, P, BLOCK_P)\n        sin", 0),
    "a slice's rows by their width": (kernels, "arrange", "(q_row, rope_row), False", "(q_row, k_rope.shape[-1]), False", 4),
    "rows of q by its heads": (kernels, "arrange", "(q_row, rope_row), False", "(q.shape[-1], rope_row), False", 9),
    "values from the keys": (kernels, KERNEL, "_copy(kv_ptr + at_kv + NOPE, values_ptr", "_copy(kv_ptr + at_kv, values_ptr", 0),
    "keys where q's heads lie": (kernels, KERNEL, "_copy(kv_ptr + at_kv, keys_ptr", "_copy(kv_ptr + at, keys_ptr", 0),
    "dk over dv": (kernels, KERNEL, "_copy(keys_ptr + at, kv_ptr + at_kv, there", "_copy(keys_ptr + at, kv_ptr + at_kv + V, there", 0),
    "pairs taken for halves": (module, "LatentOptions.sizes", "values, self.interleaved", "values, False", 1),
    # ---- attention of two widths ----
    "y's heads as far apart as q's": (forward, "_attend_kernel", "HEADS + head) * DV, y, HEADS * DV", "HEADS + head) * D, y, HEADS * DV", 2),
    "delta of another head's y": (backward, "_dq_kernel", "HEADS + head) * DV, first, HEADS * DV", "HEADS + head) * DV, first, HEADS * D", 2),
    "values no wider than keys": (backward, "_dk_dv_kernel", "[SHARING, rows, DV]", "[SHARING, rows, D]", 2),
    # ---- the op ----
    "the scale of the part without positions": (module, "_options", "q.shape[-1] ** -0.5", "(q.shape[-1] - k_rope.shape[-1]) ** -0.5", 0),
    "the scale not taken": (module, "_options", "scale is None", "True", 2),
    "dv in the keys' place": (module, "_backward", "dkv[..., sizes.nope :]", "dkv[..., : sizes.values]", 0),
    "documents not told to backward": (module, "_backward", "options.attention(H), bounds)", "options.attention(H), None)", 6),
    "documents' tables of the whole row": (module, "latent_attention", "tables_of_documents(cos, sin, cu_seqlens, q.shape[1])", "(t.repeat(3, 1)[: q.shape[1]] for t in (cos, sin))", 6),
}  # fmt: skip

test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge_case, CASES[:4])
