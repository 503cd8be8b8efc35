"""A whole run in one answer: checkpoints, failures, time to train, price, energy.

SI units, in the names; money in USD.
"""

from typing import Literal

from planner.specs.validation import Value

CheckpointMode = Literal["sync", "async", "async-pinned"]


class CheckpointCost(Value):
    """Cost of one save, and how often it happens.

    given: whether the job stated mode and interval; else the mode is async and the interval the
        best.
    saved_bytes: of the whole job.
    gpu_bytes: of the rank that holds most.
    blocking_seconds: while training stands still.
    upload_seconds: in the background, until the run can restart from the save.
    delay_seconds: how long a save waits for the previous upload.
    host_memory_bytes: staged copies (and offloaded states) on one node, to be compared with
        host_memory_usable_bytes.
    """

    mode: CheckpointMode
    given: bool
    interval_steps: int
    interval_seconds: float
    optimal_interval_steps: int
    saved_bytes: float
    gpu_bytes: float
    blocking_seconds: float
    upload_seconds: float
    delay_seconds: float
    host_memory_bytes: float
    host_memory_usable_bytes: float
    fits_host_memory: bool


class RunEstimate(Value):
    """The run of `tokens` tokens.

    tokens: the job's total_tokens, or 1e12 where it states none (total_tokens is null then).
    goodput: useful time over wall time; with the shares for saving, lost work (done twice) and
        restarting it sums to one.
    tokens_per_second: of the whole job, after goodput.
    cost: USD.
    mtbf_seconds: mean time between interruptions of this job.
    """

    checkpoint: CheckpointCost
    mtbf_seconds: float
    restart_seconds: float
    expected_failures: float
    goodput: float
    saving_share: float
    lost_share: float
    restarting_share: float
    tokens: float
    total_tokens: float | None
    tokens_per_second: float
    time_to_train_seconds: float
    gpu_hours: float
    cost: float
    energy_joules: float
    joules_per_token: float
    mean_watts_per_gpu: float
    co2_grams: float
    warnings: list[str]
    assumptions: list[str]
