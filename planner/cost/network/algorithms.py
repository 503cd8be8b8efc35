"""Collective algorithms, one table row each.

Each gives seconds as a line over the message size, the number of steps, and bytes on the wire.
Letters: U groups as columns, L fabric levels, D dimensions of a grid. n: ranks of the group. a:
latency of a step. B: bandwidth of one GPU, one way. P: payload, the whole buffer that is gathered,
reduced, scattered or broadcast; for all-to-all what one rank sends. A reduce sends the messages of
a broadcast the other way, so it takes the same time.
On a fabric of several levels, B of a boundary is members inside x bandwidth per GPU, because each
member leaves through its own NIC.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from planner.columns import FloatColumn
from planner.cost.network.level_rates import (
    exchange_seconds_per_byte,
    farthest,
    lanes_out,
    pair_rate,
    tree_depth,
)
from planner.cost.network.rings_and_trees import (
    GATHERS,
    ROOTED,
    TRIPS,
    Line,
    binomial_tree,
    double_binary_tree,
    hierarchical,
    ring,
)
from planner.cost.network.topology import Fabric, Links, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row of the table.

    cost: the line of an operation.
    automatic: operations for which the library may choose it by itself.
    protocols: which of the library's protocols carry it.
    possible: fabrics on which it can run at all.
    needs: the same in words.
    """

    name: str
    operations: tuple[str, ...]
    cost: Callable[[str, Placement, Links], Line]
    automatic: tuple[str, ...]
    summary: str
    protocols: str = "collectives"
    possible: Callable[[Fabric], bool] = lambda fabric: True
    needs: str = "groups of at least two ranks"


def grid(operation: str, place: Placement, links: Links) -> Line:
    """`hierarchical` where a level that the group crosses is a grid.

    It runs rings or lines along each dimension of a torus or mesh.
    """
    if operation == "all-to-all":
        return grid_exchange(operation, place, links)
    line = hierarchical(operation, place, links)
    grids = np.array([shape is not None for shape in place.fabric.shapes])
    applies = line.applies & (place.crossed & grids[:, None]).any(axis=0)
    return replace(line, applies=applies)


def grid_exchange(operation: str, place: Placement, links: Links) -> Line:
    """All-to-all along one dimension of a torus or mesh after the other.

    The buffer is cut into k parts for k dimensions in use, which start in different dimensions, so
    that all links are busy in each of k phases. A flat level of the fabric exchanges directly.
    t = sum over levels of k r a + P max over dimensions of floor(e^2 / 4) / (e R)
    r: links from one member to the farthest along a dimension, e - 1 on a line, e / 2 on a ring.
    R: rate of the dimension, both directions of a ring (`level_rates.exchange_seconds_per_byte`).
    Source: Bokhari and Berryman 1992 (complete exchange on meshes); Thakur et al. 2005.
    """
    steps, latency, per_byte, wire = (np.zeros_like(place.degree) for _ in range(4))
    for level in range(len(links.bandwidth)):
        lanes, extent, crossed = place.lanes[level], place.extent[level], place.crossed[level]
        used = lanes.extent > 1
        phases = np.maximum(used.sum(axis=0), 1.0) if lanes.grid else np.ones_like(extent)
        one_way = np.where(lanes.wrapped, np.floor(lanes.extent / 2.0), lanes.extent - 1.0)
        reach = np.where(used, one_way, 0.0).max(axis=0) if lanes.grid else np.ones_like(extent)
        far = np.where(used, one_way * lanes.spacing, 0.0).max(axis=0) if lanes.grid else reach
        share = (extent - 1.0) / extent
        slope = exchange_seconds_per_byte(place, level, links, share)
        kept = ((lanes.extent - 1.0) / lanes.extent).sum(axis=0) if lanes.grid else share
        steps = steps + np.where(crossed, phases * reach, 0.0)
        latency = latency + np.where(crossed, phases * far * links.latency[level], 0.0)
        per_byte = per_byte + np.where(crossed, slope, 0.0)
        wire = wire + np.where(crossed, kept, 0.0)
    grids = np.array([shape is not None for shape in place.fabric.shapes])
    return Line(
        steps=steps,
        latency_seconds=links.base_seconds + latency,
        seconds_per_byte=per_byte + links.copy_seconds_per_byte / place.degree,
        wire_share=wire,
        applies=(place.degree > 1) & (place.crossed & grids[:, None]).any(axis=0),
    )


