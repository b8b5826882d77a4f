"""The result of `fused.report()`: what was fused, what was not and why, with predicted and measured times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onepass.fusion.cost import LaunchCost
from onepass.fusion.side_by_side import PackedParameters

if TYPE_CHECKING:
    from rich.console import RenderableType


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
        from onepass.fusion.report_table import shown  # imported late: `import onepass` must not load rich

        return shown(self)

    def __str__(self) -> str:
        from onepass.fusion.report_table import as_text

        return as_text(self)
