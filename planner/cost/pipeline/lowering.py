"""Compute orders and a transport, lowered to one graph of what each action and transfer waits for.

Several pipelines are lowered together, because a few long columns take less time than many short
ones. They are parts of one graph without an edge between them.
Letters: P pipelines, A items of their orders, T transfers, N = A + T nodes, G edges, D most edges
into one node, S stages of a pipeline, R its ranks. A transfer carries an activation to the next
stage or a gradient to the one before. Nodes are numbered items first, rank after rank, then
transfers in the order of their receivers. Ranks are numbered through all pipelines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline.torch_rounds import entries_before, rounds
from planner.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, ActionColumns
from planner.trainers.transports import Transport

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
RankColumns = Sequence[ActionColumns]
"""The order of one pipeline, a rank an entry."""

SENDS, CROWDED = 4, 5
"""Rows of work after those of F, I, W and B, S rows to a kind.

SENDS: a transfer from stage s to s + 1 or back.
CROWDED: a transfer whose rank sends another with it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes and what they wait for.

    ranks_P, stages_P, items_P: how many each pipeline has.
    pairs_P: (stage of the forward, stage of the backward) of each kind of overlapped pair.
    pipeline_N: the pipeline of each node.
    work_N: kind * S + stage, or 6 S + k for the k-th of its pipeline's pairs.
    needs_DN: nodes that must have ended before, -1 for none.
    rank_N: rank of an item in its pipeline, R + sender x R + receiver of a transfer.
    """

    ranks_P: Rows
    stages_P: Rows
    items_P: Rows
    pairs_P: tuple[tuple[tuple[int, int], ...], ...]
    pipeline_N: Rows
    work_N: Rows
    rank_N: Rows
    needs_DN: Rows


@dataclass(frozen=True, slots=True)
class _Parts:
    """Columns of the items (A), of their single actions (leaves) and of the transfers (T).

    Leaf arrays end in _l.
    stage_l: in its pipeline; `first_stage_P` is added to number stages through all pipelines.
    first_l: whether the leaf begins an item.
    """

    ranks_P: Rows
    stages_P: Rows
    pipeline_A: Rows
    rank_A: Rows
    before_A: Rows
    after_A: Rows
    item_l: Rows
    first_l: Mask
    stage_l: Rows
    kind_l: Rows
    source_l: Rows
    sender_T: Rows
    receiver_T: Rows
    leaf_T: Rows

    @property
    def node_T(self) -> Rows:
        return len(self.rank_A) + np.arange(len(self.sender_T))

    @property
    def from_T(self) -> Rows:
        return self.rank_A[self.sender_T]

    @property
    def to_T(self) -> Rows:
        return self.rank_A[self.receiver_T]


Edges = list[tuple[Rows, Rows]]
"""(nodes, what each waits for) in pieces; a wait for -1 is none."""


def lower(orders: Sequence[RankColumns], transport: Transport) -> Graph:
    """The graph of some pipelines' orders under a transport.

    Raises ValueError where an action's input is computed nowhere.
    """
    parts = _parts(orders)
    crowded_T = np.zeros(len(parts.sender_T), dtype=np.bool_)
    node_T = parts.node_T
    local = (parts.source_l >= 0) & (parts.rank_A[parts.source_l] == parts.rank_A[parts.item_l])
    edges: Edges = [
        (np.arange(len(parts.rank_A)), parts.before_A),
        (parts.item_l[local], parts.source_l[local]),
        (node_T, parts.sender_T),
        (parts.receiver_T, node_T),
    ]
    if transport.receive == "turn":
        turn_edges, crowded_T = _turns(parts)
        edges += turn_edges
    else:
        by_rounds = transport.receive == "lowered" or transport.stream == "pair"
        round_A = _rounds(parts) if by_rounds else np.zeros(0, dtype=np.int64)
        edges += (
            _posts(parts, transport, round_A)
            + _holds(parts, transport)
            + _queues(parts, transport, round_A)
        )
    pipeline_N = np.concatenate([parts.pipeline_A, parts.pipeline_A[parts.receiver_T]])
    work_N, pairs_P = _work(parts, crowded_T)
    first_rank_P = _starts(parts.ranks_P)
    first_T, ranks_T = (
        of_P[parts.pipeline_A[parts.receiver_T]] for of_P in (first_rank_P, parts.ranks_P)
    )
    link_T = ranks_T + (parts.from_T - first_T) * ranks_T + parts.to_T - first_T
    return Graph(
        ranks_P=parts.ranks_P,
        stages_P=parts.stages_P,
        items_P=np.bincount(parts.pipeline_A, minlength=len(orders)),
        pairs_P=pairs_P,
        pipeline_N=pipeline_N,
        work_N=work_N,
        rank_N=np.concatenate([parts.rank_A - first_rank_P[parts.pipeline_A], link_T]),
        needs_DN=_packed(edges, len(work_N)),
    )


def _starts(sizes: Rows) -> Rows:
    return np.cumsum(sizes) - sizes


def _parts(orders: Sequence[RankColumns]) -> _Parts:
    columns = [rank for order in orders for rank in order]
    ranks_P = np.array([len(order) for order in orders])
    lengths = np.array([len(rank.stage_A) for rank in columns])
    stage_l, kind_l, microbatch_l = (
        np.concatenate(column)
        for column in zip(
            *((rank.stage_A, rank.kind_A, rank.microbatch_A) for rank in columns), strict=True
        )
    )
    first_l = ~np.concatenate(
        [
            np.zeros(len(rank.stage_A), dtype=np.bool_) if rank.joined_A is None else rank.joined_A
            for rank in columns
        ]
    )
    item_l = np.cumsum(first_l) - 1
    rank_l = np.repeat(np.arange(len(columns)), lengths)
    pipeline_l = np.repeat(np.arange(len(orders)), ranks_P)[rank_l]
    stages_P = 1 + np.maximum.reduceat(stage_l, np.searchsorted(pipeline_l, np.arange(len(orders))))
    source_l = _sources(
        item_l,
        stage_l + _starts(stages_P)[pipeline_l],
        kind_l,
        microbatch_l,
        ends=(stage_l == 0, stage_l == stages_P[pipeline_l] - 1),
    )
    rank_A, index = rank_l[first_l], np.arange(item_l[-1] + 1)
    first_A = np.diff(rank_A, prepend=-1) != 0
    leaf_T = np.flatnonzero((source_l >= 0) & (rank_A[source_l] != rank_l))
    return _Parts(
        ranks_P=ranks_P,
        stages_P=stages_P,
        pipeline_A=pipeline_l[first_l],
        rank_A=rank_A,
        before_A=np.where(first_A, -1, index - 1),
        after_A=np.where(np.append(first_A[1:], True), -1, index + 1),
        item_l=item_l,
        first_l=first_l,
        stage_l=stage_l,
        kind_l=kind_l,
        source_l=source_l,
        sender_T=source_l[leaf_T],
        receiver_T=item_l[leaf_T],
        leaf_T=leaf_T,
    )


def _sources(
    item_l: Rows, stage_l: Rows, kind_l: Rows, microbatch_l: Rows, ends: tuple[Mask, Mask]
) -> Rows:
    """Item whose output each action takes from another stage, -1 for none.

    stage_l: numbered through all pipelines.
    ends: whether the stage is its pipeline's first one, and last one.
    """
    first_l, last_l = ends
    shape = (2, int(stage_l.max()) + 3, int(microbatch_l.max()) + 1)
    where = np.full(shape, -1, dtype=np.int64)
    forward, backward = kind_l == FORWARD, (kind_l == INPUT_GRAD) | (kind_l == BACKWARD)
    where[0, stage_l[forward] + 1, microbatch_l[forward]] = item_l[forward]
    where[1, stage_l[backward] + 1, microbatch_l[backward]] = item_l[backward]
    needs_input = (forward & ~first_l) | (backward & ~last_l)
    found = np.where(forward, where[0, stage_l, microbatch_l], where[1, stage_l + 2, microbatch_l])
    if np.any(needs_input & (found < 0)):
        raise ValueError("an action waits for an input that no stage computes")
    return np.where(needs_input, found, -1)


def _work(parts: _Parts, crowded_T: Mask) -> tuple[Rows, tuple[tuple[tuple[int, int], ...], ...]]:
    stages_l = parts.stages_P[parts.pipeline_A][parts.item_l]
    hop_T = np.where(
        parts.kind_l[parts.leaf_T] == FORWARD,
        parts.stage_l[parts.leaf_T] - 1,
        parts.stage_l[parts.leaf_T],
    )
    work_A = np.empty(len(parts.rank_A), dtype=np.int64)
    work_A[parts.item_l] = parts.kind_l * stages_l + parts.stage_l
    pairs: list[dict[tuple[int, int], int]] = [{} for _ in parts.ranks_P]
    joined = np.flatnonzero(~parts.first_l)
    if len(joined):
        item, most = parts.item_l[joined], int(parts.stages_P.max())
        code = (parts.pipeline_A[item] * most + parts.stage_l[joined - 1]) * most + parts.stage_l[
            joined
        ]
        kinds, first, kind = np.unique(code, return_index=True, return_inverse=True)
        number = np.empty(len(kinds), dtype=np.int64)
        for place in np.argsort(first).tolist():
            rest, backward = divmod(int(kinds[place]), most)
            pipeline, forward = divmod(rest, most)
            number[place] = len(pairs[pipeline])
            pairs[pipeline][forward, backward] = len(pairs[pipeline])
        work_A[item] = 6 * stages_l[joined] + number[kind]
    work_T = np.where(crowded_T, CROWDED, SENDS) * stages_l[parts.leaf_T] + hop_T
    return np.concatenate([work_A, work_T]), tuple(tuple(found) for found in pairs)


def _rounds(parts: _Parts) -> Rows:
    """Round in which torch's lowering pass comes to each item."""
    stage_l = parts.stage_l + _starts(parts.stages_P)[parts.pipeline_A][parts.item_l]
    source_DA = np.full((1 if parts.first_l.all() else 2, len(parts.rank_A)), -1, dtype=np.int64)
    source_DA[0] = parts.source_l[parts.first_l]
    source_DA[1:, parts.item_l[~parts.first_l]] = parts.source_l[~parts.first_l]
    return rounds(
        parts.rank_A, parts.before_A, source_DA, entries_before(parts.rank_A, parts.item_l, stage_l)
    )


