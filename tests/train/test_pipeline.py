"""Training by pipeline schedules gives what one rank gives. The processes run pipeline_ranks.py."""

import pytest
import torch
import torch.distributed as dist
from parallel.worlds import PAIRS, WORLDS, found_by
from train import pipeline_ranks
from train.pipeline_ranks import CASES, OPTIONS, SHAPE, STEPS, settings, trained

import onepass
from onepass.gpt import Config
from onepass.runtime.refused import Refused
from onepass.train.layout import Layout
from onepass.train.options import Options
from onepass.train.stages import check, divided

FOURS = WORLDS[len(PAIRS) :]
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")


@pytest.fixture(scope="module", params=PAIRS)
def two(request, tmp_path_factory):
    """What each of two ranks found, by case."""
    return _found(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=FOURS)
def four(request, tmp_path_factory):
    return _found(request.param, tmp_path_factory)


def _found(world, tmp_path_factory):
    return Found(found_by(pipeline_ranks.run, world, tmp_path_factory.mktemp("ranks")), world[0])


class Found(list):
    """By rank. The device is that of one rank which does the same: on another kind weights start as other numbers."""

    def __init__(self, found, backend):
        super().__init__(found)
        self.device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")


@pytest.mark.parametrize("name", CASES[2])
def test_two_ranks_do_what_one_does(two, name):
    _same(two, name)


@pytest.mark.parametrize("name", CASES[4])
def test_four_ranks_do_what_one_does(four, name):
    _same(four, name)


def on_cpu(found):
    return {what: value.cpu() if isinstance(value, torch.Tensor) else value for what, value in found.items()}


def _same(found, name):
    with onepass.use_backend("torch"):
        expected = on_cpu(trained(name, Layout(found.device)))
    assert expected["before"] - expected["after"] > 1e-3
    near = 2e-2 if name == "bf16" else 1e-5
    for rank in found:
        for what in ("losses", "norms", "before", "after", "logits"):
            torch.testing.assert_close(rank[name][what], expected[what], rtol=near, atol=near, msg=f"{name}: {what}")
    assert sorted({each for rank in found for each in rank[name]["names"]}) == expected["names"]


# ---- what happens on the way ----


@pytest.mark.parametrize(
    ("name", "kept"),
    [("1f1b", None), ("head later", 4), ("head later, one", 1), ("head later, interleaved", 4), ("head later, zero-bubble", 4)],
)
def test_the_heads_gradients_wait_for_the_flush(two, name, kept):
    others, last = (rank[name]["flushed"] for rank in two)
    assert others == [] and last == ([] if kept is None else [kept] * STEPS)


def test_weights_wait_for_the_zero_bubble_schedule(two):
    for rank in two:
        assert len(rank["zero-bubble"]["handed"]) == STEPS * 2 * 4  # of stages and microbatches
        assert all(rank["zero-bubble"]["handed"]) and not any(rank["zero-bubble, plain"]["handed"])
        assert rank["interleaved"]["handed"] == []


def test_reductions_begin_in_the_last_backward_of_a_ranks_only_stage(two, four):
    for found, names in ((two, ("1f1b", "seven microbatches")), (four, ("data", "four stages"))):
        assert all(rank[name]["begun"] == [1] * STEPS for name in names for rank in found)
    for found, names in ((two, ("interleaved", "zero-bubble")), (four, ("data, sharded, zero-bubble",))):
        assert all(rank[name]["begun"] == [0] * STEPS for name in names for rank in found)


def test_no_forward_is_run_to_learn_shapes(two):
    looks = 4 + 4 + 1  # two losses and the logits
    for name, stages in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)):
        assert all(len(rank[name]["forwards"]) == stages * (STEPS * 4 + looks) for rank in two)


# ---- what can't be ----


@pytest.mark.parametrize(
    ("layers", "stages", "each", "sizes"),
    [(4, 2, None, [2, 2]), (5, 2, None, [3, 2]), (7, 4, None, [2, 2, 2, 1]), (8, 2, 2, [2, 2, 2, 2]), (3, 3, 1, [1, 1, 1])],
)
def test_layers_are_divided_evenly_and_the_head_has_no_more(layers, stages, each, sizes):
    shape = SHAPE | {"num_layers": layers, "pipeline_model_parallel_size": stages}
    ranges = divided(Config(**shape, num_layers_per_virtual_pipeline_stage=each))
    assert [len(blocks) for blocks in ranges] == sizes
    assert [n for blocks in ranges for n in blocks] == [*range(layers)]


VIRTUAL = {"num_layers_per_virtual_pipeline_stage": 1}


@pytest.mark.parametrize(
    ("model", "training", "ranks", "said"),
    [
        ({}, {"pipeline_schedule": "zero-bubble"}, 1, "pipeline_schedule must be '1f1b' with pipeline_model_parallel_size 1.*'z"),
        (VIRTUAL, {}, 2, "num_layers_per_virtual_pipeline_stage must be None with pipeline_schedule '1f1b'.*but is 1"),
        ({}, {"pipeline_schedule": "interleaved"}, 2, "must be given with pipeline_schedule 'interleaved'.*but is None"),
        (
            {"num_layers_per_virtual_pipeline_stage": 2}, {"pipeline_schedule": "interleaved"}, 2,
            "several stages of num_layers 4, but is 2",
        ),
        ({}, {"use_fsdp": True}, 2, "use_fsdp must be false with pipeline_model_parallel_size 2"),
        ({}, {"cuda_graphs": True}, 2, "cuda_graphs must be false with pipeline_model_parallel_size 2"),
        ({}, {"global_batch_size": 2}, 2, "global_batch_size must have at least 2 microbatches.*but is 2: that is 1 of 2 "),
        ({}, {"global_batch_size": 6}, 4, "global_batch_size must have at least 4 microbatches.*but is 6: that is 3 of 2 "),
        (VIRTUAL, {"global_batch_size": 10, "pipeline_schedule": "interleaved"}, 2, "a multiple of 2 microbatches.*but is 10"),
        ({}, {"global_batch_size": 10, "pipeline_schedule": "zero-bubble"}, 2, "a multiple of 2 microbatches.*but is 10"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(model, training, ranks, said):
    config = Config(**SHAPE, **model, pipeline_model_parallel_size=ranks)
    with pytest.raises(Refused, match=said):
        check(config, Options(**(OPTIONS | training)), 1)
    assert "\n" not in said


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_what_is_trained_here_is_not_refused(name):
    check(*settings(name, 2)[:2], data_ranks=1)


def test_one_rank_alone_is_not_refused():
    check(Config(**SHAPE), Options(global_batch_size=None), 3)
