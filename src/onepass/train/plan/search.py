"""The best layouts of a model over GPUs: those that fit, by the time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onepass.gpt import Config
from onepass.train.memory import OUTSIDE
from onepass.train.options import Options
from onepass.train.plan.block_time import Run
from onepass.train.plan.layout_memory import RankMemory, layout_memory, without_recomputation
from onepass.train.plan.layouts import GPULayout, Wanted, layouts
from onepass.train.plan.step_time import StepTime, least_time, step_time

_EXACT = 8  # layouts, by a lower bound of their time, whose schedules are run through
_GRANULARITIES = (None, "selective", "full")  # by the arithmetic that each adds


class Planned(NamedTuple):
    """A layout with what it takes. `recompute` is its recompute_granularity."""

    layout: GPULayout
    recompute: str | None
    time: StepTime
    memory: RankMemory
    tokens: int  # of a step

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.time.seconds


class SearchSettings(NamedTuple):
    """What a search keeps as it is. `recompute` are the granularities to try."""

    run: Run
    options: Options
    wanted: Wanted
    recompute: tuple[str | None, ...] = _GRANULARITIES


def best_layouts(settings: SearchSettings, gpus: int, batch: int) -> list[Planned]:
    """Return the layouts that fit, the fastest first. Of a slower one's time only the least is known, and it is left out."""
    run = settings.run
    bounds = sorted(
        ((least_time(run._replace(config=config), layout), at, layout, config, memory)
         for at, (layout, config, memory) in enumerate(fitting(settings, gpus, batch))),
    )  # fmt: skip
    found: list[Planned] = []
    for bound, _, layout, config, memory in bounds:
        if len(found) >= _EXACT and bound > found[-1].time.seconds:
            break
        time = step_time(run._replace(config=config), layout)
        found.append(Planned(layout, config.recompute_granularity, time, memory, batch * run.sequence))
        found.sort(key=lambda each: each.time.seconds)
        del found[_EXACT:]
    return found


def fitting(settings: SearchSettings, gpus: int, batch: int) -> Iterator[tuple[GPULayout, Config, RankMemory]]:
    """Yield the layouts that fit, each with the granularity of recomputation that costs least."""
    room = int(settings.run.gpu.memory.value)
    configs = [_recomputing(settings.run.config, granularity) for granularity in settings.recompute]
    for layout in layouts(settings.run.config, settings.wanted, gpus, batch, settings.run.sequence):
        for config in configs:
            memory = layout_memory(config, settings.options, layout, room)
            if memory.total + OUTSIDE <= room:
                yield layout, config, memory
                break


def _recomputing(config: Config, granularity: str | None) -> Config:
    return without_recomputation(config) if granularity is None else config.replace(recompute_granularity=granularity)


def smallest(settings: SearchSettings, gpus: int, batch: int) -> tuple[GPULayout, RankMemory] | None:
    """Return the layout that takes the least memory, whether it fits or not, or None if none is possible."""
    config = _recomputing(settings.run.config, settings.recompute[-1])
    room = int(settings.run.gpu.memory.value)
    each = (
        (layout, layout_memory(config, settings.options, layout, room))
        for layout in layouts(settings.run.config, settings.wanted, gpus, batch, settings.run.sequence)
    )
    return min(each, key=lambda found: found[1].total, default=None)
