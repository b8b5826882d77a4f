"""Rows of tokens sorted by expert, and summed by token: kernels and PyTorch agree, and mutants of both are found."""

import pytest
import torch

from onepass.kernels import token_rows
from onepass.testing.interpreter_bounds import OutOfBoundsError
from onepass.testing.mutants import copy_package, mutate
from onepass.testing.poison import poisoned

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {  # tokens, experts, k
    "few": (5, 4, 2), "one token": (1, 3, 1), "all experts": (7, 6, 6), "several programs": (210, 60, 3),
    "many experts": (40, 300, 4), "one expert": (33, 1, 1), "odd": (129, 17, 5),
}  # fmt: skip


def drawn(tokens, experts, k, kind="random"):
    generator = torch.Generator().manual_seed(tokens + experts)
    scores = torch.rand(tokens, experts, generator=generator)
    if kind == "uneven":  # most experts have no rows
        scores[:, experts // 2 :] -= 2
    chosen = scores.topk(k, 1).indices
    return chosen.to(DEVICE), torch.rand(tokens, k, generator=generator).to(DEVICE)


def is_right(module, case, kind="random", invalid=False):
    """Whether rows lie by expert, in their tokens' order, and are summed in that of a token's experts."""
    tokens, experts, k = CASES[case]
    chosen, weights = drawn(tokens, experts, k, kind)
    if invalid:
        chosen[::3, 0], chosen[1::5, -1] = experts + 2, -1
    by_row, owners, places, ends = module.order_rows(chosen, weights, experts)
    flat = [expert if 0 <= expert < experts else experts for expert in chosen.flatten().tolist()]
    order = sorted(range(len(flat)), key=lambda item: (flat[item], item))
    expected = [-1] * len(flat)
    for place, item in enumerate(order):
        expected[item] = place if flat[item] < experts else -1
    right = [
        places.flatten().tolist() == expected,
        owners.tolist() == [item // k for item in order],
        torch.equal(by_row, weights.flatten()[torch.tensor(order, device=DEVICE)]),
        ends.tolist() == [sum(expert <= e for expert in flat) for e in range(experts)],
    ]
    for H, dtype in ((1, torch.float32), (40, torch.bfloat16), (1030, torch.float16)):
        x = torch.randn(tokens * k, H + 3, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)[:, :H]
        y = torch.zeros(tokens, H, device=DEVICE)
        for column in range(k):
            at = places[:, column]
            y = y + torch.where((at < 0)[:, None], torch.nan, x[at.clamp(min=0)].float())
        right.append(torch.equal(module.sum_rows(x, places, None).nan_to_num(7e3), y.to(dtype).nan_to_num(7e3)))
        spread = module.spread_rows(x[:tokens], owners, places)
        right.append(all(torch.equal(spread[at], x[token]) for token, row in enumerate(places.tolist()) for at in row if at >= 0))
    return all(right)


@pytest.mark.parametrize("by_formula", (False, True), ids=("kernels", "formula"))
@pytest.mark.parametrize("kind", ("random", "uneven"))
@pytest.mark.parametrize("case", CASES)
def test_rows_lie_by_expert(case, kind, by_formula, monkeypatch):
    if kind == "uneven" and CASES[case][2] > CASES[case][1] // 2:
        pytest.skip("each token has more experts than that")
    if by_formula:
        monkeypatch.setattr(token_rows, "triton_unsupported", lambda x: "for this test")
    assert is_right(token_rows, case, kind)
    assert is_right(token_rows, case, kind, invalid=True)


@pytest.mark.parametrize("k", (1, 2))
def test_choices_may_lie_apart(k):
    chosen, weights = drawn(40, 7, 7)
    expected = token_rows.order_rows(chosen[:, :k].contiguous(), weights[:, :k].contiguous(), 7)
    assert all(map(torch.equal, token_rows.order_rows(chosen[:, :k], weights[:, :k], 7), expected))


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_no_tokens(dtype):
    by_row, owners, places, ends = token_rows.order_rows(
        torch.empty(0, 2, dtype=dtype, device=DEVICE), torch.empty(0, 2, device=DEVICE), 3
    )
    assert by_row.shape == owners.shape == (0,)
    assert places.shape == (0, 2)
    assert ends.tolist() == [0, 0, 0]
    assert token_rows.sum_rows(torch.empty(0, 5, device=DEVICE), places, None).shape == (0, 5)


def test_all_is_written():
    chosen, weights = drawn(*CASES["several programs"])
    with poisoned():
        first = token_rows.order_rows(chosen, weights, 60)
    assert all(torch.equal(*pair) for pair in zip(first, token_rows.order_rows(chosen, weights, 60), strict=True))


def test_rows_that_lie_apart_are_not_copied(monkeypatch):
    given, bind = [], token_rows._bind_sum
    monkeypatch.setattr(token_rows, "_bind_sum", lambda *fixed: lambda *args: given.append(args[1]) or bind(*fixed)(*args))
    x = torch.randn(10, 43, device=DEVICE)[:, :40]
    places = torch.arange(10, dtype=torch.int32, device=DEVICE).view(5, 2)
    assert torch.equal(token_rows.sum_rows(x, places, None), x[::2] + x[1::2])
    assert given[0].data_ptr() == x.data_ptr()


MUTANTS = {
    "the next program's rows before": ("_place_kernel", "others < program", "others <= program"),
    "counts of all programs but one": ("_place_kernel", "others < tl.num_programs(0)", "others < tl.num_programs(0) - 1"),
    "a program's rows from its first block": ("_place_kernel", "start += tl.sum(own, 0)", "start += 0"),
    "rows of one expert by the last first": ("_place_kernel", "tl.cumsum(own, 0) - 1", "tl.sum(own, 0) - tl.cumsum(own, 0)"),
    "an expert that there isn't has a place": ("_place_kernel", "tl.where(expert < E, place, -1)", "place"),
    "negative experts are counted with the first": ("_place_kernel", "(expert < 0) | (expert > E)", "expert > E"),
    "row, not token": ("_place_kernel", "items // K", "items"),
    "weights as they came": ("_place_kernel", "weights_ptr + items", "weights_ptr + place"),
    "sums without the last": ("_sum_kernel", "tl.static_range(K)", "tl.static_range(K - 1 if K > 1 else K)"),
    "a missing row is 0": ("_sum_kernel", 'other=float("nan")', "other=0.0"),
    "spread to the first place alone": ("_spread_kernel", "tokens * K + j", "tokens * K"),
    "a place that there isn't": ("_spread_kernel", "inside & (place >= 0)", "inside"),
    "rows by x's width": ("_sum_kernel", "place * X_ROW", "place * H"),
}  # fmt: skip


def is_right_by_few_programs(module, monkeypatch):
    monkeypatch.setattr(module, "_PROGRAMS", 4)  # of several blocks each
    return all(is_right(module, case, invalid=invalid) for case in ("few", "several programs") for invalid in (False, True))


@pytest.mark.skipif(DEVICE == "cuda", reason="places that nobody wrote would end a GPU's process")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    try:
        right = is_right_by_few_programs(mutate(token_rows, *MUTANTS[name]), monkeypatch)
    except (OutOfBoundsError, IndexError):  # places that nobody wrote
        return
    assert not right


def test_a_copy_without_a_change_passes(monkeypatch):
    assert is_right_by_few_programs(copy_package(token_rows), monkeypatch)
