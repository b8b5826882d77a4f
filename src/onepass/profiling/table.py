"""Print profiles on a terminal."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from onepass.profiling.model import Comparison, OperatorRow, Profile
from onepass.profiling.verdict import counted, number, time

_TOP = 15
_NAME = 44  # longer names are cut
_LISTED = 12  # the most kernels to list as gone or new


def text(show: Callable[[Console], None], width: int | None = None) -> str:
    """Return what `show` prints, without colours. The width is the terminal's, or 118 without a terminal."""
    out = io.StringIO()
    width = width or shutil.get_terminal_size((118, 40)).columns
    show(Console(file=out, width=width, highlight=False, color_system=None, force_terminal=False))
    return out.getvalue().rstrip("\n")


def show(profile: Profile, console: Console, top: int = _TOP) -> None:
    show_figures(profile, console, top)
    console.print()
    show_words(profile, console)


def show_figures(profile: Profile, console: Console, top: int = _TOP) -> None:
    for line in _lines(profile):
        console.print(line)
    console.print(_rows(profile, top))


def show_words(profile: Profile, console: Console) -> None:
    console.print(f"[bold]{profile.verdict}[/]: {escape(profile.reasons[0])}")
    for reason in profile.reasons[1:]:
        console.print(escape(reason))
    if profile.suggestions:
        console.print("\nof onepass would apply:")
    for suggestion in profile.suggestions:
        console.print(f"  [bold cyan]{escape(suggestion.call)}[/]")
        console.print(Padding(escape(suggestion.saw), (0, 0, 0, 4)))


# ---- the figures of the step ----


def _lines(profile: Profile) -> list[str]:
    per = f"{profile.steps} steps recorded; all figures are for one" if profile.steps > 1 else "one recorded"
    low, high = profile.wall_range
    wall = f"wall [bold]{time(profile.wall_us)}[/]"
    wall += f" ({time(low)} to {time(high)})" if profile.timed else " with the profiler, which slows the CPU"
    if profile.timed:
        wall += f", {time(profile.traced_us)} with the profiler"
    if profile.on_gpu:
        busy = f"GPU busy {time(profile.busy_us)}, idle {time(profile.idle_us)} ({profile.idle_share:.0%})"
    else:
        busy = f"operators {time(profile.busy_us)} of the {time(profile.traced_us)}, outside them {profile.idle_share:.0%}"
    lines = [f"[bold]{escape(profile.device)}[/]; {per}", wall, busy]
    if profile.gaps:
        gap = profile.gaps[0]
        between = f"{escape(_cut(gap.before))} and {escape(_cut(gap.after))}"
        most = f"the most between {between}: {number(gap.count)}, {time(gap.us)}"
        lines.append(f"{counted(profile.gap_count, 'gap')}, {time(profile.gap_us)}; {most}")
    lines.append(_launches(profile))
    if profile.peak_bytes is not None:
        lines.append(f"at most {size(profile.peak_bytes)} allocated beyond what was before")
    ceilings = [f"copy {profile.limits.copy_gbs:,.0f} GB/s (read + write)"] if profile.limits.copy_gbs else []
    ceilings += [f"{dtype} product {number(rate)} TFLOP/s" for dtype, rate in profile.limits.tflops.items()]
    return [*lines, f"[dim]ceilings: {', '.join(ceilings) or 'unknown'}[/]", ""]


def _launches(profile: Profile) -> str:
    if not profile.on_gpu:
        return f"{counted(profile.launches, 'operator')}, {time(profile.launch_us)} in the middle"
    parts = [
        f"{number(profile.kernels)} kernels, {number(profile.launches)} launches, {time(profile.launch_us)} each in the driver"
    ]
    if profile.graphs:
        parts.append(f"{number(profile.graphs)} of them CUDA graphs")
    if profile.host_us is not None:
        a_launch = f" ({time(profile.host_us / profile.launches)} a launch)" if profile.launches else ""
        parts.append(f"the CPU takes {time(profile.host_us)} to queue it{a_launch}")
    if profile.waits:
        parts.append(f"it waits for the GPU {number(profile.waits)} times")
    return "; ".join(parts)


