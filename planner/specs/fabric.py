"""The levels of a fabric, inner to outer: as typed, and with defaults filled in.

A fabric is a tuple of levels from inner to outer. `gpus` is how many GPUs one group of the level
joins; bandwidth is per GPU and one direction; latency is of one step. Topologies:
switch: non-blocking.
ring: links between neighbours only.
tree: a tree of switches.
mesh: links between all pairs where it has no shape, a grid without wrap-around where it has one.
torus: a grid with wrap-around.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from pydantic import Field

from planner.errors import Fault, SpecError
from planner.specs.gpu import (
    AtLeastOne,
    BytesPerSecond,
    Count,
    Frozen,
    GpuSpec,
    ScaleOut,
    Seconds,
    Topology,
    either,
)
from planner.specs.validation import Name
from planner.units import counted

Network = Literal["infiniband", "roce", "efa"]
# Seconds of a step, where a network differs from what the GPU is usually sold with.
# efa: micro.csv, all-reduce of 64 KiB over two nodes takes 135 us (p5) and 227 us (p4de), of which
# the same steps inside the nodes take 49 and 95: 18 and 27 us a step of NCCL's Simple, whose steps
# count 2.4 times.
NETWORK_LATENCY_SECONDS: Mapping[Network, float] = {"efa": 18e-6}


class LevelRequest(Frozen):
    """One level of `cluster.fabric` as typed; None means the GPU's default fabric.

    name: as plans and traces call the level.
    gpus: GPUs that one group of the level joins; innermost gpus_per_node, outermost all.
    bandwidth: of one GPU, one direction; bytes/s, or with a unit: "400 Gb/s".
    latency: of one step; seconds, or with a unit: "5 us".
    topology: a ring joins neighbours only, a tree has switches in levels, a mesh joins all pairs, a
        torus is a grid with wrap-around.
    shape: sizes of a torus or of a grid of a mesh.
    oversubscription: divides the bandwidth where all GPUs send at once.
    peer_memory: whether its GPUs read each other's memory, which async TP needs; left out, it is
        taken to be so where the level is faster than PCIe.
    network: between nodes; each kind has its own latency.
    """

    name: Name | None = None
    gpus: Count | None = None
    bandwidth: BytesPerSecond | None = Field(
        default=None, validation_alias=either("bandwidth", "bandwidth_bytes_per_second")
    )
    latency: Seconds | None = Field(
        default=None, validation_alias=either("latency", "latency_seconds")
    )
    topology: Topology | None = None
    shape: tuple[Count, ...] | None = None
    oversubscription: AtLeastOne = 1.0
    peer_memory: bool | None = None
    network: Network | None = None


class FabricLevel(Frozen):
    """One level of a fabric, complete.

    bandwidth_bytes_per_second: of one GPU, one direction, before `oversubscription` divides it.
    peer_memory: whether its GPUs read and write each other's memory.
    network: what joins nodes. EFA delivers out of order, see `cost.network.nccl.OUT_OF_ORDER`.
    """

    name: str
    gpus: Count
    bandwidth_bytes_per_second: BytesPerSecond
    latency_seconds: Seconds
    topology: Topology
    shape: tuple[Count, ...] | None = None
    oversubscription: AtLeastOne = 1.0
    peer_memory: bool = False
    network: Network = "infiniband"


def balanced_shape(num_gpus: int, num_dims: int) -> tuple[int, ...]:
    """Side lengths of the most cube-like grid with this many points: 4096, 3 -> (16, 16, 16)."""
    factors, rest = [], num_gpus
    for candidate in range(2, math.isqrt(num_gpus) + 1):
        while rest % candidate == 0:
            factors.append(candidate)
            rest //= candidate
    sides = [1] * num_dims
    for factor in sorted([*factors, rest], reverse=True):
        sides[sides.index(min(sides))] *= factor
    return tuple(sorted(sides))


class _Sized(NamedTuple):
    """A typed level with its group size and its index in what the user wrote."""

    place: int
    request: LevelRequest
    gpus: int


class FabricLevels:
    """Completes the levels for one cluster size; raises all faults of a fabric at once."""

    def __init__(self, gpu: GpuSpec, per_node: int, num_gpus: int, field: str) -> None:
        self.gpu, self.per_node, self.num_gpus, self.field = gpu, per_node, num_gpus, field
        self.domain = self._even(gpu.scale_up.gpus) if gpu.scale_up.spans_nodes else per_node
        self.faults: list[Fault] = []

    def levels(self, requests: Sequence[LevelRequest] | None) -> tuple[FabricLevel, ...]:
        """Complete levels, inner to outer.

        The last joins all GPUs, and each joins more than the one inside it.
        """
        typed = requests or (LevelRequest(gpus=self.domain), LevelRequest())
        sized = self._sized(typed)
        self._check(sized)
        if self.faults:
            raise SpecError(self.faults)
        if len(sized) == 1 and sized[0].gpus < self.num_gpus:
            sized.append(_Sized(1, LevelRequest(), self.num_gpus))
        kept: list[_Sized] = []
        for level in sized:
            size = min(level.gpus, self.num_gpus)
            if not kept or size > kept[-1].gpus:
                kept.append(level._replace(gpus=size))
        if kept[-1].gpus < self.num_gpus:
            rule = f"joins {kept[-1].gpus} of {counted(self.num_gpus, 'GPU')}"
            remedy = "leave gpus out of the outermost level, or add one that joins all"
            self._fault(kept[-1].place, "gpus", kept[-1].gpus, rule, remedy)
        complete = [
            self._complete(level, kept[order - 1].gpus if order else 1, len(typed))
            for order, level in enumerate(kept)
        ]
        if self.faults:
            raise SpecError(self.faults)
        return tuple(complete)

    def _even(self, size: int) -> int:
        """Largest share of a rack that fills whole nodes and divides the job.

        In a job of 256 GPUs, each NVL72 rack has 64 of them.
        """
        size = min(size, self.num_gpus)
        shares = range(size, self.per_node - 1, -1)
        whole = (part for part in shares if self.num_gpus % part == part % self.per_node == 0)
        return next(whole, self.per_node)

    def _sized(self, typed: Sequence[LevelRequest]) -> list[_Sized]:
        last, sized = len(typed) - 1, []
        for index, level in enumerate(typed):
            size = level.gpus
            spans = index == 0 and self.gpu.scale_up.spans_nodes
            if size is not None and spans and size > self.per_node:
                size = self._even(size)
            if size is None and index == 0 and last and level.shape:
                size = math.prod(level.shape)
            if size is None:
                size = self.num_gpus if index == last else self.domain if index == 0 else None
            if size is None:
                rule = "is required for a level between the innermost and the outermost"
                self._fault(index, "gpus", None, rule, "say how many GPUs one group of it joins")
                size = self.num_gpus
            sized.append(_Sized(index, level, size))
        return sized

    def _check(self, sized: Sequence[_Sized]) -> None:
        for inner, outer in pairwise(sized):
            both_typed = inner.request.gpus is not None and outer.request.gpus is not None
            reaches_all = outer.request.gpus is None and outer.gpus == self.num_gpus
            least = inner.gpus + both_typed
            if not reaches_all and outer.gpus < least:
                rule = f"must join more GPUs than the level inside it ({inner.gpus})"
                remedy = "write levels from inner to outer"
                self._fault(outer.place, "gpus", outer.gpus, rule, remedy)
            elif not reaches_all and outer.gpus % inner.gpus:
                rule = f"must be a multiple of the level inside it ({inner.gpus})"
                remedy = f"use {inner.gpus * max(2, outer.gpus // inner.gpus)}"
                self._fault(outer.place, "gpus", outer.gpus, rule, remedy)
        for level in sized:
            if level.gpus < self.num_gpus and self.num_gpus % level.gpus:
                rule = f"does not divide {counted(self.num_gpus, 'GPU')}"
                divisor = max(size for size in range(1, level.gpus) if self.num_gpus % size == 0)
                remedy = f"use {divisor}, or a multiple of {counted(level.gpus, 'GPU')}"
                self._fault(level.place, "gpus", level.gpus, rule, remedy)

    def _complete(self, level: _Sized, inner: int, num_typed: int) -> FabricLevel:
        request = level.request
        reach = self.gpu.scale_up.gpus if level.place == 0 and num_typed > 1 else 0
        scale_up = level.gpus <= max(self.domain, reach)
        default: ScaleOut = self.gpu.scale_up if scale_up else self.gpu.scale_out
        topology = request.topology or ("torus" if request.shape else default.topology)
        last = level.gpus == self.num_gpus and level.place
        name = "scale-up" if scale_up else "inter-node" if last else f"level-{level.place}"
        if level.gpus <= self.per_node:
            name = "intra-node"
        return FabricLevel(
            name=request.name or name,
            gpus=level.gpus,
            bandwidth_bytes_per_second=default.bandwidth_bytes_per_second
            if request.bandwidth is None
            else request.bandwidth,
            latency_seconds=self._latency(request, default),
            topology=topology,
            shape=self._shape(level, inner, topology, default.topology == "torus"),
            oversubscription=request.oversubscription,
            peer_memory=self._peer_memory(request, scale_up=scale_up),
            network=request.network or "infiniband",
        )

    def _latency(self, request: LevelRequest, default: ScaleOut) -> float:
        """As typed, else its network's, else as the GPU is usually sold."""
        if request.latency is not None:
            return request.latency
        if request.network is None:
            return default.latency_seconds
        return NETWORK_LATENCY_SECONDS.get(request.network, default.latency_seconds)

    def _peer_memory(self, request: LevelRequest, *, scale_up: bool) -> bool:
        """As typed, else as in the GPU's own fabric.

        Where the user gives another bandwidth for it, GPUs share memory if that is above PCIe's.
        """
        if request.peer_memory is not None:
            return request.peer_memory
        own, bandwidth = self.gpu.scale_up, request.bandwidth
        if scale_up and bandwidth is None and own.peer_memory is not None:
            return own.peer_memory
        rate = own.bandwidth_bytes_per_second if bandwidth is None else bandwidth
        return scale_up and rate > self.gpu.pcie_bandwidth_bytes_per_second

    def _shape(
        self, level: _Sized, inner: int, topology: Topology, torus_by_default: bool
    ) -> tuple[int, ...] | None:
        shape, points = level.request.shape, level.gpus // inner
        if shape is None:
            if topology == "torus" and not torus_by_default:
                remedy = f"use for example shape: {list(balanced_shape(points, 3))}"
                self._fault(level.place, "shape", None, "is required for a torus", remedy)
            return balanced_shape(points, 3) if topology == "torus" else None
        if topology not in ("torus", "mesh"):
            remedy = "use torus or mesh, or leave shape out"
            rule = f"means nothing for topology {topology}"
            self._fault(level.place, "shape", list(shape), rule, remedy)
        elif math.prod(shape) not in (points, level.gpus):
            rule = f"has {math.prod(shape)} points, the level joins {points}"
            remedy = f"use for example {list(balanced_shape(points, len(shape)))}"
            self._fault(level.place, "shape", list(shape), rule, remedy)
        return shape

    def _fault(self, index: int, key: str, value: object, rule: str, remedy: str) -> None:
        self.faults.append(Fault(f"{self.field}.{index}.{key}", value, rule, remedy))
