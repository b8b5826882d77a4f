"""What was fused, what was left and why, and what that is worth: `fused.report()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onepass.fusion.cost import LaunchCost
from onepass.fusion.side_by_side import PackedParameters

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class FusedGroup:
    """Operators that became one; copied: bytes that had to be put together first."""

    operator: str
    lanes: int
    how: str
    copied: int


@dataclass(frozen=True)
class UnfusedGroup:
    """Operators of one kind that stayed as they were."""

    operator: str
    lanes: int
    why: str


@dataclass(frozen=True)
class OperatorWork:
    """Operators that start work of their own, and the bytes they read and write, were each a kernel."""

    operators: int
    moved: int


@dataclass(frozen=True)
class Times:
    """Milliseconds of a graph by itself, with its backward where it has one: as written, and fused."""

    written: float
    fused: float


@dataclass
class GraphReport:
    """One graph that the compiler was given; `seconds` is what fusing it took, the compiler's own time aside."""

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
    """Of all graphs so far: a call with new types or shapes may add one. `print(report)` shows it."""

    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def found(self) -> list[FusedGroup]:
        return [found for graph in self.graphs for found in graph.found]

    @property
    def refused(self) -> list[UnfusedGroup]:
        return [refused for graph in self.graphs for refused in graph.refused]

    def __rich__(self) -> RenderableType:
        from onepass.fusion.report_table import shown  # rich, which an import of onepass doesn't load

        return shown(self)

    def __str__(self) -> str:
        from onepass.fusion.report_table import as_text

        return as_text(self)
