"""Draw the last step of profiles as timelines: CPU threads with their launches above GPU streams, gaps shaded."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from onepass.profiling.timeline import PictureBar
from onepass.profiling.trace import Interval, union
from onepass.runtime.errors import install_hint
from onepass.runtime.units import time

_COLOURS = {"operator": "#c9ced5", "launch": "#7d8590", "product": "#0b6e75", "kernel": "#6cc9c0", "copy": "#b8893b"}
_SAID = {
    "operator": "operator", "launch": "launch", "product": "matrix product", "kernel": "other kernel", "copy": "copy or fill",
}  # fmt: skip
_ON_DARK = ("product", "launch", "copy")
_INK, _QUIET, _GRID, _GAP = "#1c2128", "#6e7681", "#e6e9ec", "#f7d9d3"
_WIDTH, _LABELS, _RIGHT, _LANE, _TOP, _TITLE, _BOTTOM = 13.0, 1.75, 0.2, 0.44, 0.42, 0.52, 0.42  # inches
_DPI = 130
_PIXELS = (_WIDTH - _LABELS - _RIGHT) * _DPI
_LETTER = 7.2  # pixels: a letter's width at the labels' size and _DPI
_THIN, _BIN, _PALEST = 6, 2, 0.15  # pixels, pixels, opacity
_SHADED = 4  # pixels: narrower gaps are not shaded


class Timeline(NamedTuple):
    """What is drawn of one profile: the last step's bars under a title and a caption."""

    title: str
    caption: str
    bars: Sequence[PictureBar]


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw timelines one above the other on one time axis."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"a picture needs matplotlib: {install_hint('bench')}")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"path must end in .png, .svg or .pdf, but is {str(path)!r}")
    from matplotlib.figure import Figure

    shown = [timeline._replace(bars=_last_step(timeline.bars)) for timeline in timelines]
    span = max((bar.end for timeline in shown for bar in timeline.bars), default=1.0)
    heights = [_LANE * max(len(_lanes(timeline.bars)), 1) for timeline in shown]
    height = _TOP + sum(heights) + (_TITLE + _BOTTOM) * len(shown)
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    top = height - _TOP
    for timeline, tall in zip(shown, heights, strict=True):
        top -= _TITLE
        box = (_LABELS / _WIDTH, (top - tall) / height, (_WIDTH - _LABELS - _RIGHT) / _WIDTH, tall / height)
        _timeline(figure.add_axes(box), timeline.bars, span)
        _title(figure, timeline, (top + 0.12) / height)
        top -= tall + _BOTTOM
    _legend(figure, {bar.kind for timeline in shown for bar in timeline.bars}, height)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)


def _last_step(bars: Sequence[PictureBar]) -> list[PictureBar]:
    """Return the last step's bars, shifted to start at 0. It includes bars of the step before that end after the start."""
    last = max((bar.step for bar in bars), default=0)
    start = min((bar.start for bar in bars if bar.step == last), default=0.0)
    return [
        PictureBar(bar.lane, bar.name, max(bar.start - start, 0.0), bar.end - start, bar.kind, bar.step)
        for bar in bars
        if bar.end > start
    ]


def _lanes(bars: Sequence[PictureBar]) -> list[str]:
    """Return CPU threads in order, each followed by its launches, then GPU streams."""
    lanes = dict.fromkeys(bar.lane for bar in bars)
    return sorted(lanes, key=lambda lane: (lane.startswith("GPU"), [int(n) for n in re.findall(r"\d+", lane)], lane))


