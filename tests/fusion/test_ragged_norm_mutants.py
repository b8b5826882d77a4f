"""Each mutant is a small, plausible slip, and the oracle that the real room passes must catch it."""

import pytest
from fusion.ragged_norm_oracle import DEVICE, judge_case, small_cases

pytest.importorskip("triton")
from onepass.kernels import column_reduce as strips
from onepass.ops.norm.ragged import kernels
from onepass.ops.norm.ragged import lanes as ragged_lanes
from onepass.ops.norm.ragged import ragged_norm as room
from onepass.testing.mutants import mutate

CASES = small_cases()
# which of the cases is tried first
LAYER, RMS, SLICES, FLAT, STRIPS, MANY, LONG, LONG_RMS, BARE, HALF, ODD_PLACES, OTHER_ROWS, STRIDED, ALONE, FULL = range(15)
MUTANTS = {  # name: module, what is there, what stands there instead, the case that is tried first[, how often it is there]
    # ---- forward ----
    "columns outside count in the variance": (kernels, "x = tl.where(within[None, :], x - mean[:, None], 0.0)", "x = x - mean[:, None]", LAYER),
    "eps inside out": (kernels, "1.0 / tl.sqrt(tl.sum(x * x, 1) / H + eps)", "1.0 / (tl.sqrt(tl.sum(x * x, 1) / H) + eps)", FLAT),
    "the mean of a tile's width": (kernels, "        mean = tl.sum(x, 1) / H\n", "        mean = tl.sum(x, 1) / WIDTH\n", LAYER),
    "a column too many": (kernels, "    within = columns < width\n    rows = first", "    within = columns <= width\n    rows = first", LAYER),
    "a row too many": (kernels, "    rows = first + tl.arange(0, BLOCK_M)\n    real = rows < M\n    inside", "    rows = first + tl.arange(0, BLOCK_M)\n    real = rows <= M\n    inside", LAYER),
    "x read as if its rows were packed": (kernels, "x_ptr + (x_at + rows * x_row)[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)\n    weight", "x_ptr + (x_at + rows * width)[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)\n    weight", SLICES),
    "the first lane's x for all": (kernels, "        x_at = aligned(tl.load(at_ptr), ALIGN)\n        weight_at", "        x_at = aligned(tl.load(at_ptr - lane), ALIGN)\n        weight_at", LAYER),
    "the first lane's bias for all": (kernels, "bias_at = aligned(tl.load(at_ptr + 2 * L), ALIGN)", "bias_at = aligned(tl.load(at_ptr + 2 * L - lane), ALIGN)", LAYER),
    "statistics of another lane": (kernels, "        stats_at = lane * M\n        TOTAL = aligned(TOTAL, ALIGN)\n        for k", "        stats_at = (lane // 2) * M\n        TOTAL = aligned(TOTAL, ALIGN)\n        for k", LAYER),
    "packed as if flat": (kernels, "return rows * TOTAL + column if PACKED", "return rows * width + M * column if PACKED", LAYER),
    "flat: lanes overlap": (kernels, "rows * width + M * column", "rows * width + column", FLAT),
    "y rounded through bf16": (kernels, "tl.store(y_ptr + at, x * rstd[:, None] * weight + bias, mask=inside)", "tl.store(y_ptr + at, (x * rstd[:, None] * weight + bias).to(tl.bfloat16).to(tl.float32), mask=inside)", LAYER),
    "spans one row short": (kernels, "first = span * SPAN + ", "first = span * (SPAN - 1) + ", LAYER),
    "the last span lost": (kernels, "ceil_div(M, span)", "max(1, M // span)", LAYER),
    "rows of a span left out": (kernels, "for first in range(0, span, tall)]", "for first in range(0, span, 2 * tall)]", LAYER),
    "long: the mean of the first piece": (kernels, "            sums += tl.load(x_ptr + start + lanes, mask=start + lanes < width", "            sums += tl.load(x_ptr + start + lanes, mask=start + lanes < PIECE", LONG),
    "long: columns outside count": (kernels, "            x = tl.where(within, x - mean, 0.0)\n", "            x -= mean\n", LONG),
    "long: the weight of the first piece": (kernels, "y = x * rstd * load_scale(weight_ptr, weight_at + columns, within, False)", "y = x * rstd * load_scale(weight_ptr, weight_at + lanes, within, False)", LONG),
    "long: no distance from the mean": (kernels, "            x -= mean\n        y =", "            x -= 0.0\n        y =", LONG),
    # ---- backward ----
    "no mean of g": (kernels, "            dx -= (tl.sum(g, 1) / H)[:, None]\n", "            dx -= 0.0 * (tl.sum(g, 1) / H)[:, None]\n", LAYER),
    "dweight of weighted dy": (kernels, "            dweight += dy * z\n", "            dweight += dy * weight * z\n", LAYER),
    "dbias of weighted dy": (kernels, "            dbias += dy\n", "            dbias += dy * weight\n", LAYER),
    "dx without 1 / deviation": (kernels, "tl.store(dx_ptr + at, dx * rstd, mask=inside)", "tl.store(dx_ptr + at, dx, mask=inside)", LAYER),
    "dy read at x's distance": (kernels, "dy_ptr + (dy_at + rows * dy_row)", "dy_ptr + (dy_at + rows * x_row)", OTHER_ROWS),
    "backward: a row too many": (kernels, "        real = rows < M\n", "        real = rows <= M\n", STRIPS),
    "a tile of every strip twice": (kernels, "M, strips * BLOCK_M, num_stages=STAGES)", "M, (strips - (strips > 1)) * BLOCK_M, num_stages=STAGES)", STRIPS),
    "dbias's sums where dweight's are": (kernels, "        tl.store(partial_ptr + columns, tl.sum(dweight, 0), mask=within)\n        partial_ptr += width\n", "        tl.store(partial_ptr + columns, tl.sum(dweight, 0), mask=within)\n", LAYER),
    "partial sums in bf16": (kernels, "tl.sum(dweight, 0), mask=within)", "tl.sum(dweight, 0).to(tl.bfloat16).to(tl.float32), mask=within)", LAYER),
    "partials of one sum's room": (kernels, "plan.partials * (dweights + dbiases)", "plan.partials", FULL),
    "lanes share a counter": (kernels, " join_helpers(arrived_ptr + 2 * lane,", " join_helpers(arrived_ptr + 0 * lane,", LAYER),
    "another lane's counter is set back": (kernels, "leave_helpers(arrived_ptr + 2 * lane, helpers)", "leave_helpers(arrived_ptr, helpers)", LAYER),
    "counters as many as lanes": (kernels, "device_zeros(2 * L,", "device_zeros(L,", LAYER),
    "one comes too early": (strips, "- (programs - helpers)", "- (programs - helpers - 1)", STRIPS),
    "one comes too late": (strips, "- (programs - helpers)", "- (programs - helpers + 1)", STRIPS),
    "does not wait": (strips, 'while tl.atomic_add(arrived_ptr, 0, sem="acquire") < programs:', 'while tl.atomic_add(arrived_ptr, 0, sem="acquire") < 0:', STRIPS),
    "helpers without end": (kernels, "tl.maximum(1, strips // 2)).to(tl.int32)", "tl.maximum(2, strips // 2)).to(tl.int32)", ALONE),
    "strips that are not there are summed": (kernels, "programs = strips.to(tl.int32)", "programs = (strips + 1).to(tl.int32)", STRIPS),
    "dweight at the first lane's place": (kernels, "                    dweights += column\n", "                    dweights += 0\n", LAYER),
    "dbias at the first lane's place": (kernels, "                    dbiases += column\n", "                    dbiases += 0\n", LAYER),
    "the last sums: only one pass": (strips, "for first in range(0, STRIPS, BLOCK_S):", "for first in range(0, tl.minimum(STRIPS, BLOCK_S), BLOCK_S):", MANY),
    "backward long: only its first row": (kernels, "for row in range(strip, M, strips):", "for row in range(strip, strips, strips):", LONG),
    "backward long: sums begin with what was there": (kernels, "again = within & (row != strip)", "again = within", LONG),
    "backward long: each row's sums alone": (kernels, "again = within & (row != strip)", "again = within & (row < 0)", LONG),
    "backward long: dbias in dweight's place": (kernels, "at = partial_ptr + (width if DWEIGHT else 0) + columns", "at = partial_ptr + columns", LONG),
    "backward long: products of the last piece": (kernels, "            products += g * z\n", "            products = g * z\n", LONG),
    "backward long: no mean of g": (kernels, "                dx -= mean_g\n", "                dx -= 0.0 * mean_g\n", LONG),
    "backward long: the weight of the first piece": (kernels, "dx = dy * load_scale(weight_ptr, weight_at + columns,", "dx = dy * load_scale(weight_ptr, weight_at + lanes,", LONG_RMS),
    # ---- plans and tables ----
    "a kind too small": (kernels, "max(_NARROWEST, (width - 1).bit_length())", "max(_NARROWEST, width.bit_length() - 1)", LAYER),
    "rows of x where dy's are": (kernels, "dy_row = aligned(tl.load(lanes_ptr + 3 * L), ALIGN)", "dy_row = aligned(tl.load(lanes_ptr + 4 * L), ALIGN)", OTHER_ROWS),
    "aligned whatever the widths": (kernels, "return any(size % multiple for size in sizes)", "return False", LAYER),
    "aligned whatever the addresses": (ragged_lanes, "plan.aligned and not any(offset % plan.multiple for offset in offsets)", "plan.aligned", ODD_PLACES),
    "addresses of wider values": (ragged_lanes, "return [(each.data_ptr() - first) // size for each in group]", "return [(each.data_ptr() - first) // (2 * size) for each in group]", SLICES),
    "copies that nobody reads": (ragged_lanes, "lanes[lane] = lanes[lane].contiguous()", "lanes[lane] = lanes[lane]", OTHER_ROWS),
    "vectors as they are": (ragged_lanes, "straight = tuple([vector.contiguous() for vector in group] for group in vectors)", "straight = tuple([vector for vector in group] for group in vectors)", STRIDED),
    # ---- the operators ----
    "eps of the default": (room, "layer, check_eps(eps), packed)", "layer, check_eps(1e-5), packed)", FLAT),
    "one norm for both": (room, 'return norm == "layer_norm"', "return True", RMS),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    module, old, new, first, *times = MUTANTS[name]
    mutant = mutate(module, old, new, room=room, times=times[0] if times else 1)
    for case in sorted(CASES, key=lambda case: CASES.index(case) != first):
        try:
            if not judge_case(mutant, case):
                return
        except Exception as error:
            if "wait for each other" in str(error) or isinstance(error, AssertionError):
                return
            raise
    pytest.fail("no case catches it")


def test_a_copy_without_a_change_passes():
    copy = mutate(kernels, "_LAUNCHES = 4 ", "_LAUNCHES = 2 * 2 ", room=room)
    assert copy is not room
    for case in CASES[::3]:
        report = judge_case(copy, case)
        assert report, report


pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="some wait for ever on a GPU, where nobody takes the turn from them")
