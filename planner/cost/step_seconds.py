"""The seconds of one step by part, of the busiest rank, from units, shards and schedule.

Letters: N layouts, R pipeline ranks priced, K + 2 units (layers by kind, embedding, head).
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn
from planner.cost.cost_inputs import CostInputs, on_ranks
from planner.cost.data_parallel.overlap import (
    ExposedSeconds,
    exposed_data_parallel,
    host_copies,
    unit_columns,
)
from planner.cost.layer import forward_backward_overlap as pairs
from planner.cost.layer import unit_costs as layers
from planner.cost.layer.context import AXES
from planner.cost.layer.trainer_kernels import fused_kernels
from planner.cost.machine import side_by_side
from planner.cost.memory.host_activations import exposed_copies
from planner.cost.network.sends import Sends, transport_of
from planner.cost.pipeline.schedule_columns import by_schedule, split_schedules
from planner.cost.stragglers import straggler_share
from planner.rules import cuda_graphs
from planner.schedules import Schedule

PARTS = (
    "compute",
    "copies",
    "recompute",
    "tp",
    "cp",
    "ep",
    "pp",
    "fsdp",
    "dp",
    "launches",
    "waits",
    "bubble",
    "optimizer",
    "straggler",
    "other",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """One microbatch on each unit (K + 2, N): what the simulator needs to time any stage.

    costs, at: costs of the units at distinct rows and each layout's row, for what few layouts need.
    sends: of the same N layouts.
    outside (N,): the busiest rank's data-parallel waits, optimizer, waits for stragglers and fixed
        seconds of a step.
    busy (N,): seconds of its microbatches.
    """

    forward: FloatColumn
    input_grad: FloatColumn
    weight_grad: FloatColumn
    saved_bytes: FloatColumn
    costs: layers.UnitCosts
    at: IntColumn
    forward_flops: FloatColumn
    recompute_flops: FloatColumn
    sends: Sends
    outside: FloatColumn
    busy: FloatColumn


def step_seconds(inputs: CostInputs) -> tuple[FloatColumn, dict[str, FloatColumn], StageSeconds]:
    """(step seconds, parts, seconds of stages for the simulator)."""
    costs, at, batch, m = inputs.unit.costs, inputs.at_unit, inputs.batch, inputs.m
    forward, input_grad = inputs.unit.forward[:, at], inputs.unit.input_grad[:, at]
    alone = (
        inputs.unit.weight_grad[:, at]
        + inputs.shards.sum_seconds[:, inputs.at_shard] * (m - 1.0) / m
    )
    weight_grad = _with_redone(inputs, alone)
    exposed = _data_parallel(inputs, forward, input_grad + alone)
    slowed = inputs.job.profile.overlap_slowdown * exposed.hidden
    optimizer = _optimizer_seconds(inputs)
    early = np.where(inputs.batch.optimizer_in_backward, inputs.job.profile.early_step_share, 0.0)
    optimizer = optimizer + early * m * on_ranks(inputs.units, input_grad + alone)
    copies = exposed.copies + m * exposed_copies(inputs, forward, input_grad + alone)
    outside = exposed.fsdp + exposed.dp + copies + slowed + optimizer
    per_microbatch = on_ranks(inputs.units, forward + input_grad + weight_grad)
    late = straggler_share(inputs.job.cluster.num_gpus, inputs.job.profile.straggler_delay)
    busiest = np.argmax((1.0 + late) * m * per_microbatch + outside, axis=0)
    pick = (busiest, np.arange(len(batch)))
    sends = _sends(inputs)
    here = inputs.units[busiest, :, np.arange(len(batch))].T
    own = _overlapped_pairs(inputs, inputs.rank[pick])
    relief = _relief(inputs, own > 0, here)
    bubble, send_waits = _bubble(
        inputs, forward, input_grad, weight_grad, sends.mean_seconds(), own, relief
    )
    parts = {
        "recompute": m
        * (here * (costs.recompute_seconds[:, at] + weight_grad - alone)).sum(axis=0),
        "fsdp": exposed.fsdp[pick] + slowed[pick],
        "dp": exposed.dp[pick],
        "bubble": bubble,
        "pp": send_waits,
        "optimizer": optimizer[pick],
        "other": inputs.job.profile.fixed_step_seconds
        + inputs.job.profile.launch_seconds
        * (cuda_graphs.captured(batch, inputs.job.rules_context) == cuda_graphs.FULL),
    }
    for index, axis in enumerate(AXES):
        parts[axis] = m * (
            here * (costs.exposed_forward + costs.exposed_backward)[index][:, at]
        ).sum(axis=0)
    parts["tp"], parts["ep"] = parts["tp"] - own * relief.tp, parts["ep"] - own * relief.ep
    launches = (
        costs.launch_forward_seconds
        + costs.launch_input_grad_seconds
        + costs.launch_weight_grad_seconds
    )
    waits = costs.wait_forward_seconds + costs.wait_backward_seconds
    for name, seconds in (("launches", launches), ("waits", waits)):
        parts[name] = m * (here * seconds[:, at]).sum(axis=0)
    busy = m * per_microbatch[pick] - own * relief.saved
    parts["straggler"] = late * busy
    step = busy + parts["straggler"] + outside[pick] + bubble + send_waits + parts["other"]
    inside = ("recompute", "tp", "cp", "ep", "launches", "waits")
    parts["compute"] = busy - sum(parts[name] for name in inside)
    parts["copies"] = copies[pick]
    stage_seconds = StageSeconds(
        forward=forward,
        input_grad=input_grad,
        weight_grad=alone,
        saved_bytes=costs.saved_bytes[:, at],
        costs=costs,
        at=at,
        sends=sends,
        forward_flops=costs.forward_flops[:, at],
        recompute_flops=costs.recompute_flops[:, at],
        outside=outside[pick] + parts["straggler"] + parts["other"],
        busy=busy,
    )
    return step, parts, stage_seconds


def _data_parallel(
    inputs: CostInputs, forward: FloatColumn, backward: FloatColumn
) -> ExposedSeconds:
    s, at, batch, rules = inputs.shards, inputs.at_shard, inputs.batch, inputs.job.rules
    return exposed_data_parallel(
        inputs.units,
        unit_columns(s, at, forward, backward, host_copies(s, at, rules, batch)),
        batch,
        inputs.m,
        inputs.job.training,
        rules,
        inputs.job.profile.dp_hidden,
    )


def _sends(inputs: CostInputs) -> Sends:
    return Sends(
        batch=inputs.batch,
        payload_bytes=inputs.unit.costs.boundary_bytes[inputs.at_unit],
        fused=fused_kernels(inputs.batch, inputs.job.rules),
        training=inputs.job.training,
        cluster=inputs.job.cluster,
        device=inputs.job.device,
        fabric=inputs.job.fabric,
    )


def _with_redone(inputs: CostInputs, weight_grad: FloatColumn) -> FloatColumn:
    """Weight gradients, (K + 2, N), with what they recompute where they run separately from I."""
    batch, result = inputs.batch, weight_grad
    for schedule, rows in split_schedules(batch):
        result = weight_grad.copy() if result is weight_grad else result
        share = schedule.split_share(
            batch.pp[rows], batch.virtual_stages[rows], inputs.m[rows].astype(np.int64)
        )
        result[:, rows] += share * inputs.unit.costs.redone_seconds[:, inputs.at_unit[rows]]
    return result


def _relief(inputs: CostInputs, overlaps: BoolColumn, here: FloatColumn) -> pairs.Relief:
    """What a pair saves, (N,), 0 where schedules overlap none."""
    rows = np.flatnonzero(overlaps)
    profile = side_by_side.taken(inputs.job.profile, rows)
    columns = pairs.pair_columns(inputs.unit.costs, inputs.at_unit[rows], profile)
    return pairs.relief(columns, here[:, rows], inputs.batch.virtual_stages[rows]).spread(
        rows, len(overlaps)
    )


def _overlapped_pairs(inputs: CostInputs, rank: IntColumn) -> FloatColumn:
    batch, m = inputs.batch, inputs.m.astype(np.int64)
    return by_schedule(
        batch,
        lambda s, rows: s.overlapped_pairs(
            rank[rows], batch.pp[rows], batch.virtual_stages[rows], m[rows]
        ),
        0.0,
    )


def _bubble(
    inputs: CostInputs,
    forward: FloatColumn,
    input_grad: FloatColumn,
    weight_grad: FloatColumn,
    send: FloatColumn,
    own_pairs: FloatColumn,
    relief: pairs.Relief,
) -> tuple[FloatColumn, FloatColumn]:
    """(idle seconds, seconds of waiting for sends), (N,).

    Overlapped pairs of other ranks on the critical path shorten this rank's idle time.
    """
    f, i, w = (
        (inputs.mean_units * field).sum(axis=0) for field in (forward, input_grad, weight_grad)
    )
    batch, m = inputs.batch, inputs.m.astype(np.int64)

    def bubble(schedule: Schedule, rows: IntColumn) -> FloatColumn:
        pp, v = batch.pp[rows], batch.virtual_stages[rows]
        foreign = schedule.pairs_on_critical_path(pp, v, m[rows]) - own_pairs[rows]
        idle = schedule.bubble_seconds(pp, v, m[rows], f[rows], i[rows], w[rows])
        return np.maximum(idle - foreign * relief.saved[rows], 0.0)

    def hops(schedule: Schedule, rows: IntColumn) -> FloatColumn:
        exposed = transport_of(inputs.job.training, schedule.name).exposed
        return schedule.sends_on_critical_path(
            batch.pp[rows], batch.virtual_stages[rows], m[rows], exposed
        )

    return by_schedule(batch, bubble, 0.0), by_schedule(batch, hops, 0.0) * send


def _optimizer_seconds(inputs: CostInputs) -> FloatColumn:
    """Seconds a step of clipping, update, exchange and small reductions, (R, N)."""
    return (
        on_ranks(inputs.units, inputs.shards.update_seconds[:, inputs.at_shard])
        + inputs.shards.step_seconds[inputs.at_shard]
    )
