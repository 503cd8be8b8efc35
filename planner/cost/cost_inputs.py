"""What the time and memory of N layouts are composed of: costs of units, shards, and ranks.

They are computed at distinct rows.
Letters: N layouts, U distinct rows, R pipeline ranks priced, K + 2 units (layers by kind,
embedding, head).
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.cost import chunks, deduplicated
from planner.cost.data_parallel import sharding
from planner.cost.layer import unit_costs as layers
from planner.cost.pipeline import stages
from planner.cost.pipeline.schedule_columns import num_microbatches
from planner.cost.prepared_job import PreparedJob
from planner.rules import cuda_graphs


@dataclass(frozen=True, slots=True)
class SummedCosts:
    """`layers.UnitCosts` at U rows, with sums that every price needs, (K + 2, U).

    forward: of one microbatch, with exposed communication and what the host adds.
    input_grad: the same of the backward but for weight gradients; recomputation included.
    weight_grad: the same of weight gradients.
    """

    costs: layers.UnitCosts
    forward: FloatColumn
    input_grad: FloatColumn
    weight_grad: FloatColumn

    @property
    def total(self) -> FloatColumn:
        """Seconds of one microbatch, forward and backward."""
        return self.forward + self.input_grad + self.weight_grad


def units_at(job: PreparedJob, rows: LayoutBatch) -> SummedCosts:
    """Costs of the units at U rows, some thousand rows at a time."""
    parts = [
        layers.unit_costs(job.context(rows.take(part)), job.model)
        for part in chunks.slices(len(rows), chunks.CACHED_ROWS)
    ]
    costs = parts[0] if len(parts) == 1 else layers.UnitCosts.concatenate(parts)
    forward = costs.forward_seconds + costs.exposed_forward.sum(axis=0)
    input_grad = (
        costs.input_grad_seconds + costs.recompute_seconds + costs.exposed_backward.sum(axis=0)
    )
    return SummedCosts(
        costs=costs,
        forward=forward + costs.launch_forward_seconds + costs.wait_forward_seconds,
        input_grad=input_grad + costs.launch_input_grad_seconds + costs.wait_backward_seconds,
        weight_grad=costs.weight_grad_seconds + costs.launch_weight_grad_seconds,
    )


def distinct_rows(job: PreparedJob, batch: LayoutBatch) -> tuple[LayoutBatch, IntColumn]:
    """(the U rows of the batch whose units differ in cost, row of each layout (N,))."""
    names = (
        *layers.key(
            job.cluster.rank_order,
            job.model,
            job.recipes,
            overlaps_exchange=job.training.overlap.ep,
        ),
        *cuda_graphs.columns_read(job.rules_context),
    )
    return deduplicated.distinct(batch, tuple(dict.fromkeys(names)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostInputs:
    """What the prices of N layouts of one job are made of.

    m (N,): microbatches.
    units (R, K + 2, N): units that each rank holds.
    rank (R, N): its place in the pipeline.
    mean_units (K + 2, N): units of a mean rank.
    unit, shards: at distinct rows.
    at_unit, at_shard (N,): each layout's row there.
    """

    job: PreparedJob
    batch: LayoutBatch
    m: FloatColumn
    units: FloatColumn
    rank: IntColumn
    mean_units: FloatColumn
    unit: SummedCosts
    at_unit: IntColumn
    shards: sharding.UnitShards
    at_shard: IntColumn

    @classmethod
    def of(cls, job: PreparedJob, batch: LayoutBatch, *, every_rank: bool) -> "CostInputs":
        """The cost inputs of a batch.

        every_rank: for all pipeline ranks instead of the deciding ones.
        """
        unit_rows, at_unit = distinct_rows(job, batch)
        shard_rows, at_shard = deduplicated.distinct(batch, sharding.KEY)
        pipe_rows, at_pipe = deduplicated.distinct(batch, stages.KEY)
        held = stages.rank_layers(pipe_rows, job.model, job.rules, every_rank=every_rank)
        return cls(
            job=job,
            batch=batch,
            m=num_microbatches(batch, job.training),
            units=held.units[:, :, at_pipe],
            rank=held.rank[:, at_pipe],
            mean_units=held.mean_units[:, at_pipe],
            unit=units_at(job, unit_rows),
            at_unit=at_unit,
            shards=sharding.unit_shards(
                shard_rows, job.optimizer_step, job.fabric, job.profile, job.cluster.rank_order
            ),
            at_shard=at_shard,
        )


def on_ranks(units: FloatColumn, field: FloatColumn) -> FloatColumn:
    """Sum over the units that each rank holds: (R, K + 2, N), (K + 2, N) -> (R, N)."""
    return np.asarray(np.einsum("rkn,kn->rn", units, field))
