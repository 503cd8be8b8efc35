"""Named columns over N rows: a formula written for them holds for one row and for a million."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from planner.columns import Column, LayoutBatch


@dataclass(frozen=True, slots=True)
class Table:
    """N rows of a subclass' fields: columns (..., N), layouts, tables, or columns by name.

    Any other field, such as a number, holds for all rows.
    """

    def take(self, rows: Column | slice) -> Self:
        """The rows at these indices, or where this mask is true."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: _taken(value, rows) for name, value in values.items()})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in order; what holds for all rows is the first part's."""
        values = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}
        return replace(parts[0], **{name: _joined(each) for name, each in values.items()})


def _taken(value: Any, rows: Column | slice) -> Any:
    if isinstance(value, np.ndarray):
        return value[..., rows]
    if isinstance(value, LayoutBatch | Table):
        return value.take(rows)
    if isinstance(value, Mapping):
        return {name: _taken(column, rows) for name, column in value.items()}
    return value


def _joined(values: Sequence[Any]) -> Any:
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values, axis=-1)
    if isinstance(values[0], LayoutBatch):
        return LayoutBatch.concatenate(values)
    if isinstance(values[0], Table):
        return values[0].joined(values)
    if isinstance(values[0], Mapping):
        return {name: _joined([value[name] for value in values]) for name in values[0]}
    return values[0]
