"""Costs of units, shards and ranks, from which time and memory of N layouts are summed.

They are computed at distinct rows: units and shards that differ in cost.
Letters: N layouts, U distinct rows, R pipeline ranks priced, K + 2 units (layers by kind,
embedding, head).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.columns import FloatColumn, IntColumn, LayoutBatch, groups, taken
from planner.cost import chunks
from planner.cost.data_parallel import sharding
from planner.cost.layer import unit_costs as layers
from planner.cost.layer.unit_costs import MODE, UnitCosts, unit_costs
from planner.cost.layer.unit_work import TRAVEL_FIELDS, Savings, UnitWork, savings, unit_work
from planner.cost.loads import RankLoads
from planner.cost.pipeline import stages
from planner.cost.pipeline.schedule_columns import num_microbatches
from planner.cost.prepared_job import PreparedJob
from planner.precision import column
from planner.rules import cuda_graphs, experts
from planner.work.axes import ULYSSES
from planner.work.checkpointing import BLOCK, FULL, MEMORY_BUDGET, MODULES, NONE

ColumnsT = TypeVar("ColumnsT", UnitCosts, sharding.UnitShards)
STAGE_COUNTS = ("pp", "virtual_stages")  # a unit asks only whether there are several


def unit_fields(job: PreparedJob) -> tuple[str, ...]:
    """The layout fields that the cost of a unit depends on."""
    values, several = unit_key(job)
    return values + several


def open_columns(job: PreparedJob) -> tuple[str, ...]:
    """Columns that decide about CUDA graphs and an overlapped exchange.

    A job asks for them at every price.
    """
    if job.known.open_columns is None:
        read = (rules.columns_read(job.rules_context) for rules in (cuda_graphs, experts))
        job.known.open_columns = tuple(dict.fromkeys(chain(*read)))
    return job.known.open_columns


def unit_key(job: PreparedJob) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`layers.key` and `open_columns`, looked up once for each job."""
    if job.known.unit_key is not None:
        return job.known.unit_key
    values, several = layers.key(job.cluster.rank_order, job.model, job.recipes)
    read = dict.fromkeys((*values, *several, *open_columns(job)))
    several = tuple(name for name in read if name in STAGE_COUNTS and name not in values)
    job.known.unit_key = tuple(name for name in read if name not in several), several
    return job.known.unit_key


def distinct_rows(job: PreparedJob, batch: LayoutBatch) -> tuple[LayoutBatch, IntColumn]:
    """(the U rows of the batch whose units differ in cost, row of each layout (N,)).

    Where a unit's cost depends on whether there are several stages, the rows have 2 of them.
    """
    return groups.distinct(as_units_see(job, batch), unit_fields(job))


def as_units_see(job: PreparedJob, batch: LayoutBatch) -> LayoutBatch:
    """The batch with as few different numbers of stages as the costs of its units depend on."""
    _, several = unit_key(job)
    counts = {name: np.minimum(getattr(batch, name), 2) for name in several}
    # where no more than the precision of experts depends on several stages (`layers.key`)
    if several == ("pp",) and "pp" not in open_columns(job):
        asks = column("experts_alone", batch.precision, job.recipes) > 0
        counts["pp"] = np.where(asks & (batch.cp == 1), counts["pp"], 1)
    return replace(batch, **counts)


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
    hashes = groups.hashes([getattr(rows, name) for name in _without_mode(job, rows)])
    work_at = job.known.memo(UnitWork).at(hashes, work)
    if not len(budgeted):
        return work_at, None
    hashes = _savings_hashes(job, rows, budgeted)
    return work_at, job.known.memo(Savings).at(hashes, what_is_saved)


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

    columns = [getattr(rows, name) for name in sharding.KEY]
    return job.known.memo(sharding.UnitShards).at(groups.hashes(columns), price)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostInputs:
    """Priced rows of N layouts of one job, from which their prices are summed.

    Where a layout of the batch has block-N, layers count by kind and mode: the first K kinds
    are layers in their layout's mode (none under block-N), the K behind them those that block-N
    recomputes. K then stands for both.

    m (N,): microbatches.
    loads: what their ranks run.
    unit_rows, shard_rows: distinct rows, at which unit and shards are priced.
    at_unit, at_shard (N,): each layout's row there.
    """

    job: PreparedJob
    batch: LayoutBatch
    m: FloatColumn
    loads: RankLoads
    unit_rows: LayoutBatch
    at_unit: IntColumn
    shard_rows: LayoutBatch
    at_shard: IntColumn
    unit: UnitCosts
    shards: sharding.UnitShards

    @classmethod
    def of(cls, job: PreparedJob, batch: LayoutBatch, *, every_rank: bool) -> "CostInputs":
        """The cost inputs of a batch.

        every_rank: for all pipeline ranks instead of the deciding ones.
        """
        blocks = stages.block_layers(batch)
        alike = batch if blocks is None else _without_count(batch)
        unit_rows, at_unit = distinct_rows(job, alike)
        shard_rows, at_shard = groups.distinct(batch, sharding.KEY)
        key = stages.KEY if blocks is None else stages.KEY_OF_BLOCKS
        pipe_rows, at_pipe = groups.distinct(batch, key)
        modes = stages.block_layers(pipe_rows)
        held = stages.rank_layers(
            pipe_rows, job.model, job.rules, every_rank=every_rank, blocks=modes
        )
        m = num_microbatches(batch, job.training)
        unit, shards = _priced(job, unit_rows, shard_rows, has_blocks=blocks is not None)
        return cls(
            job=job,
            batch=batch,
            m=m,
            loads=RankLoads.of(batch, m, at_unit, at_shard, (held, at_pipe)),
            unit_rows=unit_rows,
            at_unit=at_unit,
            shard_rows=shard_rows,
            at_shard=at_shard,
            unit=unit,
            shards=shards,
        )

    def on(self, machine: PreparedJob) -> "CostInputs":
        """Prices the same layouts on another machine."""
        blocks = bool((self.batch.ac_kind == BLOCK).any())
        unit, shards = _priced(machine, self.unit_rows, self.shard_rows, has_blocks=blocks)
        return replace(self, job=machine, unit=unit, shards=shards)

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


def _priced(
    job: PreparedJob, unit_rows: LayoutBatch, shard_rows: LayoutBatch, *, has_blocks: bool
) -> tuple[UnitCosts, sharding.UnitShards]:
    unit, shards = units_at(job, unit_rows), shards_at(job, shard_rows)
    if not has_blocks:
        return unit, shards
    return _of_both(unit, units_at(job, unit_rows, FULL)), _of_both(shards, shards)


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


def _without_count(batch: LayoutBatch) -> LayoutBatch:
    """The batch with N of block-N left out: how many layers, not what one of them costs."""
    return replace(batch, ac_value=np.where(batch.ac_kind == BLOCK, 0.0, batch.ac_value))
