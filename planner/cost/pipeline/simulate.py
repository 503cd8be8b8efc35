"""One simulated step of a schedule.

Orders are compiled once. The middle of a long step repeats, so only a part of it is replayed.
"""

from dataclasses import fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline.event_simulation import (
    CompiledSchedule,
    Simulation,
    Timeline,
    compile_graph,
    replay,
)
from planner.cost.pipeline.lowering import lower
from planner.cost.pipeline.recently_used import RecentlyUsed
from planner.cost.pipeline.stage_costs import StageCosts
from planner.schedules.base import Schedule
from planner.trainers.transports import IDEAL, Transport

Floats = NDArray[np.float64]


class SimulatedPipeline(NamedTuple):
    """A schedule with its numbers, under a transport."""

    schedule: Schedule
    pp: int
    virtual_stages: int
    num_microbatches: int
    transport: Transport = IDEAL

    @property
    def shape(self) -> tuple[int, int, int]:
        """(pp, virtual stages, microbatches)."""
        return self.pp, self.virtual_stages, self.num_microbatches

    @property
    def per_microbatch(self) -> int:
        return self.pp * self.virtual_stages * (3 if self.schedule.splits_backward else 2)

    @property
    def num_actions(self) -> int:
        return self.per_microbatch * self.num_microbatches

    @property
    def stride(self) -> int:
        """Microbatches after which the steady order repeats, waits between ranks included."""
        repeats = self.schedule.repeats_after(self.pp, self.virtual_stages, self.num_microbatches)
        return repeats if repeats > 1 else self.pp


KEPT_NODES = 2**22
"""Nodes of compiled orders that are kept, some 300 MB (judgement)."""
KEPT: RecentlyUsed[SimulatedPipeline, CompiledSchedule] = RecentlyUsed(KEPT_NODES)


def compiled(
    schedule: Schedule,
    pp: int,
    virtual_stages: int,
    num_microbatches: int,
    transport: Transport = IDEAL,
) -> CompiledSchedule:
    """The compiled order of a pipeline, computed once.

    Raises ValueError for an order that deadlocks or lacks an input.
    """
    pipeline = SimulatedPipeline(schedule, pp, virtual_stages, num_microbatches, transport)
    made = KEPT.get(pipeline)
    if made is None:
        order = schedule.columns(*pipeline.shape)
        made = compile_graph(lower(order, transport), order)
        KEPT.put(pipeline, made, len(made.work_N))
    return made


DIRECT_ACTIONS = 4000
"""Actions up to which a step is replayed whole (judgement).

That takes about 5 ms on one core, generating and compiling included.
"""
EXTRAPOLATION_TOLERANCE = 1e-3
"""Largest relative gap between the two slopes of `simulate` (judgement).

Beyond it the step is replayed with four times the microbatches.
"""


def simulate(
    schedule: Schedule,
    shape: tuple[int, int, int],
    costs: StageCosts,
    *,
    transport: Transport = IDEAL,
    times: bool = False,
) -> Simulation:
    """One step of a schedule for C candidates that share it.

    shape: (pp, virtual stages, microbatches).
    times: record when each action ran; nothing is extrapolated then.

    Long steps are replayed with fewer microbatches m2 < m and continued along a line, because the
    middle of the order repeats:
        x(m) = x(m2) + (m - m2) dx/dm,  dx/dm from m1 < m2, m2 - m1 whole repetitions.
    m, m2 and m1 stand at the same place of the repetition (a circle of waits between ranks may take
    pp microbatches to close). The result is exact once the bottleneck has settled. It settles at
    once for equal stages with sends shorter than the work they hide behind. Another rank may become
    the bottleneck later, because its own pace (busy or waiting for a neighbour) is slower than the
    slope. Then the answer is the middle of both lines, and a gap of more than
    EXTRAPOLATION_TOLERANCE is settled by replaying more of that candidate alone, so that no answer
    depends on the other candidates.
    """
    pipeline = SimulatedPipeline(schedule, *shape, transport)
    if times:
        return replay(compiled(*pipeline), costs, num_microbatches=shape[2], times=True)
    return settled(pipeline, costs)


