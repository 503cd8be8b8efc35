"""Layouts as a table: on a terminal, in a notebook, as a data frame."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from planner.errors import MissingPackageError

SMALL = "font-size:90%;opacity:.75"


class Tabled:
    """Base of answers that terminals and notebooks show as a table."""

    def columns(self) -> dict[str, list[object]]:
        """Every row as columns, SI."""
        raise NotImplementedError

    def _shown(self) -> tuple[str, Mapping[str, Sequence[str]], str, str]:
        """(title, cells by column, the column of text beside those of numbers, notes)."""
        raise NotImplementedError

    def to_frame(self) -> Any:
        """`columns` as a pandas data frame. Raises MissingPackageError without pandas."""
        try:
            pandas = import_module("pandas")
        except ImportError:
            rule = "no pandas here; pip install pandas, or take plan.columns()"
            raise MissingPackageError(rule) from None
        return pandas.DataFrame(self.columns())

    def __rich__(self) -> Any:
        """A table, for `rich.print`."""
        title, columns, left, notes = self._shown()
        table = import_module("rich.table").Table(title=title, caption=notes, title_justify="left")
        for name in columns:
            table.add_column(name, justify="left" if name == left else "right", overflow="fold")
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        return table

    def _repr_html_(self) -> str:
        """A table, for notebooks; it brings no style but alignment, so dark themes stay dark."""
        from html import escape  # its table of entities is large

        title, columns, left, notes = self._shown()

        def cell(tag: str, name: str, text: str, scope: str = "") -> str:
            side = "left" if name == left else "right"
            return f'<{tag}{scope} style="text-align:{side}">{escape(text)}</{tag}>'

        head = "".join(cell("th", name, name, ' scope="col"') for name in columns)
        rows = "".join(
            "<tr>"
            + "".join(cell("td", name, text) for name, text in zip(columns, row, strict=True))
            + "</tr>"
            for row in zip(*columns.values(), strict=True)
        )
        return (
            f'<table><caption style="text-align:left"><b>{escape(title)}</b></caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
            f'<p style="{SMALL}">{escape(notes)}</p>'
        )
