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
from dataclasses import replace
from functools import lru_cache

import numpy as np

from planner.columns import TRAINER_SPLIT, BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.cost_inputs import on_ranks
from planner.cost.lower_bounds import SPLIT_HIDES
from planner.cost.pipeline import stages
from planner.cost.price import Pricer
from planner.cost.refine import simulated_step_seconds
from planner.rules import Context, legal_mask
from planner.schedules import SCHEDULES
from planner.search.bounds import COARSE, STEPS
from planner.search.fit import fitting
from planner.search.variations.floors import parts, pieces, with_budget
from planner.specs.layout import Layout
from planner.work.checkpointing import MEMORY_BUDGET

CLASSES = 128  # searched at once
CLIMBED = 1.05  # judgement: moves gain no more over the best start, its bubble apart
PLATEAU = 1e-4  # what ranks below the busiest count: of two equal steps the more even one leads on
SLOPES = (0.0, 0.5, 1.0, 2.0)  # layers that each rank holds more than the one before it, at first
BUDGET_STEPS = (0, 1, -1, 2, 4, 8)  # the first four where each is simulated
AMOUNTS, SEVERAL = (1, 2, 4), 8  # layers moved at once, off a stage that has more than SEVERAL
TAKERS = 3
MOST_STEPS = 24
LEAST_GAIN = 1e-6
EVENNESS = 16
ROOM = 0.97  # judgement
BISECTIONS = 30
ROUNDING = 1e-9
UNFIT = 1e6  # seconds: beyond every step; times bytes of what does not fit
ALL_PAIRS = 12  # stages up to which every single move is simulated

Split = tuple[int, ...]


def shifted(pricer: Pricer, layout: Layout, first: int, last: int) -> Split:
    """The trainer's split with `first` and `last` layers moved to the inner stages.

    They are moved from the outer stages, as evenly as possible.
    """
    sizes = np.array(
        stages.layers_of_stages(LayoutBatch.from_layouts([layout]), 0, pricer.model, pricer.rules)
    )
    if len(sizes) < 3:
        return tuple(
            int(size) for size in (sizes + np.array([-first, first] if len(sizes) == 2 else [0]))
        )
    sizes[0] -= first
    sizes[-1] -= last
    moved = first + last
    for step in range(abs(moved)):
        inner = sizes[1:-1]
        place = 1 + int(np.argmin(inner) if moved > 0 else np.argmax(inner))
        sizes[place] += 1 if moved > 0 else -1
        del step
    return tuple(int(size) for size in sizes)


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
        even = [_even(pricer.model.num_hidden_layers, int(number)) for number in count]
        may = (count > 1) & legal_mask(_with_splits(classes, even), context)
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
            found = Climb(self.pricer, self.classes.take(rows), self.budgets[rows]).by_price(limit)
        return found

    def polished(self, layouts: LayoutBatch) -> LayoutBatch:
        """What single moves make of these layouts, each move simulated."""
        budgets = (layouts.ac_kind == MEMORY_BUDGET) & self.budgets.any()
        return Climb(self.pricer, layouts, budgets).exactly()