def _timeline(axis: Any, bars: Sequence[PictureBar], span: float) -> None:
    lanes = _lanes(bars)
    axis.set_frame_on(False)
    axis.set_xlim(0, span)
    axis.set_ylim(len(lanes) - 0.5 if lanes else 0.5, -0.5)
    axis.set_yticks(range(len(lanes)), lanes, fontsize=8.5, color=_INK)
    unit, size = ("ms", 1e3) if span >= 2e3 else ("us", 1.0)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / size:g}")
    axis.set_xlabel(unit, fontsize=8, color=_QUIET, loc="right", labelpad=0)
    axis.tick_params(length=0, labelcolor=_INK)
    axis.tick_params(axis="x", labelsize=8, labelcolor=_QUIET)
    axis.grid(axis="x", color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    if not bars:
        axis.text(span / 2, 0, "nothing was recorded", ha="center", va="center", fontsize=9, color=_QUIET)
    _gaps(axis, bars, lanes, span)
    for at, lane in enumerate(lanes):
        for kind, colour in _COLOURS.items():
            drawn = [(bar.start, bar.end) for bar in bars if bar.lane == lane and bar.kind == kind]
            _draw_lane(axis, at, drawn, colour, span / _PIXELS)
        _labels(axis, at, [bar for bar in bars if bar.lane == lane and bar.kind != "launch"], span)


def _draw_lane(axis: Any, at: int, intervals: Sequence[Interval], colour: str, pixel: float) -> None:
    """Draw wide bars with an edge between neighbours. Bars too thin for an edge are drawn as density: paler is sparser."""
    from matplotlib.colors import to_rgba

    high = (at - 0.36, 0.72)
    wide = [(start, end - start) for start, end in intervals if end - start >= _THIN * pixel]
    axis.broken_barh(wide, high, facecolors=colour, edgecolor="white", linewidth=0.5, zorder=3)
    parts = density([(start, end) for start, end in intervals if end - start < _THIN * pixel], _BIN * pixel)
    if parts:
        first, last = min(parts), max(parts)
        shades = [max(parts[i], _PALEST) if i in parts else 0.0 for i in range(first, last + 1)]
        box = (first * _BIN * pixel, (last + 1) * _BIN * pixel, at + 0.36, at - 0.36)
        axis.imshow([[to_rgba(colour, shade) for shade in shades]], extent=box, aspect="auto", interpolation="nearest", zorder=3)


def density(intervals: Sequence[Interval], width: float) -> dict[int, float]:
    """Return bin -> the fraction of it that the intervals cover, for bins of this width that are not empty."""
    shares: dict[int, float] = {}
    for start, end in union(intervals):
        for i in range(int(start / width), int(end / width) + 1):
            covered = min(end, (i + 1) * width) - max(start, i * width)
            if covered > 0:
                shares[i] = min(shares.get(i, 0.0) + covered / width, 1.0)
    return shares


def _gaps(axis: Any, bars: Sequence[PictureBar], lanes: Sequence[str], span: float) -> None:
    """Shade the times in which no kernel runs; without a GPU, no operator."""
    on_gpu = [i for i, lane in enumerate(lanes) if lane.startswith("GPU")]
    working = [bar for bar in bars if bar.lane.startswith("GPU")] if on_gpu else bars
    at = on_gpu or list(range(len(lanes)))
    busy = union((bar.start, bar.end) for bar in working)
    for (_, start), (end, _) in pairwise(busy):
        wide = (end - start) / span * _PIXELS
        if wide < _SHADED:
            continue
        axis.broken_barh([(start, end - start)], (at[0] - 0.44, at[-1] - at[0] + 0.88), facecolors=_GAP, linewidth=0, zorder=2)
        if wide > 9 * _LETTER:
            axis.text(
                (start + end) / 2, at[-1] + 0.02, time(end - start), ha="center", va="center", fontsize=7, color=_INK, zorder=4
            )


def _labels(axis: Any, at: int, bars: Sequence[PictureBar], span: float) -> None:
    for bar in bars:
        letters = int((bar.end - bar.start) / span * _PIXELS / _LETTER)
        name = bar.name.removeprefix("aten::")
        if letters >= 4:
            label = name if len(name) <= letters - 1 else name[: letters - 2] + "…"
            colour = "white" if bar.kind in _ON_DARK else _INK
            axis.text((bar.start + bar.end) / 2, at, label, ha="center", va="center", fontsize=6.5, color=colour, zorder=5)


def _title(figure: Any, timeline: Timeline, at: float) -> None:
    figure.text(0.2 / _WIDTH, at, timeline.title, fontsize=11.5, weight="bold", color=_INK, va="bottom")
    figure.text(_LABELS / _WIDTH + 0.08, at, timeline.caption, fontsize=8.5, color=_QUIET, va="bottom")


def _legend(figure: Any, kinds: set[str], height: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=_SAID[kind]) for kind, colour in _COLOURS.items() if kind in kinds]
    handles.append(Patch(color=_GAP, label="nobody works"))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.1 / _WIDTH, 1 - 0.08 / height), ncols=len(handles), frameon=False,
        fontsize=8.5, handlelength=1.4, columnspacing=1.4, borderpad=0.2, labelcolor=_INK,
    )  # fmt: skip
