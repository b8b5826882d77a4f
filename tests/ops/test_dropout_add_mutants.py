"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.dropout_add_oracle import judge_case, main_cases

import onepass.ops.dropout.dropout_add as module

pytest.importorskip("triton")
from onepass.kernels import launch
from onepass.kernels import philox as random
from onepass.ops.dropout import formula, kernels
from onepass.testing.mutants import mutate

CASES = main_cases()
MUTANTS = {  # name: module, what is there, what stands there instead
    "a round fewer": (random, "_ROUNDS = 7", "_ROUNDS = 6"),
    "the key stays as it is": (random, "        k0 += _WEYL_0\n", ""),
    "multipliers exchanged": (random, "_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57", "_MULTIPLIERS = 0xCD9E8D57, 0xD2511F53"),
    "row's high half forgotten": (random, "c2 = (rows >> 32).to(tl.uint32)[:, None]", "c2 = (rows >> 63).to(tl.uint32)[:, None]"),
    "seed's high half forgotten": (random, "seed.to(tl.uint32), (seed >> 32)", "seed.to(tl.uint32), (seed >> 63)"),
    "columns numbered in their tile": (random, "groups = first // _GROUP_TL + tl.arange", "groups = tl.arange"),
    "the edge dropped, low halves": (random, "tl.join(low >= threshold", "tl.join(low > threshold"),
    "the edge dropped, high halves": (random, ", high >= threshold)", ", high > threshold)"),
    "words in another order": (random, "tl.join(tl.join(w0, w2), tl.join(w1, w3))", "tl.join(tl.join(w0, w1), tl.join(w2, w3))"),
    "halves exchanged": (random, "tl.join(low >= threshold, high >= threshold)", "tl.join(high >= threshold, low >= threshold)"),
    "kept and dropped exchanged": (random, "BLOCK_H), values * scale, 0.0)", "BLOCK_H), 0.0, values * scale)"),
    "not scaled": (random, "BLOCK_H), values * scale, 0.0)", "BLOCK_H), values, 0.0)"),
    "scaled by a step too much": (random, "else STEPS / (STEPS - threshold)", "else STEPS / (STEPS - threshold - 1 / 2)"),
    "probabilities cut off": (random, "min(round(p * STEPS), STEPS - 1)", "min(int(p * STEPS), STEPS - 1)"),
    "seed in memory plus one": (random, "return tl.load(seed_ptr)", "return tl.load(seed_ptr) + 1"),
    "seed as a number of 32 bits": (random, "SEED.to(tl.int64)", "SEED.to(tl.int32).to(tl.int64)"),
    "formula: row's high half forgotten": (random, "rows & _LOW, (rows >> 32) & _LOW", "rows & _LOW, (rows >> 63) & _LOW"),
    "formula: words cut off late": (random, "c0, c1, c2, c3 = (b >> 32) & _LOW ^", "c0, c1, c2, c3 = (b >> 32) ^"),
    "formula: the edge dropped": (random, "half >= threshold for word", "half > threshold for word"),
    "first row forgotten in forward": (kernels, "else rows + tl.load(first_ptr)", "else rows"),
    "first row forgotten in backward": (kernels, "seed, rows + offset, left", "seed, rows, left"),
    "every tile's columns the first's": (kernels, "numbers, left, threshold", "numbers, 0, threshold"),
    "every tile's columns the first's in backward": (kernels, "rows + offset, left, threshold", "rows + offset, 0, threshold"),
    "residual dropped too": (
        kernels,
        "        z = apply_dropout(z, load_seed(seed_ptr, SEED), numbers, left, threshold, scale, BLOCK_H)\n"
        "    if residual_ptr is not None:\n        z += residual\n",
        "        if residual_ptr is not None:\n            z += residual\n"
        "        z = apply_dropout(z, load_seed(seed_ptr, SEED), numbers, left, threshold, scale, BLOCK_H)\n",
    ),
    "bias forgotten": (kernels, "    z += load_vector(bias_ptr, columns, columns < H)[None, :]\n", ""),
    "residual's rows as far apart as x's": (kernels, "columns, RESIDUAL_ROW, inside)", "columns, X_ROW, inside)"),
    "x rounded with its bias": (kernels, "[None, :]\n    if threshold", "[None, :]\n    z = z.to(tl.bfloat16).to(tl.float32)\n    if threshold"),
    "bias gradient of dx as stored": (
        kernels,
        "        dbias += dz\n",
        "        dbias += dz if dx_ptr is None else dz.to(dx_ptr.dtype.element_ty).to(tl.float32)\n",
    ),
    "bias gradient rounded a strip": (kernels, "tl.sum(dbias, 0), mask", "tl.sum(dbias, 0).to(tl.bfloat16).to(tl.float32), mask"),
    "strips lose their last block": (kernels, "tl.range(0, ROWS, BLOCK_M", "tl.range(0, ROWS - BLOCK_M, BLOCK_M"),
    "strips overlap by a block": (kernels, "tl.range(0, ROWS, BLOCK_M", "tl.range(0, ROWS + 1, BLOCK_M"),
    "last row lost in backward": (kernels, "        inside = (rows < M)[:, None]", "        inside = (rows < M - 1)[:, None]"),
    "a store one row too far": (kernels, "    inside = (rows < M)[:, None] & (columns < H)[None, :]\n    z =", "    inside = (rows <= M)[:, None] & (columns < H)[None, :]\n    z ="),
    "counter not set back": (kernels, "        tl.store(arrived_ptr + tile, 0)\n", ""),
    "dx in the residual's type": (kernels, "dx = None if dx_type is None else torch.empty_like(dy, dtype=dx_type,", "dx = None if dx_type is None else torch.empty_like(dy, dtype=torch.bfloat16,"),
    "dx is dy where something is dropped": (module, "as_it_is = not options.threshold and", "as_it_is = options.threshold < 1000 and"),
    "rows counted from 0 in every part": (formula, "else row_numbers(x) + first_row.view(())", "else row_numbers(x)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    where, old, new = MUTANTS[name]
    mutant = mutate(where, old, new, room=module)
    by_formula = name.startswith("formula") or name == "rows counted from 0 in every part"
    assert any(not judge_case(mutant, case, "torch" if by_formula else "triton") for case in CASES), "no case catches it"


def test_a_copy_without_a_change_passes():
    copy = mutate(launch, "_INT32_MAX = 0x7FFFFFFF", "_INT32_MAX = 2147483647", room=module)
    assert copy is not module and copy.dropout_add is not module.dropout_add
    for case in CASES[:8]:
        report = judge_case(copy, case)
        assert report, report
