"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it.

Slips in passes and autograd by PyTorch's backend; those in kernels under the interpreter.
"""

import pytest
from ops.linear_divergence_oracle import BF16, FP32, Case, judge_case

import onepass.ops.loss.linear_divergence as module

pytest.importorskip("triton")
from onepass.ops.loss.linear_divergence import autograd, formula, kernels, passes, rows, steps
from onepass.testing.mutants import copy_package, mutate

FORWARD, REVERSE, JSD = (Case(kind=kind, bias=True) for kind in ("forward_kl", "reverse_kl", "jsd"))
KEPT, TEACHER, AGAIN = (Case(mode, "jsd", "none", bias=True) for mode in ("keep_logits", "keep_teacher", "recompute"))
CAPPED = Case(kind="reverse_kl", softcap=3.0, teacher_softcap=2.0, temperature=2.0)
MAIN = Case(dtype=BF16, main=FP32, bias=True, V=300, lead=(200,), wide=True)
MUTANTS = {  # name: module, function, what is there, what stands there instead, the case that catches it
    "the teacher's bias forgotten": (steps, "_forward", "teacher_weight, teacher_bias)", "teacher_weight, None)", FORWARD),
    "the teacher's bias forgotten in backward": (steps, "_backward", "teacher_weight, teacher_bias)", "teacher_weight, None)", AGAIN),
    "each chunk's logits of the first tokens": (passes, "_LogitChunks._block", "_chunk_of(head.hidden, chunk), 0, head.columns, buffer)", "head.hidden[: chunk.stop - chunk.start], 0, head.columns, buffer)", FORWARD),
    "what waits is the last chunk's": (passes, "_LogitChunks._block", "(_chunk_of(kept, chunk), None)", "(kept[: chunk.stop - chunk.start], None)", TEACHER),
    "the last chunk lost": (passes, "_LogitChunks.__init__", "range(0, pair.tokens, max(1, rows))", "range(0, pair.tokens - rows, max(1, rows))", FORWARD),
    "the last chunk's weight gradient alone": (passes, "_GradientSums.add", "chunk), self.begun", "chunk), False", FORWARD),
    "the bias's gradient of the last chunk": (passes, "_GradientSums.add", "self.into.bias.add_(sums)", "self.into.bias.copy_(sums)", FORWARD),
    "the first chunk's hidden states for all": (passes, "_GradientSums.add", "d, _chunk_of(head.hidden, chunk)", "d, head.hidden[: len(d)]", FORWARD),
    "the first chunk's incoming gradients for all": (passes, "gradients", "incoming[chunk]", "incoming[: chunk.stop - chunk.start]", AGAIN),
    "the first chunk's numbers for all": (passes, "gradients", "numbers[:, chunk]", "numbers[:, : chunk.stop - chunk.start]", AGAIN),
    "the bias's gradient in 16 bits": (passes, "_GradientSums.add", "0, dtype=self.into.bias.dtype", "0", MAIN),
    "what waits is not multiplied": (autograd, "_scaled", "torch.mul(made, factor, out=into)", "into.copy_(made)", FORWARD),
    "what waits is not divided by the mean's": (autograd, "_from_made", "dloss if saved.scale is None else dloss * saved.scale", "dloss", FORWARD),
    "main_grad's gradient rounded first": (autograd, "_from_made", "wide if moved else ", "", MAIN),
    "a mean over the ignored too": (autograd, "_LinearDivergence.forward", "losses, labels, options.ignore_index", "losses, labels * 0 + 1, options.ignore_index", FORWARD),
    "rows' incoming gradients forgotten": (autograd, "_from_logits", "dloss.to(saved.numbers.dtype)", "dloss.to(saved.numbers.dtype) * 0 + 1", KEPT),
    "temperature for the student alone": (formula, "DivergenceTerms.teacher", "1 / self.temperature", "1", Case(temperature=2.0)),
    "the cap grows with the temperature": (formula, "DivergenceTerms.student", "self.softcap / self.temperature", "self.softcap", CAPPED),
    "jsd with the teacher's and the student's part exchanged": (formula, "finish_jsd", "terms.beta * sums[1] + (1 - terms.beta) * sums[0]", "terms.beta * sums[0] + (1 - terms.beta) * sums[1]", JSD),
    "the mixture's parts exchanged": (rows, "_mixture", "beta + (1 - beta) * ratio, (1 - beta) + beta * ratio", "(1 - beta) + beta * ratio, beta + (1 - beta) * ratio", JSD),
    "jsd's gradient without its part": (rows, "row_gradients", "d if reverse else d * (1 - terms.beta)", "d", JSD),
    "a gradient without the row's mean": (rows, "row_gradients", "(above - rows[4, part].unsqueeze(-1))", "above", REVERSE),
    "a cap's derivative forgotten": (rows, "row_gradients", "if terms.softcap:", "if False:", CAPPED),
    "the temperature's derivative forgotten": (rows, "row_gradients", "d / terms.temperature", "d", CAPPED),
    "the teacher's cap for the student": (rows, "_statistics", "logits.student, terms.student", "logits.student, terms.teacher", CAPPED),
    "ignored rows have a gradient": (rows, "row_gradients", "some.out.masked_fill_((some.labels == terms.ignore_index).unsqueeze(-1), 0.0)", "pass", FORWARD),
    "ignored rows have a divergence": (formula, "merge_statistics", "torch.where(labels != terms.ignore_index, found, 0.0)", "found", Case("recompute", reduction="none")),
    "fp32 logits not asked for": (passes, "_head_options", "wide=options.wide", "wide=False", Case(dtype=BF16, wide=True)),
}  # fmt: skip
LORA = Case(lora=3, bias=True)
MUTANTS |= {
    "lora: not for the student": (steps, "_forward", "student_bias, lora)", "student_bias)", LORA),
    "lora: not for the student in backward": (steps, "_backward", "student_bias, lora)", "student_bias)", Case("recompute", reduction="none", lora=3)),
    "lora: another scale": (steps, "_forward", "options.lora_scale", "1.0", LORA),
    "lora: nothing for hidden": (passes, "_GradientSums._multiply", "low is None", "True", LORA),
    "lora: hidden's first product lost": (passes, "_GradientSums._multiply", "lora.a, sums, True", "lora.a, sums, False", LORA),
    "lora: a's hidden states of the first chunk": (passes, "_GradientSums.add", "low, _chunk_of(head.hidden, chunk)", "low, head.hidden[: len(low)]", LORA),
    "lora: b's hidden states of the first chunk": (passes, "_GradientSums.add", "head.low(_chunk_of(head.hidden, chunk))", "head.low(head.hidden[: len(d)])", LORA),
    "lora: b's gradient of the last chunk": (passes, "_GradientSums.add", "head.low(_chunk_of(head.hidden, chunk)), self.begun", "head.low(_chunk_of(head.hidden, chunk)), False", LORA),
    "lora: what waits is not a's": (autograd, "_from_made", "saved.lora_a_made, saved.lora_b_made", "saved.lora_a_made * 0, saved.lora_b_made", LORA),
}  # fmt: skip
LONG = {kind: Case(kind=kind, reduction="sum", lead=(20,), V=150, block=32) for kind in ("forward_kl", "reverse_kl", "jsd")}
TERMS = Case(kind="jsd", reduction="sum", lead=(20,), V=150, block=32, temperature=2.0, softcap=3.0, teacher_softcap=2.0)
ROWS = Case("recompute", "reverse_kl", "none", lead=(20,), V=150, block=32)
KERNEL_MUTANTS = {
    "columns past the row count": (kernels, "_finished", 'tl.where(columns < W, finished_logit(x, scale, cap, SCALED, CAPPED), float("-inf"))', "finished_logit(x, scale, cap, SCALED, CAPPED)", LONG["forward_kl"]),
    "sums of pieces under other maxima": (kernels, "_raise_base", "tl.exp2((largest - base) * LOG2_E)", "tl.exp2(largest * 0.0)", LONG["forward_kl"]),
    "a cross sum not moved": (kernels, "_on_base", "(cross + shift * total)", "cross", LONG["forward_kl"]),
    "a cross sum moved the wrong way": (kernels, "_add_piece", "teacher_moved - moved", "moved - teacher_moved", LONG["forward_kl"]),
    "a cross sum moved the wrong way, reverse": (kernels, "_add_piece", "worth, moved - teacher_moved", "worth, teacher_moved - moved", LONG["reverse_kl"]),
    "groups merged without moving": (kernels, "_normalisers", "_on_base(cross, total, worth, -shift)", "worth * cross", LONG["reverse_kl"]),
    "the last piece not counted": (kernels, "_row", "LAST + lanes, base, log_total, teacher_base, teacher_log_total, scale, cap, teacher_cap, beta,\n            W", "lanes, base, log_total, teacher_base, teacher_log_total, scale, cap, teacher_cap, beta,\n            W", LONG["jsd"]),
    "a piece of the mixture counted twice": (kernels, "_row", "range(BLOCK, LAST + BLOCK, BLOCK)", "range(0, LAST + BLOCK, BLOCK)", LONG["jsd"]),
    "written backwards a piece too far": (kernels, "_row", "LAST - BLOCK - at", "LAST - at", LONG["forward_kl"]),
    "divided by the student's sum": (kernels, "_row", "kl / teacher_total", "kl / total", LONG["forward_kl"]),
    "the divergence without its normalisers": (kernels, "_row", "kl / total + (teacher_log_total - log_total)", "kl / total", LONG["reverse_kl"]),
    "jsd's gradient without its part": (kernels, "_row", "g *= 1.0 - beta", "g *= 1.0", LONG["jsd"]),
    "the mean of another row": (kernels, "_row", "mean = tl.load(numbers_ptr + 4 * far)", "mean = tl.load(numbers_ptr + 2 * far)", ROWS),
    "incoming gradients of the first row": (kernels, "_divergence_kernel", "tl.load(g_ptr + row)", "tl.load(g_ptr)", ROWS),
    "ignored rows are left as they are": (kernels, "_divergence_kernel", "tl.store(out_ptr + row * OUT_ROW + columns, tl.zeros([BLOCK], tl.float32), mask=columns < ROOM)", "pass", LONG["forward_kl"]),
    "the teacher's cap forgotten": (kernels, "_plan", "bool(terms.teacher_softcap)", "False", TERMS),
    "the larger of the two for the student": (kernels, "_mixture", "tl.where(teachers, smaller, larger), tl.where(teachers, larger, smaller)", "larger, smaller", LONG["jsd"]),
    "a mixture's logarithm from the student's": (kernels, "_mixture", "(ls - most) - mixed, (lt - most) - mixed", "-mixed, (lt - ls) - mixed", LONG["jsd"]),
}  # fmt: skip


def caught(mutant, case, backend):
    try:
        return not judge_case(mutant, case, 1, backend)
    except (AssertionError, RuntimeError, IndexError, ValueError):  # something was written that may not be, or shapes don't fit
        return True


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    *change, case = MUTANTS[name]
    assert caught(mutate(*change, entry=module), case, "torch")


@pytest.mark.parametrize("name", KERNEL_MUTANTS)
def test_mutants_of_kernels_are_caught(name):
    *change, case = KERNEL_MUTANTS[name]
    assert caught(mutate(*change, entry=module), case, "triton")


def test_a_copy_without_a_change_passes():
    copy = copy_package(module)
    assert copy is not module and copy.linear_divergence is not module.linear_divergence
    for backend, mutants in (("torch", MUTANTS), ("triton", KERNEL_MUTANTS)):
        for case in {case for *_, case in mutants.values()}:
            report = judge_case(copy, case, 1, backend)
            assert report, f"{case} {backend}\n{report}"
