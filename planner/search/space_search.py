"""The search of one space: its screen, and what is asked of the same cells afterwards."""

from dataclasses import dataclass, replace

import numpy as np

from planner.columns import FloatColumn, LayoutBatch, taken
from planner.columns.groups import hashes
from planner.cost.chunks import CHUNK
from planner.cost.price import Pricer
from planner.search.choice.preference import Weighed
from planner.search.fit import priced_and_fitting
from planner.search.screen import Goal, Screening
from planner.search.shortlist import Screened
from planner.search.space.enumerate import Space
from planner.search.variations.budgets import budgeted, dials, simple, split_classes, with_safe
from planner.search.variations.dials import DialSearch, Turned


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
    left_out = found.screening.without_room and not found.screened.num_fitting
    if not left_out or goal.everything or np.isfinite(goal.limit_seconds):
        return found
    return SpaceSearch(pricer, space, replace(goal, everything=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBudgets:
    """The fastest layouts with a memory budget, of those that can take less than `worth` seconds.

    kinds: by dial the fastest of all, and of the simple ones.
    """

    worth: float
    kinds: list[list[Turned]]

    @property
    def least(self) -> float:
        """The step of the fastest; infinite if there is none."""
        found = [kind.seconds for kinds in self.kinds for kind in kinds]
        return float(np.concatenate([np.zeros(0), *found]).min(initial=np.inf))


class SpaceSearch:
    """A space and what its screen found.

    bases: layouts that may be worth a budget, by dial, as they were last sought.
    budgets: the fastest layouts with memory budgets, once they were sought.
    """

    def __init__(self, pricer: Pricer, space: Space, goal: Goal) -> None:
        self.pricer, self.space, self.goal = pricer, space, goal
        self.screening = Screening(pricer, space, goal)
        self.bases: list[DialSearch] = []
        self.budgets: KnownBudgets | None = None
        self.screened = self._screen()

    @property
    def nothing(self) -> LayoutBatch:
        return self.space.cells.take(np.arange(0))

    def _screen(self) -> Screened:
        screening, shortlist, goal = self.screening, self.screening.shortlist, self.goal
        while screening.round():
            fastest = shortlist.fastest()
            near = len(fastest) == goal.count and fastest[-1] <= goal.slack * shortlist.best
            if goal.budgets and near and self.budgets is None:
                # budgets are sought before the next round, because they lower its limit
                worth = min(goal.limit_seconds, fastest[-1])
                self.budgets = KnownBudgets(worth=worth, kinds=self._fastest_budgets(worth))
                shortlist.ahead = self.budgets.least
        too_large = screening.too_large
        bounded_out = self.space.num_layouts - shortlist.num_priced - too_large
        if not shortlist.num_fitting and too_large and np.isinf(goal.limit_seconds):
            screening.price_nearest()
        return shortlist.result(
            self.pricer, self.nothing, bounded_out=bounded_out, too_large=too_large
        )

    def measured(self, keep: int) -> LayoutBatch:
        """The `keep` fastest that fit and use nothing unmeasured, of the cells of those screened.

        They differ from those that are near the best in what a cell leaves open: schedule,
        dispatcher, ZeRO stage, switches. It may be empty.
        """
        space, pricer = self.space, self.pricer
        free = {name for expansion in space.expansions for name in expansion.table}
        names = [name for name, _ in space.cells.columns() if name not in free]
        bounded = np.flatnonzero(~np.isnan(self.screening.cell_bounds.seconds))
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
        known = self.budgets
        if known is None or known.worth < worth_seconds:
            known = KnownBudgets(worth=worth_seconds, kinds=self._fastest_budgets(worth_seconds))
        batches = [self.nothing]
        for dial, kinds in zip(dials(self.pricer), known.kinds, strict=True):
            near = [found.take(found.seconds < worth_seconds) for found in kinds]
            batches.append(with_safe(self.pricer, Turned.joined(near), dial))
        return LayoutBatch.concatenate(batches)

    def split_classes(self, limit: float) -> tuple[LayoutBatch, FloatColumn]:
        """Classes of `budgets.split_classes` for the first dial."""
        reach = [one for one in self.bases if one.worth >= limit] or self._bases(limit)
        return split_classes(self.pricer, reach[0], limit)

    def _fastest_budgets(self, worth_seconds: float) -> list[list[Turned]]:
        """By dial: the fastest with a budget below what is worth it, and the simple ones."""
        keep = self.goal.budgets
        return [
            [one.fastest(keep), one.fastest(keep, simple(one))]
            for one in self._bases(worth_seconds)
        ]

    def _bases(self, worth_seconds: float) -> list[DialSearch]:
        pricer, bounds = self.pricer, self.screening.cell_bounds
        self.bases = [
            budgeted(pricer, self.space, bounds, worth_seconds, dial) for dial in dials(pricer)
        ]
        return self.bases
