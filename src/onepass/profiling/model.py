"""What a profile holds, as plain data: figures of one step, its rows, gaps, words, and the timeline for a picture."""

from __future__ import annotations

import gzip
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

VERDICTS = ("launch-bound", "bandwidth-bound", "compute-bound", "mixed")


@dataclass(frozen=True)
class Limits:
    """What the machine can do at most: bytes a second, and flops a second by the type of a product's operands."""

    copy_gbs: float | None = None
    tflops: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorRow:
    """One operator, or one kernel that no operator launched; all its calls together, a step."""

    name: str
    calls: float
    us: float  # on a GPU that of its kernels, on a CPU its own, without the operators that have rows of their own
    share: float  # of all rows' time
    kernels: dict[str, float] = field(default_factory=dict)  # how many of each, on a GPU
    bytes: float | None = None  # None: not known
    flops: float | None = None
    gbs: float | None = None
    tflops: float | None = None
    of_copy: float | None = None  # the fraction of the copy bandwidth
    of_peak: float | None = None  # the fraction of what a large matrix product of that type reaches

    @property
    def near(self) -> str | None:
        """Which ceiling it is near to, if any: at half of it or more."""
        nearest = max(self.of_copy or 0.0, self.of_peak or 0.0)
        if nearest < NEAR:
            return None
        return "bandwidth" if nearest == self.of_copy else "compute"


NEAR = 0.5


@dataclass(frozen=True)
class Gap:
    """Nobody runs: between what and what, how often a step, and how long together."""

    before: str
    after: str
    count: float
    us: float
    longest_us: float


@dataclass(frozen=True)
class Suggestion:
    """A fusion of ours that applies to what was seen."""

    call: str
    saw: str
    us: float  # a step, of what it would replace or, for a graph, save at most

    def __str__(self) -> str:
        return f"{self.call}: {self.saw}"


@dataclass(frozen=True)
class PictureBar:
    """Something in a picture: operators and kernels, launches of them, copies."""

    lane: str
    name: str
    start: float
    end: float
    kind: str  # "operator" | "launch" | "product" | "kernel" | "copy"
    step: int


@dataclass(frozen=True)
class Profile:
    """What a step of a call does with the machine. Times in microseconds, everything a step, unless said otherwise."""

    device: str
    on_gpu: bool
    steps: int  # that were recorded
    wall_us: float  # median, without the profiler; where it could not be timed without it, `timed` is False
    wall_range: tuple[float, float]
    timed: bool
    traced_us: float  # with the profiler, which slows the CPU
    host_us: float | None  # until the call returns, its kernels queued
    busy_us: float  # at least one kernel runs; on a CPU, at least one operator
    idle_us: float  # the rest of wall_us
    gaps: tuple[Gap, ...]
    gap_count: float
    gap_us: float
    short_gap_us: float  # in gaps that are no longer than a launch or two may take
    kernels: float
    launches: float
    launch_us: float  # one, in the driver; on a CPU, an operator's median time
    graphs: float  # launches of CUDA graphs
    waits: float  # the CPU waits for the GPU
    peak_bytes: int | None  # the most that was allocated during a step beyond what was before it
    limits: Limits
    rows: tuple[OperatorRow, ...]
    same_steps: bool  # the same operators with the same shapes in each
    verdict: str
    reasons: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    bars: tuple[PictureBar, ...] = field(repr=False)
    packed_trace: bytes = field(repr=False)  # what torch exported, as gzip

    @property
    def idle_share(self) -> float:
        return self.idle_us / self.wall_us if self.wall_us else 0.0

    @property
    def rows_us(self) -> float:
        return sum(row.us for row in self.rows)

    @property
    def bytes(self) -> float:
        """Those that are known."""
        return sum(row.bytes or 0.0 for row in self.rows)

    def kernel_names(self) -> dict[str, float]:
        """How many of each a step; on a CPU, operators."""
        if not self.on_gpu:
            return {row.name: row.calls for row in self.rows}
        found: dict[str, float] = {}
        for row in self.rows:
            for name, count in row.kernels.items():
                found[name] = found.get(name, 0.0) + count
        return found

    def table(self, top: int = 15, width: int | None = None) -> str:
        """What ran, the largest `top` rows by time, and the figures of the whole; `width` in characters."""
        from onepass.profiling import table

        return table.text(lambda console: table.show_figures(self, console, _positive("top", top)), width)

    def words(self) -> str:
        """What the step is bound by, why, and which of our fusions apply."""
        return "\n".join([f"{self.verdict}: {self.reasons[0]}", *self.reasons[1:], *map(str, self.suggestions)])

    def __str__(self) -> str:
        from onepass.profiling import table

        return table.text(lambda console: table.show(self, console))

    def picture(self, path: str | Path) -> None:
        """The last step as a timeline: CPU threads above GPU streams. Needs matplotlib."""
        from onepass.profiling import picture

        picture.draw([("", self)], Path(path))

    def trace(self, path: str | Path) -> None:
        """What torch.profiler exported, as a Chrome trace (.json, .json.gz), for Perfetto or chrome://tracing."""
        path = Path(path)
        if not path.name.endswith((".json", ".json.gz")):
            raise ValueError(f"path must end in .json or .json.gz, but is {str(path)!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.packed_trace if path.suffix == ".gz" else gzip.decompress(self.packed_trace))

    def as_dict(self) -> dict[str, Any]:
        """All figures and words, for a JSON file; the timeline and the trace stay out."""
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
    """Two profiles side by side. Ratios are before over after: above 1 it got better."""

    before: Profile
    after: Profile

    @property
    def speedup(self) -> float:
        return self.before.wall_us / self.after.wall_us

    def gone(self) -> dict[str, float]:
        """Kernels (on a CPU: operators) of before that are fewer after, and by how many a step."""
        return _fewer(self.before.kernel_names(), self.after.kernel_names())

    def came(self) -> dict[str, float]:
        return _fewer(self.after.kernel_names(), self.before.kernel_names())

    def __str__(self) -> str:
        from onepass.profiling import table

        return table.text(lambda console: table.show_comparison(self, console))

    def picture(self, path: str | Path) -> None:
        """Both timelines on one time axis, one above the other. Needs matplotlib."""
        from onepass.profiling import picture

        picture.draw([("before", self.before), ("after", self.after)], Path(path))


def compare(before: Profile, after: Profile) -> Comparison:
    """Two profiles side by side: time, launches, kernels that went and came, gaps, bytes, memory.

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
