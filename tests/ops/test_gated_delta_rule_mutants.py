"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it, by the formula or by stand-ins."""

import pytest
from ops.delta_oracle import judge_case, small_cases
from ops.delta_wheels import stand_in
from ops.mutants import mutant_tests
from ops.oracle import modules_of

import onepass.ops.delta.gated_delta_rule as module

pytest.importorskip("triton")
from onepass.ops.delta import by_wheels, chunks
from onepass.runtime import chunks as runtime_chunks

CASES = small_cases()


def judge(module, case):
    report = judge_case(module, case, "torch")
    names = modules_of(module)["onepass.ops.delta.by_wheels"]
    for wheel in ("fla", "flash_qla") if report else ():
        with stand_in(names, wheel):
            report = judge_case(module, case, "triton")
        if not report:
            return report
    return report


MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    # ---- the formula ----
    "slots: one chunk too few for a document": (runtime_chunks, "slots_of", "+ CHUNK - 1)", ")", 5),
    "slots: a document begins where the last chunk ends": (runtime_chunks, "slots_of", "(after - counts)[document]", "after[document]", 5),
    "slots: tokens past the document": (runtime_chunks, "slots_of", "places < ends[document]", "places <= ends[document]", 5),
    "slots: tokens of their sequence": (runtime_chunks, "slots_of", " - begins[own]", "", 5),
    "slots: an empty document has the chunk before it": (runtime_chunks, "slots_of", "counts == 0)", "counts < 0)", 6),
    "slots: the last chunk is the next document's": (runtime_chunks, "slots_of", "(after - 1)", "after", 6),
    "slots: no chunk is the first": (runtime_chunks, "slots_of", "within == 0", "within < 0", 5),
    "documents share a state": (chunks, "delta_rule_as_cast", "if slots is not None:\n            own", "if False:\n            own", 6),
    "the state of the first document for all": (chunks, "delta_rule_as_cast", "slots.document[n : n + 1]", "slots.document[:1]", 6),
    "a token sees the next": (chunks, "delta_rule_as_cast", ".tril()", ".tril(1)", 0),
    "a token does not see itself": (chunks, "delta_rule_as_cast", "scale * (q @ k.mT) * decay", "scale * (q @ k.mT) * decay.tril(-1)", 0),
    "decay the other way round": (chunks, "delta_rule_as_cast", "(total - total.mT)", "(total.mT - total)", 0),
    "no decay within the system": (chunks, "delta_rule_as_cast", "(beta * k) @ k.mT * decay", "(beta * k) @ k.mT * lower", 0),
    "beta of the key that is read": (chunks, "delta_rule_as_cast", "(beta * k) @ k.mT", "k @ (beta * k).mT", 0),
    "values without beta": (chunks, "delta_rule_as_cast", "beta * v,", "v,", 0),
    "reads without the decay": (chunks, "delta_rule_as_cast", "beta * grown * k", "beta * k", 1),
    "queries without the decay": (chunks, "delta_rule_as_cast", "scale * grown * q", "scale * q", 1),
    "queries without the scale": (chunks, "delta_rule_as_cast", "scale * grown * q", "grown * q", 1),
    "keys decay from the chunk's beginning": (chunks, "delta_rule_as_cast", "(total[..., -1:, :] - total)", "total", 1),
    "the state does not decay": (chunks, "delta_rule_as_cast", "kept[:, :, n] * S_now", "S_now", 1),
    "deltas are not corrected": (chunks, "delta_rule_as_cast", "writes[:, :, n] - reads[:, :, n] @ S_now", "writes[:, :, n]", 1),
    "sums in fp32": (chunks, "delta_rule_as_cast", "g.double()", "g", 9),
    "heads of keys in turn": (runtime_chunks, "in_chunks", "repeat_interleave(heads // t.shape[1], 1)", "repeat(1, heads // t.shape[1], 1, 1, 1)", 0),
    "the scale is none": (module, "_scale", "k.shape[-1] ** -0.5", "1.0", 0),
    # ---- by wheels ----
    "wheels: g's sums are g": (by_wheels, "wheel_forward", "sums, system\n", "g, system\n", 0),
    "wheels: no initial state": (by_wheels, "wheel_forward", "documents.take(state)", "None", 1),
    "wheels: zeros for the initial state in backward": (by_wheels, "wheel_backward", "documents.take(state)", "None if state is None else 0 * state.float()", 1),
    "wheels: no documents in backward": (by_wheels, "wheel_backward", "_Documents.of(kept.cu_seqlens,", "_Documents.of(None,", 5),
    "wheels: FLA's order is FlashQLA's": (by_wheels, "wheel_forward", "sums, y, system, final, *_", "sums, system, y, final, *_", 0),
    "wheels: dbeta for dg": (by_wheels, "wheel_backward", "dq, dk, dv, dbeta, dg, dstate, *_", "dq, dk, dv, dg, dbeta, dstate, *_", 0),
    "wheels: FlashQLA's dbeta for dg": (by_wheels, "wheel_backward", "dq, dk, dv, dbeta, dg, dstate = _f", "dq, dk, dv, dg, dbeta, dstate = _f", 0),
    "wheels: the final state's gradient is lost": (by_wheels, "wheel_backward", '"dht": documents.take(dfinal)', '"dht": None', 1),
    "wheels: FlashQLA is told of empty documents": (by_wheels, "_Documents.of", 'wheel == "fla"', "True", 5),
    "wheels: an empty document has no final state": (by_wheels, "wheel_forward", "documents.put(final, state,", "documents.put(final, None,", 6),
    "wheels: an empty document's state gets no gradient": (by_wheels, "wheel_backward", "documents.put(dstate, dfinal,", "documents.put(dstate, None,", 6),
    "op: k for q": (module, "_DeltaFunction.forward", "DeltaInputs(q, k,", "DeltaInputs(k, q,", 0),
    "op: g's gradient for beta's": (module, "_DeltaFunction.backward", "cast(dg, ctx.of_g), dbeta", "cast(dbeta, ctx.of_g), dg", 0),
}  # fmt: skip

test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge, CASES[:7])