class Climb:
    """Steps from split to split, for C classes. S: stages of one of them, R: most ranks of any."""

    def __init__(self, pricer: Pricer, classes: LayoutBatch, budgets: BoolColumn) -> None:
        self.pricer, self.classes, self.budgets = pricer, classes, budgets

    def by_price(self, limit: float) -> LayoutBatch:
        """The best split and budget of each class by closed forms, where it is near the limit."""
        own = replace(self.classes, split=np.full(len(self.classes), TRAINER_SPLIT))
        owners: list[int] = []
        splits: list[Split] = []
        own_splits = [
            stages.layers_of_stages(own, row, self.pricer.model, self.pricer.rules)
            for row in range(len(own))
        ]
        for row, split in enumerate(own_splits):
            ranks = tuple(self._ranks(row).tolist())
            starts = dict.fromkeys(_sloped(split, slope, ranks) for slope in SLOPES)
            splits += starts
            owners += [row] * len(starts)
        own_budget = (self.classes.ac_value * STEPS).astype(np.int64)
        _, _, loads, _ = self._judged(self._at(np.arange(len(own)), own_splits, own_budget), False)
        for row, split in enumerate(own_splits):
            pp = int(self.classes.pp[row])
            splits.append(_balanced(split, self._ranks(row), loads[:pp, row]))
            owners.append(row)
        at = np.array(owners, dtype=np.int64)
        hundredths = self._largest_budgets(at, splits)
        return self._climbed(at, splits, hundredths, exact=False, limit=limit)

    def exactly(self) -> LayoutBatch:
        """The best split and budget of each class by the simulation, from the classes' own on."""
        batch, rows = self.classes, np.arange(len(self.classes))
        splits = [
            stages.layers_of_stages(batch, row, self.pricer.model, self.pricer.rules)
            for row in rows.tolist()
        ]
        budget = np.where(batch.ac_kind == MEMORY_BUDGET, np.round(batch.ac_value * STEPS), STEPS)
        return self._climbed(rows, splits, budget.astype(np.int64), exact=True, limit=np.inf)

    def _ranks(self, row: int) -> IntColumn:
        """The rank of each stage of this class, (S,)."""
        pp, virtual = int(self.classes.pp[row]), int(self.classes.virtual_stages[row])
        schedule = SCHEDULES.of_code(int(self.classes.pp_schedule[row]))
        return schedule.stage_rank(np.arange(pp * virtual), pp, virtual)

    def _at(self, owners: IntColumn, splits: Sequence[Split], hundredths: IntColumn) -> LayoutBatch:
        batch = _with_splits(self.classes.take(owners), splits)
        budgeted, rows = with_budget(batch, hundredths), self.budgets[owners]
        return replace(
            batch,
            ac_kind=np.where(rows, budgeted.ac_kind, batch.ac_kind),
            ac_value=np.where(rows, budgeted.ac_value, batch.ac_value),
        )

    def _climbed(
        self,
        owners: IntColumn,
        tried: Sequence[Split],
        budget: IntColumn,
        *,
        exact: bool,
        limit: float,
    ) -> LayoutBatch:
        """From the best of these splits and budgets of each class up to where no move gains.

        limit: seconds; classes too far above are left out.
        """
        count = len(self.classes)
        value, idle, loads, filled = self._judged(self._at(owners, tried, budget), exact)
        here = _best_of_each(owners, value, count)
        splits, hundredths = [tried[row] for row in here], budget[here]
        value, idle = value[here], idle[here]
        loads, filled = loads[:, here], filled[:, here]
        active = np.flatnonzero(value - idle < CLIMBED * limit)
        for _ in range(MOST_STEPS):
            if not len(active):
                break
            owners, tried, budget = self._moves(splits, hundredths, loads, filled, active, exact)
            batch = self._at(owners, tried, budget)
            if not exact:
                rows = self._faster(batch, value[owners])
                owners, tried, budget = owners[rows], [tried[row] for row in rows], budget[rows]
                batch = batch.take(rows)
            found, their_idle, their_loads, their_filled = self._judged(batch, exact)
            active = np.intersect1d(active, owners)
            best = _best_of_each(owners, found, count)[active]
            better = found[best] < value[active] * (1.0 - LEAST_GAIN)
            active, best = active[better], best[better]
            for row, chosen in zip(active.tolist(), best.tolist(), strict=True):
                splits[row] = tried[chosen]
                loads[: len(their_loads), row] = their_loads[: len(loads), chosen]
                filled[: len(their_filled), row] = their_filled[: len(filled), chosen]
            hundredths[active], value[active] = budget[best], found[best]
            idle[active] = their_idle[best]
        kept = np.flatnonzero((value - idle < limit) & (value < UNFIT))
        return self._at(kept, [splits[row] for row in kept], hundredths[kept])

    def _faster(self, batch: LayoutBatch, value: FloatColumn) -> IntColumn:
        """Rows whose step alone is below the value (N,): no other is worth more, whatever it fills.

        Their time takes a fraction of what their memory does.
        """
        step = [
            self.pricer.step_seconds(batch.take(rows)) for rows in pieces(np.arange(len(batch)))
        ]
        return np.flatnonzero(np.concatenate(step) < value * (1.0 - LEAST_GAIN + ROUNDING))

    def _judged(
        self, batch: LayoutBatch, exact: bool
    ) -> tuple[FloatColumn, FloatColumn, FloatColumn, FloatColumn]:
        """(what to minimise (N,), idle seconds that a split may hide (N,), ranks' seconds, bytes).

        Letters of the last two: (R, N).

        Seconds of a step; of two equal ones the more even pipeline leads on. Those that do not fit
        come behind, fewest bytes first.
        """
        most = int(self.classes.pp.max())
        value, idle = np.zeros(len(batch)), np.zeros(len(batch))
        loads, filled = np.zeros((most, len(batch))), np.zeros((most, len(batch)))
        for rows in parts(batch.pp):
            part = batch.take(rows)
            prices = self.pricer.price(part, every_rank=True)
            seconds = prices.stage_seconds
            per_unit = seconds.forward + seconds.input_grad + seconds.weight_grad
            ranks = np.arange(len(prices.rank))[:, None]
            loads[: len(ranks), rows] = np.where(
                ranks < part.pp, on_ranks(prices.rank_units, per_unit), 0.0
            )
            filled[: len(prices.rank_reserved_bytes), rows] = prices.rank_reserved_bytes
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

    def _largest_budgets(self, owners: IntColumn, splits: Sequence[Split]) -> IntColumn:
        """The largest budget that fits, in hundredths, at least 0 and to within COARSE."""
        low, high = np.zeros(len(owners), dtype=np.int64), np.full(len(owners), STEPS + COARSE)
        while self.budgets[owners].any() and (high - low > COARSE).any():
            middle = (low + high) // 2
            batch = self._at(owners, splits, middle)
            device = [
                self.pricer.least_device_bytes(batch.take(rows))
                for rows in pieces(np.arange(len(batch)))
            ]
            fits = fitting(self.pricer, np.concatenate(device))
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return np.minimum(low, STEPS)

    def _moves(
        self,
        splits: Sequence[Split],
        hundredths: IntColumn,
        loads: FloatColumn,
        filled: FloatColumn,
        active: IntColumn,
        exact: bool,
    ) -> tuple[IntColumn, list[Split], IntColumn]:
        """(class, split, budget) of every next step."""
        owners: list[int] = []
        tried: list[Split] = []
        budget: list[int] = []
        for row in active.tolist():
            split, rank_S, pp = splits[row], self._ranks(row), int(self.classes.pp[row])
            pairs = _helpful_pairs(np.array(split), rank_S, loads[:pp, row], filled[:pp, row])
            if exact:
                pairs = list(dict.fromkeys([*pairs, *_all_pairs(split)]))
            nexts = [split, *(_moved(split, *pair) for pair in pairs)]
            steps = BUDGET_STEPS[: 4 if exact else None] if self.budgets[row] else (0,)
            amounts = np.clip(hundredths[row] + np.array(steps), 0, STEPS).tolist()
            for one in filter(_possible, nexts):
                tried += [one] * len(amounts)
                budget += amounts
                owners += [row] * len(amounts)
        return np.array(owners, dtype=np.int64), tried, np.array(budget, dtype=np.int64)


