"""Rows of tokens by a map of experts: kernels and PyTorch agree, and mutants of both are found."""

import pytest
import torch

from onepass.kernels import mapped_rows
from onepass.testing.interpreter_bounds import OutOfBoundsError
from onepass.testing.mutants import copy_package, mutate
from onepass.testing.poison import poisoned

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {  # tokens, experts, the part of the map that is set
    "few": (5, 4, 0.5), "one token": (1, 3, 0.7), "all": (7, 6, 1.0), "none": (7, 6, 0.0), "several programs": (210, 60, 0.1),
    "many experts": (40, 300, 0.05), "one expert": (33, 1, 0.5), "no tokens": (0, 3, 0.5), "odd": (129, 17, 0.3),
}  # fmt: skip


def drawn(case):
    tokens, experts, part = CASES[case]
    generator = torch.Generator().manual_seed(tokens + experts)
    return (torch.rand(tokens, experts, generator=generator) < part).to(DEVICE)


def is_right(module, case, missing=0):
    """Whether rows lie by expert, in their tokens' order, and are summed in that of the experts.

    missing: so many entries at the end, by expert, have no room.
    """
    taken = drawn(case)
    entries = [(token, expert) for expert, token in taken.t().nonzero().tolist()]
    count = len(entries) - missing
    order = module.order_by_map(taken, count)
    items, places, ends = order.split([count, count, taken.shape[0]])
    own = [[row for row, (token, _) in enumerate(entries) if token == mine] for mine in range(taken.shape[0])]
    flat = [row if row < count else -1 for rows in own for row in rows][:count]
    right = [
        items.tolist() == [token * taken.shape[1] + expert for token, expert in entries][:count],
        places.tolist() == flat,
        ends.tolist() == [min(sum(map(len, own[: token + 1])), count) for token in range(taken.shape[0])],
    ]
    if not all(right):
        return False
    for H, dtype in ((1, torch.float32), (40, torch.bfloat16), (1030, torch.float16)):
        rows = torch.randn(count, H + 3, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)[:, :H]
        start = 0
        x = torch.randn(taken.shape[0], H + 3, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)[:, :H]
        y, spread = module.sum_by_map(rows, order), module.spread_by_map(x, order)
        right.append(y.dtype is dtype and spread.shape == (count, H))
        for token, end in enumerate(ends.tolist()):
            here, start = [at for at in flat[start:end] if at >= 0], end
            total = torch.zeros(H, device=DEVICE)
            for at in here:
                total = total + rows[at].float()
            right.append(torch.equal(y[token], total.to(dtype)) and all(torch.equal(spread[at], x[token]) for at in here))
    return all(right)


@pytest.mark.parametrize("by_formula", (False, True), ids=("kernels", "formula"))
@pytest.mark.parametrize("case", CASES)
def test_rows_lie_by_expert(case, by_formula, monkeypatch):
    if by_formula:
        monkeypatch.setattr(mapped_rows, "triton_unsupported", lambda x: "for this test")
    assert is_right(mapped_rows, case)


def test_entries_without_room_are_left_out():
    assert is_right(mapped_rows, "several programs", missing=3)


def test_maps_may_lie_apart():
    taken = drawn("odd").t()
    expected = mapped_rows.order_by_map(taken.contiguous(), int(taken.sum()))
    assert torch.equal(mapped_rows.order_by_map(taken, int(taken.sum())), expected)


def test_all_is_written():
    taken = drawn("several programs")
    count = int(taken.sum())
    with poisoned():
        first = mapped_rows.order_by_map(taken, count)
    assert torch.equal(first, mapped_rows.order_by_map(taken, count))


MUTANTS = {
    "the next program's rows before": ("_place_kernel", "others < program", "others <= program"),
    "a program's rows from its first tile": ("_place_kernel", "start += tl.sum(own, 0)", "start += 0"),
    "a program's tokens from its first tile": ("_place_kernel", "held += tl.sum(of_tokens, 0)", "held += 0"),
    "tokens of all programs from the start": ("_place_kernel", "held = tl.sum(before, 0)", "held = 0"),
    "the next token of an expert": ("_place_kernel", "tl.cumsum(own, 0) - own", "tl.cumsum(own, 0)"),
    "a token's experts by the last first": ("_place_kernel", "tl.cumsum(own, 1) - own", "of_tokens[:, None] - tl.cumsum(own, 1)"),
    "items by the expert": ("_place_kernel", "tokens[:, None] * E + experts[None, :]", "experts[None, :] * M + tokens[:, None]"),
    "places that there aren't": ("_place_kernel", "tl.where(place < S, place, -1)", "place"),
    "ends past the last": ("_place_kernel", "tl.minimum(ends, S)", "ends"),
    "counts of all tokens but the first": ("_count_kernel", "first + tl.arange", "first + 1 + tl.arange"),
    "experts past the last": ("_entries", " & (experts < E)[None, :]", ""),
    "each token's places from the start": ("_places_of", "tokens > 0", "tokens > M"),
    "sums without the last": ("_sum_kernel", "range(0, tl.max(count, 0))", "range(0, tl.max(count, 0) - 1)"),
    "spread without the last": ("_spread_kernel", "range(0, tl.max(count, 0))", "range(0, tl.max(count, 0) - 1)"),
    "another token's rows": ("_sum_kernel", "mask=j < count", "mask=j < tl.max(count, 0)"),
    "rows by the result's width": ("_sum_kernel", "place * ROW", "place * H"),
}  # fmt: skip


def is_right_by_few_programs(module, monkeypatch):
    monkeypatch.setattr(module, "_PROGRAMS", 4)  # of several tiles each
    monkeypatch.setattr(module, "_TILE", 1024)
    return all(is_right(module, case) for case in ("few", "several programs")) and is_right(module, "several programs", missing=3)


@pytest.mark.skipif(DEVICE == "cuda", reason="places that nobody wrote would end a GPU's process")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    try:
        right = is_right_by_few_programs(mutate(mapped_rows, *MUTANTS[name]), monkeypatch)
    except (OutOfBoundsError, IndexError):  # places that nobody wrote
        return
    assert not right


def test_a_copy_without_a_change_passes(monkeypatch):
    assert is_right_by_few_programs(copy_package(mapped_rows), monkeypatch)
