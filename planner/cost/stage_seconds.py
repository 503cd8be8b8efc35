"""Seconds of one microbatch on each unit, from which stages are timed."""

from dataclasses import dataclass
from functools import cached_property

from planner.columns import FloatColumn, IntColumn, in_order
from planner.cost.cost_inputs import CostInputs
from planner.cost.data_parallel.sharding import UnitShards
from planner.cost.layer import unit_costs as layers
from planner.cost.loads import Pipelines, at_rows
from planner.cost.network.sends import Sends
from planner.cost.pipeline.schedule_columns import filled


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """One microbatch on each unit (K + 2, N): what the simulator needs to time any stage.

    Columns of units are gathered when they are asked for, which few layouts do.
    outside (N,): the busiest rank's data-parallel waits, optimizer, waits for stragglers and fixed
        seconds of a step.
    busy (N,): seconds of its microbatches.
    rank, load (N,): which pipeline rank that is, and its index in `inputs.loads.of_ranks`.
    hidden (N,): of its data-parallel communication in a step, under compute.
    """

    inputs: CostInputs
    outside: FloatColumn
    busy: FloatColumn
    rank: IntColumn
    load: IntColumn
    hidden: FloatColumn

    @property
    def costs(self) -> layers.UnitCosts:
        return self.inputs.unit

    @property
    def at(self) -> IntColumn:
        """Each layout's row of `costs`."""
        return self.inputs.at_unit

    @cached_property
    def forward(self) -> FloatColumn:
        return self.inputs.unit.forward[:, self.at]

    @cached_property
    def input_grad(self) -> FloatColumn:
        """Seconds of the backward but for weight gradients."""
        return self.inputs.unit.input_grad[:, self.at]

    @cached_property
    def weight_grad(self) -> FloatColumn:
        inputs = self.inputs
        alone = inputs.unit.weight_grad[:, self.at]
        return alone + adding_up(inputs.shards, inputs.at_shard, inputs.m)

    @property
    def hardware_flops(self) -> FloatColumn:
        """Flops of matmuls and attention in a step on a mean GPU, (N,), causal and windowed.

        Three forwards, two of them for the backward, and all that checkpointing repeats.
        """
        costs, pipes = self.costs, self.inputs.loads.pipelines
        each = 3.0 * costs.forward_flops + costs.recompute_flops
        redone = pipes.of_layouts(split_share(pipes)) * costs.redone_flops[:, self.at]
        return self.inputs.m * in_order(self.inputs.mean_units * (each[:, self.at] + redone))

    @cached_property
    def sends(self) -> Sends:
        payload = self.costs.boundary_bytes[self.at]
        return Sends(job=self.inputs.job, batch=self.inputs.batch, payload_bytes=payload)


def adding_up(shards: UnitShards, at_shard: IntColumn, m: FloatColumn) -> FloatColumn:
    """Seconds of adding one microbatch's gradients to those of earlier ones, mean of all of them.

    (K + 2, rows).
    """
    return at_rows(shards.sum_seconds, at_shard) * (m - 1.0) / m


def split_share(pipes: Pipelines) -> FloatColumn:
    """How much of what weight gradients recompute is repeated by each pipeline, (T,)."""
    batch, count = pipes.batch, pipes.counts
    return filled(
        count.shape,
        [(schedule, rows) for schedule, rows in pipes.schedules if schedule.splits_backward],
        lambda s, rows: s.split_share(batch.pp[rows], batch.virtual_stages[rows], count[rows]),
        0.0,
    )
