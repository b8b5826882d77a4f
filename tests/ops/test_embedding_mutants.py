"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.embedding_oracle import judge_case, main_cases
from ops.mutants import mutant_tests

import onepass.ops.embedding.embedding as module

pytest.importorskip("triton")
from onepass.ops.embedding import backward, forward, gradient

CASES = sorted(main_cases(), key=lambda case: case.M)
LOOK_UP, SUM = (forward, "_embedding_kernel"), (backward, "_embedding_backward_kernel")
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    # ---- the look-up ----
    "a store one token too far": (*LOOK_UP, "tokens < M", "tokens <= M", 0),
    "the part's first row forgotten": (*LOOK_UP, "ids - FIRST", "ids", 9),
    "the row after the last is there": (*LOOK_UP, "rows < ROWS", "rows <= ROWS", 7),
    "strange ids are zeros": (*LOOK_UP, 'float("nan")', "0.0", 9),
    "the vocabulary's end is in it": (*LOOK_UP, "ids < VOCABULARY", "ids <= VOCABULARY", 9),
    "ids below 0 are another rank's": (*LOOK_UP, "(ids >= 0) & ", "", 9),
    "weight read without its stride": (*LOOK_UP, "rows[:, None] * W_ROW", "rows[:, None] * H", 3),
    "weight's columns lie together": (*LOOK_UP, ".to(tl.int64) * W_COLUMN", ".to(tl.int64)", 3),
    "a store past the row's end": (*LOOK_UP, "real[:, None] & inside", "real[:, None]", 0),
    # ---- the order ----
    "padding is trained": (forward, "_digits", " & (loaded != PADDING)", "", 7),
    "strange ids go to the last row": (forward, "_digits", "rows, ROWS)", "rows, ROWS - 1)", 7),
    "tokens past the last are ordered": (forward, "_digits", "tokens < M", "tokens <= M", 0),
    "the first digit is a bit short": (forward, "_digits", "(1 << LOW_BITS) - 1", "(1 << LOW_BITS - 1) - 1", 7),
    "the second digit begins a bit late": (forward, "_digits", "32 + LOW_BITS", "33 + LOW_BITS", 7),
    "the last token is not read": (forward, "_load_tokens", "M - 1", "M - 2", 0),
    "equal digits are lesser": (forward, "_place_digit", "(field < 0)", "(field <= 0)", 0),
    "a field of another width": (forward, "_sum_field", "16 * FIELD", "15 * FIELD", 0),
    "segments are a step short": (forward, "_place_digit", "M, SEGMENTS * LANES) * LANES", "M, SEGMENTS * LANES) * LANES - LANES", 0),
    "a token between segments is left out": (forward, "_place_digit", "SEGMENTS) * span", "SEGMENTS) * (span + 1)", 5),
    "ranks are of another digit": (forward, "_place_digit", "(tl.cumsum(one, LANES_AT) >> shift)", "tl.cumsum(one, LANES_AT)", 0),
    "ranks begin at 1": (forward, "_place_digit", " & 0xFF) - 1", " & 0xFF)", 0),
    "segments begin together": (forward, "_place_digit", "tl.cumsum(count2, 0) - count2", "tl.cumsum(count2, 0) * 0", 7),
    "the third digit begins where the second does": (forward, "_place_digit", "before += tl.sum(count1, 0)", "before += 0", 0),
    "the third digit's place is the fourth's": (forward, "_place_digit", "field == 2", "field == 3", 0),
    "the second place does not move": (forward, "_place_digit", "count >> 8", "count >> 9", 7),
    "the last place moves as the third": (forward, "_place_digit", "count >> 24", "count >> 16", 7),
    "a digit's four are three": (forward, "_order_tokens", "second * 4", "second * 3", 1),
    "counters are left": (forward, "_order_tokens", "tl.store(arrived_ptr, 0)", "tl.store(arrived_ptr, 1)", 0),
    "by PyTorch: padding is trained": (forward, "_sort", " & (ids != options.padding_idx)", "", 9),
    "by PyTorch: the part's first row forgotten": (forward, "_sort", " - options.vocab_start", "", 9),
    # ---- the sums ----
    "rows of nobody are a row": (*SUM, "row < ROWS", "row <= ROWS", 9),
    "a run begins with a piece alone": (*SUM, "(row != before) | ", "", 0),
    "a run is not cut": (*SUM, " | (at % PIECE == 0)", "", 6),
    "main_grad overwritten": (*SUM, "total += kept", "total = total", 5),
    "main_grad rounded first": (*SUM, "total += kept", "total = total.to(out_ptr.dtype.element_ty).to(tl.float32) + kept", 11),
    "the run's second token forgotten": (*SUM, "range(1, count", "range(2, count", 0),
    "the first token twice": (*SUM, "range(1, count", "range(0, count", 0),
    "dy without its stride": (*SUM, "tokens[:, None] * DY_ROW", "tokens[:, None] * H", 4),
    "a piece ends one late": (*SUM, "(at // PIECE + 1) * PIECE, M", "(at // PIECE + 1) * PIECE + 1, M", 6),
    "runs end with their piece": (*SUM, "(row == before) | ((at + count == end) & (row == after))", "row == before", 6),
    "what came from the left is whole": (*SUM, "(row == before) | (", "(", 6),
    "parts of a piece share a slot": (*SUM, "tl.where(at % PIECE == 0, 0, 1)", "0", 3),
    "the first to arrive writes": (*SUM, "== parts - 1", "== 0", 6),
    "a run's counter is left": (*SUM, "tl.store(counter, 0)", "tl.store(counter, 1)", 6),
    "the last part forgotten": (backward, "_find_parts", "tl.sum(cut, 0) + 1", "tl.sum(cut, 0)", 6),
    "the run begins a piece later": (backward, "_find_parts", "tl.min(first, 0) - 1", "tl.min(first, 0)", 6),
    "all parts begin inside": (backward, "_sum_parts", "tl.where(part == 0, begins_inside, 0)", "begins_inside", 3),
    "no part begins inside": (backward, "_sum_parts", "== row, 0, 1)", "== row, 0, 0)", 3),
    "out's columns lie together": (*SUM, "columns.to(tl.int64) * OUT_COLUMN", "columns.to(tl.int64)", 3),
    # ---- the op ----
    "zeros are not made": (gradient, "_returned", "torch.zeros_like", "torch.empty_like", 0),
    "main_grad taken for new": (gradient, "add_rows", "not first, keep", "first, keep", 5),
    "negative padding is none": (module, "_options", "padding_idx % vocab_size", "padding_idx", 7),
}  # fmt: skip

test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge_case, CASES[:8])