def _posts(parts: _Parts, transport: Transport, round_A: Rows) -> Edges:
    """Transfers wait until the receiver has come to where it posts the receive."""
    node_T, receiver_T = parts.node_T, parts.receiver_T
    if transport.receive == "needed":
        return [
            (node_T, parts.before_A[receiver_T]),
            *(_behind_sends(parts) if transport.waits == "all" else []),
        ]
    if transport.receive == "ahead":
        return [(node_T, _previous_of_direction(parts)[parts.leaf_T])]
    if transport.receive == "lowered":
        return [(node_T, _lowered_posts(parts, round_A))]
    return []


def _behind_sends(parts: _Parts) -> Edges:
    """A receive waits for the sends of the action before it.

    Sends to the neighbour that it comes from are no wait: they travel with it.
    """
    of_item = np.full(len(parts.rank_A) + 1, -1, dtype=np.int64)
    of_item[parts.sender_T] = np.arange(len(parts.sender_T))
    sent_T = of_item[parts.before_A[parts.receiver_T]]
    apart = (sent_T >= 0) & (parts.to_T[sent_T] != parts.from_T)
    return [(parts.node_T[apart], parts.node_T[sent_T[apart]])]


def _previous_of_direction(parts: _Parts) -> Rows:
    """For each leaf the item of the forward (or backward) before it on its rank, -1 for none."""
    direction_l = np.where(parts.kind_l == FORWARD, 0, np.where(parts.kind_l == WEIGHT_GRAD, 2, 1))
    code_l = parts.rank_A[parts.item_l] * 3 + direction_l
    sequence = np.argsort(code_l, kind="stable")
    same = code_l[sequence][1:] == code_l[sequence][:-1]
    previous = np.full(len(code_l), -1, dtype=np.int64)
    previous[sequence[1:]] = np.where(same, parts.item_l[sequence[:-1]], -1)
    return previous


