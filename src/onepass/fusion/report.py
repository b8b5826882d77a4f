"""The result of `fused.report()`: what was fused, what was not and why, with predicted and measured times."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from onepass.fusion.cost import LaunchCost
from onepass.fusion.side_by_side import PackedParameters
from onepass.runtime.notebook import html_report

_WIDTH = 118


@dataclass(frozen=True)
class FusedGroup:
    """Operators that became one. `copied`: bytes that are copied together first."""

    operator: str
    lanes: int
    how: str
    copied: int


@dataclass(frozen=True)
class UnfusedGroup:
    """Operators of one kind that were not fused, and the reason."""

    operator: str
    lanes: int
    why: str


@dataclass(frozen=True)
class OperatorWork:
    """How many operators launch kernels, and the bytes that they read and write if each is a kernel of its own."""

    operators: int
    moved: int


@dataclass(frozen=True)
class Times:
    """Milliseconds that one graph takes, as written and as fused. It includes backward where the graph has one."""

    written: float
    fused: float


@dataclass
class GraphReport:
    """The report of one graph. `seconds` is the time that fusing took, without the compiler's own time."""

    found: list[FusedGroup]
    refused: list[UnfusedGroup]
    before: OperatorWork
    after: OperatorWork
    machine: LaunchCost
    seconds: float
    backward: bool
    wholes: list[PackedParameters] = field(default_factory=list)
    times: Times | None = None


@dataclass
class FusionReport:
    """The reports of all graphs so far. A call with new types or shapes may add a graph. `print(report)` shows it."""

    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def found(self) -> list[FusedGroup]:
        return [found for graph in self.graphs for found in graph.found]

    @property
    def refused(self) -> list[UnfusedGroup]:
        return [refused for graph in self.graphs for refused in graph.refused]

    def __rich__(self) -> RenderableType:
        return _shown(self)

    def __str__(self) -> str:
        return _as_text(self)

    def _repr_html_(self) -> str:
        return html_report(*_parts(self))


# ---- tables, one set for each graph ----


def _shown(report: FusionReport) -> RenderableType:
    return Group(*_parts(report))


def _parts(report: FusionReport) -> Iterator[Table | str]:
    """Yield tables and lines of rich's markup, in which what stands for itself is escaped."""
    if not report.graphs:
        yield "onepass.fuse: nothing compiled yet. Call the function first."
    for i, graph in enumerate(report.graphs):
        yield from _graph(graph, f"graph {i + 1} of {len(report.graphs)}")


def _as_text(report: FusionReport) -> str:
    out = io.StringIO()
    Console(file=out, width=_WIDTH, highlight=False).print(_shown(report))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _graph(graph: GraphReport, title: str) -> Iterator[Table | str]:
    passes = "forward and backward" if graph.backward else "forward"
    if graph.found:
        table = Table(title=f"onepass.fuse, {title} ({passes}): fused", title_justify="left", expand=False)
        for title, right in (("operator", 0), ("became one", 1), ("groups", 1), ("how", 0), ("copied", 1)):
            table.add_column(title, justify="right" if right else "left")
        for group, groups in Counter(graph.found).items():
            copied = _size(group.copied) if group.copied else "nothing"
            table.add_row(escape(group.operator), str(group.lanes), str(groups), escape(group.how), copied)
        yield table
    else:
        yield f"onepass.fuse, {title} ({passes}): nothing to fuse. It was compiled as torch.compile compiles it."
    if graph.refused:
        table = Table("operator", "times", "why", title="left as it was", title_justify="left")
        for (operator, why), times in _summed(graph.refused).items():
            table.add_row(escape(operator), str(times), escape(why))
        yield table
    yield escape("\n".join(_lines(graph)))


def _lines(graph: GraphReport) -> Iterator[str]:
    before, after = graph.before, graph.after
    moved = f"{_size(before.moved)} -> {_size(after.moved)}"
    yield f"operators {before.operators:,} -> {after.operators:,}, bytes they read and write {moved}"
    was, now = (graph.machine.predicted_us(work.operators, work.moved) for work in (before, after))
    yield f"predicted, were each a kernel: {was:,.0f} -> {now:,.0f} us; the compiler then fuses what follows one another"
    if graph.times is not None:
        yield f"measured: as written {graph.times.written:,.3f} ms, fused {graph.times.fused:,.3f} ms"
    if graph.wholes:
        laid = [whole for whole in graph.wholes if whole.why_copied is None]
        yield f"parameters side by side in memory: {sum(len(whole.places) for whole in laid)} in {len(laid)} tensors"
    for reason in sorted({whole.why_copied for whole in graph.wholes if whole.why_copied is not None}):
        yield f"parameters copied together at every call: {reason}"
    yield f"fusing took {graph.seconds:.2f} s of the compilation"


def _summed(refused: Iterable[UnfusedGroup]) -> Counter[tuple[str, str]]:
    times: Counter[tuple[str, str]] = Counter()
    for one in refused:
        times[one.operator, one.why] += one.lanes
    return times


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
