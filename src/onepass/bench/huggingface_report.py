"""Print the run: a line as each contender is done, and a table with the acceptance bars as each case is done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onepass.bench.huggingface_cases import EAGER, FIGURES, AcceptanceBar, ModelCase, ModelResult, at_most, reached

_WIDTH = 118  # if the output is not a terminal


class ModelReport:
    def __init__(self) -> None:
        self.console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
        self.progress = Console(stderr=True, highlight=False)

    def say(self, text: str | Table = "") -> None:
        self.console.print(text)
        self.console.file.flush()  # users follow a log while it grows

    def header(self, facts: dict[str, Any]) -> None:
        has = facts["versions"]
        peers = ", ".join(f"{name} {version}" for name, version in has["peers"].items()) or "no peers"
        self.say(f"[bold]onepass {has['onepass']}[/] ({facts['commit'] or 'no checkout'}) on [bold]{escape(facts['device'])}[/]")
        self.say(
            f"torch {has['torch']}, triton {has['triton'] or 'not installed'}, transformers {has['transformers']}, "
            f"{peers}; bf16, AdamW, losses of {facts['steps']} steps\n"
        )

    def begins(self, case: ModelCase, name: str) -> None:
        self.progress.print(f"{case.name}: {name}", style="dim")

    def row(self, case: ModelCase, found: ModelResult) -> None:
        """Print a contender's result at once. The table follows when all of its rows are done, and shows what was skipped."""
        if found.status != "ok":
            self.say(f"{case.name}, {found.contender}: {found.status}: {escape(found.message or '')}")
            return
        parts = [f"{found.ms:.1f} ms a step"]
        if found.peak_gib is not None:
            parts.append(f"{found.peak_gib:.2f} GiB")
        if found.loss_apart is not None:
            parts.append(f"losses apart {found.loss_apart:.1e}")
        self.say(f"{case.name}, {found.contender}: {', '.join(parts)} [dim](all of it {found.seconds:.0f} s)[/]")

    def table(self, case: ModelCase, rows: list[ModelResult]) -> None:
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=True, header_style="dim", title_justify="left", title_style="")
        table.title = f"\n[bold]{case.title}[/]"
        table.add_column("", min_width=25, no_wrap=True)
        for title, width, _ in _COLUMNS:
            table.add_column(title, min_width=width, justify="right", no_wrap=True)
        eager = next((row for row in rows if row.contender == EAGER), None)
        for row in rows:
            cells = [cell(case, row, eager) for *_, cell in _COLUMNS] if row.status == "ok" else [_failed(row)]
            table.add_row(("> " if row.mine else "  ") + row.contender, *cells, style="bold cyan" if row.mine else "")
        self.say(table)
        for row in rows:
            if row.status != "ok":
                self.say(f"  [dim]{row.contender}: {escape(row.message or '')}[/]")
        tried = {row.contender for row in rows if row.status != "skipped"}
        for bar in case.bars:
            if bar.contender in tried:
                self.say(f"  {_said(bar, rows)}")
        self.say()


def _failed(row: ModelResult) -> str:
    return f"[red]{row.status}[/]" if row.status == "error" else f"[dim]{row.status}[/]"


def _said(bar: AcceptanceBar, rows: list[ModelResult]) -> str:
    what, digits = FIGURES[bar.figure]
    most = f"{bar.most:.2f} x {bar.of}" if bar.of else format(at_most(bar, rows), digits)
    asked = f"{bar.contender}, {what} at most {most}: "
    figure = reached(bar, rows)
    if figure is None:
        return f"[dim]{asked}not known[/]"
    value, enough = figure
    verdict = "[green]reached[/]" if enough else "[red]not reached[/]"
    return f"{asked}{format(value, '.4f' if bar.of else digits)}, {verdict}"


# ---- the columns ----

_Cell = Callable[[ModelCase, ModelResult, ModelResult | None], str]


def _number(name: str, digits: str) -> _Cell:
    return lambda case, row, eager: "" if (value := getattr(row, name)) is None else format(value, digits)


def _of_eager(case: ModelCase, row: ModelResult, eager: ModelResult | None) -> str:
    return f"{row.ms / eager.ms:.3f}" if row.ms and eager and eager.ms else ""


def _speed(case: ModelCase, row: ModelResult, eager: ModelResult | None) -> str:
    return f"{case.tokens / row.ms * 1e3:,.0f}" if row.ms else ""


_COLUMNS: tuple[tuple[str, int, _Cell], ...] = (
    ("ms a step", 9, _number("ms", ".1f")),
    ("of eager", 8, _of_eager),
    ("tokens/s", 9, _speed),
    ("CPU ms", 7, _number("cpu_ms", ".1f")),
    ("peak GiB", 8, _number("peak_gib", ".2f")),
    ("first s", 7, _number("first_s", ".1f")),
    ("losses apart", 12, _number("loss_apart", ".1e")),
    ("grad error", 10, _number("worst_error", ".1e")),
    ("of eager's", 10, _number("error_of_eager", ".2f")),
)
