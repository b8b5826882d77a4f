"""Each mutant is a small, plausible slip, and the checks that the real op passes must catch it."""

import pytest
from ops.activation_linear_calls import op, tensors
from ops.bias_activation_oracle import FP32, small_tiles
from ops.test_activation_linear import CLAMPED, report_of

import onepass.ops.activation.activation_linear as module

pytest.importorskip("triton")
from onepass.ops.activation import formula, kernels
from onepass.testing.mutants import mutate
from onepass.testing.poison import bytes_kept, saved_tensors

Y_STORE = "tl.store(y_ptr + rows[:, None] * H + columns[None, :], y, mask=inside)\n        dbias"
MUTANTS = {  # name: module, what is there, what stands there instead, how x is kept
    "y without the token weight": (kernels, "                y *= weight\n", "                pass\n", "input"),
    "y without its gate": (
        kernels,
        "            y = ACT(z) * linear if GATED else ACT(z)\n",
        "            y = ACT(z)\n",
        "input",
    ),
    "y without the offset": (
        kernels,
        "            y = ACT(z) * linear if GATED else ACT(z)\n",
        "            y = ACT(z) * (linear - offset)\n",
        "input",
    ),
    "y without its last column": (kernels, Y_STORE, Y_STORE.replace("inside)", "inside & (columns < H - 1)[None, :])"), "input"),
    "dx in y's place": (kernels, Y_STORE, Y_STORE.replace(", y, mask", ", dz, mask"), "input"),
    "y without its last row": (kernels, Y_STORE, Y_STORE.replace("inside)", "inside & (rows < M - 1)[:, None])"), "input"),
    "y over what is still to be read": (
        kernels,
        "        rows = tl.minimum(rows, M - 1)  #",
        "        tl.store(y_ptr + rows[:, None] * H + columns[None, :], 0.0, mask=inside)\n        rows = tl.minimum(rows, M - 1)  #",
        "input",
    ),
    "codes rebuilt as numbers": (module, "x, exponents = kept if stored", "x, exponents = (kept[0], None) if stored", "fp8"),
    "the weight's gradient of the x that was not kept": (
        module,
        "ctx.save_for_backward(activation_bias, token_weight, weight, *kept)",
        "ctx.save_for_backward(activation_bias, token_weight, weight, x); ctx.stored = saved.saved_format(x, 'input', 2)",
        "fp8",
    ),
    "activation_bias forgotten in backward": (
        module,
        "grads, dy, x, exponents, bias, token_weight, None,",
        "grads, dy, x, exponents, bias * 0, token_weight, None,",
        "input",
    ),
    "clamp forgotten in backward": (
        module,
        "None, options, *needs, stored",
        "None, options._replace(clamp=None), *needs, stored",
        "input",
    ),
    "offset forgotten": (module, "float(linear_offset) if linear_offset else None", "None", "input"),
    "the bias forgotten": (
        module,
        "        return tp_product(activated, weight, bias, layout)\n\n    @",
        "        return tp_product(activated, weight, None, layout)\n\n    @",
        "input",
    ),
    "dx rounded to 16 bits": (module, "*needs, stored.dtype, product,", "*needs, torch.bfloat16, product,", "input"),
    "the activation rounded to 16 bits": (
        module,
        "        return kernels.forward(x, bias, token_weight, None, options, product)",
        "        return kernels.forward(x, bias, token_weight, None, options, torch.bfloat16).float()",
        "input",
    ),
    "the weight's gradient of d activation": (
        module,
        "            grads, activated = found[:3], found[3]",
        "            grads, activated = found[:3], row_gradients(dy, weight, False, None)[1]",
        "input",
    ),
    "needs in another order": (
        module,
        "needs = need_dx, need_dactivation_bias, need_dtoken_weight",
        "needs = need_dx, need_dactivation_bias, False",
        "input",
    ),
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
    broken, old, new, save = MUTANTS[name]
    assert caught(mutate(broken, old, new, room=module), save)


def test_copies_without_a_change_pass():
    copy = mutate(formula, "    wide = torch", "    wide  = torch", room=module)
    assert not any(caught(copy, save, backend) for save in ("input", "fp8") for backend in ("triton", "torch"))


def test_a_copy_that_keeps_more_is_caught():
    broken = mutate(module, "activated, kept = _activation_and_kept(x,", "activated, kept = _activation_and_kept(x * 1,")
    x, weight, *_ = tensors()
    with saved_tensors() as kept:
        op(function=broken.activation_linear, backend="triton")(x, weight)
    assert bytes_kept(kept, weight, x)