@lru_cache(maxsize=4096)
def _sloped(split: Split, slope: float, ranks_of_stages: tuple[int, ...]) -> Split:
    """The split with `slope` layers more on each rank than on the one before it."""
    rank_S = np.array(ranks_of_stages)
    sizes, ranks = np.array(split), int(rank_S.max()) + 1
    wanted = np.round(slope * (np.arange(ranks) - (ranks - 1) / 2.0)).astype(np.int64)
    wanted[-1] -= wanted.sum()
    for rank in np.flatnonzero(wanted).tolist():
        here = np.flatnonzero(rank_S == rank)
        for _ in range(abs(int(wanted[rank]))):
            more = wanted[rank] > 0
            place = np.argmin(sizes[here]) if more else np.argmax(_spare(sizes)[here])
            sizes[here[place]] += 1 if more else -1
    found = tuple(int(size) for size in sizes)
    return found if _possible(found) else split


def _balanced(split: Split, rank_S: IntColumn, loads: FloatColumn) -> Split:
    """The split after moves of single layers from the busiest to the idlest rank.

    loads: seconds of each rank. A layer takes what the rank with least beside its layers shows.
    """
    sizes, loads = np.array(split), loads.copy()
    held = np.bincount(rank_S, weights=sizes, minlength=len(loads))
    layer = float((loads / np.maximum(held, 1.0)).min())
    for _ in range(int(sizes.sum())):
        most, least = int(np.argmax(loads)), int(np.argmin(loads))
        giving, taking = np.flatnonzero(rank_S == most), np.flatnonzero(rank_S == least)
        giver = giving[np.argmax(_spare(sizes)[giving])]
        if loads[least] + layer >= loads[most] or not _spare(sizes)[giver]:
            break
        sizes[giver] -= 1
        sizes[taking[np.argmin(sizes[taking])]] += 1
        loads[[most, least]] += (-layer, layer)
    return tuple(int(size) for size in sizes)


