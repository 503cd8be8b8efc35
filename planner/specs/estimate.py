"""An estimate: the contract's section 3, field by field. SI units, in the names."""

import math
from statistics import NormalDist
from typing import Any, Literal

from planner.specs.validation import Value

Basis = Literal["datasheet", "calibrated", "interpolated", "extrapolated", "measured"]
OOM_LIMIT = 0.05  # the largest P(out of memory) of a layout that fits
COMMUNICATION_AXES = ("tp", "cp", "ep", "pp", "fsdp", "dp")


class Violation(Value):
    """A rule of the trainer, model or cluster that this layout breaks."""

    field: str
    value: Any
    rule: str
    remedy: str


class Interval(Value):
    """Central, equal-tailed intervals [low, high] for the median step of one run."""

    coverage: float
    step_seconds: tuple[float, float]
    peak_allocated_bytes: tuple[float, float]
    peak_reserved_bytes: tuple[float, float]


class StageMemory(Value):
    """Peak memory of one pipeline stage's rank, and its parts in the phase that peaks.

    The parts sum to peak_allocated + fragmentation.
    """

    peak_allocated_bytes: float
    peak_reserved_bytes: float
    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    logits_bytes: float
    communication_buffers_bytes: float
    workspace_bytes: float
    fragmentation_bytes: float


class Memory(Value):
    """Memory of every pipeline rank; worst_stage indexes `stages`."""

    worst_stage: int
    stages: list[StageMemory]


class TimeBreakdown(Value):
    """Seconds of the rank on the critical path; sums to step_seconds.

    straggler_seconds: waits for the slowest rank.
    launch_seconds: the device idles because launches take longer than kernels.
    host_wait_seconds: it idles because the host waited for it, and refills its queue.
    They have a default for estimates stored before they were parts.
    """

    compute_seconds: float
    launch_seconds: float = 0.0
    host_wait_seconds: float = 0.0
    exposed_communication_seconds: dict[str, float]
    bubble_seconds: float
    recompute_seconds: float
    optimizer_seconds: float
    straggler_seconds: float = 0.0
    other_seconds: float

    @property
    def host_seconds(self) -> float:
        """Seconds that the host adds to the device's time."""
        return self.launch_seconds + self.host_wait_seconds

    def total(self) -> float:
        parts = self.model_dump()
        return float(sum(parts.pop("exposed_communication_seconds").values()) + sum(parts.values()))


class CommunicationRow(Value):
    """One kind of collective of a step, of the rank on the critical path.

    dimension: of parallelism. fsdp gathers and scatters shards, dp reduces over replicas.
    group_size: ranks of one group. level: the outermost level of the fabric that it crosses.
    algorithm: the library's fastest, or whose kernels do it (deepep).
    per_step: how many; the backward's and those that recomputation repeats count too. A layer's
        share where not every layer repeats it.
    message_bytes: of one; the whole buffer that is gathered, reduced or scattered, and for
        all-to-all what one rank sends.
    volume_bytes: what one rank sends of all of them.
    seconds: of all of them alone. exposed_seconds: what the step waits for them, which adds up by
        dimension to `exposed_communication_seconds`; compute that they slow down, and FSDP's copies
        over PCIe, are among it.
    """

    dimension: Literal["tp", "cp", "ep", "pp", "fsdp", "dp", "embedding"]
    operation: Literal[
        "all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "send"
    ]
    group_size: int
    level: str
    algorithm: str
    per_step: float
    message_bytes: float
    volume_bytes: float
    seconds: float
    exposed_seconds: float


class LearnedFactor(Value):
    """Factor learned from one's own runs of this stack.

    runs: own runs in this number format, dense or with experts as asked.
    runs_alike: own runs of the same trainer and GPU otherwise; they count by part.
    factor: of the step's seconds to those that the calibration that ships predicts.
    statement: the same for people, such as "calibrated by 1 run of yours: x1.08".
    stale_runs: older ones that are left out, because a sweep found that step times have changed;
        stale_since: when, ISO 8601.
    """

    runs: int
    runs_alike: int
    factor: float
    statement: str
    stale_runs: int = 0
    stale_since: str | None = None


class Estimate(Value):
    """One answer. Where `valid` is false, the numbers are null and `violations` says why.

    oom_probability, fits: that what the allocator cannot give back, device_bytes less
        reclaimable_bytes, is more than a plan may use of the GPU; fits up to 5%.
    reclaimable_bytes: cached blocks and fragments that the allocator gives back to the device
        before it runs out of memory.
    oom_probability_full_card: of all of it, without the share that `memory_fraction` keeps free.
    mfu: TorchTitan's count over the dense bf16 peak in every format: attention in full, so windows
        (and products in 8 or 4 bits) may take it over 1.
    hfu: work that the hardware does over the same peak: causal and windowed attention, the head,
        and all that checkpointing recomputes.
    moe_imbalance: load of the busiest expert rank over the mean that the numbers take, stated
        (`training.moe_imbalance`) or predicted; None where experts are not spread over ranks.
    communication: by dimension, what the layout communicates. All-reduces of a few bytes (gradient
        norm, scales of float8) and the exchange of Muon are in the optimizer's time instead.
    learned: null unless the calibration has seen a run of one's own of this trainer and GPU.
    warnings: what the numbers assume for lack of data.
    unsupported: what keeps the trainer from running this job with any layout (model, vendor,
        optimizer); the numbers then say what the hardware could do.
    """

    id: str | int | None = None
    valid: bool
    violations: list[Violation]
    unsupported: list[Violation] = []
    fits: bool | None = None
    oom_probability: float | None = None
    oom_probability_full_card: float | None = None
    step_seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_allocated_bytes: float | None = None
    peak_reserved_bytes: float | None = None
    device_bytes: float | None = None
    reclaimable_bytes: float | None = None
    usable_bytes: float | None = None
    interval: Interval | None = None
    memory: Memory | None = None
    time: TimeBreakdown | None = None
    communication: list[CommunicationRow] = []
    basis: dict[str, Basis] | None = None
    moe_imbalance: float | None = None
    learned: LearnedFactor | None = None
    warnings: list[str] = []
    model_version: str
    calibration_id: str

    @property
    def time_sd(self) -> float:
        """Standard deviation of the log step time that the interval implies; 0 without one."""
        if self.interval is None:
            return 0.0
        low, high = self.interval.step_seconds
        return math.log(high / low) / (
            2.0 * NormalDist().inv_cdf(0.5 + self.interval.coverage / 2.0)
        )
