"""Abilities of one GPU: peaks, memory, power, and the fabric it is usually sold with.

Every quantity is SI. Peaks are dense (no sparsity). Bandwidth is per GPU and one direction: H100
NVLink, sold as 900 GB/s, is 450 GB/s here. Memory is what the driver reports to a program
(cudaMemGetInfo total), not the label.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AliasChoices, AliasGenerator, BeforeValidator, Field, model_validator

from planner.specs.gpu_families import KERNEL_ROWS, KNOWN_FAMILIES, SILICON, STAND_INS, VENDORS
from planner.specs.validation import Name, Value
from planner.units import (
    EXAMPLES,
    GIB,
    GIGA,
    KIB,
    KILO,
    MEGA,
    MIB,
    PETA,
    TERA,
    TIB,
    parse_quantity,
    to_float,
)

Topology = Literal["switch", "ring", "tree", "mesh", "torus"]
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
MAX_GPUS = int(MEGA)
_SI = {
    "bytes": "B", "bytes_per_second": "B/s", "seconds": "s", "watts": "W", "flops_per_second":
    "FLOP/s",
}  # fmt: skip


def _quantity(kind: str, low: float, high: float, *, zero: bool = False) -> BeforeValidator:
    """Parser of one quantity.

    The range catches a forgotten unit (bandwidth: 400 is 400 bytes per second).
    """

    def parse(value: object) -> float:
        remedy = f"use for example {EXAMPLES[kind]}"
        try:
            number = parse_quantity(value, kind)
        except ValueError as error:
            raise ValueError(f"{error}; {remedy}") from None
        if zero and number == 0:
            return number
        if number <= 0:
            raise ValueError(f"must be {'zero or ' if zero else ''}positive; {remedy}")
        if not low <= number <= high:
            raise ValueError(
                f"must lie between {low:.3g} and {high:.3g} {_SI[kind]}; a bare number is SI, "
                f"{remedy}"
            )
        return number

    return BeforeValidator(parse)


def _number(rule: str, low: float, high: float, *, above_low: bool) -> BeforeValidator:
    def parse(value: object) -> float:
        known = isinstance(value, int | float) and not isinstance(value, bool)
        number = to_float(value) if known else float("nan")  # type: ignore[arg-type]
        if not (low < number <= high if above_low else low <= number <= high):
            raise ValueError(f"must be {rule}; give a number in that range")
        return number

    return BeforeValidator(parse)


def whole_number(value: object) -> int:
    """A count from 1 to a million; raises ValueError("rule; remedy")."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number; write it without quotes, unit or decimals")
    if not 1 <= value <= MAX_GPUS:
        raise ValueError(f"must lie between 1 and {MAX_GPUS}; give a count in that range")
    return value


Count = Annotated[int, BeforeValidator(whole_number)]
MemoryBytes = Annotated[float, _quantity("bytes", MIB, KIB * TIB)]
ReservedBytes = Annotated[float, _quantity("bytes", 1.0, KIB * TIB, zero=True)]
BytesPerSecond = Annotated[float, _quantity("bytes_per_second", MEGA, PETA)]
Seconds = Annotated[float, _quantity("seconds", 1 / GIGA, 1.0, zero=True)]
Watts = Annotated[float, _quantity("watts", 1.0, 100 * KILO)]
FlopsPerSecond = Annotated[float, _quantity("flops_per_second", GIGA, KILO * PETA)]
PositiveNumber = Annotated[float, _number("positive and finite", 0.0, TERA, above_low=True)]
NonNegativeNumber = Annotated[
    float, _number("zero or positive, and finite", 0.0, TERA, above_low=False)
]
Fraction = Annotated[float, _number("above 0 and at most 1", 0.0, 1.0, above_low=True)]
AtLeastOne = Annotated[
    float, _number("at least 1 (1 = full bisection)", 1.0, MEGA, above_low=False)
]


def either(short: str, field: str) -> AliasChoices:
    """The name that a person types, or the field's own name with its unit."""
    return AliasChoices(short, field)


class Frozen(Value, extra="forbid", validate_by_name=True):
    """Base of all cluster records: immutable; an unknown key is an error."""


def _without_units(name: str) -> AliasChoices:
    short = name
    for unit in ("_bytes_per_second", "_per_second", "_bytes", "_seconds", "_watts"):
        short = short.replace(unit, "")
    return either(short, name)


class Typed(Frozen, alias_generator=AliasGenerator(validation_alias=_without_units)):
    """Base of what a person types of a GPU: names without their units are names too."""


class ScaleOut(Typed):
    """The network between nodes that this GPU is usually sold with.

    bandwidth_bytes_per_second: per GPU, one direction.
    latency_seconds: of one step between two GPUs.
    """

    bandwidth_bytes_per_second: BytesPerSecond
    latency_seconds: Seconds
    topology: Topology = "switch"
    source: str = ""


class ScaleUp(ScaleOut):
    """The fabric inside a node (NVLink, Infinity Fabric, PCIe) or a rack (NVL72, TPU pod).

    gpus: largest domain.
    spans_nodes: whether the domain is larger than one host.
    peer_memory: whether GPUs of a domain read and write each other's memory (NVLink, Infinity
        Fabric), as torch's symmetric memory needs. Where it is left out, they do if the fabric is
        faster than PCIe.
    """

    gpus: Count = 8
    spans_nodes: bool = False
    peer_memory: bool | None = None


