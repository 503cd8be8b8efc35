"""Layer splits, and the memory budget that goes with each.

The trainer's own split is even, or nearly. Another one wins where embedding and head weigh more or
less than a layer, where the first ranks, which hold most microbatches in flight, decide how much is
recomputed, and where a later rank's bubble leaves it time.

A class is all layouts that differ only in their split, and in their memory budget where budgets are
open. `SplitSearch` goes through the classes in the order of a floor under each: its step if all
ranks computed equally long and half its idle time were hidden. Half is what splits can hide: ranks
whose work shrinks by (1 - 1/m) from one to the next end their steps together, after
p / (1 - (1 - 1/m)^p) microbatches' work instead of m + p - 1, which is m + (p - 1) / 2 at least.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.columns import (
    TRAINER_SPLIT,
    BoolColumn,
    FloatColumn,
    IntColumn,
    LayoutBatch,
    one_number,
)
from planner.columns.bisect import bisected
from planner.columns.table import Table
from planner.cost.cost_inputs import on_ranks
from planner.cost.lower_bounds import SPLIT_HIDES
from planner.cost.pipeline import stages
from planner.cost.price import Pricer, StepTimes
from planner.cost.refine import simulated_step_seconds
from planner.rules import Context, legal_mask
from planner.schedules import SCHEDULES
from planner.search.bounds import COARSE, STEPS
from planner.search.fit import fits_at_all, fitting, priced_and_fitting
from planner.search.variations.floors import parts, with_budget
from planner.search.variations.split_moves import (
    Holders,
    Split,
    all_pairs,
    balanced,
    even,
    helpful_pairs,
    holders_of,
    moved,
    possible,
    sloped,
)
from planner.work.checkpointing import MEMORY_BUDGET

CLASSES = 512  # searched at once
CLIMBED = 1.05  # judgement: moves gain no more over the best start, its bubble apart
PLATEAU = 1e-4  # what ranks below the busiest count: of two equal steps the more even one leads on
SLOPES = (0.0, 0.5, 1.0, 2.0)  # layers that each rank holds more than the one before it, at first
BUDGET_STEPS = (0, 1, -1, 2, 4, 8)  # the first four where each is simulated
TAKERS = 3
MOST_STEPS = 24
LEAST_GAIN = 1e-6
EVENNESS = 16
ROUNDING = 1e-9
UNFIT = 1e6  # seconds: beyond every step; times bytes of what does not fit


class SplitSearch:
    """Goes through classes of pipelined layouts, the most promising first.

    classes (C,): one layout of each; of those with an open budget the one with the largest budget
        that may fit under any split.
    budgets (C,): whether the class's budget is open.
    floor (C,): see `floors`.
    """

    def __init__(
        self, pricer: Pricer, classes: LayoutBatch, budgets: BoolColumn, floor: FloatColumn
    ) -> None:
        context = Context(model=pricer.model, cluster=pricer.cluster, training=pricer.training)
        count = classes.pp * classes.virtual_stages
        evenly = [even(pricer.model.num_hidden_layers, int(number)) for number in count]
        may = (count > 1) & legal_mask(_with_splits(classes, evenly), context, ("split",))
        rows = np.flatnonzero(may)[np.argsort(floor[may], kind="stable")]
        self.pricer, self.classes = pricer, classes.take(rows)
        self.budgets, self.floor, self.reached = budgets[rows], floor[rows], 0

    def next(self, limit: float) -> LayoutBatch:
        """The next classes with floors below the limit, each with its best split by closed forms.

        Only those near the limit are returned. Empty when there are none left.
        """
        found = self.classes.take(slice(0, 0))
        while not len(found):
            below = int(np.searchsorted(self.floor, limit))
            rows = slice(self.reached, min(self.reached + CLASSES, below))
            if rows.stop <= rows.start:
                break
            self.reached = rows.stop
            climb = Climb(self.pricer, self.classes.take(rows), self.budgets[rows])
            found = climb.by_price(limit)
        return found

    def polished(self, layouts: LayoutBatch) -> LayoutBatch:
        """Best of these layouts after single moves, each move simulated."""
        budgets = (layouts.ac_kind == MEMORY_BUDGET) & self.budgets.any()
        return Climb(self.pricer, layouts, budgets).exactly()


@dataclass(frozen=True, slots=True)
class Tried(Table):
    """Splits and budgets to try, N of them.

    owner (N,): whose class.
    split (N,): place in `splits`, which are distinct.
    budget (N,): in hundredths.
    """

    owner: IntColumn
    split: IntColumn
    splits: tuple[Split, ...]
    budget: IntColumn

    @classmethod
    def of(cls, owner: IntColumn, splits: Sequence[Split], budget: IntColumn) -> "Tried":
        places = {split: place for place, split in enumerate(dict.fromkeys(splits))}
        at = np.array([places[split] for split in splits], dtype=np.int64)
        return cls(owner, at, tuple(places), budget)


class Climb:
    """Steps from split to split, for C classes. S: stages of one of them, R: most ranks of any."""

    def __init__(self, pricer: Pricer, classes: LayoutBatch, budgets: BoolColumn) -> None:
        self.pricer, self.classes, self.budgets = pricer, classes, budgets

    def by_price(self, limit: float) -> LayoutBatch:
        """Classes near the limit with the best split and budget of each, by closed forms."""
        own = replace(self.classes, split=one_number(TRAINER_SPLIT, len(self.classes)))
        owners: list[int] = []
        splits: list[Split] = []
        own_splits = [
            stages.layers_of_stages(own, row, self.pricer.model, self.pricer.rules)
            for row in range(len(own))
        ]
        for row, split in enumerate(own_splits):
            starts = dict.fromkeys(sloped(split, slope, self._holders(row)) for slope in SLOPES)
            splits += starts
            owners += [row] * len(starts)
        own_budget = (self.classes.ac_value * STEPS).astype(np.int64)
        loads = self._loads(self._at(Tried.of(np.arange(len(own)), own_splits, own_budget)))
        for row, split in enumerate(own_splits):
            pp = int(self.classes.pp[row])
            splits.append(balanced(split, self._holders(row), loads[:pp, row]))
            owners.append(row)
        at = np.array(owners, dtype=np.int64)
        tried = self._with_largest_budgets(Tried.of(at, splits, np.zeros(len(at), dtype=np.int64)))
        return self._climbed(tried, exact=False, limit=limit)

    def exactly(self) -> LayoutBatch:
        """All classes with the best split and budget of each by the simulation, from its own on."""
        batch, rows = self.classes, np.arange(len(self.classes))
        splits = [
            stages.layers_of_stages(batch, row, self.pricer.model, self.pricer.rules)
            for row in rows.tolist()
        ]
        budget = np.where(batch.ac_kind == MEMORY_BUDGET, np.round(batch.ac_value * STEPS), STEPS)
        tried = Tried.of(rows, splits, budget.astype(np.int64))
        return self._climbed(tried, exact=True, limit=np.inf)

    def _holders(self, row: int) -> Holders:
        return holders_of(
            SCHEDULES.of_code(int(self.classes.pp_schedule[row])),
            int(self.classes.pp[row]),
            int(self.classes.virtual_stages[row]),
        )

    def _at(self, tried: Tried) -> LayoutBatch:
        batch = replace(self.classes.take(tried.owner), split=tried.split, splits=tried.splits)
        budgeted, rows = with_budget(batch, tried.budget), self.budgets[tried.owner]
        return replace(
            batch,
            ac_kind=np.where(rows, budgeted.ac_kind, batch.ac_kind),
            ac_value=np.where(rows, budgeted.ac_value, batch.ac_value),
        )

    def _climbed(self, tried: Tried, *, exact: bool, limit: float) -> LayoutBatch:
        """Layouts of the classes: from the best of these of each up to where no move gains.

        limit: seconds; classes too far above are left out.
        """
        count = len(self.classes)
        value, idle, loads, filled = self._judged(self._at(tried), exact)
        here = _best_of_each(tried.owner, value, count)
        splits = [tried.splits[place] for place in tried.split[here]]
        hundredths = tried.budget[here]
        value, idle = value[here], idle[here]
        loads, filled = loads[:, here], filled[:, here]
        active = np.flatnonzero(value - idle < CLIMBED * limit)
        for _ in range(MOST_STEPS):
            if not len(active):
                break
            tried = self._moves(splits, hundredths, loads, filled, active, exact)
            batch = self._at(tried)
            if not exact:
                rows = self._faster(batch, value[tried.owner])
                tried, batch = tried.take(rows), batch.take(rows)
                active = active[np.isin(active, tried.owner)]
            found, their_idle, their_loads, their_filled = self._judged(batch, exact)
            best = _best_of_each(tried.owner, found, count)[active]
            better = found[best] < value[active] * (1.0 - LEAST_GAIN)
            active, best = active[better], best[better]
            for row, place in zip(active.tolist(), tried.split[best].tolist(), strict=True):
                splits[row] = tried.splits[place]
            loads[:, active], filled[:, active] = their_loads[:, best], their_filled[:, best]
            hundredths[active], value[active] = tried.budget[best], found[best]
            idle[active] = their_idle[best]
        kept = np.flatnonzero((value - idle < limit) & (value < UNFIT))
        return self._at(Tried.of(kept, [splits[row] for row in kept], hundredths[kept]))

    def _faster(self, batch: LayoutBatch, value: FloatColumn) -> IntColumn:
        """Rows whose step alone is below the value (N,), and whose deciding ranks fit.

        No other is worth more, whatever it fills. Deciding ranks are priced in a fraction of the
        time that all take. Value: that of layouts that fit.
        """
        step, fits = priced_and_fitting(self.pricer, batch)
        return np.flatnonzero(fits & (step < value * (1.0 - LEAST_GAIN + ROUNDING)))

    def _judged(
        self, batch: LayoutBatch, exact: bool
    ) -> tuple[FloatColumn, FloatColumn, FloatColumn, FloatColumn]:
        """(what to minimise (N,), idle seconds that a split may hide (N,), ranks' seconds, bytes).

        Letters of the last two: (R, N).

        Seconds of a step; of two equal ones the more even pipeline leads on. Those that do not fit
        come behind, fewest bytes first.
        """
        value, idle = np.zeros(len(batch)), np.zeros(len(batch))
        loads, filled = np.zeros((2, int(self.classes.pp.max()), len(batch)))
        for rows in parts(batch.pp):
            part = batch.take(rows)
            prices = self.pricer.price(part, every_rank=True)
            _put(loads, rows, part.pp, _rank_seconds(prices))
            _put(filled, rows, part.pp, prices.rank_reserved_bytes)
            step = (
                simulated_step_seconds(self.pricer, part, prices) if exact else prices.step_seconds
            )
            uneven = sum(
                ((held[:, rows] / held[:, rows].max(axis=0)) ** EVENNESS).mean(axis=0)
                for held in (loads, filled)
            )
            fits = fitting(self.pricer, prices.least_device_bytes)
            worth = step * (1.0 + PLATEAU * uneven)
            value[rows] = np.where(fits, worth, UNFIT * prices.least_device_bytes)
            idle[rows] = SPLIT_HIDES * prices.parts["bubble"] + prices.parts["pp"]
        return value, idle, loads, filled

    def _loads(self, batch: LayoutBatch) -> FloatColumn:
        """Seconds of each rank's own work on one microbatch, (R, N)."""
        loads = np.zeros((int(self.classes.pp.max()), len(batch)))
        for rows in parts(batch.pp):
            part = batch.take(rows)
            _put(loads, rows, part.pp, _rank_seconds(self.pricer.times(part, every_rank=True)))
        return loads

    def _with_largest_budgets(self, tried: Tried) -> Tried:
        """With the largest budget that fits, at least 0 and to within COARSE, where it is open."""
        if not self.budgets[tried.owner].any():
            return tried

        def fits(rows: IntColumn, middle: IntColumn) -> tuple[BoolColumn, BoolColumn]:
            batch = self._at(replace(tried.take(rows), budget=middle))
            return fits_at_all(self.pricer, batch), np.ones(len(rows), dtype=np.bool_)

        least = np.zeros(len(tried.owner), dtype=np.int64)
        _, low, _ = bisected(least, least + STEPS + COARSE, fits, COARSE)
        return replace(tried, budget=np.minimum(low, STEPS))

    def _moves(
        self,
        splits: Sequence[Split],
        hundredths: IntColumn,
        loads: FloatColumn,
        filled: FloatColumn,
        active: IntColumn,
        exact: bool,
    ) -> Tried:
        """Every next step."""
        owners, at, places = list[int](), list[int](), dict[Split, int]()
        extremes = self._extremes(active, loads, filled)
        for row in active.tolist():
            split = splits[row]
            pairs = helpful_pairs(split, self._holders(row), *extremes[row])
            if exact:
                pairs = list(dict.fromkeys([*pairs, *all_pairs(split)]))
            nexts = [split, *(moved(split, *pair) for pair in pairs)]
            chosen = [places.setdefault(one, len(places)) for one in filter(possible, nexts)]
            at += chosen
            owners += [row] * len(chosen)
        owner, steps = np.array(owners, dtype=np.int64), BUDGET_STEPS[: 4 if exact else None]
        counts = np.where(self.budgets[owner], len(steps), 1)
        which = np.repeat(np.arange(len(owner)), counts)
        place = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        return Tried(
            owner=owner[which],
            split=np.array(at, dtype=np.int64)[which],
            splits=tuple(places),
            budget=np.clip(hundredths[owner[which]] + np.array(steps)[place], 0, STEPS),
        )

    def _extremes(
        self, rows: IntColumn, loads: FloatColumn, filled: FloatColumn
    ) -> dict[int, tuple[tuple[int, int], set[int]]]:
        """By class: (busiest rank, fullest rank), and the ranks that compute or hold least."""
        found: dict[int, tuple[tuple[int, int], set[int]]] = {}
        for pp in np.unique(self.classes.pp[rows]).tolist():
            here = rows[self.classes.pp[rows] == pp]
            held = np.stack([loads[:pp, here], filled[:pp, here]])
            most = held.argmax(axis=1).T.tolist()
            least = np.argsort(held, axis=1)[:, :TAKERS].reshape(-1, len(here)).T.tolist()
            for row, (busiest, fullest), takers in zip(here.tolist(), most, least, strict=True):
                found[row] = (busiest, fullest), set(takers)
        return found


def _rank_seconds(times: StepTimes) -> FloatColumn:
    """Seconds of each rank's own work on one microbatch, (R, N)."""
    seconds = times.stage_seconds
    per_unit = seconds.forward + seconds.input_grad + seconds.weight_grad
    return on_ranks(times.rank_units, per_unit)


def _put(held: FloatColumn, rows: IntColumn, pp: IntColumn, of_rank: FloatColumn) -> None:
    """Writes what the ranks (R, N) of some layouts hold; there is no rank from pp on."""
    ranks = np.arange(len(of_rank))[:, None]
    held[: len(ranks), rows] = np.where(ranks < pp, of_rank, 0.0)


def _best_of_each(owners: IntColumn, value: FloatColumn, count: int) -> IntColumn:
    """Row of the lowest value of each owner 0 .. count - 1; 0 for one without rows."""
    best = np.zeros(count, dtype=np.int64)
    order = np.lexsort((value, owners))
    there, first = np.unique(owners[order], return_index=True)
    best[there] = order[first]
    return best


def _with_splits(batch: LayoutBatch, splits: Sequence[Split]) -> LayoutBatch:
    tried = Tried.of(np.arange(len(batch)), splits, np.zeros(len(batch), dtype=np.int64))
    return replace(batch, split=tried.split, splits=tried.splits)
