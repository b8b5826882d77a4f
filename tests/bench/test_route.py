"""The case file of route: every contender is called rightly, and chooses what the others choose."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bench import benching
from bench.benching import check_contenders, wrong

import onepass
from onepass.bench import route

given = partial(benching.given, route, (300, 64, 4))


@pytest.mark.parametrize("variant", route._VARIANTS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_every_contender_is_called_rightly(variant: str, dtype: torch.dtype) -> None:
    case, inputs = given(variant, dtype)
    check_contenders(route, case, inputs)


def test_what_computes_something_else_is_wrong() -> None:
    case, inputs = given("softmax")

    def plain(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routing = onepass.route(logits, 4, normalise=False, aux=0.01, z=0.001)
        assert routing.aux_loss is not None
        assert routing.z_loss is not None
        return routing.weights, routing.aux_loss, routing.z_loss * 1.1

    assert set(wrong(route, case, inputs, plain)) == {"weights", "z_loss", "dlogits"}


def test_bytes() -> None:
    case = route.BENCH.case("softmax", (16384, 128, 8), torch.float32)
    assert case.forward_bytes == 16384 * (128 * 4 + 8 * 12)
    assert case.backward_bytes == 16384 * (2 * 128 * 4 + 8 * 12)
