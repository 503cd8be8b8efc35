"""Loads of the pipeline ranks of N layouts, each distinct one once.

Layouts that differ in schedule, stages or split alone have ranks that hold the same units and run
them in the same way. What such a rank computes, communicates and keeps is found once: its load.
Letters: N layouts, R pipeline ranks priced, K + 2 units (layers by kind, embedding, head), L loads,
T pipelines with their numbers of microbatches.
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import Column, FloatColumn, IntColumn, LayoutBatch, groups
from planner.cost.pipeline.schedule_columns import schedule_rows
from planner.cost.pipeline.stages import RankLayers
from planner.schedules import Schedule
from planner.work.checkpointing import BLOCK

# what a load depends on beside the rows of its units and of its shards
BESIDE = ("optimizer_in_backward", "activation_offload_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """L loads; all columns are (L,) if not said.

    batch: of each a layout that has it, whose schedule and stages do not count.
    m: its microbatches.
    units (K + 2, L): units held.
    at_unit, at_shard: rows of its units and of its shards.
    spared: how many layers, at least, each stage of the pipeline holds that block-N does not
        recompute, up to 2; 0 where no layout has block-N.
    """

    batch: LayoutBatch
    m: FloatColumn
    units: FloatColumn
    at_unit: IntColumn
    at_shard: IntColumn
    spared: FloatColumn

    def __len__(self) -> int:
        return len(self.m)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelines:
    """T distinct pipelines, each with its number of microbatches; (T,) if not said.

    batch: of each a layout that has it.
    schedules: of those with several stages, each with its rows.
    m: microbatches.
    rank (R, T): the ranks priced.
    tables, heads (R, T): 1 where the rank holds the embedding, the head.
    at (N,): each layout's pipeline.
    """

    batch: LayoutBatch
    schedules: list[tuple[Schedule, IntColumn]]
    m: FloatColumn
    rank: IntColumn
    tables: FloatColumn
    heads: FloatColumn
    at: IntColumn

    @property
    def counts(self) -> IntColumn:
        return self.m.astype(np.int64)

    def of_layouts(self, column: Column) -> Column:
        """A column of pipelines (..., T) as one of layouts (..., N)."""
        return column.take(self.at, axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoads:
    """The loads of N layouts.

    of_ranks, at_rank (R, N): what their ranks run.
    of_means, at_mean (N,): what their mean ranks would.
    pipelines: in which they run.
    """

    of_ranks: Loads
    at_rank: IntColumn
    of_means: Loads
    at_mean: IntColumn
    pipelines: Pipelines

    @classmethod
    def of(
        cls,
        batch: LayoutBatch,
        m: FloatColumn,
        at_unit: IntColumn,
        at_shard: IntColumn,
        pipes: tuple[RankLayers, IntColumn],
    ) -> "RankLoads":
        """The loads of a batch.

        at_unit, at_shard: rows of its units and of its shards, which decide `m` too.
        pipes: units of ranks by pipeline, and each layout's pipeline.
        """
        held, at_pipe = pipes
        work = _Work.of(batch, m, at_unit, at_shard, pipes)
        num_ranks, num_units, num_pipes = held.units.shape
        each = held.units.transpose(1, 0, 2).reshape(num_units, num_ranks * num_pipes)
        of_ranks, at_rank = work.loads(
            each, np.arange(num_ranks * num_pipes).reshape(num_ranks, -1)
        )
        if num_ranks == 1 and (held.units[0] == held.mean_units).all():
            of_means, at_mean = of_ranks, at_rank[0]
        else:
            of_means, at_mean = work.loads(held.mean_units, np.arange(num_pipes))
        return cls(
            of_ranks=of_ranks,
            at_rank=at_rank,
            of_means=of_means,
            at_mean=at_mean,
            pipelines=_pipelines(batch, held, at_pipe, work),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Distinct ways in which layouts run their units: V of them.

    first (V,): a layout of each. at (N,): each layout's way. at_pipe (N,): its pipeline.
    """

    batch: LayoutBatch
    m: FloatColumn
    at_unit: IntColumn
    at_shard: IntColumn
    spared: FloatColumn
    first: IntColumn
    at: IntColumn
    at_pipe: IntColumn

    @classmethod
    def of(
        cls,
        batch: LayoutBatch,
        m: FloatColumn,
        at_unit: IntColumn,
        at_shard: IntColumn,
        pipes: tuple[RankLayers, IntColumn],
    ) -> "_Work":
        held, at_pipe = pipes
        spared = np.zeros(len(batch))
        beside = [getattr(batch, name) for name in BESIDE]
        if (batch.ac_kind == BLOCK).any():
            kinds = held.units.shape[1] // 2 - 1
            others = held.units[:, :kinds].sum(axis=1).min(axis=0)[at_pipe] / batch.virtual_stages
            spared = np.minimum(np.floor(others), 2.0)
            beside += [batch.ac_value, spared]
        codes = at_unit * (at_shard.max() + 1) + at_shard
        differ = [column for column in beside if (column != column[0]).any()]
        if differ:
            distinct, inverse = groups.unique_rows(differ)
            codes = codes * len(distinct) + inverse
        first, at = groups.unique_rows([codes])
        return cls(
            batch=batch,
            m=m,
            at_unit=at_unit,
            at_shard=at_shard,
            spared=spared,
            first=first,
            at=at,
            at_pipe=at_pipe,
        )

    def loads(self, units: FloatColumn, places: IntColumn) -> tuple[Loads, IntColumn]:
        """(distinct loads, the load at each place of each layout (..., N)).

        units (K + 2, H): what may be held.
        places (..., P): which of them, at each place of each pipeline.
        """
        distinct, inverse = groups.unique_rows(list(units))
        codes = inverse[places].take(self.at_pipe, axis=-1)
        codes += self.at * len(distinct)
        found, at = groups.unique_rows([codes.ravel()])
        way, what = np.divmod(codes.ravel()[found], len(distinct))
        first = self.first.take(way)
        loads = Loads(
            batch=self.batch.take(first),
            m=self.m.take(first),
            units=at_rows(units, distinct.take(what)),
            at_unit=self.at_unit.take(first),
            at_shard=self.at_shard.take(first),
            spared=self.spared.take(first),
        )
        return loads, at.reshape(codes.shape)


def _pipelines(batch: LayoutBatch, held: RankLayers, at_pipe: IntColumn, work: _Work) -> Pipelines:
    counts, inverse = groups.unique_rows([work.m[work.first]])
    codes = at_pipe * len(counts) + inverse.take(work.at)
    first, at = groups.unique_rows([codes])
    pipe, rows = at_pipe[first], batch.take(first)
    return Pipelines(
        batch=rows,
        schedules=schedule_rows(rows),
        m=work.m[first],
        rank=held.rank[:, pipe],
        tables=held.units[:, -2, pipe],
        heads=held.units[:, -1, pipe],
        at=at,
    )


def at_rows(columns: FloatColumn, rows: IntColumn) -> FloatColumn:
    """columns[..., rows]; `take` is several times as fast as an index."""
    return columns.take(rows, axis=-1)


def sums(units: FloatColumn, field: FloatColumn) -> FloatColumn:
    """Sum over the units of each load: (K + 2, L), (..., K + 2, L) -> (..., L)."""
    total: FloatColumn = units[0] * field[..., 0, :]
    for unit in range(1, len(units)):
        total += units[unit] * field[..., unit, :]
    return total
