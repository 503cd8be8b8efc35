"""Rows that a job has priced already, since layouts share most of their work.

A search meets the same units and the same shards again and again: in bounds, in prices, under one
budget after another.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.columns import FloatColumn, IntColumn
from planner.cost.data_parallel.sharding import UnitShards
from planner.cost.layer.unit_work import Savings, SharedWork, UnitWork

MOST_ROWS = 2**14  # about two kilobytes each; beyond it all are forgotten
FIRST_ROWS = 2**10


@dataclass(frozen=True, slots=True)
class Steps:
    """Step seconds of U layouts on each of V machines, (V, U)."""

    seconds: FloatColumn


RowsT = TypeVar("RowsT", UnitWork, SharedWork, Savings, UnitShards, Steps)


class KnownRows(Generic[RowsT]):
    """Columns of one kind by the hash of what they depend on (`deduplicated.hashes`).

    hashes, places: of the known rows, in order, and where each stands in `matrix`, which holds the
        columns below each other, (F, room), so that one gather fetches all.
    spans: where each column stands in the matrix, and its shape but for its rows.
    One thread's: a price may not use it beside another.
    """

    def __init__(self, kind: type[RowsT]) -> None:
        self.kind: type[RowsT] = kind
        self._forget()

    def _forget(self) -> None:
        self.hashes: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.places = np.zeros(0, dtype=np.int64)
        self.spans: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self.matrix: FloatColumn = np.zeros((0, 0))
        self.count = 0

    def at(
        self, hashes: NDArray[np.uint64], price: Callable[[IntColumn], Sequence[RowsT]]
    ) -> RowsT:
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
                return self._joined(price(first_of_each), inverse)
            self._forget()
            distinct, missing, first = every, first_of_each, np.arange(len(every))
        self._add(distinct, price(missing[first]))
        places, _ = self._places(hashes)
        return self._at(places)

    def _at(self, places: IntColumn) -> RowsT:
        taken = np.take(self.matrix, places, axis=1)
        return self.kind(
            **{
                name: taken[span].reshape(*shape, len(places))
                for name, (span, shape) in self.spans.items()
            }
        )

    def has(self, hashes: NDArray[np.uint64]) -> bool:
        """Whether all of these rows are known."""
        _, missing = self._places(hashes)
        return not len(missing)

    def _places(self, hashes: NDArray[np.uint64]) -> tuple[IntColumn, IntColumn]:
        """(where these rows stand, indices of those that are not known)."""
        if not len(self.hashes):
            return np.zeros(len(hashes), dtype=np.int64), np.arange(len(hashes))
        found = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return self.places[found], np.flatnonzero(self.hashes[found] != hashes)

    def _joined(self, parts: Sequence[RowsT], rows: IntColumn) -> RowsT:
        names = [column.name for column in fields(self.kind)]
        return self.kind(
            **{
                name: np.concatenate([getattr(part, name) for part in parts], axis=-1)[..., rows]
                for name in names
            }
        )

    def _add(self, hashes: NDArray[np.uint64], parts: Sequence[RowsT]) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRows:
    """What is known of a job: its units by their work and by what they save, and its shards.

    shared: what the work of units has in common where their experts are placed differently.
    """

    work: KnownRows[UnitWork] = field(default_factory=lambda: KnownRows(UnitWork))
    savings: KnownRows[Savings] = field(default_factory=lambda: KnownRows(Savings))
    shards: KnownRows[UnitShards] = field(default_factory=lambda: KnownRows(UnitShards))
    shared: KnownRows[SharedWork] = field(default_factory=lambda: KnownRows(SharedWork))


class KnownJob:
    """What a job has priced already.

    graph_columns, unit_key: see `cost_inputs`; None until somebody asked.
    most_device_bytes: see `search.fit`; likewise.

    One thread's, as `KnownRows` are.
    """

    def __init__(self) -> None:
        self.graph_columns: tuple[str, ...] | None = None
        self.unit_key: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self.most_device_bytes: float | None = None
        self.rows = JobRows()

    def forget(self) -> None:
        self.rows = JobRows()
