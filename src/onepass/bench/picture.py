"""Draw the run: for each case, every contender's fraction of the copy bandwidth, forward and backward."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from onepass.bench.model import CaseResult, Measured
from onepass.bench.options import short
from onepass.bench.record import BenchRun, commit, device_name, versions

# forward and backward: onepass in colour, peers in grey, the plain copy in sand
_OURS, _PEER, _COPY = ("#0b6e75", "#6cc9c0"), ("#7d8590", "#c9ced5"), ("#b8893b", "#ead6ae")
_INK, _QUIET, _GRID, _WRONG = "#1c2128", "#6e7681", "#e6e9ec", "#c0392b"
_ACROSS = 5  # cases side by side
_LABELS, _GAP, _TOP, _BOTTOM, _ROW, _TITLE = 1.55, 0.28, 0.85, 0.30, 0.40, 0.60  # inches
_BAR = 0.40  # a bar's height, as a fraction of a row
_FARTHEST = 1.25  # longer bars, of small tensors that stay in a cache, are cut and marked, so that the others stay readable
_CUT = (0.94, 0.97)  # the positions of the mark, as fractions of the limit


def draw(run: BenchRun, path: Path) -> None:
    from matplotlib.figure import Figure

    cases = run.bound_by_memory()
    ops = list(dict.fromkeys(result.case.op for result in cases))
    lines = _lines(cases)
    across = max(len(line) for line in lines)
    cell = 2.9 if across > 2 else 7.4 / across
    heights = [_ROW * (len(line[0].rows) + 1) for line in lines]
    width = _LABELS + across * (cell + _GAP) + 0.1
    height = _TOP + sum(heights) + _TITLE * len(lines) + _BOTTOM
    figure = Figure(figsize=(width, height), facecolor="white")
    farthest = max([1.0, *(f for result in cases for row in (*result.rows, result.copy) for f in _fractions(row))])
    limit = min(farthest, _FARTHEST) * 1.02
    top = height - _TOP
    for line, tall in zip(lines, heights, strict=True):
        top -= _TITLE
        for i, result in enumerate(line):
            left = _LABELS + i * (cell + _GAP)
            axis = figure.add_axes((left / width, (top - tall) / height, cell / width, tall / height))
            _case(axis, result, limit, first=i == 0)
        name = line[0].case.variant if len(ops) == 1 else f"{line[0].case.op}: {line[0].case.variant}"
        figure.text(0.2 / width, (top + 6 / 72) / height, name, fontsize=11.5, weight="bold", color=_INK)
        top -= tall
    _heading(figure, run, ", ".join(ops), width, height, cut=farthest > limit)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _lines(cases: list[CaseResult]) -> list[list[CaseResult]]:
    """Group the cases into lines of the picture. A line has cases of one variant, which have the same contenders."""
    lines = []
    for _, group in groupby(cases, key=lambda result: (result.case.op, result.case.variant)):
        same = list(group)
        lines += [same[i : i + _ACROSS] for i in range(0, len(same), _ACROSS)]
    return lines


def _case(axis: Any, result: CaseResult, limit: float, first: bool) -> None:
    """Draw a row of two bars for each contender, and a last row for a plain copy of as many bytes."""
    rows = [*result.rows, result.copy]
    title = " \N{MULTIPLICATION SIGN} ".join(f"{n:,}" for n in result.case.shape)
    axis.annotate(title, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=10, color=_INK)
    axis.set_frame_on(False)
    axis.set_xlim(0, limit)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", ".5", "", "1"], fontsize=8, color=_QUIET)
    names = [*(row.contender for row in result.rows), "plain copy"]
    axis.set_yticks(range(len(rows)), names if first else [])
    axis.tick_params(length=0)
    axis.grid(axis="x", color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.axvline(1.0, color=_INK, linewidth=0.9, zorder=2)
    for at, row in enumerate(rows):
        _bars(axis, at, row, _OURS if row.ours else _COPY if row is result.copy else _PEER, limit)
    for label, row in zip(axis.get_yticklabels(), rows, strict=False):
        label.set(fontsize=9.5, color=_OURS[0] if row.ours else _COPY[0] if row is result.copy else _INK)
        label.set_fontweight("bold" if row.ours else "normal")


def _bars(axis: Any, at: int, row: Measured, colours: tuple[str, str], limit: float) -> None:
    if row.status != "ok":
        axis.text(limit * 0.02, at, row.status, va="center", fontsize=8.5, color=_WRONG, style="italic")
    for fraction, colour, offset, on_it in zip(_fractions(row), colours, (-_BAR / 2, _BAR / 2), ("white", _INK), strict=False):
        axis.barh(at + offset, fraction, height=_BAR, color=colour, zorder=3)
        inside = fraction > 0.2 * limit
        if fraction > limit:
            _cut(axis, at + offset, limit)
        end = fraction if fraction <= limit else _CUT[0] * limit
        axis.annotate(
            f"{fraction:.2f}", (end, at + offset), (-4 if inside else 4, -0.5), textcoords="offset points",
            ha="right" if inside else "left", va="center", fontsize=7.5, color=on_it if inside else _INK,
            weight="bold" if row.ours else "normal", zorder=4,
        )  # fmt: skip


def _cut(axis: Any, at: float, limit: float) -> None:
    """Draw two white strokes through a bar that is longer than the picture."""
    for right in _CUT:
        axis.plot(
            [(right - 0.012) * limit, (right + 0.012) * limit], [at + _BAR / 2, at - _BAR / 2], color="white", linewidth=1.8,
            zorder=5, solid_capstyle="butt",
        )  # fmt: skip


def _fractions(row: Measured) -> list[float]:
    return [f for f in (row.forward_of_copy, row.backward_of_copy) if f is not None]


def _heading(figure: Any, run: BenchRun, ops: str, width: float, height: float, cut: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    has, at = versions(), commit()
    made = f"onepass {has['onepass']}" + (f" at {at}" if at else "")
    small = f"{device_name(run.device)}; copy {run.ceilings.copy_gbs:,.0f} GB/s; torch {has['torch']}; {made}; {run.date[:10]}"
    left = 0.2 / width
    title = f"{ops}: fraction of the copy bandwidth, {short(run.dtype)}"
    figure.text(left, 1 - 0.36 / height, title, fontsize=15, weight="bold", color=_INK)
    figure.text(left, 1 - 0.61 / height, small, fontsize=9, color=_QUIET)
    handles = [
        Patch(color=_OURS[0], label="forward"),
        Patch(color=_OURS[1], label="backward"),
        Line2D([], [], color=_INK, linewidth=0.9, label="a large copy"),
    ]
    if cut:
        label = "cut: reaches as far as its number says"
        handles.append(Patch(facecolor=_PEER[0], edgecolor="white", hatch="//", label=label))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(left - 0.07 / width, 1 - 0.68 / height), ncols=4, frameon=False,
        fontsize=9, handlelength=1.4, columnspacing=1.4, borderpad=0.2, labelcolor=_INK,
    )  # fmt: skip
