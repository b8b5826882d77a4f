"""Print the run: a table for each case as it is done. stderr has a progress bar, or a line a step if it is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from onepass.bench.model import CaseResult, CpuTimes, Measured
from onepass.bench.options import short
from onepass.bench.peers import PACKAGES
from onepass.bench.record import BenchRun, commit, device_name, versions

_WIDTH = 118  # if the output is not a terminal
_OURS, _BEST = "bold cyan", "bold green"


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    cell: Callable[[Measured], str]
    fastest: str | None = None  # the row with the smallest such figure is green in this column
    dispensable: int = 0  # on a narrow terminal the column with the highest value is dropped first

    def styled(self, row: Measured, best: bool) -> str:
        text = self.cell(row)
        return f"[{_BEST}]{text}[/]" if best and text else text


class BenchReport:
    """Print results on stdout as soon as they are known."""

    def __init__(self) -> None:
        self.on_gpu = True
        self.console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
        self.progress = Progress(
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,  # a refresh thread would slow the calls being timed
            disable=not sys.stderr.isatty(),
        )

    @contextmanager
    def ticking(self, steps: int) -> Iterator[Callable[[str], None]]:
        """Yield a function to be called at the beginning of each step."""
        task, begun = self.progress.add_task("", total=steps), time.perf_counter()

        def tick(text: str) -> None:
            self.progress.update(task, advance=1, description=escape(text), refresh=True)
            if self.progress.disable:
                done = int(self.progress.tasks[task].completed)
                print(f"{done}/{steps} {time.perf_counter() - begun:.0f} s {text}", file=sys.stderr, flush=True)

        self.progress.start()
        try:
            yield tick
        finally:
            self.progress.stop()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Hide the progress bar: stdout and stderr may be the same terminal."""
        running = self.progress.live.is_started
        if running:
            self.progress.stop()
        try:
            yield
        finally:
            if running:
                self.progress.start()

    def say(self, text: str | Text | Table = "") -> None:
        with self._aside():
            self.console.print(text)

    # ---- output ----

    def header(self, run: BenchRun, ours: str, without: list[str], skipped: str | None) -> None:
        has, self.on_gpu = versions(), run.device.type == "cuda"
        lines = [
            f"[bold]onepass {has['onepass']}[/] ({commit() or 'no checkout'}) on [bold]{escape(device_name(run.device))}[/]",
            f"torch {has['torch']}, triton {has['triton'] or 'not installed'}, cuDNN {has['cudnn'] or 'not installed'}, "
            f"CuTe DSL {has['cutlass_dsl'] or 'not installed'}, Python {has['python']}; {short(run.dtype)}; "
            f"onepass runs as [bold]{ours}[/]",
            _ceilings(run),
            _cpu_speed(run),
            escape(f"peers  {_peers(run.peers)}{'; ' + skipped if skipped else ''}"),
            *(f"[dim]{escape(line)}[/]" for line in without),
        ]
        for line in (*lines, _LEGEND):
            self.say(line)
        self.say()

    def cpu_times(self, times: CpuTimes) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
        case = times.case
        heading = f"[dim]{case.op}[/]  [bold]{case.variant}: CPU time of a call[/], {_shape(case.shape)}, microseconds"
        table.add_column("", min_width=18)
        for title, width in (("forward", 9), ("forward + backward", 18), ("onepass's speed over it", 23)):
            table.add_column(title, min_width=width, justify="right", no_wrap=True)
        mine = next((row for row in times.rows if row.name == "onepass"), None)
        for row in times.rows:
            ratio = ""
            if mine is not None and row is not mine:
                ratio = f"{row.forward_us / mine.forward_us:.2f} / {row.both_us / mine.both_us:.2f} x"
            style = _OURS if row is mine else ""
            table.add_row(self._name(row.name, row is mine), f"{row.forward_us:.1f}", f"{row.both_us:.1f}", ratio, style=style)
        with self._aside():
            self.console.print(heading, table, "", sep="\n")

    def case(self, result: CaseResult) -> None:
        case = result.case
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=True, header_style="dim")
        moved = f"{_bytes(case.forward_bytes)} forward"
        moved += f", {_bytes(case.backward_bytes)} backward" if case.backward_bytes else ""
        heading = f"[dim]{case.op}[/]  [bold]{case.variant} {_shape(case.shape)}[/] {short(case.dtype)}  [dim]{moved}[/]"
        columns = _fitting(_columns(result), self.console.width)
        table.add_column("", min_width=_NAME if _taken(columns) <= self.console.width else 0, no_wrap=True)
        for column in columns:
            table.add_column(column.title, min_width=column.width, justify="right", no_wrap=True)
        finished = [row for row in result.rows if not row.floor]
        best = {column.fastest: _fastest(finished, column.fastest) for column in columns if column.fastest}
        for row in (*result.rows, result.copy):
            cells = [column.styled(row, best.get(column.fastest or "") is row) for column in columns]
            style = _OURS if row.ours else "dim" if row is result.copy else ""
            table.add_row(self._name(row.contender, row.ours), *cells, style=style)
        calls = bound_by_calls(result) if self.on_gpu else None
        verdicts = [said for said in (against_best(result), less_memory(result), calls, left_out(result)) if said]
        with self._aside():
            self.console.print(heading, table, sep="\n")
            for row in result.rows:
                if row.message:
                    self.console.print(f"  [red]{escape(row.contender)}: {escape(row.message)}[/]")
            self.console.print(*(f"  [dim]{escape(verdict)}[/]" for verdict in verdicts), "", sep="\n")

    def _name(self, name: str, ours: bool) -> str:
        return ("> " if ours else "  ") + escape(name)


