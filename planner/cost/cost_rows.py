"""Distinct rows at which N layouts are priced: units and shards that differ in cost."""

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from planner.columns import FloatColumn, IntColumn, LayoutBatch, groups
from planner.cost.data_parallel import sharding
from planner.cost.layer import unit_costs as layers
from planner.cost.loads import RankLoads, of_each
from planner.cost.pipeline import stages
from planner.cost.pipeline.schedule_columns import num_microbatches
from planner.cost.prepared_job import PreparedJob
from planner.precision import column
from planner.rules import cuda_graphs, experts
from planner.work.checkpointing import BLOCK

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRows:
    """N layouts, and the distinct rows at which they are priced; nothing depends on the machine.

    Where a layout of the batch has block-N, layers count by kind and mode: the first K kinds
    are layers in their layout's mode (none under block-N), the K behind them those that block-N
    recomputes. K then stands for both.

    m (N,): microbatches.
    loads: what their ranks run.
    at_unit, at_shard (N,): each layout's row there.
    has_blocks: whether layers count by kind and mode.
    """

    batch: LayoutBatch
    m: FloatColumn
    loads: RankLoads
    unit_rows: LayoutBatch
    at_unit: IntColumn
    shard_rows: LayoutBatch
    at_shard: IntColumn
    has_blocks: bool

    @classmethod
    def of(cls, job: PreparedJob, batch: LayoutBatch, *, every_rank: bool) -> "CostRows":
        """The rows of a batch.

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
        return cls(
            batch=batch,
            m=m,
            loads=RankLoads.of(batch, m, at_unit, at_shard, (held, at_pipe)),
            unit_rows=unit_rows,
            at_unit=at_unit,
            shard_rows=shard_rows,
            at_shard=at_shard,
            has_blocks=blocks is not None,
        )

    def side_by_side(self, count: int) -> "CostRows":
        """Repeats the rows for `count` machines, machine by machine."""
        sizes = len(self.unit_rows), len(self.shard_rows)
        return replace(
            self,
            batch=_tiled(self.batch, count),
            m=np.tile(self.m, count),
            loads=self.loads.side_by_side(count, *sizes),
            unit_rows=_tiled(self.unit_rows, count),
            at_unit=of_each(self.at_unit, count, sizes[0]),
            shard_rows=_tiled(self.shard_rows, count),
            at_shard=of_each(self.at_shard, count, sizes[1]),
        )


def _tiled(batch: LayoutBatch, count: int) -> LayoutBatch:
    return batch.take(np.tile(np.arange(len(batch)), count))


def _without_count(batch: LayoutBatch) -> LayoutBatch:
    """The batch with N of block-N left out: how many layers, not what one of them costs."""
    return replace(batch, ac_value=np.where(batch.ac_kind == BLOCK, 0.0, batch.ac_value))