def _holds(parts: _Parts, transport: Transport) -> Edges:
    """Actions wait for earlier sends of their rank."""
    if transport.waits == "none":
        return []
    next_T = parts.after_A[parts.sender_T]
    if transport.waits == "all":
        return [_waiting(next_T, parts.node_T)]
    from_of_item = np.full(len(parts.rank_A) + 1, -1, dtype=np.int64)
    from_of_item[parts.receiver_T] = parts.from_T
    fused = from_of_item[next_T] == parts.to_T
    return [
        _waiting(
            np.where(fused, next_T, np.where(next_T < 0, -1, parts.after_A[next_T])), parts.node_T
        )
    ]


def _waiting(items: Rows, nodes: Rows) -> tuple[Rows, Rows]:
    known = items >= 0
    return items[known], nodes[known]


def _turns(parts: _Parts) -> tuple[Edges, Mask]:
    """Exchanges between turns: all sends of a turn, and the receives that are posted with them.

    The next turn waits for every one of them. A forward and the backward right after it are one
    turn, except on ranks that finish all forwards first: these see the last of them sent before
    they post their first backward's receive.
    """
    forward_A = np.zeros(len(parts.rank_A), dtype=np.bool_)
    forward_A[parts.item_l] = parts.kind_l == FORWARD
    steady_A = _steady(parts, forward_A)[parts.rank_A]
    turns_back_A = (parts.before_A >= 0) & ~forward_A & forward_A[parts.before_A]
    first_A = ~(turns_back_A & steady_A)
    turn_A = np.cumsum(first_A) - 1
    start = np.flatnonzero(first_A)
    end_A = (np.append(start[1:], len(forward_A)) - 1)[turn_A]
    sent_T = end_A[parts.sender_T]
    after_T = _posted_after(parts, forward_A, start[turn_A[parts.receiver_T]])
    posted_T = np.where(after_T < 0, -1, end_A[after_T])
    late = np.flatnonzero((turns_back_A & ~steady_A)[parts.receiver_T])
    sent_of_A = np.full(len(forward_A), -1, dtype=np.int64)
    sent_of_A[parts.sender_T] = parts.node_T
    edges: Edges = [
        (parts.node_T, sent_T),
        (parts.node_T, posted_T),
        (parts.node_T[late], sent_of_A[parts.before_A[parts.receiver_T[late]]]),
        _waiting(np.where(posted_T < 0, -1, parts.after_A[posted_T]), parts.node_T),
        _waiting(parts.after_A[sent_T], parts.node_T),
    ]
    crowded_T = np.bincount(sent_T)[sent_T] > 1
    known = posted_T >= 0
    crowded_T[known] |= np.bincount(posted_T[known])[posted_T[known]] > 1
    return edges, crowded_T


