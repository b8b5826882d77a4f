"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import importlib

import pytest
from ops.attention_oracle import judge_case, small_cases
from ops.calls import caught

pytest.importorskip("triton")
from onepass.kernels import launch
from onepass.ops.attention import backward, formula, forward
from onepass.testing.mutants import mutate

module = importlib.import_module("onepass.ops.attention.attention")

CASES = small_cases()
MUTANTS = {  # name: module, what is there, what stands there instead[, how often it is there]
    # ---- forward ----
    "a token does not see itself": (forward, "queries[:, None] >= keys[None, :]", "queries[:, None] > keys[None, :]"),
    "the largest key forgotten": (forward, "tl.where(highest > m, highest, m)", "tl.where(highest < m, highest, m)"),
    "the sum not shrunk": (forward, "total = total * shrink + tl.sum(p, 1)", "total = total + tl.sum(p, 1)"),
    "the result not shrunk": (forward, "y * shrink[:, None]", "y"),
    "not divided by the sum": (forward, "y / total[:, None]", "y"),
    "the sum's logarithm without the maximum": (forward, "m + tl.log2(total)", "tl.log2(total)"),
    "keys past the sequence's end": (forward, "mask=(first + tokens < S)[:, None]", "mask=(first + tokens <= S)[:, None]"),
    "powers of e": (forward, "LOG2E = math.log2(math.e)", "LOG2E = 1.0"),
    # ---- backward ----
    "dq not scaled": (backward, "dq * scale", "dq"),
    "dk not scaled": (backward, "dk * scale", "dk"),
    "delta left out": (backward, "ds = p * (dp - delta[:, None])", "ds = p * dp"),
    "delta left out of dk": (backward, "- delta[None, :])", ")"),
    "dq: a token does not see itself": (backward, "queries[:, None] >= keys[None, :]", "queries[:, None] > keys[None, :]"),
    "dk: a token does not see itself": (backward, "queries[None, :] >= keys[:, None]", "queries[None, :] > keys[:, None]"),
    # ---- the op ----
    "gradients not turned back": (module, "dk, interleaved, True, (dq, dk))", "dk, interleaved, False, (dq, dk))"),
    "gradients in halves": (module, "dk, interleaved, True, (dq, dk)", "dk, False, True, (dq, dk)"),
    "k not turned": (module, "(into_q, into_k))", "(into_q, into_k.clone()))"),
    "v not kept": (module, "into_v.copy_(v)", "into_v.zero_()"),
    "overwritten unasked": (module, "        if overwrite:\n            q, k, _", "        if True:\n            q, k, _"),
    "half a scale": (module, "groups) ** -0.5", "groups) ** -1.0"),
    "the scale not taken": (module, "    if scale is None:\n        scale = _head", "    if True:\n        scale = _head"),
    "keys and values exchanged": (formula, "    return q, k, v\n\n\ndef attention_formula", "    return q, v, k\n\n\ndef attention_formula"),
    "values after the queries": (formula, "split_with_sizes((heads, groups, groups), 2)", "split_with_sizes((groups, groups, heads), 2)[::-1]"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    changed, old, new, *times = MUTANTS[name]
    mutant = mutate(changed, old, new, room=module, times=times[0] if times else 1)
    assert caught(mutant, CASES, judge_case), "no case catches it"


def test_a_copy_without_a_change_passes():
    copy = mutate(launch, "_INT32_MAX = 0x7FFFFFFF", "_INT32_MAX = 2147483647", room=module)
    assert copy is not module
    assert copy.attention is not module.attention
    for case in CASES[::3]:
        report = judge_case(copy, case)
        assert report, report
