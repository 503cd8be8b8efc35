"""Tables for terminals of any width: no word of a cell is ever cut.

What does not fit beside the others goes on a line of its own below its row (the layout), and then
columns are left out, the least telling first. Widths are in characters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import TextWrapper
from typing import TypeVar

from rich.text import Text

Item = TypeVar("Item")
GAP = 2
INDENT = 4  # of what stands below its row
READABLE = 26  # a column that wraps is not made narrower than this while it can have its own line


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column.

    right: aligned right, for numbers.
    wraps: may take several lines, broken between words.
    below: goes under its row where there is no room beside the others.
    drop: columns are left out in the order of this number where even that does not help; None:
        never.
    """

    name: str
    right: bool = False
    wraps: bool = False
    below: bool = False
    drop: int | None = None


# of a table of items: each with the cell that it shows of an item
Columns = Sequence[tuple[Column, Callable[[Item], str]]]
Filled = tuple[Column, list[str]]  # a column with its cells


def number(name: str, drop: int | None = None) -> Column:
    return Column(name=name, right=True, drop=drop)


def grid(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    bold: Sequence[bool] = (),
    gap: int = GAP,
) -> Text:
    """The table as lines of at most `width` characters, or of the longest word where that is wider.

    rows: cells in the order of the columns.
    bold: which rows are bold.
    gap: blanks between columns.
    """
    table = [(column, [_row(row[i]) for row in rows]) for i, column in enumerate(columns)]
    shown, under = _fitting(table, width, gap)
    widths = _widths(shown, width, gap)
    heads = [wrapped(column.name, size) for (column, _), size in zip(shown, widths, strict=True)]
    lines = [Text(line, style="bold") for line in _line(heads, shown, widths, gap)]
    lines.append(Text("─" * min(width, sum(widths) + gap * (len(widths) - 1)), style="dim"))
    for index in range(len(rows)):
        style = "bold" if index < len(bold) and bold[index] else ""
        row = [
            wrapped(cells[index], size) if column.wraps else [cells[index]]
            for (column, cells), size in zip(shown, widths, strict=True)
        ]
        found = _line(row, shown, widths, gap)
        for _, cells in under:
            found += [" " * INDENT + line for line in wrapped(cells[index], width - INDENT)]
        lines += [Text(line, style=style) for line in found]
    return Text("\n").join(lines)


def listed(
    columns: Columns[Item], items: Sequence[Item], width: int, *, bold: Sequence[bool] = ()
) -> Text:
    """The table of these items, one row each."""
    rows = [[cell(item) for _, cell in columns] for item in items]
    return grid([column for column, _ in columns], rows, width, bold=bold)


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width`, broken at spaces; a longer word has a line of its own."""
    words = TextWrapper(max(width, 1), break_long_words=False, break_on_hyphens=False)
    return [line for part in text.split("\n") for line in words.wrap(part) or [""]]


def _row(cell: str) -> str:
    """A table cell as one line; texts of earlier versions may contain line breaks."""
    return "".join(c if c.isprintable() else " " for c in cell)


def _fitting(table: list[Filled], width: int, gap: int) -> tuple[list[Filled], list[Filled]]:
    """(columns beside each other, columns below their row)."""
    shown, under = list(table), list[Filled]()
    below = [one for one in reversed(table) if one[0].below]
    others = [one for one in table if not one[0].below and one[0].drop is not None]
    for one in (*below, *sorted(others, key=lambda one: one[0].drop or 0)):
        if _least(shown, gap) <= width:
            break
        shown = [other for other in shown if other is not one]
        under = [one, *under] if one[0].below else under
    return shown, under


def _least(table: list[Filled], gap: int) -> int:
    """Width below which these columns cannot stand beside each other."""
    return sum(_narrowest(*one) for one in table) + gap * (len(table) - 1)


def _narrowest(column: Column, cells: Sequence[str]) -> int:
    whole = max((len(cell) for cell in cells), default=0)
    if column.wraps:
        words = max((len(word) for cell in cells for word in cell.split()), default=0)
        whole = max(words, min(whole, READABLE if column.below else 0))
    return max(whole, *(len(word) for word in column.name.split(" ")))


def _widths(table: list[Filled], width: int, gap: int) -> list[int]:
    """Widths of the columns. The rest goes to those that wrap, or whose heading does, in turn."""
    widths = [_narrowest(*one) for one in table]
    left = width - sum(widths) - gap * (len(widths) - 1)
    natural = [max(len(cell) for cell in (column.name, *cells)) for column, cells in table]
    while left > 0 and (
        growing := [index for index, size in enumerate(widths) if size < natural[index]]
    ):
        for index in growing[:left]:
            widths[index] += 1
        left -= min(left, len(growing))
    return widths


def _line(
    row: Sequence[Sequence[str]], table: list[Filled], widths: Sequence[int], gap: int
) -> list[str]:
    """One row of the table: as many lines as its tallest cell."""
    lines = []
    for index in range(max((len(cell) for cell in row), default=0)):
        parts = []
        for cell, (column, _), size in zip(row, table, widths, strict=True):
            text = cell[index] if index < len(cell) else ""
            parts.append(text.rjust(size) if column.right else text.ljust(size))
        lines.append((" " * gap).join(parts).rstrip())
    return lines
