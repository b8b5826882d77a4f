"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import importlib

import pytest
from ops.attention_oracle import judge_case, small_cases
from ops.calls import caught

pytest.importorskip("triton")
from onepass.ops.attention import arguments, backward, formula, forward
from onepass.testing.mutants import copy_package, mutate

module = importlib.import_module("onepass.ops.attention.attention")

CASES = small_cases()
MUTANTS = {  # name: module, function, what is there, what stands there instead
    # ---- forward ----
    "a token does not see itself": (forward, "_mix", " >= keys[None, :]", " > keys[None, :]"),
    "the largest key forgotten": (forward, "_mix", "highest >", "highest <"),
    "the sum not shrunk": (forward, "_mix", " * shrink ", " "),
    "the result not shrunk": (forward, "_mix", " * shrink[:, None]", ""),
    "not divided by the sum": (forward, "_attend_kernel", " / total[:, None]", ""),
    "the sum's logarithm without the maximum": (forward, "_attend_kernel", "m + tl.log2", "tl.log2"),
    "keys past the sequence's end": (forward, "load_tokens", "tokens <", "tokens <="),
    "powers of e": (forward, "", "math.log2(math.e)", "1.0"),
    # ---- backward ----
    "dq not scaled": (backward, "_dq_kernel", "dq * scale", "dq"),
    "dk not scaled": (backward, "_dk_dv_kernel", "dk * scale", "dk"),
    "delta left out": (backward, "_into_dq", "(dp - delta[:, None])", "dp"),
    "delta left out of dk": (backward, "_into_dk_dv", "- delta[None, :]", ""),
    "dq: a token does not see itself": (backward, "_into_dq", " >= keys[None, :]", " > keys[None, :]"),
    "dk: a token does not see itself": (backward, "_into_dk_dv", " >= keys[:, None]", " > keys[:, None]"),
    # ---- the op ----
    "gradients not turned back": (module, "_backward", "True, (dq, dk)", "False, (dq, dk)"),
    "gradients in halves": (module, "_backward", "dk, interleaved", "dk, False"),
    "k not turned": (module, "_rotated_copy", "(into_q, into_k)", "(into_q, into_k.clone())"),
    "v not kept": (module, "_rotated_copy", "copy_(v)", "zero_()"),
    "overwritten unasked": (module, "_forward", "if overwrite", "if True"),
    "half a scale": (arguments, "make_options", "0.5", "1.0"),
    "the scale not taken": (arguments, "make_options", "scale is None", "True"),
    "keys and values exchanged": (formula, "parts_of", "return q, k, v", "return q, v, k"),
    "values after the queries": (formula, "parts_of", "((heads, groups, groups), 2)", "((groups, groups, heads), 2)[::-1]"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    assert caught(mutate(*MUTANTS[name], entry=module), CASES, judge_case), "no case catches it"


def test_a_copy_without_a_change_passes():
    copy = copy_package(module)
    assert copy is not module
    assert copy.attention is not module.attention
    for case in CASES[::3]:
        report = judge_case(copy, case)
        assert report, report
