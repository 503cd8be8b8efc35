"""Activation memory budgets: how much to recompute, for the layouts where it can matter. They are too many to enumerate with the rest.

A budget between 0 and 1 costs between no and full recomputation, in time and in memory. Every cell of the space with full checkpointing
stands for all its budgets: its memory floor must fit, and its time without recomputation must beat what is known. The most promising are
expanded and priced on a grid of budgets, then finely around the best.
"""

from dataclasses import replace

import numpy as np

from planner.calibration.intervals import oom_probability
from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.cost.price import CHUNK, Pricer
from planner.rules import Context, legal_mask
from planner.search.floors import OOM_LIMIT, Floors
from planner.search.space import Space
from planner.work.checkpointing import FULL, MEMORY_BUDGET

MOST_CELLS = 96
AT_ONCE = 4096
COARSE = np.linspace(0.1, 0.9, 9)
FINE = np.linspace(-0.09, 0.09, 19)
MOST_BASES = 48


def best_budgets(pricer: Pricer, space: Space, floors: Floors, worth_seconds: float, keep: int) -> LayoutBatch:
    """The `keep` fastest fitting layouts with a memory budget, among bases whose time floor is below `worth_seconds`; may be empty.

    floors: of the space's cells.
    """
    cells = _worth(space, floors, worth_seconds)
    if not len(cells):
        return space.cells.take(slice(0, 0))
    bases = space.expand(cells)
    bases = bases.take(bases.compile)
    coarse, step = _fitting(pricer, _with_budgets(bases, COARSE))
    best = coarse.take(np.argsort(step, kind="stable")[:MOST_BASES])
    near = np.clip(np.round(best.ac_value[:, None] + FINE[None], 2), 0.0, 1.0).ravel()
    fine, step = _fitting(pricer, replace(best.take(np.repeat(np.arange(len(best)), len(FINE))), ac_value=near))
    return fine.take(np.argsort(step, kind="stable")[:keep])


def _worth(space: Space, floors: Floors, worth_seconds: float) -> IntColumn:
    """Up to MOST_CELLS cells with full checkpointing that may fit and whose bare time is below `worth_seconds`, fastest first."""
    rows = np.flatnonzero((space.cells.ac_kind == FULL) & (floors.bare_seconds < worth_seconds))
    rows = rows[np.argsort(floors.bare_seconds[rows], kind="stable")]
    found = rows[:0]
    for start in range(0, len(rows), AT_ONCE):
        part = rows[start : start + AT_ONCE]
        found = np.concatenate([found, part[floors.may_fit(part)]])
        if len(found) >= MOST_CELLS:
            break
    return found[:MOST_CELLS]


def _with_budgets(bases: LayoutBatch, budgets: FloatColumn) -> LayoutBatch:
    """Every base with every budget."""
    rows = np.repeat(np.arange(len(bases)), len(budgets))
    kinds = np.full(len(rows), MEMORY_BUDGET)
    return replace(bases.take(rows), ac_kind=kinds, ac_value=np.tile(budgets, len(bases)))


def _fitting(pricer: Pricer, batch: LayoutBatch) -> tuple[LayoutBatch, FloatColumn]:
    """The legal layouts that fit, with their step seconds."""
    batch = batch.take(legal_mask(batch, Context(model=pricer.model, cluster=pricer.cluster, training=pricer.training)))
    kept, steps = [batch.take(slice(0, 0))], [np.zeros(0)]
    for start in range(0, len(batch), CHUNK):
        part = batch.take(slice(start, start + CHUNK))
        prices = pricer.price(part)
        fits = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes) <= OOM_LIMIT
        kept.append(part.take(fits))
        steps.append(prices.step_seconds[fits])
    return LayoutBatch.concatenate(kept), np.concatenate(steps)
