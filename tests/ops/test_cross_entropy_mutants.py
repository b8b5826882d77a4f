"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.cross_entropy_oracle import Case, cases, judge_case
from ops.mutants import mutant_tests
from ops.oracle import BF16, FP32

import onepass.ops.loss.cross_entropy as module

pytest.importorskip("triton")
from onepass.kernels import layout
from onepass.ops.loss import formula, logit_rows, row_formula, row_functions, row_kernels, targets
from onepass.ops.loss import reduction as losses

SLICED = Case((4,), 2111, FP32, "none", 0.3, over=True, layout="sliced")
PLAIN, MEAN = Case((2, 3), 4200, BF16, "none", 0.1, 1e-3), Case((7,), 130, FP32, "mean", 0.2)
SUM = Case((4,), 100, BF16, "sum")
WEIGHTED, BOTH = Case((7,), 130, FP32, "mean", 0.0, 0.1, weighted=True), Case((7,), 2500, FP32, "mean", 0.2, 0.1, weighted=True)
MIXED = Case((4,), 130, FP32, "none", 0.1, 0.1, mixed=True, weighted=True, stats=True)
MUTANTS = {  # name: module, function, what is there, what stands there instead, the case that catches it, by whom
    "gradient beside the logits": (logit_rows, "logits_gradient", "in_place or ", "", SLICED, "triton"),
    "gradient over logits that are not given away": (logit_rows, "logits_gradient", "in_place or copied", "True", PLAIN, "triton"),
    "a copy's gradient is lost": (layout, "as_matrix", "return rows if rows", "return x if x", Case((5,), 40, layout="strided"), "triton"),
    "incoming gradient forgotten": (module, "_CrossEntropy.backward", "dy, reduction", "dy * 0 + 1, reduction", PLAIN, "triton"),
    "smoothing forgotten in backward": (module, "_CrossEntropy.backward", "incoming, terms", "incoming, terms._replace(smoothing=0.0)", MEAN, "triton"),
    "scale of the mean forgotten in backward": (module, "_forward", "of_losses, scale", "of_losses, None", MEAN, "triton"),
    "loss of 16 bits": (module, "_forward", "(loss, *outputs)", "(loss.to(logits.dtype).float(), *outputs)", PLAIN, "triton"),
    "the last block of rows lost": (row_formula, "_blocks", "(rows, 1)", "(rows - step, 1)", PLAIN, "torch"),
    "each block has the first one's labels": (row_formula, "row_gradients", "labels[rows]", "labels[: len(x[rows])]", PLAIN, "torch"),
    "blocks one beside the other": (row_formula, "row_statistics", "parts, -1", "parts, 0", PLAIN, "torch"),
    "a mean over the ignored too": (losses, "mean_scale", "labels, ignore_index, token_weight", "labels * 0, ignore_index, token_weight", MEAN, "torch"),
    "the kernel's mean over the ignored too": (losses, "_reduce_kernel", "counts, 1", "rows < M, 1", MEAN, "triton"),
    "a sum divided": (losses, "_reduce_by_kernel", ' if reduction == "mean" else None', "", SUM, "triton"),
    "the sum's gradient for the rows' own": (losses, "row_gradient", "reshape(rows) ", "mean().expand(rows) ", PLAIN, "triton"),
    "z_loss without its 2": (row_kernels, "_gradient_kernel", "0 + 2.0 * ", "0 + ", PLAIN, "triton"),
    "the label's own column in the gradient": (row_kernels, "_gradient_kernel", "label, s", "label + 1, s", MEAN, "triton"),
    "a mean over rows where classes have weights": (targets, "row_weights", "RowWeights(both)", "RowWeights(both, both * 0 + 1)", WEIGHTED, "triton"),
    "a mean by the tokens' weights alone": (targets, "row_weights", "(token_weight, both)", "(token_weight)", BOTH, "torch"),
    "smoothing without the class's weight": (row_functions, "target_mass", "mass *= ", "mass = q * ", BOTH, "triton"),
    "the mass of one tile": (row_kernels, "_statistics_kernel", "(part_ptr + 7 * far", "(parts_ptr + 7 * far + row", BOTH, "triton"),
    "z_loss without the label's weight": (row_kernels, "_merge_kernel", "loss *= ", "loss = z_loss * lse * lse + 0 * ", BOTH, "triton"),
    "and in the gradient": (row_kernels, "_gradient_kernel", "penalty *= ", "penalty += 0 * ", BOTH, "triton"),
    "the gradient's mass forgotten": (row_kernels, "_gradient_kernel", "tl.load(mass_ptr + row, mask=counts, other=0.0)", "1.0", MIXED, "triton"),
    "the formula's mass forgotten": (row_formula, "_gradient", "incoming.mass +", "1 +", MIXED, "torch"),
    "each block has the first one's probabilities": (targets, "VocabColumns.of_rows", "probabilities[rows]", "probabilities[: rows.stop - rows.start]", MIXED, "torch"),
    "a statistic's gradient forgotten": (module, "_CrossEntropy.backward", ", **came", "", MIXED, "triton"),
    "the z-loss unsquared": (formula, "RowLosses.statistic", ".square()", "", MIXED, "torch"),
    "softcap forgotten in backward": (module, "_CrossEntropy.backward", "incoming, terms", "incoming, terms._replace(softcap=0.0)", Case((4,), 100, BF16, "none", softcap=2.0), "triton"),
    "parts added that are under other maxima": (row_kernels, "_merge_kernel", "now * sums", "sums", Case((3,), 4200, spread=100.0), "triton"),
}  # fmt: skip


def judged(mutant, case_and_backend):
    case, backend = case_and_backend
    if backend == "torch":
        rows = mutant.logit_rows.row_formula
        rows._BLOCK = rows._LARGE_BLOCK = 2 * case.V
    return judge_case(mutant, case, backend=backend)


PASSING = [(case, backend) for case in (*cases()[1:4], SLICED, PLAIN, MEAN, SUM) for backend in ("triton", "torch")]
test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, lambda *row: [row], judged, PASSING)
