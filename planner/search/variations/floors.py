"""Floors under the step of a class: all layouts that differ in their split and memory budget alone.

A split can do no more than let all ranks compute equally long, hide half of their idle time, and
fill each of them with whole layers as far as its memory goes. Ranks in front, with most
microbatches in flight, hold few layers unless much is recomputed; what they cannot hold makes
others longer. So a class with a budget between b and c takes no less than the layers of the fullest
rank with the room that b leaves, each in the time that c leaves it. `open_classes` halves the range
of budgets until that bound is above the limit or the range is COARSE.
Letters: N layouts, R pipeline ranks, K kinds of layers, and all of them together as one more.
"""

from dataclasses import dataclass, replace

import numpy as np

from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.columns.table import Table
from planner.cost.chunks import slices
from planner.cost.lower_bounds import SPLIT_HIDES
from planner.cost.pipeline.schedule_columns import by_schedule, critical_pairs, num_microbatches
from planner.cost.price import Pricer, StepTimes
from planner.cost.stragglers import straggler_share
from planner.search.bounds import COARSE, STEPS
from planner.search.fit import most_device_bytes
from planner.work.checkpointing import MEMORY_BUDGET, NONE

RANKS_AT_ONCE = 2**16  # whose memory is priced together
FEW_RANKS = 2**14


@dataclass(frozen=True, slots=True)
class Fullest(Table):
    """The fullest rank of N pipelines under the most even split that memory allows, (K + 1, N).

    layers: of one kind (the last: of any) on it, at the least; infinite where they find no room.
    ranks: how many ranks hold as many, if none holds more.
    """

    layers: FloatColumn
    ranks: FloatColumn

    @classmethod
    def of(cls, counts: FloatColumn, most: FloatColumn, pp: IntColumn) -> "Fullest":
        """From layers of each kind, (K + 1,), and the room of each rank, (K + 1, R, N)."""
        counts = counts[:, None]
        low, high = np.ceil(counts / pp) - 1.0, np.broadcast_to(counts, (len(counts), len(pp)))
        while (high - low > 1.0).any():
            middle = np.floor((low + high) / 2.0)
            enough = np.minimum(most, middle[:, None]).sum(axis=1) >= counts
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        spare = np.minimum(most, high[:, None]).sum(axis=1) - counts
        ranks = (most >= high[:, None]).sum(axis=1) - spare
        return cls(np.where(spare < 0.0, np.inf, high), np.maximum(ranks, 1.0))

    @classmethod
    def anywhere(cls, counts: FloatColumn, pp: IntColumn) -> "Fullest":
        """Where every rank has room."""
        layers = np.ceil(counts[:, None] / pp)
        return cls(layers, counts[:, None] - (layers - 1.0) * pp)


@dataclass(frozen=True, slots=True)
class Pace(Table):
    """How fast N layouts are under any split, as far as their budget decides, (N,) or (K + 1, N).

    shared: a step with its compute shared evenly, idle seconds counted as far as no split hides
        them.
    outside: what of it is not compute or idle.
    layer: seconds that one layer on the fullest rank adds to a step.
    before: seconds that one in the first stage of a rank before it adds: its first microbatch
        forward, its last backward. None where weight gradients wait.
    stages (N,): on each rank.
    """

    shared: FloatColumn
    outside: FloatColumn
    layer: FloatColumn
    before: FloatColumn
    stages: FloatColumn

    @classmethod
    def of(cls, pricer: Pricer, batch: LayoutBatch, prices: StepTimes, mean: FloatColumn) -> "Pace":
        """From the prices of the batch.

        mean (N,): what a mean rank computes in a step, `Pricer.layout_lower_bounds`.
        """
        own = prices.own_factor * prices.stage_seconds.busy + prices.parts["straggler"]
        bubble = prices.parts["bubble"]
        outside = prices.step_seconds - own - bubble - prices.parts["pp"]
        seconds, kinds = prices.stage_seconds, len(pricer.unit_counts) - 2
        each = (seconds.forward + seconds.input_grad + seconds.weight_grad)[:kinds]
        each = np.concatenate([each, each.min(axis=0, keepdims=True)]) * prices.own_factor
        m = num_microbatches(batch, pricer.training)
        ordered = by_schedule(batch, lambda s, at: np.full(len(at), not s.splits_backward), 0.0)
        paired = critical_pairs(batch, m)
        late = 1.0 + straggler_share(pricer.cluster.num_gpus, pricer.profile.straggler_delay)
        return cls(
            shared=outside + np.minimum(own, mean) + (1.0 - SPLIT_HIDES) * bubble,
            outside=outside,
            layer=np.where(paired > 0, 0.0, late * m * each),
            before=np.where((ordered > 0) & ~(paired > 0), each, 0.0),
            stages=batch.virtual_stages.astype(np.float64),
        )

    def floor(self, fullest: Fullest) -> FloatColumn:
        """The step, (N,), at the least; infinite where layers find no room.

        Either the fullest rank holds no more, and the last of those that hold as many works after
        the others and ends before them, or some rank holds one layer more. Of several stages the
        first of the others holds a layer at least, but for that with the embedding.
        """
        room = np.isfinite(fullest.layers)
        layers = np.where(room, fullest.layers, 0.0)
        others = fullest.ranks - 1.0
        earlier = np.where(self.stages == 1.0, others * layers, np.maximum(others - 1.0, 0.0))
        alike = layers * self.layer + earlier * self.before
        longest = np.minimum(alike, (layers + 1.0) * self.layer).max(axis=0)
        return np.where(room.all(axis=0), np.maximum(self.shared, self.outside + longest), np.inf)


