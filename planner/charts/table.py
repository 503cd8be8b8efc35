"""A plan's layouts as a table: on a terminal, in a notebook, as a data frame."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from planner.errors import MissingPackageError

Columns = Mapping[str, Sequence[object]]
SMALL = "font-size:90%;opacity:.75"


def frame(columns: Columns) -> Any:
    """A pandas data frame. Raises MissingPackageError."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        rule = "no pandas here; pip install pandas, or take plan.columns()"
        raise MissingPackageError(rule) from None
    return pandas.DataFrame(dict(columns))


def rich_table(title: str, columns: Mapping[str, Sequence[str]], left: str, notes: str) -> Any:
    """For `rich.print`. left: the column of text; the others are numbers."""
    table = import_module("rich.table").Table(title=title, caption=notes, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name == left else "right", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def html_table(title: str, columns: Mapping[str, Sequence[str]], left: str, notes: str) -> str:
    """For notebooks; it brings no style but alignment, so that dark themes stay dark."""
    from html import escape  # its table of entities is large

    def cell(tag: str, name: str, text: str, scope: str = "") -> str:
        side = "left" if name == left else "right"
        return f'<{tag}{scope} style="text-align:{side}">{escape(text)}</{tag}>'

    head = "".join(cell("th", name, name, ' scope="col"') for name in columns)
    rows = "".join(
        "<tr>" + "".join(cell("td", name, text) for name, text in zip(columns, row, strict=True))
        + "</tr>"
        for row in zip(*columns.values(), strict=True)
    )  # fmt: skip
    return (
        f'<table><caption style="text-align:left"><b>{escape(title)}</b></caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f'<p style="{SMALL}">{escape(notes)}</p>'
    )
