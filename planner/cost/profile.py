"""The profile: every number of the cost model that calibration may move, with its prior and the reason for it.

A share is of a datasheet peak. Entries are per GPU family where kernels differ, per trainer where software does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.specs.gpu import GpuSpec

CALIBRATION_ID = "prior-2026-11"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """How close one GPU family comes to its datasheet.

    gemm: share of the dense peak that a large GEMM reaches, by recipe key.  gemm_half_depth: K at which a GEMM reaches
    half of that, by recipe key.  attention_forward / _backward: share of the bf16 peak of flash attention at long context.
    attention_half_context: tokens of context at which it reaches half.  memory: share of the memory bandwidth.
    """

    gemm: Mapping[str, float]
    gemm_half_depth: Mapping[str, float]
    attention_forward: float
    attention_backward: float
    attention_half_context: float
    memory: float
    source: str


# Judgement informed by shared micro-measurements; `benchmarks/fit_kernels.py` prints the fit behind each figure.
KERNELS: Mapping[str, KernelProfile] = {
    "volta": KernelProfile(
        gemm={"gemm_bf16": 0.72}, gemm_half_depth={"gemm_bf16": 180}, attention_forward=0.35, attention_backward=0.28,
        attention_half_context=400, memory=0.80, source="judgement: cuBLAS fp16 on V100 reaches 90 of 125 TFLOP/s",
    ),
    "ampere": KernelProfile(
        gemm={"gemm_bf16": 0.87}, gemm_half_depth={"gemm_bf16": 260}, attention_forward=0.66, attention_backward=0.56,
        attention_half_context=350, memory=0.82, source="micro.csv A100 GEMM bf16 and FlashAttention-2 rows",
    ),
    "hopper": KernelProfile(
        gemm={"gemm_bf16": 0.76, "gemm_fp8": 0.66, "gemm_fp8_rowwise": 0.55},
        gemm_half_depth={"gemm_bf16": 260, "gemm_fp8": 700, "gemm_fp8_rowwise": 800},
        attention_forward=0.60, attention_backward=0.48, attention_half_context=500, memory=0.82,
        source="micro.csv H100 GEMM bf16, fp8 and attention rows",
    ),
    "blackwell": KernelProfile(
        gemm={"gemm_bf16": 0.69, "gemm_fp8": 0.60, "gemm_fp8_rowwise": 0.52, "gemm_fp4": 0.45},
        gemm_half_depth={"gemm_bf16": 350, "gemm_fp8": 1200, "gemm_fp8_rowwise": 1300, "gemm_fp4": 2500},
        attention_forward=0.50, attention_backward=0.40, attention_half_context=900, memory=0.75,
        source="micro.csv B200 GEMM bf16, fp8, nvfp4 and attention rows",
    ),
    "ada": KernelProfile(
        gemm={"gemm_bf16": 0.80, "gemm_fp8": 0.70, "gemm_fp8_rowwise": 0.60},
        gemm_half_depth={"gemm_bf16": 200, "gemm_fp8": 500, "gemm_fp8_rowwise": 600},
        attention_forward=0.55, attention_backward=0.45, attention_half_context=350, memory=0.85, source="judgement: like Ampere",
    ),
    "cdna": KernelProfile(
        gemm={"gemm_bf16": 0.52, "gemm_fp8": 0.42, "gemm_fp8_rowwise": 0.38},
        gemm_half_depth={"gemm_bf16": 500, "gemm_fp8": 1000, "gemm_fp8_rowwise": 1100},
        attention_forward=0.38, attention_backward=0.28, attention_half_context=800, memory=0.75,
        source="micro.csv MI300X, MI325X, MI355X achievable GEMM rows",
    ),
    "tpu": KernelProfile(
        gemm={"gemm_bf16": 0.80, "gemm_fp8": 0.75, "gemm_fp8_rowwise": 0.70},
        gemm_half_depth={"gemm_bf16": 250, "gemm_fp8": 400, "gemm_fp8_rowwise": 400},
        attention_forward=0.50, attention_backward=0.42, attention_half_context=500, memory=0.85, source="judgement: XLA on large matmuls",
    ),
    "cpu": KernelProfile(
        gemm={"gemm_bf16": 0.50}, gemm_half_depth={"gemm_bf16": 64}, attention_forward=0.25, attention_backward=0.20,
        attention_half_context=64, memory=0.50, source="judgement",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One trainer's software on any GPU: factors of order one, seconds and shares. All are priors until calibrated.

    compute: speed of its kernels against the micro-measured ones.  elementwise: traffic of memory-bound ops against counted.
    launch_seconds: CPU time to launch one kernel, eager;  compiled_launch_seconds: under torch.compile.
    intra_node / inter_node: share of a link's bandwidth that a large collective reaches.  nvls_gain: all-reduce in the switch.
    overlap_slowdown: compute seconds lost per second of hidden communication.  tp_hidden: share of TP communication that
    hides without async TP;  async_tp_hidden: with it;  ep_hidden, cp_hidden, pp_hidden likewise.  dp_hidden: share of the
    backward pass under which gradient reduction can hide.  fixed_step_seconds: data loading, logging, synchronisation.
    fragmentation: reserved over allocated memory, minus one;  fragmentation_expandable: with expandable segments.
    communicator_bytes: NCCL buffers a process group keeps.  time_sd, memory_sd: standard deviation of the logarithm of
    measured over predicted, on runs that the profile was not fitted to.
    """

    compute: float = 0.93
    elementwise: float = 1.0
    launch_seconds: float = 7e-6
    compiled_launch_seconds: float = 4e-6
    intra_node: float = 0.80
    inter_node: float = 0.85
    nvls_gain: float = 1.30
    collective_seconds: float = 12e-6
    overlap_slowdown: float = 0.12
    tp_hidden: float = 0.0
    async_tp_hidden: float = 0.65
    ep_hidden: float = 0.0
    cp_hidden: float = 0.8
    dp_hidden: float = 0.85
    fixed_step_seconds: float = 0.01
    power_exponent: float = 0.70
    unaligned_head_slowdown: float = 7.0
    fragmentation: float = 0.06
    fragmentation_expandable: float = 0.08
    communicator_bytes: float = 256 * 2.0**20
    workspace_bytes: float = 96 * 2.0**20
    time_sd: float = 0.15
    memory_sd: float = 0.08
    source: str = "judgement"
    basis: Mapping[str, str] = field(default_factory=lambda: {"compute": "interpolated", "communication": "datasheet", "memory": "datasheet"})


PROFILES: Mapping[str, Profile] = {
    "torchtitan": Profile(),
    "megatron": Profile(tp_hidden=0.45, compute=0.95, launch_seconds=6e-6, fixed_step_seconds=0.02),
    "megatron-deepspeed": Profile(compute=0.80, elementwise=1.3, tp_hidden=0.0, dp_hidden=0.0, fixed_step_seconds=0.1),
    "fsdp": Profile(compute=0.95, elementwise=1.0, fixed_step_seconds=0.02),
    "internevo": Profile(compute=0.92, tp_hidden=0.0, dp_hidden=0.7),
}


def kernel_profile(gpu: GpuSpec) -> KernelProfile:
    """The family's kernels; a family not listed is priced like the nearest one named here, and its basis says extrapolated."""
    return KERNELS.get(gpu.family) or next((KERNELS[key] for key in KERNELS if gpu.family.startswith(key)), KERNELS["ampere"])