# ---- the columns of a case's table ----

_NAME = 19  # the width of the first column, the contender's name


def _columns(result: CaseResult) -> list[_Column]:
    """Return the columns that have a figure in any row. If the op has a reference, times are relative to it, not to a copy."""
    columns = []
    for direction in ("forward", "backward") if result.case.backward_bytes else ("forward",):
        name = f"{direction}_ms"
        columns.append(_Column(f"{direction} us", len(direction) + 3, _time(name), name))
        if result.reference is None:
            columns.append(_Column("of copy", 7, _number(f"{direction}_of_copy", ".2f"), name))
    if _known(result, "both_of_reference"):
        columns.append(_Column(f"f+b over {result.reference}", 8, _speed("both_of_reference"), "both_of_reference"))
    if _known(result, "forward_graph_us"):
        columns.append(_Column("graph us f / b", 14, _pair("forward_graph_us", "backward_graph_us", ".1f"), dispensable=1))
    if result.case.backward_bytes:
        columns.append(_Column("CPU us f / f+b", 14, _pair("cpu_forward_us", "cpu_both_us", ".0f")))
    if _known(result, "peak_mib"):
        columns.append(_Column("peak MiB", 8, _number("peak_mib", ".0f"), dispensable=2))
        columns.append(_Column("kept MiB", 8, _number("kept_mib", ".1f"), dispensable=3))
    return [*columns, _Column("error", 7, _number("worst_error", ".1e"))]


def _known(result: CaseResult, name: str) -> bool:
    return any(getattr(row, name) is not None for row in result.rows)


def _fitting(columns: list[_Column], width: int) -> list[_Column]:
    while _taken(columns) > width and any(column.dispensable for column in columns):
        columns = [column for column in columns if column is not max(columns, key=lambda column: column.dispensable)]
    return columns


def _taken(columns: list[_Column]) -> int:
    return _NAME + 1 + sum(max(column.width, len(column.title)) + 1 for column in columns)


def _number(name: str, digits: str) -> Callable[[Measured], str]:
    return lambda row: "" if (value := getattr(row, name)) is None else format(value, digits)


def _speed(name: str) -> Callable[[Measured], str]:
    """Return a function that formats a share of a time as a speed."""
    return lambda row: "" if (value := getattr(row, name)) is None else f"{1 / value:.2f} x"


def _pair(first: str, second: str, digits: str) -> Callable[[Measured], str]:
    def cell(row: Measured) -> str:
        values = getattr(row, first), getattr(row, second)
        return "" if None in values else " / ".join(format(value, digits) for value in values)

    return cell


def _time(name: str) -> Callable[[Measured], str]:
    """Return a function that formats a time. In a failed row it shows the status instead."""

    def cell(row: Measured) -> str:
        if row.status != "ok":
            return f"[red]{row.status}[/]" if name == "forward_ms" else ""
        ms = getattr(row, name)
        return "" if ms is None else f"{ms * 1e3:.1f}"

    return cell


def against_best(result: CaseResult) -> str | None:
    """Compare onepass with the fastest peers, forward and in all. Return None if there is nothing to compare.

    Some peers make the gradients in forward, so a time of backward alone says nothing of them.
    """
    ours = next((row for row in result.rows if row.ours and row.status == "ok"), None)
    peers = [row for row in result.rows if not (row.ours or row.floor)]
    parts = []
    for name, field in (("forward", "forward_ms"), ("forward and backward", "both_ms")):
        times: dict[str, float] = {row.contender: ms for row in peers if (ms := getattr(row, field)) is not None}
        if ours is not None and times and (mine := getattr(ours, field)) is not None:
            best = min(times, key=times.__getitem__)
            parts.append(f"{name} {times[best] / mine:.2f} x the speed of {best}")
    return "onepass against the best peer: " + ", ".join(parts) if parts else None


