"""Collectives as rings and trees, of all ranks or level by level. Letters as in `algorithms`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.columns import BoolColumn, FloatColumn
from planner.cost.network.level_rates import (
    chain_rate,
    exchange_seconds_per_byte,
    grid_rings,
    lanes_out,
    pair_rate,
    tree_depth,
    tree_distance,
)
from planner.cost.network.topology import Links, Placement

CHAIN = 7.0  # hops along the GPUs of a usual node
GATHERS = ("all-gather", "reduce-scatter")
EXCHANGES = ("all-to-all", "p2p", "rotate", "rotate-gradients")
ROOTED = ("broadcast", "reduce")  # a reduction to one rank is a broadcast that runs backwards
OPERATIONS = ("all-reduce", *GATHERS, *ROOTED, *EXCHANGES)
# Trips round the ring. The buffer crosses the ring's slowest link trips x (n - 1) / n times.
# Source: NCCL's performance notes.
TRIPS: Mapping[str, float] = {"all-reduce": 2.0, **dict.fromkeys((*GATHERS, *ROOTED), 1.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """seconds = latency_seconds + seconds_per_byte x P; all (U,).

    wire_share: bytes that the busiest rank sends, over P.
    applies: where the algorithm can run.
    """

    steps: FloatColumn
    latency_seconds: FloatColumn
    seconds_per_byte: FloatColumn
    wire_share: FloatColumn
    applies: BoolColumn


def ring(operation: str, place: Placement, links: Links) -> Line:
    """Ring over all members in rank order.

    t = trips (n - 1) (P / (n B) + a)
    Broadcast and reduce, pipelined: t = (n - 1) a + P / B.
    B: of the slowest boundary crossed, members inside it x bandwidth.
    a: each hop of a trip has the latency of its own level.
    A rank that gathers, or holds the reduced result, also copies its own chunk P / n
    (`Links.copy_seconds_per_byte`).
    Source: Patarasuk and Yuan 2009; Thakur et al. 2005; NCCL src/graph/tuning.cc (ring latency).
    """
    n, trips = place.degree, TRIPS[operation]
    latency, rate = np.zeros_like(n), np.full_like(n, np.inf)
    for level in range(len(links.bandwidth)):
        lanes = place.lanes[level]
        here = chain_rate(place, lanes, level, links.bandwidth[level])
        rate = np.where(place.crossed[level], np.minimum(rate, here), rate)
        latency = latency + place.hops[level] * links.latency[level] * lanes.spacing.max(axis=0)
    passes = 1.0 if operation in ROOTED else trips * (n - 1.0) / n
    return Line(
        steps=trips * (n - 1.0),
        latency_seconds=links.base_seconds + trips * latency,
        seconds_per_byte=passes / rate + links.copy_seconds_per_byte / n,
        wire_share=passes * np.ones_like(n),
        applies=n > 1,
    )


def binomial_tree(operation: str, place: Placement, links: Links) -> Line:
    """Binomial tree that passes on the whole buffer at every step, not pipelined.

    It reduces to a root, then broadcasts.
    t = trips x sum over levels of ceil(log2 e) (P / B + a); a broadcast or a reduce is one trip.
    e: units that a level joins.
    Source: Thakur et al. 2005, section 3.
    """
    trips = TRIPS[operation]
    depth = [tree_depth(place, level) for level in range(len(links.bandwidth))]
    hop = [tree_distance(place.lanes[level]) * a for level, a in enumerate(links.latency)]
    rate = [pair_rate(place, level, b) for level, b in enumerate(links.bandwidth)]
    steps = trips * np.sum(depth, axis=0)
    latency = trips * np.sum([d * a for d, a in zip(depth, hop, strict=True)], axis=0)
    per_byte = trips * np.sum([d / b for d, b in zip(depth, rate, strict=True)], axis=0)
    return Line(
        steps=steps,
        latency_seconds=links.base_seconds + latency,
        seconds_per_byte=per_byte,
        wire_share=steps,
        applies=place.degree > 1,
    )


def double_binary_tree(operation: str, place: Placement, links: Links) -> Line:
    """Two complementary binary trees, pipelined, with half of the buffer on each.

    Every rank is a leaf of one tree and inside the other.
    all-reduce: t = 2 d a + 2 P / B (P / B between two units).
    Broadcast, reduce: t = d a + P / B.
    d: sum over levels of ceil(log2 e); inside a node NCCL runs a chain of e - 1, whose hops cost
        more after the first seven (`Library.long_chain_hop_seconds`).
    B: of the slowest level, since all work at the same time.
    Source: Sanders, Speck and Traff 2009; NCCL 2.4 (blog, Jeaugey 2019) and src/graph/tuning.cc
    (tree latency).
    """
    trips = TRIPS[operation]
    depth, latency, per_byte = (np.zeros_like(place.degree) for _ in range(3))
    for level in range(len(links.bandwidth)):
        extent = place.extent[level]
        chained = place.fabric.chained and level == 0
        deep = np.maximum(extent - 1.0, 0.0) if chained else tree_depth(place, level)
        depth = depth + deep
        hop, long_hop = links.latency[level], place.fabric.library.long_chain_hop_seconds
        beyond = np.maximum(deep - CHAIN, 0.0) if chained and long_hop is not None else 0.0
        latency = latency + (deep - beyond) * hop * tree_distance(place.lanes[level])
        latency = latency + beyond * (long_hop or 0.0)
        passes = np.where(extent > 2, trips, 1.0)
        rate = lanes_out(place, level) * pair_rate(place, level, links.bandwidth[level])
        per_byte = np.maximum(per_byte, np.where(place.crossed[level], passes / rate, 0.0))
    wire = np.where(place.degree > 2, trips, 1.0)
    return Line(
        steps=trips * depth,
        latency_seconds=links.base_seconds + trips * latency,
        seconds_per_byte=per_byte,
        wire_share=wire,
        applies=place.degree > 1,
    )


def hierarchical(operation: str, place: Placement, links: Links) -> Line:
    """Level by level: reduce-scatter inside, go on outside with 1 / m of the buffer, all-gather.

    reduce-scatter, all-gather: t = sum over levels of (e - 1) (P / (m e B) + a).
    all-reduce: twice that.
    Broadcast, reduce: a ring pipeline per level, P / B + (e - 1) a.
    All-to-all: exchange inside, then between the members that have the same place in their units.
    m: members already joined inside.
    e: units that the level joins. A grid level runs `grid_rings`, a flat one a ring.
    It applies where every unit holds the same number of members.
    Source: Patarasuk and Yuan 2009 applied per level; Cho et al. 2019 (BlueConnect).
    """
    trips = TRIPS.get(operation, 1.0)
    joined = np.ones_like(place.degree)
    steps, latency, per_byte, wire = (np.zeros_like(joined) for _ in range(4))
    for level in range(len(links.bandwidth)):
        extent, crossed = place.extent[level], place.crossed[level]
        count, seconds, slope = _native(place, level, links)
        share = (extent - 1.0) / extent
        if operation in ROOTED:
            share = np.ones_like(extent)
            rate = chain_rate(place, place.lanes[level], level, links.bandwidth[level])
            slope = place.fewest[level] / np.maximum(rate, 1.0)
        elif operation == "all-to-all":
            slope = exchange_seconds_per_byte(place, level, links, share)
        else:
            share, slope = share / joined, slope / joined
        steps = steps + np.where(crossed, count, 0.0)
        latency = latency + np.where(crossed, seconds, 0.0)
        per_byte = per_byte + np.where(crossed, slope, 0.0)
        wire = wire + np.where(crossed, share, 0.0)
        joined = joined * extent
    return Line(
        steps=trips * steps,
        latency_seconds=links.base_seconds + trips * latency,
        seconds_per_byte=trips * per_byte
        + (0.0 if operation in ROOTED else links.copy_seconds_per_byte / place.degree),
        wire_share=trips * wire,
        applies=(place.degree > 1) & place.even,
    )


def _native(
    place: Placement, level: int, links: Links
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """(steps, latency seconds, seconds per byte) of a reduce-scatter among the units of one level.

    The bytes are those of the level's own buffer.
    """
    lanes, extent = place.lanes[level], place.extent[level]
    if lanes.grid:
        return grid_rings(lanes, links.bandwidth[level], links.latency[level])
    rate = chain_rate(place, lanes, level, links.bandwidth[level]) / place.fewest[level]
    share = (extent - 1.0) / extent
    return (
        extent - 1.0,
        (extent - 1.0) * links.latency[level],
        np.where(extent > 1, share / np.where(rate > 0, rate, 1.0), 0.0),
    )
