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
    # what an earlier version stored may hold a line's end, which would look like a row
    rows = [["".join(c if c.isprintable() else " " for c in cell) for cell in row] for row in rows]
    shown, under = _fitting(columns, rows, width, gap)
    widths = _widths(columns, rows, shown, width, gap)
    heads = [wrapped(columns[i].name, size) for i, size in zip(shown, widths, strict=True)]
    lines = [Text(line, style="bold") for line in _line(heads, columns, shown, widths, gap)]
    lines.append(Text("─" * min(width, sum(widths) + gap * (len(widths) - 1)), style="dim"))
    for index, row in enumerate(rows):
        style = "bold" if index < len(bold) and bold[index] else ""
        cells = [
            wrapped(row[i], size) if columns[i].wraps else [row[i]]
            for i, size in zip(shown, widths, strict=True)
        ]
        lines += [Text(line, style=style) for line in _line(cells, columns, shown, widths, gap)]
        for i in under:
            lines += [
                Text(" " * INDENT + line, style=style) for line in wrapped(row[i], width - INDENT)
            ]
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


def _fitting(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, gap: int
) -> tuple[list[int], list[int]]:
    """(columns beside each other, columns below their row)."""
    shown = list(range(len(columns)))
    if _least(columns, rows, shown, gap) <= width:
        return shown, []
    under: list[int] = []
    for i in [i for i in reversed(shown) if columns[i].below]:
        if _least(columns, rows, shown, gap) <= width:
            break
        shown.remove(i)
        under.insert(0, i)
    leaving = sorted(
        (i for i in shown if columns[i].drop is not None), key=lambda i: columns[i].drop or 0
    )
    for i in leaving:
        if _least(columns, rows, shown, gap) <= width:
            break
        shown.remove(i)
    return shown, under


def _least(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], shown: Sequence[int], gap: int
) -> int:
    """Width below which these columns cannot stand beside each other."""
    return sum(_narrowest(columns[i], [row[i] for row in rows]) for i in shown) + gap * (
        len(shown) - 1
    )


def _narrowest(column: Column, cells: Sequence[str]) -> int:
    whole = max((len(cell) for cell in cells), default=0)
    if column.wraps:
        words = max((len(word) for cell in cells for word in cell.split()), default=0)
        whole = max(words, min(whole, READABLE if column.below else 0))
    return max(whole, *(len(word) for word in column.name.split(" ")))


def _widths(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    shown: Sequence[int],
    width: int,
    gap: int,
) -> list[int]:
    """Widths of the columns. The rest goes to those that wrap, or whose heading does, in turn."""
    widths = [_narrowest(columns[i], [row[i] for row in rows]) for i in shown]
    left = width - sum(widths) - gap * (len(widths) - 1)
    natural = [
        max((len(cell) for cell in (columns[i].name, *(row[i] for row in rows))), default=0)
        for i in shown
    ]
    while left > 0 and (
        growing := [index for index, size in enumerate(widths) if size < natural[index]]
    ):
        for index in growing[:left]:
            widths[index] += 1
        left -= min(left, len(growing))
    return widths


def _line(
    cells: Sequence[Sequence[str]],
    columns: Sequence[Column],
    shown: Sequence[int],
    widths: Sequence[int],
    gap: int,
) -> list[str]:
    """One row of the table: as many lines as its tallest cell."""
    lines = []
    for place in range(max((len(cell) for cell in cells), default=0)):
        parts = []
        for cell, i, size in zip(cells, shown, widths, strict=True):
            text = cell[place] if place < len(cell) else ""
            parts.append(text.rjust(size) if columns[i].right else text.ljust(size))
        lines.append((" " * gap).join(parts).rstrip())
    return lines
