"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it.

Slips in products, sums and autograd by PyTorch's backend; those in kernels under the interpreter. What cross_entropy sees of the
rows' kernels too is in test_cross_entropy_mutants.py.
"""

from dataclasses import replace
from functools import partial

import pytest
from ops.linear_cross_entropy_oracle import ALL, Case, judge_case
from ops.mutants import mutant_tests
from ops.oracle import BF16, FP32

import onepass.ops.loss.linear_cross_entropy as module

pytest.importorskip("triton")
from onepass.ops.loss import formula, kept_rows, reduction, row_formula, row_functions, row_kernels, whole_row_kernels
from onepass.ops.loss.head import autograd as head_autograd
from onepass.ops.loss.head import chunks, operands, passes, steps, sums
from onepass.ops.loss.linear_cross_entropy import autograd, row_loss

KEEP, FORWARD, AGAIN, BLOCKS = Case("keep_logits"), Case("grad_in_forward"), Case("recompute"), Case("blocks")
FULL = Case("both", "none", full=True, smoothing=0.1, bias=True)
WEIGHTED = Case("grad_in_forward", weighted=True, bias=True)
CLASSES = Case("grad_in_forward", classes=True, weighted=True)
MIXED = Case("both", "none", mixed=True)
MAIN, PROMISED = Case("recompute", main=FP32), Case("known_grad_scale", main=FP32, bias=True)
NARROW, WIDE = Case("both", dtype=BF16), Case("grad_in_forward", dtype=BF16, wide=True, bias=True)
MUTANTS = {  # name: module, function, what is there, what stands there instead, the case that catches it
    # ---- products and sums ----
    "a block of the wrong columns": (operands, "make_logits", "head.weight[part]", "head.weight[: part.stop - part.start]", BLOCKS),
    "a block's bias of the first columns": (operands, "make_logits", "head.bias[part]", "head.bias[: part.stop - part.start]", FULL),
    "no bias": (operands, "_product", "bias is None else torch.addmm(bias, hidden, weight.t(), out=out)", "True else None", WEIGHTED),
    "no bias in fp32 logits": (operands, "_product", "(rows, weight[part].to(out.dtype).t(), out=out[:, part])\n        if bias is not None:\n            out += bias", "(rows, weight[part].to(out.dtype).t(), out=out[:, part])", WIDE),
    "fp32 logits rounded": (operands, "_product", "(rows, weight[part].to(out.dtype).t(), out=out[:, part])", "(rows, weight[part].to(out.dtype).t(), out=out[:, part])\n            out[:, part] = out[:, part].bfloat16()", WIDE),
    "fp32 logits not asked for": (operands, "Head.__post_init__", "wide_type(self.hidden) if self.wide else ", "", WIDE),
    "hidden's gradient of the first block's weight": (operands, "hidden_gradient", "logits.first : logits.first +", ":", BLOCKS),
    "hidden's gradient of the last block": (operands, "multiply", "addmm(into, d, matrix, beta=float(add), out=into)", "mm(d, matrix, out=into)", BLOCKS),
    "hidden's gradient of the last block, 16 bits": (operands, "multiply", "add or at", "at", Case("blocks", dtype=BF16)),
    "hidden's gradient summed in 16 bits": (sums, "HiddenSum.__init__", "(head.shard is not None or self.into.dtype != wide_type(self.into))", "head.shard is not None", Case(("recompute", ALL, 8), dtype=BF16)),
    "hidden's gradient of the first chunk everywhere": (sums, "HiddenSum.add", "chunk.own(self.into)", "self.into[: logits.out.shape[0]]", FORWARD),
    "the last chunk's weight gradient alone": (sums, "WeightSum.add", "begun or self.", "", FORWARD),
    "the weight's gradient over main_grad": (sums, "WeightSum.__init__", "keep, False", "False, False", Case("keep_logits", main=FP32)),
    "the weight's gradient summed in 16 bits": (sums, "WeightSum.__init__", "self.weight is not None and chunks > 1 and self.weight.dtype != wide_type(self.weight)", "False", Case(("recompute", 2, ALL), dtype=BF16)),
    "a narrow main_grad overwritten": (sums, "WeightSum.finish", "self.add_at_end", "False", Case("recompute", dtype=BF16, main=BF16)),
    "each block's gradient in the first's place": (sums, "WeightSum.__init__", "t[first : first + columns]", "t[:columns]", BLOCKS),
    "the bias's gradient of the last chunk": (sums, "WeightSum.add", "bias.add_", "bias.copy_", WEIGHTED),
    "the bias's gradient in 16 bits": (sums, "WeightSum.add", "0, dtype=self.bias.dtype", "0", Case("grad_in_forward", dtype=BF16, lead=(200,), bias=True, wide=True, main=FP32)),
    "the last chunk lost": (chunks, "Chunks.__init__", "range(0, own, step)", "range(0, max(own - step, 1), step)", FORWARD),
    "the first chunk's rows for all": (chunks, "TokenChunk.own", "values[self.part]", "values[: self.part.stop - self.part.start]", FORWARD),
    "one chunk behind": (passes, "find_losses", "now = chunk, hidden, logits, loss.exchange(parts)", "now = chunks.all[max(at - 1, 0)], hidden, logits, loss.exchange(parts)", AGAIN),
    "statistics of the last block": (row_loss, "CrossEntropyRows.exchange", "parts[0] if len(parts) == 1 else torch.cat(parts)", "parts[-1]", BLOCKS),
    "blocks that do not know where they begin": (row_loss, "CrossEntropyRows.read", "self._columns(chunk, logits)", "self._columns(chunk, logits._replace(first=0))", BLOCKS),
    "gradients that do not know where they begin": (row_loss, "CrossEntropyRows._write", "self._columns(chunk, logits)", "self._columns(chunk, logits._replace(first=0))", BLOCKS),
    "a block's size for the vocabulary's": (row_loss, "CrossEntropyRows._columns", "self.head.columns", "logits.first + logits.x.shape[1]", FULL),
    "no entropy for the gradient": (row_loss, "CrossEntropyRows.gradient", "self.found.entropy", "self.found.logsumexp", FULL),
    # ---- what waits, and what comes back ----
    "what waits is not multiplied": (head_autograd, "scaled", "torch.mul(made, factor, out=into)", "into.copy_(made)", FORWARD),
    "what waits is multiplied by the mean's alone": (autograd, "_made_gradients", "dloss * saved", "saved", FORWARD),
    "what waits is not divided by the mean's": (autograd, "_made_gradients", "dloss if saved.mean_scale is None else dloss * saved.mean_scale", "dloss", FORWARD),
    "the bias that waits is forgotten": (autograd, "_made_gradients", "requests, factor)", "requests)", WEIGHTED),
    "what waits is of 16 bits": (steps, "_new_in_forward", "tensors.weight.dtype if known and not separate_sum else wide", "tensors.weight.dtype", Case("grad_in_forward", dtype=BF16, main=FP32, V=300)),
    "main_grad's gradient rounded first": (autograd, "_made_gradients", "saved.weight_made.dtype if moved else ", "", Case("grad_in_forward", dtype=BF16, main=FP32, V=300)),
    "a promise of 1": (row_loss, "CrossEntropyRows.__init__", "options.grad_scale if known and options.grad_scale is not None else ", "", PROMISED),
    "a promise without the mean": (row_loss, "CrossEntropyRows.__init__", "rows.mean_scale if known else ", "", PROMISED),
    "the mean multiplied in twice": (row_loss, "CrossEntropyRows.__init__", "rows.mean_scale if known else None", "rows.mean_scale", FORWARD),
    "no token weights in forward": (row_loss, "CrossEntropyRows.__init__", "scale, rows.token_weight", "scale, None", WEIGHTED),
    "no token weights in backward": (autograd, "_incoming", "saved.token_weight", "None", Case("recompute", weighted=True)),
    "no mean in backward": (autograd, "_incoming", "saved.mean_scale", "None", KEEP),
    "token_weight's gradient of a sum for a mean's": (autograd, "_token_weight_gradient", "each - (mean if of_label is None else mean * of_label)", "each", WEIGHTED),
    "token_weight's gradient without what comes back": (autograd, "_token_weight_gradient", "(each * (saved.rows(dloss) if dloss.dim() else dloss))", "each", Case("keep_logits", "sum", weighted=True)),
    "stats' gradients forgotten": (autograd, "_incoming", "saved.rows(t).to(wide).contiguous()", "None", FULL),
    "stats' gradients one another's": (autograd, "_incoming", "zip(options.differentiable(),", "zip(options.differentiable()[::-1],", Case("keep_logits", full=True)),
    "what waited is used where stats came too": (autograd, "_LinearCrossEntropy.backward", "ctx.made and not stats", "ctx.made", Case("grad_in_forward", full=True)),
    "a mean over the ignored too": (reduction, "mean_scale", "labels, ignore_index, token_weight", "labels * 0, ignore_index, token_weight", KEEP),
    "weights of the ignored count in the mean": (formula, "kept_weight", "torch.where(kept, token_weight.to(dtype), 0.0)", "token_weight.to(dtype)", WEIGHTED),
    # ---- rows, by PyTorch ----
    "entropy's gradient without the entropy": (row_formula, "_gradient", " - incoming.entropy * entropy", "", FULL),
    "a cap's derivative forgotten": (row_formula, "_gradient", "terms.softcap:", "False:", Case("grad_in_forward", softcap=3.0, scale=0.5)),
    "a scale's derivative forgotten": (row_formula, "_gradient", "terms.scale != 1", "False", Case("recompute", scale=0.5)),
    "merged without their largest": (row_formula, "merge_statistics", "(m - largest).", "(m - m).", BLOCKS),
    "merged entropies not moved": (row_formula, "merge_statistics", "(surprise + (m - largest) * sums)", "surprise", FULL),
    "merged squares not moved": (row_formula, "merge_statistics", "worth.square() * squares", "squares", FULL),
    "statistics of ignored rows": (row_formula, "finish_losses", "torch.where(kept, sum_of_logits / size, 0.0)", "sum_of_logits / size", FULL),
    "a temperature after the scale alone": (reduction, "check_terms", "float(softcap or 0.0) / temperature", "float(softcap or 0.0)", Case("keep_logits", softcap=3.0, temperature=0.6)),
    "the largest counted from its block": (row_formula, "_statistics", "(-1) + first", "(-1)", Case("both", full=True, lead=(40,))),
}  # fmt: skip
AT_ONCE = Case("known_grad_scale", "mean", FP32, (9,), smoothing=0.2, z_loss=0.1, full=True)
LONG = Case("known_grad_scale", "sum", FP32, (3,), V=9001, smoothing=0.1, softcap=3.0)
LONG_STATS = Case("known_grad_scale", "sum", FP32, (3,), V=9001, full=True)
FIRSTS = Case(("loss_only", ALL, 64), "sum", FP32, (8,), full=True, frozen="hidden weight")
PARTS = Case(("recompute", 5, 64), "sum", FP32, (7,), V=130, full=True, smoothing=0.1)
KERNEL_MUTANTS = {
    "both: smoothing's part forgotten": (whole_row_kernels, "_both_kernel", "-g * smoothing / W", "0.0", AT_ONCE),
    "both: z_loss without its 2": (whole_row_kernels, "_both_kernel", "0 + 2.0 * ", "0 + ", AT_ONCE),
    "both: entropies under nothing": (whole_row_kernels, "_both_kernel", "(surprise + (largest - most) * total)", "surprise", AT_ONCE),
    "both: entropies of pieces under other maxima": (whole_row_kernels, "_add_groups", "(surprise + (largest - base) * total)", "surprise", LONG_STATS),
    "both: the last of the largest": (whole_row_kernels, "_both_kernel", "min(tl.where(largest == most, first, 2147483647), 0)", "max(tl.where(largest == most, first, 0), 0) + 1", AT_ONCE),
    "both: groups that forget their largest": (whole_row_kernels, "_add_groups", "total * before ", "total ", LONG),
    "both: what is read again is not counted": (whole_row_kernels, "_both_kernel", "0, again", "BLOCK, again", LONG),
    "both: what is read again is not written": (whole_row_kernels, "_both_kernel", "0, AGAIN", "BLOCK, AGAIN", LONG),
    "both: written backwards a piece too far": (whole_row_kernels, "_both_kernel", " - BLOCK - ", " - ", LONG),
    "both: columns past the row count": (whole_row_kernels, "_groups", 'tl.where(columns < W, z, float("-inf"))', "z", AT_ONCE),
    "both: the label's column left out": (whole_row_kernels, "_both_kernel", "        tl.store(out_ptr + label, of_label)\n", "", AT_ONCE),
    "both: ignored rows are left as they are": (whole_row_kernels, "_both_kernel", "tl.store(out_ptr + begin + lanes, tl.zeros([BLOCK], tl.float32), mask=begin + lanes < ROOM)", "pass", AT_ONCE),
    "blocks: begin at the first column": (row_kernels, "_place", "return FIRST,", "return FIRST * 0,", PARTS),
    "blocks: the first largest counted from the block": (row_kernels, "_statistics", " + begin\n", "\n", FIRSTS),
    "merge: entropies not moved": (row_kernels, "_merge_kernel", "(more + (m - most[None, :]) * sums)", "more", PARTS),
    "entropy's gradient without z": (row_functions, "gradient_of", "tl.where(p > 0, p * b * above, 0.0)", "0.0", PARTS),
    "entropy's gradient without the entropy": (row_kernels, "_gradient_kernel", "b * tl.load(entropy_ptr + row, mask=kept, other=0.0)", "0.0", PARTS),
    "what waited as it was": (head_autograd, "_scaled_kernel", " * tl.load(factor_ptr).to(tl.float32)", "", Case("grad_in_forward", "sum", FP32, (9,))),
    "merge: squares moved once": (row_kernels, "_merge_kernel", "now * now * tl", "now * tl", PARTS),
    "merge: squares of the first parts not moved": (row_kernels, "_merge_kernel", "before * before * squares", "squares", Case(("recompute", 5, 2), "sum", FP32, (9,), V=130, full=True)),
    "both: squares moved once": (whole_row_kernels, "_both_kernel", "worth * worth * squares", "worth * squares", AT_ONCE),
    "both: squares of pieces under other maxima": (whole_row_kernels, "_add_groups", "before * before * squares", "squares", LONG_STATS),
    "an ignored row's entropy": (row_kernels, "_merge_kernel", "tl.where(kept, log_total - surprise / total, 0.0)", "log_total - surprise / total", PARTS),
    "a mean of this block's columns": (row_kernels, "_merge_kernel", "logits / V, 0.0", "logits / S, 0.0", PARTS),
}  # fmt: skip
LORA, LORA_BLOCKS = Case("recompute", lora=3, bias=True), Case("both", "none", lora=3, bias=True)
LORA_MADE = Case("grad_in_forward", lora=3)
MUTANTS |= {
    "lora: no scale": (operands, "Head.low", "product.mul_(self.lora.scale)", "product", LORA),
    "lora: a gradient without the scale": (sums, "AdapterSum.rounded", " * self.scale", "", LORA),
    "lora: the scale twice": (sums, "AdapterSum.rounded", " * self.scale", " * self.scale * self.scale", LORA),
    "lora: the logits rounded before it is added": (operands, "_products_with_lora", "_product(operand, head.joined(first + at, first + end), None, out[:, at:end])", "joined, K = head.joined(first + at, first + end), hidden.shape[1]\n        out[:, at:end] = hidden @ joined[:, :K].t()\n        out[:, at:end] += operand[:, K:] @ joined[:, K:].t()", Case("keep_logits", dtype=BF16, lora=3, D=64, lead=(40,))),
    "lora: b's rows of the first block": (operands, "_products_with_lora", "first + at, first + end", "at, end", LORA_BLOCKS),
    "lora: the bias forgotten": (operands, "Head.operand", "x[:, width + rank] = 1", "pass", LORA),
    "lora: the bias of the first block": (operands, "Head.joined", "self.bias[first:last]", "self.bias[: last - first]", LORA_BLOCKS),
    "lora: nothing for hidden": (sums, "HiddenSum._add", "low is not None", "False", LORA),
    "lora: hidden's part of each block": (sums, "AdapterSum.add", "block == self.blocks - 1", "True", LORA_BLOCKS),
    "lora: the last block's part": (sums, "AdapterSum.add", "block > 0", "False", LORA_BLOCKS),
    "lora: b's rows of the first block in backward": (operands, "low_gradient", "logits.first : logits.first +", ":", LORA_BLOCKS),
    "lora: a's gradient of the last chunk": (sums, "AdapterSum.add_a", "self.begun)", "False)", LORA),
    "lora: b's gradient of the last chunk": (sums, "WeightSum.add", "self.head.low(hidden), self.begun", "self.head.low(hidden), False", LORA),
    "lora: b's gradient of each block in the first's place": (sums, "WeightSum.__init__", "t[first : first + columns]", "t[:columns]", LORA_BLOCKS),
    "lora: b's gradient without the scale": (sums, "WeightSum.add", "self.head.low(hidden)", "self.head.low(hidden) / self.head.lora.scale", LORA),
    "lora: what waits is not multiplied": (autograd, "_sums_of", "t if factor is None else t * factor", "t", LORA_MADE),
}  # fmt: skip
MASKED = Case(("recompute", 5, 64), "none", FP32, (9,), V=130, masked=True)
KEPT, KEPT_MASKED = Case("keep_logits", "none", kept=True, weighted=True, full=True), replace(MASKED, kept=True)
MUTANTS |= {
    "a mask of the first columns": (row_formula, "_statistics", "allowed_columns(bits, first, W)", "allowed_columns(bits, 0, W)", MASKED),
    "gradients outside of the mask": (row_formula, "row_gradients", "first, x.shape[1]), 0.0)", "first, x.shape[1]), 1e-2)", MASKED),
    "a mean by the tokens' weights alone": (autograd, "_rows_of", "both.divisor()", "weights", replace(CLASSES, smoothing=0.2)),
    "token weights' gradient without the class": (autograd, "_token_weight_gradient", "losses * of_label", "losses", CLASSES),
    "the mean's part of it": (autograd, "_token_weight_gradient", "mean * of_label", "mean", replace(CLASSES, smoothing=0.2)),
    "masses forgotten in backward": (autograd, "_incoming", "mass=saved.mass", "mass=torch.ones_like(g)", MIXED),
    "masses forgotten in forward": (row_loss, "CrossEntropyRows.finish", "mass=done.mass", "mass=torch.ones_like(done.loss)", replace(MIXED, mode="known_grad_scale", reduction="sum")),
    "each chunk has the first one's probabilities": (row_loss, "CrossEntropyRows._columns", "chunk.take(targets.probabilities)", "targets.probabilities[: len(logits.x)]", MIXED),
    "each block has the first one's": (row_formula, "_mass", "[:, first : first + z.shape[1]]", "[:, : z.shape[1]]", MIXED),
    "masks of rows before the ignored ones left": (autograd, "_rows_of", "bits if bits is None or bits.shape[0] == 1 else selection.take(bits)", "bits", KEPT_MASKED),
    "the first chunk's masks": (row_loss, "CrossEntropyRows._columns", "chunk.take(self.bits)", "self.bits[: len(logits.x)]", MASKED),
    "kept rows one too few": (kept_rows, "KeptRows.selection", "min(own, ceil_div(max(self.counts()), grain) * grain)", "min(own, max(self.counts()) - 1)", KEPT),
    "gradients in the first rows": (kept_rows, "RowSelection.put_own", "0, self.own, values", "0, self.own.sort().values * 0 + torch.arange(len(values), device=values.device), values", KEPT),
    "token weights of the first rows": (autograd, "_rows_of", "selection.take(weights)", "weights[: len(labels)]", KEPT),
    "incoming gradients of the first rows": (autograd, "_Saved.rows", "selection.take(values)", "values[: len(self.labels)]", KEPT),
}  # fmt: skip
KERNEL_MUTANTS |= {
    "a mask's bits from the top": (row_kernels, "_allowed", ">> (columns & 7)", ">> (7 - (columns & 7))", MASKED),
    "a mask of the first block": (row_kernels, "_statistics_kernel", "BITS_ROW, FIRST + columns", "BITS_ROW, columns", MASKED),
    "gradients outside of the kernel's mask": (row_kernels, "_gradient_kernel", "BITS_ROW, FIRST + columns", "BITS_ROW, columns", MASKED),
    "the kernel reduces by other weights": (autograd, "_LinearCrossEntropy.forward", "rows.mean_scale, of_mean", "rows.mean_scale", replace(CLASSES, smoothing=0.2, lead=(6,))),
    "the first block's probabilities": (row_functions, "target_mass", "targets_ptr + first", "targets_ptr", MIXED),
    "the first row's mask": (row_kernels, "_allowed", "row * BITS_ROW", "0", MASKED),
}  # fmt: skip


def only(case):
    return [case]


by_formula, by_kernels = (partial(judge_case, backend=backend) for backend in ("torch", "triton"))
test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, only, by_formula)
test_mutants_of_kernels_are_caught, test_a_copy_passes_by_kernels = mutant_tests(module, KERNEL_MUTANTS, only, by_kernels)
