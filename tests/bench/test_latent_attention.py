"""The case file of latent_attention: every contender is called rightly."""

from __future__ import annotations

from functools import partial

import pytest
from bench import benching
from bench.benching import check_contenders, made, wrong

from onepass.bench import latent_attention

given = partial(benching.given, latent_attention, (2, 33, 2, 12, 4, 16))


@pytest.mark.parametrize("variant", ("heads", "any order"))
def test_every_contender_is_called_rightly(variant: str) -> None:
    case, inputs = given(variant)
    assert [contender.name for contender in latent_attention.BENCH.contenders(case)] == ["onepass", "eager", "torch.compile"]
    check_contenders(latent_attention, case, inputs)


def test_positions_are_looked_at() -> None:
    case, inputs = given("heads")
    ours = made(latent_attention, case)
    assert wrong(latent_attention, case, inputs, lambda q, kv, k_rope, cos, sin: ours(q, kv, k_rope, cos, -sin))
