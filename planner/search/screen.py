"""The exhaustive search on paper: bound every cell of the space, price the ones that can still matter, keep the best.

A cell is all layouts that differ only in schedule, ZeRO stage and switches. Cells are expanded in the order of a proven lower
bound on their step time; the search ends when the next bound is worse than what would be kept anyway.
"""

from dataclasses import dataclass

import numpy as np

from planner.calibration.intervals import oom_probability
from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.cost.price import CHUNK, Pricer, Prices
from planner.search.space import Space

OOM_LIMIT = 0.05
ROUND = 2 * CHUNK
KEEP = 400
# Judgement: how much slower than the best a layout may be and still be worth pricing for the Pareto front.
PARETO_SLACK = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """What the screen found.

    batch, step_seconds, device_bytes, fits: the layouts worth a closer look, best first by step among those that fit.
    num_priced, num_fitting: of all layouts priced.  bounded_out: layouts whose bound showed that they cannot matter.
    When none fits, `batch` holds the layouts that came closest, smallest device_bytes not yet sorted out.
    """

    batch: LayoutBatch
    step_seconds: FloatColumn
    device_bytes: FloatColumn
    oom: FloatColumn
    num_priced: int
    num_fitting: int
    bounded_out: int
    out_of_memory: int


def screen(pricer: Pricer, space: Space, *, slack: float = PARETO_SLACK, keep: int = KEEP) -> Screened:
    """Prices the space best bound first and keeps the `keep` fastest that fit and the Pareto candidates among the rest."""
    if len(space.cells) == 0:
        empty = np.zeros(0)
        return Screened(batch=space.cells, step_seconds=empty, device_bytes=empty, oom=empty, num_priced=0, num_fitting=0, bounded_out=0, out_of_memory=0)
    floor = np.concatenate([pricer.step_floor_seconds(space.cells.take(rows)) for rows in _chunks(np.arange(len(space.cells)), CHUNK)])
    order = np.argsort(floor, kind="stable")
    sizes = space.cell_sizes[order]
    pool = _Pool(keep)
    start = 0
    while start < len(order):
        if floor[order[start]] > slack * pool.worst_kept():
            break
        stop = start + max(1, int(np.searchsorted(np.cumsum(sizes[start:]), ROUND)))
        limit = slack * pool.worst_kept()
        within = int(np.searchsorted(floor[order[start:stop]], limit, side="right"))
        stop = start + max(1, min(stop - start, within))
        pool.add(pricer, space.expand(order[start:stop]))
        start = stop
    return pool.result(bounded_out=int(sizes[start:].sum()))


def _chunks(rows: IntColumn, size: int) -> list[IntColumn]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


class _Pool:
    """The layouts kept so far."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.parts: list[tuple[LayoutBatch, FloatColumn, FloatColumn, FloatColumn]] = []
        self.best_steps = np.zeros(0)
        self.num_priced = self.num_fitting = 0

    def worst_kept(self) -> float:
        """Step seconds of the best fitting layout so far (infinite until one fits)."""
        return float(self.best_steps[0]) if len(self.best_steps) else np.inf

    def add(self, pricer: Pricer, batch: LayoutBatch) -> None:
        """Prices a batch and keeps what may matter."""
        for rows in _chunks(np.arange(len(batch)), CHUNK):
            part = batch.take(rows)
            prices = pricer.price(part)
            oom = oom_probability(pricer.profile, pricer.cluster, prices.device_bytes)
            fits = oom <= OOM_LIMIT
            self.num_priced += len(part)
            self.num_fitting += int(fits.sum())
            chosen = _worth_keeping(prices, fits, self.keep)
            self.parts.append((part.take(chosen), prices.step_seconds[chosen], prices.device_bytes[chosen], oom[chosen]))
            steps = np.concatenate([self.best_steps, prices.step_seconds[chosen][fits[chosen]]])
            self.best_steps = np.sort(steps)[: self.keep]

    def result(self, bounded_out: int) -> Screened:
        """The kept layouts of all batches, fitting ones first, each by step time."""
        batch = LayoutBatch.concatenate([part[0] for part in self.parts])
        step, device, oom = (np.concatenate([part[i] for part in self.parts]) for i in (1, 2, 3))
        fits = oom <= OOM_LIMIT
        order = np.lexsort((device, step, ~fits))
        kept = order if not fits.any() else _front_and_best(order, step, device, fits, self.keep)
        return Screened(
            batch=batch.take(kept), step_seconds=step[kept], device_bytes=device[kept], oom=oom[kept], num_priced=self.num_priced,
            num_fitting=self.num_fitting, bounded_out=bounded_out, out_of_memory=self.num_priced - self.num_fitting,
        )  # fmt: skip


def _worth_keeping(prices: Prices, fits: FloatColumn, keep: int) -> IntColumn:
    """Indices of the `keep` fastest that fit, of the Pareto front, and of the smallest where nothing fits."""
    if not fits.any():
        return np.argsort(prices.device_bytes, kind="stable")[:8]
    rows = np.flatnonzero(fits)
    order = rows[np.argsort(prices.step_seconds[rows], kind="stable")]
    return _front_and_best(order, prices.step_seconds, prices.device_bytes, fits, keep)


def _front_and_best(order: IntColumn, step: FloatColumn, device: FloatColumn, fits: FloatColumn, keep: int) -> IntColumn:
    order = order[fits[order]]
    lowest = np.minimum.accumulate(device[order])
    on_front = np.concatenate([[True], device[order][1:] < lowest[:-1]])
    chosen = on_front.copy()
    chosen[:keep] = True
    return order[chosen]
