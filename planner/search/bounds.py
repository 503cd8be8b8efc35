"""Lower bounds of every cell, worked out as late as they are needed.

Recomputation only adds time, so a cell's time without it is a bound that its siblings with other
checkpointing share: a quarter of the work, and enough for the cells that lie above what the search
    ends with. The others get their own bounds, band by band.
"""

from dataclasses import replace

import numpy as np

from planner.calibration.intervals import oom_probability
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.price import Pricer
from planner.work.checkpointing import NONE

OOM_LIMIT = 0.05
BAND = 2**16  # cells share most of their work: the more at once, the less is done twice


class CellBounds:
    """Bounds of N cells.

    loose_seconds (N,): step time at least, by which cells are taken up: whatever the checkpointing,
        or their own where all are known.
    seconds, device_bytes (N,): the cell's own bounds where they are known; NaN where nobody asked.
    """

    def __init__(self, pricer: Pricer, cells: LayoutBatch) -> None:
        self.pricer, self.cells = pricer, cells
        self.seconds, self.device_bytes = np.full(len(cells), np.nan), np.full(len(cells), np.nan)
        if len(cells) <= BAND:
            self.know(np.arange(len(cells)))
            self.loose_seconds = self.seconds
        else:
            self.loose_seconds = self.bare(np.arange(len(cells)))

    def bare(self, rows: IntColumn) -> FloatColumn:
        """Step time of these cells at least, did they recompute nothing."""
        none, nothing = np.broadcast_to(NONE, len(rows)), np.broadcast_to(0.0, len(rows))
        return self.pricer.time_lower_bounds(
            replace(self.cells.take(rows), ac_kind=none, ac_value=nothing)
        )

    def know(self, rows: IntColumn) -> None:
        """Works out the own bounds of these cells."""
        rows = rows[np.isnan(self.seconds[rows])]
        for start in range(0, len(rows), BAND):
            part = rows[start : start + BAND]
            self.seconds[part], self.device_bytes[part] = self.pricer.lower_bounds(
                self.cells.take(part)
            )

    def may_fit(self, rows: IntColumn) -> BoolColumn:
        """Whether the memory bounds of these cells fit."""
        self.know(rows)
        return (
            oom_probability(
                self.pricer.profile, self.pricer.cluster, np.maximum(self.device_bytes[rows], 1.0)
            )
            <= OOM_LIMIT
        )
