"""Prices refined by simulating the schedule.

The simulation accounts for unequal stages, for sends, and for each rank's memory as microbatches
come and go. Layouts that share (schedule, pp, virtual stages, microbatches) are simulated together.
Letters: N layouts, C of them that are simulated together, S stages.
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.cost.layer.forward_backward_overlap import pair_columns
from planner.cost.network.sends import transport_of
from planner.cost.pipeline import stages
from planner.cost.pipeline.schedule_columns import num_microbatches
from planner.cost.pipeline.simulate import (
    SimulatedPipeline,
    Simulation,
    StageCosts,
    settled,
    simulate,
)
from planner.cost.price import Pricer, Prices, StepTimes
from planner.schedules import SCHEDULES, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """The simulated step, (N,).

    bubble_seconds, send_seconds: beyond the busiest rank's own work.
    Infinite where the order cannot be simulated (see `_makespan`).
    """

    step_seconds: FloatColumn
    bubble_seconds: FloatColumn
    send_seconds: FloatColumn


def refine(pricer: Pricer, batch: LayoutBatch, prices: Prices) -> Refined:
    """Simulated seconds of every layout; for one without a pipeline, those of its price."""
    bubble, sends = prices.parts["bubble"].copy(), prices.parts["pp"].copy()
    together = groups(pricer, batch)
    played = _makespans(pricer, batch, prices, together, (1.0, 0.0))
    for rows, seconds in zip(together, played, strict=True):
        makespan, without_sends = seconds[: len(rows)], seconds[len(rows) :]
        busy, factor = prices.stage_seconds.busy[rows], prices.own_factor[rows]
        bubble[rows] = factor * np.maximum(without_sends - busy, 0.0)
        waits = makespan - np.where(np.isinf(makespan), 0.0, np.maximum(without_sends, busy))
        sends[rows] = factor * np.maximum(waits, 0.0)
    step = prices.step_seconds - prices.parts["bubble"] - prices.parts["pp"] + bubble + sends
    return Refined(step_seconds=step, bubble_seconds=bubble, send_seconds=sends)


def simulated_step_seconds(pricer: Pricer, batch: LayoutBatch, prices: StepTimes) -> FloatColumn:
    """`Refined.step_seconds` by one simulation, without telling bubble and sends apart, (N,)."""
    idle = prices.parts["bubble"] + prices.parts["pp"]
    step = prices.step_seconds - idle
    together = groups(pricer, batch)
    played = _makespans(pricer, batch, prices, together, (1.0,))
    for rows, makespan in zip(together, played, strict=True):
        waits = makespan - prices.stage_seconds.busy[rows]
        idle[rows] = prices.own_factor[rows] * np.maximum(waits, 0.0)
    return np.asarray(step + idle)


def _makespans(
    pricer: Pricer,
    batch: LayoutBatch,
    prices: StepTimes,
    together: list[IntColumn],
    send_scales: tuple[float, ...],
) -> list[FloatColumn]:
    """Seconds of the pipeline in a step, for each of these groups of rows.

    send_scales: the layouts are simulated once for each factor on their sends, one after the other
        along C.
    """
    return [
        _makespan(
            _pipeline(pricer, batch, rows), _stage_costs(pricer, batch, prices, rows, send_scales)
        )
        for rows in together
    ]


def _makespan(pipeline: SimulatedPipeline, costs: StageCosts) -> FloatColumn:
    """The pipeline's share of a step, (C,).

    Infinite for an order whose ranks wait for each other for good under this transport.
    """
    try:
        played = settled(pipeline, costs, memory=False)
    except ValueError:
        return np.full(costs.num_candidates, np.inf)
    return played.step_seconds_C(pipeline.schedule.synchronous_end)


def groups(pricer: Pricer, batch: LayoutBatch) -> list[IntColumn]:
    """Row indices of the pipelined layouts that can be simulated together."""
    m = num_microbatches(batch, pricer.training).astype(np.int64)
    keys = np.stack([batch.pp_schedule, batch.pp, batch.virtual_stages, m])
    piped = np.flatnonzero(batch.pp > 1)
    if not len(piped):
        return []
    _, inverse = np.unique(keys[:, piped], axis=1, return_inverse=True)
    inverse = inverse.ravel()
    return [piped[inverse == group] for group in range(inverse.max() + 1)]


def first_groups(pricer: Pricer, batch: LayoutBatch, most: int, most_groups: int) -> IntColumn:
    """The first `most` rows whose pipelines are among the first `most_groups` distinct ones.

    Rows come best first. Layouts without a pipeline always count.
    """
    m = num_microbatches(batch, pricer.training)
    piped = batch.pp > 1
    seen: set[tuple[float, ...]] = set()
    chosen: list[int] = []
    for row, key in enumerate(
        zip(batch.pp_schedule, batch.pp, batch.virtual_stages, m, strict=True)
    ):
        if piped[row] and key not in seen:
            if len(seen) == most_groups:
                continue
            seen.add(key)
        chosen.append(row)
        if len(chosen) == most:
            break
    return np.array(chosen, dtype=np.int64)


def play(pricer: Pricer, batch: LayoutBatch, prices: StepTimes, rows: IntColumn) -> Simulation:
    """The simulation of layouts `rows`, which share schedule, pp, virtual stages and microbatches.

    It records when each action ran.
    """
    pipeline = _pipeline(pricer, batch, rows)
    return simulate(
        pipeline.schedule,
        pipeline.shape,
        _stage_costs(pricer, batch, prices, rows, (1.0,)),
        transport=pipeline.transport,
        times=True,
    )


def _pipeline(pricer: Pricer, batch: LayoutBatch, rows: IntColumn) -> SimulatedPipeline:
    first = rows[:1]
    schedule = SCHEDULES.of_code(int(batch.pp_schedule[first[0]]))
    return SimulatedPipeline(
        schedule,
        int(batch.pp[first[0]]),
        int(batch.virtual_stages[first[0]]),
        int(num_microbatches(batch.take(first), pricer.training)[0]),
        transport_of(pricer.training, schedule.name),
    )


def _stage_costs(
    pricer: Pricer,
    batch: LayoutBatch,
    prices: StepTimes,
    rows: IntColumn,
    send_scales: tuple[float, ...],
) -> StageCosts:
    first = int(rows[0])
    schedule = SCHEDULES.of_code(int(batch.pp_schedule[first]))
    blocks = stages.block_layers(batch)
    units_CSK = np.array(
        [
            stages.stage_units(
                stages.layers_of_stages(batch, int(row), pricer.model, pricer.rules),
                pricer.model,
                None if blocks is None else int(blocks[row]),
            )
            for row in rows
        ]
    )
    s = prices.stage_seconds
    at = s.at[rows]

    def on_stages(field: FloatColumn) -> FloatColumn:
        return np.tile(np.einsum("csk,kc->cs", units_CSK, field), (len(send_scales), 1))

    pp = int(batch.pp[first])
    hop_S = hops_of(schedule, pp, int(batch.virtual_stages[first]))
    alone, crowded = (
        np.concatenate([scale * hops[:, hop_S] for scale in send_scales])
        for hops in s.sends.take(rows).hop_seconds(pp)
    )
    # A stage's input is the buffer that received it; torch allocates these for the whole step.
    framework = pricer.rules.framework
    received_S = float(framework.buffers_every_receive) * (np.arange(units_CSK.shape[1]) > 0)
    boundary = np.tile(s.sends.payload_bytes[rows], len(send_scales))[:, None] * (
        float(framework.keeps_stage_outputs) - received_S
    )
    return StageCosts(
        forward_seconds_CS=on_stages(s.forward[:, rows]),
        input_grad_seconds_CS=on_stages(s.input_grad[:, rows]),
        weight_grad_seconds_CS=on_stages(s.weight_grad[:, rows]),
        send_seconds_CS=alone,
        crowded_seconds_CS=crowded,
        redone_seconds_CS=on_stages(s.costs.redone_seconds[:, at]),
        saved_bytes_CS=on_stages(s.costs.saved_bytes[:, at]) + boundary,
        weight_grad_bytes_CS=on_stages(s.costs.held_bytes[:, at]) + boundary,
        pair=pair_columns(s.costs, at, pricer.profile).of_stages(on_stages),
    )


def hops_of(schedule: Schedule, pp: int, virtual_stages: int) -> IntColumn:
    """Hop between ranks that each stage's output crosses to the next stage.

    Rank r to r + 1 is hop r, the last rank to the first is hop p - 1.
    """
    rank = schedule.stage_rank(np.arange(pp * virtual_stages), pp, virtual_stages)
    after = np.append(rank[1:], rank[-1])
    around = (np.abs(after - rank) > 1) & (pp > 2)
    return np.where(around, pp - 1, np.minimum(rank, after))
