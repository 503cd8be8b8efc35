"""The exhaustive search on paper: bounds every cell, prices those that can matter, keeps the best.

A cell is all layouts that differ only in schedule, ZeRO stage and switches. Cells are expanded in
the order of a proven lower bound on their step time; the search ends when the next bound is worse
than everything that will be kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.beside import both
from planner.calibration.intervals import oom_probability
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost import deduplicated as keyed
from planner.cost.chunks import CHUNK
from planner.cost.lower_bounds import Idle
from planner.cost.pipeline.schedule_columns import num_microbatches
from planner.cost.price import Pricer
from planner.search.bounds import BAND, MANY, CellBounds
from planner.search.choice.pareto import STRUCTURE
from planner.search.choice.preference import Weighed, leaders
from planner.search.fit import OOM_LIMIT
from planner.search.space.enumerate import Space
from planner.search.variations.floors import floors

# layouts bounded at once; an eighth of it until a layout fits
ROUND = 2 * CHUNK
WIDE = 2  # bands whose own bounds are computed at once when a limit is known
EXPANDED = 4  # layouts of cells that are asked at once what they compute, for each one of those
FEW = 2**13
FIRST = 2048  # layouts priced before the limit is asked again; then twice as many, up to CHUNK
KEEP = 400
NEAREST = 64
UNFIT = 32  # the fastest that do not fit, kept to be shown
# Judgement: how much slower than the best a layout may be and still be worth pricing for
# the Pareto front.
PARETO_SLACK = 1.1
# Judgement: a layout this much slower than the best is never shown, however different it is.
ENOUGH = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """What the screen found.

    batch, step_seconds, device_bytes, oom: the layouts worth further work, best first by step among
        those that fit. When none fits, the layouts that came closest, smallest device_bytes first.
    cell_bounds: lower bounds of the cells, as far as they were needed.
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
    cell_bounds: CellBounds
    pipelined: LayoutBatch
    floor_seconds: FloatColumn
    unfit: LayoutBatch


def screen(
    pricer: Pricer,
    space: Space,
    *,
    count: int,
    smallest: bool = False,
    slack: float = PARETO_SLACK,
    keep: int = KEEP,
    limit_seconds: float = np.inf,
    everything: bool = False,
) -> Screened:
    """Prices the space, lowest bound first, until the answer is certain.

    That is when `count` different layouts are certain, and `slack` times the best is covered.
    A cell is skipped when its lower bound on memory cannot fit, or when its lower bound on what is
    minimised is above both limits.
    smallest: minimise device bytes instead of step seconds.
    limit_seconds: slower layouts are not wanted.
    everything: also price layouts whose schedules hold more than there is room for. They are if
        nothing fits and there is no limit, to see what comes closest.
    """
    cell_bounds = CellBounds(pricer, space.cells, idle_of(pricer, space))
    whole = _Pass(
        pricer=pricer,
        space=space,
        cell_bounds=cell_bounds,
        queue=_Queue.of_all(cell_bounds, smallest),
        pool=_Pool(keep, count, smallest),
        slack=slack,
        limit_seconds=limit_seconds,
        everything=everything,
    )
    while whole.round():
        if whole.left() >= MANY:
            one, other = whole.halves()
            for found in both(pricer.beside, one.finish, other.finish):
                whole.join(found)
            break
    pool, queue, without_room = whole.pool, whole.queue, whole.without_room
    if without_room and not pool.num_fitting and np.isinf(limit_seconds):
        return screen(
            pricer, space, count=count, smallest=smallest, slack=slack, keep=keep, everything=True
        )
    too_large = without_room + int(space.cell_sizes[queue.too_large()].sum())
    bounded_out = space.num_layouts - pool.num_priced - too_large
    if not pool.num_fitting and too_large and np.isinf(limit_seconds):
        pool.add(pricer, space.expand(queue.smallest(NEAREST)), lambda: np.inf)
    return pool.result(cell_bounds, bounded_out=bounded_out, too_large=too_large)


