"""Each mutant is a small, plausible slip, and the checks that the real op passes must catch it."""

import pytest
from ops.activation_linear_calls import op, tensors
from ops.bias_activation_oracle import small_tiles
from ops.oracle import FP32
from ops.test_activation_linear import CLAMPED, report_of

import onepass.ops.activation.activation_linear as module

pytest.importorskip("triton")
from onepass.ops.activation import activation_rows, kernels
from onepass.product import function, product
from onepass.testing.mutants import copy_package, mutate
from onepass.testing.poison import bytes_kept, saved_tensors

MUTANTS = {  # name: module, function, what is there, what stands there instead, how x is kept
    "y without the token weight": (kernels, "_backward_kernel", "                y *= weight", "                pass", "input"),
    "y without its gate": (kernels, "_backward_kernel", " * linear if GATED else ACT(z)", "", "input"),
    "y without the offset": (kernels, "_backward_kernel", "linear if GATED else ACT(z)", "(linear - offset)", "input"),
    "y without its last column": (kernels, "_backward_kernel", "y, mask=inside", "y, mask=inside & (columns < H - 1)[None, :]", "input"),
    "dx in y's place": (kernels, "_backward_kernel", "y, mask=", "dz, mask=", "input"),
    "y without its last row": (kernels, "_backward_kernel", "y, mask=inside", "y, mask=inside & (rows < M - 1)[:, None]", "input"),
    "y over what is still to be read": (kernels, "_backward_kernel", "rows = tl", "tl.store(y_ptr + rows[:, None] * H + columns[None, :], 0.0, mask=inside)\n        rows = tl", "input"),
    "codes rebuilt as numbers": (activation_rows, "backward_by_kernels", " = kept if", " = (kept[0], None) if", "fp8"),
    "the weight's gradient of the x that was not kept": (module, "activation_linear", "saved_format(x, save,", "saved_format(x, 'input',", "fp8"),
    "the weight's gradient of d activation": (function, "_alone", "product.start_input(prologue, kept, made, later=later)", "(lambda: product.output_gradient(dy, weight, None, True, False, later=False)[0])", "input"),
    "codes of another x are kept": (activation_rows, "ActivationRows.rows", "token_weight, *kept)", "token_weight, kept[0].flip(0), *kept[1:])", "fp8"),
    "activation_bias forgotten in backward": (activation_rows, "backward_by_kernels", "dy, x, exponents, bias", "dy, x, exponents, bias * 0", "input"),
    "clamp forgotten in backward": (activation_rows, "backward_by_kernels", "options, *", "options._replace(clamp=None), *", "input"),
    "offset forgotten": (module, "activation_linear", "float(linear_offset) if linear_offset else ", "", "input"),
    "the bias forgotten": (product, "PlainProduct.forward", "weight, bias, self.layout", "weight, None, self.layout", "input"),
    "dx rounded to 16 bits": (activation_rows, "backward_by_kernels", "stored.dtype", "torch.bfloat16", "input"),
    "the activation rounded to 16 bits": (activation_rows, "ActivationRows._activation", "None, self.options, self.dtype", "None, self.options, torch.bfloat16).float(", "input"),
    "the weight's gradient of other rows": (product, "PlainProduct.start_input", "rows = made.rows", "rows = made.rows.flip(0)", "input"),
    "needs in another order": (activation_rows, "ActivationRows.backward", "self.stored, needs,", "self.stored, (*needs[:2], False),", "input"),
}


def caught(mutant, save, backend="triton"):
    """Whether its values or gradients are too far off, or it writes where it should not."""
    with small_tiles(mutant):
        try:
            errors = report_of(mutant.activation_linear, FP32, "swiglu", save, backend, **CLAMPED)
        except (AssertionError, RuntimeError):
            return True
    return not all(error <= 1e-6 for error in errors.values())


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    *change, save = MUTANTS[name]
    assert caught(mutate(*change, entry=module), save)


def test_copies_without_a_change_pass():
    copy = copy_package(module)
    assert not any(caught(copy, save, backend) for save in ("input", "fp8") for backend in ("triton", "torch"))


def test_a_copy_that_keeps_more_is_caught():
    broken = mutate(activation_rows, "ActivationRows._kept", "saved.pack(x,", "saved.pack(x * 1,", entry=module)
    x, weight, *_ = tensors()
    with saved_tensors() as kept:
        op(function=broken.activation_linear, backend="triton")(x, weight)
    assert bytes_kept(kept, weight, x)
