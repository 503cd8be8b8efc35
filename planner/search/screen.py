"""The exhaustive search on paper: bounds every cell, prices those that can matter, keeps the best.

A cell is all layouts that differ only in schedule, ZeRO stage and switches. Cells are expanded in
the order of a proven lower bound on their step time; the search ends when the next bound is worse
than everything that will be kept.
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import IntColumn
from planner.cost.lower_bounds import Idle
from planner.cost.pipeline.schedule_columns import num_microbatches
from planner.cost.price import Pricer
from planner.search.bounds import BAND, CellBounds
from planner.search.space.enumerate import Expanded, Space

FEW = 2**13
# what `Pricer.layout_lower_bounds` reads of a layout besides the fields of its units
COMPUTE_FIELDS = ("dp_replicate", "dp_shard", "pp", "micro_batch_size", "precision")
WIDE = 2  # bands whose own bounds are computed at once when a limit is known
KEEP = 400
# Judgement: how much slower than the best a layout may be and still be worth pricing for
# the Pareto front.
PARETO_SLACK = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Objective and limits of a screen.

    count: different layouts that must be certain, beside all within `slack` of the best.
    smallest: minimise device bytes instead of step seconds.
    keep: how many layouts are kept.
    limit_seconds: slower layouts are not goal.
    everything: also price layouts whose schedules hold more than there is room for.
    budgets: how many layouts with a memory budget are sought beside those of the screen.
    """

    count: int
    smallest: bool = False
    slack: float = PARETO_SLACK
    keep: int = KEEP
    limit_seconds: float = np.inf
    everything: bool = False
    budgets: int = 0


class CellQueue:
    """The cells in the order of their own lower bound on what is minimised.

    Own bounds are computed band by band, in the order of a looser bound.
    by_memory: device bytes are minimised, not seconds.
    order: the cells that are left, by their looser bound.
    """

    def __init__(self, cell_bounds: CellBounds, *, by_memory: bool) -> None:
        if by_memory:
            cell_bounds.know(np.arange(len(cell_bounds.cells)))
        self.cell_bounds, self.by_memory = cell_bounds, by_memory
        self.loose = cell_bounds.device_bytes if by_memory else cell_bounds.coarse_bound_seconds
        self.order = np.argsort(self.loose, kind="stable")
        self.ready, self.values = self.order[:0], np.zeros(0)
        self.known_too_large = [self.order[:0]]

    def next(self, limit: float, sizes: IntColumn, room: int) -> IntColumn:
        """The next cells, about `room` layouts in all, with lower bounds up to `limit`.

        Empty when no cells are left.
        """
        while True:
            bound = self.loose[self.order[0]] if len(self.order) else np.inf
            within = int(np.searchsorted(self.values, min(limit, bound), side="right"))
            if within:
                enough = int(np.searchsorted(np.cumsum(sizes[self.ready[:within]]), room))
                taken = max(1, min(within, enough))
                cells, self.ready = self.ready[:taken], self.ready[taken:]
                self.values = self.values[taken:]
                return cells
            if not bound <= limit or not len(self.order):
                return self.order[:0]
            self._reach(limit)

    def _reach(self, limit: float) -> None:
        """Computes one more band, below the limit if there is one; what fits joins the queue."""
        end = WIDE * BAND if np.isfinite(limit) else BAND
        if np.isfinite(limit):
            end = int(np.searchsorted(self.loose[self.order[:end]], limit, side="right"))
        rows, self.order = self.order[:end], self.order[end:]
        if np.isfinite(limit) and not self.by_memory:
            rows = self.cell_bounds.within(rows, limit)
        self.cell_bounds.know(rows)
        fits = self.cell_bounds.may_fit(rows)
        self.known_too_large.append(rows[~fits])
        joined = np.concatenate([self.ready, rows[fits]])
        own = self.cell_bounds.device_bytes if self.by_memory else self.cell_bounds.seconds
        values = own[joined]
        order = np.lexsort((joined, values))
        self.ready, self.values = joined[order], values[order]

    def too_large(self) -> IntColumn:
        return np.concatenate(self.known_too_large)

    def smallest(self, count: int) -> IntColumn:
        """The cells nearest to fitting, by their lower bound on memory."""
        cells = self.too_large()
        return cells[np.argsort(self.cell_bounds.device_bytes[cells], kind="stable")[:count]]


def near_layouts(
    pricer: Pricer, space: Space, cells: IntColumn, cell_bounds: CellBounds, limit: float
) -> Expanded:
    """Layouts of these cells that do not compute longer than the limit; all, where they are few."""
    found = space.expanded(cells)
    if not np.isfinite(limit) or len(found) < FEW:
        return found
    batch = found.batch((*pricer.unit_fields, *COMPUTE_FIELDS))
    overlaps = cell_bounds.idle.overlaps[found.cells]
    return found.take(pricer.layout_lower_bounds(batch, overlaps) <= limit)


def idle_of(pricer: Pricer, space: Space) -> Idle:
    """Time that schedules of each cell hide and leave idle."""
    microbatches = num_microbatches(space.cells, pricer.training).astype(np.int64)
    kinds, one_each = space.kinds([space.cells.pp, microbatches], ("pp_schedule", "virtual_stages"))
    cells = one_each.cells.take(slice(None))
    return Idle.of(pricer, cells, one_each.schedules()).take(kinds)
