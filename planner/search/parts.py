"""A space in parts, each of which is searched by itself, on a second core where there is one.

Cells whose units cost the same are in the same part, so that no unit is priced twice. Parts share
nothing but what the best layouts take; a part tells that after each round. So a plan is the same
wherever they run.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from planner.beside import Sides, sides
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch, among, taken
from planner.cost.chunks import CHUNK
from planner.cost.cost_inputs import STAGE_COUNTS
from planner.cost.deduplicated import hashes
from planner.cost.layer.unit_costs import MODE
from planner.cost.pipeline.schedule_columns import num_microbatches
from planner.cost.price import Pricer, StepTimes
from planner.cost.refine import groups, simulated_step_seconds
from planner.search.choice.preference import Weighed
from planner.search.fit import priced_and_fitting
from planner.search.screen import Goal, Screening
from planner.search.shortlist import Screened, Shortlist
from planner.search.space.enumerate import Space
from planner.search.variations.budgets import (
    Budgeted,
    LargestBudgets,
    budgeted,
    dials,
    split_classes,
    with_safe,
)
from planner.search.variations.splits import climbed_splits

# Cells, at the most, of a space from which on it is searched in PARTS. Judgement: two parts of a
# smaller one take half as many CPU seconds again as one (each asks as often, of half the rows), so
# that a second core gains next to nothing, and a process that has one core loses them.
MANY = 2**16
PARTS = 2
STAGE_MICROBATCHES = 50  # what a stage adds to a simulation is worth that many; judgement
KEPT_WHOLE = 2**17  # cells of the largest space that stays in memory beside its parts


class Divisible(Protocol):
    """A space, or as much of one as it takes to divide it: `enumerate.SpaceDraft`."""

    @property
    def most_cells(self) -> int:
        """How many cells there are at the most."""
        ...

    def whole(self) -> Space:
        """The space."""
        ...

    def part(self, names: Collection[str], place: int, count: int) -> Space:
        """One of `count` parts; cells that are equal in these fields are in the same part."""
        ...


def screen(pricer: Pricer, space: Space, goal: Goal) -> Screened:
    """Prices the space, lowest bound first, until the answer is certain.

    That is when `goal.count` different layouts are certain, and `goal.slack` times the best is
    covered.
    """
    with searched(pricer, lambda: space, goal) as parts:
        return parts.screened


@contextmanager
def searched(pricer: Pricer, build: Callable[[], Divisible], goal: Goal) -> Iterator["Parts"]:
    """The space in parts, screened.

    Where nothing fits and there is no limit, layouts whose schedules hold more than there is room
    for are priced after all, to see what comes closest.
    build: makes the space, or as much of it as it takes to divide it.
    """
    with _screened(pricer, build, goal) as parts:
        left_out = parts.without_room and not parts.screened.num_fitting
        if not left_out or goal.everything or np.isfinite(goal.limit_seconds):
            yield parts
            return
    with _screened(pricer, build, replace(goal, everything=True)) as parts:
        yield parts


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSoFar:
    """What a part knows of the best layouts.

    fastest: the steps of those found, see `Shortlist.fastest`. more: whether it has cells left.
    """

    best: float
    fastest: list[float]
    structures: dict[int, float]
    more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a part has found. too_large, without_room: layouts left out, see `Screening`."""

    shortlist: Shortlist
    too_large: int
    without_room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBudgets:
    """The fastest layouts with a memory budget, of those that can take less than `worth` seconds.

    kinds: by dial the fastest of all, and of the simple ones.
    """

    worth: float
    kinds: list[list[LargestBudgets]]

    @property
    def least(self) -> float:
        """The step of the fastest; infinite if there is none."""
        found = [kind.seconds for kinds in self.kinds for kind in kinds]
        return float(np.concatenate([np.zeros(0), *found]).min(initial=np.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """How much of the space a part holds. rejected: candidates excluded on the way, see `Space`."""

    num_cells: int
    num_layouts: int
    rejected: Mapping[str, int]


class Part:
    """Some cells of a space, their screen and their budgets.

    share: which rows of what all parts are asked together this one takes: every so many, from its
        place among the parts.
    """

    def __init__(self, pricer: Pricer, draft: Divisible, goal: Goal, share: slice) -> None:
        self.pricer, self.draft, self.goal, self.share = pricer, draft, goal, share
        self.space: Space | None = None
        self.screening: Screening | None = None
        self.bases: list[Budgeted] = []

    def take(self) -> PartSize:
        """Makes its part of the space."""
        if self.share.step == 1:
            self.space = self.draft.whole()
        else:
            names = set(self.pricer.unit_fields) - {*MODE, *STAGE_COUNTS}
            self.space = self.draft.part(names, self.share.start, self.share.step)
        return PartSize(
            num_cells=len(self.space.cells),
            num_layouts=self.space.num_layouts,
            rejected=self.space.rejected,
        )

    @property
    def own_space(self) -> Space:
        """Its part of the space."""
        if self.space is None:
            raise ValueError("a part is asked before it took its cells")
        return self.space

    @property
    def _begun(self) -> Screening:
        if self.screening is None:
            self.screening = Screening(self.pricer, self.own_space, self.goal)
        return self.screening

    def round(self, best: float, ahead: float, structures: dict[int, float]) -> BestSoFar:
        """Screens the next cells, knowing what all parts have found (`Shortlist.hear`)."""
        known = self._begun.shortlist
        known.hear(best, ahead, structures)
        more = self._begun.round()
        return BestSoFar(
            best=known.best, fastest=known.fastest(), structures=known.structures, more=more
        )

    def found(self) -> Found:
        """What the rounds have found."""
        screening = self._begun
        return Found(
            shortlist=screening.shortlist,
            too_large=screening.too_large,
            without_room=screening.without_room,
        )

    def nearest(self) -> Found:
        """The same with what comes nearest to fitting."""
        self._begun.price_nearest()
        return self.found()

    def measured(self, layouts: LayoutBatch, keep: int) -> tuple[LayoutBatch, FloatColumn]:
        """(the `keep` fastest that fit and use nothing unmeasured, of the cells of these; seconds).

        That is of the cells that are this part's.
        """
        space, pricer = self._begun.space, self.pricer
        free = {name for expansion in space.expansions for name in expansion.table}
        names = [name for name, _ in space.cells.columns() if name not in free]
        screened = np.flatnonzero(~np.isnan(self._begun.cell_bounds.seconds))
        of_cells = hashes([taken(getattr(space.cells, name), screened) for name in names])
        asked = hashes([getattr(layouts, name) for name in names])
        batch = space.expand(screened[among(of_cells, asked)])
        batch = batch.take(np.asarray(~Weighed.of(batch, pricer).unmeasured.any(axis=1)))
        if not len(batch):
            return batch, np.zeros(0)
        bound, _ = pricer.step_lower_bounds(batch)
        batch = batch.take(np.argsort(bound, kind="stable")[:CHUNK])
        seconds, fits = priced_and_fitting(pricer, batch)
        rows = np.flatnonzero(fits)
        fastest = rows[np.argsort(seconds[rows], kind="stable")[:keep]]
        return batch.take(fastest), seconds[fastest]

    def fastest_budgets(self, worth_seconds: float) -> list[list[LargestBudgets]]:
        """By dial: the fastest with a budget below what is worth it, and the simple ones.

        As many as the goal says.
        """
        return [one.fastest(self.goal.budgets) for one in self._bases(worth_seconds)]

    def split_classes(self, limit: float) -> tuple[LayoutBatch, FloatColumn]:
        """See `budgets.split_classes`; for the first dial."""
        reach = [one for one in self.bases if one.worth >= limit] or self._bases(limit)
        return split_classes(self.pricer, reach[0], limit)

    def climbed(
        self, classes: LayoutBatch, budgets: BoolColumn, limit: float, exact: bool
    ) -> tuple[IntColumn, LayoutBatch]:
        """See `splits.climbed_splits`; for its own share of these classes."""
        rows = np.arange(len(classes))[self.share]
        if not len(rows):
            return rows, classes.take(rows)
        near, found = climbed_splits(self.pricer, classes.take(rows), budgets[rows], limit, exact)
        return rows[near], found

    def simulated(self, batch: LayoutBatch, share: IntColumn) -> tuple[IntColumn, FloatColumn]:
        """(rows of its own share, their steps, see `refine.simulated_step_seconds`)."""
        rows = np.flatnonzero(share == self.share.start)
        own = batch.take(rows)
        if not len(rows):
            return rows, np.zeros(0)
        return rows, simulated_step_seconds(self.pricer, own, self.pricer.times(own))

    def _bases(self, worth_seconds: float) -> list[Budgeted]:
        self.bases = budgeted(
            self.pricer, self._begun.space, self._begun.cell_bounds, worth_seconds
        )
        return self.bases


class Parts:
    """The parts of a space, and what their screens found together.

    pipelines: on which side each is simulated. efforts: what these take, by side.
    budgets: the fastest layouts with memory budgets, once they were sought.
    num_layouts, rejected: of the space. is_small: whether it may stay in memory beside its parts.
    """

    def __init__(self, sides_of: Sides[Part], draft: Divisible) -> None:
        self.sides, self.draft = sides_of, draft
        taken = self.sides.each(Part.take)
        self.num_layouts = sum(one.num_layouts for one in taken)
        rejected = Counter[str]()
        for one in taken:
            rejected.update(one.rejected)
        self.rejected = dict(rejected.most_common())
        self.is_small = sum(one.num_cells for one in taken) <= KEPT_WHOLE
        self.pipelines: dict[tuple[int, ...], int] = {}
        self.efforts = [0] * len(self.sides.states)
        self.budgets: KnownBudgets | None = None
        self.screened, self.without_room = self._screen()

    @cached_property
    def space(self) -> Space:
        """The whole space, which is made again if it was divided."""
        parts = self.sides.states
        return parts[0].own_space if len(parts) == 1 else self.draft.whole()

    @property
    def seeks_budgets(self) -> bool:
        """Whether layouts with memory budgets are sought."""
        return self.sides.states[0].goal.budgets > 0

    @property
    def nothing(self) -> LayoutBatch:
        """No layouts of this space."""
        return self.sides.states[0].own_space.cells.take(np.arange(0))

    def _screen(self) -> tuple[Screened, int]:
        part, ahead = self.sides.states[0], np.inf
        best, structures, more, goal = np.inf, dict[int, float](), True, part.goal
        while more:
            known = self.sides.each(Part.round, best, ahead, structures)
            best, more = min(one.best for one in known), any(one.more for one in known)
            for one in known:
                for key, value in one.structures.items():
                    structures[key] = min(structures.get(key, np.inf), value)
            fastest = sorted(step for one in known for step in one.fastest)[: goal.count]
            near = len(fastest) == goal.count and fastest[-1] <= goal.slack * best
            if more and goal.budgets and near and self.budgets is None:
                # budgets are sought before the next round, because they lower its limit
                worth = min(goal.limit_seconds, fastest[-1])
                self.budgets = KnownBudgets(worth=worth, kinds=self._fastest_budgets(worth))
                ahead = self.budgets.least
        found = self.sides.each(Part.found)
        too_large = sum(one.too_large for one in found)
        num_fitting = sum(one.shortlist.num_fitting for one in found)
        num_priced = sum(one.shortlist.num_priced for one in found)
        bounded_out = self.num_layouts - num_priced - too_large
        if not num_fitting and too_large and np.isinf(goal.limit_seconds):
            found = self.sides.each(Part.nearest)
        shortlist = Shortlist(goal.keep, goal.count, goal.smallest)
        for part_of_it in found:
            shortlist.join(part_of_it.shortlist)
        return (
            shortlist.result(
                part.pricer, self.nothing, bounded_out=bounded_out, too_large=too_large
            ),
            sum(one.without_room for one in found),
        )

    def measured(self, keep: int) -> LayoutBatch:
        """The `keep` fastest that fit and use nothing unmeasured, of the cells of those screened.

        They differ from those that are near the best in what a cell leaves open: schedule,
        dispatcher, ZeRO stage, switches. It may be empty.
        """
        found = self.sides.each(Part.measured, self.screened.batch, keep)
        order = np.argsort(np.concatenate([seconds for _, seconds in found]), kind="stable")
        return LayoutBatch.concatenate([batch for batch, _ in found]).take(order[:keep])

    def best_budgets(self, worth_seconds: float) -> LayoutBatch:
        """The `Goal.budgets` fastest fitting layouts with a budget that beat what is worth it.

        As many simple ones are added; the batch may be empty. Each layout comes with the largest
        budget that fits at all and with the largest that is safe.
        """
        pricer = self.sides.states[0].pricer
        known = self.budgets
        if known is None or known.worth < worth_seconds:
            known = KnownBudgets(worth=worth_seconds, kinds=self._fastest_budgets(worth_seconds))
        batches = [self.nothing]
        for dial, kinds in zip(dials(pricer), known.kinds, strict=True):
            near = [found.take(found.seconds < worth_seconds) for found in kinds]
            batches.append(with_safe(pricer, LargestBudgets.joined(near), dial))
        return LayoutBatch.concatenate(batches)

    def _fastest_budgets(self, worth_seconds: float) -> list[list[LargestBudgets]]:
        """By dial: the fastest of all parts, see `Part.fastest_budgets`."""
        keep = self.sides.states[0].goal.budgets
        of_parts = self.sides.each(Part.fastest_budgets, worth_seconds)
        return [
            [LargestBudgets.joined(kind).first(keep) for kind in zip(*of_dial, strict=True)]
            for of_dial in zip(*of_parts, strict=True)
        ]

    def split_classes(self, limit: float) -> tuple[LayoutBatch, FloatColumn]:
        """See `budgets.split_classes`."""
        found = self.sides.each(Part.split_classes, limit)
        return (
            LayoutBatch.concatenate([classes for classes, _ in found]),
            np.concatenate([floor for _, floor in found]),
        )

    def climbed(
        self, classes: LayoutBatch, budgets: BoolColumn, limit: float, exact: bool
    ) -> tuple[IntColumn, LayoutBatch]:
        """See `splits.climbed_splits`; classes know nothing of each other."""
        if self.sides.partner is None:  # shares would only be more to ask
            return climbed_splits(self.sides.states[0].pricer, classes, budgets, limit, exact)
        found = self.sides.each(Part.climbed, classes, budgets, limit, exact)
        rows = np.concatenate([near for near, _ in found])
        order = np.argsort(rows)
        return rows[order], LayoutBatch.concatenate([batch for _, batch in found]).take(order)

    def simulated(self, batch: LayoutBatch, prices: StepTimes) -> FloatColumn:
        """See `refine.simulated_step_seconds`; a pipeline is always simulated on the same side."""
        pricer = self.sides.states[0].pricer
        if self.sides.partner is None:
            return simulated_step_seconds(pricer, batch, prices)
        share = np.full(len(batch), -1)
        m = num_microbatches(batch, pricer.training)
        columns = (batch.pp_schedule, batch.pp, batch.virtual_stages, m)
        rows_of = {
            tuple(int(column[rows[0]]) for column in columns): rows
            for rows in groups(pricer, batch)
        }
        for pipeline in sorted(rows_of, key=_effort, reverse=True):
            if pipeline not in self.pipelines:
                side = self.efforts.index(min(self.efforts))
                self.efforts[side] += _effort(pipeline)
                self.pipelines[pipeline] = side
            share[rows_of[pipeline]] = self.pipelines[pipeline]
        step = prices.step_seconds.copy()
        for rows, seconds in self.sides.each(Part.simulated, batch, share):
            step[rows] = seconds
        return step


def _effort(pipeline: tuple[int, ...]) -> int:
    """How long the simulation of a pipeline (schedule, pp, stages, microbatches) takes, about.

    A stage takes as long as STAGE_MICROBATCHES on it, and of many microbatches most are
    repeated (`simulate.stretched`).
    """
    _, pp, stages, microbatches = pipeline
    return pp * stages * (STAGE_MICROBATCHES + min(microbatches, 5 * pp))


@contextmanager
def _screened(pricer: Pricer, build: Callable[[], Divisible], goal: Goal) -> Iterator[Parts]:
    draft = build()
    count = 1 if draft.most_cells < MANY else PARTS
    parts = [Part(pricer, draft, goal, slice(place, None, count)) for place in range(count)]
    with sides(pricer.beside, parts) as side_by_side:
        yield Parts(side_by_side, draft)
