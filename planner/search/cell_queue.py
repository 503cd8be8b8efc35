"""The cells of a search in the order in which they are taken up."""

import numpy as np

from planner.columns import IntColumn
from planner.search.bounds import BAND, CellBounds

WIDE = 2  # bands whose own bounds are computed at once when a limit is known


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
                cells, self.ready, self.values = (
                    self.ready[:taken],
                    self.ready[taken:],
                    self.values[taken:],
                )
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
        values = (self.cell_bounds.device_bytes if self.by_memory else self.cell_bounds.seconds)[
            joined
        ]
        order = np.lexsort((joined, values))
        self.ready, self.values = joined[order], values[order]

    def too_large(self) -> IntColumn:
        return np.concatenate(self.known_too_large)

    def smallest(self, count: int) -> IntColumn:
        """The cells nearest to fitting, by their lower bound on memory."""
        cells = self.too_large()
        return cells[np.argsort(self.cell_bounds.device_bytes[cells], kind="stable")[:count]]
