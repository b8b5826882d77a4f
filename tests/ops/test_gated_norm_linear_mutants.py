"""Each mutant is a small, plausible slip, and the two ops that gated_norm_linear stands for betray it."""

from ops.calls import needs_triton
from ops.mutants import mutants_of
from ops.test_gated_norm_linear import LINEAR, is_right

from onepass.ops.norm import gated_kernels, gated_rows
from onepass.product import function

MUTANTS = {
    "rows without the norm's weight": (gated_rows, "GatedNormRows.rows", "gates, norm_weight", "gates, None"),
    "rows of x before the gate": (gated_kernels, "_gated_backward_kernel", "gated_output(x, z, weight, eps, H, NORM_FIRST", "gated_output(x, z, weight, eps, H, True"),
    "rows again without a weight": (gated_kernels, "_gated_backward_kernel", "gated_output(x, z, weight", "gated_output(x, z, 1.0"),
    "rows again a group after another": (gated_kernels, "_gated_backward_kernel", "y_ptr + at,", "y_ptr + rows[:, None] * H + columns[None, :],"),
    "rows again over x": (gated_kernels, "gated_backward", "y = dy if into_dy and dy.is_contiguous() else", "y = x if into_dy else"),
    "dz is dx": (gated_rows, "GatedNormRows.backward", "shaped[0], dweight, shaped[1]", "shaped[0], dweight, shaped[0]"),
    "the weight's gradient of d rows": (function, "_alone", "product.start_input(prologue, kept, made, later=later)", "(lambda: product.output_gradient(dy, weight, None, True, False, later=False)[0])"),
}  # fmt: skip


test_a_mutant_is_found, test_a_copy_without_a_change_passes = map(needs_triton, mutants_of(LINEAR, MUTANTS, is_right))
