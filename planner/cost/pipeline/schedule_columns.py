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
    for code, rows in _pipelined(batch):
        out[rows] = value(SCHEDULES.of_code(code), rows)
    return out


def _pipelined(batch: LayoutBatch) -> list[tuple[int, IntColumn]]:
    """(code, rows) of each schedule that a pipeline of the batch has, in the order of codes."""
    piped = np.flatnonzero(batch.pp > 1)
    codes = batch.pp_schedule[piped]
    there = np.flatnonzero(np.bincount(codes))
    if len(there) == 1:
        return [(int(there[0]), piped)]
    return [(int(code), piped[codes == code]) for code in there]


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
    found = [(SCHEDULES.of_code(code), rows) for code, rows in _pipelined(batch)]
    return [(schedule, rows) for schedule, rows in found if schedule.splits_backward]
