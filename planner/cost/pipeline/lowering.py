"""A compute order and a transport, lowered to a graph of what each action and transfer waits for.

Letters: A items of the order, T transfers, N = A + T nodes, G edges, D most edges into one node, S
stages, R ranks. A transfer carries an activation to the next stage or a gradient to the one before.
Nodes are numbered items first, rank after rank, then transfers in the order of their receivers.
"""

from dataclasses import dataclass

import numpy as np

from planner.cost.pipeline.order_parts import Mask, OrderParts, RankColumns, Rows, starts
from planner.cost.pipeline.torch_rounds import entries_before, rounds
from planner.schedules.actions import FORWARD, WEIGHT_GRAD
from planner.trainers.transports import Transport

SENDS, CROWDED = 4, 5
"""Rows of work after those of F, I, W and B, S rows to a kind.

SENDS: a transfer from stage s to s + 1 or back.
CROWDED: a transfer whose rank sends another with it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes and what they wait for.

    pairs: (stage of the forward, stage of the backward) of each kind of overlapped pair.
    work_N: kind * S + stage, or 6 S + k for the k-th of the pairs.
    needs_DN: nodes that must have ended before, -1 for none.
    rank_N: rank of an item, R + sender x R + receiver of a transfer.
    """

    num_ranks: int
    num_stages: int
    num_items: int
    pairs: tuple[tuple[int, int], ...]
    work_N: Rows
    rank_N: Rows
    needs_DN: Rows


Edges = list[tuple[Rows, Rows]]
"""(nodes, what each waits for) in pieces; a wait for -1 is none."""


def lower(order: RankColumns, transport: Transport) -> Graph:
    """The graph of a pipeline's order under a transport.

    Raises ValueError where an action's input is computed nowhere.
    """
    parts, ranks = OrderParts.of(order), len(order)
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
    work_N, pairs = _work(parts, crowded_T)
    return Graph(
        num_ranks=ranks,
        num_stages=parts.num_stages,
        num_items=len(parts.rank_A),
        pairs=pairs,
        work_N=work_N,
        rank_N=np.concatenate([parts.rank_A, ranks + parts.from_T * ranks + parts.to_T]),
        needs_DN=_packed(edges, len(work_N)),
    )


def _work(parts: OrderParts, crowded_T: Mask) -> tuple[Rows, tuple[tuple[int, int], ...]]:
    """(row of work of each node, the kinds of pairs in the order in which they come)."""
    stages, stage_l = parts.num_stages, parts.stage_l
    hop_T = stage_l[parts.leaf_T] - (parts.kind_l[parts.leaf_T] == FORWARD)
    work_A = np.empty(len(parts.rank_A), dtype=np.int64)
    work_A[parts.item_l] = parts.kind_l * stages + stage_l
    joined = np.flatnonzero(~parts.first_l)
    code = stage_l[joined - 1] * stages + stage_l[joined]
    kinds, first, kind = np.unique(code, return_index=True, return_inverse=True)
    order = np.argsort(first)
    work_A[parts.item_l[joined]] = 6 * stages + np.argsort(order)[kind]
    work_T = np.where(crowded_T, CROWDED, SENDS) * stages + hop_T
    pairs = tuple(divmod(one, stages) for one in kinds[order].tolist())
    return np.concatenate([work_A, work_T]), pairs


def _rounds(parts: OrderParts) -> Rows:
    """Round in which torch's lowering pass comes to each item."""
    source_DA = np.full((1 if parts.first_l.all() else 2, len(parts.rank_A)), -1, dtype=np.int64)
    source_DA[0] = parts.source_l[parts.first_l]
    source_DA[1:, parts.item_l[~parts.first_l]] = parts.source_l[~parts.first_l]
    return rounds(
        parts.rank_A,
        parts.before_A,
        source_DA,
        entries_before(parts.rank_A, parts.item_l, parts.stage_l),
    )


def _posts(parts: OrderParts, transport: Transport, round_A: Rows) -> Edges:
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


