"""Numbers of a layout that are turned until it fits: the larger, the faster and the fuller.

How much is not recomputed, and how much does not go to the host: too many values to enumerate with
the rest. With a larger number a step takes less time and the device holds more, so the largest that
fits is found by bisection, for all layouts at once. A layout that is too slow with the smallest
number known not to fit drops out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.columns.bisect import bisected
from planner.columns.table import Table
from planner.cost.price import Pricer
from planner.rules import legal_mask
from planner.search.bounds import CellBounds
from planner.search.fit import OOM_LIMIT, fits_at_all, priced_and_fitting
from planner.search.space.enumerate import Space

ROUND = 5 * 2**14  # layouts of cells that are expanded at once


def _all(batch: LayoutBatch) -> BoolColumn:
    return np.ones(len(batch), dtype=np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """One number of a layout that a search may turn, from `least` to `steps`.

    least, steps: the numbers that are sought; at `steps` nothing is recomputed or moved.
    at: the layouts with these numbers.
    changes: the columns that it sets.
    takes: which layouts it is for, by `reads`.
    holds: which layouts the host's memory holds.
    """

    least: int
    steps: int
    at: Callable[[LayoutBatch, IntColumn], LayoutBatch]
    changes: tuple[str, ...]
    reads: tuple[str, ...] = ()
    takes: Callable[[LayoutBatch], BoolColumn] = _all
    holds: Callable[[LayoutBatch], BoolColumn] = _all

    def all_at(self, batch: LayoutBatch, number: int) -> LayoutBatch:
        return self.at(batch, np.full(len(batch), number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned(Table):
    """Layouts before the turn, the largest number at which each fits, its step there, (N,)."""

    bases: LayoutBatch
    number: IntColumn
    seconds: FloatColumn

    def first(self, count: int) -> "Turned":
        return self.take(np.argsort(self.seconds, kind="stable")[:count])


def turned(
    pricer: Pricer, bases: LayoutBatch, dial: Dial, limit: float = np.inf, keep: int | None = None
) -> Turned:
    """Each base at the largest number that fits, if its step there is below the limit.

    One that fits with all steps needs no dial. keep: a base that is not among so many fastest may
    be left out.
    """
    bases = bases.take(fits_at_all(pricer, dial.all_at(bases, dial.least)))
    seconds, fits = priced_and_fitting(pricer, dial.all_at(bases, dial.steps))
    left = ~fits & (seconds < limit)
    return turned_below(
        pricer, bases.take(left), dial, np.full(int(left.sum()), dial.steps), seconds[left],
        limit=limit, keep=keep,
    )  # fmt: skip


def turned_below(
    pricer: Pricer,
    bases: LayoutBatch,
    dial: Dial,
    high: IntColumn,
    high_seconds: FloatColumn,
    *,
    limit: float = np.inf,
    keep: int | None = None,
    risk: float = OOM_LIMIT,
) -> Turned:
    """The largest number below `high` at which each base fits; bases that never fit are left out.

    high_seconds: the step there, at the most. risk: the largest allowed P(out of memory).
    """
    seconds = np.full(len(bases), np.inf)

    def fits_with(rows: IntColumn, middle: IntColumn) -> tuple[BoolColumn, BoolColumn]:
        nonlocal limit
        tried = dial.at(bases.take(rows), middle)
        step, fits = priced_and_fitting(pricer, tried, risk)
        seconds[rows] = np.where(fits & dial.holds(tried), step, seconds[rows])
        high_seconds[rows] = np.where(fits, high_seconds[rows], step)
        limit = min(limit, slowest_of(seconds[rows], keep))
        return fits, high_seconds[rows] <= limit

    rows, number, _ = bisected(np.full(len(bases), dial.least - 1), high, fits_with)
    found = Turned(bases=bases.take(rows), number=number, seconds=seconds[rows])
    return found.take(np.isfinite(found.seconds))


def slowest_of(seconds: FloatColumn, keep: int | None) -> float:
    """Seconds of the slowest of the `keep` fastest; infinite if there are not as many."""
    if keep is None or keep > len(seconds):
        return np.inf
    return float(np.partition(seconds, keep - 1)[keep - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(Table):
    """Cells expanded at once: their layouts, the place of each one's cell, its least step, (N,).

    first, last: places of its cells.
    """

    first: int
    last: int
    layouts: LayoutBatch
    cell: IntColumn
    seconds: FloatColumn


class DialSearch:
    """The search for layouts that a dial makes faster; cells are expanded only when needed.

    cells: rows of the space, fastest first. most, least: the largest number that each may have, and
        the least step that it then takes; those that take `worth_seconds` are left out.
    cell_bounds: if known, layouts whose schedules hold more than there is room for are left out.
    """

    def __init__(
        self,
        pricer: Pricer,
        space: Space,
        dial: Dial,
        cells: IntColumn,
        most: IntColumn,
        least: FloatColumn,
        worth_seconds: float,
        cell_bounds: CellBounds | None = None,
    ) -> None:
        self.pricer, self.space, self.dial = pricer, space, dial
        self.worth, self.cell_bounds = worth_seconds, cell_bounds
        order = np.argsort(least, kind="stable")[: int((least < worth_seconds).sum())]
        self.cells, self.most, self.least = cells[order], most[order], least[order]
        self.known_rounds: list[Round] = []

    def rounds(self) -> Iterator[Round]:
        """Yields the rounds in order; each is expanded once."""
        yield from self.known_rounds
        ends = np.cumsum(self.space.cell_sizes[self.cells])
        first = self.known_rounds[-1].last if self.known_rounds else 0
        while first < len(self.cells):
            reached = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, reached + ROUND, side="right")))
            self.known_rounds.append(self._round(first, last))
            yield self.known_rounds[-1]
            first = last

    def _round(self, first: int, last: int) -> Round:
        dial, context = self.dial, self.pricer.rules_context
        found = self.space.expanded(self.cells[first:last])
        found = found.take(dial.takes(found.batch(dial.reads)))
        if self.cell_bounds is not None:
            found = found.take(self.cell_bounds.has_room(found))
        cell, layouts, seconds = first + found.owner, found.batch(), np.zeros(0)
        if len(cell):
            tried = dial.at(layouts, self.most[cell])
            seconds, _ = self.pricer.step_lower_bounds(tried, self.worth)
        one = Round(first=first, last=last, layouts=layouts, cell=cell, seconds=seconds)
        one = one.take(one.seconds < self.worth)
        half = dial.all_at(one.layouts, dial.steps // 2)
        return one.take(legal_mask(half, context, dial.changes))

    def fastest(self, keep: int, among: BoolColumn | None = None) -> Turned:
        """The `keep` fastest, each at the largest number that fits.

        among: cells that count; all unless given.
        """
        nothing = self.space.cells.take(slice(0, 0))
        found = turned(self.pricer, nothing, self.dial)
        limit = self.worth
        for one in self.rounds():
            if self.least[one.first] >= limit:
                break
            near = one.seconds < limit
            near &= True if among is None else among[one.cell]
            more = turned(self.pricer, one.layouts.take(near), self.dial, limit, keep)
            found = Turned.joined([found, more]).first(keep)
            limit = min(limit, slowest_of(found.seconds, keep))
        return found
