"""Decide from the figures what bounds a step, and say why."""

from __future__ import annotations

from collections.abc import Sequence

from onepass.profiling.figures import NEAR, Figures, OperatorRow
from onepass.runtime.units import counted, listed, number, time

VERDICTS = ("launch-bound", "bandwidth-bound", "compute-bound", "mixed")
IDLE = 0.25  # of the wall time: from this idle fraction on, the step counts as waiting
HALF = 0.5  # of the time: a property of this fraction is a property of the step
_SMALL_CPU_US = 10.0  # wall time per operator, Python included: so short an operator moves few bytes


def verdict(figures: Figures, rows: Sequence[OperatorRow], wall_us: float, idle_us: float) -> tuple[str, tuple[str, ...]]:
    """Return one of VERDICTS, and the sentences that explain it, the deciding one first."""
    total = sum(row.us for row in rows)
    if not total:
        return "mixed", ("nothing ran that the profiler could see",)
    waiting = _gpu_waits(figures, wall_us, idle_us) if figures.on_gpu else _cpu_dispatches(figures, wall_us)
    near = {kind: sum(row.us for row in rows if row.near == kind) for kind in ("bandwidth", "compute")}
    split = _split(figures, rows, total)
    if waiting is not None:
        return waiting[0], (waiting[1], split)
    for kind, ceiling in (("bandwidth", "the copy bandwidth"), ("compute", "the rate of a large matrix product")):
        if near[kind] >= HALF * total:
            names = listed(row.name for row in rows if row.near == kind)
            return f"{kind}-bound", (f"{near[kind] / total:.0%} of the time reaches {NEAR} or more of {ceiling}: {names}", split)
    limit = "neither the copy bandwidth nor matrix products set the pace alone"
    return "mixed", (
        limit if sum(near.values()) >= HALF * total else f"{limit}, and most of the time comes near to neither",
        split,
    )


def _gpu_waits(figures: Figures, wall_us: float, idle_us: float) -> tuple[str, str] | None:
    if idle_us < IDLE * wall_us:
        return None
    steps = figures.steps
    idle = f"the GPU is idle for {idle_us / wall_us:.0%} of a step ({time(idle_us)} of {time(wall_us)})"
    if figures.short_gap_us < HALF * figures.gap_us:
        gap = figures.gaps[0]
        where = f"most of it in few long gaps, the longest {time(gap.longest_us)} between {gap.before} and {gap.after}"
        waits = f"; {number(figures.waits / steps)} times a step the CPU waits for the GPU" if figures.waits else ""
        return "mixed", f"{idle}, {where}: the CPU does something else there{waits}"
    if not figures.launches:
        return "launch-bound", f"{idle}, and no launch was seen"
    launches, kernel_us = figures.launches / steps, figures.busy_us / max(figures.kernels, 1)
    often = f"{counted(launches, 'launch')}, one every {time(wall_us / launches)}"
    return "launch-bound", f"{idle}: {often}, for kernels that take {time(kernel_us)} on average"


def _cpu_dispatches(figures: Figures, wall_us: float) -> tuple[str, str] | None:
    """Return the verdict if dispatch bounds the step, else None.

    Test the time without the profiler first: the profiler makes it two or three times as long.
    """
    operators = figures.launches / figures.steps
    often = f"dispatch-bound, since this is a CPU: {counted(operators, 'operator')}"
    if operators and wall_us / operators <= _SMALL_CPU_US:
        return "launch-bound", f"{often}, one every {time(wall_us / operators)}: about what it takes to call one"
    ranges = sum(call.us for call in figures.calls if not call.operator)
    outside = max(figures.traced_us - figures.busy_us, 0.0) + ranges
    if outside < HALF * figures.traced_us:
        return None
    return "launch-bound", f"{often}, and {outside / figures.traced_us:.0%} of the time is outside them, in Python and autograd"


def _split(figures: Figures, rows: Sequence[OperatorRow], total: float) -> str:
    parts = {
        f"at {NEAR} or more of the copy bandwidth": sum(row.us for row in rows if row.near == "bandwidth"),
        f"at {NEAR} or more of a large product's rate": sum(row.us for row in rows if row.near == "compute"),
        "below both": sum(row.us for row in rows if row.near is None and _measured(row)),
        "of unknown bytes and flops": sum(row.us for row in rows if not _measured(row)),
    }
    where = "GPU time" if figures.on_gpu else "time in operators"
    return f"{where}: " + ", ".join(f"{us / total:.0%} {what}" for what, us in parts.items() if us >= 0.005 * total)


def _measured(row: OperatorRow) -> bool:
    return row.of_copy is not None or row.of_peak is not None
