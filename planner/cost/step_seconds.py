"""The seconds of one step by part, of the busiest rank, from units, shards and schedule.

Letters: N layouts, R pipeline ranks priced, K + 2 units (layers by kind, embedding, head).
"""

from dataclasses import dataclass, replace

import numpy as np

from planner.columns import FloatColumn, IntColumn, one_number
from planner.cost.cost_inputs import CostInputs
from planner.cost.data_parallel.overlap import ExposedSeconds, exposed_data_parallel
from planner.cost.layer import forward_backward_overlap as pairs
from planner.cost.layer.context import AXES
from planner.cost.layer.exchange import unpaired_exchange
from planner.cost.loads import at_rows, sums
from planner.cost.memory.host_activations import exposed_copies
from planner.cost.network.sends import Sends, alike_sends, transport_of
from planner.cost.pipeline.schedule_columns import by_schedule, critical_pairs, filled
from planner.cost.stage_seconds import StageSeconds, adding_up, split_share
from planner.cost.stragglers import straggler_share
from planner.rules import cuda_graphs
from planner.rules.experts import overlaps_exchange
from planner.schedules import SCHEDULES, Schedule

INSIDE = ("recompute", "tp", "cp", "ep", "launches", "waits")  # of microbatches, beside compute
PARTS = (
    "compute", "copies", "recompute", "tp", "cp", "ep", "pp", "fsdp", "dp", "launches", "waits",
    "bubble", "optimizer", "straggler", "other",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Busy:
    """Seconds of each load, (L,).

    busy: of all microbatches. redone: of one, besides, where weight gradients run later.
    unpaired: of a step, beside the same exchanges of experts with company (`unpaired_exchange`).
    outside: of a step, outside of its microbatches, `unpaired` too. by_part: of a step by part.
    hidden: of a step, communication under compute.
    """

    busy: FloatColumn
    unpaired: FloatColumn
    redone: FloatColumn
    outside: FloatColumn
    hidden: FloatColumn
    by_part: dict[str, FloatColumn]


def step_seconds(inputs: CostInputs) -> tuple[FloatColumn, dict[str, FloatColumn], StageSeconds]:
    """(step seconds, parts, seconds of stages for the simulator)."""
    pipes, job = inputs.loads.pipelines, inputs.job
    load, share = _busy(inputs), split_share(pipes)
    late = straggler_share(job.cluster.num_gpus, job.profile.straggler_delay)
    again = pipes.of_layouts(share * pipes.m) if share.any() else None
    place, at = _busiest(inputs, load, again)
    sends, bubble_of_mean = _mean_ranks(inputs, share)
    overlapped = _overlapped_pairs(inputs, place, at)
    bubble, hops = _bubble(inputs, bubble_of_mean, overlapped)
    parts = {name: seconds.take(at) for name, seconds in load.by_part.items()}
    busy = load.busy.take(at)
    if again is not None:
        redone = again * load.redone.take(at)
        parts["recompute"] += redone
        busy += redone
    if overlapped is not None:
        own, relief = overlapped
        parts["tp"] -= own * relief.tp
        parts["ep"] -= own * relief.ep
        busy -= own * relief.saved
    outside = load.outside.take(at)
    parts["bubble"], parts["pp"], parts["straggler"] = bubble, hops * sends, late * busy
    parts["other"] = _fixed_seconds(inputs)
    step = busy + parts["straggler"] + outside + bubble + parts["pp"] + parts["other"]
    parts["compute"] = busy - sum(parts[name] for name in INSIDE)
    parts["ep"] += load.unpaired.take(at)
    return (
        step,
        {name: parts[name] for name in PARTS},
        StageSeconds(
            inputs=inputs,
            outside=outside + parts["straggler"] + parts["other"],
            busy=busy,
            rank=inputs.rank[place, np.arange(len(place))],
            load=at,
            hidden=load.hidden.take(at),
        ),
    )


def _fixed_seconds(inputs: CostInputs) -> FloatColumn:
    """Seconds of a step that depend on no layer, (N,); a graph of the step is launched once."""
    profile, seconds = inputs.job.profile, np.zeros(len(inputs.m))
    graphs = cuda_graphs.captured(inputs.loads.of_means.batch, inputs.job.rules_context)
    whole = graphs == cuda_graphs.FULL
    if whole.any():
        seconds += profile.launch_seconds * whole[inputs.loads.at_mean]
    seconds += profile.fixed_step_seconds
    return seconds


def _busy(inputs: CostInputs) -> _Busy:
    load, costs = inputs.loads.of_ranks, inputs.unit
    shards, profile = inputs.shards, inputs.job.profile
    units, at, at_shard, m = load.units, load.at_unit, load.at_shard, load.m
    forward, backward = passes = both_passes(inputs)
    exposed = data_parallel(inputs, passes)
    slowed = profile.overlap_slowdown * exposed.hidden
    copies = exposed.copies + m * exposed_copies(inputs, forward, backward)
    backward_seconds = sums(units, backward)
    optimizer = (
        sums(units, at_rows(shards.update_seconds, at_shard)) + shards.step_seconds[at_shard]
    )
    early = load.batch.optimizer_in_backward
    if early.any():
        optimizer += np.where(early, profile.early_step_share, 0.0) * m * backward_seconds
    wires = costs.exposed_forward + costs.exposed_backward
    launches = (
        costs.launch_forward_seconds
        + costs.launch_input_grad_seconds
        + costs.launch_weight_grad_seconds
    )
    named = {
        "recompute": costs.recompute_seconds,
        **dict(zip(AXES, wires, strict=True)),
        "launches": launches,
        "waits": costs.wait_forward_seconds + costs.wait_backward_seconds,
    }
    zero = np.zeros(len(load))
    inside = {
        name: m * sums(units, at_rows(seconds, at)) if seconds.any() else zero
        for name, seconds in named.items()
    }
    overlaps = overlaps_exchange(load.batch, inputs.job.rules_context)
    # No backward runs beside the first forwards, no forward beside the last backwards: on a mean
    # rank those of pp microbatches. Rank r of an interleaved pipeline warms up for
    # 2 (pp - r - 1) + (v - 1) pp + 1 of its m v stages (Megatron-LM core 0.14
    # pipeline_parallel/schedules.py, get_pp_rank_microbatches).
    unpaired = np.minimum(load.batch.pp / m, 1.0) * unpaired_exchange(
        overlaps, inside["ep"], inside["launches"], profile.ep_hidden
    )
    return _Busy(
        busy=m * (sums(units, forward) + backward_seconds),
        unpaired=unpaired,
        redone=sums(units, at_rows(costs.redone_seconds, at)),
        outside=exposed.fsdp + exposed.dp + copies + slowed + optimizer + unpaired,
        hidden=exposed.hidden,
        by_part=inside
        | {
            "fsdp": exposed.fsdp + np.where(load.batch.zero_stage > 0, slowed, 0.0),
            "dp": exposed.dp + np.where(load.batch.zero_stage > 0, 0.0, slowed),
            "optimizer": optimizer,
            "copies": copies,
        },
    )


def both_passes(inputs: CostInputs) -> tuple[FloatColumn, FloatColumn]:
    """Seconds of one microbatch's forward and backward on each unit of each load, (K + 2, L)."""
    load, unit, shards = inputs.loads.of_ranks, inputs.unit, inputs.shards
    at = load.at_unit
    forward, backward = at_rows(unit.forward, at), at_rows(unit.input_grad + unit.weight_grad, at)
    if shards.sum_seconds.any():
        backward += adding_up(shards, load.at_shard, load.m)
    return forward, backward


def _busiest(
    inputs: CostInputs, load: _Busy, again: FloatColumn | None
) -> tuple[IntColumn, IntColumn]:
    """(the busiest of each layout's ranks, its load), (N,); the first of equal ones.

    again: how many times a rank repeats `load.redone`; None if nowhere.
    """
    ranks, job = inputs.loads.at_rank, inputs.job
    late = straggler_share(job.cluster.num_gpus, job.profile.straggler_delay)
    step, redone = (1.0 + late) * load.busy + load.outside, (1.0 + late) * load.redone
    place, at = np.zeros(len(inputs.m), dtype=np.int64), ranks[0]
    if len(ranks) == 1:
        return place, at
    most, at = np.full(len(place), -np.inf), at.copy()
    for rank, here in enumerate(ranks):
        seconds = step.take(here)
        if again is not None:
            seconds += again * redone.take(here)
        longer = seconds > most
        np.copyto(most, seconds, where=longer)
        np.copyto(place, rank, where=longer)
        np.copyto(at, here, where=longer)
    return place, at


def data_parallel(inputs: CostInputs, passes: tuple[FloatColumn, FloatColumn]) -> ExposedSeconds:
    """Seconds that each load waits for data-parallel communication, (L,)."""
    load, job = inputs.loads.of_ranks, inputs.job
    return exposed_data_parallel(
        load, passes, inputs.shards, job.training, job.rules, job.profile.dp_hidden
    )


def _mean_ranks(
    inputs: CostInputs, share: FloatColumn
) -> tuple[FloatColumn, tuple[FloatColumn, FloatColumn, FloatColumn]]:
    """(seconds of a send, seconds of a microbatch on a mean rank: F, I, W), (N,) each.

    0 where the batch has no pipeline.

    share (T,): of what weight gradients recompute.
    """
    mean, at, job = inputs.loads.of_means, inputs.loads.at_mean, inputs.job
    unit = inputs.unit
    if not inputs.loads.pipelines.schedules:
        nothing = np.zeros(len(at))
        return nothing, (nothing, nothing, nothing)
    f, i, w = (
        sums(mean.units, at_rows(column, mean.at_unit))
        for column in (unit.forward, unit.input_grad, unit.weight_grad)
    )
    if inputs.shards.sum_seconds.any():
        w += sums(mean.units, adding_up(inputs.shards, mean.at_shard, mean.m))
    weight_grad = w.take(at)
    if share.any():
        redone = sums(mean.units, at_rows(unit.redone_seconds, mean.at_unit))
        weight_grad += inputs.loads.pipelines.of_layouts(share) * redone.take(at)
    codes = inputs.batch.pp_schedule
    sends, payload = np.zeros(len(at)), unit.boundary_bytes[mean.at_unit]
    alike = alike_sends(job.training, np.flatnonzero(np.bincount(codes)))
    for schedules in alike:
        batch = replace(mean.batch, pp_schedule=one_number(schedules[0], len(mean)))
        own = Sends(job=job, batch=batch, payload_bytes=payload)
        seconds = own.mean_seconds().take(at)
        named = np.zeros(len(SCHEDULES), dtype=np.bool_)
        named[schedules] = True
        np.copyto(sends, seconds, where=named[codes] if len(alike) > 1 else True)
    return sends, (f.take(at), i.take(at), weight_grad)


def _overlapped_pairs(
    inputs: CostInputs, place: IntColumn, at: IntColumn
) -> tuple[FloatColumn, pairs.Relief] | None:
    """(overlapped pairs of the busiest rank, what a pair saves), (N,); None where no rank has any.

    place, at: which rank that is, and its load.
    """
    pipes, load = inputs.loads.pipelines, inputs.loads.of_ranks
    batch, m = pipes.batch, pipes.counts
    own = filled(
        pipes.rank.shape,
        pipes.schedules,
        lambda s, rows: s.overlapped_pairs(
            pipes.rank[:, rows], batch.pp[rows], batch.virtual_stages[rows], m[rows]
        ),
        0.0,
    )
    if not own.any():
        return None
    found = own[place, pipes.at]
    rows = np.flatnonzero(found > 0)
    columns = pairs.pair_columns(inputs.unit, inputs.at_unit[rows], inputs.job.profile)
    here = load.units[:, at[rows]]
    relief = pairs.relief(columns, here, inputs.batch.virtual_stages[rows])
    return found, relief.spread(rows, len(at))


def _bubble(
    inputs: CostInputs,
    mean: tuple[FloatColumn, FloatColumn, FloatColumn],
    overlapped: tuple[FloatColumn, pairs.Relief] | None,
) -> tuple[FloatColumn, FloatColumn]:
    """(idle seconds, sends that are waited for), (N,).

    Overlapped pairs of other ranks on the critical path shorten this rank's idle time.
    """
    pipes, batch, count = inputs.loads.pipelines, inputs.batch, inputs.m.astype(np.int64)
    p, m = pipes.batch, pipes.counts
    f, i, w = mean

    def idle(schedule: Schedule, rows: IntColumn) -> FloatColumn:
        pp, v = batch.pp[rows], batch.virtual_stages[rows]
        return schedule.bubble_seconds(pp, v, count[rows], f[rows], i[rows], w[rows])

    def hops(schedule: Schedule, rows: IntColumn) -> FloatColumn:
        exposed = transport_of(inputs.job.training, schedule.name).exposed
        return schedule.sends_on_critical_path(p.pp[rows], p.virtual_stages[rows], m[rows], exposed)

    bubble = by_schedule(batch, idle, 0.0)
    if overlapped is not None:
        own, relief = overlapped
        bubble -= (pipes.of_layouts(critical_pairs(p, pipes.m)) - own) * relief.saved
    waited = filled(m.shape, pipes.schedules, hops, 0.0)
    return np.maximum(bubble, 0.0), pipes.of_layouts(waited)
