"""One simulated step of a schedule.

Orders are compiled once. The middle of a long step repeats, so only a part of it is replayed.
"""

from collections.abc import Iterator, Sequence
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
from planner.cost.pipeline.stage_costs import PairSeconds, StageCosts
from planner.schedules.actions import Order, as_columns
from planner.schedules.base import Schedule
from planner.trainers.transports import IDEAL, Transport

Floats = NDArray[np.float64]


def compile_order(order: Order, transport: Transport = IDEAL) -> CompiledSchedule:
    """The compiled order under a transport.

    Raises ValueError for an order that deadlocks or lacks an input.
    """
    columns = as_columns(order)
    return compile_graph(lower([columns], transport), [columns])[0]


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

    def with_microbatches(self, count: int) -> "SimulatedPipeline":
        return self._replace(num_microbatches=count)


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
    return compile_together(
        [SimulatedPipeline(schedule, pp, virtual_stages, num_microbatches, transport)]
    )[0]


TOGETHER = 100_000
"""Actions up to which orders are compiled together (judgement): 40 MB of columns."""


def compile_together(pipelines: Sequence[SimulatedPipeline]) -> list[CompiledSchedule]:
    """The compiled order of each pipeline, computed once.

    Those under one transport are compiled together, which takes a fraction of the time.
    """
    known = {pipeline: KEPT.get(pipeline) for pipeline in pipelines}
    found = {pipeline: made for pipeline, made in known.items() if made is not None}
    missing = [pipeline for pipeline in known if pipeline not in found]
    for transport in {pipeline.transport for pipeline in missing}:
        alike = [pipeline for pipeline in missing if pipeline.transport == transport]
        for group in _pieces(alike):
            orders = [p.schedule.columns(*p.shape) for p in group]
            made = compile_graph(lower(orders, transport), orders)
            found.update(zip(group, made, strict=True))
    for pipeline in missing:
        KEPT.put(pipeline, found[pipeline], len(found[pipeline].work_N))
    return [found[pipeline] for pipeline in pipelines]


def _pieces(pipelines: Sequence[SimulatedPipeline]) -> Iterator[list[SimulatedPipeline]]:
    """The pipelines in groups of at most TOGETHER actions, or of one pipeline."""
    group: list[SimulatedPipeline] = []
    for pipeline in sorted(pipelines, key=lambda pipeline: pipeline.num_actions):
        if group and sum(p.num_actions for p in (*group, pipeline)) > TOGETHER:
            yield group
            group = []
        group.append(pipeline)
    if group:
        yield group


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
        whole = compile_together([pipeline])[0]
        return replay(whole, costs, num_microbatches=shape[2], times=True)
    return simulate_together([Asked(pipeline, costs)])[0]


class Asked(NamedTuple):
    """A pipeline to simulate, with what its stages cost.

    least: microbatches to replay at least, where fewer did not settle.
    """

    pipeline: SimulatedPipeline
    costs: StageCosts
    least: int = 0


def simulate_together(asked: Sequence[Asked], *, memory: bool = True) -> list[Simulation]:
    """The simulation of each pipeline, as `simulate` makes it, in a fraction of the time."""
    counts = [_replayed(one.pipeline, one.least) for one in asked]
    needed = [
        (one, count)
        for one, two in zip(asked, counts, strict=True)
        for count in two or (one.pipeline.num_microbatches,)
    ]
    orders = compile_together([one.pipeline.with_microbatches(count) for one, count in needed])
    played = (
        replay(order, one.costs, num_microbatches=count, memory=memory)
        for (one, count), order in zip(needed, orders, strict=True)
    )
    answers, again = [], []
    for place, one in enumerate(asked):
        if not counts[place]:
            answers.append(next(played))
            continue
        short, long = next(played), next(played)
        answer, gap_C = _continued(short, long, one.pipeline.num_microbatches)
        answers.append(answer)
        unsettled = np.flatnonzero(gap_C > EXTRAPOLATION_TOLERANCE)
        if len(unsettled):
            few = 4 * _fewest(one.pipeline, one.least)
            again.append((place, unsettled, Asked(one.pipeline, one.costs.take(unsettled), few)))
    if again:
        more = simulate_together([one for *_, one in again], memory=memory)
        for (place, unsettled, _), simulated in zip(again, more, strict=True):
            if len(unsettled) == asked[place].costs.num_candidates:
                answers[place] = simulated
            else:
                _put(answers[place], unsettled, simulated)
    return answers


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
    "Asked", "CompiledSchedule", "PairSeconds", "SimulatedPipeline", "Simulation", "StageCosts",
    "Timeline", "compile_order", "compile_together", "compiled", "replay", "simulate",
    "simulate_together",
]  # fmt: skip
