"""The pipeline's timeline: actions and durations in, step time, idle time and peak memory out. Knows no schedule by name.

Letters: C candidates that share one order, S stages, R pipeline ranks, L levels (positions in the longest chain of actions).
An action starts when its rank is free and its input has arrived: the forward of the stage before, the gradient of the stage
after, plus the send between ranks. Sends run beside compute and do not queue behind each other; within a rank they are free.
"""

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.schedules.base import Action, Order, Schedule

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

_KINDS = {"F": 0, "I": 1, "W": 2, "B": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What one microbatch costs on each stage. Arrays (C, S).

    send_seconds_CS: hop from stage s to s + 1 (the last column is unused), and the gradient's way back.
    saved_bytes_CS: kept from F until I or B.  weight_grad_bytes_CS: the share of it that stays from I until W (None: nothing).
    forward_transient_bytes_CS, backward_transient_bytes_CS: needed on top while F, or I and B, run (None: nothing).
    """

    forward_seconds_CS: Floats
    input_grad_seconds_CS: Floats
    weight_grad_seconds_CS: Floats
    send_seconds_CS: Floats
    saved_bytes_CS: Floats
    weight_grad_bytes_CS: Floats | None = None
    forward_transient_bytes_CS: Floats | None = None
    backward_transient_bytes_CS: Floats | None = None

    def __post_init__(self) -> None:
        shape = self.forward_seconds_CS.shape
        for f in fields(self):
            column = getattr(self, f.name)
            if column is not None and column.shape != shape:
                raise ValueError(f"{f.name} has shape {column.shape}, forward_seconds_CS {shape}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each action ran: one entry per action, rank after rank. Seconds and bytes are (A, C).

    kept_bytes_AC: saved activations on the action's rank once it has ended.
    """

    actions: tuple[Action, ...]
    rank_A: Rows
    start_seconds_AC: Floats
    end_seconds_AC: Floats
    kept_bytes_AC: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One step of the pipeline for C candidates.

    span_seconds_CR: from a rank's first start to its last end.  busy_seconds_CR: sum of its actions.
    bubble_seconds_CR: makespan minus busy.  peak_saved_bytes_CR: saved activations and transients at the worst moment.
    last_forward_seconds_CR: when a rank's last forward ended; its growth with the microbatches is the rank's own pace.
    simulated_microbatches: fewer than the layout's where the steady middle was extrapolated.
    """

    makespan_seconds_C: Floats
    span_seconds_CR: Floats
    busy_seconds_CR: Floats
    peak_saved_bytes_CR: Floats
    last_forward_seconds_CR: Floats
    simulated_microbatches: int
    timeline: Timeline | None = None

    @property
    def bubble_seconds_CR(self) -> Floats:
        """Idle seconds of each rank until the last rank ends."""
        return self.makespan_seconds_C[:, None] - self.busy_seconds_CR

    def step_seconds_C(self, synchronous_end: bool) -> Floats:
        """Pipeline share of a step: the makespan, or the longest span where ranks need not wait for each other at the end."""
        return self.makespan_seconds_C if synchronous_end else np.asarray(self.span_seconds_CR.max(axis=1), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An order, laid out so that one pass over L levels replays it for all candidates.

    Level l holds at most one action of each rank, each depending on earlier levels only. S stages, K = 4 S kinds of work.
    work_LR: row kind * S + stage into a table of K + 1 rows; the last row is "idle".
    reach_LR: how many slots (level * R + rank) before this one stands the action whose output is needed; 0 where none is.
    send_LR: stage whose hop the input crosses, S where it crosses none.
    actions, slot_A: every action and its slot; empty in a program that `stretched` made.
    """

    actions: tuple[Action, ...]
    num_stages: int
    work_LR: Rows
    reach_LR: Rows
    send_LR: Rows
    slot_A: Rows
    count_RK: Floats


def compile_order(order: Order) -> Program:
    """Levels and inputs of an order. Raises ValueError for an order that deadlocks or lacks an input (see `check_legal`)."""
    actions = tuple(action for rank in order for action in rank)
    rank_A = np.repeat(np.arange(len(order)), [len(rank) for rank in order])
    num_stages = 1 + max(action.stage for action in actions)
    stage_A, kind_A, microbatch_A = (np.array(column, dtype=np.int64) for column in _numbers(actions))
    input_A = _inputs(stage_A, kind_A, microbatch_A, num_stages)
    level_A = np.array(_levels([len(rank) for rank in order], input_A.tolist()), dtype=np.int64)
    ranks, levels, work_rows = len(order), int(level_A.max()) + 1, 4 * num_stages
    slot_A = level_A * ranks + rank_A
    work_A = kind_A * num_stages + stage_A
    crosses = (input_A >= 0) & (rank_A[input_A] != rank_A)
    hop_A = np.where(kind_A == _KINDS["F"], stage_A - 1, stage_A)
    work_LR = _scatter(slot_A, work_A, levels, ranks, empty=work_rows)
    return Program(
        actions=actions,
        num_stages=num_stages,
        work_LR=work_LR,
        reach_LR=_scatter(slot_A, np.where(input_A >= 0, slot_A - slot_A[input_A], 0), levels, ranks, empty=0),
        send_LR=_scatter(slot_A, np.where(crosses, hop_A, num_stages), levels, ranks, empty=num_stages),
        slot_A=slot_A,
        count_RK=np.stack([np.bincount(work_LR[:, r], minlength=work_rows + 1)[:-1] for r in range(ranks)]).astype(np.float64),
    )


def _numbers(actions: tuple[Action, ...]) -> tuple[list[int], list[int], list[int]]:
    stages, kinds, microbatches = zip(*actions, strict=True)
    return list(stages), [_KINDS[kind] for kind in kinds], list(microbatches)


def _inputs(stage_A: Rows, kind_A: Rows, microbatch_A: Rows, num_stages: int) -> Rows:
    """Index of the action whose output each action waits for across stages, -1 for none."""
    num_microbatches = int(microbatch_A.max()) + 1
    where = np.full((2, num_stages + 2, num_microbatches), -1, dtype=np.int64)
    forward, backward = kind_A == _KINDS["F"], (kind_A == _KINDS["I"]) | (kind_A == _KINDS["B"])
    index = np.arange(len(stage_A))
    where[0, stage_A[forward] + 1, microbatch_A[forward]] = index[forward]
    where[1, stage_A[backward] + 1, microbatch_A[backward]] = index[backward]
    needs_input = (forward & (stage_A > 0)) | (backward & (stage_A < num_stages - 1))
    found = np.where(forward, where[0, stage_A, microbatch_A], where[1, stage_A + 2, microbatch_A])
    if np.any(needs_input & (found < 0)):
        raise ValueError("an action waits for an input that no stage computes")
    return np.where(needs_input, found, -1)


def _levels(lengths: list[int], inputs: list[int]) -> list[int]:
    """Earliest level of each action: one more than its rank's previous action and than its input."""
    level = [-1] * len(inputs)
    ends = np.cumsum(lengths).tolist()
    position = [end - length for end, length in zip(ends, lengths, strict=True)]
    current = [-1] * len(lengths)
    left = len(inputs)
    while left:
        before = left
        for rank, end in enumerate(ends):
            here, now = position[rank], current[rank]
            while here < end:
                needed = inputs[here]
                if needed >= 0:
                    arrived = level[needed]
                    if arrived < 0:
                        break
                    now = max(arrived, now)
                now += 1
                level[here] = now
                here += 1
            left -= here - position[rank]
            position[rank], current[rank] = here, now
        if left == before:
            raise ValueError("the order deadlocks: ranks wait for each other in a circle")
    return level


def _scatter(slot_A: Rows, value_A: Rows, levels: int, ranks: int, *, empty: int) -> Rows:
    grid = np.full(levels * ranks, empty, dtype=np.int64)
    grid[slot_A] = value_A
    return grid.reshape(levels, ranks)


def replay(program: Program, costs: StageCosts, *, num_microbatches: int, times: bool = False) -> Simulation:
    """One step of this program for every candidate, nothing extrapolated."""
    levels, ranks = program.work_LR.shape
    seconds_KC = _work_table(costs.forward_seconds_CS, costs.input_grad_seconds_CS, costs.weight_grad_seconds_CS)
    duration_LRC = seconds_KC[program.work_LR]
    ends = _end_seconds(program, duration_LRC, costs.send_seconds_CS)
    end_LRC = ends[ranks:-1].reshape(levels, ranks, -1)
    last_RC = end_LRC[-1]
    first_R = np.argmax(program.work_LR < 4 * program.num_stages, axis=0)
    first_RC = end_LRC[first_R, np.arange(ranks)] - duration_LRC[first_R, np.arange(ranks)]
    last_forward_R = levels - 1 - np.argmax(program.work_LR[::-1] < program.num_stages, axis=0)
    kept_LRC, peak_RC = _kept_bytes(program, costs)
    timeline = None
    if times:
        flat = (-1, duration_LRC.shape[2])
        end_AC, duration_AC = end_LRC.reshape(flat)[program.slot_A], duration_LRC.reshape(flat)[program.slot_A]
        timeline = Timeline(
            actions=program.actions,
            rank_A=program.slot_A % ranks,
            start_seconds_AC=end_AC - duration_AC,
            end_seconds_AC=end_AC,
            kept_bytes_AC=kept_LRC.reshape(flat)[program.slot_A],
        )
    return Simulation(
        makespan_seconds_C=last_RC.max(axis=0),
        span_seconds_CR=(last_RC - first_RC).T,
        busy_seconds_CR=(program.count_RK @ seconds_KC[:-1]).T,
        peak_saved_bytes_CR=peak_RC.T,
        last_forward_seconds_CR=end_LRC[last_forward_R, np.arange(ranks)].T,
        simulated_microbatches=num_microbatches,
        timeline=timeline,
    )


def _work_table(forward_CS: Floats, input_grad_CS: Floats, weight_grad_CS: Floats) -> Floats:
    """(4 S + 1, C): rows F, I, W, B by stage, then the idle row."""
    idle = np.zeros((1, len(forward_CS)))
    return np.concatenate([forward_CS.T, input_grad_CS.T, weight_grad_CS.T, (input_grad_CS + weight_grad_CS).T, idle])


def _end_seconds(program: Program, duration_LRC: Floats, send_CS: Floats) -> Floats:
    """End of every slot, rows (level + 1) * R + rank; level -1 ends at 0 and the last row, "no input", at minus infinity.

    end = max(end of the rank's previous slot, end of the input + send) + duration
    """
    levels, ranks, candidates = duration_LRC.shape
    ends = np.empty(((levels + 1) * ranks + 1, candidates))
    ends[:ranks], ends[-1] = 0.0, -np.inf
    send_LRC = np.concatenate([send_CS.T, np.zeros((1, candidates))])[program.send_LR]
    own_LR = np.arange(ranks, (levels + 1) * ranks).reshape(levels, ranks)
    input_LR = np.where(program.reach_LR > 0, own_LR - program.reach_LR, len(ends) - 1)
    arrived = np.empty((ranks, candidates))
    before = ends[:ranks]
    for level in range(levels):
        np.take(ends, input_LR[level], axis=0, out=arrived, mode="clip")
        np.add(arrived, send_LRC[level], out=arrived)
        np.maximum(arrived, before, out=arrived)
        before = ends[(level + 1) * ranks : (level + 2) * ranks]
        np.add(arrived, duration_LRC[level], out=before)
    return ends


def _kept_bytes(program: Program, costs: StageCosts) -> tuple[Floats, Floats]:
    """(kept after each slot (L, R, C), peak (R, C)). The order alone decides both, so no times are needed.

    A forward counts what it saves while it runs; a backward frees what it used when it has ended.
    """
    saved = costs.saved_bytes_CS
    nothing = np.zeros_like(saved)
    share, forward_extra, backward_extra = (
        nothing if column is None else column
        for column in (costs.weight_grad_bytes_CS, costs.forward_transient_bytes_CS, costs.backward_transient_bytes_CS)
    )
    idle = np.zeros((1, len(saved)))
    change_KC = np.concatenate([saved.T, (share - saved).T, -share.T, -saved.T, idle])
    extra_KC = np.concatenate([(saved + forward_extra).T, backward_extra.T, nothing.T, backward_extra.T, idle])
    change_LRC = change_KC[program.work_LR]
    kept_LRC = np.cumsum(change_LRC, axis=0)
    during_LRC = kept_LRC - change_LRC + extra_KC[program.work_LR]
    return kept_LRC, during_LRC.max(axis=0)


@lru_cache(maxsize=512)
def program(schedule: Schedule, pp: int, virtual_stages: int, num_microbatches: int) -> Program:
    """The compiled order of a schedule, computed once."""
    return compile_order(schedule.actions(pp, virtual_stages, num_microbatches))


DIRECT_ACTIONS = 4000
"""Actions up to which a step is replayed whole: about 5 ms on one core, generating and compiling included (judgement)."""
EXTRAPOLATION_TOLERANCE = 1e-3
"""Largest relative gap between the two slopes below before the step is replayed with four times the microbatches (judgement)."""


def simulate(
    schedule: Schedule, pp: int, virtual_stages: int, num_microbatches: int, costs: StageCosts, *, times: bool = False
) -> Simulation:
    """One step of a schedule for C candidates that share it.

    Long steps are replayed with fewer microbatches m2 < m and continued along a line, because the middle of the order repeats:
        x(m) = x(m2) + (m - m2) dx/dm,  dx/dm from m1 < m2, m2 - m1 whole repetitions.
    m, m2 and m1 stand at the same place of the repetition (a circle of waits between ranks may take pp microbatches to close).
    Exact once the bottleneck has settled, as it has at once for equal stages with sends shorter than the work they hide behind.
    Where another rank will become the bottleneck later (its own pace, busy or waiting on a neighbour, is slower than the slope),
    the answer is the middle of both lines, and a gap of more than EXTRAPOLATION_TOLERANCE is settled by replaying more.
    times: keep each action's times; nothing is extrapolated then.
    """
    shape = (schedule, pp, virtual_stages)
    per_microbatch = pp * virtual_stages * (3 if schedule.splits_backward else 2)
    repeats = schedule.repeats_after(pp, virtual_stages, num_microbatches)
    stride = repeats if repeats > 1 else pp
    few = max(4 * pp, DIRECT_ACTIONS // 2 // per_microbatch)
    while not times and few + stride <= num_microbatches and per_microbatch * num_microbatches > DIRECT_ACTIONS:
        upper = num_microbatches - (num_microbatches - few) // stride * stride
        short, long = (replay(_steady(*shape, count, stride), costs, num_microbatches=count) for count in (upper - stride, upper))
        answer, gap = _continued(short, long, num_microbatches)
        if gap <= EXTRAPOLATION_TOLERANCE:
            return answer
        few *= 4
    chosen = program(*shape, num_microbatches) if times else _steady(*shape, num_microbatches, stride)
    return replay(chosen, costs, num_microbatches=num_microbatches, times=times)


def _steady(schedule: Schedule, pp: int, virtual_stages: int, num_microbatches: int, stride: int) -> Program:
    """The program for replays without times: compiled from the order, or a shorter one stretched where that saves the compiling."""
    actions = pp * virtual_stages * (3 if schedule.splits_backward else 2) * num_microbatches
    least = 4 * pp + stride
    if actions > DIRECT_ACTIONS and num_microbatches > least + stride:
        copies = (num_microbatches - least) // stride
        base = num_microbatches - copies * stride
        short, long = (program(schedule, pp, virtual_stages, count) for count in (base - stride, base))
        result = stretched(short, long, copies)
        if result is not None:
            return result
    return program(schedule, pp, virtual_stages, num_microbatches)


def stretched(short: Program, long: Program, copies: int) -> Program | None:
    """`long` with its steady block repeated `copies` times more; None where the two do not show one block that repeats.

    long must be short with one block of levels inserted, and that block must equal the one before it. Slots reach their inputs
    by distance, so a repeated block finds its inputs in the block before.
    """
    grids = [(a, b) for a, b in ((short.work_LR, long.work_LR), (short.reach_LR, long.reach_LR), (short.send_LR, long.send_LR))]
    levels = len(short.work_LR)
    block = len(long.work_LR) - levels
    same_L = np.all([(a == b[:levels]).all(axis=1) for a, b in grids], axis=0)
    head = levels if same_L.all() else int(np.argmin(same_L))
    repeats = (
        block > 0
        and head >= block
        and all(
            np.array_equal(a[head:], b[head + block :]) and np.array_equal(b[head - block : head], b[head : head + block]) for a, b in grids
        )
    )
    if not repeats:
        return None
    work_LR, reach_LR, send_LR = (
        np.concatenate([b[: head + block], np.tile(b[head : head + block], (copies, 1)), b[head + block :]]) for _, b in grids
    )
    return Program(
        actions=(),
        num_stages=long.num_stages,
        work_LR=work_LR,
        reach_LR=reach_LR,
        send_LR=send_LR,
        slot_A=np.empty(0, dtype=np.int64),
        count_RK=long.count_RK + copies * (long.count_RK - short.count_RK),
    )


def _continued(short: Simulation, long: Simulation, num_microbatches: int) -> tuple[Simulation, float]:
    """Both simulations continued to `num_microbatches`, and the largest relative gap between the two continuations."""
    further = num_microbatches - long.simulated_microbatches
    stride = long.simulated_microbatches - short.simulated_microbatches

    def line(before: Floats, after: Floats) -> Floats:
        return np.asarray(after + (after - before) * (further / stride), dtype=np.float64)

    busy_CR = line(short.busy_seconds_CR, long.busy_seconds_CR)
    forward_CR = line(short.last_forward_seconds_CR, long.last_forward_seconds_CR)
    own_pace_CR = np.maximum(busy_CR - long.busy_seconds_CR, forward_CR - long.last_forward_seconds_CR)
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
    return answer, float(np.max((fast_C - slow_C) / np.maximum(slow_C, np.finfo(np.float64).tiny)))
