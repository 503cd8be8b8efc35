"""GPU families: whose kernels are known, who makes them, how their silicon clocks with power."""

from collections.abc import Mapping
from dataclasses import dataclass

# Family whose kernels were timed, or judged under its name -> its row of curves in
# `cost.profile.KERNELS`. Other families are priced with the curves of a similar one.
KERNEL_ROWS: Mapping[str, str] = {
    "volta": "volta", "ampere": "ampere", "hopper": "hopper", "blackwell": "blackwell",
    "ada": "ada", "rtx-blackwell": "rtx-blackwell",
    "cdna2": "cdna", "cdna3": "cdna", "cdna4": "cdna4", "tpu": "tpu", "cpu": "cpu",
}  # fmt: skip
KNOWN_FAMILIES = tuple(sorted(KERNEL_ROWS))
# Who makes the GPUs of a row. An inline GPU that names its family need not name its vendor, and
# must not name another.
_MAKERS: Mapping[str, str] = {"cdna": "amd", "cdna4": "amd", "tpu": "google", "cpu": "cpu"}
VENDORS: Mapping[str, str] = {
    family: _MAKERS.get(row, "nvidia") for family, row in KERNEL_ROWS.items()
}
# The row for a family that nobody timed: by vendor, the newest whose units the GPU has too ("" fits
# every GPU). Judgement.
STAND_INS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "nvidia": (("fp4", "blackwell"), ("fp8", "hopper"), ("bf16", "ampere"), ("", "volta")),
    "amd": (("fp4", "cdna4"), ("", "cdna")), "google": (("", "tpu"),), "cpu": (("", "cpu"),),
}  # fmt: skip
# What a board draws besides the clocked units (memory, links, leakage), over the limit of the
# product that was timed: idle and streaming loads of an H100 draw 120 to 200 of 700 W. Judgement.
STATIC_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Silicon:
    """Power of one family's chip: the reference product whose kernels were timed.

    peak_flops_per_second, clock_hz: its dense 16-bit peak, and the clock of that peak.
    timed_power_watts: the board limit of the product that was timed.
    full_power_watts: board power at which dense 16-bit GEMMs would hold that clock.
    power_exponent: x in clock = ((power - static) / (full power - static))^x. Dynamic power goes
        with f V^2, so x lies between 1/3 (voltage follows the clock) and 1 (it stays).
    """

    peak_flops_per_second: float
    clock_hz: float
    timed_power_watts: float
    full_power_watts: float
    power_exponent: float
    source: str

    def static_share(self, clock_hz: float) -> float:
        """Power that a product draws whatever its clock, over its nominal power."""
        return STATIC_SHARE * self.timed_power_watts / self._unit_watts(clock_hz)

    def nominal_power_watts(self, peak_flops_per_second: float, clock_hz: float) -> float:
        """Board power at which a product of this silicon holds its own peak.

        P = units x (static + (full - static) x clock^(1 / x)), over the reference's
        units: peak over clock.
        So what a throttled product sustains depends on its limit and its units, whatever clock its
        datasheet names.
        """
        units = peak_flops_per_second / self.peak_flops_per_second * self.clock_hz / clock_hz
        return units * self._unit_watts(clock_hz)

    def _unit_watts(self, clock_hz: float) -> float:
        """Board power of as many units as the reference has, at this clock."""
        static = STATIC_SHARE * self.timed_power_watts
        faster = float((clock_hz / self.clock_hz) ** (1.0 / self.power_exponent))
        return static + (self.full_power_watts - static) * faster

    @property
    def timed_power(self) -> float:
        """Dynamic power of the timed product at its limit, over that at full clock."""
        static = STATIC_SHARE * self.timed_power_watts
        return (self.timed_power_watts - static) / (self.full_power_watts - static)


# The share of the clock that the timed product holds gives full power, a pair of products x.
# A large GEMM reaches up to 94% of what the clock allows (AMD, Measuring Max-Achievable FLOPs,
# part 2); what is missing beyond that is clock.
SILICON: Mapping[str, Silicon] = {
    "volta": Silicon(
        peak_flops_per_second=125e12, clock_hz=1.53e9, timed_power_watts=300.0,
        full_power_watts=300.0, power_exponent=0.53,
        source="judgement: cuBLAS on V100 SXM2 holds its boost clock",
    ),
    "ampere": Silicon(
        peak_flops_per_second=312e12, clock_hz=1.41e9, timed_power_watts=400.0,
        full_power_watts=400.0, power_exponent=0.53,
        source="micro.csv: large GEMMs reach 0.93 of the peak on A100 SXM (400 W) and 0.76 on A100 "
        "PCIe (300 W): 0.69^0.53 = 0.82",
    ),
    "ada": Silicon(
        peak_flops_per_second=362e12, clock_hz=2.52e9, timed_power_watts=450.0,
        full_power_watts=450.0, power_exponent=0.53,
        source="judgement: AD102 with all matrix units at full rate draws the 450 W of its largest "
        "board; L40S (350 W) and L4 (72 W) hold less than their boost clock",
    ),
    "hopper": Silicon(
        peak_flops_per_second=989.4e12, clock_hz=1.83e9, timed_power_watts=700.0,
        full_power_watts=800.0, power_exponent=0.53,
        source="x: 0.79 of the clock at 500 W (training runs on the 96 GB HBM2e part); full power: "
        "0.85 of the peak in micro.csv over 0.94; GH200 (900 W) is 4% above H100 in its best shape",
    ),
    "blackwell": Silicon(
        peak_flops_per_second=2250e12, clock_hz=1.855e9, timed_power_watts=1000.0,
        full_power_watts=1500.0, power_exponent=0.36,
        source="micro.csv: B200 falls from 0.85 of the peak in short GEMMs to 0.63 in long ones; "
        "x: the same mid-sized GEMMs are 1.10 times as fast on GB200 (1,200 W, 3% more units)",
    ),
    "rtx-blackwell": Silicon(
        peak_flops_per_second=503.8e12, clock_hz=2.617e9, timed_power_watts=600.0,
        full_power_watts=600.0, power_exponent=0.53,
        source="judgement: GB202 holds its boost clock at 600 W",
    ),
    "cdna2": Silicon(
        peak_flops_per_second=191.5e12, clock_hz=1.7e9, timed_power_watts=280.0,
        full_power_watts=370.0, power_exponent=0.46,
        source="judgement: one die of an MI250X reaches three quarters of its peak; priced with "
        "the kernels of CDNA3",
    ),
    "cdna3": Silicon(
        peak_flops_per_second=1307.4e12, clock_hz=2.1e9, timed_power_watts=750.0,
        full_power_watts=2000.0, power_exponent=0.46,
        source="micro.csv: best shape 668 TFLOP/s on MI300X (750 W), 785 on MI325X (1,000 W, same "
        "chip): x = ln 1.175 / ln (850 / 600); full power: 668 of 1307 over 0.94 is 0.54 of the "
        "clock, and 0.59 with the shapes in between",
    ),
    "cdna4": Silicon(
        peak_flops_per_second=2516.6e12, clock_hz=2.4e9, timed_power_watts=1400.0,
        full_power_watts=2800.0, power_exponent=0.46,
        source="x: as CDNA3; full power: micro.csv's 1,565 of 2,517 TFLOP/s on MI355X over 0.94 is "
        "0.66 of the clock",
    ),
}  # fmt: skip
