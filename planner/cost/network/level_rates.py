"""Rates of a group on one fabric level: chains, pairs, exchanges, rings; distances.

`cost.network.algorithms` builds on them.
Letters: U groups as columns, L fabric levels, D dimensions of a grid. Bandwidth is of one GPU, one
direction, over all its links.
"""

import numpy as np

from planner.columns import FloatColumn
from planner.cost.network.topology import Lanes, Links, Placement


def chain_rate(place: Placement, lanes: Lanes, level: int, bandwidth: float) -> FloatColumn:
    """Bytes a second at which a ring passes a level's boundaries, (U,).

    A grid carries it on one ring through its points. A full mesh carries it on the links between
    members: (e - 1) / (g - 1) of the bandwidth.
    """
    fabric = place.fabric
    if fabric.full_mesh[level]:
        points = fabric.points[level]
        own: FloatColumn = bandwidth * (place.extent[level] - 1.0) / max(points - 1.0, 1.0)
    elif lanes.grid:
        active = (lanes.extent > 1).sum(axis=0)
        closed = np.where(active > 1, True, (lanes.wrapped | (lanes.extent <= 1)).all(axis=0))
        own = bandwidth / lanes.links / lanes.spacing.max(axis=0) * np.where(closed, 2.0, 1.0)
    else:
        own = np.full_like(place.degree, bandwidth)
    return np.asarray(lanes_out(place, level) * own)


def lanes_out(place: Placement, level: int) -> FloatColumn:
    """Members inside one unit of the level below that leave it at once, (U,)."""
    return np.asarray(np.minimum(place.fewest[level], place.fabric.library.most_lanes))


def pair_rate(place: Placement, level: int, bandwidth: float) -> FloatColumn:
    """Bytes a second between two units of a level, (U,).

    Through a switch it is all of the GPU's bandwidth, on a grid or mesh one link.
    """
    fabric, lanes = place.fabric, place.lanes[level]
    if fabric.full_mesh[level]:
        return np.full_like(place.degree, bandwidth / max(fabric.points[level] - 1.0, 1.0))
    return (
        lanes.link_rate(bandwidth).min(axis=0)
        if lanes.grid
        else np.full_like(place.degree, bandwidth)
    )


def tree_depth(place: Placement, level: int) -> FloatColumn:
    """Steps of a binary tree over the units that a level joins: ceil(log2 e), (U,)."""
    return np.asarray(np.ceil(np.log2(np.maximum(place.extent[level], 1.0)) - 1e-9))


def tree_distance(lanes: Lanes) -> FloatColumn:
    """Mean number of links that one step of a tree crosses, (U,).

    Distances 1, 2, 4, ... on a grid sum to e - 1 per dimension (e / 2 on a ring).
    """
    if not lanes.grid:
        return np.ones(lanes.extent.shape[1])
    reach = (
        np.where(lanes.wrapped, np.maximum(lanes.extent / 2.0, 1.0), lanes.extent - 1.0)
        * lanes.spacing
    )
    depth = np.ceil(np.log2(np.maximum(lanes.extent, 1.0)) - 1e-9).sum(axis=0)
    return np.asarray(np.where(lanes.extent > 1, reach, 0.0).sum(axis=0) / np.maximum(depth, 1.0))


def farthest(lanes: Lanes) -> FloatColumn:
    """Links between the two members farthest apart, (U,)."""
    if not lanes.grid:
        return np.ones(lanes.extent.shape[1])
    reach = (
        np.where(lanes.wrapped, np.floor(lanes.extent / 2.0), lanes.extent - 1.0) * lanes.spacing
    )
    return np.asarray(np.maximum(np.where(lanes.extent > 1, reach, 0.0).sum(axis=0), 1.0))


def exchange_seconds_per_byte(
    place: Placement, level: int, links: Links, leaving: FloatColumn
) -> FloatColumn:
    """Seconds per byte that a level takes in an all-to-all, (U,).

    Each rank sends the share `leaving` of P over this level.
    Switch: (n - m) / n / B.
    Full mesh of g points: the link of each pair carries P / n, so (g - 1) / n / B.
    Tree: half of the ranks send half of their bytes up through the root's link, so n / (4 B).
    Grid, routed dimension by dimension, all at once: the middle link of a line of e carries
        floor(e^2 / 4) / e of P; on a ring half of it goes the other way.
    """
    fabric, lanes, bandwidth = place.fabric, place.lanes[level], links.bandwidth[level]
    if fabric.full_mesh[level]:
        others = np.maximum(place.extent[level] - 1.0, 1.0)
        return np.asarray(leaving * max(fabric.points[level] - 1.0, 1.0) / others / bandwidth)
    if fabric.shared_root[level]:
        extent = place.extent[level]
        pairs = np.floor(extent / 2.0) * np.ceil(extent / 2.0)
        return np.asarray(np.maximum(leaving, pairs / np.maximum(extent, 1.0)) / bandwidth)
    if lanes.grid:
        load = np.where(lanes.extent > 1, np.floor(lanes.extent**2 / 4.0) / lanes.extent, 0.0)
        return np.asarray((load / lanes.ring_rate(bandwidth)).max(axis=0))
    return np.asarray(leaving / bandwidth)


def grid_rings(
    lanes: Lanes, bandwidth: float, latency: float
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """(steps, seconds, seconds per byte) of a reduce-scatter over the rings or lines of a grid.

    It runs over one dimension after the other, on all links at once. The buffer is cut into k parts
    for k dimensions in use. In phase p part i runs along dimension i + p, so that every dimension
    carries one part. A phase lasts as long as its slowest part:
        (e - 1) a + (e - 1) / e x rest / rate, and rest shrinks by e each phase.
    A point has two links per dimension, each with bandwidth / (2 D). A closed ring uses both
    directions. A line (of a mesh, or a part of a ring) uses one: its rate is half. s interleaved
    groups share a link: rate / s, latency x s.
    On a full torus with equal sides: t = k (e - 1) a + (n - 1) / n P / bandwidth.
    Source: Sack and Gropp 2015 (collectives for multiported torus networks); Jouppi et al. 2023
    (TPU v4).
    """
    lanes = lanes.active_first()
    dims = len(lanes.extent)
    rate, active = lanes.ring_rate(bandwidth), lanes.extent > 1
    used = np.maximum(active.sum(axis=0), 1)
    columns = np.arange(lanes.extent.shape[1])
    rest = np.where(np.arange(dims)[:, None] < used, 1.0 / used, 0.0)
    steps, seconds, slope = (np.zeros(len(columns)) for _ in range(3))
    for phase in range(dims):
        dimension = (np.arange(dims)[:, None] + phase) % used
        extent, spacing, speed = (
            x[dimension, columns] for x in (lanes.extent, lanes.spacing, rate)
        )
        running = (phase < used) & (rest > 0)
        steps = steps + np.where(running, extent - 1.0, 0.0).max(axis=0)
        seconds = seconds + np.where(running, (extent - 1.0) * spacing * latency, 0.0).max(axis=0)
        slope = slope + np.where(running, rest * (extent - 1.0) / extent / speed, 0.0).max(axis=0)
        rest = np.where(running, rest / extent, rest)
    return steps, seconds, slope
