"""Training by pipeline schedules gives what one rank gives. The processes run pipeline_ranks.py."""

import argparse

import pytest
import torch
import torch.distributed as dist
from parallel.worlds import PAIRS, WORLDS, found_by
from train import pipeline_ranks
from train.pipeline_ranks import CASES, OPTIONS, SHAPE, STEPS, batches_of, settings, trained

import onepass
from onepass.gpt import Config
from onepass.runtime.errors import CommandError
from onepass.train import checkpoint
from onepass.train.command import _settings, add_arguments
from onepass.train.layout import ParallelLayout
from onepass.train.options import Options
from onepass.train.setup import make
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
        expected = on_cpu(trained(name, ParallelLayout(found.device)))
    assert expected["before"] - expected["after"] > 1e-3
    near = 2e-2 if "bf16" in name else 1e-5
    for rank in found:
        for what in ("losses", "norms", "before", "after", "logits"):
            torch.testing.assert_close(rank[name][what], expected[what], rtol=near, atol=near, msg=f"{name}: {what}")
    assert sorted({each for rank in found for each in rank[name]["names"]}) == expected["names"]


@pytest.mark.parametrize("kind", pipeline_ranks.HANDED_ON)
def test_a_run_goes_on_with_its_layers_divided_another_way(tmp_path, kind):
    losses = found_by(pipeline_ranks.hand_on, ("gloo", 2), tmp_path, kind)
    with onepass.use_backend("torch"):
        alone = ParallelLayout(torch.device("cpu"))
        expected = trained(kind, alone)
        config, options, _ = settings(kind, 1)
        made = make(config, options.replace(seed=9), alone)
        assert checkpoint.load(checkpoint.find(tmp_path), made, config, alone) == STEPS
        after = made.steps.loss(batches_of(options, alone).of_step(7))
    for found in losses:
        torch.testing.assert_close(found, expected["losses"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after, expected["after"], rtol=1e-5, atol=1e-5)


# ---- what happens on the way ----


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("1f1b", [0, 1], [2, 3]),
        ("less on the first", [0], [1, 2, 3]),
        ("less on the last", [0, 1, 2], [3]),
        ("less on the last, interleaved", [0, 1, 3, 4], [2, 5]),
        ("less on the last, zero-bubble", [0, 1, 3, 4], [2, 5]),
    ],
)
def test_a_rank_has_the_layers_that_it_is_given(two, name, first, last):
    for rank, layers in zip(two, (first, last), strict=True):
        assert sorted({int(each.split(".")[1]) for each in rank[name]["names"] if each.startswith("layers.")}) == layers


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


@pytest.mark.parametrize(
    ("layers", "ranks", "first", "last", "virtual", "sizes"),
    [
        (16, 2, None, 6, None, [10, 6]),
        (16, 2, 7, None, None, [7, 9]),
        (16, 2, 10, 6, None, [10, 6]),
        (13, 4, None, 1, None, [4, 4, 4, 1]),
        (13, 4, 4, None, None, [4, 3, 3, 3]),
        (9, 4, 2, 1, None, [2, 3, 3, 1]),
        (16, 2, None, 6, 2, [5, 3, 5, 3]),
        (18, 4, 4, 2, 2, [2, 3, 3, 1, 2, 3, 3, 1]),
        (16, 2, None, None, 4, [2] * 8),
    ],
)
def test_the_first_and_the_last_rank_have_as_many_layers_as_they_are_given(layers, ranks, first, last, virtual, sizes):
    shape = SHAPE | {"num_layers": layers, "pipeline_model_parallel_size": ranks}
    ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    ranges = divided(Config(**shape, **ends, virtual_pipeline_model_parallel_size=virtual))
    assert [len(blocks) for blocks in ranges] == sizes
    assert [n for blocks in ranges for n in blocks] == [*range(layers)]


def test_flags_and_files_say_how_layers_are_divided(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("num_layers: 8\npipeline_model_parallel_size: 3\nnum_layers_in_last_pipeline_stage: 2\n")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = ["--config", str(file), "--decoder-first-pipeline-num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"]
    config, _ = _settings(parser.parse_args(given), torch.device("cpu"), None)
    assert [len(blocks) for blocks in divided(config)] == [2, 1, 1, 2, 1, 1]
    with pytest.raises(CommandError, match="num_layers_in_last_pipeline_stage 4 must leave"):
        _settings(parser.parse_args([*given, "--decoder-last-pipeline-num-layers", "4"]), torch.device("cpu"), None)


VIRTUAL = {"num_layers_per_virtual_pipeline_stage": 1}
TWO_STAGES, ONE_STAGE = ({"virtual_pipeline_model_parallel_size": stages} for stages in (2, 1))


@pytest.mark.parametrize(
    ("model", "training", "ranks", "said"),
    [
        ({}, {"pipeline_schedule": "zero-bubble"}, 1, "pipeline_schedule must be '1f1b' with pipeline_model_parallel_size 1.*'z"),
        (VIRTUAL, {}, 2, "num_layers_per_virtual_pipeline_stage must be None with pipeline_schedule '1f1b'.*but is 1"),
        (TWO_STAGES, {}, 2, "virtual_pipeline_model_parallel_size must be None with pipeline_schedule '1f1b'.*but is 2"),
        (ONE_STAGE, {"pipeline_schedule": "interleaved"}, 2, "virtual_pipeline_model_parallel_size must be given.*but is 1"),
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
    with pytest.raises(CommandError, match=said):
        check(config, Options(**(OPTIONS | training)), 1)
    assert "\n" not in said


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_what_is_trained_here_is_not_refused(name):
    check(*settings(name, 2)[:2], data_ranks=1)


def test_one_rank_alone_is_not_refused():
    check(Config(**SHAPE), Options(global_batch_size=None), 3)
