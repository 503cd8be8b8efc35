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
    batch: LayoutBatch,
    value: Callable[[Schedule, IntColumn], FloatColumn],
    alone: float,
    *,
    shape: tuple[int, ...] | None = None,
) -> FloatColumn:
    """Columns filled schedule by schedule: value(schedule, rows) where pp > 1.

    alone: the value of layouts without a pipeline.
    shape: of the result, (..., N); (N,) if not given.
    """
    out = np.full(len(batch) if shape is None else shape, alone)
    for schedule, rows in schedule_rows(batch):
        out[..., rows] = value(schedule, rows)
    return out


def schedule_rows(batch: LayoutBatch) -> list[tuple[Schedule, IntColumn]]:
    """The schedules of the batch's pipelines, in the order of their codes, each with its rows."""
    piped = np.flatnonzero(batch.pp > 1)
    code = batch.pp_schedule[piped].astype(np.uint8)
    found = np.flatnonzero(np.bincount(code))
    if len(found) == 1:
        return [(SCHEDULES.of_code(int(found[0])), piped)]
    return [(SCHEDULES.of_code(int(each)), piped[code == each]) for each in found]


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
    return [(s, rows) for s, rows in schedule_rows(batch) if s.splits_backward]