def less_memory(result: CaseResult) -> str | None:
    """Set what onepass keeps for backward beside the peer that keeps least, and what it takes at most likewise."""
    parts = []
    for name, words in (("kept_mib", "kept for backward"), ("peak_mib", "at most")):
        if (sizes := _beside_least(result, name)) is not None:
            mine, least, peer = sizes
            parts.append(f"{_mib(mine)} {words}, {peer} {_mib(least)}")
    return "memory: " + "; ".join(parts) if parts else None


def kept_in_all(results: list[CaseResult]) -> str | None:
    """Sum what onepass keeps for backward over cases, and what the peer that keeps least of each does."""
    sizes = [found for result in results if (found := _beside_least(result, "kept_mib")) is not None]
    if len(sizes) < 2:
        return None
    mine, least = (sum(size) for size in zip(*((mine, least) for mine, least, _ in sizes), strict=True))
    return f"kept for backward, {len(sizes)} cases together: {_mib(mine)} by onepass, {_mib(least)} by the peers that keep least"


def _beside_least(result: CaseResult, name: str) -> tuple[float, float, str] | None:
    """Return onepass's figure, the least of peers, and whose it is."""
    ours = next((row for row in result.rows if row.ours and row.status == "ok"), None)
    peers = [row for row in result.rows if not (row.ours or row.floor) and row.status == "ok"]
    sizes: dict[str, float] = {row.contender: mib for row in peers if (mib := getattr(row, name)) is not None}
    if ours is None or not sizes or (mine := getattr(ours, name)) is None:
        return None
    least = min(sizes, key=sizes.__getitem__)
    return mine, sizes[least], least


def _mib(size: float) -> str:
    return f"{size:.1f} MiB" if size >= 1.0 else f"{size * 1024:.0f} KiB"


def _fastest(rows: list[Measured], name: str) -> Measured | None:
    timed = [row for row in rows if getattr(row, name) is not None]
    return min(timed, key=lambda row: float(getattr(row, name)), default=None)


def bound_by_calls(result: CaseResult) -> str | None:
    """Name the passes in which the GPU waits for the CPU, that is all whose calls take the CPU longer than the GPU."""
    ours = next((row for row in result.rows if row.ours and row.status == "ok"), None)
    if ours is None or ours.cpu_forward_us is None or ours.cpu_both_us is None:
        return None
    parts, calls = [], {"forward": ours.cpu_forward_us, "backward": ours.cpu_both_us - ours.cpu_forward_us}
    for direction, us in calls.items():
        ms = getattr(ours, f"{direction}_ms")
        if ms is not None and us > ms * 1e3:
            parts.append(f"{direction}, {us:.0f} us for the GPU's {ms * 1e3:.0f}")
    return "bound by the CPU's calls: " + "; ".join(parts) if parts else None


def left_out(result: CaseResult) -> str | None:
    """Name the contenders that have no row, by the reasons."""
    named: dict[str, list[str]] = {}
    for name, why in result.left_out.items():
        named.setdefault(why, []).append(name)
    return "without " + "; ".join(f"{', '.join(names)} ({why})" for why, names in named.items()) if named else None


_LEGEND = "[dim]ratios are speeds, and more is better: x over another's, of copy over a copy's[/]"


def _cpu_speed(run: BenchRun) -> str:
    calls = [f"{time.name} in {time.forward_us:.0f} us, {time.both_us:.0f} with backward" for time in run.cpu_speed]
    return f"this CPU calls {'; '.join(calls)}"


def _ceilings(run: BenchRun) -> str:
    parts = [f"copy {run.ceilings.copy_gbs:.0f} GB/s (read + write)"]
    if run.ceilings.matmul_tflops:
        parts.append(f"bf16 matrix product {run.ceilings.matmul_tflops:.0f} TFLOP/s")
    return "ceilings of this run: " + ", ".join(parts)


def _peers(versions: dict[str, str]) -> str:
    parts = [f"{name} {version}" for name, version in versions.items()]
    absent = [f"{name} ({package.distribution})" for name, package in PACKAGES.items() if name not in versions]
    return ", ".join(parts or ["none but PyTorch"]) + (f"; not installed: {', '.join(absent)}" if absent else "")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in shape)


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