@dataclass(slots=True, kw_only=True, eq=False)
class _Pass:
    """A pass over the cells of a queue, which puts what may matter into a pool.

    slack, limit_seconds, everything: as `screen` has them.
    without_room: layouts left out because their schedules hold more than there is room for.
    """

    pricer: Pricer
    space: Space
    cell_bounds: CellBounds
    queue: "_Queue"
    pool: "_Pool"
    slack: float
    limit_seconds: float
    everything: bool
    without_room: int = 0

    def limit(self) -> float:
        """The value beyond which a cell cannot matter."""
        return min(self.pool.limit(self.slack), self.limit_seconds)

    def round(self) -> bool:
        """Prices the layouts of the next cells; False if none were left."""
        room = ROUND if np.isfinite(self.limit()) else ROUND // 8
        parts: list[LayoutBatch] = []
        while sum(map(len, parts)) < room:
            limit_seconds = np.inf if self.pool.smallest else self.limit()
            expanded = EXPANDED * room if np.isfinite(limit_seconds) else room
            cells = self.queue.next(self.limit(), self.space.cell_sizes, expanded)
            if not len(cells):
                break
            batch, owner = near_layouts(
                self.pricer, self.space, cells, self.cell_bounds, limit_seconds
            )
            if not self.everything:
                fits = self.cell_bounds.has_room(owner, batch)
                self.without_room += int((~fits).sum())
                batch = batch.take(fits)
            parts.append(batch)
            if self.pool.smallest:  # every cell priced can lower the limit for the next
                break
        if parts:
            self.pool.add(self.pricer, LayoutBatch.concatenate(parts), self.limit)
        return bool(parts)

    def left(self) -> int:
        """How many cells may still matter; 0 as long as no limit says so."""
        return self.queue.left(self.limit()) if np.isfinite(self.limit()) else 0

    def halves(self) -> tuple["_Pass", "_Pass"]:
        """Passes over the two halves of the cells that are left, with pools of their own."""
        one, other = (
            replace(self, queue=queue, pool=self.pool.fresh(), without_room=0)
            for queue in self.queue.halves(self.limit())
        )
        return one, other

    def finish(self) -> "_Found":
        """Takes up all cells that are left, and says what was found."""
        while self.round():
            pass
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *self.queue.known])
        return _Found(
            pool=self.pool,
            rows=rows,
            bounds=self.cell_bounds.known_at(rows),
            too_large=self.queue.too_large(),
            without_room=self.without_room,
        )

    def join(self, found: "_Found") -> None:
        """Adds what a pass over a half has found."""
        self.pool.join(found.pool)
        self.cell_bounds.learn(found.rows, found.bounds)
        self.queue.known_too_large.append(found.too_large)
        self.without_room += found.without_room


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a pass over half of the cells found.

    rows, bounds: cells whose own bounds it worked out, and these (`CellBounds.known_at`).
    too_large: cells that cannot fit. without_room: see `_Pass`.
    """

    pool: "_Pool"
    rows: IntColumn
    bounds: tuple[FloatColumn, FloatColumn, FloatColumn]
    too_large: IntColumn
    without_room: int


def near_layouts(
    pricer: Pricer, space: Space, cells: IntColumn, cell_bounds: CellBounds, limit: float
) -> tuple[LayoutBatch, IntColumn]:
    """(layouts of these cells that do not compute longer than the limit, the cell of each).

    What they compute is asked before fields are expanded on which it does not depend, unless there
    are few.
    """
    if not np.isfinite(limit) or space.cell_sizes[cells].sum() < FEW:
        return space.expand(cells), np.repeat(cells, space.cell_sizes[cells])
    branches = space.branches(cells, pricer.unit_fields)
    overlaps = cell_bounds.idle.overlaps[cells[branches.owner]]
    computes = pricer.layout_lower_bounds(branches.batch, overlaps)
    batch, place = branches.expand(computes <= limit)
    return batch, cells[place]


def idle_of(pricer: Pricer, space: Space) -> Idle:
    """What the schedules of each cell hide and leave idle."""
    microbatches = num_microbatches(space.cells, pricer.training).astype(np.int64)
    kinds, one_each = space.kinds([space.cells.pp, microbatches], ("pp_schedule", "virtual_stages"))
    return Idle.of(pricer, one_each.cells, one_each.schedules()).take(kinds)


class _Queue:
    """The cells in the order of their own lower bound on what is minimised.

    Own bounds are computed band by band, in the order of a looser bound.
    known: the cells of each band. Those before `reached` in the order of the looser bound.
    """

    def __init__(self, cell_bounds: CellBounds, loose: FloatColumn, by_memory: bool) -> None:
        self.cell_bounds, self.by_memory, self.loose = cell_bounds, by_memory, loose
        nothing = np.zeros(0, dtype=np.int64)
        self.order, self.reached = nothing, 0
        self.ready, self.values = nothing, np.zeros(0)
        self.known, self.known_too_large = [nothing], [nothing]

    @classmethod
    def of_all(cls, cell_bounds: CellBounds, smallest: bool) -> "_Queue":
        """The queue of all cells."""
        if smallest:
            cell_bounds.know(np.arange(len(cell_bounds.cells)))
        loose = cell_bounds.device_bytes if smallest else cell_bounds.coarse_bound_seconds
        queue = cls(cell_bounds, loose, smallest)
        queue.order = np.argsort(loose, kind="stable")
        return queue

    def left(self, limit: float) -> int:
        """How many cells have bounds up to `limit`, of which the own ones may not be known."""
        waiting = int(np.searchsorted(self.values, limit, side="right"))
        rest = self.loose[self.order[self.reached :]]
        return waiting + int(np.searchsorted(rest, limit, side="right"))

    def halves(self, limit: float) -> Iterator["_Queue"]:
        """Two queues of the cells that are left up to `limit` (`CellBounds.halves`)."""
        end = int(np.searchsorted(self.loose[self.order], limit, side="right"))
        rest = self.order[self.reached : max(end, self.reached)]
        for in_order, waiting in zip(
            self.cell_bounds.halves(rest), self.cell_bounds.halves(self.ready), strict=True
        ):
            half = _Queue(self.cell_bounds, self.loose, self.by_memory)
            half.order = rest[in_order]
            half.ready, half.values = self.ready[waiting], self.values[waiting]
            yield half

    def next(self, limit: float, sizes: IntColumn, room: int) -> IntColumn:
        """The next cells, about `room` layouts in all, with lower bounds up to `limit`.

        Empty when no cells are left.
        """
        while True:
            bound = (
                self.loose[self.order[self.reached]] if self.reached < len(self.order) else np.inf
            )
            within = int(np.searchsorted(self.values, min(limit, bound), side="right"))
            if within:
                enough = int(np.searchsorted(np.cumsum(sizes[self.ready[:within]]), room))
                taken = max(1, min(within, enough))
                cells, self.ready, self.values = (
                    self.ready[:taken],
                    self.ready[taken:],
                    self.values[taken:],
                )
                return cells
            if not bound <= limit or self.reached == len(self.order):
                return self.order[:0]
            self._reach(limit)

    def _reach(self, limit: float) -> None:
        """Computes one more band, below the limit if there is one; what fits joins the queue."""
        end = self.reached + BAND
        if np.isfinite(limit):
            below = np.searchsorted(self.loose[self.order], limit, side="right")
            end = min(self.reached + WIDE * BAND, int(below))
        rows = self.order[self.reached : end]
        self.reached += len(rows)
        self.known.append(rows)
        fits = self.cell_bounds.may_fit(rows)
        self.known_too_large.append(rows[~fits])
        joined = np.concatenate([self.ready, rows[fits]])
        values = (self.cell_bounds.device_bytes if self.by_memory else self.cell_bounds.seconds)[
            joined
        ]
        order = np.lexsort((joined, values))
        self.ready, self.values = joined[order], values[order]

    def too_large(self) -> IntColumn:
        """Cells known not to fit."""
        return np.concatenate(self.known_too_large)

    def smallest(self, count: int) -> IntColumn:
        """The cells nearest to fitting, by their lower bound on memory."""
        cells = self.too_large()
        return cells[np.argsort(self.cell_bounds.device_bytes[cells], kind="stable")[:count]]


def _chunks(rows: IntColumn, size: int) -> list[IntColumn]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


class _Pool:
    """The layouts found so far."""

    def __init__(self, keep: int, count: int, smallest: bool) -> None:
        self.keep, self.count, self.smallest = keep, count, smallest
        self.parts: list[tuple[LayoutBatch, FloatColumn, FloatColumn, FloatColumn]] = []
        self.best = np.inf
        self.structures: dict[int, float] = {}
        self.pipelined: list[tuple[LayoutBatch, FloatColumn]] = []
        self.unfit: list[tuple[LayoutBatch, FloatColumn]] = []
        self.num_priced = self.num_fitting = 0

    def fresh(self) -> "_Pool":
        """An empty pool with the same limits."""
        pool = _Pool(self.keep, self.count, self.smallest)
        pool.best, pool.structures = self.best, dict(self.structures)
        return pool

    def join(self, other: "_Pool") -> None:
        """Adds what another pool holds."""
        self.parts += other.parts
        self.pipelined += other.pipelined
        self.unfit += other.unfit
        self.best = min(self.best, other.best)
        for key, value in other.structures.items():
            self.structures[key] = min(self.structures.get(key, np.inf), value)
        self.num_priced += other.num_priced
        self.num_fitting += other.num_fitting

    def limit(self, slack: float) -> float:
        """Value beyond which a layout cannot matter.

        It is slack times the best, or the count-th best structure if that is worse.
        """
        if len(self.structures) < self.count:
            return np.inf if not np.isfinite(self.best) else ENOUGH * self.best
        return max(
            slack * self.best,
            min(ENOUGH * self.best, sorted(self.structures.values())[self.count - 1]),
        )

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
        value, other = (
            (prices.device_bytes, prices.step_seconds)
            if self.smallest
            else (prices.step_seconds, prices.device_bytes)
        )
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
        """Records the best value of every structure that fits."""
        rows = np.flatnonzero(fits)
        if not len(rows):
            return
        self.best = min(self.best, float(value[rows].min()))
        first, inverse = keyed.unique_rows([getattr(kept, name)[rows] for name in STRUCTURE])
        best = np.full(len(first), np.inf)
        np.minimum.at(best, inverse, value[rows])
        for index, row in enumerate(first):
            key = hash(tuple(int(getattr(kept, name)[rows[row]]) for name in STRUCTURE))
            self.structures[key] = min(self.structures.get(key, np.inf), float(best[index]))

    def _note_unfit(self, part: LayoutBatch, step_seconds: FloatColumn, fits: BoolColumn) -> None:
        """Records the fastest that do not fit."""
        rows = np.flatnonzero(~fits)
        rows = rows[np.argsort(step_seconds[rows], kind="stable")[:UNFIT]]
        self.unfit.append((part.take(rows), step_seconds[rows]))

    def _fastest_unfit(self, nothing: LayoutBatch) -> LayoutBatch:
        """What was recorded, fastest first."""
        batch = LayoutBatch.concatenate([nothing, *(part for part, _ in self.unfit)])
        step = np.concatenate([np.zeros(0), *(seconds for _, seconds in self.unfit)])
        return batch.take(np.argsort(step, kind="stable")[:UNFIT])

    def _worth_splitting(self, nothing: LayoutBatch) -> tuple[LayoutBatch, FloatColumn]:
        """The pipelined layouts with floors below the best, and those floors."""
        batch = LayoutBatch.concatenate([nothing, *(part for part, _ in self.pipelined)])
        floor = np.concatenate([np.zeros(0), *(seconds for _, seconds in self.pipelined)])
        return batch.take(floor < self.best), floor[floor < self.best]

    def result(self, cell_bounds: CellBounds, bounded_out: int, too_large: int) -> Screened:
        """The layouts found in all batches, fitting ones first, each group by step time."""
        nothing_yet = cell_bounds.cells.take(slice(0, 0))
        pipelined, floor = self._worth_splitting(nothing_yet)
        unfit = self._fastest_unfit(nothing_yet)
        if not self.parts:
            nothing = np.zeros(0)
            return Screened(
                batch=nothing_yet,
                step_seconds=nothing,
                device_bytes=nothing,
                oom=nothing,
                num_priced=0,
                num_fitting=0,
                bounded_out=bounded_out,
                out_of_memory=too_large,
                cell_bounds=cell_bounds,
                pipelined=pipelined,
                floor_seconds=floor,
                unfit=unfit,
            )
        batch = LayoutBatch.concatenate([part[0] for part in self.parts])
        step, device, oom = (np.concatenate([part[i] for part in self.parts]) for i in (1, 2, 3))
        fits = oom <= OOM_LIMIT
        value, other = (device, step) if self.smallest else (step, device)
        order = np.lexsort((other, value, ~fits))
        kept = order
        if fits.any():
            simple = _simplest(cell_bounds.pricer, batch, value, oom, fits)
            kept = _front_and_best(order, other, fits, self.keep)
            kept = order[np.isin(order, np.union1d(kept, simple))]
        return Screened(
            batch=batch.take(kept),
            step_seconds=step[kept],
            device_bytes=device[kept],
            oom=oom[kept],
            num_priced=self.num_priced,
            num_fitting=self.num_fitting,
            bounded_out=bounded_out,
            out_of_memory=too_large + self.num_priced - self.num_fitting,
            cell_bounds=cell_bounds,
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
