"""The case file of embedding: every contender is called rightly, and the bytes are those nobody can do without."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bench import benching
from bench.benching import check_contenders, made, wrong

import onepass
from onepass.bench import embedding

given = partial(benching.given, embedding, (400, 24, 90))


@pytest.mark.parametrize("variant", embedding._VARIANTS)
def test_every_contender_is_called_rightly(variant: str) -> None:
    case, inputs = given(variant)
    check_contenders(embedding, case, inputs)


def test_what_computes_something_else_is_wrong() -> None:
    case, inputs = given("words")
    assert wrong(embedding, case, inputs, lambda ids, weight: made(embedding, case)(ids.flip(0), weight))
    padded = int(inputs.tensors["ids"][0])
    assert "dweight" in wrong(embedding, case, inputs, lambda *given: onepass.embedding(*given, padding_idx=padded))


def test_as_many_rows_are_looked_up_as_expected() -> None:
    for variant in ("words", "uniform", "alike"):
        case = embedding.BENCH.case(variant, (4000, 1, 3000), torch.bfloat16)
        ids = embedding.ids_of(variant, 4000, 3000, torch.device("cpu"), torch.Generator().manual_seed(0))
        expected = embedding._expected_rows(variant, 4000, 3000)
        assert abs(ids.unique().numel() - expected) <= 0.03 * expected
        assert case.backward_bytes == 2 * 4000 + 8 * 4000 + 8 * expected
