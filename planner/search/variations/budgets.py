"""How much to recompute, for the layouts where it can matter.

A trainer is told by a memory budget (torch.compile's partitioner) or by the layers of each stage
that it recomputes (Megatron-LM's block-N). Below, a budget is either: the share, in hundredths,
that is not recomputed.

Budgets are too many to enumerate with the rest. A budget between 0 and 1 costs between full and no
recomputation in time, and the other way round in memory. Every cell of the space with full
checkpointing stands for all its budgets: its lower bound on memory must fit, and its time without
recomputation must beat the best so far. The largest budget that fits is found by bisection, for all
layouts at once; those whose smallest budget that does not fit is too slow drop out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.calibration.mechanisms import points
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch, one_number
from planner.columns.bisect import bisected
from planner.columns.table import Table
from planner.cost.layer.unit_costs import MODE
from planner.cost.price import Pricer
from planner.rules import Context, legal_mask
from planner.rules.features import largest_stage
from planner.search.bounds import STEPS, CellBounds
from planner.search.fit import OOM_LIMIT, fits_at_all, priced_and_fitting
from planner.search.space.enumerate import Space
from planner.search.variations.floors import open_classes
from planner.work.checkpointing import BLOCK, FULL, MEMORY_BUDGET, NONE

ROUND = 5 * 2**14  # layouts of cells that are asked at once what they compute
Dial = Callable[[LayoutBatch, IntColumn], LayoutBatch]  # the layouts with these budgets
# Judgement: a budget with one chance in 200 of running out of memory loses less by that than a
# smaller one loses in time.
SAFE_RISK = 0.005
FEW_POINTS = 2  # cells with more mechanisms than this are not simple, however small their budget


def with_safe(pricer: Pricer, fastest: "LargestBudgets", dial: Dial) -> LayoutBatch:
    """These layouts with the largest budget that fits at all, then with the largest safe one."""
    safe = _safe(pricer, fastest, dial)
    return LayoutBatch.concatenate(
        [dial(found.layouts, found.hundredths) for found in (fastest, safe)]
    )


def dials(pricer: Pricer) -> list[Dial]:
    """The ways in which the trainer can be told how much to recompute."""
    known = {
        "memory-budget": _with_budget,
        "block": lambda batch, hundredths: _with_blocks(pricer, batch, hundredths),
    }
    return [dial for kind, dial in known.items() if kind in pricer.rules.dials]


class Budgeted:
    """The layouts that may be worth a budget, expanded as far as anybody asked, fastest cell first.

    Cells are those that may fit with full recomputation and whose step is below `worth_seconds`
    with the largest budget that their memory bound allows.
    cells, most, least: rows of the space, their largest budget in hundredths (of block-N any), the
        least step that they then take.
    """

    def __init__(
        self,
        pricer: Pricer,
        space: Space,
        cell_bounds: CellBounds,
        worth_seconds: float,
        dial: Dial,
    ) -> None:
        self.pricer, self.space, self.worth, self.dial = pricer, space, worth_seconds, dial
        self.cell_bounds = cell_bounds
        rows = np.flatnonzero(space.cells.ac_kind == FULL)
        bare = cell_bounds.bare(rows)
        rows, least = rows[bare < worth_seconds], bare[bare < worth_seconds]
        fits = cell_bounds.may_fit(rows)
        rows, least = rows[fits], least[fits]
        most = np.full(len(rows), STEPS)
        if dial is _with_budget and len(rows):
            most = cell_bounds.largest_budgets(rows, worth_seconds)
            rows, most, least = rows[most >= 0], most[most >= 0], least[:0]
            if len(rows):
                tried = _with_budget(space.cells.take(rows), most)
                least = pricer.time_lower_bounds(tried, cell_bounds.idle.take(rows))
        order = np.argsort(least, kind="stable")[: int((least < worth_seconds).sum())]
        self.cells, self.most, self.least = rows[order], most[order], least[order]
        few = points(space.cells.take(self.cells), pricer) <= FEW_POINTS
        self.simple = few if len(rows) else np.zeros(0, dtype=np.bool_)
        self.known_rounds: list[_Round] = []

    def _rounds(self) -> Iterator["_Round"]:
        """All rounds, those known first."""
        yield from self.known_rounds
        first = sum(len(one.cells) for one in self.known_rounds)
        ends = np.cumsum(self.space.cell_sizes[self.cells])
        while first < len(self.cells):
            reached = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, reached + ROUND, side="right")))
            self.known_rounds.append(self._round(range(first, last)))
            yield self.known_rounds[-1]
            first = last

    def _round(self, cells: range) -> "_Round":
        """The layouts of these cells that may have a budget, with the cells' largest."""
        found = self.space.expanded(self.cells[cells.start : cells.stop])
        if self.dial is _with_budget:  # torch.compile's partitioner reads it
            found = found.take(found.batch(("compile",)).compile)
        found = found.take(self.cell_bounds.has_room(found))
        owner = cells.start + found.owner
        batch = self.dial(found.batch(), self.most[owner])
        seconds = np.zeros(0)
        if len(owner):
            seconds, _ = self.pricer.step_lower_bounds(batch, self.worth)
        one = _Round(cells=cells, batch=batch, simple=self.simple[owner], seconds=seconds)
        one = one.take(one.seconds < self.worth)
        half = self.dial(one.batch, np.full(len(one.batch), STEPS // 2))
        return one.take(legal_mask(half, self.pricer.rules_context, MODE))

    def fastest(self, keep: int) -> "list[LargestBudgets]":
        """The `keep` fastest layouts, and of those with few mechanisms.

        Each is at its largest budget that fits.
        """
        found = LargestBudgets.none(self.space.cells.take(slice(0, 0)))
        limits = StepLimits(every=self.worth, simple=self.worth)
        for one in self._rounds():
            limit = limits.simple if self.simple[one.cells[0] :].any() else limits.every
            if self.least[one.cells[0]] >= limit:
                break
            near = one.take(one.seconds < limits.of(one.simple))
            more = largest_budgets(self.pricer, near.batch, near.simple, limits, keep, self.dial)
            found = LargestBudgets.joined([found, more])
            limits = limits.lowered(found.seconds, found.simple, keep)
        return [found.first(keep), found.take(found.simple).first(keep)]

    def pipelined(self, limit: float) -> LayoutBatch:
        """All pipelined layouts whose lower bound is below the limit, with a budget each."""
        parts = [self.space.cells.take(slice(0, 0))]
        for one in self._rounds():
            if self.least[one.cells[0]] >= limit:
                break
            parts.append(one.batch.take((one.batch.pp > 1) & (one.seconds < limit)))
        return LayoutBatch.concatenate(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round(Table):
    """Cells expanded at once, by their place among all: their layouts and what bounds them.

    simple (N,): whether the layout's cell is. seconds (N,): lower bound of the layout's step.
    """

    cells: range
    batch: LayoutBatch
    simple: BoolColumn
    seconds: FloatColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Step seconds beyond which a layout is not among the fastest that are wanted.

    every: among all. simple: among the simple ones.
    """

    every: float
    simple: float

    def of(self, simple: BoolColumn) -> FloatColumn:
        """The limit of each layout, (N,); a simple one may be among either."""
        return np.where(simple, self.simple, self.every)

    def lowered(self, seconds: FloatColumn, simple: BoolColumn, keep: int) -> "StepLimits":
        """The limits if `keep` of each kind are wanted and layouts with these seconds are known."""
        return StepLimits(
            every=min(self.every, _slowest_of(seconds, keep)),
            simple=min(self.simple, _slowest_of(seconds[simple], keep)),
        )


def _slowest_of(seconds: FloatColumn, keep: int) -> float:
    """Seconds of the slowest of the `keep` fastest; infinite if there are not as many."""
    return float(np.partition(seconds, keep - 1)[keep - 1]) if keep <= len(seconds) else np.inf


def budgeted(
    pricer: Pricer, space: Space, cell_bounds: CellBounds, worth_seconds: float
) -> list[Budgeted]:
    """One for each way in which the trainer can be told how much to recompute."""
    return [Budgeted(pricer, space, cell_bounds, worth_seconds, dial) for dial in dials(pricer)]


def _with_blocks(pricer: Pricer, batch: LayoutBatch, hundredths: IntColumn) -> LayoutBatch:
    """The layouts with the budgets as layers of each stage, rounded to more recomputation."""
    layers = largest_stage(batch, pricer.rules_context)
    count = np.ceil((1.0 - hundredths / STEPS) * layers)
    kind = np.where(count >= layers, FULL, np.where(count > 0, BLOCK, NONE))
    return replace(batch, ac_kind=kind, ac_value=np.where(kind == BLOCK, count, 0.0))


def _with_budget(batch: LayoutBatch, hundredths: IntColumn) -> LayoutBatch:
    return replace(
        batch,
        ac_kind=one_number(MEMORY_BUDGET, len(batch)),
        ac_value=np.round(hundredths / STEPS, 2),
    )


def split_classes(pricer: Pricer, bases: Budgeted, limit: float) -> tuple[LayoutBatch, FloatColumn]:
    """(pipelined layouts with a promising budget, their floors), below the limit.

    One for each class of layouts that differ in their split and budget alone (`floors`).
    """
    classes = bases.pipelined(limit)
    most = np.round(classes.ac_value * STEPS).astype(np.int64)
    return open_classes(pricer, classes, most, limit)


def takes_budget(pricer: Pricer, batch: LayoutBatch) -> BoolColumn:
    """Whether another layout of the same class has a budget that does what this one does, (N,).

    A whole budget is no recomputation, budget 0 is full recomputation.
    """
    context = Context(model=pricer.model, cluster=pricer.cluster, training=pricer.training)
    ends = (batch.ac_kind == NONE) | (batch.ac_kind == FULL)
    some = np.full(len(batch), STEPS // 2)
    return np.asarray(ends & batch.compile & legal_mask(_with_budget(batch, some), context, MODE))


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBudgets(Table):
    """Layouts, the largest budget of each that fits, and its step with it, (N,).

    simple: whether the layout is of a cell with few mechanisms.
    """

    layouts: LayoutBatch
    simple: BoolColumn
    hundredths: IntColumn
    seconds: FloatColumn

    @classmethod
    def none(cls, nothing: LayoutBatch) -> "LargestBudgets":
        return cls(
            layouts=nothing,
            simple=np.zeros(0, dtype=np.bool_),
            hundredths=np.zeros(0, dtype=np.int64),
            seconds=np.zeros(0),
        )

    def first(self, count: int) -> "LargestBudgets":
        return self.take(np.argsort(self.seconds, kind="stable")[:count])


def largest_budgets(
    pricer: Pricer,
    bases: LayoutBatch,
    simple: BoolColumn,
    limits: StepLimits,
    keep: int,
    dial: Dial,
) -> LargestBudgets:
    """The largest budget below 1 that fits, for each base that can beat its limit.

    Time falls and memory grows with the budget. The answer lies between one that fits and one that
    does not; the step there bounds it from below. A base that fits without recomputation needs no
    budget, and budget 0 is full recomputation. A base that is among neither the `keep` fastest nor
    the `keep` fastest simple ones may be left out.
    """
    some = fits_at_all(pricer, dial(bases, np.full(len(bases), 0)))
    bases, simple = bases.take(some), simple[some]
    seconds, fits = priced_and_fitting(pricer, dial(bases, np.full(len(bases), STEPS)))
    left = ~fits & (seconds < limits.of(simple))
    return _bisected(
        pricer,
        bases.take(left),
        simple[left],
        np.full(int(left.sum()), STEPS),
        seconds[left],
        dial,
        limits=limits,
        keep=keep,
        risk=OOM_LIMIT,
    )


def _safe(pricer: Pricer, fastest: LargestBudgets, dial: Dial) -> LargestBudgets:
    """The largest budgets of these layouts that are safe, where some are."""
    return _bisected(
        pricer,
        fastest.layouts,
        fastest.simple,
        fastest.hundredths + 1,
        np.full(len(fastest.layouts), -np.inf),
        dial,
        limits=StepLimits(every=np.inf, simple=np.inf),
        keep=len(fastest.layouts) + 1,
        risk=SAFE_RISK,
    )


def _bisected(
    pricer: Pricer,
    bases: LayoutBatch,
    simple: BoolColumn,
    high: IntColumn,
    high_seconds: FloatColumn,
    dial: Dial,
    *,
    limits: StepLimits,
    keep: int,
    risk: float,
) -> LargestBudgets:
    """The largest budget below `high`, in hundredths, at which each base fits, where one does.

    high_seconds: the step there, at the most. limits, keep: see `largest_budgets`.
    risk: the largest allowed P(out of memory).
    """
    seconds = np.full(len(bases), np.inf)

    def fits_with(rows: IntColumn, middle: IntColumn) -> tuple[BoolColumn, BoolColumn]:
        nonlocal limits
        tried, fits = priced_and_fitting(pricer, dial(bases.take(rows), middle), risk)
        seconds[rows] = np.where(fits, tried, seconds[rows])
        high_seconds[rows] = np.where(fits, high_seconds[rows], tried)
        limits = limits.lowered(seconds[rows], simple[rows], keep)
        return fits, high_seconds[rows] <= limits.of(simple[rows])

    rows, most, _ = bisected(np.zeros(len(bases), dtype=np.int64), high, fits_with)
    return LargestBudgets(
        layouts=bases.take(rows), simple=simple[rows], hundredths=most, seconds=seconds[rows]
    ).take(most > 0)
