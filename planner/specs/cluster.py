"""The machine: how many GPUs of which kind, and the fabric between them, with defaults filled in.

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
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from planner.errors import Fault, SpecError
from planner.specs.gpu import (
    AtLeastOne,
    BytesPerSecond,
    Count,
    Fraction,
    Frozen,
    GpuSpec,
    MemoryBytes,
    NonNegativeNumber,
    PositiveNumber,
    ReservedBytes,
    ScaleOut,
    Seconds,
    Topology,
    Watts,
    either,
    whole_number,
)
from planner.specs.validation import Name
from planner.units import GIGA, counted, format_bytes

RANK_ORDER = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
MAX_CHOICES = 32  # each needs its own search
FILE_ENDINGS = (".yaml", ".yml", ".json")
DEFAULT_MEMORY_FRACTION = 0.95
# Judgement: write speed of NVIDIA's DGX SuperPOD H100 reference storage, 62 GB/s for a scalable
# unit of 256 GPUs ("better" row).
STORAGE_BYTES_PER_SECOND_PER_GPU = 0.25 * GIGA
# World average of electricity in 2024. Source: IEA, Electricity 2025, chapter Emissions.
DEFAULT_CARBON_INTENSITY = 445.0


def parse_num_gpus(value: object) -> tuple[int, ...]:
    """The numbers of GPUs to plan for, sorted.

    256 gives (256,); "64..1024" gives 64, 128, ..., 1024 (doubling); [96, 128] gives itself.
    """
    if isinstance(value, str):
        low, dots, high = value.partition("..")
        if (
            not value.isascii()
            or not low.strip().isdigit()
            or (dots and not high.strip().isdigit())
        ):
            raise ValueError(
                "must be a whole number, a range or a list; use for example 256, 64..1024 or [64, "
                "96]"
            )
        first = whole_number(int(low))
        last = whole_number(int(high)) if dots else first
        if last < first:
            raise ValueError(f"range runs backwards; write {last}..{first}")
        return tuple(first << step for step in range((last // first).bit_length()))
    if isinstance(value, list | tuple):
        if not 1 <= len(value) <= MAX_CHOICES:
            raise ValueError(
                f"must list 1 to {counted(MAX_CHOICES, 'size')}; use for example [64, 128]"
            )
        return tuple(sorted({whole_number(item) for item in value}))
    return (whole_number(value),)


def _rank_order(value: object) -> tuple[str, ...]:
    order = tuple(str(axis) for axis in value) if isinstance(value, list | tuple) else ()
    if sorted(order) != sorted(RANK_ORDER):
        raise ValueError(
            f"must name each of {', '.join(RANK_ORDER)} once, innermost first; use "
            f"{list(RANK_ORDER)}"
        )
    return order


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


class ClusterRequest(Frozen):
    """`cluster` as typed, without the GPU; None means the GPU's default, or that of `resolve`.

    num_gpus: a number; for plans also a range "64..1024", which doubles, or a list [64, 96].
    gpus_per_node: 8 unless given (4 of GB200 and GB300), or num_gpus where that is less.
    fabric: levels from inner to outer; what a level leaves out is the GPU's default.
    power_limit: of one GPU; watts, or with a unit: "700 W".
    reserved_memory: bytes of each GPU that a plan leaves alone, or with a unit: "2 GiB".
    memory_fraction: share of a GPU's memory that a plan may use.
    host_memory: bytes of one node, or with a unit: "2 TiB".
    pcie_bandwidth: of one GPU, one direction; bytes/s, or with a unit.
    storage_bandwidth: what the cluster writes to shared storage; bytes/s, or with a unit.
    mtbf_gpu_hours: mean GPU-hours between interruptions.
    price_per_gpu_hour: in USD.
    carbon_intensity: grams of CO2 a kilowatt-hour; the world's average unless given.
    rank_order: the axes as ranks are placed, innermost first.
    """

    num_gpus: Annotated[tuple[int, ...], BeforeValidator(parse_num_gpus)]
    gpus_per_node: Count | None = None
    fabric: tuple[LevelRequest, ...] | None = None
    power_limit: Watts | None = None
    reserved_memory: ReservedBytes = 0.0
    memory_fraction: Fraction = DEFAULT_MEMORY_FRACTION
    host_memory: MemoryBytes | None = None
    pcie_bandwidth: BytesPerSecond | None = None
    storage_bandwidth: BytesPerSecond | None = None
    mtbf_gpu_hours: PositiveNumber | None = None
    price_per_gpu_hour: NonNegativeNumber | None = None
    carbon_intensity: NonNegativeNumber = DEFAULT_CARBON_INTENSITY
    rank_order: Annotated[tuple[str, ...], BeforeValidator(_rank_order)] = RANK_ORDER


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


class ClusterSpec(Frozen):
    """A cluster with every default filled in.

    host_memory_bytes: of one node.
    storage_bandwidth_bytes_per_second: of the whole cluster.
    memory_fraction: share of device memory that a plan may use.
    carbon_intensity: gCO2 per kWh.
    price_per_gpu_hour: USD.
    rank_order: innermost axis first.
    num_gpus_choices: the sizes that a plan may choose from; num_gpus is the largest of them until
        `with_num_gpus`.
    """

    gpu: GpuSpec
    num_gpus: Count
    gpus_per_node: Count
    fabric: tuple[FabricLevel, ...]
    power_limit_watts: Watts
    reserved_memory_bytes: ReservedBytes = 0.0
    memory_fraction: Fraction = DEFAULT_MEMORY_FRACTION
    host_memory_bytes: MemoryBytes
    pcie_bandwidth_bytes_per_second: BytesPerSecond
    storage_bandwidth_bytes_per_second: BytesPerSecond
    mtbf_gpu_hours: PositiveNumber
    price_per_gpu_hour: NonNegativeNumber
    carbon_intensity: NonNegativeNumber = DEFAULT_CARBON_INTENSITY
    rank_order: tuple[str, ...] = RANK_ORDER
    num_gpus_choices: tuple[int, ...]
    request: ClusterRequest = Field(repr=False, exclude=True)

    @property
    def num_nodes(self) -> int:
        """Hosts; a job smaller than a node counts as one."""
        return self.num_gpus // self.gpus_per_node

    @property
    def usable_memory_bytes(self) -> float:
        """Device bytes that a plan may use on each GPU.

        memory_fraction x capacity - reserved_memory.
        """
        return self.memory_fraction * self.gpu.memory_bytes - self.reserved_memory_bytes

    @property
    def card_memory_bytes(self) -> float:
        """Device bytes of all of each GPU: capacity - reserved_memory."""
        return self.gpu.memory_bytes - self.reserved_memory_bytes

    def with_num_gpus(self, num_gpus: int) -> "ClusterSpec":
        """The same request with another number of GPUs.

        Fabric, node size and defaults are resolved again. Raises SpecError where this many GPUs do
        not fill whole nodes or groups of the fabric.
        """
        try:
            return resolve(self.request, self.gpu, whole_number(num_gpus), "cluster")
        except ValueError as error:
            rule, _, remedy = str(error).partition("; ")
            raise SpecError(Fault("cluster.num_gpus", num_gpus, rule, remedy)) from None


def resolve(request: ClusterRequest, gpu: GpuSpec, num_gpus: int, field: str) -> ClusterSpec:
    """The complete cluster of one size.

    Raises SpecError where sizes do not divide, or where reservations leave no memory.
    """
    typed = request.gpus_per_node or gpu.gpus_per_host
    per_node = min(typed, num_gpus)
    if num_gpus % per_node:
        near = sorted({per_node * (num_gpus // per_node), per_node * (num_gpus // per_node + 1)})
        divisor = max(size for size in range(1, per_node + 1) if num_gpus % size == 0)
        remedy = f"use {near[0]} or {counted(near[1], 'GPU')}, or gpus_per_node: {divisor}"
        raise SpecError(
            Fault(
                f"{field}.num_gpus",
                num_gpus,
                f"must fill whole nodes of {counted(per_node, 'GPU')}",
                remedy,
            )
        )
    spec = ClusterSpec(
        gpu=gpu,
        num_gpus=num_gpus,
        gpus_per_node=per_node,
        fabric=_Fabric(gpu, per_node, num_gpus, f"{field}.fabric").levels(request.fabric),
        power_limit_watts=request.power_limit or gpu.power_limit_watts,
        reserved_memory_bytes=request.reserved_memory,
        memory_fraction=request.memory_fraction,
        host_memory_bytes=request.host_memory or gpu.host_memory_bytes_per_gpu * per_node,
        pcie_bandwidth_bytes_per_second=request.pcie_bandwidth
        or gpu.pcie_bandwidth_bytes_per_second,
        storage_bandwidth_bytes_per_second=request.storage_bandwidth
        or STORAGE_BYTES_PER_SECOND_PER_GPU * num_gpus,
        mtbf_gpu_hours=request.mtbf_gpu_hours or gpu.mtbf_gpu_hours,
        price_per_gpu_hour=gpu.price_per_gpu_hour
        if request.price_per_gpu_hour is None
        else request.price_per_gpu_hour,
        carbon_intensity=request.carbon_intensity,
        rank_order=request.rank_order,
        num_gpus_choices=request.num_gpus,
        request=request,
    )
    if spec.usable_memory_bytes <= 0:
        rule = f"leaves nothing of {format_bytes(request.memory_fraction * gpu.memory_bytes)}"
        raise SpecError(
            Fault(
                f"{field}.reserved_memory",
                request.reserved_memory,
                rule,
                "reserve less, for example 2 GiB",
            )
        )
    return spec


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


class _Fabric:
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
        fitting = (
            part
            for part in range(size, self.per_node - 1, -1)
            if self.num_gpus % part == 0 and part % self.per_node == 0
        )
        return next(fitting, self.per_node)

    def _sized(self, typed: Sequence[LevelRequest]) -> list[_Sized]:
        last, sized = len(typed) - 1, []
        for index, level in enumerate(typed):
            size = level.gpus
            if (
                size is not None
                and index == 0
                and self.gpu.scale_up.spans_nodes
                and size > self.per_node
            ):
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
            if not reaches_all and (
                outer.gpus < inner.gpus or (both_typed and outer.gpus == inner.gpus)
            ):
                rule = f"must join more GPUs than the level inside it ({inner.gpus})"
                self._fault(
                    outer.place, "gpus", outer.gpus, rule, "write levels from inner to outer"
                )
            elif not reaches_all and outer.gpus % inner.gpus:
                rule = f"must be a multiple of the level inside it ({inner.gpus})"
                self._fault(
                    outer.place,
                    "gpus",
                    outer.gpus,
                    rule,
                    f"use {inner.gpus * max(2, outer.gpus // inner.gpus)}",
                )
        for level in sized:
            if level.gpus < self.num_gpus and self.num_gpus % level.gpus:
                rule = f"does not divide {counted(self.num_gpus, 'GPU')}"
                divisor = max(size for size in range(1, level.gpus) if self.num_gpus % size == 0)
                self._fault(
                    level.place,
                    "gpus",
                    level.gpus,
                    rule,
                    f"use {divisor}, or a multiple of {counted(level.gpus, 'GPU')}",
                )

    def _complete(self, level: _Sized, inner: int, num_typed: int) -> FabricLevel:
        request = level.request
        reach = self.gpu.scale_up.gpus if level.place == 0 and num_typed > 1 else 0
        scale_up = level.gpus <= max(self.domain, reach)
        default: ScaleOut = self.gpu.scale_up if scale_up else self.gpu.scale_out
        topology = request.topology or ("torus" if request.shape else default.topology)
        outermost = (
            "inter-node" if level.gpus == self.num_gpus and level.place else f"level-{level.place}"
        )
        name = (
            "intra-node" if level.gpus <= self.per_node else "scale-up" if scale_up else outermost
        )
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
        usual = self.gpu.scale_up.peer_memory
        if scale_up and request.bandwidth is None and usual is not None:
            return usual
        bandwidth = (
            self.gpu.scale_up.bandwidth_bytes_per_second
            if request.bandwidth is None
            else request.bandwidth
        )
        return scale_up and bandwidth > self.gpu.pcie_bandwidth_bytes_per_second

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
            self._fault(
                level.place, "shape", list(shape), f"means nothing for topology {topology}", remedy
            )
        elif math.prod(shape) not in (points, level.gpus):
            remedy = f"use for example {list(balanced_shape(points, len(shape)))}"
            self._fault(
                level.place,
                "shape",
                list(shape),
                f"has {math.prod(shape)} points, the level joins {points}",
                remedy,
            )
        return shape

    def _fault(self, index: int, key: str, value: object, rule: str, remedy: str) -> None:
        self.faults.append(Fault(f"{self.field}.{index}.{key}", value, rule, remedy))
