"""Rows that a space is built of: crossed with values, dropped, and read by rules and keeps.

Letters: N rows, C kinds of rows, T booleans.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from planner.columns import BoolColumn, Column, IntColumn, LayoutBatch, wide
from planner.columns.groups import unique_rows
from planner.rules import Context
from planner.trainers.registry import resolve_layout

Columns = dict[str, Column]
Mask = Callable[[LayoutBatch, Context], BoolColumn]


class Rows:
    """Columns of rows that are crossed with values and dropped.

    constants: columns that are the same in all rows. columns (N,): the others. count: N.
    """

    def __init__(self, context: Context, splits: tuple[tuple[int, ...], ...]) -> None:
        self.context, self.splits = context, splits
        neutral = resolve_layout(
            {}, trainer=context.training.trainer, num_gpus=context.cluster.num_gpus
        )
        self.template = dict(LayoutBatch.from_layouts([neutral]).columns())
        self.constants: Columns = {}
        self.columns: Columns = {}
        self.count = 1

    def at(self, places: IntColumn) -> Columns:
        return {name: wide(column[places]) for name, column in self.columns.items()}

    def cross(self, columns: Columns) -> None:
        count = length(columns)
        repeated = {name: np.repeat(column, count) for name, column in self.columns.items()}
        self.columns = repeated | {
            name: np.tile(values, self.count) for name, values in columns.items()
        }
        self.count *= count

    def take(self, kept: IntColumn) -> None:
        self.columns = {name: column[kept] for name, column in self.columns.items()}
        self.count = len(kept)

    # ---- what rules read of them ----

    def of_cells(self, reads: frozenset[str], mask: Mask) -> BoolColumn:
        """The mask of each row, worked out once for each distinct case of what it reads, (N,)."""
        firsts, cases = self.cases(reads)
        values = mask(self.batch({**self.constants, **self.at(firsts)}), self.context)
        return np.asarray(np.broadcast_to(values, len(firsts))[cases])

    def batch(self, columns: Mapping[str, Column]) -> LayoutBatch:
        """A batch in which columns still unknown hold one neutral value; no rule reads them."""
        return LayoutBatch(
            **{name: columns.get(name, neutral) for name, neutral in self.template.items()},
            splits=self.splits,
        )

    def cases(self, reads: frozenset[str]) -> tuple[IntColumn, IntColumn]:
        """(a row of each case, the case of each row (N,)): rows of one read the same."""
        names = sorted(reads - self.constants.keys())
        return kinds_of([wide(self.columns[name]) for name in names], self.count)


def unique_boolean_rows(values: BoolColumn) -> tuple[IntColumn, IntColumn]:
    """(a row of each kind, the kind of each row (N,)), where rows (N, T) differ in a boolean."""
    if not values.size:
        return np.arange(len(values)), np.arange(len(values))
    packed = np.packbits(values, axis=1)
    words = np.zeros((len(values), -(-packed.shape[1] // 8) * 8), dtype=np.uint8)
    words[:, : packed.shape[1]] = packed
    kinds = np.zeros(len(values), dtype=np.int64)
    for column in words.view(np.uint64).T:
        firsts, kinds = unique_rows([kinds, np.ascontiguousarray(column)])
    return firsts, kinds


def all_choices(parts: Sequence[Mapping[str, Column]]) -> Columns:
    """Columns of every choice of one row of each part, the last part's changing fastest."""
    places = np.indices([length(part) for part in parts]).reshape(len(parts), -1)
    return {
        name: column[place]
        for part, place in zip(parts, places, strict=True)
        for name, column in part.items()
    }


def length(columns: Mapping[str, Column]) -> int:
    return len(next(iter(columns.values())))


def kinds_of(keys: Sequence[IntColumn], num_rows: int) -> tuple[IntColumn, IntColumn]:
    """(a row of each kind (C,), the kind of each row (N,)): rows of one are equal in all keys."""
    differ = [key for key in keys if key.strides != (0,)] if num_rows else []
    if differ:
        return unique_rows(differ)
    return np.arange(min(num_rows, 1)), np.zeros(num_rows, dtype=np.int64)
