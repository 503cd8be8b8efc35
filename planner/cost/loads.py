"""Loads of the pipeline ranks of N layouts, each distinct one once.

Layouts that differ in schedule, stages or split alone have ranks that hold the same units and run
them in the same way. What such a rank computes, communicates and keeps is found once: its load.
Letters: N layouts, R pipeline ranks priced, K + 2 units (layers by kind, embedding, head), L loads,
T pipelines with their numbers of microbatches.
"""

from dataclasses import dataclass, replace

import numpy as np

from planner.columns import Column, FloatColumn, IntColumn, LayoutBatch, groups
from planner.columns.table import Table
from planner.cost.pipeline.schedule_columns import schedule_rows
from planner.cost.pipeline.stages import RankLayers
from planner.schedules import Schedule
from planner.work.checkpointing import BLOCK

# what a load depends on beside the rows of its units and of its shards
BESIDE = ("optimizer_in_backward", "activation_offload_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads(Table):
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
        spared = np.zeros(len(batch))
        beside = [getattr(batch, name) for name in BESIDE]
        if (batch.ac_kind == BLOCK).any():
            kinds = held.units.shape[1] // 2 - 1
            others = held.units[:, :kinds].sum(axis=1).min(axis=0)[at_pipe] / batch.virtual_stages
            spared = np.minimum(np.floor(others), 2.0)
            beside += [batch.ac_value, spared]
        nothing = np.zeros((0, len(batch)))
        layouts = Loads(
            batch=batch, m=m, units=nothing, at_unit=at_unit, at_shard=at_shard, spared=spared
        )
        first, way = _ways(at_unit * (at_shard.max() + 1) + at_shard, beside)
        ways = layouts.take(first)
        num_ranks, num_units, num_pipes = held.units.shape
        each = held.units.transpose(1, 0, 2).reshape(num_units, num_ranks * num_pipes)
        places = np.arange(num_ranks * num_pipes).reshape(num_ranks, -1).take(at_pipe, axis=1)
        of_ranks, at_rank = _distinct(ways, way, each, places)
        if num_ranks == 1 and (held.units[0] == held.mean_units).all():
            of_means, at_mean = of_ranks, at_rank[0]
        else:
            of_means, at_mean = _distinct(ways, way, held.mean_units, at_pipe)
        return cls(
            of_ranks=of_ranks,
            at_rank=at_rank,
            of_means=of_means,
            at_mean=at_mean,
            pipelines=_pipelines(layouts, held, at_pipe, (ways.m, way)),
        )


def _ways(codes: IntColumn, beside: list[Column]) -> tuple[IntColumn, IntColumn]:
    """(a layout of each way in which layouts run their units (V,), each layout's way (N,)).

    codes (N,): their rows of units and of shards. beside (N,): other columns that they depend on.
    """
    differ = [column for column in beside if (column != column[0]).any()]
    if differ:
        distinct, inverse = groups.unique_rows(differ)
        codes = codes * len(distinct) + inverse
    return groups.unique_rows([codes])


def _distinct(
    ways: Loads, way: IntColumn, units: FloatColumn, places: IntColumn
) -> tuple[Loads, IntColumn]:
    """(distinct loads, the load at each place of each layout (..., N)).

    ways: loads of V layouts, without units. way (N,): each layout's.
    units (K + 2, H): what may be held. places (..., N): which of them.
    """
    distinct, inverse = groups.unique_rows(list(units))
    codes = inverse[places] + way * len(distinct)
    found, at = groups.unique_rows([codes.ravel()])
    row, what = np.divmod(codes.ravel()[found], len(distinct))
    loads = replace(ways.take(row), units=at_rows(units, distinct.take(what)))
    return loads, at.reshape(codes.shape)


def _pipelines(
    layouts: Loads, held: RankLayers, at_pipe: IntColumn, of_ways: tuple[FloatColumn, IntColumn]
) -> Pipelines:
    """The pipelines of N layouts; of_ways: microbatches of each way, each layout's way."""
    m, way = of_ways
    counts, inverse = groups.unique_rows([m])
    first, at = groups.unique_rows([at_pipe * len(counts) + inverse.take(way)])
    pipe, rows = at_pipe[first], layouts.batch.take(first)
    return Pipelines(
        batch=rows,
        schedules=schedule_rows(rows),
        m=layouts.m[first],
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
