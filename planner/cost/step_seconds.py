"""The seconds of one step, composed from units, shards and schedule: by part, of the busiest rank.

Letters: N layouts, R pipeline ranks looked at, K + 2 units (layers by kind, embedding, head).
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn
from planner.cost.cost_inputs import Ingredients, on_ranks
from planner.cost.data_parallel.overlap import (
    Exposed,
    HostCopies,
    UnitColumns,
    exposed_data_parallel,
)
from planner.cost.layer import forward_backward_overlap as pairs
from planner.cost.layer import unit_costs as layers
from planner.cost.layer.context import AXES
from planner.cost.network.sends import Sends, transport_of
from planner.cost.pipeline.schedule_columns import by_schedule, split_schedules
from planner.schedules import Schedule

PARTS = (
    "compute",
    "recompute",
    "tp",
    "cp",
    "ep",
    "pp",
    "fsdp",
    "dp",
    "bubble",
    "optimizer",
    "other",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """One microbatch on each unit (K + 2, N): what the simulator needs to time any stage.

    sends: of the same N layouts.  costs, at: costs of the units at distinct rows, and each layout's
        row, for what few layouts need.
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


def step_seconds(found: Ingredients) -> tuple[FloatColumn, dict[str, FloatColumn], StageSeconds]:
    """(step seconds, parts, seconds of stages for the simulator)."""
    costs, at, batch, m = found.unit.costs, found.at_unit, found.batch, found.m
    forward, input_grad = found.unit.forward[:, at], found.unit.input_grad[:, at]
    alone = (
        costs.weight_grad_seconds[:, at]
        + found.shards.sum_seconds[:, found.at_shard] * (m - 1.0) / m
    )
    weight_grad = _with_redone(found, alone)
    exposed = _data_parallel(found, forward, input_grad + alone)
    slowed = found.job.profile.overlap_slowdown * exposed.hidden
    optimizer = _optimizer_seconds(found)
    early = np.where(found.batch.optimizer_in_backward, found.job.profile.early_step_share, 0.0)
    optimizer = optimizer + early * m * on_ranks(found.units, input_grad + alone)
    outside = exposed.fsdp + exposed.dp + slowed + optimizer
    per_microbatch = on_ranks(found.units, forward + input_grad + weight_grad)
    busiest = np.argmax(m * per_microbatch + outside, axis=0)
    pick = (busiest, np.arange(len(batch)))
    sends = _sends(found)
    here = found.units[busiest, :, np.arange(len(batch))].T
    own = _overlapped_pairs(found, found.rank[pick])
    relief = _relief(found, own > 0, here)
    bubble, send_waits = _bubble(
        found, forward, input_grad, weight_grad, sends.mean_seconds(), own, relief
    )
    parts = {
        "recompute": m
        * (here * (costs.recompute_seconds[:, at] + weight_grad - alone)).sum(axis=0),
        "fsdp": exposed.fsdp[pick] + slowed[pick],
        "dp": exposed.dp[pick],
        "bubble": bubble,
        "pp": send_waits,
        "optimizer": optimizer[pick],
        "other": np.full(len(batch), found.job.profile.fixed_step_seconds),
    }
    for index, axis in enumerate(AXES):
        parts[axis] = m * (
            here * (costs.exposed_forward + costs.exposed_backward)[index][:, at]
        ).sum(axis=0)
    parts["tp"], parts["ep"] = parts["tp"] - own * relief.tp, parts["ep"] - own * relief.ep
    busy = m * per_microbatch[pick] - own * relief.saved
    parts["compute"] = busy - parts["recompute"] - parts["tp"] - parts["cp"] - parts["ep"]
    step = busy + outside[pick] + bubble + send_waits + parts["other"]
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
        outside=outside[pick] + parts["other"],
        busy=busy,
    )
    return step, parts, stage_seconds


def _data_parallel(found: Ingredients, forward: FloatColumn, backward: FloatColumn) -> Exposed:
    s, at = found.shards, found.at_shard
    seconds = UnitColumns(
        forward=forward,
        backward=backward,
        gather=s.gather_seconds[:, at],
        scatter=s.scatter_seconds[:, at],
        replicate=s.replicate_seconds[:, at],
        host=_host_copies(found),
    )
    return exposed_data_parallel(
        found.units,
        seconds,
        found.batch,
        found.m,
        found.job.training,
        found.job.rules,
        found.job.profile.dp_hidden,
    )


