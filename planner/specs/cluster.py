"""The machine: how many GPUs of which kind, with defaults filled in; `fabric` joins them."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from planner.errors import fault
from planner.specs.fabric import FabricLevel, FabricLevels, LevelRequest
from planner.specs.gpu import (
    BytesPerSecond,
    Count,
    Fraction,
    Frozen,
    GpuSpec,
    MemoryBytes,
    NonNegativeNumber,
    PositiveNumber,
    ReservedBytes,
    Watts,
    whole_number,
)
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
        ends = (low, high) if dots else (low,)
        if not value.isascii() or not all(end.strip().isdigit() for end in ends):
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
        """Request with another number of GPUs.

        Fabric, node size and defaults are resolved again. Raises SpecError where this many GPUs do
        not fill whole nodes or groups of the fabric.
        """
        try:
            return resolve(self.request, self.gpu, whole_number(num_gpus), "cluster")
        except ValueError as error:
            rule, _, remedy = str(error).partition("; ")
            raise fault("cluster.num_gpus", num_gpus, rule, remedy) from None


def resolve(request: ClusterRequest, gpu: GpuSpec, num_gpus: int, field: str) -> ClusterSpec:
    """The complete cluster of one size.

    Raises SpecError where sizes do not divide, or where reservations leave no memory.
    """
    per_node = min(request.gpus_per_node or gpu.gpus_per_host, num_gpus)
    if num_gpus % per_node:
        near = sorted({per_node * (num_gpus // per_node), per_node * (num_gpus // per_node + 1)})
        smaller = [n for n in (2, 4, 8, 16) if n <= per_node and num_gpus % n == 0][-1:]
        rule = f"must fill whole nodes of {counted(per_node, 'GPU')}"
        other = "".join(f", or gpus_per_node: {size}" for size in smaller)
        remedy = f"use {near[0]} or {counted(near[1], 'GPU')}{other}"
        raise fault(f"{field}.num_gpus", num_gpus, rule, remedy)
    spec = ClusterSpec(
        gpu=gpu,
        num_gpus=num_gpus,
        gpus_per_node=per_node,
        fabric=FabricLevels(gpu, per_node, num_gpus, f"{field}.fabric").levels(request.fabric),
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
        asked, remedy = request.reserved_memory, "reserve less, for example 2 GiB"
        raise fault(f"{field}.reserved_memory", asked, rule, remedy)
    return spec
