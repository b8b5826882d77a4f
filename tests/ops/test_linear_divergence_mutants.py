"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it.

Slips in passes and autograd by PyTorch's backend; those in kernels under the interpreter. More of ops/loss/head are in
test_linear_cross_entropy_mutants.py.
"""

from functools import partial

import pytest
from ops.linear_divergence_oracle import Case, judge_case
from ops.mutants import mutant_tests
from ops.oracle import BF16, FP32

import onepass.ops.loss.linear_divergence as module

pytest.importorskip("triton")
from onepass.ops.loss.head import autograd, operands, passes, sums
from onepass.ops.loss.linear_divergence import formula, kernels, row_loss, rows

FORWARD, REVERSE, JSD = (Case(kind=kind, bias=True) for kind in ("forward_kl", "reverse_kl", "jsd"))
KEPT, TEACHER, AGAIN = (Case(mode, "jsd", "none", bias=True) for mode in ("keep_logits", "keep_teacher", "recompute"))
CAPPED = Case(kind="reverse_kl", softcap=3.0, teacher_softcap=2.0, temperature=2.0)
MAIN = Case(dtype=BF16, main=FP32, bias=True, V=300, lead=(200,), wide=True)
MUTANTS = {  # name: module, function, what is there, what stands there instead, the case that catches it
    "the teacher's bias forgotten": (row_loss, "DivergenceRows.__init__", "rows.teacher_weight, rows.teacher_bias", "rows.teacher_weight", FORWARD),
    "each chunk's logits of the first tokens": (row_loss, "DivergenceRows._both", "chunk.take(teacher.hidden)", "teacher.hidden[:n]", FORWARD),
    "what waits is the last chunk's": (row_loss, "DivergenceRows._both", "chunk.take(self.waiting)", "self.waiting[:n]", TEACHER),
    "the first chunk's hidden states for all": (passes, "find_losses", "add(logits.out, hidden)", "add(logits.out, head.hidden[: len(hidden)])", FORWARD),
    "the first chunk's incoming gradients for all": (row_loss, "DivergenceRows.gradient", "chunk.take(self.incoming.incoming)", "self.incoming.incoming[: len(logits.x)]", AGAIN),
    "the first chunk's numbers for all": (row_loss, "DivergenceRows._numbers", "self.numbers[:, chunk.part]", "self.numbers[:, : chunk.part.stop - chunk.part.start]", AGAIN),
    "what waits is not divided by the mean's": (autograd, "RowLossFunction.backward", "dloss if scale is None else dloss * scale", "dloss", FORWARD),
    "main_grad's gradient rounded first": (autograd, "_finished", "wide if moved else ", "", MAIN),
    "a mean over the ignored too": (autograd, "RowLossFunction.forward", "losses, labels, options.ignore_index", "losses, labels * 0 + 1, options.ignore_index", FORWARD),
    "rows' incoming gradients forgotten": (autograd, "RowLossFunction.backward", "dloss.to(wide_type(tensors.hidden))", "dloss.to(wide_type(tensors.hidden)) * 0 + 1", KEPT),
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
    "ignored rows have a divergence": (formula, "merge_statistics", "torch.where(labels != terms.ignore_index, divergences, 0.0)", "divergences", Case("recompute", reduction="none")),
}  # fmt: skip
LORA = Case(lora=3, bias=True)
MUTANTS |= {
    "lora: not for the student": (operands, "head_of", "options.use_triton, shard, lora, own", "options.use_triton, shard, None, own", LORA),
    "lora: another scale": (operands, "head_of", "options.lora_scale", "1.0", LORA),
    "lora: hidden's first product lost": (sums, "HiddenSum._add", "lora.a, sums, True", "lora.a, sums, False", LORA),
    "lora: a's hidden states of the first chunk": (sums, "HiddenSum.add", "low, hidden)", "low, self.head.hidden[: len(low)])", LORA),
    "lora: b's hidden states of the first chunk": (sums, "WeightSum.add", "head.low(hidden)", "head.low(self.head.hidden[: len(d)])", LORA),
    "lora: what waits is not a's": (autograd, "RowLossFunction.backward", "Gradients(*saved[5:10])", "Gradients(*saved[5:8], saved[8] * 0, saved[9])", LORA),
}  # fmt: skip
LONG = {kind: Case(kind=kind, reduction="sum", lead=(20,), V=150, block=32) for kind in ("forward_kl", "reverse_kl", "jsd")}
TERMS = Case(kind="jsd", reduction="sum", lead=(20,), V=150, block=32, temperature=2.0, softcap=3.0, teacher_softcap=2.0)
ROWS = Case("recompute", "reverse_kl", "none", lead=(20,), V=150, block=32)
KERNEL_MUTANTS = {
    "columns past the row count": (kernels, "_finished", 'tl.where(columns < W, finished_logit(x, scale, cap), float("-inf"))', "finished_logit(x, scale, cap)", LONG["forward_kl"]),
    "sums of pieces under other maxima": (kernels, "_raise_base", "tl.exp2((largest - base) * LOG2_E)", "tl.exp2(largest * 0.0)", LONG["forward_kl"]),
    "a cross sum not moved": (kernels, "_on_base", "(cross + shift * total)", "cross", LONG["forward_kl"]),
    "a cross sum moved the wrong way": (kernels, "_add_piece", "teacher_moved - moved", "moved - teacher_moved", LONG["forward_kl"]),
    "a cross sum moved the wrong way, reverse": (kernels, "_add_piece", "worth, moved - teacher_moved", "worth, teacher_moved - moved", LONG["reverse_kl"]),
    "groups merged without moving": (kernels, "_normalisers", "_on_base(cross, total, worth, -shift)", "worth * cross", LONG["reverse_kl"]),
    "the last piece not counted": (kernels, "_row", "_mixture_piece(heads, numbers, LAST + lanes", "_mixture_piece(heads, numbers, lanes", LONG["jsd"]),
    "a piece of the mixture counted twice": (kernels, "_row", "range(BLOCK, LAST + BLOCK, BLOCK)", "range(0, LAST + BLOCK, BLOCK)", LONG["jsd"]),
    "written backwards a piece too far": (kernels, "_row", "LAST - BLOCK - at", "LAST - at", LONG["forward_kl"]),
    "divided by the student's sum": (kernels, "_row", "kl / teacher_total", "kl / total", LONG["forward_kl"]),
    "the divergence without its normalisers": (kernels, "_row", "kl / total + (teacher_log_total - log_total)", "kl / total", LONG["reverse_kl"]),
    "jsd's gradient without its part": (kernels, "_row", "g *= 1.0 - heads.beta", "g *= 1.0", LONG["jsd"]),
    "the mean of another row": (kernels, "_row", "mean = tl.load(numbers_ptr + 4 * far)", "mean = tl.load(numbers_ptr + 2 * far)", ROWS),
    "incoming gradients of the first row": (kernels, "_divergence_kernel", "tl.load(g_ptr + row)", "tl.load(g_ptr)", ROWS),
    "ignored rows are left as they are": (kernels, "_divergence_kernel", "tl.store(out_ptr + row * OUT_ROW + columns, tl.zeros([BLOCK], tl.float32), mask=columns < ROOM)", "pass", LONG["forward_kl"]),
    "the teacher's cap forgotten": (kernels, "_plan", "terms.teacher.softcap or None", "None", TERMS),
    "the larger of the two for the student": (kernels, "_mixture", "tl.where(teachers, smaller, larger), tl.where(teachers, larger, smaller)", "larger, smaller", LONG["jsd"]),
    "a mixture's logarithm from the student's": (kernels, "_mixture", "(ls - most) - mixed, (lt - most) - mixed", "-mixed, (lt - ls) - mixed", LONG["jsd"]),
}  # fmt: skip


def only(case):
    return [case]


by_formula, by_kernels = (partial(judge_case, backend=backend) for backend in ("torch", "triton"))
test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, only, by_formula)
test_mutants_of_kernels_are_caught, test_a_copy_passes_by_kernels = mutant_tests(module, KERNEL_MUTANTS, only, by_kernels)
