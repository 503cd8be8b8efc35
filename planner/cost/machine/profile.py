"""Every number of the cost model that calibration may move, with its prior and the reason for it.

A share is of a datasheet peak. Kernels differ by GPU family, software by trainer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.specs.gpu import GpuSpec
from planner.specs.gpu_families import SILICON
from planner.trainers.base import TrainerRules
from planner.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """Fused attention of one generation: its share of the bf16 peak, by context.

    forward, backward: shares of the peak at long context, with heads of 128.
    half_context: the context (tokens) at which half of that is reached.
    small_heads: e in rate = (head size / 128)^e for smaller heads.
    """

    forward: float
    backward: float
    half_context: float
    small_heads: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedCurve:
    """Grouped GEMM of routed experts: its share of a dense one's rate.

    vendor: share of the dense rate with many rows an expert, Transformer Engine's (one cuBLAS call
        an expert on several streams).
    torch: the same of torch._grouped_mm (one CUTLASS kernel for all experts).
    half_rows: rows an expert at which it reaches half of that.
    """

    vendor: float
    torch: float
    half_rows: float


# between the two that were timed; judgement
USUAL_GROUPED = GroupedCurve(vendor=0.85, torch=0.75, half_rows=60.0)
GROUPED: Mapping[str, GroupedCurve] = {
    # micro.csv A100-PCIe, Transformer Engine; where torch._grouped_mm needs compute capability 9.0,
    # TorchTitan loops over experts with the same cuBLAS calls
    "ampere": GroupedCurve(vendor=0.97, torch=0.97, half_rows=8.0),
    # micro.csv B200, Transformer Engine (SimuMax) and torch._grouped_mm (torchao)
    "blackwell": GroupedCurve(vendor=0.76, torch=0.55, half_rows=150.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """How close one GPU family comes to its datasheet, on the product that was timed.

    gemm: share of the dense peak that a large GEMM reaches, by recipe key.
    gemm_half_depth: K at which a GEMM reaches half of that, by recipe key.
    attention: curves of fused attention by generation (`trainers.attention`); `flash2` stands in
        for one that is left out.
    memory: share of the memory bandwidth that a streaming kernel reaches.
    timed_power: dynamic power of the product that was timed at its limit, over that at which dense
        GEMMs hold its full clock (`specs.gpu_families.SILICON`).
    power_exponent: x in clock = (dynamic power / that at full clock)^x.
    rates_sd: standard deviation of the logarithm of these rates, as long as no training run on the
        family was measured.
    """

    gemm: Mapping[str, float]
    gemm_half_depth: Mapping[str, float]
    attention: Mapping[str, AttentionCurve]
    memory: float
    timed_power: float
    power_exponent: float
    source: str
    rates_sd: float = 0.0

    def relative_clock(self, power: float, activity: float = 1.0) -> float:
        """Compute clock under load, relative to the clock of the timed product.

        clock = min(1, power / activity)^x / min(1, timed power / activity)^x
        power: dynamic power at the board limit, over that at which dense GEMMs hold the product's
            own full clock.
        activity: dynamic power that a kernel draws over a dense GEMM's at one clock.
        GEMMs of every format run at activity 1; memory-bound kernels do not throttle.
        Source: dynamic power follows f V^2; x from pairs of products, see `gpu_families.SILICON`.
        """
        ratio = min(activity, power) / min(activity, self.timed_power)
        return float(ratio**self.power_exponent)

    def attention_curve(self, generation: str) -> AttentionCurve:
        return self.attention.get(generation, self.attention["flash2"])


def _curve(
    forward: float, backward: float, half_context: float, small_heads: float
) -> AttentionCurve:
    return AttentionCurve(
        forward=forward, backward=backward, half_context=half_context, small_heads=small_heads
    )


def _products(**figures: tuple[float, float]) -> dict[str, Any]:
    """Share of the peak and half depth of the products of each recipe key."""
    return {
        "gemm": {key: share for key, (share, _) in figures.items()},
        "gemm_half_depth": {key: depth for key, (_, depth) in figures.items()},
    }


def _power(family: str) -> dict[str, Any]:
    silicon = SILICON[family]
    return {"timed_power": silicon.timed_power, "power_exponent": silicon.power_exponent}


_NO_THROTTLE: Mapping[str, Any] = {"timed_power": 1.0, "power_exponent": 0.7}
# The published low-precision timings of micro.csv are linear layers of inference engines: they
# quantise their input in the same measurement, and some wait for the host. What is left for the
# product alone, which these curves are for, comes from `benchmarks/fit_kernels.py`, which fits
# product, input and host together and prints the figures that cite micro.csv.
KERNELS: Mapping[str, KernelProfile] = {
    "volta": KernelProfile(
        **_products(gemm_bf16=(0.72, 180)),
        attention={"flash2": _curve(0.35, 0.28, 400, 0.14)},
        memory=0.80,
        **_power("volta"),
        source="judgement: cuBLAS fp16 on V100 reaches 90 of 125 TFLOP/s",
        rates_sd=0.15,
    ),
    "ampere": KernelProfile(
        **_products(gemm_bf16=(0.92, 250)),
        attention={
            "flash1": _curve(0.42, 0.33, 480, 0.14),
            "flash2": _curve(0.66, 0.60, 480, 0.14),
            "flex": _curve(0.59, 0.51, 480, 0.14),
            "cudnn": _curve(0.62, 0.54, 300, 0.14),
        },
        memory=0.82,
        **_power("ampere"),
        source="micro.csv A100: GEMM bfloat16, FlashAttention-2 forward and backward; cuDNN: "
        "between A100 PCIe, as fast as FlashAttention-2, and 0.82 of it "
        "(huggingface/transformers pull request 48163); "
        "FlashAttention-1: 1.7 times slower (Dao 2023, figures 5 and 6); FlexAttention: 0.90 and "
        "0.85 of FlashAttention-2 (pytorch.org/blog/flexattention)",
    ),
    "hopper": KernelProfile(
        **_products(
            gemm_bf16=(0.84, 270),
            gemm_fp8=(0.81, 600),
            gemm_fp8_rowwise=(0.75, 500),
            gemm_fp8_blockwise=(0.76, 500),
        ),
        attention={
            "flash1": _curve(0.22, 0.19, 500, 0.18),
            "flash2": _curve(0.36, 0.335, 450, 0.18),
            "flex": _curve(0.38, 0.30, 500, 0.18),
            "flash3": _curve(0.66, 0.52, 1000, 0.36),
            "cudnn": _curve(0.60, 0.50, 450, 0.48),
            "cudnn-9.17": _curve(0.73, 0.61, 1000, 0.48),
        },
        memory=0.82,
        **_power("hopper"),
        source="micro.csv H100, H200: GEMM bfloat16, fp8 and fp8_block, FlashAttention-2 and -3, "
        "cuDNN 9.1 (0.56 causal; 9.15 is faster: judgement), 9.19 in cudnn.csv; rowwise: 0.9 to "
        "1.0 of tensorwise for most shapes, down to 0.5 (pytorch issue 147971); backward of "
        "FlashAttention-3 and cuDNN: Shah et al. 2024, figure 6; FlashAttention-1: 1.7 times "
        "slower than -2 (Dao 2023, figure 7); FlexAttention: pytorch.org/blog/flexattention",
    ),
    "blackwell": KernelProfile(
        **_products(
            gemm_bf16=(0.66, 150),
            gemm_fp8=(0.76, 600),
            gemm_fp8_rowwise=(0.62, 600),
            gemm_fp8_blockwise=(0.70, 600),
            gemm_mxfp8=(0.71, 600),
            gemm_fp4=(0.59, 1500),
        ),
        attention={
            "flash1": _curve(0.13, 0.11, 700, 0.18),
            "flash2": _curve(0.21, 0.18, 700, 0.18),
            "flex": _curve(0.24, 0.20, 900, 0.18),
            "cudnn": _curve(0.60, 0.56, 2000, 0.72),
            "cudnn-9.17": _curve(0.74, 0.61, 1500, 0.72),
        },
        memory=0.70,
        **_power("blackwell"),
        source="micro.csv B200, GB200: GEMM bfloat16 and bf16 (TE), fp8, fp8_block, nvfp4, cuDNN "
        "attention forward and backward, from 9.17 on in cudnn.csv; mxfp8: 0.93 of fp8, whose "
        "kernels take 144, 61 and 53 us where mxfp8's take 152, 52 and 51 "
        "(pytorch/ao issue 1768), 5 to 9% more on large products (AMD Primus-Turbo pull "
        "request 390); FlashAttention-2: 12,211 tokens/s with cuDNN were 10,902 with it "
        "(torchtitan pull request 1196); rowwise, FlashAttention-1, FlexAttention: judgement; "
        "deviation: the two sources of bf16 products differ 1.4 times",
        rates_sd=0.17,
    ),
    "ada": KernelProfile(
        **_products(gemm_bf16=(0.80, 200), gemm_fp8=(0.70, 500), gemm_fp8_rowwise=(0.60, 600)),
        attention={
            "flash1": _curve(0.35, 0.27, 350, 0.14),
            "flash2": _curve(0.55, 0.45, 350, 0.14),
        },
        memory=0.85,
        **_power("ada"),
        source="judgement: like Ampere; cuDNN as FlashAttention-2 (L40S, huggingface/transformers "
        "pull request 48163)",
        rates_sd=0.15,
    ),
    "rtx-blackwell": KernelProfile(
        **_products(
            gemm_bf16=(0.80, 200),
            gemm_fp8=(0.70, 500),
            gemm_fp8_rowwise=(0.60, 600),
            gemm_fp8_blockwise=(0.60, 600),
        ),
        attention={"flash2": _curve(0.55, 0.45, 350, 0.14), "cudnn": _curve(0.48, 0.40, 350, 0.14)},
        memory=0.85,
        **_power("rtx-blackwell"),
        source="judgement: like Ada, whose matrix instructions it keeps (compute "
        "capability 12.0 has "
        "no tensor memory and no tcgen05); cuDNN: 0.88 of FlashAttention-2 (RTX PRO 6000, "
        "huggingface/transformers pull request 48163)",
        rates_sd=0.2,
    ),
    "cdna": KernelProfile(
        **_products(
            gemm_bf16=(0.49, 500),
            gemm_fp8=(0.42, 1000),
            gemm_fp8_rowwise=(0.38, 1100),
            gemm_fp8_blockwise=(0.38, 1100),
        ),
        attention={"flash2": _curve(0.38, 0.28, 800, 0.18), "ck": _curve(0.42, 0.30, 800, 0.18)},
        memory=0.75,
        **_power("cdna3"),
        source="micro.csv: achievable GEMM of MI300X, 0.51 of the peak in its best shape; the rest "
        "judgement",
        rates_sd=0.2,
    ),
    "cdna4": KernelProfile(
        **_products(
            gemm_bf16=(0.60, 400),
            gemm_fp8=(0.57, 600),
            gemm_fp8_rowwise=(0.52, 700),
            gemm_fp8_blockwise=(0.52, 700),
            gemm_mxfp8=(0.53, 600),
            gemm_fp4=(0.44, 1500),
        ),
        attention={"flash2": _curve(0.36, 0.26, 1200, 0.18), "ck": _curve(0.44, 0.34, 1200, 0.18)},
        memory=0.75,
        **_power("cdna4"),
        source="micro.csv: achievable GEMM of MI355X, 0.62 of the peak in its best shape; fp8: "
        "judgement, 1.9 times bf16 as on Hopper; fp4: judgement, of mxfp8's share as much as on "
        "Blackwell; half depth: four matrix cores a unit as on CDNA3 "
        "with twice the local memory, judgement; attention: judgement",
        rates_sd=0.15,
    ),
    "tpu": KernelProfile(
        **_products(gemm_bf16=(0.80, 250)),
        attention={"flash2": _curve(0.50, 0.42, 500, 0.14)},
        memory=0.85,
        **_NO_THROTTLE,
        source="judgement: XLA on large matmuls",
        rates_sd=0.25,
    ),
    "cpu": KernelProfile(
        **_products(gemm_bf16=(0.50, 64)),
        attention={"flash2": _curve(0.25, 0.20, 64, 0.0)},
        memory=0.50,
        **_NO_THROTTLE,
        source="judgement",
        rates_sd=0.5,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One trainer's software on any GPU: factors of order one, seconds and shares.

    The defaults are priors. A calibration replaces those that `cost.machine.knobs` names.

    Speed, relative to the micro-measured kernels:
    compute: matrix kernels.
    low_precision: matrix kernels below 16 bits, besides.
    attention: attention kernels.
    elementwise: measured over counted traffic of memory-bound operations.
    unaligned_head_slowdown: of unfused attention whose head size is no multiple of 8.

    The host:
    launch_seconds: CPU time of one kernel, eager or compiled.
    fused_launch_seconds: CPU time of one fused module (Transformer Engine).
    fixed_step_seconds: data loading, logging and synchronisation of one step.
    straggler_delay: mean delay of a rank, as a share of its work, see `cost.stragglers`.

    Communication, relative to the curves of `cost.network.nccl` (1: as in nccl-tests):
    intra_node, inter_node: speed inside a node and beyond.
    nvls_gain: speed of reductions in the switch.
    collective_seconds: added to the library's own time of a collective.

    Overlap:
    overlap_slowdown: compute seconds lost per second of hidden communication.
    tp_hidden, async_tp_hidden: share hidden of the TP communication that user buffers (or torch's
        async TP) can run under a GEMM, see `cost.layer.tp_hidden`.
    ep_hidden, cp_hidden: share of EP and CP communication that hides.
    pair_ep_hidden, pair_tp_hidden: share of what is left exposed that hides in an overlapped
        forward and backward of two microbatches.
    dp_hidden: share of the backward pass under which gradient reduction can hide.
    early_step_share: share of the backward pass that an optimizer in it costs.

    Memory:
    fragmentation: reserved over allocated memory, minus one, of the memory that comes and goes.
    fragmentation_expandable: the same with expandable segments.
    fragmentation_floor: the same under memory pressure.
    communicator_bytes: NCCL buffers of one process group.
    workspace_bytes: workspace of kernels.
    memory_sd, memory_sd_bytes: the logarithm of measured over predicted peak bytes deviates by
        about sqrt(memory_sd^2 + (memory_sd_bytes / peak)^2) where the peak is much larger.
    memory_extra_sd: deviation on top, for a trainer whose allocator's peaks were never compared.
    """

    compute: float = 0.80
    low_precision: float = 1.0
    attention: float = 1.0
    elementwise: float = 1.0
    launch_seconds: float = 9e-6
    fused_launch_seconds: float = 40e-6
    intra_node: float = 0.95
    inter_node: float = 0.95
    nvls_gain: float = 1.0
    collective_seconds: float = 0.0
    overlap_slowdown: float = 0.12
    tp_hidden: float = 0.65
    async_tp_hidden: float = 0.65
    ep_hidden: float = 0.70
    cp_hidden: float = 0.60
    pair_ep_hidden: float = 0.8
    pair_tp_hidden: float = 0.0
    dp_hidden: float = 0.80
    early_step_share: float = 0.02
    fixed_step_seconds: float = 0.02
    straggler_delay: float = 0.0144
    unaligned_head_slowdown: float = 7.0
    fragmentation: float = 0.10
    fragmentation_expandable: float = 0.02
    fragmentation_floor: float = 0.02
    communicator_bytes: float = 256 * 2.0**20
    workspace_bytes: float = 96 * 2.0**20
    memory_sd: float = 0.05
    memory_sd_bytes: float = 0.5 * GIB
    memory_extra_sd: float = 0.0
    source: str = "judgement"


def software_profile(trainer: TrainerRules) -> Profile:
    """A trainer's profile before calibration, which moves the knobs of `cost.machine.knobs`."""
    return Profile(memory_extra_sd=trainer.memory_extra_sd)


def kernel_profile(gpu: GpuSpec) -> KernelProfile:
    return KERNELS[gpu.kernel_family]
