"""A compute order and a transport, lowered to one graph of what each action and transfer waits for.

Letters: A items of the order, T transfers, N = A + T nodes, G edges, D most edges into one node, S
stages, R ranks. A transfer carries an activation to the next stage or a gradient to the one before.
Nodes are numbered items first, rank after rank, then transfers in the order of their receivers.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schedules.base import Item, Order, OverlappedPair, leaves
from planner.trainers.transports import Transport

Rows = NDArray[np.int64]

KINDS = {"F": 0, "I": 1, "W": 2, "B": 3}
SENDS, CROWDED = 4, 5
"""Rows of work after those of F, I, W and B, S rows to a kind.

SENDS: a transfer from stage s to s + 1 or back.
CROWDED: a transfer whose rank sends another with it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes and what they wait for.

    pairs: (stage of the forward, stage of the backward) of each kind of overlapped pair.
    work_N: kind * S + stage, or 6 S + k for the k-th of `pairs`.
    needs_DN: nodes that must have ended before, -1 for none.
    rank_N: rank of an item, R + sender x R + receiver of a transfer.
    """

    items: tuple[Item, ...]
    num_ranks: int
    num_stages: int
    pairs: tuple[tuple[int, int], ...]
    work_N: Rows
    rank_N: Rows
    needs_DN: Rows


@dataclass(frozen=True, slots=True)
class _Parts:
    """Columns of the items (A), of their single actions (leaves) and of the transfers (T).

    Leaf arrays end in _l.
    """

    rank_A: Rows
    before_A: Rows
    after_A: Rows
    item_l: Rows
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
        """Rank that sends."""
        return self.rank_A[self.sender_T]

    @property
    def to_T(self) -> Rows:
        """Rank that receives."""
        return self.rank_A[self.receiver_T]


Edges = list[tuple[Rows, Rows]]
"""(nodes, what each waits for) in pieces; a wait for -1 is none."""


def lower(order: Order, transport: Transport) -> Graph:
    """The graph of an order under a transport.

    Raises ValueError where an action's input is computed nowhere.
    """
    items = tuple(item for rank in order for item in rank)
    parts, num_stages = _parts(items, [len(rank) for rank in order])
    crowded_T = np.zeros(len(parts.sender_T), dtype=np.bool_)
    node_T = parts.node_T
    local = (parts.source_l >= 0) & (parts.rank_A[parts.source_l] == parts.rank_A[parts.item_l])
    edges: Edges = [
        (np.arange(len(items)), parts.before_A),
        (parts.item_l[local], parts.source_l[local]),
        (node_T, parts.sender_T),
        (parts.receiver_T, node_T),
    ]
    if transport.receive == "turn":
        turn_edges, crowded_T = _turns(parts)
        edges += turn_edges
    else:
        by_rounds = transport.receive == "lowered" or transport.stream == "pair"
        sweep_A = _sweeps(parts, order) if by_rounds else np.zeros(0, dtype=np.int64)
        edges += (
            _posts(parts, transport, sweep_A)
            + _holds(parts, transport)
            + _queues(parts, transport, sweep_A)
        )
    work_N, pairs = _work(items, parts, num_stages, crowded_T)
    ranks = len(order)
    return Graph(
        items=items,
        num_ranks=ranks,
        num_stages=num_stages,
        pairs=pairs,
        work_N=work_N,
        rank_N=np.concatenate([parts.rank_A, ranks + parts.from_T * ranks + parts.to_T]),
        needs_DN=_packed(edges, len(work_N)),
    )


def _parts(items: tuple[Item, ...], lengths: list[int]) -> tuple[_Parts, int]:
    rank_A = np.repeat(np.arange(len(lengths)), lengths)
    index = np.arange(len(items))
    first_A = np.concatenate([[True], rank_A[1:] != rank_A[:-1]])
    width_A = np.array([len(item) for item in items]) == len(OverlappedPair._fields)
    item_l = np.repeat(index, 1 + width_A) if width_A.any() else index
    stages, kinds, microbatches = zip(*(leaves(items) if width_A.any() else items), strict=True)
    stage_l, microbatch_l = np.array(stages, dtype=np.int64), np.array(microbatches, dtype=np.int64)
    kind_l = np.array([KINDS[kind] for kind in kinds], dtype=np.int64)
    num_stages = int(stage_l.max()) + 1
    source_l = _sources(item_l, stage_l, kind_l, microbatch_l, num_stages)
    leaf_T = np.flatnonzero((source_l >= 0) & (rank_A[source_l] != rank_A[item_l]))
    parts = _Parts(
        rank_A=rank_A,
        before_A=np.where(first_A, -1, index - 1),
        after_A=np.where(np.append(first_A[1:], True), -1, index + 1),
        item_l=item_l,
        stage_l=stage_l,
        kind_l=kind_l,
        source_l=source_l,
        sender_T=source_l[leaf_T],
        receiver_T=item_l[leaf_T],
        leaf_T=leaf_T,
    )
    return parts, num_stages


def _sources(
    item_l: Rows, stage_l: Rows, kind_l: Rows, microbatch_l: Rows, num_stages: int
) -> Rows:
    """Item whose output each action takes from another stage, -1 for none."""
    where = np.full((2, num_stages + 2, int(microbatch_l.max()) + 1), -1, dtype=np.int64)
    forward, backward = kind_l == KINDS["F"], (kind_l == KINDS["I"]) | (kind_l == KINDS["B"])
    where[0, stage_l[forward] + 1, microbatch_l[forward]] = item_l[forward]
    where[1, stage_l[backward] + 1, microbatch_l[backward]] = item_l[backward]
    needs_input = (forward & (stage_l > 0)) | (backward & (stage_l < num_stages - 1))
    found = np.where(forward, where[0, stage_l, microbatch_l], where[1, stage_l + 2, microbatch_l])
    if np.any(needs_input & (found < 0)):
        raise ValueError("an action waits for an input that no stage computes")
    return np.where(needs_input, found, -1)


def _work(
    items: tuple[Item, ...], parts: _Parts, num_stages: int, crowded_T: NDArray[np.bool_]
) -> tuple[Rows, tuple[tuple[int, int], ...]]:
    hop_T = np.where(
        parts.kind_l[parts.leaf_T] == KINDS["F"],
        parts.stage_l[parts.leaf_T] - 1,
        parts.stage_l[parts.leaf_T],
    )
    work_A = np.empty(len(items), dtype=np.int64)
    work_A[parts.item_l] = parts.kind_l * num_stages + parts.stage_l
    pairs: dict[tuple[int, int], int] = {}
    if len(parts.item_l) > len(items):
        for index, item in enumerate(items):
            if isinstance(item, OverlappedPair):
                key = (item.forward.stage, item.backward.stage)
                work_A[index] = 6 * num_stages + pairs.setdefault(key, len(pairs))
    work_T = np.where(crowded_T, CROWDED, SENDS) * num_stages + hop_T
    return np.concatenate([work_A, work_T]), tuple(pairs)


def _posts(parts: _Parts, transport: Transport, sweep_A: Rows) -> Edges:
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
        return [(node_T, _lowered_posts(parts, sweep_A))]
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
    direction_l = np.where(
        parts.kind_l == KINDS["F"], 0, np.where(parts.kind_l == KINDS["W"], 2, 1)
    )
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


def _turns(parts: _Parts) -> tuple[Edges, NDArray[np.bool_]]:
    """Exchanges between turns: all sends of a turn and all receives of the next.

    The next turn waits for every one of them. A forward and the backward right after it are one
    turn, except on ranks that finish all forwards first.
    """
    forward_A = np.zeros(len(parts.rank_A), dtype=np.bool_)
    forward_A[parts.item_l] = parts.kind_l == KINDS["F"]
    starts = np.flatnonzero(parts.before_A < 0)
    changes = np.add.reduceat(
        (forward_A & ~np.append(True, forward_A[:-1])).astype(np.int64), starts
    )
    alternates_A = (changes > 0)[parts.rank_A]
    before = parts.before_A
    joins_A = (before >= 0) & ~forward_A & forward_A[before] & alternates_A
    first_A = ~joins_A
    turn_A = np.cumsum(first_A) - 1
    start = np.flatnonzero(first_A)
    end = np.append(start[1:], len(forward_A)) - 1
    sent_T, received_T = turn_A[parts.sender_T], turn_A[parts.receiver_T]
    next_T = parts.after_A[end[sent_T]]
    edges: Edges = [
        (parts.node_T, end[sent_T]),
        (parts.node_T, before[start[received_T]]),
        (start[received_T], parts.node_T),
        _waiting(next_T, parts.node_T),
    ]
    crowded = (np.bincount(sent_T, minlength=len(start))[sent_T] > 1) | (
        np.bincount(received_T, minlength=len(start))[received_T] > 1
    )
    return edges, crowded


def _queues(parts: _Parts, transport: Transport, sweep_A: Rows) -> Edges:
    """Each transfer waits for the one before it on its stream.

    On a link the sender's order counts, on a pair's stream the lowering order.
    """
    from_T, to_T = parts.from_T, parts.to_T
    ranks = int(parts.rank_A.max()) + 1
    if transport.stream == "link":
        return [
            _one_by_one(
                from_T * ranks + to_T, parts.node_T, np.lexsort((parts.leaf_T, parts.sender_T))
            )
        ]
    sequence = np.lexsort((parts.leaf_T, from_T, sweep_A[parts.sender_T]))
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


def _lowered_posts(parts: _Parts, sweep_A: Rows) -> Rows:
    """Item of the receiver after which torch's lowering puts each receive, -1 for none.

    `_add_send_recv` goes round the ranks and gives each at most one action whose input has arrived.
    It appends the send to the sender's list and the receive to the receiver's at once: behind what
    the receiver was given in earlier rounds, and in this one if its number is lower.
    """
    lengths = np.bincount(parts.rank_A)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    span = int(sweep_A.max()) + 2
    done = sweep_A[parts.sender_T] - (parts.to_T > parts.from_T)
    end = np.searchsorted(parts.rank_A * span + sweep_A, parts.to_T * span + done, side="right")
    return np.where(end > starts[parts.to_T], end - 1, -1)


def _sweeps(parts: _Parts, order: Order) -> Rows:
    """Round in which torch's lowering pass comes to each item.

    An item comes after its rank's previous one and its inputs; lower ranks come first in a round.
    """
    inputs: list[tuple[int, ...]] = [()] * len(parts.rank_A)
    known = parts.source_l >= 0
    for receiver, source in zip(
        parts.item_l[known].tolist(), parts.source_l[known].tolist(), strict=True
    ):
        inputs[receiver] += (source,)
    rank_of, extra = parts.rank_A.tolist(), _slots(parts).tolist()
    sweep = [-1] * len(inputs)
    ends = np.cumsum([len(rank) for rank in order]).tolist()
    position = [end - len(rank) for end, rank in zip(ends, order, strict=True)]
    current = [-1] * len(order)
    left = len(inputs)
    while left:
        before = left
        for rank, end in enumerate(ends):
            here, now = position[rank], current[rank]
            while here < end:
                soonest = now + 1 + extra[here]
                for source in inputs[here]:
                    if sweep[source] < 0:
                        break
                    soonest = max(soonest, sweep[source] + (rank_of[source] > rank))
                else:
                    sweep[here] = now = soonest
                    here += 1
                    continue
                break
            left -= here - position[rank]
            position[rank], current[rank] = here, now
        if left == before:
            raise ValueError("the order deadlocks: ranks wait for each other in a circle")
    return np.array(sweep, dtype=np.int64)


ACTIVE_STAGES = 3
"""Stages that `_add_unshard_reshard` keeps gathered."""


def _slots(parts: _Parts) -> Rows:
    """Entries that torch puts before each item.

    They gather and release stages (`_add_unshard_reshard` keeps the next ACTIVE_STAGES distinct
    stages of a rank gathered) and reduce a stage's gradients after its last action
    (`_add_reduce_grad`).
    """
    slots = np.zeros(len(parts.rank_A), dtype=np.int64)
    starts = np.append(np.flatnonzero(parts.before_A < 0), len(slots))
    for start, end in itertools.pairwise(starts.tolist()):
        first, last = np.searchsorted(parts.item_l, (start, end))
        place, (stages, local) = (
            parts.item_l[first:last] - start,
            np.unique(parts.stage_l[first:last], return_inverse=True),
        )
        coming = np.full((len(stages), end - start), end)
        coming[local, place] = place
        coming = np.minimum.accumulate(coming[:, ::-1], axis=1)[:, ::-1]
        soon = (
            np.partition(coming, ACTIVE_STAGES - 1, axis=0)[ACTIVE_STAGES - 1]
            if len(stages) > ACTIVE_STAGES
            else end
        )
        wanted = (coming <= soon) & (coming < end)
        slots[start:end] = (wanted ^ np.pad(wanted[:, :-1], ((0, 0), (1, 0)))).sum(axis=0)
        done = np.zeros(end - start + 1, dtype=np.int64)
        np.add.at(done, (coming < end).sum(axis=1), 1)
        slots[start:end] += done[:-1]
    return slots


def _packed(edges: Edges, num_nodes: int) -> Rows:
    """Edges as (D, N), with -1 where a node has fewer than D."""
    node_G = np.concatenate([nodes for nodes, _ in edges])
    need_G = np.concatenate([needs for _, needs in edges])
    known = need_G >= 0
    code = np.sort(node_G[known] * num_nodes + need_G[known])
    code = code[np.diff(code, prepend=-1) > 0]
    node, need = code // num_nodes, code % num_nodes
    place = np.arange(len(node)) - np.searchsorted(node, node)
    packed = np.full((max(1, int(place.max(initial=0)) + 1), num_nodes), -1, dtype=np.int64)
    packed[place, node] = need
    return packed