def _behind_sends(parts: OrderParts) -> Edges:
    """A receive waits for the sends of the action before it.

    Sends to the neighbour that it comes from are no wait: they travel with it.
    """
    of_item = np.full(len(parts.rank_A) + 1, -1, dtype=np.int64)
    of_item[parts.sender_T] = np.arange(len(parts.sender_T))
    sent_T = of_item[parts.before_A[parts.receiver_T]]
    apart = (sent_T >= 0) & (parts.to_T[sent_T] != parts.from_T)
    return [(parts.node_T[apart], parts.node_T[sent_T[apart]])]


def _previous_of_direction(parts: OrderParts) -> Rows:
    """For each leaf the item of the forward (or backward) before it on its rank, -1 for none."""
    direction_l = np.where(parts.kind_l == FORWARD, 0, np.where(parts.kind_l == WEIGHT_GRAD, 2, 1))
    code_l = parts.rank_A[parts.item_l] * 3 + direction_l
    sequence = np.argsort(code_l, kind="stable")
    same = code_l[sequence][1:] == code_l[sequence][:-1]
    previous = np.full(len(code_l), -1, dtype=np.int64)
    previous[sequence[1:]] = np.where(same, parts.item_l[sequence[:-1]], -1)
    return previous


def _holds(parts: OrderParts, transport: Transport) -> Edges:
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


def _turns(parts: OrderParts) -> tuple[Edges, Mask]:
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


def _steady(parts: OrderParts, forward_A: Mask) -> Mask:
    """Whether each rank runs a forward and a backward in turn, (R,).

    A rank whose backwards come last may have one such turn, of its last forward: where the next
    rank, which warms up for two forwards less, has two forwards left.
    """
    backwards_A = np.cumsum(~forward_A)
    starts = np.flatnonzero(parts.before_A < 0)
    before_R: Rows = backwards_A[starts] - ~forward_A[starts]
    late_A = forward_A & (backwards_A > before_R[parts.rank_A])
    late_R = np.bincount(parts.rank_A[late_A], minlength=parts.num_ranks)
    next_R = np.append(late_R[1:], 0)
    return np.asarray((late_R > 0) | (next_R == 2))


def _posted_after(parts: OrderParts, forward_A: Mask, start_T: Rows) -> Rows:
    """Item of the receiver in the turn after which it posts each receive.

    start_T: first item of the turn that takes what is received; the turn before it posts. But what
    comes round the ring (to the first rank in a forward, to the last in a backward) is received
    p - 1 chunks after the sender's own count, and is kept until its turn: rounds of more than p
    microbatches take it later (`recv_tensor_from_previous_stage` in Megatron-LM's schedules.py).
    """
    last = parts.num_ranks - 1
    gives_T = forward_A[parts.sender_T]
    round_T = np.where(
        gives_T,
        (parts.from_T == last) & (parts.to_T == 0),
        (parts.from_T == 0) & (parts.to_T == last),
    )
    chunk_A = np.zeros(len(forward_A), dtype=np.int64)
    item_of = []
    for way_A in (forward_A, ~forward_A):
        items = np.flatnonzero(way_A)
        counts = np.bincount(parts.rank_A[items], minlength=parts.num_ranks)
        chunk_A[items] = np.arange(len(items)) - starts(counts)[parts.rank_A[items]]
        place_T = starts(counts)[parts.to_T] + chunk_A[parts.sender_T] + last
        item_of.append(items[np.minimum(place_T, len(items) - 1)])
    return np.where(round_T, np.where(gives_T, *item_of), parts.before_A[start_T])


def _queues(parts: OrderParts, transport: Transport, round_A: Rows) -> Edges:
    """Each transfer waits for the one before it on its stream.

    On a link the sender's order counts, on a pair's stream the lowering order.
    """
    from_T, to_T, ranks = parts.from_T, parts.to_T, parts.num_ranks
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


def _lowered_posts(parts: OrderParts, round_A: Rows) -> Rows:
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
    place = np.arange(len(node)) - np.repeat(starts(count_N), count_N)
    packed = np.full((max(1, int(count_N.max(initial=0))), num_nodes), -1, dtype=np.int64)
    packed[place, node] = code - node * num_nodes
    return packed
