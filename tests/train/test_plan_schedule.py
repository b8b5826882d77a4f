"""A pipeline's time by arithmetic: the orders are torch's own, and the times those of cases that can be counted by hand."""

from random import Random

import pytest
from torch.distributed.pipelining import schedules

from onepass.train.plan import schedule
from onepass.train.plan.schedule import Pipeline, StageTimes, orders, pipeline_time

_KINDS = {"FORWARD": 0, "FULL_BACKWARD": 1, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 2}


def orders_of_torch(kind, ranks, each, microbatches):
    """The order of each rank's work, as torch's class has it."""
    made = kind.__new__(kind)
    made.__dict__.update(pp_group_size=ranks, n_local_stages=each, _n_microbatches=microbatches)
    made.number_of_rounds = max(1, microbatches // ranks)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    for rank in range(ranks):
        yield tuple(
            action and (_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in made._calculate_single_rank_operations(rank)
        )


@pytest.mark.parametrize(("ranks", "each", "microbatches"), [(2, 1, 8), (2, 2, 8), (4, 3, 12), (4, 2, 4), (4, 2, 6), (3, 1, 7)])
@pytest.mark.parametrize("split", [False, True])
def test_the_orders_are_torchs(ranks, each, microbatches, split):
    if each == 1 and not split:
        for rank, order in enumerate(orders(ranks, 1, microbatches, False)):
            warm = min(ranks - rank, microbatches)  # of Schedule1F1B, whose forwards and backwards take turns after that
            kinds = [work[0] for work in order if work is not None]
            assert kinds == [0] * (warm - 1) + [0, 1] * (microbatches - warm + 1) + [1] * (warm - 1)
        return
    kind = schedules.ScheduleInterleavedZeroBubble if split else schedules.ScheduleInterleaved1F1B
    assert orders(ranks, each, microbatches, split) == tuple(orders_of_torch(kind, ranks, each, microbatches))


def test_times_that_are_counted_by_hand():
    even = [StageTimes(1.0, 2.0, 1.0)] * 4
    assert pipeline_time(even[:1], Pipeline(1, 5)) == ((15.0,), (15.0,))
    # the bubble of p ranks and m microbatches is (p - 1) / m of the work, over the stages a rank has
    assert max(pipeline_time(even, Pipeline(4, 8)).ends) == 3.0 * (8 + 3)
    assert max(pipeline_time([StageTimes(0.5, 1.0)] * 8, Pipeline(4, 8)).ends) == pytest.approx(3.0 * (8 + 3 / 2))
    assert max(pipeline_time(even, Pipeline(4, 8, split=True)).ends) == pytest.approx(3.0 * 8 + 3.0)  # weights fill what is left
    # the slowest stage is always busy, after the first forward and before the last backward of the one before it
    uneven = [StageTimes(1.0, 2.0), StageTimes(2.0, 4.0)]
    assert pipeline_time(uneven, Pipeline(2, 8)).ends == (1.0 + 8 * 6.0 + 2.0, 1.0 + 8 * 6.0)
    assert pipeline_time(uneven, Pipeline(2, 8, send=0.5)).ends[0] == pytest.approx(1.0 + 8 * 6.0 + 2.0 + 2 * 0.5)


@pytest.mark.parametrize(("split", "each"), [(False, 2), (False, 3), (True, 1), (True, 2)])
def test_ranks_in_step_wait_for_what_comes(split, each):
    random = Random(0)
    later = 0
    for _ in range(20):
        stages = [StageTimes(random.uniform(1, 4), random.uniform(3, 6), random.uniform(1, 2)) for _ in range(3 * each)]
        free, in_step = (pipeline_time(stages, Pipeline(3, 6, split, way, 0.1)) for way in (False, True))
        assert all(own <= other + 1e-9 for own, other in zip(free.ends, in_step.ends, strict=True))
        assert free.busy == in_step.busy
        later += max(in_step.ends) > max(free.ends) + 0.1
    assert later > 5


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(("split", "each"), [(False, 1), (False, 2), (True, 1)])
def test_many_microbatches_are_counted_as_few_and_rounds(split, each, in_step, monkeypatch):
    stages = [StageTimes(1.0 + 0.1 * number, 2.0 + 0.3 * number, 1.0) for number in range(4 * each)]
    fast = pipeline_time(stages, Pipeline(4, 64, split, in_step, 0.01))
    monkeypatch.setattr(schedule, "_ROUNDS", 100)
    whole = pipeline_time(stages, Pipeline(4, 64, split, in_step, 0.01))
    assert fast.ends == pytest.approx(whole.ends)
    assert fast.busy == whole.busy
