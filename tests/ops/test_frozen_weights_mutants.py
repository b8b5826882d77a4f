"""Each mutant is a small, plausible slip of a frozen weight, and the numbers of its codes betray it."""

import torch
from ops.frozen_calls import BF16, FP32, decoded, four_bits, numbers
from ops.mutants import mutants_of

import onepass
from onepass.product.frozen import four_bits as four
from onepass.product.frozen import fp8, joined, taken, weight
from onepass.testing.mutants import copy_package

N, K = 48, 70
MUTANTS = {
    "another part's rows": (joined, "JoinedWeight.decode_into", "zip(weights, out", "zip(weights[::-1], out"),
    "parts in another order": (joined, "join", "enumerate(weights)})", "enumerate(weights[::-1])})"),
    "a type that was asked for is forgotten": (taken, "frozen_weight", "known[0] == key", "known[0] == key or dtype"),
    "other codes are the same weight": (taken, "_source_of", "(weight.data_ptr(), of_scales)", "(0, of_scales)"),
    "other scales are the same weight": (taken, "_source_of", "(id(state.absmax), ", "(0, "),
    "another dtype is found": (taken, "frozen_weight", "made.get((len(sources), dtype))", "made.get((len(sources), None))"),
    "no offset": (four, "bitsandbytes_four_bits", "nested.code, state.offset)", "nested.code, 0 * state.offset)"),
    "blocks of 64": (four, "bitsandbytes_four_bits", "state.quant_type, block, ", "state.quant_type, 64, "),
    "a type between": (weight, "FrozenWeight.decoded", "self.decode_into(out)", "self.decode_into(out); out = out.to(torch.bfloat16).to(dtype)"),
    "backward in another type": (weight, "DecodedProduct.output_gradient", "_decoded(weight, dy.dtype)", "_decoded(weight, torch.bfloat16).to(dy.dtype)"),
    "codes are not copied": (weight, "_copied", "tensor.copy_(source.tensors[name], non_blocking)", "tensor.data = tensor"),
}  # fmt: skip


def has_bits(frozen, expected, dtype=FP32):
    return frozen.shape == expected.shape and torch.equal(frozen.decoded(dtype), expected.to(dtype))


def is_right(module):
    """Whether weights alone and together, before and after changes, have the numbers of their codes, and so has their product."""
    take = module.frozen_weight
    parts = [four_bits(N, K), four_bits(9, K, seed=1, nested=False), four_bits(5, K, seed=2, block=32)]
    right = [has_bits(take(part), decoded(part)) for part in parts]
    whole = torch.cat([decoded(part) for part in parts])
    right += [has_bits(take(*parts), whole), has_bits(take(parts[0], parts[1]), whole[:-5]), has_bits(take(parts[0]), whole[:N])]
    right += [take(parts[0], dtype=dtype).dtype is dtype for dtype in (BF16, FP32)]
    other = four_bits(N, K, seed=3)
    parts[0].data = other.data
    right.append(has_bits(take(parts[0]), decoded(parts[0])))
    parts[0].quant_state.absmax = other.quant_state.absmax
    right.append(has_bits(take(parts[0]), decoded(parts[0])))
    first, second = take(four_bits(N, K, seed=4)), take(other)
    right.append(has_bits(first.clone().copy_(second), second.decoded(FP32)))
    x, frozen = numbers(6, K).requires_grad_(), take(*parts)
    product = type(frozen).__mro__[1].decoded.__globals__["decoded_product"](None, x, frozen, None, None)
    whole = frozen.decoded(FP32)
    dy = numbers(6, len(whole), seed=5)
    drows, _ = product.output_gradient(dy, frozen, None, True, False, later=False)
    y = product.forward(product.rows_in(FP32, FP32), (x,), frozen, None, None)[0]
    return all([*right, torch.equal(y, x @ whole.T), torch.equal(drows, dy @ whole)])


test_a_mutant_is_found, test_a_copy_without_a_change_passes = mutants_of(taken, MUTANTS, is_right)

FP8_MUTANTS = {
    "codes of rows for dx": (fp8, "FP8FrozenWeight.transposed_codes", "transpose_codes(self.codes)", "self.codes"),
    "scales of rows for dx": (fp8, "FP8FrozenWeight.transposed_codes", '"transposed_inverse"', '"inverse"'),
    "the default recipe": (fp8, "_forward_now", "product.recipe, weight", "FP8Recipe(), weight"),
    "rows for their transpose": (fp8, "_made", '"transposed": transposed,', '"transposed": codes,'),
    "parts in another order": (fp8, "freeze_weight", "torch.cat(parts)", "torch.cat(parts[::-1])"),
    "rows in another order are the whole": (fp8, "_whole_of", "part.storage_offset() != first", "False and part.storage_offset() != first"),
    "columns of the transpose from the first": (fp8, "FP8FrozenWeight.parts", "narrow(dim, first,", "narrow(dim, first if dim == 0 else 0,"),
    "rows from the first": (fp8, "FP8FrozenWeight.parts", "narrow(dim, first,", "narrow(dim, first if dim == 1 else 0,"),
    "always both layouts": (fp8, "_made", "transposed=layouts == 2", "transposed=True"),
    "the decoded weight's product": (fp8, "frozen_fp8_product", "if x.numel() else", "if not x.numel() else"),
}  # fmt: skip


def keeps_bits(module):
    """Whether y and dx of kept codes have the bits of codes that are made in each call: by a square weight, of two parts."""
    dy, x = numbers(5, 64, seed=1, dtype=BF16), numbers(5, 64, dtype=BF16)
    parts = [numbers(rows, 64, seed=rows, scale=rows**0.5 / 8, dtype=BF16) for rows in (16, 48)]
    right = []
    for scaling, layouts in (("current", 2), ("current", 1), ("row", 2)):
        recipe = module.FP8Recipe(scaling=scaling, format="e4m3")
        frozen, plain = module.freeze_weight(parts, recipe, layouts=layouts), torch.cat(parts)
        of_plain = module.PRODUCTS[module.FP8Recipe](recipe, plain, None, None)
        products = module.frozen_fp8_product(None, x, frozen, None, None), of_plain
        found = []
        for product, one in zip(products, (frozen, plain), strict=True):
            y, _, _, call = product.forward(product.rows_in(BF16, BF16), (x,), one, None, None)
            found.append((y, call.output_gradient(dy, one, None, True, False, later=False)[0]))
        right += [torch.equal(*each) for each in zip(*found, strict=True)]
        right.append(("transposed" in frozen.tensors) == (layouts == 2))
        rows = frozen.parts((16, 48))
        right += [torch.equal(part.transposed_codes()[0].view(torch.uint8), codes.view(torch.uint8)) for part, codes in zip(
            rows, frozen.transposed_codes()[0].split((16, 48), 1), strict=True
        )]  # fmt: skip
        right.append(torch.equal(type(frozen).join(rows).decoded(BF16), frozen.decoded(BF16)))
        try:
            type(frozen).join(rows[::-1])
            right.append(False)
        except ValueError:
            right.append(True)
    return all(right)


test_a_mutant_of_kept_codes_is_found, test_kept_codes_without_a_change_pass = mutants_of(fp8, FP8_MUTANTS, keeps_bits)


def test_a_copy_of_the_package_leaves_what_torch_load_takes():
    """Of two classes of one name it would take either."""
    before = set(torch.serialization.get_safe_globals())
    assert copy_package(onepass).freeze_weight is not onepass.freeze_weight
    assert set(torch.serialization.get_safe_globals()) == before
