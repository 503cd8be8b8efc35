"""Columns that depend on the pipeline schedule: each schedule of a batch fills its own rows."""

from collections.abc import Callable, Sequence

import numpy as np

from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.schedules import SCHEDULES, Schedule
from planner.specs.training import TrainingSpec


def num_microbatches(batch: LayoutBatch, training: TrainingSpec) -> FloatColumn:
    """Microbatches (or accumulation steps) of one step, (N,), at least one."""
    return np.maximum(
        1.0,
        training.global_batch_size
        / (batch.micro_batch_size.astype(np.float64) * batch.dp_replicate * batch.dp_shard),
    )


def by_schedule(
    batch: LayoutBatch, value: Callable[[Schedule, IntColumn], FloatColumn], alone: float
) -> FloatColumn:
    """A column filled schedule by schedule: value(schedule, rows) where pp > 1.

    alone: the value of layouts without a pipeline.
    """
    return filled((len(batch),), schedule_rows(batch), value, alone)


def filled(
    shape: tuple[int, ...],
    schedules: Sequence[tuple[Schedule, IntColumn]],
    value: Callable[[Schedule, IntColumn], FloatColumn],
    alone: float,
) -> FloatColumn:
    """Columns (..., N) of this shape: value(schedule, rows) at its rows, else `alone`."""
    out = np.full(shape, alone)
    for schedule, rows in schedules:
        out[..., rows] = value(schedule, rows)
    return out


def schedule_rows(batch: LayoutBatch) -> list[tuple[Schedule, IntColumn]]:
    """The schedules of the batch's pipelines, in the order of their codes, each with its rows."""
    piped = np.flatnonzero(batch.pp > 1)
    code = batch.pp_schedule.take(piped).astype(np.uint8)
    counts = np.bincount(code)
    ordered = piped.take(np.argsort(code, kind="stable"))  # of bytes, which is a count
    found = np.flatnonzero(counts)
    rows = np.split(ordered, np.cumsum(counts[found])[:-1])
    return [(SCHEDULES.of_code(int(one)), at) for one, at in zip(found, rows, strict=False)]


def critical_pairs(batch: LayoutBatch, m: FloatColumn) -> FloatColumn:
    """Overlapped pairs on the critical path of each layout (`Schedule.pairs_on_critical_path`)."""
    return by_schedule(
        batch,
        lambda s, at: s.pairs_on_critical_path(
            batch.pp[at], batch.virtual_stages[at], m[at].astype(np.int64)
        ),
        0.0,
    )
