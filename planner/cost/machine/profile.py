"""Every number of the cost model that calibration may move, with its prior and the reason for it.

A share is of a datasheet peak. Kernels differ by GPU family, software by trainer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.specs.gpu import GpuSpec
from planner.specs.kernel_families import kernel_family
from planner.trainers.base import TrainerRules
from planner.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """Fused attention: what it reaches of the bf16 peak, by context.

    forward, backward: shares of the peak at long context.
    half_context: the context (tokens) at which half of that is reached.
    """

    forward: float
    backward: float
    half_context: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """How close one GPU family comes to its datasheet.

    gemm: share of the dense peak that a large GEMM reaches, by recipe key.
    gemm_half_depth: K at which a GEMM reaches half of that.
    flash2: FlashAttention-2 as torch's SDPA ships it.
    vendor: the vendor's own kernel (cuDNN, Transformer Engine).
    memory: share of the memory bandwidth that a streaming kernel reaches.
    rates_sd: standard deviation of the logarithm of these rates, as long as no training run on the
        family was measured.
    """

    gemm: Mapping[str, float]
    gemm_half_depth: Mapping[str, float]
    flash2: AttentionCurve
    vendor: AttentionCurve
    memory: float
    source: str
    rates_sd: float = 0.0


def _curve(forward: float, backward: float, half_context: float) -> AttentionCurve:
    return AttentionCurve(forward=forward, backward=backward, half_context=half_context)


# `benchmarks/fit_kernels.py` prints the fit to published kernel timings behind each figure that
# cites micro.csv.
KERNELS: Mapping[str, KernelProfile] = {
    "volta": KernelProfile(
        gemm={"gemm_bf16": 0.72},
        gemm_half_depth={"gemm_bf16": 180},
        flash2=_curve(0.35, 0.28, 400),
        vendor=_curve(0.35, 0.28, 400),
        memory=0.80,
        source="judgement: cuBLAS fp16 on V100 reaches 90 of 125 TFLOP/s",
        rates_sd=0.15,
    ),
    "ampere": KernelProfile(
        gemm={"gemm_bf16": 0.92},
        gemm_half_depth={"gemm_bf16": 250},
        flash2=_curve(0.66, 0.60, 480),
        vendor=_curve(0.66, 0.60, 480),
        memory=0.82,
        source="micro.csv A100: GEMM bfloat16, FlashAttention-2 forward and backward",
    ),
    "hopper": KernelProfile(
        gemm={
            "gemm_bf16": 0.84,
            "gemm_fp8": 0.80,
            "gemm_fp8_rowwise": 0.68,
            "gemm_fp8_blockwise": 0.68,
        },
        gemm_half_depth={
            "gemm_bf16": 270,
            "gemm_fp8": 450,
            "gemm_fp8_rowwise": 500,
            "gemm_fp8_blockwise": 670,
        },
        flash2=_curve(0.38, 0.335, 500),
        vendor=_curve(0.66, 0.50, 900),
        memory=0.82,
        source="micro.csv H100, H200: GEMM bfloat16, FlashAttention-2 and -3, cuDNN; "
        "fp8: 1.9 times bf16 in training runs (the inference kernels of micro.csv are "
        "slower); fp8_blockwise: micro.csv fp8_block; "
        "backward: judgement",
    ),
    "blackwell": KernelProfile(
        gemm={
            "gemm_bf16": 0.66,
            "gemm_fp8": 0.74,
            "gemm_fp8_rowwise": 0.62,
            "gemm_fp8_blockwise": 0.69,
            "gemm_mxfp8": 0.69,
            "gemm_fp4": 0.60,
        },
        gemm_half_depth={
            "gemm_bf16": 150,
            "gemm_fp8": 500,
            "gemm_fp8_rowwise": 600,
            "gemm_fp8_blockwise": 500,
            "gemm_mxfp8": 500,
            "gemm_fp4": 3300,
        },
        flash2=_curve(0.25, 0.22, 900),
        vendor=_curve(0.60, 0.48, 2000),
        memory=0.70,
        source="micro.csv B200, GB200: GEMM bfloat16 and bf16 (TE), nvfp4, attention; "
        "fp8: 2.3 times bf16 in training runs; mxfp8: 0.93 of fp8, whose kernels take 144, 61 "
        "and 53 us where mxfp8's take 152, 52 and 51 "
        "(pytorch/ao issue 1768), 5 to 9% more on large products (AMD Primus-Turbo pull "
        "request 390); fp8_blockwise runs as mxfp8 "
        "(Transformer Engine, fp8_blockwise_scaling); FlashAttention-2 and backward: judgement",
    ),
    "ada": KernelProfile(
        gemm={"gemm_bf16": 0.80, "gemm_fp8": 0.70, "gemm_fp8_rowwise": 0.60},
        gemm_half_depth={"gemm_bf16": 200, "gemm_fp8": 500, "gemm_fp8_rowwise": 600},
        flash2=_curve(0.55, 0.45, 350),
        vendor=_curve(0.55, 0.45, 350),
        memory=0.85,
        source="judgement: like Ampere",
        rates_sd=0.15,
    ),
    "rtx-blackwell": KernelProfile(
        gemm={
            "gemm_bf16": 0.80,
            "gemm_fp8": 0.70,
            "gemm_fp8_rowwise": 0.60,
            "gemm_fp8_blockwise": 0.60,
        },
        gemm_half_depth={
            "gemm_bf16": 200,
            "gemm_fp8": 500,
            "gemm_fp8_rowwise": 600,
            "gemm_fp8_blockwise": 600,
        },
        flash2=_curve(0.55, 0.45, 350),
        vendor=_curve(0.55, 0.45, 350),
        memory=0.85,
        source="judgement: like Ada, whose matrix instructions it keeps (compute "
        "capability 12.0 has "
        "no tensor memory and no tcgen05)",
        rates_sd=0.2,
    ),
    "cdna": KernelProfile(
        gemm={
            "gemm_bf16": 0.54,
            "gemm_fp8": 0.42,
            "gemm_fp8_rowwise": 0.38,
            "gemm_fp8_blockwise": 0.38,
            "gemm_mxfp8": 0.39,
        },
        gemm_half_depth={
            "gemm_bf16": 500,
            "gemm_fp8": 1000,
            "gemm_fp8_rowwise": 1100,
            "gemm_fp8_blockwise": 1100,
            "gemm_mxfp8": 1000,
        },
        flash2=_curve(0.38, 0.28, 800),
        vendor=_curve(0.42, 0.30, 800),
        memory=0.75,
        source="micro.csv: achievable GEMM of MI300X, MI325X, MI355X; the rest judgement",
        rates_sd=0.15,
    ),
    "tpu": KernelProfile(
        gemm={"gemm_bf16": 0.80},
        gemm_half_depth={"gemm_bf16": 250},
        flash2=_curve(0.50, 0.42, 500),
        vendor=_curve(0.50, 0.42, 500),
        memory=0.85,
        source="judgement: XLA on large matmuls",
        rates_sd=0.25,
    ),
    "cpu": KernelProfile(
        gemm={"gemm_bf16": 0.50},
        gemm_half_depth={"gemm_bf16": 64},
        flash2=_curve(0.25, 0.20, 64),
        vendor=_curve(0.25, 0.20, 64),
        memory=0.50,
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
    vendor_attention: attention is cuDNN's or Transformer Engine's, not FlashAttention-2.
    attention: attention kernels.
    elementwise: measured over counted traffic of memory-bound operations.
    power_exponent: how the clock follows the power limit.
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
    vendor_attention: bool = False
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
    ep_hidden: float = 0.35
    cp_hidden: float = 0.60
    pair_ep_hidden: float = 0.8
    pair_tp_hidden: float = 0.0
    dp_hidden: float = 0.80
    early_step_share: float = 0.02
    fixed_step_seconds: float = 0.02
    straggler_delay: float = 0.0144
    power_exponent: float = 0.70
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
    return Profile(
        vendor_attention=trainer.vendor_attention, memory_extra_sd=trainer.memory_extra_sd
    )


def kernel_profile(gpu: GpuSpec) -> KernelProfile:
    """The kernels that price this GPU, see `kernel_family`."""
    return KERNELS[kernel_family(gpu)]
