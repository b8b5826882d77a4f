"""A profile, two profiles side by side, and both as text for a terminal."""

from __future__ import annotations

import gzip
import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from onepass.profiling.figures import Gap, OperatorRow
from onepass.profiling.limits import Limits
from onepass.profiling.picture import Timeline, draw
from onepass.profiling.suggestions import Suggestion
from onepass.profiling.timeline import PictureBar
from onepass.runtime.checks import check_whole
from onepass.runtime.notebook import html_report
from onepass.runtime.units import counted, number, size, time

_TOP = 15
_NAME = 44  # longer names are cut
_LISTED = 12  # the most kernels to list as gone or new


@dataclass(frozen=True)
class Profile:
    """The profile of a call. Times are in microseconds and all figures are per step, unless a comment says otherwise."""

    device: str
    on_gpu: bool
    steps: int  # the number of recorded steps
    wall_us: float  # median, without the profiler; if `timed` is False, with the profiler
    wall_range: tuple[float, float]
    timed: bool
    traced_us: float  # with the profiler, which slows the CPU
    host_us: float | None  # until the call returns, with its kernels queued
    busy_us: float  # the time in which at least one kernel runs; on a CPU, at least one operator
    idle_us: float  # the rest of wall_us
    gaps: tuple[Gap, ...]
    gap_count: float
    gap_us: float
    short_gap_us: float  # in gaps so short that launches explain them (figures.SHORT_GAP_US)
    kernels: float
    launches: float
    launch_us: float  # mean time of one launch in the driver; on a CPU, an operator's median time
    graphs: float  # launches of CUDA graphs
    waits: float  # synchronizations, in which the CPU waits for the GPU
    peak_bytes: int | None  # peak memory during a step, less the memory allocated before it
    limits: Limits
    rows: tuple[OperatorRow, ...]
    same_steps: bool  # every step has the same operators with the same shapes
    verdict: str
    reasons: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    bars: tuple[PictureBar, ...] = field(repr=False)
    packed_trace: bytes = field(repr=False)  # torch.profiler's Chrome trace, gzipped

    @property
    def idle_share(self) -> float:
        return self.idle_us / self.wall_us if self.wall_us else 0.0

    @property
    def rows_us(self) -> float:
        return sum(row.us for row in self.rows)

    @property
    def bytes(self) -> float:
        """The bytes of all rows whose bytes are known."""
        return sum(row.bytes or 0.0 for row in self.rows)

    def kernel_names(self) -> dict[str, float]:
        """Return name -> launches per step for all kernels; on a CPU, name -> calls for all operators."""
        if not self.on_gpu:
            return {row.name: row.calls for row in self.rows}
        launches: dict[str, float] = {}
        for row in self.rows:
            for name, count in row.kernels.items():
                launches[name] = launches.get(name, 0.0) + count
        return launches

    def table(self, top: int = _TOP, width: int | None = None) -> str:
        """Return the figures of the step and the `top` rows with the most time, as text of `width` characters."""
        check_whole("top", top, 1)
        return _text(lambda console: _show_figures(self, console, top), width)

    def words(self) -> str:
        """Return what bounds the step, why, and which onepass fusions apply."""
        return "\n".join([f"{self.verdict}: {self.reasons[0]}", *self.reasons[1:], *map(str, self.suggestions)])

    def __str__(self) -> str:
        return _text(lambda console: show(self, console))

    def _repr_html_(self) -> str:
        words = [f"{self.verdict}: {self.reasons[0]}", *self.reasons[1:]]
        applying = Table("of onepass would apply", "seen")
        for suggestion in self.suggestions:
            applying.add_row(escape(suggestion.call), escape(suggestion.saw))
        return html_report(*_lines(self), _rows(self, _TOP), *map(escape, words), *([applying] if self.suggestions else []))

    def picture(self, path: str | Path) -> None:
        """Draw the last step as a timeline, CPU threads above GPU streams. Needs matplotlib."""
        draw([self.timeline()], Path(path))

    def timeline(self, name: str = "") -> Timeline:
        """Return what `picture` draws, with `name` in its title."""
        facts = [f"wall {time(self.wall_us)}", f"{'GPU busy' if self.on_gpu else 'operators'} {time(self.busy_us)}"]
        if self.on_gpu:
            facts += [f"idle {self.idle_share:.0%}", counted(self.kernels, "kernel"), counted(self.launches, "launch")]
        else:
            facts += [counted(self.launches, "operator")]
        caption = f"{'; '.join(facts)}; {self.device}; drawn with the profiler, which slows the CPU"
        return Timeline(f"{name}: {self.verdict}" if name else self.verdict, caption, self.bars)

    def trace(self, path: str | Path) -> None:
        """Write torch.profiler's Chrome trace (.json, .json.gz), for Perfetto or chrome://tracing."""
        path = Path(path)
        if not path.name.endswith((".json", ".json.gz")):
            raise ValueError(f"path must end in .json or .json.gz, but is {str(path)!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.packed_trace if path.suffix == ".gz" else gzip.decompress(self.packed_trace))

    def as_dict(self) -> dict[str, Any]:
        """Return all figures and sentences for a JSON file, without the timeline and the trace."""
        names = [f.name for f in fields(self) if f.name not in ("bars", "packed_trace")]
        values = {name: getattr(self, name) for name in names}
        for name in ("rows", "gaps", "suggestions"):
            values[name] = [asdict(item) for item in values[name]]
        return values | {"limits": asdict(self.limits)}


@dataclass(frozen=True)
class Comparison:
    """Two profiles side by side. Ratios are before / after: above 1 is an improvement."""

    before: Profile
    after: Profile

    @property
    def speedup(self) -> float:
        return self.before.wall_us / self.after.wall_us

    def gone(self) -> dict[str, float]:
        """Return name -> decrease per step, for kernels (on a CPU, operators) that run less often in `after`."""
        return _fewer(self.before.kernel_names(), self.after.kernel_names())

    def came(self) -> dict[str, float]:
        """Return name -> increase per step, for kernels (on a CPU, operators) that run more often in `after`."""
        return _fewer(self.after.kernel_names(), self.before.kernel_names())

    def __str__(self) -> str:
        return _text(lambda console: _show_comparison(self, console))

    def _repr_html_(self) -> str:
        return html_report(*_compared(self))

    def picture(self, path: str | Path) -> None:
        """Draw both timelines on one time axis, one above the other. Needs matplotlib."""
        draw([self.before.timeline("before"), self.after.timeline("after")], Path(path))


def compare(before: Profile, after: Profile) -> Comparison:
    """Compare two profiles: time, launches, kernels that went and came, gaps, bytes, memory.

    before = onepass.profile(step)
    after = onepass.profile(onepass_step)
    print(onepass.compare(before, after))
    """
    for name, profile in (("before", before), ("after", after)):
        if not isinstance(profile, Profile):
            raise TypeError(f"{name} must be a Profile, as onepass.profile returns it, but is a {type(profile).__name__}")
    return Comparison(before, after)


def _fewer(many: dict[str, float], few: dict[str, float]) -> dict[str, float]:
    left = {name: count - few.get(name, 0.0) for name, count in many.items()}
    return {name: count for name, count in sorted(left.items(), key=lambda item: -item[1]) if count > 0}


# ---- text for a terminal ----


def _text(show: Callable[[Console], None], width: int | None = None) -> str:
    """Return what `show` prints, without colours. The width is the terminal's, or 118 without a terminal."""
    out = io.StringIO()
    width = width or shutil.get_terminal_size((118, 40)).columns
    show(Console(file=out, width=width, highlight=False, color_system=None, force_terminal=False))
    return out.getvalue().rstrip("\n")


def show(profile: Profile, console: Console, top: int = _TOP) -> None:
    _show_figures(profile, console, top)
    console.print()
    _show_words(profile, console)


def _show_figures(profile: Profile, console: Console, top: int = _TOP) -> None:
    for line in _lines(profile):
        console.print(line)
    console.print(_rows(profile, top))


def _show_words(profile: Profile, console: Console) -> None:
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


# ---- comparisons ----


def _show_comparison(comparison: Comparison, console: Console) -> None:
    for part in _compared(comparison):
        console.print(part)


def _compared(comparison: Comparison) -> Iterator[Table | str]:
    """Yield the figures of both, and lines about the kernels that went and came."""
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
    for name, was, now, form in pairs:
        if was is not None and now is not None and (was or now):
            table.add_row(name, form(was), form(now), f"{was / now:.2f} x" if now else "", style="bold" if name == "wall" else "")
    table.add_row("verdict", before.verdict, after.verdict, "")
    yield table
    what = "kernels" if before.on_gpu and after.on_gpu else "operators"
    for verb, names in (("went", comparison.gone()), ("came", comparison.came())):
        if names:
            yield f"\n{what} that {verb}: {number(sum(names.values()))}"
        for name, count in list(names.items())[:_LISTED]:
            yield f"  {number(count):>6}  {escape(_cut(name, 100))}"
        if len(names) > _LISTED:
            yield f"  [dim]and {len(names) - _LISTED} more names[/]"