def direct(operation: str, place: Placement, links: Links) -> Line:
    """Every member sends to every other at once, through a switch or over a full mesh.

    t = trips (a r + max over levels of (n - m) / n x P / B)
    m: members inside the level below, whose share stays there.
    r: rounds of `Links.peers` peers (one for the closed form).
    Grids and trees: see `exchange_seconds_per_byte`.
    Broadcast: the root sends each other member its own part P / (n - 1), which that one passes on
    to the rest as it arrives, t = 2 a r + P / B (a r + P / B for two): bus bandwidth is P / t, as
    in nccl-tests doc/PERFORMANCE.md. A reduce runs the other way round.
    NCCL itself runs a ring (src/graph/tuning.cc).
    Source: Thakur et al. 2005 (all-to-all; broadcast by scatter and all-gather); a switch is
    non-blocking.
    """
    n, trips = place.degree, TRIPS.get(operation, 1.0)
    broadcasts = operation in ROOTED
    rounds = np.ceil((n - 1.0) / links.peers) if np.isfinite(links.peers) else np.ones_like(n)
    rounds = rounds * np.where(broadcasts & (n > 2), 2.0, 1.0)
    latency, per_byte = np.zeros_like(n), np.zeros_like(n)
    for level in range(len(links.bandwidth)):
        crossed = place.crossed[level]
        far = links.latency[level] * farthest(place.lanes[level])
        latency = np.maximum(latency, np.where(crossed, far, 0.0))
        share = np.maximum(n - place.fewest[level], 1.0) / n
        slope = exchange_seconds_per_byte(place, level, links, share)
        per_byte = np.maximum(per_byte, np.where(crossed, slope, 0.0))
    parts = n / np.maximum(n - 1.0, 1.0) if broadcasts else np.ones_like(n)
    return Line(
        steps=trips * rounds,
        latency_seconds=links.base_seconds + trips * rounds * latency,
        seconds_per_byte=trips * per_byte * parts
        + (0.0 if broadcasts else links.copy_seconds_per_byte / n),
        wire_share=trips * (n - 1.0) / n * parts,
        applies=n > 1,
    )


def pairwise(operation: str, place: Placement, links: Links) -> Line:
    """All-to-all in n - 1 rounds with one partner each.

    t = (n - 1) a + (n - 1) / n P / B
    Source: Thakur et al. 2005.
    """
    line = direct(operation, place, links)
    hops = [np.where(place.crossed[level], a, 0.0) for level, a in enumerate(links.latency)]
    hop = np.max(hops, axis=0)
    steps = place.degree - 1.0
    return replace(line, steps=steps, latency_seconds=links.base_seconds + steps * hop)


def in_switch(operation: str, place: Placement, links: Links) -> Line:
    """Reduction in a switch that reduces (NVLink SHARP); the group lies inside it.

    Each rank's bytes leave once, and 1 / n of the result returns to be multicast.
    t = 2 a + n f + P (1 + 1 / n) / B
    f: a rank waits for a flag of every other. B falls with n (`Library.in_switch_decline`).
    Source: NCCL src/device/all_reduce.h (NVLS: load-reduce 1 / n, store multicast); share fitted to
    micro.csv.
    """
    n = place.degree
    inside = (place.units[1] == 1) & place.fabric.switched_reduction & (n > 2)
    return Line(
        steps=np.full_like(n, 2.0),
        latency_seconds=_in_switch_latency(n, place, links),
        seconds_per_byte=_in_switch_seconds_per_byte(n, place, links),
        wire_share=1.0 + 1.0 / n,
        applies=inside,
    )


def _in_switch_latency(members: FloatColumn, place: Placement, links: Links) -> FloatColumn:
    flags = members * place.fabric.library.in_switch_flag_seconds
    return np.asarray(links.base_seconds + 2.0 * links.latency[0] + flags)


def _in_switch_seconds_per_byte(
    members: FloatColumn, place: Placement, links: Links
) -> FloatColumn:
    slower = (np.maximum(members, 8.0) / 8.0) ** place.fabric.library.in_switch_decline
    return np.asarray((1.0 + 1.0 / members) * slower / links.bandwidth[0])


def in_switch_tree(operation: str, place: Placement, links: Links) -> Line:
    """In-switch reduction inside a node and double binary trees between nodes, pipelined.

    t = 2 a1 + m f + 2 ceil(log2 N) a2 + max((1 + 1 / m) P / B1, 2 P / (m B2)), the slower of both.
    Between two nodes P / (m B2).
    m: members in each of N nodes.
    Source: NCCL 2.18 release notes (NVLSTree); src/graph/tuning.cc.
    """
    members, nodes = place.fewest[1], place.units[1]
    outer = np.zeros_like(members)
    latency = _in_switch_latency(members, place, links)
    steps = np.full_like(members, 2.0)
    for level in range(1, len(links.bandwidth)):
        passes = np.where(place.extent[level] > 2, 2.0, 1.0)
        rate = lanes_out(place, level) * links.bandwidth[level]
        outer = np.maximum(outer, np.where(place.crossed[level], passes / rate, 0.0))
        latency = latency + 2.0 * tree_depth(place, level) * links.latency[level]
        steps = steps + 2.0 * tree_depth(place, level)
    few = nodes <= place.fabric.library.in_switch_tree_nodes
    applies = place.even & (nodes > 1) & few & (members > 2) & place.fabric.switched_reduction
    return Line(
        steps=steps,
        latency_seconds=latency,
        seconds_per_byte=np.maximum(_in_switch_seconds_per_byte(members, place, links), outer),
        wire_share=1.0 + 1.0 / members,
        applies=applies,
    )


