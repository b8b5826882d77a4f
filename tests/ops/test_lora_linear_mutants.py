"""Each mutant is a small, plausible slip, and the weight that the adapters stand for betrays it."""

import torch
from ops.calls import relative
from ops.mutants import mutants_of
from ops.test_lora_linear import K, N, adapters_of, exact, merged, numbers, parts

import onepass.ops.norm.norm_linear as NORM_LINEAR
from onepass.kernels import adapter_pack
from onepass.product import adapters, function, lora_product

MUTANTS = {
    "a scale left out": (adapters, "_scaled", "beta=0, alpha=scale, out", "beta=0, alpha=1.0, out"),
    "one adapter's scale left out": (adapters, "_scaled", "second, beta=0, alpha=scale)", "second, beta=0)"),
    "a scale of 1 for all": (adapters, "_plan_of", "if len(set(scales)) == 1 else None", ""),
    "u without its scale": (adapters, "AdapterPlan.low_rank_gradient", "b[rows, columns], scale, u", "b[rows, columns], 1.0, u"),
    "u of the first columns of dy": (adapters, "AdapterPlan.low_rank_gradient", "_scaled(dy[:, rows]", "_scaled(dy[:, : rows.stop - rows.start]"),
    "the bias added twice": (adapters, "AdapterPlan.expand", "F.linear(t, b, bias)", "F.linear(t, b, None if bias is None else 2 * bias)"),
    "da of x before the norm": (function, "_of_adapters", "prologue.rows_again(kept) if made is None or made.rows is None else made.rows", "kept[0]"),
    "dx without what adapters add": (adapters, "AdapterPlan.rows_gradient", "u @ a if came", "0 * u @ a if came"),
    "rows are not kept for a": (lora_product, "LoRAProduct.forward", "(*needs[:-2], True, needs[-1])", "needs"),
    "ones where b has no rows": (adapter_pack, "_copy_b", "mask=own, other=0.0)", "mask=own, other=1.0)"),
    "b's rows from its last": (adapter_pack, "_copy_b", "+ row - FIRST) * RANK", "+ LAST - 1 - row) * RANK"),
    "a's rows at the first adapter's": (adapter_pack, "_pack_kernel", "_copy_a(a1_ptr, a_ptr + AT1 * K", "_copy_a(a1_ptr, a_ptr"),
    "a gradient that ends one row early": (adapter_pack, "_copy_b", "(row < LAST)", "(row < LAST - 1)"),
    "the last adapter's b is not written": (adapter_pack, "_plan", "2 * len(some), groups", "2 * len(some) - 1, groups"),
}  # fmt: skip


def is_right(module):
    """Whether norm_linear with several adapters, and a plain layer's product with one, have their values and gradients."""
    x, weight, a, b, dy = parts(rank=8)
    one = [module.LoRA(a, b, 0.7)]
    bias = numbers(N, seed=6)
    y = module.multiply_rows(x, weight, bias, module.product_for(None, x, weight, None, None), x.dtype, one)
    found = y.detach() - bias, *torch.autograd.grad(y, (x, a, b), dy)
    truth = exact(x, weight, a, b, dy, 0.7)
    right = [relative(mine, true) < 1e-5 for mine, true in zip(found, (*truth[:2], *truth[3:]), strict=True)]
    for name in ("q and v", "two of one part, one of another", "two of all rows", "five"):
        x = numbers(7, 10, K, seed=1).double().requires_grad_()
        weight, bias = numbers(N, K, seed=2).double(), numbers(N, seed=3).double()
        several = adapters_of(name)
        asked = [x, *[t for each in several for t in each[:2]]]
        for of_bias in (bias, None):
            y = module.norm_linear(x, None, weight, of_bias, lora=[module.LoRA(*each) for each in several])
            expected = module.norm_linear(x, None, merged(weight, several), of_bias)
            dy = numbers(*y.shape, seed=4).double()
            pairs = [(y, expected), *zip(torch.autograd.grad(y, asked, dy), torch.autograd.grad(expected, asked, dy), strict=True)]
            right += [mine.shape == other.shape and torch.allclose(mine, other) for mine, other in pairs]
    return all(right)


test_a_mutant_is_found, test_a_copy_without_a_change_passes = mutants_of(NORM_LINEAR, MUTANTS, is_right)