def _host_copies(found: Ingredients) -> HostCopies | None:
    s, at = found.shards, found.at_shard
    if not (found.job.rules.fsdp_style and found.batch.cpu_offload.any()):
        return None
    return HostCopies(
        upload=s.upload_seconds[:, at],
        download=s.download_seconds[:, at],
        accumulate=s.accumulate_seconds[:, at],
    )


def _sends(found: Ingredients) -> Sends:
    return Sends(
        batch=found.batch,
        payload_bytes=found.unit.costs.boundary_bytes[found.at_unit],
        fused=layers.fused_kernels(found.batch, found.job.rules),
        training=found.job.training,
        cluster=found.job.cluster,
        device=found.job.device,
        fabric=found.job.fabric,
    )


def _with_redone(found: Ingredients, weight_grad: FloatColumn) -> FloatColumn:
    """Weight gradients with what they do again where they run apart from the input's, (K + 2,
    N).
    """
    batch, result = found.batch, weight_grad
    for schedule, rows in split_schedules(batch):
        result = weight_grad.copy() if result is weight_grad else result
        share = schedule.split_share(
            batch.pp[rows], batch.virtual_stages[rows], found.m[rows].astype(np.int64)
        )
        result[:, rows] += share * found.unit.costs.redone_seconds[:, found.at_unit[rows]]
    return result


def _relief(found: Ingredients, overlaps: BoolColumn, here: FloatColumn) -> pairs.Relief:
    """What a pair saves, (N,), 0 where there are none."""
    rows = np.flatnonzero(overlaps)
    columns = pairs.pair_columns(found.unit.costs, found.at_unit[rows], found.job.profile)
    return pairs.relief(columns, here[:, rows], found.batch.virtual_stages[rows]).spread(
        rows, len(overlaps)
    )


def _overlapped_pairs(found: Ingredients, rank: IntColumn) -> FloatColumn:
    batch, m = found.batch, found.m.astype(np.int64)
    return by_schedule(
        batch,
        lambda s, rows: s.overlapped_pairs(
            rank[rows], batch.pp[rows], batch.virtual_stages[rows], m[rows]
        ),
        0.0,
    )


def _bubble(
    found: Ingredients,
    forward: FloatColumn,
    input_grad: FloatColumn,
    weight_grad: FloatColumn,
    send: FloatColumn,
    own_pairs: FloatColumn,
    relief: pairs.Relief,
) -> tuple[FloatColumn, FloatColumn]:
    """(idle seconds, seconds waiting for sends), (N,). Pairs of other ranks on the longest chain
    shorten this rank's idle time.
    """
    f, i, w = (
        (found.mean_units * field).sum(axis=0) for field in (forward, input_grad, weight_grad)
    )
    batch, m = found.batch, found.m.astype(np.int64)

    def bubble(schedule: Schedule, rows: IntColumn) -> FloatColumn:
        pp, v = batch.pp[rows], batch.virtual_stages[rows]
        foreign = schedule.pairs_on_critical_path(pp, v, m[rows]) - own_pairs[rows]
        idle = schedule.bubble_seconds(pp, v, m[rows], f[rows], i[rows], w[rows])
        return np.maximum(idle - foreign * relief.saved[rows], 0.0)

    def hops(schedule: Schedule, rows: IntColumn) -> FloatColumn:
        exposed = transport_of(found.job.training, schedule.name).exposed
        return schedule.sends_on_critical_path(
            batch.pp[rows], batch.virtual_stages[rows], m[rows], exposed
        )

    return by_schedule(batch, bubble, 0.0), by_schedule(batch, hops, 0.0) * send


def _optimizer_seconds(found: Ingredients) -> FloatColumn:
    """Seconds a step of clipping, update, exchange and small reductions, (R, N)."""
    return (
        on_ranks(found.units, found.shards.update_seconds[:, found.at_shard])
        + found.shards.step_seconds[found.at_shard]
    )
