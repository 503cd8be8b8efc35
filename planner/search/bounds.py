"""Lower bounds of every cell, computed as late as they are needed.

Recomputation only adds time, so a cell's time without it is a lower bound that it shares with all
cells that differ only in checkpointing. That takes a quarter of the work, and is enough for cells
above the limit at which the search ends. The others get their own bounds, band by band: first on
what they compute, then on memory, and on all that a step takes if they may fit.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch, one_number, taken
from planner.columns.bisect import bisected
from planner.columns.groups import unique_rows
from planner.cost.chunks import slices
from planner.cost.layer.unit_costs import MODE
from planner.cost.lower_bounds import Idle
from planner.cost.price import Pricer
from planner.search.fit import fitting, most_device_bytes
from planner.search.space.enumerate import Expanded
from planner.work.checkpointing import MEMORY_BUDGET, NONE

ROUNDING = 1e-9
STEPS, COARSE = 100, 8  # memory budgets are multiples of 1 / STEPS
BAND = 2**14  # cells whose own bounds are computed before anything is priced
# what `Pricer.least_in_flight` and `CellBounds.has_room` read of a layout
ROOM_FIELDS = (
    "dp_replicate", "dp_shard", "pp", "pp_schedule", "virtual_stages", "micro_batch_size",
    "zero_stage",
)  # fmt: skip
KNOWN_AT_ONCE = 2**14  # the most of them, so that their columns take 25 MB
AT_ONCE = 2**16  # cells bounded without recomputation, so that their columns take 25 MB


class CellBounds:
    """Lower bounds of N cells.

    coarse_bound_seconds (N,): lower bound on step time by which cells are ordered, for any
        checkpointing; the cells' own bounds if all are known.
    idle: what their schedules hide and leave idle; unless given, nothing is known of them.
    seconds, device_bytes (N,): the cell's own bounds if they are known, else NaN; seconds of those
        that may fit alone.
    bare_seconds (N,): lower bound without recomputation and network, likewise.
    room (Z, N): microbatches that a mean rank has room for in flight, at the most, under each ZeRO
        stage that a search tries; of cells whose own bounds are known.
    """

    def __init__(self, pricer: Pricer, cells: LayoutBatch, idle: Idle | None = None) -> None:
        self.pricer, self.cells = pricer, cells
        self.idle = Idle.of_any(cells) if idle is None else idle
        self.seconds, self.device_bytes = np.full(len(cells), np.nan), np.full(len(cells), np.nan)
        self.room = np.full((len(pricer.rules.sharding.stages), len(cells)), np.inf)
        self.most_bytes = most_device_bytes(pricer)
        self.budgets = np.full(len(cells), -1, dtype=np.int16)
        self.bare_seconds = np.full(len(cells), np.nan)
        if len(cells) <= BAND:
            self.know(np.arange(len(cells)))
            self._know_seconds(np.flatnonzero(np.isnan(self.seconds)))
            self.coarse_bound_seconds = self.seconds
        else:
            self.bare(np.arange(len(cells)))
            self.coarse_bound_seconds = self.bare_seconds

    def bare(self, rows: IntColumn) -> FloatColumn:
        """Lower bound on the step time of these cells without recomputation."""
        left = rows[np.isnan(self.bare_seconds[rows])]
        if len(left):
            first, alike = self._alike(left)
            seconds, in_place = np.empty(len(first)), np.argsort(first)  # neighbours share work
            seconds[in_place] = self._bare(left[first[in_place]])
            self.bare_seconds[left] = seconds[alike]
        return self.bare_seconds[rows]

    def _alike(self, rows: IntColumn) -> tuple[IntColumn, IntColumn]:
        """(one of each kind of these cells, the kind of each cell).

        A kind computes as long, but for checkpointing.
        """
        names = [name for name in (*self.pricer.unit_fields, "pp") if name not in MODE]
        columns = [getattr(self.cells, name) for name in dict.fromkeys(names)]
        columns.append(self.cells.dp_replicate * self.cells.dp_shard)  # decides microbatches
        columns += [self.idle.overlaps, self.idle.microbatches]
        if len(rows) < len(self.cells):
            columns = [taken(column, rows) for column in columns]
        return unique_rows(columns)

    def _bare(self, rows: IntColumn) -> FloatColumn:
        parts = [np.zeros(0)]
        for at in slices(len(rows), AT_ONCE):
            part = rows[at]
            none, nothing = one_number(NONE, len(part)), np.broadcast_to(0.0, len(part))
            cells = replace(self.cells.take(part), ac_kind=none, ac_value=nothing)
            parts.append(self.pricer.compute_lower_bounds(cells, self.idle.take(part)))
        return np.concatenate(parts)

    def largest_budgets(self, rows: IntColumn, limit_seconds: float) -> IntColumn:
        """Largest memory budget of these cells at which their memory bound fits, in hundredths.

        To within COARSE, and never too small. Their layouts cannot have more. -1 of cells that
        then compute longer than the limit.
        """
        left = rows[self.budgets[rows] < 0]

        def fits(rows: IntColumn, middle: IntColumn) -> tuple[BoolColumn, BoolColumn]:
            cells = replace(
                self.cells.take(left[rows]),
                ac_kind=one_number(MEMORY_BUDGET, len(rows)),
                ac_value=np.minimum(middle / STEPS, 1.0),
            )
            device, computes = self.pricer.device_and_compute_bounds(
                cells, self.idle.take(left[rows])
            )
            fit = fitting(self.pricer, device)
            return fit, fit | (computes < limit_seconds)  # a smaller budget takes longer

        low, high = np.zeros(len(left), dtype=np.int64), np.full(len(left), STEPS + COARSE)
        alive, _, most = bisected(low, high, fits, COARSE)
        self.budgets[left[alive]] = np.minimum(most, STEPS)
        return self.budgets[rows].astype(np.int64)

    def within(self, rows: IntColumn, limit_seconds: float) -> IntColumn:
        """Cells that compute no longer than the limit, recomputation included."""
        computes = [
            self.pricer.compute_lower_bounds(self.cells.take(part), self.idle.take(part))
            for part in _parts(rows)
        ]
        return rows[np.concatenate([np.zeros(0), *computes]) <= limit_seconds]

    def know(self, rows: IntColumn) -> None:
        """Computes these cells' own bounds on memory, and on time of those that may fit."""
        self._know_memory(rows)
        near = rows[np.isnan(self.seconds[rows])]
        self._know_seconds(near[self.may_fit(near)])

    def _know_memory(self, rows: IntColumn) -> None:
        for part in _parts(rows[np.isnan(self.device_bytes[rows])]):
            self.device_bytes[part], self.room[:, part] = self.pricer.cell_device_bounds(
                self.cells.take(part), self.most_bytes
            )

    def _know_seconds(self, rows: IntColumn) -> None:
        for part in _parts(rows):
            cells, idle = self.cells.take(part), self.idle.take(part)
            self.seconds[part] = self.pricer.time_lower_bounds(cells, idle)

    def has_room(self, layouts: Expanded) -> BoolColumn:
        """Whether these layouts may fit with what their schedules hold, (N,).

        A schedule that runs all forwards first holds many times what another one does.
        """
        batch = layouts.batch(ROOM_FIELDS)
        stages = self.pricer.rules.sharding.stages
        stage = np.zeros(len(batch), dtype=np.int64)
        for place, value in enumerate(stages):
            stage[batch.zero_stage == value] = place
        room = self.room[stage, layouts.cells]
        return np.asarray(self.pricer.least_in_flight(batch) <= (1.0 + ROUNDING) * room)

    def may_fit(self, rows: IntColumn) -> BoolColumn:
        self._know_memory(rows)
        return fitting(self.pricer, self.device_bytes[rows])


def _parts(rows: IntColumn) -> Iterator[IntColumn]:
    """Rows in parts whose own bounds are computed at once."""
    return (rows[part] for part in slices(len(rows), KNOWN_AT_ONCE))
