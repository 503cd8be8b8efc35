"""Rows that a space is built of: crossed with values, dropped, and read by rules and keeps.

Letters: N rows, C kinds of rows, T booleans.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from planner.columns import BoolColumn, Column, IntColumn, LayoutBatch, wide
from planner.columns.groups import unique_rows
from planner.rules import DERIVED, Context, columns_of
from planner.trainers.registry import resolve_layout

Columns = dict[str, Column]
Mask = Callable[[LayoutBatch, Context], BoolColumn]


class Rows:
    """Columns of rows that are crossed with values and dropped, each gathered when it is read.

    constants: columns that are the same in all rows.
    count: how many rows. A column read since the last `settle` is one of these rows, others are
    those of the rows at `_at` before it.
    """

    def __init__(self, context: Context, splits: tuple[tuple[int, ...], ...]) -> None:
        self.context, self.splits = context, splits
        neutral = resolve_layout(
            {}, trainer=context.training.trainer, num_gpus=context.cluster.num_gpus
        )
        self.template = dict(LayoutBatch.from_layouts([neutral]).columns())
        self.constants: Columns = {}
        self.count = 1
        self._before: Columns = {}
        self._at: IntColumn | None = None
        self._now: Columns = {}

    def names(self) -> frozenset[str]:
        return frozenset((*self._before, *self._now))

    def __getitem__(self, name: str) -> Column:
        if name in self._before:
            column = self._before.pop(name)
            self._now[name] = column if self._at is None else column[self._at]
        return self._now[name]

    def __setitem__(self, name: str, column: Column) -> None:
        self._now[name] = column

    def uncrossed(self, name: str) -> Column | None:
        """The column at the rows before the last crossing, of which there are fewer.

        None of a column that came later or was read since.
        """
        return None if self._at is None else self._before.get(name)

    def crossed(self, column: Column) -> Column:
        """A column of the rows before the last crossing, at each row."""
        return column if self._at is None else column[self._at]

    def pop(self, name: str) -> Column:
        column = self[name]
        del self._now[name]
        return column

    def at(self, places: IntColumn) -> Columns:
        before = places if self._at is None else self._at[places]
        return {
            **{name: wide(column[before]) for name, column in self._before.items()},
            **{name: wide(column[places]) for name, column in self._now.items()},
        }

    def cross(self, columns: Columns) -> None:
        self.settle()
        count = length(columns)
        self._at = np.repeat(np.arange(self.count), count)
        self._now = {name: np.tile(values, self.count) for name, values in columns.items()}
        self.count *= count

    def take(self, kept: IntColumn) -> None:
        self._at = kept if self._at is None else self._at[kept]
        self._now = {name: column[kept] for name, column in self._now.items()}
        self.count = len(kept)

    def settle(self) -> Columns:
        columns = {name: self[name] for name in sorted(self.names())}
        self._before, self._at, self._now = columns, None, {}
        return columns

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

    def cases(self, reads: Iterable[str]) -> tuple[IntColumn, IntColumn]:
        """(a row of each case, the case of each row (N,)): rows of one read the same.

        Columns that the last crossing repeated are told apart before it.
        """
        names = sorted(set(reads) - self.constants.keys())
        early: list[IntColumn] = []
        late: list[IntColumn] = []
        for name in names:
            needs = columns_of(frozenset({name})) & self.names()
            before = {
                needed: wide(column)
                for needed in needs
                if (column := self.uncrossed(needed)) is not None
            }
            if needs and len(before) == len(needs):
                batch = self.batch({**self.constants, **before})
                early.append(self.value(name, batch, length(before)))
            else:
                late.append(self._read(name))
        if early:
            _, codes = kinds_of(early, len(early[0]))
            late.append(self.crossed(codes))
        return kinds_of(late, self.count)

    def _read(self, name: str) -> IntColumn:
        needs = columns_of(frozenset({name})) & self.names()
        known = {**self.constants, **{needed: wide(self[needed]) for needed in needs}}
        return self.value(name, self.batch(known), self.count)

    def value(self, name: str, batch: LayoutBatch, count: int) -> IntColumn:
        """A column that rules read, of the `count` rows of a batch."""
        values = (
            DERIVED[name].value(batch, self.context) if name in DERIVED else getattr(batch, name)
        )
        return np.broadcast_to(values, count)


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


def length(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def kinds_of(keys: Sequence[IntColumn], num_rows: int) -> tuple[IntColumn, IntColumn]:
    """(a row of each kind (C,), the kind of each row (N,)): rows of one are equal in all keys."""
    differ = [key for key in keys if key.strides != (0,)] if num_rows else []
    if differ:
        return unique_rows(differ)
    return np.arange(min(num_rows, 1)), np.zeros(num_rows, dtype=np.int64)