# ---- the rows ----


def _rows(profile: Profile, top: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("operator, or kernel without one" if profile.on_gpu else "operator", no_wrap=True, overflow="ellipsis")
    columns = ["calls", *(["kernels"] if profile.on_gpu else []), "us", "share", "MB", "GB/s", "of copy", "TFLOP/s", "of peak"]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    shown, rest = profile.rows[:top], profile.rows[top:]
    for row in shown:
        table.add_row(escape(_cut(row.name)), *_cells(row, profile.on_gpu))
    if rest:
        calls, us, share = (sum(getattr(row, name) for row in rest) for name in ("calls", "us", "share"))
        kernels = [number(sum(sum(row.kernels.values()) for row in rest))] if profile.on_gpu else []
        table.add_row(f"{len(rest)} more", number(calls), *kernels, f"{us:,.1f}", f"{share:.1%}", *[""] * 5, style="dim")
    calls, us = sum(row.calls for row in profile.rows), profile.rows_us
    kernels = [number(sum(sum(row.kernels.values()) for row in profile.rows))] if profile.on_gpu else []
    table.add_row("all", number(calls), *kernels, f"{us:,.1f}", "", *[""] * 5, style="bold")
    return table


def _cells(row: OperatorRow, on_gpu: bool) -> list[str]:
    """Return a row's cells. "?" is an unknown value; a cell is blank where the figure doesn't apply."""
    kernels = [number(sum(row.kernels.values()))] if on_gpu else []
    moved = "?" if row.bytes is None else number(row.bytes / 1e6)
    return [
        number(row.calls), *kernels, f"{row.us:,.1f}", f"{row.share:.1%}", moved, "?" if row.gbs is None else number(row.gbs),
        _fraction(row.of_copy), "" if row.tflops is None else number(row.tflops), _fraction(row.of_peak),
    ]  # fmt: skip


def _fraction(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _cut(name: str, most: int = _NAME) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def size(count: float) -> str:
    for unit, many in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= many:
            return f"{count / many:.3g} {unit}"
    return f"{count:.0f} bytes"


# ---- comparisons ----


def show_comparison(comparison: Comparison, console: Console) -> None:
    before, after = comparison.before, comparison.after
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("a step", no_wrap=True)
    for name in ("before", "after", "before / after"):
        table.add_column(name, justify="right", no_wrap=True)
    busy = "GPU time" if before.on_gpu and after.on_gpu else "operators, with the profiler"
    pairs: list[tuple[str, float | None, float | None, Callable[[float], str]]] = [
        ("wall", before.wall_us, after.wall_us, time),
        (busy, before.busy_us, after.busy_us, time),
        ("idle", before.idle_us, after.idle_us, time),
        ("gaps", before.gap_count, after.gap_count, number),
        ("kernels", before.kernels, after.kernels, number),
        ("launches", before.launches, after.launches, number),
        ("bytes, where known", before.bytes, after.bytes, lambda count: f"{number(count / 1e6)} MB"),
        ("peak memory added", before.peak_bytes, after.peak_bytes, size),
    ]
    for name, was, now, said in pairs:
        if was is not None and now is not None and (was or now):
            table.add_row(name, said(was), said(now), f"{was / now:.2f} x" if now else "", style="bold" if name == "wall" else "")
    table.add_row("verdict", before.verdict, after.verdict, "")
    console.print(table)
    what = "kernels" if before.on_gpu and after.on_gpu else "operators"
    for verb, names in (("went", comparison.gone()), ("came", comparison.came())):
        if names:
            console.print(f"\n{what} that {verb}: {number(sum(names.values()))}")
        for name, count in list(names.items())[:_LISTED]:
            console.print(f"  {number(count):>6}  {escape(_cut(name, 100))}")
        if len(names) > _LISTED:
            console.print(f"  [dim]and {len(names) - _LISTED} more names[/]")