def neighbour(operation: str, place: Placement, links: Links) -> Line:
    """Point-to-point, or rotation of blocks to the next rank (ring attention).

    p2p: t = P / B + a.
    rotate: n - 1 lockstep sends of P / n, t = (n - 1) (P / (n B) + a).
    rotate-gradients: gradients travel along, twice that.
    B: of one GPU on the widest level that a pair of neighbours crosses (one link of a grid). The
        slowest pair holds up all.
    Source: Liu et al. 2023 (ring attention).
    """
    n = place.degree
    latency, per_byte = np.zeros_like(n), np.zeros_like(n)
    for level, (a, bandwidth) in enumerate(zip(links.latency, links.bandwidth, strict=True)):
        crossed = place.crossed[level]
        far = place.lanes[level].spacing.max(axis=0)
        latency = np.maximum(latency, np.where(crossed, a * far, 0.0))
        slope = 1.0 / pair_rate(place, level, bandwidth)
        per_byte = np.maximum(per_byte, np.where(crossed, slope, 0.0))
    trips = 2.0 if operation == "rotate-gradients" else 1.0
    steps = np.ones_like(n) if operation == "p2p" else trips * (n - 1.0)
    share = np.ones_like(n) if operation == "p2p" else steps / n
    return Line(
        steps=steps,
        latency_seconds=links.base_seconds + steps * latency,
        seconds_per_byte=share * per_byte,
        wire_share=share,
        applies=n > 1,
    )


def _has_torus(fabric: Fabric) -> bool:
    levels = zip(fabric.shapes, fabric.wraps, strict=True)
    return any(shape is not None and wraps for shape, wraps in levels)


def _has_mesh(fabric: Fabric) -> bool:
    return not _has_torus(fabric) and any(shape is not None for shape in fabric.shapes)


def _reduces_in_switch(fabric: Fabric) -> bool:
    return fabric.switched_reduction


_REDUCES = ("all-reduce", *GATHERS, *ROOTED)
_IN_SWITCH = "three or more GPUs on a switch that reduces (NVLink SHARP)"
ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm(name="ring", operations=_REDUCES, cost=ring, automatic=_REDUCES,
        summary="chunks travel round a ring of all ranks"),
    Algorithm(name="tree", operations=("all-reduce", *ROOTED), cost=binomial_tree, automatic=(),
        summary="binomial, not pipelined"),
    Algorithm(
        name="double-binary-tree", operations=("all-reduce", *ROOTED), cost=double_binary_tree,
        automatic=("all-reduce",),
        summary="two complementary trees, half of the buffer on each, pipelined",
    ),
    Algorithm(
        name="hierarchical", operations=(*_REDUCES, "all-to-all"), cost=hierarchical, automatic=(),
        summary="reduce-scatter inside, reduce across on 1/members of the data, all-gather inside",
        needs="groups of which every node (unit of a level) holds the same number of ranks",
    ),
    Algorithm(
        name="torus", operations=(*_REDUCES, "all-to-all"), cost=grid, automatic=_REDUCES,
        summary="rings along every dimension of the torus at once",
        possible=_has_torus, needs="ranks along a ring or torus level of the fabric",
    ),
    Algorithm(
        name="mesh", operations=(*_REDUCES, "all-to-all"), cost=grid, automatic=_REDUCES,
        summary="lines along every dimension of the mesh at once",
        possible=_has_mesh, needs="ranks along a mesh level with a shape",
    ),
    Algorithm(
        name="nvls", operations=("all-reduce",), cost=in_switch, automatic=("all-reduce",),
        protocols="in_switch",
        summary="the switch reduces", possible=_reduces_in_switch, needs=_IN_SWITCH,
    ),
    Algorithm(
        name="nvls-tree", operations=("all-reduce",), cost=in_switch_tree,
        automatic=("all-reduce",), protocols="in_switch",
        summary="the switch reduces inside a node, trees between nodes",
        possible=_reduces_in_switch,
        needs=f"several nodes of {_IN_SWITCH}",
    ),
    Algorithm(
        name="direct", operations=(*_REDUCES, "all-to-all"), cost=direct, automatic=("all-to-all",),
        protocols="exchange",
        summary="every rank sends to every other at once",
    ),
    Algorithm(
        name="pairwise", operations=("all-to-all",), cost=pairwise, automatic=(),
        protocols="exchange", summary="one partner a round",
    ),
    Algorithm(
        name="neighbour", operations=("p2p", "rotate", "rotate-gradients"), cost=neighbour,
        automatic=("p2p", "rotate", "rotate-gradients"),
        protocols="exchange", summary="one send to the next rank",
    ),
)  # fmt: skip
