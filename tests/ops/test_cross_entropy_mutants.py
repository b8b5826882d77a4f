"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.cross_entropy_oracle import BF16, FP32, Case, cases, judge_case

import onepass.ops.loss.cross_entropy as module

pytest.importorskip("triton")
from onepass.ops.loss import reduction as losses
from onepass.ops.loss import row_formula, row_kernels
from onepass.testing.mutants import mutate

SLICED = Case((4,), 2111, FP32, "none", 0.3, over=True, layout="sliced")
PLAIN, MEAN = Case((2, 3), 4200, BF16, "none", 0.1, 1e-3), Case((7,), 130, FP32, "mean", 0.2)
SUM = Case((4,), 100, BF16, "sum")
MUTANTS = {  # name: module, what is there, what stands there instead, the case that catches it, by whom
    "gradient beside the logits": (module, "out = x if in_place or copied else", "out = x if copied else", SLICED, "triton"),
    "gradient over logits that are not given away": (module, "out = x if in_place or copied else", "out = x if True else", PLAIN, "triton"),
    "a copy's gradient is lost": (module, "return x if x.dim() == 2 else x.view", "return logits if x.dim() == 2 else x.view", Case((5,), 40, layout="strided"), "triton"),
    "incoming gradient forgotten": (module, "g = row_gradient(dy, reduction, labels.shape[0], scale)", "g = row_gradient(dy * 0 + 1, reduction, labels.shape[0], scale)", PLAIN, "triton"),
    "smoothing forgotten in backward": (module, "dlogits = logits_gradient(logits, labels, place, lse, g, terms,", "dlogits = logits_gradient(logits, labels, place, lse, g, terms._replace(smoothing=0.0),", MEAN, "triton"),
    "scale of the mean forgotten in backward": (module, "ctx.save_for_backward(logits, flat, lse, scale, place)", "ctx.save_for_backward(logits, flat, lse, None, place)", MEAN, "triton"),
    "loss of 16 bits": (module, "return loss, flat, lse, scale, place", "return loss.to(logits.dtype).float(), flat, lse, scale, place", PLAIN, "triton"),
    "the last block of rows lost": (row_formula, "range(0, max(rows, 1), step)", "range(0, max(rows - step, 1), step)", PLAIN, "torch"),
    "each block has the first one's labels": (row_formula, "_gradient(x[rows], out[rows], labels[rows]", "_gradient(x[rows], out[rows], labels[: len(x[rows])]", PLAIN, "torch"),
    "blocks one beside the other": (row_formula, "torch.cat(parts, -1)", "torch.cat(parts, 0)", PLAIN, "torch"),
    "a mean over the ignored too": (losses, "inverse_count(kept_weight(labels, ignore_index, token_weight, dtype))", "inverse_count(kept_weight(labels * 0, ignore_index, token_weight, dtype))", MEAN, "torch"),
    "the kernel's mean over the ignored too": (losses, "weight = tl.where(counts, 1.0, 0.0)", "weight = tl.where(rows < M, 1.0, 0.0)", MEAN, "triton"),
    "a sum divided": (losses, 'scale = labels.new_empty((), dtype=torch.float32) if reduction == "mean" else None', "scale = labels.new_empty((), dtype=torch.float32)", SUM, "triton"),
    "the sum's gradient for the rows' own": (losses, 'incoming.reshape(rows) if reduction == "none" else', 'incoming.mean().expand(rows) if reduction == "none" else', PLAIN, "triton"),
    "z_loss without its 2": (row_kernels, "a, b, t = g * (1.0 + 2.0 * z_loss * lse)", "a, b, t = g * (1.0 + z_loss * lse)", PLAIN, "triton"),
    "the label's own column in the gradient": (row_kernels, "s = tl.where(columns == label, s + t, s)", "s = tl.where(columns == label + 1, s + t, s)", MEAN, "triton"),
    "parts added that are under other maxima": (row_kernels, "tl.sum(now * sums, 0)", "tl.sum(sums, 0)", Case((3,), 4200, spread=100.0), "triton"),
}  # fmt: skip


def judged(mutant, case, backend):
    if backend == "torch":
        rows = mutant.row_formula
        rows._BLOCK = rows._LARGE_BLOCK = 2 * case.V
    return judge_case(mutant, case, backend=backend)


def fails(mutant, case, backend):
    try:
        return not judged(mutant, case, backend)
    except (AssertionError, RuntimeError, IndexError):  # something was written that may not be, or shapes don't fit
        return True


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    changed, old, new, case, backend = MUTANTS[name]
    assert fails(mutate(changed, old, new, room=module), case, backend)


def test_a_copy_without_a_change_passes():
    copy = mutate(losses, "= 1 << 31, 1 << 63", "= 2**31, 2**63", room=module)
    assert copy is not module and copy.cross_entropy is not module.cross_entropy
    for case in (*cases()[1:4], SLICED, PLAIN, MEAN, SUM):
        for backend in ("triton", "torch"):
            report = judged(copy, case, backend)
            assert report, report
