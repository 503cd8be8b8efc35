"""Where groups of ranks lie on the fabric: the levels they cross, their members and links there.

Letters: U groups as columns, L fabric levels from inner to outer, D dimensions of a grid.

Ranks are placed in order: rank r is GPU r. A group is (degree, stride): ranks b, b + stride,
b + 2 stride, and so on. All groups of one axis run the same collective at the same time and tile
the machine. So each GPU drives its own NIC, m members of a group in a node leave it at m times one
NIC's rate, and no group takes another's NIC. What groups do share is an oversubscribed uplink (the
level's bandwidth is divided) and the links of a ring, torus or mesh (`Lanes.spacing`).
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from planner.columns import BoolColumn, FloatColumn
from planner.cost.network.nccl import IDEAL, OUT_OF_ORDER, Crossing, Library, Protocol, library_of
from planner.specs.cluster import ClusterSpec
from planner.specs.fabric import FabricLevel, balanced_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The fabric's levels, from inner to outer; arrays are (L,).

    gpus: GPUs joined by one unit of the level.
    points: units of the level inside that it joins.
    bandwidth: bytes a second per GPU.
    latency: seconds of a step.
    shapes: side lengths of a level that is a grid (ring, torus, mesh with a shape), None where it
        is flat.
    wraps: whether the grid's ends are joined.
    full_mesh: every pair has its own link.
    shared_root: a tree, whose root is one link.
    switched_reduction: the innermost level is a switch that reduces.
    chained: the innermost level is a node, inside which trees run as a chain (NCCL).
    ordered: whether a level delivers in order, as NCCL's low-latency protocols need.
    peer_gpus: GPUs that read each other's memory; 1 where none can.
    remembered: lines already computed.
    """

    gpus: FloatColumn
    points: FloatColumn
    bandwidth: FloatColumn
    latency: FloatColumn
    shapes: tuple[tuple[int, ...] | None, ...]
    wraps: tuple[bool, ...]
    full_mesh: tuple[bool, ...]
    shared_root: tuple[bool, ...]
    switched_reduction: bool
    chained: bool
    ordered: BoolColumn
    peer_gpus: int
    library: Library
    remembered: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(
        cls,
        cluster: ClusterSpec,
        intra_share: float = 1.0,
        inter_share: float = 1.0,
        library: Library | None = None,
    ) -> "Fabric":
        """The cluster's levels.

        intra_share, inter_share: factors on the bandwidth of the innermost level and of the others.
        """
        gpu = cluster.gpu
        node = gpu.scale_up.gpus
        return _fabric(
            cluster.fabric,
            gpu.nvls,
            node,
            (intra_share, inter_share),
            library or library_of(cluster),
        )

    def links(self, protocols: str) -> tuple["Links", ...]:
        """The fabric as each of the library's protocols of this kind sees it."""
        seen: tuple[Links, ...] | None = self.remembered.get(protocols)
        if seen is None:
            kind: tuple[Protocol, ...] = getattr(self.library, protocols)
            seen = self.remembered[protocols] = tuple(Links.of(self, protocol) for protocol in kind)
        return seen


@lru_cache(maxsize=64)
def _fabric(
    levels: tuple[FabricLevel, ...],
    nvls: bool,
    node: int,
    shares: tuple[float, float],
    library: Library,
) -> Fabric:
    """The fabric of these levels; equal machines share one, and so the lines that it remembers.

    node: GPUs of the largest scale-up domain.
    """
    inner = [1, *(level.gpus for level in levels[:-1])]
    gpus = np.array([float(level.gpus) for level in levels])
    share = np.array([shares[0]] + [shares[1]] * (len(levels) - 1))
    return Fabric(
        gpus=gpus,
        points=gpus / np.array(inner),
        bandwidth=share
        * [level.bandwidth_bytes_per_second / level.oversubscription for level in levels],
        latency=np.array([level.latency_seconds for level in levels]),
        shapes=tuple(_grid(level, below) for level, below in zip(levels, inner, strict=True)),
        wraps=tuple(level.topology in ("ring", "torus") for level in levels),
        full_mesh=tuple(level.topology == "mesh" and level.shape is None for level in levels),
        shared_root=tuple(level.topology == "tree" for level in levels),
        switched_reduction=nvls and levels[0].topology == "switch" and levels[0].gpus <= node,
        chained=levels[0].gpus <= node and library is not IDEAL,
        ordered=np.array([level.network != "efa" for level in levels]),
        peer_gpus=levels[0].gpus if levels[0].peer_memory else 1,
        library=library,
    )


