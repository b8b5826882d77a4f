"""The data of a profile: figures of one step, operator rows, gaps, sentences, and the bars of the timeline."""

from __future__ import annotations

import gzip
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

VERDICTS = ("launch-bound", "bandwidth-bound", "compute-bound", "mixed")


@dataclass(frozen=True)
class Limits:
    """The machine's ceilings: copy bandwidth, and the matrix product rate for each dtype of the operands."""

    copy_gbs: float | None = None
    tflops: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorRow:
    """All calls of one operator, or of one kernel that no operator launched, per step."""

    name: str
    calls: float
    us: float  # on a GPU the time of its kernels; on a CPU its own time, without inner operators that have their own rows
    share: float  # of the time of all rows
    kernels: dict[str, float] = field(default_factory=dict)  # name -> launches, on a GPU
    bytes: float | None = None  # None: unknown
    flops: float | None = None
    gbs: float | None = None
    tflops: float | None = None
    of_copy: float | None = None  # gbs as a fraction of the copy bandwidth
    of_peak: float | None = None  # tflops as a fraction of the rate of a large matrix product of that dtype

    @property
    def near(self) -> str | None:
        """The ceiling of which this row reaches at least NEAR, if any: bandwidth or compute."""
        nearest = max(self.of_copy or 0.0, self.of_peak or 0.0)
        if nearest < NEAR:
            return None
        return "bandwidth" if nearest == self.of_copy else "compute"


NEAR = 0.5


@dataclass(frozen=True)
class Gap:
    """All gaps between one pair of kernels or operators: the pair, their count and total time per step, and the longest."""

    before: str
    after: str
    count: float
    us: float
    longest_us: float


@dataclass(frozen=True)
class Suggestion:
    """A onepass fusion that applies to the recorded operators."""

    call: str
    saw: str
    us: float  # per step: the time of the operators that it replaces; for a CUDA graph, the most that it can save

    def __str__(self) -> str:
        return f"{self.call}: {self.saw}"


@dataclass(frozen=True)
class PictureBar:
    """One bar of the timeline: an operator, a kernel, a launch or a copy."""

    lane: str
    name: str
    start: float
    end: float
    kind: str  # "operator" | "launch" | "product" | "kernel" | "copy"
    step: int


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
        found: dict[str, float] = {}
        for row in self.rows:
            for name, count in row.kernels.items():
                found[name] = found.get(name, 0.0) + count
        return found

    def table(self, top: int = 15, width: int | None = None) -> str:
        """Return the figures of the step and the `top` rows with the most time, as text of `width` characters."""
        from onepass.profiling import table

        return table.text(lambda console: table.show_figures(self, console, _positive("top", top)), width)

    def words(self) -> str:
        """Return what bounds the step, why, and which onepass fusions apply."""
        return "\n".join([f"{self.verdict}: {self.reasons[0]}", *self.reasons[1:], *map(str, self.suggestions)])

    def __str__(self) -> str:
        from onepass.profiling import table

        return table.text(lambda console: table.show(self, console))

    def picture(self, path: str | Path) -> None:
        """Draw the last step as a timeline, CPU threads above GPU streams. Needs matplotlib."""
        from onepass.profiling import picture

        picture.draw([("", self)], Path(path))

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


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, but is {value!r}")
    return value


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
        from onepass.profiling import table

        return table.text(lambda console: table.show_comparison(self, console))

    def picture(self, path: str | Path) -> None:
        """Draw both timelines on one time axis, one above the other. Needs matplotlib."""
        from onepass.profiling import picture

        picture.draw([("before", self.before), ("after", self.after)], Path(path))


def compare(before: Profile, after: Profile) -> Comparison:
    """Compare two profiles: time, launches, kernels that went and came, gaps, bytes, memory.

    before = onepass.profile(step)
    after = onepass.profile(onepass_step)
    print(onepass.compare(before, after))
    """
    for name, given in (("before", before), ("after", after)):
        if not isinstance(given, Profile):
            raise TypeError(f"{name} must be a Profile, as onepass.profile returns it, but is a {type(given).__name__}")
    return Comparison(before, after)


def _fewer(many: dict[str, float], few: dict[str, float]) -> dict[str, float]:
    left = {name: count - few.get(name, 0.0) for name, count in many.items()}
    return {name: count for name, count in sorted(left.items(), key=lambda item: -item[1]) if count > 0}