def _steady(parts: _Parts, forward_A: Mask) -> Mask:
    """Whether each rank runs a forward and a backward in turn, (R,).

    A rank whose backwards come last may have one such turn, of its last forward: where the next
    rank, which warms up for two forwards less, has two forwards left.
    """
    ranks = int(parts.ranks_P.sum())
    backwards_A = np.cumsum(~forward_A)
    starts = np.flatnonzero(parts.before_A < 0)
    before_R: Rows = backwards_A[starts] - ~forward_A[starts]
    late_A = forward_A & (backwards_A > before_R[parts.rank_A])
    late_R = np.bincount(parts.rank_A[late_A], minlength=ranks)
    last_R = np.isin(np.arange(ranks), np.cumsum(parts.ranks_P) - 1)
    next_R = np.where(last_R, 0, np.append(late_R[1:], 0))
    return np.asarray((late_R > 0) | (next_R == 2))


def _posted_after(parts: _Parts, forward_A: Mask, start_T: Rows) -> Rows:
    """Item of the receiver in the turn after which it posts each receive.

    start_T: first item of the turn that takes what is received; the turn before it posts. But what
    comes round the ring (to the first rank in a forward, to the last in a backward) is received
    p - 1 chunks after the sender's own count, and is kept until its turn: rounds of more than p
    microbatches take it later (`recv_tensor_from_previous_stage` in Megatron-LM's schedules.py).
    """
    last_R = np.cumsum(parts.ranks_P) - 1
    first_T, last_T = (
        of_P[parts.pipeline_A[parts.receiver_T]] for of_P in (_starts(parts.ranks_P), last_R)
    )
    gives_T = forward_A[parts.sender_T]
    round_T = np.where(
        gives_T,
        (parts.from_T == last_T) & (parts.to_T == first_T),
        (parts.from_T == first_T) & (parts.to_T == last_T),
    )
    chunk_A = np.zeros(len(forward_A), dtype=np.int64)
    item_of = []
    for way_A in (forward_A, ~forward_A):
        items = np.flatnonzero(way_A)
        counts = np.bincount(parts.rank_A[items], minlength=int(parts.ranks_P.sum()))
        chunk_A[items] = np.arange(len(items)) - _starts(counts)[parts.rank_A[items]]
        place_T = _starts(counts)[parts.to_T] + chunk_A[parts.sender_T] + last_T - first_T
        item_of.append(items[np.minimum(place_T, len(items) - 1)])
    return np.where(round_T, np.where(gives_T, *item_of), parts.before_A[start_T])