def floors(pricer: Pricer, batch: LayoutBatch, prices: StepTimes, mean: FloatColumn) -> FloatColumn:
    """The step of each pipelined layout under any split of its layers, at the least, (N,).

    Whatever its memory; `mean` as in `Pace.of`.
    """
    anywhere = Fullest.anywhere(_counts(pricer), batch.pp)
    return Pace.of(pricer, batch, prices, mean).floor(anywhere)


def open_classes(
    pricer: Pricer, classes: LayoutBatch, most: IntColumn, limit: float
) -> tuple[LayoutBatch, FloatColumn]:
    """(the classes with floors below the limit, those floors), each with its most promising budget.

    most (N,): the largest budget, in hundredths, that each may have.
    """
    owner = np.arange(len(classes))
    low, high = np.zeros(len(classes), dtype=np.int64), most
    if not len(classes):
        return classes, np.zeros(0)
    pace = _paces(pricer, with_budget(classes, high))
    near = pace.floor(Fullest.anywhere(_counts(pricer), classes.pp)) < limit
    owner, low, high, pace = owner[near], low[near], high[near], pace.take(near)
    fullest = _fullest(pricer, with_budget(classes.take(owner), low))
    while True:
        floor = pace.floor(fullest)
        near = floor < limit
        owner, low, high, floor = owner[near], low[near], high[near], floor[near]
        pace, fullest = pace.take(near), fullest.take(near)
        wide = np.flatnonzero(high - low > COARSE)
        if not len(wide):
            break
        done = np.flatnonzero(high - low <= COARSE)
        middle = (low[wide] + high[wide]) // 2
        there = with_budget(classes.take(owner[wide]), middle)
        paces, fullests = _paces(pricer, there), _fullest(pricer, there)
        keep = np.concatenate([done, wide, wide])
        pace = Pace.joined([pace.take(done), paces, pace.take(wide)])
        fullest = Fullest.joined([fullest.take(done), fullest.take(wide), fullests])
        owner = owner[keep]
        low = np.concatenate([low[done], low[wide], middle])
        high = np.concatenate([high[done], middle, high[wide]])
    order = np.lexsort((floor, owner))
    _, first = np.unique(owner[order], return_index=True)
    best = order[first]
    return with_budget(classes.take(owner[best]), high[best]), floor[best]


def floors_with_room(pricer: Pricer, batch: LayoutBatch, limit: float) -> FloatColumn:
    """The step of each layout under any split that fits, at the least, (N,).

    Infinite where none does, and where it is above the limit.
    """
    floor = np.full(len(batch), np.inf)
    if not len(batch):
        return floor
    pace = _paces(pricer, batch)
    near = np.flatnonzero(pace.floor(Fullest.anywhere(_counts(pricer), batch.pp)) < limit)
    floor[near] = pace.take(near).floor(_fullest(pricer, batch.take(near)))
    return floor


def with_budget(batch: LayoutBatch, hundredths: IntColumn) -> LayoutBatch:
    """The layouts with these memory budgets; a whole one is no recomputation at all."""
    none = hundredths >= STEPS
    return replace(
        batch,
        ac_kind=np.where(none, NONE, MEMORY_BUDGET),
        ac_value=np.where(none, 0.0, np.round(hundredths / STEPS, 2)),
    )


def _counts(pricer: Pricer) -> FloatColumn:
    """Layers of each kind and of all, (K + 1,)."""
    counts = pricer.unit_counts[:-2]
    return np.append(counts, counts.sum())


def _paces(pricer: Pricer, batch: LayoutBatch) -> Pace:
    parts = []
    for rows in slices(len(batch)):
        part = batch.take(rows)
        parts.append(Pace.of(pricer, part, pricer.times(part), pricer.layout_lower_bounds(part)))
    return Pace.joined(parts)


def _fullest(pricer: Pricer, batch: LayoutBatch) -> Fullest:
    """The fullest rank of each layout, with the room that its own budget leaves."""
    counts, device = _counts(pricer), most_device_bytes(pricer)
    layers, ranks = np.zeros((2, len(counts), len(batch)))
    for rows in parts(batch.pp):
        part = batch.take(rows)
        room = pricer.most_layers(part, device)
        found = Fullest.of(counts, np.concatenate([room, room.max(axis=0, keepdims=True)]), part.pp)
        layers[:, rows], ranks[:, rows] = found.layers, found.ranks
    return Fullest(layers, ranks)


def parts(pp: IntColumn) -> list[IntColumn]:
    """All rows by pp, in parts of at most RANKS_AT_ONCE ranks (or of one row).

    Pipelines of different lengths share a part as long as it has FEW_RANKS at most, counted as if
    all were as long as the longest, since a price of few rows takes as long as one of many.
    """
    order = np.argsort(pp, kind="stable")
    parts: list[IntColumn] = []
    start = 0
    while start < len(order):
        lengths = pp[order[start:]]
        few = int((lengths * np.arange(1, len(lengths) + 1) <= FEW_RANKS).sum())
        alike = int(np.searchsorted(lengths, lengths[0], side="right"))
        size = max(few, min(alike, RANKS_AT_ONCE // int(lengths[0])), 1)
        parts.append(order[start : start + size])
        start += size
    return parts
