"""What a plan of many GPUs says: the best layouts, what of a step takes its time, and how it grows; as text or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from onepass.runtime import units
from onepass.train.plan.block_time import Run
from onepass.train.plan.layouts import NODE, GPULayout, describe, parameters_count, runs_by
from onepass.train.plan.rates import GPURates, named_rates
from onepass.train.plan.search import Planned, SearchSettings, best_layouts

_GIB = 1 << 30
_SHOWN = 8  # layouts
_MOST = 1024  # GPUs of the growth table


class Growth(NamedTuple):
    """The best layout of a number of GPUs with as many sequences a GPU (weak), or as many together (strong); None: none fits."""

    gpus: int
    weak: Planned | None
    strong: Planned | None


def grow(settings: SearchSettings, gpus: int, batch: int) -> list[Growth]:
    """Return the best layouts of up to 1,024 GPUs, or as many as the run has: its number halved and doubled."""
    found, count = [], gpus // (gpus & -gpus)  # its odd part
    while count <= max(_MOST, gpus):
        weak = max(1, round(batch * count / gpus))
        found.append(Growth(count, _best(settings, count, weak), _best(settings, count, batch)))
        count *= 2
    return found


def _best(settings: SearchSettings, gpus: int, batch: int) -> Planned | None:
    return next(iter(best_layouts(settings, gpus, batch)), None)


# ---- text ----


def title(settings: SearchSettings, best: GPULayout) -> str:
    run, gpus, batch = settings.run, best.gpus, best.batch
    nodes = -(-gpus // NODE)
    eight = ", products in eight bits" if run.config.fp8_format else ""
    count = parameters_count(run.config, best)
    size = f"{count / 1e9:,.2f}B" if count >= 1e9 else f"{count / 1e6:,.1f}M"
    return (
        f"{size} parameters in {run.config.params_dtype}{eight}, on {gpus:,} {run.gpu.name} "
        f"in {units.counted(nodes, 'node')} of {NODE}; a step has {batch:,} sequences of {run.sequence} tokens"
    )


def layout_lines(planned: Sequence[Planned], run: Run) -> Iterator[str]:
    """Yield a table of layouts, the fastest first."""
    yield (
        f"  {'layout':27}{'micro':>6}  {'divided':10}{'recompute':10}{'s a step':>9}{'tokens/s':>12}{'a GPU':>8}"
        f"{'MFU':>6}{'GiB':>7}{'exposed':>9}"
    )
    for each in planned[:_SHOWN]:
        layout, time = each.layout, each.time
        marks = "" if runs_by(layout) == "onepass train" else " *"
        yield (
            f"  {describe(layout) + marks:27}{layout.micro:6}  {_divided(layout):10}{each.recompute or '':10}{time.seconds:9.3f}"
            f"{each.tokens_per_second:12,.0f}{each.tokens_per_second / layout.gpus:8,.0f}{mfu(each, run):6.0%}"
            f"{each.memory.total / _GIB:7.1f}{time.exposed:9.1%}"
        )


def _divided(layout: GPULayout) -> str:
    return {"nothing": "", "fsdp": "FSDP"}.get(layout.shard, layout.shard)


def mfu(planned: Planned, run: Run) -> float:
    """Return the model's FLOP/s, causal attention counted as half, over the published peak in bf16."""
    flops = planned.tokens_per_second * run.config.flops_per_token(run.sequence if run.seen is None else run.seen)
    return float(flops / planned.layout.gpus / run.gpu.peak.value)


def part_lines(planned: Planned) -> Iterator[str]:
    """Yield what of a step takes its time, the most first."""
    for name, seconds in sorted(planned.time.parts.items(), key=lambda part: -part[1]):
        yield f"  {name:34}{seconds * 1e3:12,.1f} ms{seconds / planned.time.seconds:8.1%}"


def memory_line(planned: Planned) -> str:
    memory = planned.memory
    parts = (f"{name} {getattr(memory, name) / _GIB:.1f}" for name in memory._fields if getattr(memory, name))
    return f"  GiB of the fullest GPU: {', '.join(parts)}"


def growth_lines(growth: Iterable[Growth], run: Run) -> Iterator[str]:
    yield f"  {'':6}{'as many sequences a GPU (weak)':50}{'as many sequences together (strong)'}"
    yield f"  {'GPUs':>6}  {'layout':26}{'tokens/s':>12}{'MFU':>6}{'of linear':>11}  {'layout':26}{'s a step':>9}{'MFU':>6}"
    first = None
    for each in growth:
        first = first or each.weak
        weak = strong = "does not fit"
        if each.weak is not None and first is not None:
            linear = each.weak.tokens_per_second / each.gpus / (first.tokens_per_second / first.layout.gpus)
            weak = f"{describe(each.weak.layout):26}{each.weak.tokens_per_second:12,.0f}{mfu(each.weak, run):6.0%}{linear:11.1%}"
        if each.strong is not None:
            strong = f"{describe(each.strong.layout):26}{each.strong.time.seconds:9.3f}{mfu(each.strong, run):6.0%}"
        yield f"  {each.gpus:6,}  {weak:55}  {strong}".rstrip()


def rate_lines(gpu: GPURates) -> Iterator[str]:
    """Yield each rate with its unit and source."""
    for name, unit, rate in named_rates(gpu):
        yield f"  {name:27}{_scaled(rate.value, unit):>14}  {rate.source}"


def _scaled(value: float, unit: str) -> str:
    if unit == "bytes":
        return units.size(value)
    if unit == "s":
        return units.time(value * 1e6)
    for prefix, factor in (("T", 1e12), ("G", 1e9)):
        if unit and value >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value:.3g}"


# ---- JSON ----


def as_json(
    settings: SearchSettings, gpus: int, batch: int, planned: Sequence[Planned], growth: Sequence[Growth]
) -> dict[str, Any]:
    run = settings.run
    return {
        "parameters": parameters_count(run.config, planned[0].layout),
        "gpu": run.gpu.name,
        "gpus": gpus,
        "sequences": batch,
        "seq_length": run.sequence,
        "layouts": [_json_of(each, run) for each in planned],
        "growth": [
            {
                "gpus": each.gpus,
                **{
                    name: None if found is None else _json_of(found, run)
                    for name, found in each._asdict().items()
                    if name != "gpus"
                },
            }
            for each in growth
        ],
        "rates": {name: {"value": rate.value, "unit": unit, "source": rate.source} for name, unit, rate in named_rates(run.gpu)},
    }


def _json_of(planned: Planned, run: Run) -> dict[str, Any]:
    return {
        "layout": {**planned.layout._asdict(), "microbatches": planned.layout.microbatches},
        "parameters": parameters_count(run.config, planned.layout),
        "runs_by": runs_by(planned.layout),
        "recompute_granularity": planned.recompute,
        "seconds": planned.time.seconds,
        "parts": planned.time.parts,
        "exposed": planned.time.exposed,
        "tokens_per_second": planned.tokens_per_second,
        "mfu": mfu(planned, run),
        "memory": {**planned.memory._asdict(), "total": planned.memory.total},
    }