class GpuSpec(Typed):
    """One accelerator as a rank sees it (of an MI250X: one of its two dies).

    peak_flops_per_second: dense peak by dtype of the GEMM's inputs; a dtype not listed is not
        supported; "fp8" stands for tensorwise, rowwise, blockwise and mxfp8.
    power_limit_watts: default board limit.
    nominal_power_watts: the power at which dense GEMMs hold the peaks; below it their clock drops.
        Where it is left out, that of the family's silicon (`gpu_families.SILICON`), or the board
        limit of a family that is not in the table.
    gpus_per_host: GPUs of one operating system, unless a cluster states its own.
    boost_clock_hz: clock of the datasheet peaks.
    nvls: whether the switch reduces (NVLink SHARP).
    context_bytes: taken by the driver's context before the first tensor.
    mtbf_gpu_hours: mean GPU-hours between interruptions of a job.
    price_per_gpu_hour: USD, a judgement.
    sources: figure -> where it is from.

    Defaults are for a GPU that a user describes inline, and are judgements: PCIe 4.0 x16, 128 GiB
    of host memory per GPU, half a GiB of context, 50,000 GPU-hours (Llama 3 paper, section 3.3.4:
    419 interruptions in 54 days on 16,384 H100), 2 USD.
    """

    name: Name = "custom"
    aliases: tuple[str, ...] = ()
    vendor: Literal["nvidia", "amd", "google", "cpu"] = "nvidia"
    family: str = "custom"
    memory_bytes: MemoryBytes
    memory_bandwidth_bytes_per_second: BytesPerSecond
    peak_flops_per_second: Mapping[str, FlopsPerSecond]
    power_limit_watts: Watts
    nominal_power_watts: Watts = 0.0
    num_sms: Count
    gpus_per_host: Count = 8
    boost_clock_hz: PositiveNumber | None = None
    scale_up: ScaleUp
    scale_out: ScaleOut
    pcie_bandwidth_bytes_per_second: BytesPerSecond = 32 * GIGA
    host_memory_bytes_per_gpu: MemoryBytes = float(128 * GIB)
    nvls: bool = False
    context_bytes: ReservedBytes = 0.5 * GIB
    mtbf_gpu_hours: PositiveNumber = 50_000.0
    price_per_gpu_hour: NonNegativeNumber = 2.0
    sources: Mapping[str, str] = Field(default_factory=dict)
    notes: str = ""

    @model_validator(mode="before")
    @classmethod
    def _vendor_of_the_family(cls, given: object) -> object:
        """Fills in the vendor of a known family."""
        if isinstance(given, Mapping) and (vendor := VENDORS.get(str(given.get("family")))):
            return {"vendor": vendor, **given}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> "GpuSpec":
        """Checks the vendor and the dtypes, and fills in the power at which its peaks hold."""
        vendor = VENDORS.get(self.family, self.vendor)
        if vendor != self.vendor:
            raise ValueError(
                f"has family {self.family}, which is {vendor}'s, and vendor {self.vendor}; set "
                f"vendor to {vendor}"
            )
        if not self.nominal_power_watts:
            silicon = SILICON.get(self.family)
            nominal = self.power_limit_watts
            if silicon is not None and self.dense_peak:
                clock = self.boost_clock_hz or silicon.clock_hz
                nominal = silicon.nominal_power_watts(self.dense_peak, clock)
            object.__setattr__(self, "nominal_power_watts", nominal)
        unknown = sorted(set(self.peak_flops_per_second) - set(DTYPES))
        if unknown or not self.peak_flops_per_second:
            raise ValueError(
                f"peak_flops names {', '.join(unknown) or 'no dtype'}; use {', '.join(DTYPES)}"
            )
        return self

    @property
    def dense_peak(self) -> float | None:
        """FLOP/s of bf16, or of fp16 on a GPU without bf16."""
        peaks = self.peak_flops_per_second
        return peaks.get("bf16") or peaks.get("fp16")

    @property
    def kernel_family(self) -> str:
        """The row of `cost.profile.KERNELS` that prices this GPU.

        An unknown family gets the row whose name it continues ("cdna5"), else the vendor's newest
        with the same units.
        """
        if self.family in KERNEL_ROWS:
            return KERNEL_ROWS[self.family]
        continued = [row for row in KERNEL_ROWS.values() if self.family.startswith(row)]
        fitting = (
            row
            for dtype, row in STAND_INS[self.vendor]
            if not dtype or dtype in self.peak_flops_per_second
        )
        return continued[0] if continued else next(fitting)

    @property
    def unknown_family(self) -> str:
        """The warning for a GPU of an unknown family; empty for a known one."""
        if self.family in KERNEL_ROWS:
            return ""
        named = f"family {self.family!r} of GPU {self.name} is unknown"
        if self.family == type(self).model_fields["family"].default:
            named = f"no family is given for GPU {self.name}"
        if "vendor" not in self.model_fields_set:
            named += f", taken for one of {self.vendor}'s as no vendor is given"
        return (
            f"{named}: priced with the kernel curves of {self.kernel_family} and generic "
            "communication curves, intervals widened; "
            f"known families: {', '.join(KNOWN_FAMILIES)}; `planner-cli calibrate` times its "
            "kernels"
        )

    def __hash__(self) -> int:
        peaks = tuple(sorted(self.peak_flops_per_second.items()))
        return hash((self.name, self.memory_bytes, self.power_limit_watts, peaks))
