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

from dataclasses import replace
from functools import partial

import numpy as np

from planner.calibration.mechanisms import points
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.layer.unit_costs import MODE
from planner.cost.price import Pricer
from planner.rules import legal_mask
from planner.rules.features import largest_stage
from planner.search.bounds import STEPS, CellBounds
from planner.search.space.enumerate import Space
from planner.search.variations.dials import Dial, DialSearch, Turned, turned_below
from planner.search.variations.floors import open_classes, with_budget
from planner.work.checkpointing import BLOCK, FULL, NONE

# Judgement: a budget with one chance in 200 of running out of memory loses less by that than a
# smaller one loses in time.
SAFE_RISK = 0.005
FEW_POINTS = 2  # cells with more mechanisms than this are not simple, however small their budget
# torch.compile's partitioner reads it
BUDGET = Dial(
    least=1, steps=STEPS, at=with_budget, changes=MODE, reads=("compile",),
    takes=lambda batch: batch.compile,
)  # fmt: skip


def dials(pricer: Pricer) -> list[Dial]:
    """The ways in which the trainer can be told how much to recompute."""
    blocks = Dial(least=1, steps=STEPS, at=partial(_with_blocks, pricer), changes=MODE)
    known = {"memory-budget": BUDGET, "block": blocks}
    return [dial for kind, dial in known.items() if kind in pricer.rules.dials]


def _with_blocks(pricer: Pricer, batch: LayoutBatch, hundredths: IntColumn) -> LayoutBatch:
    """The layouts with the budgets as layers of each stage, rounded to more recomputation."""
    layers = largest_stage(batch, pricer.rules_context)
    count = np.ceil((1.0 - hundredths / STEPS) * layers)
    kind = np.where(count >= layers, FULL, np.where(count > 0, BLOCK, NONE))
    return replace(batch, ac_kind=kind, ac_value=np.where(kind == BLOCK, count, 0.0))


def budgeted(
    pricer: Pricer, space: Space, cell_bounds: CellBounds, worth_seconds: float, dial: Dial
) -> DialSearch:
    """The search for budgets with which layouts take less than `worth_seconds`.

    Its cells are those that may fit with full recomputation, and whose step is below that with the
    largest budget that their memory bound allows (of block-N any).
    """
    rows = np.flatnonzero(space.cells.ac_kind == FULL)
    bare = cell_bounds.bare(rows)
    near = bare < worth_seconds
    near[near] = cell_bounds.may_fit(rows[near])
    rows, least = rows[near], bare[near]
    most = np.full(len(rows), STEPS)
    if dial is BUDGET and len(rows):
        most = cell_bounds.largest_budgets(rows, worth_seconds)
        rows, most, least = rows[most >= 0], most[most >= 0], least[:0]
        if len(rows):
            tried = with_budget(space.cells.take(rows), most)
            least = pricer.time_lower_bounds(tried, cell_bounds.idle.take(rows))
    return DialSearch(pricer, space, dial, rows, most, least, worth_seconds, cell_bounds)


def simple(search: DialSearch) -> BoolColumn:
    """Mask of the search's cells that use few mechanisms."""
    if not len(search.cells):
        return np.zeros(0, dtype=np.bool_)
    return points(search.space.cells.take(search.cells), search.pricer) <= FEW_POINTS


def with_safe(pricer: Pricer, fastest: Turned, dial: Dial) -> LayoutBatch:
    """These layouts with the largest budget that fits at all, then with the largest safe one."""
    bases, above = fastest.bases, np.full(len(fastest.bases), -np.inf)
    safe = turned_below(pricer, bases, dial, fastest.number + 1, above, risk=SAFE_RISK)
    return LayoutBatch.concatenate([dial.at(one.bases, one.number) for one in (fastest, safe)])


def split_classes(
    pricer: Pricer, search: DialSearch, limit: float
) -> tuple[LayoutBatch, FloatColumn]:
    """(pipelined layouts with a promising budget, their floors), below the limit.

    One for each class of layouts that differ in their split and budget alone (`floors`).
    """
    classes, most = [search.space.cells.take(slice(0, 0))], [np.zeros(0, dtype=np.int64)]
    for one in search.rounds():
        if search.least[one.first] >= limit:
            break
        near = (one.layouts.pp > 1) & (one.seconds < limit)
        classes.append(one.layouts.take(near))
        most.append(search.most[one.cell[near]])
    return open_classes(pricer, LayoutBatch.concatenate(classes), np.concatenate(most), limit)


def takes_budget(pricer: Pricer, batch: LayoutBatch) -> BoolColumn:
    """Whether another layout of the same class has a budget that does what this one does, (N,).

    A whole budget is no recomputation, budget 0 is full recomputation.
    """
    ends = (batch.ac_kind == NONE) | (batch.ac_kind == FULL)
    some = BUDGET.all_at(batch, STEPS // 2)
    return np.asarray(ends & batch.compile & legal_mask(some, pricer.rules_context, MODE))
