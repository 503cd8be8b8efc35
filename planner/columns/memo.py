"""Rows that were worked out already, found again by the hash of what they depend on.

A search meets the same units and the same shards again and again: in bounds, in prices, under one
budget after another.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.columns import FloatColumn, IntColumn
from planner.columns.table import Table

MOST_ROWS = 2**14  # about two kilobytes each; beyond it all are forgotten
FIRST_ROWS = 2**10


TableT = TypeVar("TableT", bound=Table)


class Memo(Generic[TableT]):
    """Rows of one kind of table by the hash of what they depend on (`groups.hashes`).

    hashes, places: of the known rows, in order, and where each stands in `matrix`, which holds the
        columns below each other, (F, room), so that one gather fetches all.
    spans: where each column stands in the matrix, and its shape but for its rows.
    One thread's: a price may not use it beside another.
    """

    def __init__(self, kind: type[TableT]) -> None:
        self.kind: type[TableT] = kind
        self.forget()

    def forget(self) -> None:
        self.hashes: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.places = np.zeros(0, dtype=np.int64)
        self.spans: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self.matrix: FloatColumn = np.zeros((0, 0))
        self.count = 0

    def at(
        self, hashes: NDArray[np.uint64], price: Callable[[IntColumn], Sequence[TableT]]
    ) -> TableT:
        """The columns of these rows, which may name one several times.

        price: those of the rows at some indices, in parts.
        """
        places, missing = self._places(hashes)
        if not len(missing):
            return self._at(places)
        distinct, first = np.unique(hashes[missing], return_index=True)
        if len(distinct) > MOST_ROWS // 2 or self.count + len(distinct) > MOST_ROWS:
            every, first_of_each, inverse = np.unique(
                hashes, return_index=True, return_inverse=True
            )
            if len(distinct) > MOST_ROWS // 2:  # too many to be remembered
                return self.kind.joined(price(first_of_each)).take(inverse)
            self.forget()
            distinct, missing, first = every, first_of_each, np.arange(len(every))
        self._add(distinct, price(missing[first]))
        places, _ = self._places(hashes)
        return self._at(places)

    def _at(self, places: IntColumn) -> TableT:
        taken = np.take(self.matrix, places, axis=1)
        return self.kind(
            **{
                name: taken[span].reshape(*shape, len(places))
                for name, (span, shape) in self.spans.items()
            }
        )

    def _places(self, hashes: NDArray[np.uint64]) -> tuple[IntColumn, IntColumn]:
        """(where these rows stand, indices of those that are not known)."""
        if not len(self.hashes):
            return np.zeros(len(hashes), dtype=np.int64), np.arange(len(hashes))
        found = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return self.places[found], np.flatnonzero(self.hashes[found] != hashes)

    def _add(self, hashes: NDArray[np.uint64], parts: Sequence[TableT]) -> None:
        if not self.spans:
            start = 0
            for column in fields(self.kind):
                shape = getattr(parts[0], column.name).shape[:-1]
                end = start + math.prod(shape)
                self.spans[column.name], start = (slice(start, end), shape), end
            self.matrix = np.empty((start, 0))
        new = self.count + len(hashes)
        if new > self.matrix.shape[1]:
            kept = self.matrix[:, : self.count]
            room = max(new, min(4 * new, MOST_ROWS), FIRST_ROWS)
            self.matrix = np.empty((len(kept), room))
            self.matrix[:, : self.count] = kept
        at = self.count
        for part in parts:
            values = [
                getattr(part, name).reshape(math.prod(shape), -1)
                for name, (_, shape) in self.spans.items()
            ]
            size = values[0].shape[1]
            np.concatenate(values, out=self.matrix[:, at : at + size])
            at += size
        order = np.argsort(np.concatenate([self.hashes, hashes]), kind="stable")
        self.hashes = np.concatenate([self.hashes, hashes])[order]
        self.places = np.concatenate([self.places, np.arange(self.count, new)])[order]
        self.count = new