def settled(
    pipeline: SimulatedPipeline, costs: StageCosts, *, memory: bool = True, least: int = 0
) -> Simulation:
    """The simulation of a pipeline without times, as `simulate` explains it.

    memory: whether peak bytes are wanted.
    least: microbatches to replay at least, where fewer did not settle.
    """

    def played(count: int) -> Simulation:
        order = compiled(*pipeline._replace(num_microbatches=count))
        return replay(order, costs, num_microbatches=count, memory=memory)

    two = _replayed(pipeline, least)
    if not two:
        return played(pipeline.num_microbatches)
    short, long = map(played, two)
    answer, gap_C = _continued(short, long, pipeline.num_microbatches)
    unsettled = np.flatnonzero(gap_C > EXTRAPOLATION_TOLERANCE)
    if len(unsettled):
        few = 4 * _fewest(pipeline, least)
        more = settled(pipeline, costs.take(unsettled), memory=memory, least=few)
        if len(unsettled) == costs.num_candidates:
            return more
        _put(answer, unsettled, more)
    return answer


def _fewest(pipeline: SimulatedPipeline, least: int) -> int:
    return max(4 * pipeline.pp, DIRECT_ACTIONS // 2 // pipeline.per_microbatch, least)


def _replayed(pipeline: SimulatedPipeline, least: int) -> tuple[int, ...]:
    """The two numbers of microbatches from which a step is continued; none to replay it whole."""
    few, count, stride = _fewest(pipeline, least), pipeline.num_microbatches, pipeline.stride
    if few + stride > count or pipeline.num_actions <= DIRECT_ACTIONS:
        return ()
    upper = count - (count - few) // stride * stride
    return upper - stride, upper


def _continued(
    short: Simulation, long: Simulation, num_microbatches: int
) -> tuple[Simulation, Floats]:
    """(both simulations continued to `num_microbatches`, relative gap between the two (C,))."""
    further = num_microbatches - long.simulated_microbatches
    stride = long.simulated_microbatches - short.simulated_microbatches

    def line(before: Floats, after: Floats) -> Floats:
        return np.asarray(after + (after - before) * (further / stride), dtype=np.float64)

    busy_CR = line(short.busy_seconds_CR, long.busy_seconds_CR)
    forward_CR = line(short.last_forward_seconds_CR, long.last_forward_seconds_CR)
    own_pace_CR = np.maximum(
        busy_CR - long.busy_seconds_CR, forward_CR - long.last_forward_seconds_CR
    )
    slowest_rank_C = own_pace_CR.max(axis=1)
    slow_C = line(short.makespan_seconds_C, long.makespan_seconds_C)
    fast_C = np.maximum(slow_C, long.makespan_seconds_C + slowest_rank_C)
    span_CR = line(short.span_seconds_CR, long.span_seconds_CR)
    span_CR = (span_CR + np.maximum(span_CR, long.span_seconds_CR + slowest_rank_C[:, None])) / 2.0
    answer = Simulation(
        makespan_seconds_C=(slow_C + fast_C) / 2.0,
        span_seconds_CR=np.minimum(span_CR, ((slow_C + fast_C) / 2.0)[:, None]),
        busy_seconds_CR=busy_CR,
        peak_saved_bytes_CR=line(short.peak_saved_bytes_CR, long.peak_saved_bytes_CR),
        last_forward_seconds_CR=forward_CR,
        simulated_microbatches=long.simulated_microbatches,
    )
    return answer, (fast_C - slow_C) / np.maximum(slow_C, np.finfo(np.float64).tiny)


def _put(answer: Simulation, rows: NDArray[np.int64], found: Simulation) -> None:
    """Writes the answers of some candidates over those of all."""
    for f in fields(Simulation):
        column = getattr(answer, f.name)
        if isinstance(column, np.ndarray):
            column[rows] = getattr(found, f.name)


__all__ = [
    "CompiledSchedule", "SimulatedPipeline", "Simulation", "StageCosts",
    "Timeline", "compiled", "replay", "settled", "simulate",
]  # fmt: skip
