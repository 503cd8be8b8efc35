"""The pipeline's timeline: a lowered order and durations in, times and peak memory out.

No schedule is named here.
Letters: C candidates that share one schedule, S stages, R pipeline ranks, A items of the order, N
nodes (items and transfers), L levels (positions in the longest chain of nodes), K rows of work.
A node starts when all that it waits for has ended. An item waits for its rank's previous item and
for its inputs. A transfer waits for its sender, its receiver and its stream's previous transfer.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline.lowering import CROWDED, SENDS, Graph
from planner.cost.pipeline.order_parts import RankColumns, Rows
from planner.cost.pipeline.stage_costs import Floats, StageCosts
from planner.cost.pipeline.waves import waves
from planner.schedules.actions import KINDS, ActionColumns, Item

TOGETHER = 2**20
"""Ends of nodes, one a candidate, up to which schedules are replayed together: 8 MB (judgement)."""


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
    reach_DN: for each node it waits for, how many nodes earlier that one stands; 0 for none.
    first_N: whether the node begins a level.
    rank_N: rank of an item, at least R for a transfer.
    order, slot_A: actions of each rank, and the node of each item.
    """

    order: tuple[ActionColumns, ...]
    num_ranks: int
    num_stages: int
    pairs: tuple[tuple[int, int], ...]
    work_N: Rows
    reach_DN: Rows
    first_N: NDArray[np.bool_]
    rank_N: Rows
    slot_A: Rows

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(item for rank in self.order for item in rank.items())


class OrderRun(NamedTuple):
    """A schedule to replay, with what its stages cost, and the microbatches of its order."""

    schedule: CompiledSchedule
    costs: StageCosts
    num_microbatches: int


def compile_graph(graph: Graph, orders: Sequence[RankColumns]) -> list[CompiledSchedule]:
    """Each pipeline of a graph with its nodes in levels.

    Raises ValueError for a graph that deadlocks.
    """
    num_nodes = len(graph.work_N)
    level_N = np.empty(num_nodes, dtype=np.int64)
    for level, nodes in enumerate(waves(graph.needs_DN)):
        level_N[nodes] = level
    code_N = (graph.pipeline_N * (level_N.max() + 1) + level_N) * (graph.rank_N.max() + 1)
    code_N = (code_N + graph.rank_N) * num_nodes + np.arange(num_nodes)
    sequence = np.sort(code_N) % num_nodes
    slot_N = np.empty(num_nodes, dtype=np.int64)
    slot_N[sequence] = np.arange(num_nodes)
    needs_DN = graph.needs_DN[:, sequence]
    reach_DN = np.where(needs_DN >= 0, np.arange(num_nodes) - slot_N[needs_DN], 0)
    work_N, rank_N, level_N = (of_N[sequence] for of_N in (graph.work_N, graph.rank_N, level_N))
    found, item, node = [], 0, 0
    for pipeline, size in enumerate(np.bincount(graph.pipeline_N).tolist()):
        items, here = int(graph.items_P[pipeline]), slice(node, node + size)
        reach = reach_DN[:, here]
        found.append(
            CompiledSchedule(
                order=tuple(orders[pipeline]),
                num_ranks=int(graph.ranks_P[pipeline]),
                num_stages=int(graph.stages_P[pipeline]),
                pairs=graph.pairs_P[pipeline],
                work_N=work_N[here].copy(),
                reach_DN=reach[: max(1, int(reach.any(axis=1).sum()))].copy(),
                first_N=np.diff(level_N[here], prepend=-1) > 0,
                rank_N=rank_N[here].copy(),
                slot_A=slot_N[item : item + items] - node,
            )
        )
        item, node = item + items, node + size
    return found


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
    run = OrderRun(schedule, costs, num_microbatches)
    return replay_together([run], times=times, memory=memory)[0]


def replay_together(
    runs: Sequence[OrderRun], *, times: bool = False, memory: bool = True
) -> list[Simulation]:
    """The replay of each run, as `replay` makes it, in a fraction of the time."""
    found: dict[int, Simulation] = {}
    for places in _pieces(runs):
        tables = [_work_table(runs[place].schedule, runs[place].costs) for place in places]
        schedules = [runs[place].schedule for place in places]
        durations = [
            table[schedule.work_N] for table, schedule in zip(tables, schedules, strict=True)
        ]
        ends = _end_seconds(schedules, durations)
        for place, table, duration, end in zip(places, tables, durations, ends, strict=True):
            found[place] = _simulation(runs[place], table, duration, end, times, memory)
    return [found[place] for place in range(len(runs))]