def _spare(sizes: IntColumn) -> IntColumn:
    """Layers that each stage can give away, (S,)."""
    ends = np.isin(np.arange(len(sizes)), (0, len(sizes) - 1))
    return np.asarray(sizes - ~ends)


def _possible(split: Split) -> bool:
    """Whether every stage holds a layer; the embedding or the head alone make one too."""
    return min(split[0], split[-1]) >= 0 and min(split[1:-1], default=1) >= 1


def _moved(split: Split, giver: int, taker: int, layers: int) -> Split:
    sizes = list(split)
    sizes[giver] -= layers
    sizes[taker] += layers
    return tuple(sizes)


def _helpful_pairs(
    split: IntColumn, rank_S: IntColumn, loads: FloatColumn, filled: FloatColumn
) -> list[tuple[int, int, int]]:
    """(stage that gives, stage that takes, layers): off the busiest and the fullest rank."""
    found: dict[tuple[int, int, int], None] = {}
    least = {*np.argsort(loads)[:TAKERS].tolist(), *np.argsort(filled)[:TAKERS].tolist()}
    for most in (int(np.argmax(loads)), int(np.argmax(filled))):
        here = np.flatnonzero(rank_S == most)
        giver = int(here[np.argmax(_spare(split)[here])])
        for rank in sorted(least - {most}):
            here = np.flatnonzero(rank_S == rank)
            taker = int(here[np.argmin(split[here])])
            for layers in AMOUNTS if split[giver] > SEVERAL else AMOUNTS[:1]:
                found[giver, taker, layers] = None
    return list(found)


def _all_pairs(split: Split) -> list[tuple[int, int, int]]:
    """Every single move; of a long pipeline those between its ends and extreme stages."""
    ends = {0, len(split) - 1, split.index(max(split)), split.index(min(split))}
    those = range(len(split)) if len(split) <= ALL_PAIRS else sorted(ends)
    return [(giver, taker, 1) for giver in those for taker in those if giver != taker]


def _best_of_each(owners: IntColumn, value: FloatColumn, count: int) -> IntColumn:
    """Row of the lowest value of each owner 0 .. count - 1; 0 for one without rows."""
    best = np.zeros(count, dtype=np.int64)
    order = np.lexsort((value, owners))
    there, first = np.unique(owners[order], return_index=True)
    best[there] = order[first]
    return best


@lru_cache(maxsize=512)
def _even(layers: int, count: int) -> Split:
    return tuple(layers // count + (stage < layers % count) for stage in range(count))


def _with_splits(batch: LayoutBatch, splits: Sequence[Split]) -> LayoutBatch:
    table = dict.fromkeys(splits)
    places = {split: place for place, split in enumerate(table)}
    return replace(
        batch,
        split=np.array([places[split] for split in splits], dtype=np.int64),
        splits=tuple(table),
    )
