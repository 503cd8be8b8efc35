"""Rows that a job has priced already, since layouts share most of their work.

A search meets the same units and the same shards again and again: in bounds, in prices, under one
budget after another.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.columns import FloatColumn, IntColumn
from planner.cost.data_parallel.sharding import UnitShards
from planner.cost.layer.unit_work import Savings, UnitWork

MOST_ROWS = 2**14  # about two kilobytes each; beyond it all are forgotten
FIRST_ROWS = 2**10

RowsT = TypeVar("RowsT", UnitWork, Savings, UnitShards)


class KnownRows(Generic[RowsT]):
    """Columns of one kind by the hash of what they depend on (`deduplicated.hashes`).

    U: known rows, in the order in which they were priced; `room` is what the columns have place
    for. One thread's: a price may not use it beside another.
    """

    def __init__(self, kind: type[RowsT]) -> None:
        self.kind: type[RowsT] = kind
        self._forget()

    def _forget(self) -> None:
        self.hashes: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.places = np.zeros(0, dtype=np.int64)
        self.columns: dict[str, FloatColumn] = {}
        self.count = self.room = 0

    def at(
        self, hashes: NDArray[np.uint64], price: Callable[[IntColumn], Sequence[RowsT]]
    ) -> RowsT:
        """The columns of these rows, which may name one several times.

        price: those of the rows at some indices, in parts.
        """
        distinct, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        places, missing = self._places(distinct)
        if len(missing) > MOST_ROWS // 2:  # too many to be remembered
            return self._joined(price(first), inverse)
        if len(missing):
            if self.count + len(missing) > MOST_ROWS:
                self._forget()
                missing = np.arange(len(distinct))
            self._add(distinct[missing], price(first[missing]))
            places, _ = self._places(distinct)
        rows = places[inverse]
        return self.kind(**{name: column[..., rows] for name, column in self.columns.items()})

    def _places(self, hashes: NDArray[np.uint64]) -> tuple[IntColumn, IntColumn]:
        """(where these rows stand, indices of those that are not known)."""
        if not len(self.hashes):
            return np.zeros(len(hashes), dtype=np.int64), np.arange(len(hashes))
        found = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return self.places[found], np.flatnonzero(self.hashes[found] != hashes)

    def _joined(self, parts: Sequence[RowsT], rows: IntColumn) -> RowsT:
        names = [field.name for field in fields(self.kind)]
        return self.kind(
            **{
                name: np.concatenate([getattr(part, name) for part in parts], axis=-1)[..., rows]
                for name in names
            }
        )

    def _add(self, hashes: NDArray[np.uint64], parts: Sequence[RowsT]) -> None:
        new = self.count + len(hashes)
        if new > self.room:
            self.room = max(new, 2 * self.room, FIRST_ROWS)
            for field in fields(self.kind):
                kept = self.columns.get(field.name)
                first: FloatColumn = getattr(parts[0], field.name)
                self.columns[field.name] = np.empty((*first.shape[:-1], self.room))
                if kept is not None:
                    self.columns[field.name][..., : self.count] = kept[..., : self.count]
        at = self.count
        for part in parts:
            size = 0
            for name, column in self.columns.items():
                values: FloatColumn = getattr(part, name)
                size = values.shape[-1]
                column[..., at : at + size] = values
            at += size
        order = np.argsort(np.concatenate([self.hashes, hashes]), kind="stable")
        self.hashes = np.concatenate([self.hashes, hashes])[order]
        self.places = np.concatenate([self.places, np.arange(self.count, new)])[order]
        self.count = new