def _pieces(runs: Sequence[OrderRun]) -> Iterator[list[int]]:
    """Places of the runs, in groups that are replayed together.

    Those with alike numbers of candidates, since each takes as many columns as the largest.
    """
    group: list[int] = []
    nodes = 0
    for place in sorted(range(len(runs)), key=lambda at: runs[at].costs.num_candidates):
        more = len(runs[place].schedule.work_N)
        if group and (nodes + more) * runs[place].costs.num_candidates > TOGETHER:
            yield group
            group, nodes = [], 0
        group.append(place)
        nodes += more
    if group:
        yield group


def _simulation(
    run: OrderRun,
    seconds_KC: Floats,
    duration_NC: Floats,
    end_NC: Floats,
    times: bool,
    memory: bool,
) -> Simulation:
    schedule = run.schedule
    kept_bytes, peak_RC = (
        _kept_bytes(schedule, run.costs)
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
        simulated_microbatches=run.num_microbatches,
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


def _end_seconds(
    schedules: Sequence[CompiledSchedule], durations_NC: Sequence[Floats]
) -> list[Floats]:
    """End of every node, (N, C) of each schedule.

    That is its duration plus the latest end of what it waits for, or plus 0. Schedules are gone
    through side by side, level by level, since a level takes about as long however wide it is.
    """
    depth, bounds, needs_G, slot_N = _level_by_level(schedules)
    candidates = max(duration_NC.shape[1] for duration_NC in durations_NC)
    ends = np.zeros((len(slot_N) + 1, candidates))  # the last one is what nobody waits for
    first, slots = 0, []
    for duration_NC in durations_NC:
        slots.append(slot_N[first : first + len(duration_NC)])
        ends[slots[-1], : duration_NC.shape[1]] = duration_NC
        first += len(duration_NC)
    for start, end in itertools.pairwise(bounds):
        arrived = ends.take(needs_G[depth * start : depth * end], axis=0)
        here = ends[start:end]
        here += np.maximum.reduce(arrived.reshape(depth, end - start, candidates), axis=0)
    return [
        ends[slot_N, : duration_NC.shape[1]]
        for slot_N, duration_NC in zip(slots, durations_NC, strict=True)
    ]


def _level_by_level(schedules: Sequence[CompiledSchedule]) -> tuple[int, list[int], Rows, Rows]:
    """(D, where each level starts and the last one ends, needs level by level, slots (N,)).

    All for the nodes of all schedules together. The needs of a level are D lists, each with one
    slot for every node of the level; a slot is a node's place in the order of levels.
    """
    depth = max(len(schedule.reach_DN) for schedule in schedules)
    level_N = np.concatenate([np.cumsum(schedule.first_N) - 1 for schedule in schedules])
    num_nodes = len(level_N)
    sequence = np.argsort(level_N, kind="stable")
    slot_N = np.empty(num_nodes + 1, dtype=np.int64)
    slot_N[sequence], slot_N[num_nodes] = np.arange(num_nodes), num_nodes
    needs_DN = np.full((depth, num_nodes), num_nodes)
    first = 0
    for schedule in schedules:
        reach_DN = schedule.reach_DN
        node_N = np.arange(first, first + reach_DN.shape[1])
        needs_DN[: len(reach_DN), node_N] = np.where(reach_DN > 0, node_N - reach_DN, num_nodes)
        first += reach_DN.shape[1]
    size_L = np.bincount(level_N)
    bounds = np.concatenate([[0], np.cumsum(size_L)])
    level_N = level_N[sequence]
    start_N, size_N = bounds[level_N], size_L[level_N]
    needs_G = np.empty(depth * num_nodes, dtype=np.int64)
    place_N = (depth - 1) * start_N + np.arange(num_nodes)  # in the first list of its level
    needs_G[place_N + np.arange(depth)[:, None] * size_N] = slot_N[needs_DN[:, sequence]]
    return depth, bounds.tolist(), needs_G, slot_N[:num_nodes]


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
