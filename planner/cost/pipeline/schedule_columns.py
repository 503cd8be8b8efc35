"""Columns that depend on the pipeline schedule: each schedule of a batch fills its own rows."""

from collections.abc import Callable

import numpy as np

from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.schedules import SCHEDULES, Schedule
from planner.specs.training import TrainingSpec


def num_microbatches(batch: LayoutBatch, training: TrainingSpec) -> FloatColumn:
    """Microbatches (or accumulation steps) of one step, (N,), at least one."""
    return np.maximum(
        1.0,
        training.global_batch_size
        / (batch.micro_batch_size * batch.dp_replicate * batch.dp_shard).astype(np.float64),
    )


def by_schedule(
    batch: LayoutBatch, value: Callable[[Schedule, IntColumn], FloatColumn], alone: float
) -> FloatColumn:
    """A column filled schedule by schedule: value(schedule, rows) where pp > 1.

    alone: the value of layouts without a pipeline.
    """
    out = np.full(len(batch), alone)
    for code in np.unique(batch.pp_schedule):
        rows = np.flatnonzero((batch.pp_schedule == code) & (batch.pp > 1))
        if len(rows):
            out[rows] = value(SCHEDULES.of_code(int(code)), rows)
    return out


def critical_pairs(batch: LayoutBatch, m: FloatColumn) -> FloatColumn:
    """Overlapped pairs on the critical path of each layout (`Schedule.pairs_on_critical_path`)."""
    return by_schedule(
        batch,
        lambda s, at: s.pairs_on_critical_path(
            batch.pp[at], batch.virtual_stages[at], m[at].astype(np.int64)
        ),
        0.0,
    )


def split_schedules(batch: LayoutBatch) -> list[tuple[Schedule, IntColumn]]:
    """Schedules of the batch that compute weight gradients separately, each with its rows."""
    found = [(SCHEDULES.of_code(int(code)), code) for code in np.unique(batch.pp_schedule)]
    split = [(schedule, code) for schedule, code in found if schedule.splits_backward]
    rows = [
        (schedule, np.flatnonzero((batch.pp_schedule == code) & (batch.pp > 1)))
        for schedule, code in split
    ]
    return [(schedule, at) for schedule, at in rows if len(at)]
