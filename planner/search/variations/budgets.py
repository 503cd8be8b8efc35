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

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.calibration.intervals import oom_probability
from planner.calibration.mechanisms import points
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.chunks import CHUNK
from planner.cost.price import Pricer
from planner.rules import Context, legal_mask
from planner.rules.features import largest_stage
from planner.search.bounds import OOM_LIMIT, STEPS, CellBounds
from planner.search.space.enumerate import Space
from planner.search.variations.floors import open_classes
from planner.work.checkpointing import BLOCK, FULL, MEMORY_BUDGET, NONE

ROUND = 2 * CHUNK  # layouts expanded at once
Dial = Callable[[LayoutBatch, IntColumn], LayoutBatch]  # the layouts with these budgets
# Judgement: a budget with one chance in 200 of running out of memory loses less by that than a
# smaller one loses in time.
SAFE_RISK = 0.005
FEW_POINTS = 2  # cells with more mechanisms than this are not simple, however small their budget


def best_budgets(
    pricer: Pricer, space: Space, cell_bounds: CellBounds, worth_seconds: float, keep: int
) -> LayoutBatch:
    """The `keep` fastest fitting layouts with a budget that can beat `worth_seconds`.

    As many simple ones are added; the batch may be empty. Each layout comes with the largest budget
    that fits at all and with the largest that is safe.
    cell_bounds: lower bounds of the space's cells.
    """
    full = np.flatnonzero(space.cells.ac_kind == FULL)
    simple = full[points(space.cells.take(full), pricer) <= FEW_POINTS]
    empty, all_found = space.cells.take(slice(0, 0)), []
    for dial in _dials(pricer):
        found = [
            _best_of(pricer, space, cell_bounds, rows, worth_seconds, keep, dial)
            for rows in (full, simple)
        ]
        fastest = LayoutBatch.concatenate(found)
        safe, _ = largest_budgets(pricer, fastest, np.inf, len(fastest), dial, risk=SAFE_RISK)
        all_found += [fastest, safe]
    return LayoutBatch.concatenate([empty, *all_found])


def dialled(pricer: Pricer) -> bool:
    """Whether the trainer can be told how much to recompute."""
    return bool(_dials(pricer))


def _dials(pricer: Pricer) -> list[Dial]:
    known = {
        "memory-budget": _with_budget,
        "block": lambda batch, hundredths: _with_blocks(pricer, batch, hundredths),
    }
    return [dial for kind, dial in known.items() if kind in pricer.rules.ac_kinds]


def _best_of(
    pricer: Pricer,
    space: Space,
    cell_bounds: CellBounds,
    rows: IntColumn,
    worth_seconds: float,
    keep: int,
    dial: Dial,
) -> LayoutBatch:
    """The `keep` fastest layouts of these cells at their largest budget that fits."""
    if not len(rows):
        return space.cells.take(slice(0, 0))
    cells, most, least = _worth(pricer, space, cell_bounds, rows, worth_seconds, dial)
    found, seconds, limit, first = space.cells.take(slice(0, 0)), np.zeros(0), worth_seconds, 0
    while first < len(cells) and least[first] < limit:
        parts = [space.cells.take(slice(0, 0))]
        while first < len(cells) and least[first] < limit and sum(map(len, parts)) < CHUNK:
            last = first + _round(space.cell_sizes[cells[first:]])
            these = slice(first, last)
            parts.append(_bases(pricer, space, cells[these], most[these], limit, dial))
            first = last
        bases = LayoutBatch.concatenate(parts)
        more, their_seconds = largest_budgets(pricer, bases, limit, keep, dial)
        found, seconds = (
            LayoutBatch.concatenate([found, more]),
            np.concatenate([seconds, their_seconds]),
        )
        order = np.argsort(seconds, kind="stable")[:keep]
        found, seconds = found.take(order), seconds[order]
        limit = float(seconds[-1]) if len(seconds) == keep else limit
    return found


def _round(sizes: IntColumn) -> int:
    """How many of these cells, from the first, make ROUND layouts; at least one."""
    return max(1, int(np.searchsorted(np.cumsum(sizes), ROUND, side="right")))


def _worth(
    pricer: Pricer, space: Space, cell_bounds: CellBounds, rows: IntColumn, limit: float, dial: Dial
) -> tuple[IntColumn, IntColumn, FloatColumn]:
    """(cells that may be worth a budget, the largest they may have, their least step with it).

    Those are cells that may fit and whose step is below the limit with the largest budget, in
    hundredths, that their memory bound allows; fastest first. Of block-N any may be allowed.
    """
    bare = cell_bounds.bare(rows)
    rows, bare = rows[bare < limit], bare[bare < limit]
    fits = cell_bounds.may_fit(rows)
    rows, least = rows[fits], bare[fits]
    most = np.full(len(rows), STEPS)
    if dial is _with_budget and len(rows):
        most = cell_bounds.largest_budgets(rows)
        least = pricer.time_lower_bounds(_with_budget(space.cells.take(rows), most))
    order = np.argsort(least, kind="stable")[: int((least < limit).sum())]
    return rows[order], most[order], least[order]