def _queues(parts: _Parts, transport: Transport, round_A: Rows) -> Edges:
    """Each transfer waits for the one before it on its stream.

    On a link the sender's order counts, on a pair's stream the lowering order.
    """
    from_T, to_T = parts.from_T, parts.to_T
    ranks = int(parts.ranks_P.sum())
    if transport.stream == "link":
        return [
            _one_by_one(
                from_T * ranks + to_T, parts.node_T, np.lexsort((parts.leaf_T, parts.sender_T))
            )
        ]
    sequence = np.lexsort((parts.leaf_T, from_T, round_A[parts.sender_T]))
    return [
        _one_by_one(
            np.minimum(from_T, to_T) * ranks + np.maximum(from_T, to_T), parts.node_T, sequence
        )
    ]


def _one_by_one(stream: Rows, node: Rows, sequence: Rows) -> tuple[Rows, Rows]:
    """Edges from each node to the one before it in `sequence` that runs on the same stream."""
    ordered = sequence[np.argsort(stream[sequence], kind="stable")]
    same = stream[ordered][1:] == stream[ordered][:-1]
    return node[ordered[1:][same]], node[ordered[:-1][same]]


def _lowered_posts(parts: _Parts, round_A: Rows) -> Rows:
    """Item of the receiver after which torch's lowering puts each receive, -1 for none.

    `_add_send_recv` goes round the ranks and gives each at most one action whose input has arrived.
    It appends the send to the sender's list and the receive to the receiver's at once: behind what
    the receiver was given in earlier rounds, and in this one if its number is lower.
    """
    lengths = np.bincount(parts.rank_A)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    span = int(round_A.max()) + 2
    done = round_A[parts.sender_T] - (parts.to_T > parts.from_T)
    end = np.searchsorted(parts.rank_A * span + round_A, parts.to_T * span + done, side="right")
    return np.where(end > starts[parts.to_T], end - 1, -1)


def _packed(edges: Edges, num_nodes: int) -> Rows:
    """Edges as (D, N), with -1 where a node has fewer than D."""
    node_G = np.concatenate([nodes for nodes, _ in edges])
    need_G = np.concatenate([needs for _, needs in edges])
    known = need_G >= 0
    code = np.sort(node_G[known] * num_nodes + need_G[known], kind="stable")  # of sorted runs
    code = code[np.diff(code, prepend=-1) > 0]
    node = code // num_nodes
    count_N = np.bincount(node, minlength=num_nodes)
    place = np.arange(len(node)) - np.repeat(_starts(count_N), count_N)
    packed = np.full((max(1, int(count_N.max(initial=0))), num_nodes), -1, dtype=np.int64)
    packed[place, node] = code - node * num_nodes
    return packed
