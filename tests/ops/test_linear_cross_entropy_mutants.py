"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it.

Slips in products, sums and autograd by PyTorch's backend; those in kernels under the interpreter. What cross_entropy sees of the
rows' kernels too is in test_cross_entropy_mutants.py.
"""

import inspect
import sys

import pytest
from ops.linear_cross_entropy_oracle import ALL, BF16, FP32, Case, judge_case

import onepass.ops.loss.linear_cross_entropy as module

pytest.importorskip("triton")
from onepass.ops.loss import reduction as losses
from onepass.testing.mutants import mutate

KEEP, FORWARD, AGAIN, BLOCKS = Case("keep_logits"), Case("grad_in_forward"), Case("recompute"), Case("blocks")
FULL = Case("both", "none", full=True, smoothing=0.1, bias=True)
WEIGHTED = Case("grad_in_forward", weighted=True, bias=True)
MAIN, PROMISED = Case("recompute", main=FP32), Case("known_grad_scale", main=FP32, bias=True)
NARROW, WIDE = Case("both", dtype=BF16), Case("grad_in_forward", dtype=BF16, wide=True, bias=True)
MUTANTS = {  # name: what is there, what stands there instead, the case that catches it
    # ---- products and sums ----
    "a block of the wrong columns": ("weight = head.weight[first:] if whole else head.weight[first:last]", "weight = head.weight[: last - first]", BLOCKS),
    "a block's bias of the first columns": ("head.bias[first : first + weight.shape[0]]", "head.bias[: weight.shape[0]]", FULL),
    "no bias": ("if bias is None else torch.addmm(bias, hidden, weight.t(), out=out)", "if True else None", WEIGHTED),
    "no bias in fp32 logits": ("            torch.mm(rows, weight[part].to(out.dtype).t(), out=out[:, part])\n        if bias is not None:\n            out += bias\n", "            torch.mm(rows, weight[part].to(out.dtype).t(), out=out[:, part])\n", WIDE),
    "fp32 logits rounded": ("            torch.mm(rows, weight[part].to(out.dtype).t(), out=out[:, part])\n", "            torch.mm(rows, weight[part].to(out.dtype).t(), out=out[:, part])\n            out[:, part] = out[:, part].bfloat16()\n", WIDE),
    "fp32 logits not asked for": ("self.logits = wide_type(self.hidden) if options.wide else self.hidden.dtype", "self.logits = self.hidden.dtype", WIDE),
    "hidden's gradient of the first block's weight": ("head.weight[logits.first : logits.first + d.shape[1]]", "head.weight[: d.shape[1]]", BLOCKS),
    "hidden's gradient of the last block": ("torch.addmm(into, d, weight, beta=float(add), out=into) if add else", "torch.mm(d, weight, out=into) if add else", BLOCKS),
    "hidden's gradient of the last block, 16 bits": ("beta=float(add or at > 0)", "beta=float(at > 0)", Case("blocks", dtype=BF16)),
    "hidden's gradient summed in 16 bits": ("if into is not None and blocks > 1 and (head.shard is not None or into.dtype != wide_type(into)):", "if into is not None and blocks > 1 and head.shard is not None:", Case(("recompute", ALL, 8), dtype=BF16)),
    "hidden's gradient of the first chunk everywhere": ("hidden_gradient(self.head, logits, self.into[chunk], block > 0)", "hidden_gradient(self.head, logits, self.into[: logits.out.shape[0]], block > 0)", FORWARD),
    "the last chunk's weight gradient alone": ("keep = self.begun or self.keep", "keep = self.keep", FORWARD),
    "the weight's gradient over main_grad": ("self.keep, self.begun = keep, False", "self.keep, self.begun = False, False", Case("keep_logits", main=FP32)),
    "the weight's gradient summed in 16 bits": ("if self.weight is not None and len(chunks) > 1 and self.weight.dtype != wide_type(self.weight):", "if False:", Case(("recompute", 2, ALL), dtype=BF16)),
    "a narrow main_grad overwritten": ("add_gradient(self.weight, self.sums, None, self.add_at_end)", "add_gradient(self.weight, self.sums, None, False)", Case("recompute", dtype=BF16, main=BF16)),
    "each block's gradient in the first's place": ("self.part = slice(first, first + columns)", "self.part = slice(0, columns)", BLOCKS),
    "the bias's gradient of the last chunk": ("self.bias.add_(sums) if self.begun else", "self.bias.copy_(sums) if self.begun else", WEIGHTED),
    "the bias's gradient in 16 bits": ("sums = d.sum(0, dtype=self.bias.dtype)", "sums = d.sum(0)", Case("grad_in_forward", dtype=BF16, lead=(200,), bias=True, wide=True, main=FP32)),
    "the last chunk lost": ("for first in range(0, own, step)] or", "for first in range(0, max(own - step, 1), step)] or", FORWARD),
    "the first chunk's rows for all": ("return values[chunk] if self.ranks == 1 else", "return values[: chunk.stop - chunk.start] if self.ranks == 1 else", FORWARD),
    "one chunk behind": ("        before = chunk, labels, exchange\n", "        before = chunk, head.labels[: len(labels)], exchange\n", AGAIN),
    "statistics of the last block": ("parts[0] if len(parts) == 1 else torch.cat(parts)", "parts[-1]", BLOCKS),
    "blocks that do not know where they begin": ("        logits.x, labels, head.terms, head.full, logits.first, head.columns,", "        logits.x, labels, head.terms, head.full, 0, head.columns,", BLOCKS),
    "gradients that do not know where they begin": ("labels, head.terms, lse, entropy, incoming, logits.first, head.columns,", "labels, head.terms, lse, entropy, incoming, 0, head.columns,", BLOCKS),
    "a block's size for the vocabulary's": ("labels, head.terms, lse, entropy, incoming, logits.first, head.columns,", "labels, head.terms, lse, entropy, incoming, logits.first, logits.first + logits.x.shape[1],", FULL),
    "no entropy for the gradient": ("self.rows = (head.labels, found.logsumexp, found.entropy, *incoming)", "self.rows = (head.labels, found.logsumexp, found.logsumexp, *incoming)", FULL),
    # ---- what waits, and what comes back ----
    "what waits is not multiplied": ("torch.mul(made, factor, out=into)", "into.copy_(made)", FORWARD),
    "what waits is multiplied by the mean's alone": ("factor = dloss if saved.scale is None else dloss * saved.scale", "factor = dloss if saved.scale is None else saved.scale", FORWARD),
    "what waits is not divided by the mean's": ("factor = dloss if saved.scale is None else dloss * saved.scale", "factor = dloss", FORWARD),
    "the bias that waits is forgotten": ("vector_gradient(saved.bias_made * factor, bias,", "vector_gradient(saved.bias_made, bias,", WEIGHTED),
    "what waits is of 16 bits": ("kind = weight.dtype if known and not separate_sum else wide_type(weight)", "kind = weight.dtype", Case("grad_in_forward", dtype=BF16, main=FP32, V=300)),
    "main_grad's gradient rounded first": ("saved.weight_made.dtype if moved else weight.dtype", "weight.dtype", Case("grad_in_forward", dtype=BF16, main=FP32, V=300)),
    "a promise of 1": ("options.grad_scale if known and options.grad_scale is not None else 1.0", "1.0", PROMISED),
    "a promise without the mean": ("mean_scale if known else None, token_weight)", "None, token_weight)", PROMISED),
    "the mean multiplied in twice": ("mean_scale if known else None, token_weight)", "mean_scale, token_weight)", FORWARD),
    "no token weights in forward": ("mean_scale if known else None, token_weight)", "mean_scale if known else None, None)", WEIGHTED),
    "no token weights in backward": ("options.reduction, N, saved.scale, saved.token_weight)", "options.reduction, N, saved.scale, None)", Case("recompute", weighted=True)),
    "no mean in backward": ("options.reduction, N, saved.scale, saved.token_weight)", "options.reduction, N, None, saved.token_weight)", KEEP),
    "token_weight's gradient of a sum for a mean's": ("losses = torch.where(kept, losses - mean, 0.0) * saved.scale", "losses = torch.where(kept, losses, 0.0) * saved.scale", WEIGHTED),
    "token_weight's gradient without what comes back": ("(losses * dloss.reshape(-1)).to(dtype)", "losses.to(dtype)", Case("keep_logits", "sum", weighted=True)),
    "stats' gradients forgotten": ("else t.reshape(N).to(wide).contiguous() for t in dstats[:3]]", "else None for t in dstats[:3]]", FULL),
    "stats' gradients one another's": ("for t in dstats[:3]]", "for t in (dstats[1], dstats[0], dstats[2])]", Case("keep_logits", full=True)),
    "what waited is used where stats came too": ("elif ctx.made and fresh and not stats:", "elif ctx.made and fresh:", Case("grad_in_forward", full=True)),
    "a mean over the ignored too": ("inverse_count(kept_weight(labels, ignore_index, token_weight, dtype))", "inverse_count(kept_weight(labels * 0, ignore_index, token_weight, dtype))", KEEP),
    "weights of the ignored count in the mean": ("torch.where(kept, token_weight.to(dtype), 0.0).sum()", "token_weight.to(dtype).sum()", WEIGHTED),
    # ---- rows, by PyTorch ----
    "entropy's gradient without the entropy": ("a - incoming.entropy * entropy", "a", FULL),
    "a cap's derivative forgotten": ("    if terms.softcap:\n        d *=", "    if False:\n        d *=", Case("grad_in_forward", softcap=3.0, scale=0.5)),
    "a scale's derivative forgotten": ("    if terms.scale != 1:\n        d *=", "    if False:\n        d *=", Case("recompute", scale=0.5)),
    "merged without their largest": ("(m - largest).exp())", "(m - m).exp())", BLOCKS),
    "merged entropies not moved": ("worth * (surprise + (m - largest) * sums)", "worth * surprise", FULL),
    "the largest counted from its block": ("best = z.argmax(-1) + first", "best = z.argmax(-1)", Case("both", full=True, lead=(40,))),
}  # fmt: skip
AT_ONCE = Case("known_grad_scale", "mean", FP32, (9,), smoothing=0.2, z_loss=0.1, full=True)
LONG = Case("known_grad_scale", "sum", FP32, (3,), V=9001, smoothing=0.1, softcap=3.0)
LONG_STATS = Case("known_grad_scale", "sum", FP32, (3,), V=9001, full=True)
FIRSTS = Case(("loss_only", ALL, 64), "sum", FP32, (8,), full=True, frozen="hidden weight")
PARTS = Case(("recompute", 5, 64), "sum", FP32, (7,), V=130, full=True, smoothing=0.1)
KERNEL_MUTANTS = {
    "both: smoothing's part forgotten": ("-g * smoothing / W, g * (smoothing - 1.0)", "0.0, g * (smoothing - 1.0)", AT_ONCE),
    "both: z_loss without its 2": ("a, s, t = g * (1.0 + 2.0 * z_loss * lse)", "a, s, t = g * (1.0 + z_loss * lse)", AT_ONCE),
    "both: entropies under nothing": ("worth * (surprise + (largest - most) * total)", "worth * surprise", AT_ONCE),
    "both: entropies of pieces under other maxima": ("before * (surprise + (largest - base) * total)", "before * surprise", LONG_STATS),
    "both: the last of the largest": ("tl.min(tl.where(largest == most, first, 2147483647), 0)", "tl.max(tl.where(largest == most, first, 0), 0) + 1", AT_ONCE),
    "both: groups that forget their largest": ("return most, total * before + tl.sum(e, 1)", "return most, total + tl.sum(e, 1)", LONG),
    "both: what is read again is not counted": ("    for begin in range(0, again, BLOCK):\n", "    for begin in range(BLOCK, again, BLOCK):\n", LONG),
    "both: what is read again is not written": ("        for back in range(0, AGAIN, BLOCK):\n", "        for back in range(BLOCK, AGAIN, BLOCK):\n", LONG),
    "both: written backwards a piece too far": ("columns = AGAIN - BLOCK - back + lanes", "columns = AGAIN - back + lanes", LONG),
    "both: columns past the row count": ("        z = tl.where(columns < W, z, float(\"-inf\"))\n    return tl.reshape", "        z = z\n    return tl.reshape", AT_ONCE),
    "both: the label's column left out": ("        tl.store(out_ptr + label, d)\n", "", AT_ONCE),
    "both: ignored rows are left as they are": ("tl.store(out_ptr + begin + lanes, tl.zeros([BLOCK], tl.float32), mask=begin + lanes < ROOM)", "pass", AT_ONCE),
    "blocks: begin at the first column": ("return FIRST + tl.load(place_ptr), tl.load(place_ptr + 1)\n    else:\n        return FIRST, V", "return FIRST + tl.load(place_ptr), tl.load(place_ptr + 1)\n    else:\n        return FIRST * 0, V", PARTS),
    "blocks: the first largest counted from the block": ("surprise, first + begin, PLANES", "surprise, first, PLANES", FIRSTS),
    "merge: entropies not moved": ("now * (more + (m - most[None, :]) * sums)", "now * more", PARTS),
    "entropy's gradient without z": ("d += tl.where(p > 0, p * b * above, 0.0)", "d += 0.0", PARTS),
    "entropy's gradient without the entropy": ("a += b * tl.load(entropy_ptr + row, mask=there, other=0.0)", "a += 0.0", PARTS),
    "what waited as it was": ("tl.store(out_ptr + at, values * tl.load(factor_ptr).to(tl.float32), mask=inside)", "tl.store(out_ptr + at, values, mask=inside)", Case("grad_in_forward", "sum", FP32, (9,))),
    "logsumexp's gradient of those that count": ("        a += tl.load(dlse_ptr + row, mask=there, other=0.0)", "        a += tl.load(dlse_ptr + row, mask=counts, other=0.0)", PARTS),
}  # fmt: skip


def holder(text):
    """The one module of the op, or of the kernels under it, whose source has the text: code moves between them."""
    places = (
        "onepass.ops.loss.linear_cross_entropy",
        "onepass.ops.loss.row_",
        "onepass.ops.loss.whole_row_",
        "onepass.ops.loss.reduction",
        "onepass.ops.loss.formula",
        "onepass.ops.loss.scale",
    )
    modules = [module for name, module in sys.modules.items() if name.startswith(places)]
    found = [module for module in modules if text in inspect.getsource(module)]
    assert len(found) == 1, f"{text!r} must be in one module, but is in {[module.__name__ for module in found]}"
    return found[0]


def caught(old, new, case, backend):
    mutant = mutate(holder(old), old, new, room=module)
    try:
        return not judge_case(mutant, case, 1, backend)
    except (AssertionError, RuntimeError, IndexError, ValueError):  # something was written that may not be, or shapes don't fit
        return True


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    assert caught(*MUTANTS[name], "torch")


@pytest.mark.parametrize("name", KERNEL_MUTANTS)
def test_mutants_of_kernels_are_caught(name):
    assert caught(*KERNEL_MUTANTS[name], "triton")


def test_a_copy_without_a_change_passes():
    copy = mutate(losses, "= 1 << 31, 1 << 63", "= 2**31, 2**63", room=module)
    assert copy is not module and copy.linear_cross_entropy is not module.linear_cross_entropy
    for backend, mutants in (("torch", MUTANTS), ("triton", KERNEL_MUTANTS)):
        for case in {case for *_, case in mutants.values()}:
            report = judge_case(copy, case, 1, backend)
            assert report, f"{case} {backend}\n{report}"
