"""The time of a pipeline's step: the schedules' orders of work, run through by arithmetic.

Rank r of p has stages r, r + p, r + 2p, ... as `onepass.train.stages` divides them. Each rank has its work in one order, which is
torch.distributed.pipelining's. It begins a piece when the one before it is done and what it needs has come. Where a rank has
several stages, or weights' gradients are apart, torch keeps ranks in step: in each of its time steps a rank waits for what is
sent to it in that step, whether it needs that yet or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

_FORWARD, _BACKWARD, _WEIGHT = 0, 1, 2
_ROUNDS = 3  # of as many microbatches as ranks, after which each round takes as long as the one before

Work = tuple[int, int, int]  # a kind of pass, a stage, a microbatch


class StageTimes(NamedTuple):
    """Seconds of one microbatch in one stage. `weight` is what of backward makes weights' gradients."""

    forward: float
    backward: float  # both parts of it
    weight: float = 0.0


class PipelineTime(NamedTuple):
    """Seconds from the first forward on."""

    ends: tuple[float, ...]  # of each rank's work
    busy: tuple[float, ...]  # of each rank


class Pipeline(NamedTuple):
    """How stages run: the ranks they are on, a step's microbatches, and the order.

    split: weights' gradients are work of their own, as in zero-bubble schedules.
    in_step: a rank waits in each time step for what is sent to it in that step, needed or not. Megatron's don't.
    send: seconds that hidden states, or their gradients, take to the next rank.
    """

    ranks: int
    microbatches: int
    split: bool = False
    in_step: bool = False
    send: float = 0.0

    @property
    def round_size(self) -> int:
        """How many microbatches go through one of a rank's stages before the next one has its turn."""
        return self.microbatches // max(1, self.microbatches // self.ranks)


def pipeline_time(stages: Sequence[StageTimes], pipeline: Pipeline) -> PipelineTime:
    """Return the time of a step's forwards and backwards in `stages`, of all ranks, first to last."""
    ranks, count = pipeline.ranks, pipeline.microbatches
    busy = tuple(sum(stage.forward + stage.backward for stage in stages[rank::ranks]) * count for rank in range(ranks))
    size = pipeline.round_size if len(stages) > ranks else ranks
    few = min(count, size * _ROUNDS)
    few += (count - few) % size  # whole rounds are left
    ends = _run(stages, pipeline._replace(microbatches=few))
    if few == count:
        return PipelineTime(tuple(ends), busy)
    less = _run(stages, pipeline._replace(microbatches=few - size))
    rounds = (count - few) // size
    return PipelineTime(tuple(end + rounds * (end - before) for end, before in zip(ends, less, strict=True)), busy)


def _run(stages: Sequence[StageTimes], pipeline: Pipeline) -> list[float]:
    """Return when each rank has done its work."""
    durations = [(each.forward, each.backward - each.weight if pipeline.split else each.backward, each.weight) for each in stages]
    run = _run_in_step if pipeline.in_step else _run_freely
    return run(durations, pipeline, orders(pipeline.ranks, len(stages) // pipeline.ranks, pipeline.microbatches, pipeline.split))


Durations = list[tuple[float, float, float]]
Orders = tuple[tuple[Work | None, ...], ...]


def _run_freely(durations: Durations, pipeline: Pipeline, orders: Orders) -> list[float]:
    works = [[work for work in order if work is not None] for order in orders]
    done, last = dict[Work, float](), len(durations) - 1
    at, clock = [0] * pipeline.ranks, [0.0] * pipeline.ranks
    going = True
    while going:
        going = False
        for rank, order in enumerate(works):
            while at[rank] < len(order):
                kind, stage, _ = work = order[at[rank]]
                needs = _needed(work, last)
                ready = 0.0 if needs is None else done.get(needs, -1.0)
                if ready < 0:
                    break
                ready += 0.0 if needs is None else pipeline.send
                clock[rank] = done[work] = max(clock[rank], ready) + durations[stage][kind]
                at[rank], going = at[rank] + 1, True
    return clock


def _needed(work: Work, last: int) -> Work | None:
    """Return the other stage's work whose result this one takes."""
    kind, stage, number = work
    if kind == _FORWARD and stage:
        return _FORWARD, stage - 1, number
    return (_BACKWARD, stage + 1, number) if kind == _BACKWARD and stage < last else None


def _run_in_step(durations: Durations, pipeline: Pipeline, orders: Orders) -> list[float]:
    ranks, last, clock = pipeline.ranks, len(durations) - 1, [0.0] * pipeline.ranks
    for step in range(max(map(len, orders))):
        comes = [0.0] * ranks
        for rank, order in enumerate(orders):
            work = order[step] if step < len(order) else None
            if work is None:
                continue
            kind, stage, _ = work
            clock[rank] += durations[stage][kind]
            if (kind == _FORWARD and stage < last) or (kind == _BACKWARD and stage):
                other = (stage + (1 if kind == _FORWARD else -1)) % ranks
                comes[other] = max(comes[other], clock[rank] + pipeline.send)
        clock = [max(own, other) for own, other in zip(clock, comes, strict=True)]
    return clock


@lru_cache(256)
def orders(ranks: int, each: int, microbatches: int, split: bool) -> Orders:
    """Return each rank's work in its order, with None for a time step in which it has none.

    There are forwards to begin with, then a forward and a backward by turns, then backwards.

    Args:
        each: stages of a rank.
        split: rank r puts off weights' gradients by r backwards.
    """
    return tuple(tuple(_order(rank, Pipeline(ranks, microbatches, split), each)) for rank in range(ranks))


def _order(rank: int, pipeline: Pipeline, each: int) -> list[Work | None]:
    ranks, total, size, split = pipeline.ranks, pipeline.microbatches * each, pipeline.round_size, pipeline.split
    after = ranks - 1 - rank
    warm = after if each == 1 and not split else (each - 1) * size + (1 if split else 2) * after
    warm = min(warm, total)
    forwards = [_place(index, size, each, rank, ranks) for index in range(total)]
    backwards = [_place(index, size, each, rank, ranks, back=True) for index in range(total)]
    order: list[Work | None] = [None] * rank + [(_FORWARD, *place) for place in forwards[:warm]]
    if warm:
        order += [None] * (after if split else each * ranks + 2 * after - warm - rank)
    made = 0
    for index in range(total):
        if warm + index < total:
            order.append((_FORWARD, *forwards[warm + index]))
        elif not split:
            order.append(None)
        order.append((_BACKWARD, *backwards[index]))
        if split and index >= rank:
            order.append((_WEIGHT, *backwards[made]))
            made += 1
    return order + [(_WEIGHT, *place) for place in (backwards[made:] if split else ())]


def _place(index: int, size: int, each: int, rank: int, ranks: int, back: bool = False) -> tuple[int, int]:
    """Return the stage and the microbatch of a rank's forward or backward number `index`."""
    whole, left = divmod(index, size * each)
    local, within = divmod(left, size)
    return (each - 1 - local if back else local) * ranks + rank, whole * size + within
