"""Deferred gradients over ranks: sequence parallel, and torch.distributed.pipelining. The processes run deferred_ranks.py."""

import pytest
import torch
import torch.distributed as dist
from parallel import deferred_ranks
from parallel.deferred_ranks import CALLS, MICROBATCHES, RUNS, Block, data, loss
from parallel.worlds import WORLDS, found_by

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    return found_by(deferred_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CALLS)
def test_flush_adds_what_backward_would_have_added(found, name):
    for rank in found:
        at_once, later = rank[name][False], rank[name][True]
        assert not later["before"].any() and at_once["before"].any()
        for a, b in zip([*at_once["main_grads"], *at_once["x"]], [*later["main_grads"], *later["x"]], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_only_this_ranks_part_is_kept(found, name):
    ranks, (S, B, K, N) = len(found), (deferred_ranks.S, deferred_ranks.B, deferred_ranks.K, deferred_ranks.N)
    part = (S * B * N + S * B * K) // ranks  # whichever way it is spread
    for rank in found:
        assert rank[name][True]["bytes"] == 3 * part * 4


@pytest.mark.parametrize("name", CALLS)
def test_the_next_ones_rows_come_while_this_product_is_made(found, name):
    for rank in found:
        assert rank["order"][name] == ["start", "start", "wait", "product", "start", "wait", "product", "wait", "product"]


# ---- pipelines ----


@pytest.fixture(scope="module")
def exact():
    """Of the stages one after the other, in fp64."""

    def grads(count):
        blocks = [Block(stage).double() for stage in range(count)]
        x, target = (t.double() for t in data())
        for block in blocks:
            x = block(x)
        loss(x, target).backward()
        return [{key: t.grad for key, t in block.named_parameters()} for block in blocks]

    return {2: grads(2), 4: grads(4)}


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_schedules_have_the_whole_gradient(found, exact, name, way):
    if len(found) != 2:
        pytest.skip("run by two ranks only")
    wanted = exact[2 if name == "1f1b" else 4]
    got = {stage: grads for rank in found for stage, grads in rank["schedules"][name, way]["grads"].items()}
    assert sorted(got) == list(range(len(wanted)))
    for stage, grads in got.items():
        for key, grad in grads.items():
            torch.testing.assert_close(grad.double(), wanted[stage][key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name, way in RUNS if way == "deferred"])
def test_products_are_made_where_the_schedule_has_them(found, name):
    if len(found) != 2:
        pytest.skip("run by two ranks only")
    for rank in found:
        seen = rank["schedules"][name, "deferred"]
        stages = len(seen["grads"])
        assert seen["kept"] == [3] * (2 * MICROBATCHES * stages)  # two steps, three weights a stage
        assert len(seen["made"]) == len(seen["kept"]) and seen["left"] == 0
    waited = max(max(rank["schedules"][name, "deferred"]["made"]) for rank in found) > 3
    assert waited == (name != "1f1b")
