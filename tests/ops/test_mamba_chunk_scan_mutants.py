"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it, by the formula or by stand-ins."""

import pytest
from ops.mutants import mutant_tests
from ops.oracle import FP32, modules_of
from ops.scan_oracle import judge_case, small_cases
from ops.scan_wheels import stand_in

import onepass.ops.scan.mamba_chunk_scan as module

pytest.importorskip("triton")
from onepass.ops.scan import by_wheels, chunks

CASES = small_cases()


def judge(module, case):
    report = judge_case(module, case, "torch")
    names = modules_of(module)["onepass.ops.scan.by_wheels"]
    takes = {"mamba_ssm": case.ends is None or not (case.final or case.state), "fla": case.dtype is FP32}
    for wheel in takes if report else ():
        if takes[wheel]:
            with stand_in(names, wheel):
                report = judge_case(module, case, "triton")
            if not report:
                return report
    return report


MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    # ---- the formula ----
    "documents share a state": (chunks, "scan_as_cast", "if slots is not None:\n            own", "if False:\n            own", 6),
    "the state of the first document for all": (chunks, "scan_as_cast", "slots.document[n : n + 1]", "slots.document[:1]", 6),
    "empty documents have the last state": (chunks, "scan_as_cast", "slots.empty[:", "~slots.empty[:", 6),
    "a token sees the next": (chunks, "scan_as_cast", ".tril()", ".tril(1)", 0),
    "a token does not see itself": (chunks, "scan_as_cast", ".tril()", ".tril(-1)", 0),
    "decay the other way round": (chunks, "scan_as_cast", "(total - total.mT)", "(total.mT - total)", 0),
    "no decay within a chunk": (chunks, "scan_as_cast", "C @ B.mT * decay", "C @ B.mT * lower", 0),
    "reads without the decay": (chunks, "scan_as_cast", "C * grown, grown", "C, grown", 1),
    "B decays from the chunk's beginning": (chunks, "scan_as_cast", "(total[..., -1:, :] - total)", "total", 1),
    "the state does not decay": (chunks, "scan_as_cast", "kept[:, :, n] * now", "now", 1),
    "steps past the end": (chunks, "scan_as_cast", "> 0, steps, 0.0)", "> -1, steps, 0.0)", 1),
    "x without its step": (chunks, "scan_as_cast", "v, g = steps * v,", "v, g = v,", 0),
    "sums in fp32": (chunks, "scan_as_cast", "g.double()", "g", 9),
    "no D": (chunks, "scan_as_cast", "D.to(wide)[:, None] * x", "0 * x", 0),
    "softplus before the bias": (chunks, "step_sizes", "dt = dt + dt_bias.to(wide)", "return F.softplus(dt) + dt_bias.to(wide)", 0),
    "softplus always": (chunks, "step_sizes", "if options.softplus:", "if True:", 10),
    "no largest step": (chunks, "step_sizes", "dt.clamp(options.least, options.most)", "dt.clamp(options.least)", 11),
    "no least step": (chunks, "step_sizes", "dt.clamp(options.least, options.most)", "dt.clamp(0, options.most)", 11),
    # ---- by mamba-ssm ----
    "mamba-ssm: B for C": (by_wheels, "_mamba_call", '"B": inputs.B, "C": inputs.C', '"B": inputs.C, "C": inputs.B', 0),
    "mamba-ssm: no documents": (by_wheels, "_mamba_call", "documents, A = document_of", "_, A = document_of", 5),
    "mamba-ssm: no bias": (by_wheels, "_mamba_call", '"dt_bias": inputs.dt_bias', '"dt_bias": None', 0),
    "mamba-ssm: no D": (by_wheels, "_mamba_call", '"D": inputs.D', '"D": None', 0),
    "mamba-ssm: no limits": (by_wheels, "_mamba_call", "(options.least, options.most)", '(0.0, float("inf"))', 11),
    "mamba-ssm: no initial states": (by_wheels, "_mamba_call", "None if inputs.states is None else", "None if True else", 1),
    "mamba-ssm: the final states' gradient is lost": (by_wheels, "_mamba_backward", '"dfinal_states": grads.dfinal', '"dfinal_states": None', 1),
    "mamba-ssm: dB for dC": (by_wheels, "_mamba_backward", "ddt, dA, dB, dC, dD, _", "ddt, dA, dC, dB, dD, _", 0),
    "mamba-ssm: dbias for dD": (by_wheels, "_mamba_backward", "dD, _, dbias, dstates = b", "dbias, _, dD, dstates = b", 0),
    # ---- by FLA ----
    "FLA: sums without their scale": (by_wheels, "_fla_call", "scale=scale", "scale=1.0", 0),
    "FLA: the gradient's sums from the first on": (by_wheels, "_fla_backward", "reverse=True", "reverse=False", 0),
    "FLA: groups in turn": (by_wheels, "_fla_call", "t.repeat_interleave(serves, 2)", "t.repeat(1, 1, serves, 1)", 0),
    "FLA: groups in turn in backward": (by_wheels, "_fla_backward", "t.unflatten(2, groups).float().sum(3)", "t.unflatten(2, groups[::-1]).float().sum(2)", 0),
    "FLA: states as the scan has them": (by_wheels, "_fla_call", "inputs.states.float().mT.contiguous()", "inputs.states.float().flip(2).mT.contiguous()", 1),
    "FLA: no D in dx": (by_wheels, "_fla_backward", "dx + D.float()[:, None] * dy", "dx", 0),
    "FLA: dt's part by x is lost": (by_wheels, "_fla_backward", "(dv.float() * x).sum(-1) + dg * A", "dg * A", 0),
    "FLA: dt's part by A is lost": (by_wheels, "_fla_backward", "(dv.float() * x).sum(-1) + dg * A", "(dv.float() * x).sum(-1)", 0),
    "FLA: softplus's slope": (by_wheels, "_fla_backward", "ddt * dt.sigmoid()", "ddt", 0),
    "FLA: gradients past the limit": (by_wheels, "_fla_backward", "(smooth <= options.most)", "(smooth > -1)", 11),
    "FLA: gradients below the limit": (by_wheels, "_fla_backward", "(smooth >= options.least)", "(smooth > -1)", 11),
    "FLA: A's gradient without the steps": (by_wheels, "_fla_backward", "(dg * steps).sum((0, 1))", "dg.sum((0, 1))", 0),
    "op: dfinal is lost": (module, "_ScanFunction.backward", "ScanGradients(dy, dfinal)", "ScanGradients(dy, None)", 1),
}  # fmt: skip

test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge, CASES[:7])