def _grid(level: FabricLevel, below: int) -> tuple[int, ...] | None:
    """Side lengths of a grid level, counted in units of the level inside it.

    The first dimension varies fastest with rank.
    """
    points = level.gpus // below
    if level.topology == "ring":
        return (points,)
    if level.topology not in ("torus", "mesh") or level.shape is None:
        return None
    return (
        level.shape
        if math.prod(level.shape) == points
        else balanced_shape(points, len(level.shape))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """A fabric as one protocol sees it.

    bandwidth, latency (L,): usable.
    crossing_seconds (L,): once a collective that crosses the level.
    copy_seconds_per_byte: of a rank's own chunk.
    peers: that one rank of an all-to-all serves at the same time.
    """

    protocol: Protocol
    bandwidth: FloatColumn
    latency: FloatColumn
    crossing_seconds: FloatColumn
    base_seconds: float
    copy_seconds_per_byte: float
    peers: float

    @classmethod
    def of(cls, fabric: Fabric, protocol: Protocol) -> "Links":
        """Link figures times the protocol's shares and hop factors."""
        library = fabric.library
        usual = Crossing(hop=protocol.outer_hop, share=protocol.outer_share, base_seconds=0.0)
        crossings = [
            usual if ordered else OUT_OF_ORDER.get(protocol.name, usual)
            for ordered in fabric.ordered[1:]
        ]
        shares = np.array([protocol.inner_share, *(crossing.share for crossing in crossings)])
        hops = [protocol.inner_hop, *(crossing.hop for crossing in crossings)]
        return cls(
            protocol=protocol,
            bandwidth=fabric.bandwidth * shares,
            latency=fabric.latency * np.array(hops),
            crossing_seconds=np.array([0.0, *(crossing.base_seconds for crossing in crossings)]),
            base_seconds=protocol.base_seconds,
            copy_seconds_per_byte=1.0 / (library.copy_share * fabric.bandwidth[0])
            if library.copy_share
            else 0.0,
            peers=library.exchange_peers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Groups on the fabric; arrays (L + 1, U) start with the rank itself.

    units: how many units of each level the group that spreads widest touches.
    fewest: members in the emptiest unit touched, over all groups that cross the unit's boundary.
    even (U,): every unit touched holds the same number.
    hops (L, U): steps on this level of one trip round a ring over all members; degree - 1 in sum.
    extent (L, U): units of the level inside that one unit of this level joins for the group.
    crossed (L, U): extent is more than one.
    """

    fabric: Fabric
    degree: FloatColumn
    stride: FloatColumn
    units: FloatColumn
    fewest: FloatColumn
    even: BoolColumn
    hops: FloatColumn
    extent: FloatColumn
    crossed: BoolColumn
    lanes: tuple["Lanes", ...]

    @classmethod
    def of(cls, fabric: Fabric, degree: FloatColumn, stride: FloatColumn) -> "Placement":
        """Exact counts.

        A unit of g GPUs holds g / stride members. Where strides or blocks do not divide g, groups
        straddle its boundary, and the worst group decides.
        """
        units, fewest, even = [degree], [np.ones_like(degree)], np.ones(len(degree), dtype=np.bool_)
        for gpus in fabric.gpus[:-1]:
            inside = np.clip(np.floor(gpus / stride), 1.0, degree)
            block = degree * stride
            divides = ((gpus % stride == 0) | (stride >= gpus)) & (
                (block % gpus == 0) | (gpus % block == 0) | (stride >= gpus)
            )
            touched = np.ceil(degree / inside)
            for index in np.flatnonzero(~divides):
                touched[index], inside[index] = _straddling(
                    int(degree[index]), int(stride[index]), int(gpus), int(fabric.gpus[-1])
                )
            even &= divides
            units.append(touched)
            fewest.append(inside)
        units.append(np.ones_like(degree))
        fewest.append(degree)
        touched_LU, fewest_LU = (
            np.minimum.accumulate(units, axis=0),
            np.maximum.accumulate(fewest, axis=0),
        )
        extent = np.ceil(touched_LU[:-1] / touched_LU[1:])
        return cls(
            fabric=fabric,
            degree=degree,
            stride=stride,
            units=touched_LU,
            fewest=fewest_LU,
            even=even,
            hops=touched_LU[:-1] - touched_LU[1:],
            extent=extent,
            crossed=extent > 1,
            lanes=tuple(
                Lanes.of(fabric, level, stride, along) for level, along in enumerate(extent)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Members along each dimension of a grid, (D, U).

    spacing: points from one member to the next. As many interleaved groups share each link, and a
        step crosses as many links.
    wrapped: the members close a ring.
    links: of one point, two per dimension. Each carries its share of the point's bandwidth.
    """

    extent: FloatColumn
    spacing: FloatColumn
    wrapped: BoolColumn
    links: float
    grid: bool

    @classmethod
    def of(cls, fabric: Fabric, level: int, stride: FloatColumn, extent: FloatColumn) -> "Lanes":
        """Where the groups lie on a level's grid of points.

        A flat level is one dimension without shared links.
        """
        shape = fabric.shapes[level]
        one = np.ones_like(extent)
        if shape is None:
            return cls(
                extent=extent[None],
                spacing=one[None],
                wrapped=np.ones((1, len(one)), dtype=np.bool_),
                links=1.0,
                grid=False,
            )
        step = np.maximum(stride / (fabric.gpus[level] / fabric.points[level]), 1.0)
        extents, spacings, wrapped, size, covered = [], [], [], 1.0, one
        for side in shape:
            spacing = np.clip(step / size, 1.0, side)
            size *= side
            reached = np.clip(np.ceil(size / step), 1.0, extent)
            along = np.ceil(reached / covered)
            extents.append(along)
            spacings.append(np.where(along > 1, spacing, 1.0))
            wrapped.append(along * spacing == side)
            covered = reached
        closed = np.array(wrapped) & fabric.wraps[level]
        return cls(
            extent=np.array(extents),
            spacing=np.array(spacings),
            wrapped=closed,
            links=2.0 * len(shape),
            grid=True,
        )

    def link_rate(self, bandwidth: float) -> FloatColumn:
        """Bytes a second that one group gets of one link in one direction, (D, U)."""
        return np.asarray(bandwidth / self.links / self.spacing)

    def ring_rate(self, bandwidth: float) -> FloatColumn:
        """Bytes a second of a ring along each dimension, (D, U).

        A closed ring uses both directions of its links, a line one. A flat level has all bandwidth.
        """
        if not self.grid:
            return np.full_like(self.extent, bandwidth)
        return np.asarray(self.link_rate(bandwidth) * np.where(self.wrapped, 2.0, 1.0))

    def active_first(self) -> "Lanes":
        """Topology with the dimensions that have members before the others."""
        order = np.argsort(self.extent <= 1, axis=0, kind="stable")
        return Lanes(
            extent=np.take_along_axis(self.extent, order, axis=0),
            spacing=np.take_along_axis(self.spacing, order, axis=0),
            wrapped=np.take_along_axis(self.wrapped, order, axis=0),
            links=self.links,
            grid=self.grid,
        )


def _straddling(degree: int, stride: int, gpus: int, num_gpus: int) -> tuple[float, float]:
    """(units touched by the widest group, members in the emptiest unit of a group that crosses).

    Over all groups of the machine.
    """
    block = degree * stride
    blocks = min(gpus // math.gcd(block, gpus), max(num_gpus // block, 1))
    start = (np.arange(blocks)[:, None] * block + np.arange(stride)[None, :]).ravel() % gpus
    last = start + (degree - 1) * stride
    touched = last // gpus + 1
    crossing = touched > 1
    if not crossing.any():
        return 1.0, float(degree)
    first_count = -(-(gpus - start) // stride)
    last_count = (last % gpus) // stride + 1
    inner_count = np.where(touched > 2, gpus // stride, degree)
    fewest = np.minimum(np.minimum(first_count, last_count), inner_count)[crossing].min()
    return float(touched.max()), float(max(fewest, 1))
