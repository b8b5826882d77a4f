"""Results as a notebook shows them: lines and tables in HTML, escaped, with the page's own colours, so that dark ones fit too."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_LINE = "margin: 0.2em 0; white-space: pre-wrap"
_TABLE = "border-collapse: collapse; margin: 0.6em 0"
_CAPTION = "text-align: left; font-weight: bold; padding: 0.2em 0"
_CELL = "padding: 0.15em 0.9em 0.15em 0; vertical-align: top; white-space: pre-wrap; text-align: "
_HEADING = "border-bottom: 1px solid; "  # of the text's colour


def html_report(*parts: str | Table) -> str:
    """Return lines and tables as HTML. Both are rich's, of which the markup goes."""
    return f"<div>{''.join(_line(part) if isinstance(part, str) else _table(part) for part in parts)}</div>"


def _text(markup: Any) -> str:
    from rich.text import Text

    return escape(Text.from_markup(str(markup)).plain)


def _line(markup: str) -> str:
    return f'<div style="{_LINE}">{_text(markup)}</div>' if markup else ""


def _table(table: Table) -> str:
    ends = ["right" if column.justify == "right" else "left" for column in table.columns]
    headings = [_cell("th", _HEADING, end, column.header) for end, column in zip(ends, table.columns, strict=True)]
    rows = [
        "".join(_cell("td", "", end, cell) for end, cell in zip(ends, row, strict=True))
        for row in zip(*(column.cells for column in table.columns), strict=True)
    ]
    caption = f'<caption style="{_CAPTION}">{_text(table.title)}</caption>' if table.title else ""
    head, body = f"<tr>{''.join(headings)}</tr>", "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<table style="{_TABLE}">{caption}<thead>{head}</thead><tbody>{body}</tbody></table>'


def _cell(tag: str, style: str, end: str, markup: Any) -> str:
    return f'<{tag} style="{style}{_CELL}{end}">{_text(markup)}</{tag}>'
