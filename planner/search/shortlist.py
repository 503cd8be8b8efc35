"""The layouts that a screen has found so far, and where it may stop."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.calibration.intervals import oom_probability
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.columns.groups import unique_rows
from planner.cost.chunks import CHUNK
from planner.cost.price import Pricer
from planner.search.choice.pareto import STRUCTURE
from planner.search.choice.preference import Weighed, leaders
from planner.search.fit import OOM_LIMIT
from planner.search.variations.floors import floors

FIRST = 2048  # layouts priced before the limit is asked again; then twice as many, up to CHUNK
UNFIT = 32  # the fastest that do not fit, kept to be shown
# Judgement: a layout this much slower than the best is never shown, however different it is.
ENOUGH = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """Results of the screen.

    batch, step_seconds, device_bytes, oom: the layouts worth further work, best first by step among
        those that fit. When none fits, the layouts that came closest, smallest device_bytes first.
    num_priced, num_fitting: of all layouts priced.
    bounded_out: layouts whose lower bound showed that they cannot matter.
    pipelined: pipelined layouts, fitting or not, that another split of their layers may make faster
        than the fastest here.
    floor_seconds: their least step under any split (`variations.floors`).
    unfit: the fastest priced layouts that do not fit, fastest first.
    """

    batch: LayoutBatch
    step_seconds: FloatColumn
    device_bytes: FloatColumn
    oom: FloatColumn
    num_priced: int
    num_fitting: int
    bounded_out: int
    out_of_memory: int
    pipelined: LayoutBatch
    floor_seconds: FloatColumn
    unfit: LayoutBatch


class Shortlist:
    """The layouts found so far.

    best: the step of the fastest. ahead: that of the fastest known elsewhere, such as one with a
        memory budget.
    """

    def __init__(self, keep: int, count: int, smallest: bool) -> None:
        self.keep, self.count, self.smallest = keep, count, smallest
        self.parts: list[tuple[LayoutBatch, FloatColumn, FloatColumn, FloatColumn]] = []
        self.best = self.ahead = np.inf
        self.structures: dict[int, float] = {}
        self.pipelined: list[tuple[LayoutBatch, FloatColumn]] = []
        self.unfit: list[tuple[LayoutBatch, FloatColumn]] = []
        self.num_priced = self.num_fitting = 0

    def limit(self, slack: float) -> float:
        """Value beyond which a layout cannot matter.

        It is slack times the best, or the count-th best structure if that is worse.
        """
        best = min(self.best, self.ahead)
        if len(self.structures) < self.count:
            return ENOUGH * best
        return max(
            slack * best, min(ENOUGH * best, sorted(self.structures.values())[self.count - 1])
        )

    def fastest(self) -> list[float]:
        """The steps of the `count` fastest that fit, if there are as many."""
        fitting = [seconds[oom <= OOM_LIMIT] for _, seconds, _, oom in self.parts]
        return sorted(np.concatenate([np.zeros(0), *fitting]).tolist())[: self.count]

    def add(self, pricer: Pricer, batch: LayoutBatch, limit: Callable[[], float]) -> None:
        """Prices layouts whose own bound is within the limit; keeps what may matter.

        Those with the lowest bounds come first and a few at a time, since what they show lowers the
        limit for the others. limit: as it stands when it is asked.
        """
        bound, mean = np.zeros((2, len(batch)))
        if len(batch) and not self.smallest:
            bound, mean = pricer.step_lower_bounds(batch, limit())
        order = np.argsort(bound, kind="stable")
        start, size = 0, FIRST
        while start < (within := int(np.searchsorted(bound[order], limit(), side="right"))):
            rows = np.sort(order[start : min(start + size, within)])
            self._price(pricer, batch.take(rows), mean[rows])
            start, size = start + len(rows), min(2 * size, CHUNK)

    def _price(self, pricer: Pricer, part: LayoutBatch, mean: FloatColumn) -> None:
        prices = pricer.price(part)
        oom = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
        fits = oom <= OOM_LIMIT
        self.num_priced += len(part)
        self.num_fitting += int(fits.sum())
        value, other = prices.step_seconds, prices.device_bytes
        if self.smallest:
            value, other = other, value
        chosen = _worth_keeping(value, other, prices.device_bytes, fits, self.keep)
        chosen = np.union1d(chosen, _simplest(pricer, part, value, oom, fits))
        self.parts.append(
            (
                part.take(chosen),
                prices.step_seconds[chosen],
                prices.device_bytes[chosen],
                oom[chosen],
            )
        )
        self._note(part.take(chosen), value[chosen], fits[chosen])
        self._note_unfit(part, prices.step_seconds, fits)
        if not self.smallest:
            floor = floors(pricer, part, prices, mean)
            below = np.flatnonzero((part.pp > 1) & (floor < self.best))
            self.pipelined.append((part.take(below), floor[below]))

    def _note(self, kept: LayoutBatch, value: FloatColumn, fits: BoolColumn) -> None:
        rows = np.flatnonzero(fits)
        if not len(rows):
            return
        self.best = min(self.best, float(value[rows].min()))
        first, inverse = unique_rows([getattr(kept, name)[rows] for name in STRUCTURE])
        best = np.full(len(first), np.inf)
        np.minimum.at(best, inverse, value[rows])
        for index, row in enumerate(first):
            key = hash(tuple(int(getattr(kept, name)[rows[row]]) for name in STRUCTURE))
            self.structures[key] = min(self.structures.get(key, np.inf), float(best[index]))

    def _note_unfit(self, part: LayoutBatch, step_seconds: FloatColumn, fits: BoolColumn) -> None:
        rows = np.flatnonzero(~fits)
        rows = rows[np.argsort(step_seconds[rows], kind="stable")[:UNFIT]]
        self.unfit.append((part.take(rows), step_seconds[rows]))

    def _fastest_unfit(self, nothing: LayoutBatch) -> LayoutBatch:
        """Recorded candidates, fastest first."""
        batch = LayoutBatch.concatenate([nothing, *(part for part, _ in self.unfit)])
        step = np.concatenate([np.zeros(0), *(seconds for _, seconds in self.unfit)])
        return batch.take(np.argsort(step, kind="stable")[:UNFIT])

    def _worth_splitting(self, nothing: LayoutBatch) -> tuple[LayoutBatch, FloatColumn]:
        """The pipelined layouts with floors below the best, and those floors."""
        batch = LayoutBatch.concatenate([nothing, *(part for part, _ in self.pipelined)])
        floor = np.concatenate([np.zeros(0), *(seconds for _, seconds in self.pipelined)])
        return batch.take(floor < self.best), floor[floor < self.best]

    def result(
        self, pricer: Pricer, nothing_yet: LayoutBatch, *, bounded_out: int, too_large: int
    ) -> Screened:
        """The layouts found in all batches, fitting ones first, each group by step time."""
        pipelined, floor = self._worth_splitting(nothing_yet)
        unfit = self._fastest_unfit(nothing_yet)
        parts = self.parts or [(nothing_yet, *np.zeros((3, 0)))]
        batch = LayoutBatch.concatenate([part[0] for part in parts])
        step, device, oom = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
        fits = oom <= OOM_LIMIT
        value, other = (device, step) if self.smallest else (step, device)
        order = np.lexsort((other, value, ~fits))
        kept = order
        if fits.any():
            simple = _simplest(pricer, batch, value, oom, fits)
            kept = _front_and_best(order, other, fits, self.keep)
            kept = order[np.isin(order, np.append(kept, simple))]
        return Screened(
            batch=batch.take(kept),
            step_seconds=step[kept],
            device_bytes=device[kept],
            oom=oom[kept],
            num_priced=self.num_priced,
            num_fitting=self.num_fitting,
            bounded_out=bounded_out,
            out_of_memory=too_large + self.num_priced - self.num_fitting,
            pipelined=pipelined,
            floor_seconds=floor,
            unfit=unfit,
        )


def _worth_keeping(
    value: FloatColumn, other: FloatColumn, device: FloatColumn, fits: BoolColumn, keep: int
) -> IntColumn:
    """Indices of the `keep` best that fit and of the Pareto front.

    Of the smallest if nothing fits.
    """
    if not fits.any():
        return np.argsort(device, kind="stable")[:8]
    rows = np.flatnonzero(fits)
    return _front_and_best(rows[np.argsort(value[rows], kind="stable")], other, fits, keep)


def _simplest(
    pricer: Pricer, batch: LayoutBatch, value: FloatColumn, oom: FloatColumn, fits: BoolColumn
) -> IntColumn:
    """Indices of the best fitting layouts for every number of points.

    The best counts the cost of running out of memory.
    """
    rows = np.flatnonzero(fits)
    weighed = Weighed.of(batch.take(rows), pricer)
    return np.asarray(rows[leaders(weighed.expected(value[rows], oom[rows]), weighed.points)])


def _front_and_best(order: IntColumn, other: FloatColumn, fits: BoolColumn, keep: int) -> IntColumn:
    order = order[fits[order]]
    lowest = np.minimum.accumulate(other[order])
    on_front = np.concatenate([[True], other[order][1:] < lowest[:-1]])
    chosen = on_front.copy()
    chosen[:keep] = True
    return np.asarray(order[chosen])
