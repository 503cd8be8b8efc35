"""The search of one space: its screen, and what is asked of the same cells afterwards."""

from dataclasses import replace

import numpy as np

from planner.columns import FloatColumn, LayoutBatch, taken
from planner.columns.groups import hashes
from planner.cost.chunks import CHUNK
from planner.cost.price import Pricer
from planner.search.bounds import CellBounds
from planner.search.choice.preference import Weighed
from planner.search.fit import priced_and_fitting
from planner.search.screen import CellQueue, Goal, idle_of, near_layouts
from planner.search.shortlist import Screened, Shortlist
from planner.search.space.enumerate import Space
from planner.search.variations.budgets import budgeted, dials, simple, split_classes, with_safe
from planner.search.variations.dials import DialSearch, Turned

# layouts bounded at once; an eighth of it until a layout fits
ROUND = 5 * 2**13
EXPANDED = 4  # layouts of cells that are asked at once what they compute, for each one of those
NEAREST = 64


def screen(pricer: Pricer, space: Space, goal: Goal) -> Screened:
    """Prices the space, lowest bound first, until the answer is certain.

    That is when `goal.count` different layouts are certain, and `goal.slack` times the best is
    covered.
    """
    return searched(pricer, space, goal).screened


def searched(pricer: Pricer, space: Space, goal: Goal) -> "SpaceSearch":
    """The space, screened.

    Where nothing fits and there is no limit, layouts whose schedules hold more than there is room
    for are priced after all, to see what comes closest.
    """
    found = SpaceSearch(pricer, space, goal)
    left_out = found.without_room and not found.screened.num_fitting
    if not left_out or goal.everything or np.isfinite(goal.limit_seconds):
        return found
    return SpaceSearch(pricer, space, replace(goal, everything=True))


