"""HTML of answers and traces in a notebook. Texts come from models and processors: all of them are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MAX_TEXT = 20_000
"""Most characters of a text in a cell."""
MAX_ROWS = 200
"""Most rows of a table."""

_CELL = "padding: 0 0.6em; text-align: {}; white-space: pre; font-family: monospace"


def text(value: str) -> str:
    """Return a text as an element that keeps its line breaks; the beginning, if it is long."""
    shown = value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}… ({len(value):,} characters)"
    return f'<div style="white-space: pre-wrap">{escape(shown)}</div>'


def small(value: str) -> str:
    """Return a line in small, muted letters."""
    return f'<div style="font-size: 85%; opacity: 0.75">{escape(value)}</div>'


def preformatted(value: str) -> str:
    """Return the end of a text in a fixed-width font."""
    shown = value if len(value) <= MAX_TEXT else f"…{value[-MAX_TEXT:]}"
    return f'<pre style="font-size: 85%; max-height: 16em; overflow: auto">{escape(shown)}</pre>'


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], marked: Iterable[int] = ()) -> str:
    """Return a table. The first column is aligned left, the others right.

    Args:
        titles: of the columns.
        rows: the cells, as text.
        marked: indices of rows to show in bold.
    """
    bold = set(marked)
    lines = ["<table>", f"<thead><tr>{_cells('th', titles)}</tr></thead>", "<tbody>"]
    for number, cells in enumerate(rows[:MAX_ROWS]):
        style = ' style="font-weight: bold"' if number in bold else ""
        lines.append(f"<tr{style}>{_cells('td', cells)}</tr>")
    lines.append("</tbody></table>")
    if len(rows) > MAX_ROWS:
        lines.append(small(f"and {len(rows) - MAX_ROWS:,} more"))
    return "\n".join(lines)


def details(summary: str, content: str) -> str:
    """Return content that is hidden until its summary is clicked."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _cells(tag: str, texts: Sequence[str]) -> str:
    styles = [_CELL.format("left" if number == 0 else "right") for number in range(len(texts))]
    pairs = zip(texts, styles, strict=True)
    return "".join(f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell, style in pairs)
