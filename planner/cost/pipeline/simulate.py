"""One simulated step of a schedule.

Orders are compiled once. The middle of a long step repeats, so only a part of it is replayed.
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline.event_simulation import (
    CompiledSchedule,
    PairSeconds,
    Simulation,
    StageCosts,
    Timeline,
    compile_graph,
    replay,
)
from planner.cost.pipeline.lowering import lower
from planner.schedules.base import Order, Schedule
from planner.trainers.transports import IDEAL, Transport

Floats = NDArray[np.float64]


def compile_order(order: Order, transport: Transport = IDEAL) -> CompiledSchedule:
    """The compiled order under a transport.

    Raises ValueError for an order that deadlocks or lacks an input (see `check_legal`).
    """
    return compile_graph(lower(order, transport))


@lru_cache(maxsize=512)
def compiled(
    schedule: Schedule,
    pp: int,
    virtual_stages: int,
    num_microbatches: int,
    transport: Transport = IDEAL,
) -> CompiledSchedule:
    """The compiled order of a schedule, computed once."""
    return compile_order(schedule.actions(pp, virtual_stages, num_microbatches), transport)


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
    memory: bool = True,
    least: int = 0,
) -> Simulation:
    """One step of a schedule for C candidates that share it.

    shape: (pp, virtual stages, microbatches).
    times: record when each action ran; nothing is extrapolated then.
    memory: as in `replay`.
    least: microbatches to replay at least, where fewer did not settle.

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
    pp, virtual_stages, num_microbatches = shape
    line = _Line(schedule=schedule, pp=pp, virtual_stages=virtual_stages, transport=transport)
    repeats = schedule.repeats_after(pp, virtual_stages, num_microbatches)
    stride = repeats if repeats > 1 else pp
    few = max(4 * pp, DIRECT_ACTIONS // 2 // line.per_microbatch, least)
    while (
        not times
        and few + stride <= num_microbatches
        and line.per_microbatch * num_microbatches > DIRECT_ACTIONS
    ):
        upper = num_microbatches - (num_microbatches - few) // stride * stride
        short, long = (
            replay(line.steady(count, stride), costs, num_microbatches=count, memory=memory)
            for count in (upper - stride, upper)
        )
        answer, gap_C = _continued(short, long, num_microbatches)
        unsettled = np.flatnonzero(gap_C > EXTRAPOLATION_TOLERANCE)
        if len(unsettled) < len(gap_C):
            if len(unsettled):
                more = simulate(
                    schedule,
                    shape,
                    costs.take(unsettled),
                    transport=transport,
                    memory=memory,
                    least=4 * few,
                )
                _put(answer, unsettled, more)
            return answer
        few *= 4
    chosen = line.compiled(num_microbatches) if times else line.steady(num_microbatches, stride)
    return replay(chosen, costs, num_microbatches=num_microbatches, times=times, memory=memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Compiled orders of one pipeline for any number of microbatches."""

    schedule: Schedule
    pp: int
    virtual_stages: int
    transport: Transport

    @property
    def per_microbatch(self) -> int:
        return self.pp * self.virtual_stages * (3 if self.schedule.splits_backward else 2)

    def compiled(self, num_microbatches: int) -> CompiledSchedule:
        return compiled(
            self.schedule, self.pp, self.virtual_stages, num_microbatches, self.transport
        )

    def steady(self, num_microbatches: int, stride: int) -> CompiledSchedule:
        """A compiled order for replays without times.

        It is a short one with its steady block repeated, or left out once. Where no block repeats,
        the whole order is compiled.
        """
        for least in (4 * self.pp, 5 * self.pp):
            copies = (num_microbatches - least) // stride
            if copies == 0 or copies < -1:
                break
            base = num_microbatches - copies * stride
            result = (
                stretched(self.compiled(base), base, stride, copies) if self.legal(base) else None
            )
            if result is not None:
                return result
        return self.compiled(num_microbatches)

    def legal(self, num_microbatches: int) -> bool:
        return self.schedule.violation(self.pp, self.virtual_stages, num_microbatches) is None


def stretched(
    base: CompiledSchedule, num_microbatches: int, stride: int, copies: int
) -> CompiledSchedule | None:
    """`base`, whose order has `num_microbatches`, with its steady block repeated or removed.

    Each copy adds `stride` microbatches; -1 copies remove as many. None where no block repeats.
    A block is what `stride` microbatches are in the middle: their transfers, and of each stage F
    and B, or F, I and W, or half of two pairs. It must follow an equal one. Nodes name what they
    wait for by distance, so a repeated block finds its inputs in the block before.
    """
    stages, nodes = base.num_stages, len(base.work_N)
    transfers = int((base.rank_N >= base.num_ranks).sum()) // num_microbatches
    kinds = 1 if base.pairs else len(np.unique(base.work_N[base.rank_N < base.num_ranks])) // stages
    block = stride * (transfers + kinds * stages)
    if 2 * block > nodes:
        return None
    columns = np.stack([base.work_N, base.rank_N, base.first_N, *base.reach_DN])
    again_N = np.append((columns[:, block:] == columns[:, :-block]).all(axis=0), False)
    ends = np.flatnonzero(~again_N)
    runs = ends - np.append(0, ends[:-1] + 1)
    end = int(ends[np.argmax(runs)])
    start = end - int(runs.max())
    work = base.work_N[start : start + block]
    counts = np.bincount(work[base.rank_N[start : start + block] < base.num_ranks])
    if end - start < block or not np.isin(counts, (0, stride)).all():
        return None
    work_N, rank_N, first_N, *reach_DN = (
        np.concatenate(
            [
                column[:start],
                np.tile(column[start : start + block], copies + 1),
                column[start + block :],
            ]
        )
        for column in columns
    )
    return replace(
        base,
        items=(),
        slot_A=np.empty(0, dtype=np.int64),
        work_N=work_N,
        rank_N=rank_N,
        first_N=first_N.astype(np.bool_),
        reach_DN=np.array(reach_DN),
    )


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
    "CompiledSchedule",
    "PairSeconds",
    "Simulation",
    "StageCosts",
    "Timeline",
    "compile_order",
    "compiled",
    "replay",
    "simulate",
    "stretched",
]
