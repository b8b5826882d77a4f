"""Each mutant is a small, plausible slip, and the weight that the adapters stand for betrays it."""

import pytest
import torch
from ops.calls import relative
from ops.test_lora_linear import K, N, adapters_of, exact, merged, numbers, parts

import onepass.ops.norm.norm_linear as NORM_LINEAR
from onepass.product import function, lora
from onepass.testing.mutants import copy_package, mutate

MUTANTS = {
    "a scale left out": (lora, "_scaled", "beta=0, alpha=scale", "beta=0, alpha=1.0"),
    "a scale of 1 for all": (lora, "_low_rank", "len(parts) == 1 or len({part.scale for part in parts}) == 1", "True"),
    "u without its scale": (lora, "_low_rank_gradient", "of_part, part.scale, u", "of_part, 1.0, u"),
    "u of all columns of dy": (lora, "_low_rank_gradient", "_scaled(dy[:, part.of_y]", "_scaled(dy[:, : part.of_y.stop - part.of_y.start]"),
    "the bias added twice": (lora, "_expanded", "return F.linear(t, b[0], bias)", "return F.linear(t, b[0], None if bias is None else 2 * bias)"),
    "a neighbour's columns of t": (lora, "_expanded", "t[:, part.of_t]", "t[:, : part.of_t.stop - part.of_t.start]"),
    "y begins with what lies there": (lora, "_expanded", "t.new_zeros(len(t), N)", "t.new_ones(len(t), N)"),
    "da of x before the norm": (function, "_of_adapters", "prologue.rows_again(kept) if made is None or made.rows is None else made.rows", "kept[0]"),
    "dx without what adapters add": (lora, "LoRAPass.output_gradient", "self.u @ a if came", "0 * self.u @ a if came"),
    "db of all columns": (lora, "LoRAPass._gradients_of_b", "_columns(dy, part.of_y)", "dy[:, : part.of_y.stop - part.of_y.start]"),
    "gradients of a in another order": (lora, "LoRAPass.gradients", "da.split([a.shape[0] for a in parameters[::2]])", "da.split([a.shape[0] for a in parameters[::2]])[::-1]"),
    "rows are not kept for a": (lora, "LoRAProduct.forward", "(*needs[:-2], True, needs[-1])", "needs"),
    "adapters of one scale are another part": (lora, "_parts_of", "(parts[-1].of_y, parts[-1].scale) == (of_y, scale)", "parts[-1].scale == scale"),
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
    for name in ("q and v", "two of one part, one of another", "two of all rows"):
        x = numbers(7, 10, K, seed=1).double().requires_grad_()
        weight, bias = numbers(N, K, seed=2).double(), numbers(N, seed=3).double()
        adapters = adapters_of(name)
        asked = [x, *[t for each in adapters for t in each[:2]]]
        for of_bias in (bias, None):
            y = module.norm_linear(x, None, weight, of_bias, lora=[module.LoRA(*each) for each in adapters])
            expected = module.norm_linear(x, None, merged(weight, adapters), of_bias)
            dy = numbers(*y.shape, seed=4).double()
            pairs = [(y, expected), *zip(torch.autograd.grad(y, asked, dy), torch.autograd.grad(expected, asked, dy), strict=True)]
            right += [mine.shape == other.shape and torch.allclose(mine, other) for mine, other in pairs]
    return all(right)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    try:
        right = is_right(mutate(*MUTANTS[name], entry=NORM_LINEAR))
    except (RuntimeError, TypeError, AssertionError):  # shapes that no product takes, rows that are not there
        return
    assert not right


def test_a_copy_without_a_change_passes():
    assert is_right(copy_package(NORM_LINEAR))
