"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from fusion.ragged_norm_oracle import DEVICE, judge_case, small_cases
from ops.mutants import mutant_tests

pytest.importorskip("triton")
from onepass.kernels import column_reduce as strips
from onepass.ops.norm.ragged import kernels
from onepass.ops.norm.ragged import lanes as ragged_lanes
from onepass.ops.norm.ragged import ragged_norm as module

CASES = small_cases()
# places of cases
LAYER, RMS, SLICES, FLAT, STRIPS, MANY, LONG, LONG_RMS, BARE, HALF, ODD_PLACES, OTHER_ROWS, STRIDED, ALONE, FULL = range(15)
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    # ---- forward ----
    "columns outside count in the variance": (kernels, "_forward_tile", "tl.where(within[None, :], x - mean[:, None], 0.0)", "x - mean[:, None]", LAYER),
    "eps inside out": (kernels, "_forward_tile", "tl.sqrt(tl.sum(x * x, 1) / H + eps)", "(tl.sqrt(tl.sum(x * x, 1) / H) + eps)", FLAT),
    "the mean of a tile's width": (kernels, "_forward_tile", "(x, 1) / H", "(x, 1) / WIDTH", LAYER),
    "a column too many": (kernels, "_forward_tile", "columns <", "columns <=", LAYER),
    "a row too many": (kernels, "_forward_tile", "rows < M", "rows <= M", LAYER),
    "x read as if its rows were packed": (kernels, "_forward_tile", "lane.x_row", "lane.width", SLICES),
    "the first lane's x for all": (kernels, "_lanes_forward_kernel", "(at_ptr)", "(at_ptr - number)", LAYER),
    "the first lane's bias for all": (kernels, "_lanes_forward_kernel", "at_ptr + 2 * L", "at_ptr + 2 * L - number", LAYER),
    "statistics of another lane": (kernels, "_lanes_forward_kernel", "number * M", "(number // 2) * M", LAYER),
    "packed as if flat": (kernels, "_place", "return column, TOTAL", "return M * column, width", LAYER),
    "flat: lanes overlap": (kernels, "_place", "M * column", "column", FLAT),
    "y rounded through bf16": (kernels, "_forward_tile", "x * rstd[:, None] * weight + bias", "(x * rstd[:, None] * weight + bias).to(tl.bfloat16).to(tl.float32)", LAYER),
    "spans one row short": (kernels, "_lanes_forward_kernel", " * SPAN +", " * (SPAN - 1) +", LAYER),
    "the last span lost": (kernels, "forward_plan", "ceil_div(M, span)", "max(1, M // span)", LAYER),
    "rows of a span left out": (kernels, "forward_programs", "0, span, ", "0, span, 2 * ", LAYER),
    "long: the mean of the first piece": (kernels, "_forward_long", "mask=start + lanes < width", "mask=start + lanes < PIECE", LONG),
    "long: columns outside count": (kernels, "_forward_long", " = tl.where(within, x - mean, 0.0)", " -= mean", LONG),
    "long: the weight of the first piece": (kernels, "_forward_long", "columns, within,", "lanes, within,", LONG),
    "long: no distance from the mean": (kernels, "_forward_long", "x -= mean", "x -= 0.0", LONG),
    # ---- backward ----
    "no mean of g": (kernels, "_backward_tiles", "(tl.sum(g, 1) / H)", "0.0 * (tl.sum(g, 1) / H)", LAYER),
    "dweight of weighted dy": (kernels, "_backward_tiles", " += dy * z", " += dy * weight * z", LAYER),
    "dbias of weighted dy": (kernels, "_backward_tiles", "dbias += dy", "dbias += dy * weight", LAYER),
    "dx without 1 / deviation": (kernels, "_backward_tiles", "dx * rstd", "dx", LAYER),
    "dy read at x's distance": (kernels, "_backward_tiles", "lane.dy_row", "lane.x_row", OTHER_ROWS),
    "backward: a row too many": (kernels, "_backward_tiles", "rows < M", "rows <= M", STRIPS),
    "a tile of every strip twice": (kernels, "_backward_tiles", "strips *", "(strips - (strips > 1)) *", STRIPS),
    "dbias's sums where dweight's are": (kernels, "_backward_tiles", "\n        partial_ptr += lane.width", "", LAYER),
    "partial sums in bf16": (kernels, "_backward_tiles", "(dweight, 0)", "(dweight, 0).to(tl.bfloat16).to(tl.float32)", LAYER),
    "partials of one sum's room": (kernels, "ragged_backward", " * (dweights + dbiases)", "", FULL),
    "lanes share a counter": (kernels, "_lanes_backward_kernel", "join_helpers(arrived_ptr + 2", "join_helpers(arrived_ptr + 0", LAYER),
    "another lane's counter is set back": (kernels, "_lanes_backward_kernel", " + 2 * number, helpers", ", helpers", LAYER),
    "counters as many as lanes": (kernels, "ragged_backward", "2 * ", "", LAYER),
    "one comes too early": (strips, "join_helpers", " - helpers", " - helpers - 1", STRIPS),
    "one comes too late": (strips, "join_helpers", " - helpers", " - helpers + 1", STRIPS),
    "does not wait": (strips, "join_helpers", "programs:", "0:", STRIPS),
    "helpers without end": (kernels, "_lanes_backward_kernel", "1, strips", "2, strips", ALONE),
    "strips that are not there are summed": (kernels, "_lanes_backward_kernel", "strips.to", "(strips + 1).to", STRIPS),
    "dweight at the first lane's place": (kernels, "_lanes_backward_kernel", "dweights += column", "dweights += 0", LAYER),
    "dbias at the first lane's place": (kernels, "_lanes_backward_kernel", "dbiases += column", "dbiases += 0", LAYER),
    "the last sums: only one pass": (strips, "add_strips", "0, STRIPS", "0, tl.minimum(STRIPS, BLOCK_S)", MANY),
    "backward long: only its first row": (kernels, "_backward_long", "strip, M", "strip, strips", LONG),
    "backward long: sums begin with what was there": (kernels, "_backward_long", " & (row != strip)", "", LONG),
    "backward long: each row's sums alone": (kernels, "_backward_long", "row != strip", "row < 0", LONG),
    "backward long: dbias in dweight's place": (kernels, "_backward_long", "(width if DWEIGHT else 0) + ", "", LONG),
    "backward long: products of the last piece": (kernels, "_backward_long", " += g * z", " = g * z", LONG),
    "backward long: no mean of g": (kernels, "_backward_long", " -= mean_g", " -= 0.0 * mean_g", LONG),
    "backward long: the weight of the first piece": (kernels, "_backward_long", "dx = dy * load_scale(lane.weight_ptr, columns", "dx = dy * load_scale(lane.weight_ptr, lanes", LONG_RMS),
    # ---- plans and tables ----
    "a kind too small": (kernels, "kind_of", "(width - 1).bit_length()", "width.bit_length() - 1", LAYER),
    "rows of x where dy's are": (kernels, "_lanes_backward_kernel", "lanes_ptr + 3", "lanes_ptr + 4", OTHER_ROWS),
    "aligned whatever the widths": (kernels, "_any_odd", "any(size % multiple for size in sizes)", "False", LAYER),
    "aligned whatever the addresses": (ragged_lanes, "addresses", "aligned and not any(offset % plan.multiple for offset in offsets)", "aligned", ODD_PLACES),
    "addresses of wider values": (ragged_lanes, "_offsets", "(each, group[0]) for", "(each, group[0]) // 2 for", SLICES),
    "copies that nobody reads": (ragged_lanes, "_copied", "lanes[lane].contiguous()", "lanes[lane]", OTHER_ROWS),
    "vectors as they are": (ragged_lanes, "addresses", "vector.contiguous()", "vector", STRIDED),
    # ---- the operators ----
    "eps of the default": (module, "_forward", "(eps), packed", "(1e-5), packed", FLAT),
    "one norm for both": (module, "_is_layer", 'norm == "layer_norm"', "True", RMS),
}  # fmt: skip


test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(
    module, MUTANTS, CASES, judge_case, CASES[::3], errors=AssertionError
)
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="some wait for ever on a GPU, where nobody takes the turn from them")
