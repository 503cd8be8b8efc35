"""The pipeline's timeline: a lowered order and durations in, times and peak memory out.

No schedule is named here.
Letters: C candidates that share one schedule, S stages, R pipeline ranks, A items of the order, N
nodes (items and transfers), L levels (positions in the longest chain of nodes), K rows of work.
A node starts when all that it waits for has ended. An item waits for its rank's previous item and
for its inputs. A transfer waits for its sender, its receiver and its stream's previous transfer.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from planner.cost.pipeline.lowering import CROWDED, SENDS, Graph
from planner.cost.pipeline.order_parts import RankColumns, Rows
from planner.cost.pipeline.stage_costs import Floats, StageCosts
from planner.cost.pipeline.waves import waves
from planner.schedules.actions import KINDS, ActionColumns, Item


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each item ran: one entry per item, rank after rank. Seconds and bytes are (A, C).

    kept_bytes_AC: saved activations on the item's rank once the item has ended.
    """

    actions: tuple[Item, ...]
    rank_A: Rows
    start_seconds_AC: Floats
    end_seconds_AC: Floats
    kept_bytes_AC: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One step of the pipeline for C candidates.

    span_seconds_CR: from a rank's first start to its last end.
    busy_seconds_CR: sum of its items.
    peak_saved_bytes_CR: most saved activations at any time, without those in buffers of the whole
        step.
    last_forward_seconds_CR: when a rank's last forward ended. Its growth with the microbatches is
        the rank's own pace.
    simulated_microbatches: fewer than the layout's where the steady middle was extrapolated.
    """

    makespan_seconds_C: Floats
    span_seconds_CR: Floats
    busy_seconds_CR: Floats
    peak_saved_bytes_CR: Floats
    last_forward_seconds_CR: Floats
    simulated_microbatches: int
    timeline: Timeline | None = None

    def bubble_seconds_CR(self, synchronous_end: bool) -> Floats:
        """Idle seconds of each rank in a step of `step_seconds_C`."""
        return self.step_seconds_C(synchronous_end)[:, None] - self.busy_seconds_CR

    def step_seconds_C(self, synchronous_end: bool) -> Floats:
        """Pipeline share of a step.

        It is the makespan, or the longest span where ranks need not wait for each other at the end.
        """
        return (
            self.makespan_seconds_C
            if synchronous_end
            else np.asarray(self.span_seconds_CR.max(axis=1), dtype=np.float64)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSchedule:
    """A graph laid out so that one pass over its levels replays it for all candidates.

    Nodes are in the order of their levels.
    pairs: (stage of the forward, stage of the backward) of each kind of overlapped pair.
    work_N: row of the table of K = 6 S + pairs rows (see `planner.cost.pipeline.lowering.Graph`).
    levels: of each level's n nodes what each waits for, (D, n); N for none.
    rank_N: rank of an item, at least R for a transfer.
    order, slot_A: actions of each rank, and the node of each item.
    """

    order: tuple[ActionColumns, ...]
    num_ranks: int
    num_stages: int
    pairs: tuple[tuple[int, int], ...]
    work_N: Rows
    levels: list[Rows]
    rank_N: Rows
    slot_A: Rows

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(item for rank in self.order for item in rank.items())


def compile_graph(graph: Graph, order: RankColumns) -> CompiledSchedule:
    """A graph with its nodes in levels. Raises ValueError for one that deadlocks."""
    num_nodes = len(graph.work_N)
    level_N = np.empty(num_nodes, dtype=np.int64)
    for level, nodes in enumerate(waves(graph.needs_DN)):
        level_N[nodes] = level
    sequence = np.lexsort((graph.rank_N, level_N))
    slot_N = np.empty(num_nodes + 1, dtype=np.int64)
    slot_N[sequence], slot_N[-1] = np.arange(num_nodes), num_nodes
    needs_DN = slot_N[graph.needs_DN[:, sequence]]
    ends = np.cumsum(np.bincount(level_N)).tolist()
    return CompiledSchedule(
        order=tuple(order),
        num_ranks=graph.num_ranks,
        num_stages=graph.num_stages,
        pairs=graph.pairs,
        work_N=graph.work_N[sequence],
        levels=[needs_DN[:, s:e].copy() for s, e in itertools.pairwise([0, *ends])],
        rank_N=graph.rank_N[sequence],
        slot_A=slot_N[: graph.num_items],
    )


def replay(
    schedule: CompiledSchedule,
    costs: StageCosts,
    *,
    num_microbatches: int,
    times: bool = False,
    memory: bool = True,
) -> Simulation:
    """One step of this schedule for every candidate, nothing extrapolated.

    memory: whether peak bytes are wanted; without, and without times, they are 0.
    """
    seconds_KC = _work_table(schedule, costs)
    duration_NC = seconds_KC[schedule.work_N]
    end_NC = _end_seconds(schedule, duration_NC)
    kept_bytes, peak_RC = (
        _kept_bytes(schedule, costs)
        if memory or times
        else ([], np.zeros((schedule.num_ranks, end_NC.shape[1])))
    )
    items = np.flatnonzero(schedule.rank_N < schedule.num_ranks)
    work, rank = schedule.work_N[items], schedule.rank_N[items]
    forward = (work < schedule.num_stages) | (work >= 6 * schedule.num_stages)
    first_R, last_R, last_forward_R = np.empty((3, schedule.num_ranks), dtype=np.int64)
    first_R[rank[::-1]] = items[::-1]
    last_R[rank] = items  # of equal places the last one assigned stays
    last_forward_R[rank[forward]] = items[forward]
    shape_RK = schedule.num_ranks, len(seconds_KC)
    counts_RK = np.bincount(rank * shape_RK[1] + work, minlength=shape_RK[0] * shape_RK[1])
    counts_RK = counts_RK.reshape(shape_RK).astype(np.float64)
    timeline = None
    if times:
        timeline = Timeline(
            actions=schedule.items,
            rank_A=schedule.rank_N[schedule.slot_A],
            start_seconds_AC=end_NC[schedule.slot_A] - duration_NC[schedule.slot_A],
            end_seconds_AC=end_NC[schedule.slot_A],
            kept_bytes_AC=np.concatenate(kept_bytes),
        )
    return Simulation(
        makespan_seconds_C=end_NC[last_R].max(axis=0),
        span_seconds_CR=(end_NC[last_R] - end_NC[first_R] + duration_NC[first_R]).T,
        busy_seconds_CR=(counts_RK @ seconds_KC).T,
        peak_saved_bytes_CR=peak_RC.T,
        last_forward_seconds_CR=end_NC[last_forward_R].T,
        simulated_microbatches=num_microbatches,
        timeline=timeline,
    )


def _work_table(schedule: CompiledSchedule, costs: StageCosts) -> Floats:
    """(K, C): seconds of F, I, W, B, transfer and crowded transfer by stage, then of the pairs."""
    forward, input_grad, weight_grad, send = (
        column.T
        for column in (
            costs.forward_seconds_CS,
            costs.input_grad_seconds_CS,
            costs.weight_grad_seconds_CS,
            costs.send_seconds_CS,
        )
    )
    crowded = send if costs.crowded_seconds_CS is None else costs.crowded_seconds_CS.T
    apart = (
        weight_grad if costs.redone_seconds_CS is None else weight_grad + costs.redone_seconds_CS.T
    )
    table = [forward, input_grad, apart, input_grad + weight_grad, send, crowded]
    if schedule.pairs:
        f, b = np.array(schedule.pairs).T
        saved = 0.0 if costs.pair is None else costs.pair.saved_CP(f, b).T
        table.append(forward[f] + input_grad[b] + weight_grad[b] - saved)
    return np.concatenate(table)


def _end_seconds(schedule: CompiledSchedule, duration_NC: Floats) -> Floats:
    """End of every node, (N, C): its duration plus the latest end of what it waits for, or plus 0.

    Level by level, since nodes of one level do not wait for each other.
    """
    ends = np.concatenate([duration_NC, np.zeros((1, duration_NC.shape[1]))])  # the last: of none
    end = 0
    for needs in schedule.levels:
        start, end = end, end + needs.shape[1]
        ends[start:end] += np.maximum.reduce(ends.take(needs, axis=0))
    return ends[:-1]


def _kept_bytes(schedule: CompiledSchedule, costs: StageCosts) -> tuple[list[Floats], Floats]:
    """(bytes kept after each item, rank by rank; peak (R, C)).

    The order decides both, so no times are needed. A forward counts what it saves from its start. A
    backward frees what it used when it has ended. A pair does both.
    """
    saved = costs.saved_bytes_CS.T
    nothing = np.zeros_like(saved)
    share = nothing if costs.weight_grad_bytes_CS is None else costs.weight_grad_bytes_CS.T
    change = [saved, share - saved, -share, -saved, nothing, nothing]
    extra = [saved, *[nothing] * 5]
    if schedule.pairs:
        f, b = np.array(schedule.pairs).T
        change.append(saved[f] - saved[b])
        extra.append(saved[f])
    change_KC, extra_KC = np.concatenate(change), np.concatenate(extra)
    kept, peaks = [], []
    for rank in range(schedule.num_ranks):
        work_A = schedule.work_N[schedule.rank_N == rank]
        after = np.cumsum(change_KC[work_A], axis=0)
        kept.append(after)
        peaks.append((after - change_KC[work_A] + extra_KC[work_A]).max(axis=0))
    return kept, np.stack(peaks)


assert (len(KINDS), SENDS, CROWDED) == (4, 4, 5)
