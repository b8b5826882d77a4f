"""Mutants of adapters by document and of their dropout: a document with its neighbour's adapter, another mask in backward."""

import torch
from ops.calls import relative
from ops.mutants import mutants_of
from ops.norm_oracle import DEVICE
from ops.test_lora_linear import K, N, numbers
from torch.nn import functional as F

import onepass.ops.norm.norm_linear as NORM_LINEAR
from onepass import LoRA
from onepass.kernels import adapter_pack, low_rank
from onepass.ops.linear.linear import linear_reference
from onepass.product import adapters, lora, lora_product

MUTANTS = {
    "a row belongs to the document before": (low_rank, "_documents_of", "ends[None, :] <= rows[:, None]", "ends[None, :] < rows[:, None]"),
    "rows past the last end have its adapter": (low_rank, "_documents_of", "documents = tl.where(rows < M, documents, E)", "documents = tl.minimum(documents, E - 1)"),
    "a tile has its last row's adapter": (low_rank, "_shrink_kernel", "tl.where((documents == e)[:, None], own, t)", "own"),
    "y of a tile's last document": (low_rank, "_expand_kernel", "tl.where((documents == e)[:, None], own, y)", "own"),
    "the first document's matrix": (low_rank, "_shrink_kernel", "w_ptr + e * W_E", "w_ptr + first * W_E"),
    "a gradient without its last row": (low_rank, "_gradient_kernel", "range(begin, end, BLOCK_M)", "range(begin, end - 1, BLOCK_M)"),
    "a gradient of the neighbours' rows too": (low_rank, "_gradient_kernel", "mask=e > 0, other=0)", "mask=e > 9, other=0)"),
    "documents' scales by the first": (low_rank, "_shrink_kernel", "scales_ptr + e * R", "scales_ptr + 0 * R"),
    "a scale left out": (low_rank, "_shrink_kernel", "t *= scale", "t *= 1.0"),
    "the bias lost": (low_rank, "_expand_kernel", "y += tl.load(start_ptr", "y += 0 * tl.load(start_ptr"),
    "dropped numbers are not made up for": (low_rank, "_bind_shrink", "scale * (keep_scale or 1.0)", "scale"),
    "another mask for da": (low_rank, "_gradient_kernel", "keep_mask(seed, rows + FIRST", "keep_mask(seed + 1, rows + FIRST"),
    "another mask for dx": (low_rank, "_expand_kernel", "y, seed, rows + FIRST", "y, seed, rows + FIRST + 1"),
    "da of all rows": (adapters, "MaskedAdapters.gradient_of_a", "self.dropout._replace(first_row=first_row or 0)", "NO_DROPOUT"),
    "dx of all rows": (adapters, "MaskedAdapters.rows_gradient", "self.seed, self.dropout", "None, NO_DROPOUT"),
    "dy is dropped too": (adapters, "MaskedAdapters.low_rank_gradient", "None, self.scale, NO_DROPOUT", "self.seed, self.scale, self.dropout"),
    "u without documents' scales": (adapters, "MaskedAdapters.low_rank_gradient", "ends, self.scales", "ends, None"),
    "dropout by the formula alone": (lora, "are_masked", "or bool(adapters[0].dropout)", ""),
    "scales in another order": (adapters, "_scales_of", "scale[e])] * rank", "scale[-1 - e])] * rank"),
    "a seed for each pass": (lora_product, "_masked", "dropout, *mask)", "dropout, *mask[:2], None if mask[2] is None else mask[2] + 1)"),
    "documents' matrices at the first's": (adapter_pack, "_copy_b", "(group * N + row) * R", "row * R"),
}  # fmt: skip


def is_right(module):
    """Whether norm_linear with such adapters has the values and the gradients of the formula in fp64, which drops the same."""
    for dtype in (torch.float32, torch.float64):
        for ends, p, scales in (((9, 9, 42, 66), 0.0, [1.0, 2.0, 3.0, 4.0]), ((9, 9, 42, 66), 0.4, 0.7), (None, 0.4, 0.7)):
            ends = None if ends is None else torch.tensor(ends, device=DEVICE)
            lead = () if ends is None else (len(ends),)
            x, bias = numbers(70, K, seed=1).to(dtype).requires_grad_(), numbers(N, seed=2).to(dtype)
            weight, dy = numbers(N, K, seed=3).to(dtype), numbers(70, N, seed=4).to(dtype)
            each = []
            for i, rows in enumerate(((0, 60), (60, N))):
                a, b = numbers(*lead, 3 + i, K, seed=5 + i), numbers(*lead, rows[1] - rows[0], 3 + i, seed=7 + i)
                each.append((a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), scales, rows, p, ends))
            asked = [x, *[t for one in each for t in one[:2]]]
            torch.manual_seed(1)
            y = module.norm_linear(x, None, weight, bias, lora=[module.LoRA(*one) for one in each])
            found = y, *torch.autograd.grad(y, asked, dy)
            wide = [t.detach().double().requires_grad_() for t in asked]
            torch.manual_seed(1)
            exact = [LoRA(*pair, *one[2:]) for pair, one in zip(zip(wide[1::2], wide[2::2], strict=True), each, strict=True)]
            z = linear_reference(F.rms_norm(wide[0], (K,), eps=1e-6), weight.double(), bias.double(), lora=exact)
            truth = z, *torch.autograd.grad(z, wide, dy.double())
            allowed = 1e-5 if dtype is torch.float32 else 1e-12
            if not all(relative(mine, true) < allowed for mine, true in zip(found, truth, strict=True)):
                return False
    return True


test_a_mutant_is_found, test_a_copy_without_a_change_passes = mutants_of(NORM_LINEAR, MUTANTS, is_right)