class SpaceSearch:
    """The search of one space: its cells, priced round by round, and the best layouts so far.

    A cell is skipped when its lower bound on memory cannot fit, or when its lower bound on what is
    minimised is above both limits.
    without_room: layouts left out because their schedules hold more than there is room for.
    bases: layouts that may be worth a budget, by dial, as they were last sought.
    budgets: by dial the fastest layouts with a budget and the fastest simple ones, of those that
        can take less than `worth` seconds.
    """

    def __init__(self, pricer: Pricer, space: Space, goal: Goal) -> None:
        self.pricer, self.space, self.goal = pricer, space, goal
        self.cell_bounds = CellBounds(pricer, space.cells, idle_of(pricer, space))
        self.queue = CellQueue(self.cell_bounds, by_memory=goal.smallest)
        self.shortlist = Shortlist(goal.keep, goal.count, goal.smallest)
        self.without_room = 0
        self.bases: list[DialSearch] = []
        self.budgets: list[list[Turned]] = []
        self.worth = -np.inf
        self.screened = self._screen()

    @property
    def nothing(self) -> LayoutBatch:
        return self.space.cells.take(np.arange(0))

    def limit(self) -> float:
        """Seconds or bytes beyond which a cell cannot hold an answer."""
        return min(self.shortlist.limit(self.goal.slack), self.goal.limit_seconds)

    def _screen(self) -> Screened:
        shortlist, goal = self.shortlist, self.goal
        while self._round():
            fastest = shortlist.fastest()
            near = len(fastest) == goal.count and fastest[-1] <= goal.slack * shortlist.best
            if goal.budgets and near and not np.isfinite(self.worth):
                # budgets are sought before the next round, because they lower its limit
                self._seek_budgets(min(goal.limit_seconds, fastest[-1]))
                seconds = [found.seconds for kinds in self.budgets for found in kinds]
                shortlist.ahead = float(np.concatenate([np.zeros(0), *seconds]).min(initial=np.inf))
        too_large = self.without_room + int(self.space.cell_sizes[self.queue.too_large()].sum())
        bounded_out = self.space.num_layouts - shortlist.num_priced - too_large
        if not shortlist.num_fitting and too_large and np.isinf(goal.limit_seconds):
            nearest = self.space.expand(self.queue.smallest(NEAREST))
            shortlist.add(self.pricer, nearest, lambda: np.inf)
        return shortlist.result(
            self.pricer, self.nothing, bounded_out=bounded_out, too_large=too_large
        )

    def _round(self) -> bool:
        """Prices the layouts of the next cells; False if none were left."""
        room = ROUND if np.isfinite(self.limit()) else ROUND // 8
        parts: list[LayoutBatch] = []
        while sum(map(len, parts)) < room:
            limit_seconds = np.inf if self.goal.smallest else self.limit()
            expanded = EXPANDED * room if np.isfinite(limit_seconds) else room
            cells = self.queue.next(self.limit(), self.space.cell_sizes, expanded)
            if not len(cells):
                break
            near = near_layouts(self.pricer, self.space, cells, self.cell_bounds, limit_seconds)
            if not self.goal.everything:
                roomy = self.cell_bounds.has_room(near)
                self.without_room += int((~roomy).sum())
                near = near.take(roomy)
            parts.append(near.batch())
            if self.goal.smallest:  # every cell priced can lower the limit for the next
                break
        if parts:
            self.shortlist.add(self.pricer, LayoutBatch.concatenate(parts), self.limit)
        return bool(parts)

    def measured(self, keep: int) -> LayoutBatch:
        """The `keep` fastest that fit and use nothing unmeasured, of the cells of those screened.

        They differ from those that are near the best in what a cell leaves open: schedule,
        dispatcher, ZeRO stage, switches. It may be empty.
        """
        space, pricer = self.space, self.pricer
        free = {name for expansion in space.expansions for name in expansion.table}
        names = [name for name, _ in space.cells.columns() if name not in free]
        bounded = np.flatnonzero(~np.isnan(self.cell_bounds.seconds))
        of_cells = hashes([taken(getattr(space.cells, name), bounded) for name in names])
        asked = hashes([getattr(self.screened.batch, name) for name in names])
        batch = space.expand(bounded[np.isin(of_cells, asked)])
        batch = batch.take(np.asarray(~Weighed.of(batch, pricer).unmeasured.any(axis=0)))
        if not len(batch):
            return batch
        bound, _ = pricer.step_lower_bounds(batch)
        batch = batch.take(np.argsort(bound, kind="stable")[:CHUNK])
        seconds, fits = priced_and_fitting(pricer, batch)
        rows = np.flatnonzero(fits)
        return batch.take(rows[np.argsort(seconds[rows], kind="stable")[:keep]])

    def best_budgets(self, worth_seconds: float) -> LayoutBatch:
        """The `Goal.budgets` fastest fitting layouts with a budget that beat what is worth it.

        As many simple ones are added; the batch may be empty. Each layout comes with the largest
        budget that fits at all and with the largest that is safe.
        """
        if self.worth < worth_seconds:
            self._seek_budgets(worth_seconds)
        batches = [self.nothing]
        for dial, kinds in zip(dials(self.pricer), self.budgets, strict=True):
            near = [found.take(found.seconds < worth_seconds) for found in kinds]
            batches.append(with_safe(self.pricer, Turned.joined(near), dial))
        return LayoutBatch.concatenate(batches)

    def split_classes(self, limit: float) -> tuple[LayoutBatch, FloatColumn]:
        """Classes of `budgets.split_classes` for the first dial."""
        reach = [one for one in self.bases if one.worth >= limit] or self._bases(limit)
        return split_classes(self.pricer, reach[0], limit)

    def _seek_budgets(self, worth_seconds: float) -> None:
        keep, self.worth = self.goal.budgets, worth_seconds
        self.budgets = [
            [one.fastest(keep), one.fastest(keep, simple(one))]
            for one in self._bases(worth_seconds)
        ]

    def _bases(self, worth_seconds: float) -> list[DialSearch]:
        pricer, bounds = self.pricer, self.cell_bounds
        self.bases = [
            budgeted(pricer, self.space, bounds, worth_seconds, dial) for dial in dials(pricer)
        ]
        return self.bases
