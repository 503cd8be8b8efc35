"""Costs of units, shards and ranks, from which time and memory of N layouts are summed.

They are computed at distinct rows.
Letters: N layouts, U distinct rows, R pipeline ranks priced, K + 2 units (layers by kind,
embedding, head).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.columns import FloatColumn, IntColumn, LayoutBatch, groups, taken
from planner.cost import chunks
from planner.cost.cost_rows import CostRows, open_columns, unit_key
from planner.cost.data_parallel import sharding
from planner.cost.layer.unit_costs import MODE, UnitCosts, unit_costs
from planner.cost.layer.unit_work import TRAVEL_FIELDS, Savings, UnitWork, savings, unit_work
from planner.cost.prepared_job import PreparedJob
from planner.rules import cuda_graphs
from planner.work.axes import ULYSSES
from planner.work.checkpointing import BLOCK, FULL, MEMORY_BUDGET, MODULES, NONE

ColumnsT = TypeVar("ColumnsT", UnitCosts, sharding.UnitShards)


def units_at(job: PreparedJob, rows: LayoutBatch, blocks: int = NONE) -> UnitCosts:
    """Costs of the units at U rows of `distinct_rows`; what the job remembers is not priced again.

    blocks: the mode in which layouts under block-N are taken.
    """
    rows = in_mode(rows, blocks)
    work, saved = _work_at(job, rows)
    return unit_costs(work, saved, rows, job.model, job.training, job.rules)


def in_mode(rows: LayoutBatch, mode: int) -> LayoutBatch:
    """The rows with this mode of all their layers in place of block-N."""
    blocks = rows.ac_kind == BLOCK
    if not blocks.any():
        return rows
    return replace(
        rows,
        ac_kind=np.where(blocks, mode, rows.ac_kind),
        ac_value=np.where(blocks, 0.0, rows.ac_value),
    )


def _work_at(job: PreparedJob, rows: LayoutBatch) -> tuple[UnitWork, Savings | None]:
    """(work of units at U rows, what a memory budget can save at those that have one, or None).

    Rows that differ in checkpointing alone share their work.
    """

    def work(missing: IntColumn) -> list[UnitWork]:
        return [unit_work(job.context(rows.take(part)), job.model) for part in _parts(missing)]

    def what_is_saved(missing: IntColumn) -> list[Savings]:
        these = budgeted[missing]
        return [savings(job.context(rows.take(part)), job.model) for part in _parts(these)]

    budgeted = np.flatnonzero(rows.ac_kind == MEMORY_BUDGET)
    saves = bool(len(budgeted))
    found: Savings | None = None
    if job.remembers:
        hashes = groups.hashes([getattr(rows, name) for name in _without_mode(job, rows)])
        work_at = job.known.memo(UnitWork).at(hashes, work)
        if saves:
            found = job.known.memo(Savings).at(_savings_hashes(job, rows, budgeted), what_is_saved)
    else:
        context = job.context(rows)
        work_at = unit_work(context, job.model)
        found = savings(context, job.model).take(budgeted) if saves else None
    return work_at, found


def _parts(rows: IntColumn) -> Iterator[IntColumn]:
    return (rows[part] for part in chunks.slices(len(rows), chunks.CACHED_ROWS))


def _without_mode(job: PreparedJob, rows: LayoutBatch) -> tuple[str, ...]:
    """The columns of `unit_key` that the work of a unit depends on before checkpointing is chosen.

    What of a step runs under another microbatch's compute, or in a graph, can depend on it; and
    the sums over recomputed modules on which they are.
    """
    values, several = unit_key(job)
    if (rows.ac_kind == MODULES).any() or "ac_kind" in open_columns(job):
        return values + several
    return tuple(name for name in values + several if name not in MODE)


def _savings_hashes(job: PreparedJob, rows: LayoutBatch, budgeted: IntColumn) -> NDArray[np.uint64]:
    columns = [
        getattr(rows, name)
        for name in _without_mode(job, rows)
        if name not in TRAVEL_FIELDS or name in open_columns(job)
    ]
    columns += [rows.cp_method == ULYSSES, rows.moe_dispatcher == cuda_graphs.HYBRIDEP]
    return groups.hashes([taken(column, budgeted) for column in columns])


def shards_at(job: PreparedJob, rows: LayoutBatch) -> sharding.UnitShards:
    """Shards of the units at U rows; what the job remembers is not priced again."""

    def price(missing: IntColumn) -> list[sharding.UnitShards]:
        return [sharding.unit_shards(job, rows.take(missing))]

    if not job.remembers:
        return price(np.arange(len(rows)))[0]
    columns = [getattr(rows, name) for name in sharding.KEY]
    return job.known.memo(sharding.UnitShards).at(groups.hashes(columns), price)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobColumns:
    """A job as different columns see it: the same, but for machines side by side.

    Their numbers are columns: of layouts, of distinct units, of distinct shards, of loads of ranks
    and of loads of mean ranks.
    """

    layouts: PreparedJob
    units: PreparedJob
    shards: PreparedJob
    ranks: PreparedJob
    means: PreparedJob

    @classmethod
    def alike(cls, job: PreparedJob) -> "JobColumns":
        return cls(layouts=job, units=job, shards=job, ranks=job, means=job)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostInputs(CostRows):
    """Priced rows of N layouts of one job, from which their prices are summed.

    unit, shards: at distinct rows.
    """

    jobs: JobColumns
    unit: UnitCosts
    shards: sharding.UnitShards

    @classmethod
    def of(cls, job: PreparedJob, batch: LayoutBatch, *, every_rank: bool) -> "CostInputs":
        """The cost inputs of a batch.

        every_rank: for all pipeline ranks instead of the deciding ones.
        """
        return cls.at(CostRows.of(job, batch, every_rank=every_rank), JobColumns.alike(job))

    @classmethod
    def at(cls, rows: CostRows, jobs: JobColumns) -> "CostInputs":
        unit = units_at(jobs.units, rows.unit_rows)
        shards = shards_at(jobs.shards, rows.shard_rows)
        if rows.has_blocks:
            again = units_at(jobs.units, rows.unit_rows, FULL)
            unit, shards = _of_both(unit, again), _of_both(shards, shards)
        of_rows = {one.name: getattr(rows, one.name) for one in fields(CostRows)}
        return cls(**of_rows, jobs=jobs, unit=unit, shards=shards)

    @property
    def job(self) -> PreparedJob:
        """The job as columns of layouts see it."""
        return self.jobs.layouts

    @property
    def units(self) -> FloatColumn:
        """Units that each rank holds, (R, K + 2, N)."""
        return self.loads.of_ranks.units[:, self.loads.at_rank].swapaxes(0, 1)

    @property
    def rank(self) -> IntColumn:
        """Place of each rank in its pipeline, (R, N)."""
        return self.loads.pipelines.rank[:, self.loads.pipelines.at]

    @property
    def mean_units(self) -> FloatColumn:
        """Units of a mean rank, (K + 2, N)."""
        return self.loads.of_means.units[:, self.loads.at_mean]


def _of_both(first: ColumnsT, second: ColumnsT) -> ColumnsT:
    """(..., K + 2, U) twice -> (..., 2 K + 2, U): layers of both, embedding and head of the first.

    What has no units, (U,), is the first's.
    """
    found: dict[str, FloatColumn] = {}
    for field in fields(first):
        values, others = getattr(first, field.name), getattr(second, field.name)
        if values.ndim > 1:
            parts = [values[..., :-2, :], others[..., :-2, :], values[..., -2:, :]]
            found[field.name] = np.concatenate(parts, axis=-2)
    return replace(first, **found)


def on_ranks(units: FloatColumn, field: FloatColumn) -> FloatColumn:
    """Sum over the units that each rank holds: (R, K + 2, N), (K + 2, N) -> (R, N)."""
    return np.asarray(np.einsum("rkn,kn->rn", units, field))
