"""Rows that a job has priced already, since layouts share most of their work.

A search meets the same units and the same shards again and again: in bounds, in prices, under one
budget after another.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from planner.columns import FloatColumn, IntColumn
from planner.cost.data_parallel.sharding import UnitShards
from planner.cost.layer.unit_work import Savings, SharedWork, UnitWork

MOST_ROWS = 2**14  # about two kilobytes each; beyond it all are forgotten
FIRST_ROWS = 2**10
FEW_ROWS = 2**8
MOST_LEFT = 4  # jobs that are left to the next, of 5 to 40 MB each; judgement


@dataclass(frozen=True, slots=True)
class Steps:
    """Step seconds of U layouts on each of V machines, (V, U)."""

    seconds: FloatColumn


RowsT = TypeVar("RowsT", UnitWork, SharedWork, Savings, UnitShards, Steps)


class Gathered:
    """Columns of some known rows by name, each fetched when it is first asked for.

    matrix, spans: the columns of all known rows below each other, (F, room); where each stands
        there, and its shape but for its rows. places: where these rows stand.
    """

    def __init__(
        self,
        matrix: FloatColumn,
        spans: Mapping[str, tuple[slice, tuple[int, ...]]],
        places: IntColumn,
    ) -> None:
        self._matrix, self._spans, self._places = matrix, spans, places

    def __getattr__(self, name: str) -> FloatColumn:
        if name.startswith("_") or name not in self._spans:
            raise AttributeError(name)
        column = self._at(name, self._places)
        setattr(self, name, column)
        return column

    def all(self) -> dict[str, FloatColumn]:
        """All columns by name, fetched at once."""
        taken = np.take(self._matrix, self._places, axis=1)
        return {
            name: taken[span].reshape(*shape, len(self._places))
            for name, (span, shape) in self._spans.items()
        }

    def at(self, name: str, rows: IntColumn) -> FloatColumn:
        """The column at some of these rows."""
        return self._at(name, self._places[rows])

    def _at(self, name: str, places: IntColumn) -> FloatColumn:
        span, shape = self._spans[name]
        return np.take(self._matrix[span], places, axis=1).reshape(*shape, len(places))


class KnownRows(Generic[RowsT]):
    """Columns of one kind by the hash of what they depend on (`deduplicated.hashes`).

    hashes, places: of the known rows, in order, and where each stands in `matrix`, which holds the
        columns below each other, (F, room), so that one gather fetches all. What stands in a matrix
        stays there. spans: see `Gathered`.
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
        found = self._found(hashes, price)
        return self.kind(**found.all()) if isinstance(found, Gathered) else found

    def when_asked(
        self, hashes: NDArray[np.uint64], price: Callable[[IntColumn], Sequence[RowsT]]
    ) -> RowsT:
        """The same, but a column is fetched when it is first read; see `Gathered`.

        Few rows are fetched whole, which is quicker.
        """
        if len(hashes) <= FEW_ROWS:
            return self.at(hashes, price)
        return cast(RowsT, self._found(hashes, price))

    def _found(
        self, hashes: NDArray[np.uint64], price: Callable[[IntColumn], Sequence[RowsT]]
    ) -> RowsT | Gathered:
        places, missing = self._places(hashes)
        if not len(missing):
            return Gathered(self.matrix, self.spans, places)
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
        return Gathered(self.matrix, self.spans, places)

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
    of_variants: the same of pricers that are like the job's own (`Pricer.variant`).
    """

    work: KnownRows[UnitWork] = field(default_factory=lambda: KnownRows(UnitWork))
    savings: KnownRows[Savings] = field(default_factory=lambda: KnownRows(Savings))
    shards: KnownRows[UnitShards] = field(default_factory=lambda: KnownRows(UnitShards))
    shared: KnownRows[SharedWork] = field(default_factory=lambda: KnownRows(SharedWork))
    of_variants: dict[Hashable, "JobRows"] = field(default_factory=dict)


class KnownJob:
    """What a job has priced already.

    graph_columns, unit_key: see `cost_inputs`; None until somebody asked.
    most_device_bytes: see `search.fit`; likewise.
    variants: what is known of the pricers like the job's own.

    None of it depends on the batch size. So a search goes on with what one of the last finished
    searches knew, if that had the same model, cluster and training. One thread's, as `KnownRows`
    are: who takes it up has it alone until it is left again.
    """

    def __init__(self) -> None:
        self.job: tuple[object, object] | None = None
        self.graph_columns: tuple[str, ...] | None = None
        self.unit_key: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self.most_device_bytes: float | None = None
        self.rows = JobRows()
        self.variants: list[KnownJob] = []

    def share(self, key: Hashable, variant: "KnownJob") -> None:
        """Lets this variant go on with what was known of the one with the same key."""
        variant.rows = self.rows.of_variants.setdefault(key, variant.rows)
        self.variants.append(variant)

    def go_on(self, job: object, calibration: object) -> None:
        """Takes up what was left, if something was of the same job and calibration.

        job, calibration: all that rows depend on; calibrations are the same if they are one object.
        """
        self.job = job, calibration
        for left in [*_LEFT]:
            if left.calibration is calibration and left.job == job:
                try:
                    _LEFT.remove(left)
                except ValueError:  # another thread took it meanwhile
                    continue
                self.rows = left.rows
                return

    def leave(self) -> None:
        """Leaves what is known to the next, and starts anew."""
        if self.job is not None:
            job, calibration = self.job
            _LEFT.append(LeftJob(job=job, calibration=calibration, rows=self.rows))
            del _LEFT[:-MOST_LEFT]
            self.forget()

    def forget(self) -> None:
        """Starts anew and leaves nothing."""
        for known in (self, *self.variants):
            known.rows = JobRows()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # each is told from all others
class LeftJob:
    """What a job that is finished knew; see `KnownJob.go_on`."""

    job: object
    calibration: object
    rows: JobRows


_LEFT: list[LeftJob] = []  # the latest last