def _bases(
    pricer: Pricer, space: Space, cells: IntColumn, most: IntColumn, limit: float, dial: Dial
) -> LayoutBatch:
    """The layouts of these cells that may have a budget, with the cells' largest.

    Only those whose lower bound on time is then below the limit.
    """
    batch = dial(space.expand(cells), np.repeat(most, space.cell_sizes[cells]))
    if dial is _with_budget:
        batch = batch.take(batch.compile)
    if not len(batch):
        return batch
    batch = batch.take(pricer.step_lower_bounds(batch)[0] < limit)
    context = Context(model=pricer.model, cluster=pricer.cluster, training=pricer.training)
    return batch.take(legal_mask(dial(batch, np.full(len(batch), STEPS // 2)), context))


def _with_blocks(pricer: Pricer, batch: LayoutBatch, hundredths: IntColumn) -> LayoutBatch:
    """The layouts with the budgets as layers of each stage, rounded to more recomputation."""
    layers = largest_stage(batch, pricer.rules_context)
    count = np.ceil((1.0 - hundredths / STEPS) * layers)
    kind = np.where(count >= layers, FULL, np.where(count > 0, BLOCK, NONE))
    return replace(batch, ac_kind=kind, ac_value=np.where(kind == BLOCK, count, 0.0))


def _with_budget(batch: LayoutBatch, hundredths: IntColumn) -> LayoutBatch:
    return replace(
        batch, ac_kind=np.full(len(batch), MEMORY_BUDGET), ac_value=np.round(hundredths / STEPS, 2)
    )


def split_classes(
    pricer: Pricer, space: Space, cell_bounds: CellBounds, limit: float
) -> tuple[LayoutBatch, FloatColumn]:
    """(pipelined layouts with a promising budget, their floors), below the limit.

    One for each class of layouts that differ in their split and budget alone (`floors`).
    """
    rows = np.flatnonzero((space.cells.ac_kind == FULL) & (space.cells.pp > 1))
    if not len(rows):
        return space.cells.take(rows), np.zeros(0)
    cells, most, _ = _worth(pricer, space, cell_bounds, rows, limit, _with_budget)
    found, first = [space.cells.take(slice(0, 0))], 0
    while first < len(cells):
        last = first + _round(space.cell_sizes[cells[first:]])
        these = slice(first, last)
        found.append(_bases(pricer, space, cells[these], most[these], limit, _with_budget))
        first = last
    bases = LayoutBatch.concatenate(found)
    return open_classes(pricer, bases, np.round(bases.ac_value * STEPS).astype(np.int64), limit)


def takes_budget(pricer: Pricer, batch: LayoutBatch) -> BoolColumn:
    """Whether another layout of the same class has a budget that does what this one does, (N,).

    A whole budget is no recomputation, budget 0 is full recomputation.
    """
    context = Context(model=pricer.model, cluster=pricer.cluster, training=pricer.training)
    ends = (batch.ac_kind == NONE) | (batch.ac_kind == FULL)
    some = np.full(len(batch), STEPS // 2)
    return np.asarray(ends & batch.compile & legal_mask(_with_budget(batch, some), context))


def largest_budgets(
    pricer: Pricer,
    bases: LayoutBatch,
    limit: float,
    keep: int,
    dial: Dial = _with_budget,
    *,
    risk: float = OOM_LIMIT,
) -> tuple[LayoutBatch, FloatColumn]:
    """The largest budget below 1 that fits, for each base that can beat the limit.

    Returns the layouts and their step seconds.
    risk: the largest allowed P(out of memory).

    Time falls and memory grows with the budget. The answer lies between `low`, which fits, and
    `high`, which does not; the step at `high` bounds it from below. A base that fits without
    recomputation needs no budget, and budget 0 is full recomputation.
    """
    seconds, fits = _price(pricer, dial(bases, np.full(len(bases), 0)))
    bases, low_seconds = bases.take(fits), seconds[fits]
    high_seconds, fits = _price(pricer, dial(bases, np.full(len(bases), STEPS)))
    open_rows = ~fits & (high_seconds < limit)
    bases, low_seconds, high_seconds = (
        bases.take(open_rows),
        low_seconds[open_rows],
        high_seconds[open_rows],
    )
    low, high = np.full(len(bases), 0), np.full(len(bases), STEPS)
    while len(bases) and (high - low > 1).any():
        middle = (low + high) // 2
        seconds, fits = _price(pricer, dial(bases, middle), risk)
        low, low_seconds = np.where(fits, middle, low), np.where(fits, seconds, low_seconds)
        high, high_seconds = np.where(fits, high, middle), np.where(fits, high_seconds, seconds)
        limit = (
            min(limit, float(np.partition(low_seconds, keep - 1)[keep - 1]))
            if len(bases) >= keep
            else limit
        )
        alive = high_seconds <= limit
        bases, low, high = bases.take(alive), low[alive], high[alive]
        low_seconds, high_seconds = low_seconds[alive], high_seconds[alive]
    return dial(bases, low).take(low > 0), low_seconds[low > 0]


def _price(
    pricer: Pricer, batch: LayoutBatch, risk: float = OOM_LIMIT
) -> tuple[FloatColumn, BoolColumn]:
    """(step seconds, whether it fits), (N,)."""
    seconds, fits = np.zeros(len(batch)), np.zeros(len(batch), dtype=np.bool_)
    for start in range(0, len(batch), CHUNK):
        rows = slice(start, start + CHUNK)
        prices = pricer.price(batch.take(rows))
        seconds[rows] = prices.step_seconds
        fits[rows] = (
            oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes) <= risk
        )
    return seconds, fits
