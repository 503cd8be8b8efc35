"""Emulates ranks of a large layout one at a time: which ranks to run, and how to combine them.

Compute and memory of a rank are measured. Waiting times come from the cost model, and are labelled
as such: exposed communication, and the pipeline bubble in proportion to the measured compute.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from planner.estimates import estimate_job
from planner.probes.protocol import MeasuredRun, peaks
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import TimeBreakdown
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.measurement import Measured


def ranks_of_interest(layout: Layout, cluster: ClusterSpec) -> tuple[int, ...]:
    """The first rank of the first, middle and last pipeline stages; one rank without a pipeline."""
    stages = sorted({0, layout.pp // 2, layout.pp - 1})
    inside = cluster.rank_order[: cluster.rank_order.index("pp")]
    stride = prod(getattr(layout, axis) for axis in inside)
    return tuple(stage * stride for stage in stages)


def combine(job: Job, ranks: Mapping[int, MeasuredRun]) -> Measured:
    """Numbers of the whole job from emulated ranks.

    Memory is the largest of any rank, on the device with the communicators' buffers that it never
    made. Time is the slowest rank plus what the cost model predicts for waiting.
    """
    estimate = estimate_job(job)
    seconds = [one.step_seconds for one in ranks.values() if one.step_seconds is not None]
    busiest = max(seconds) if len(seconds) == len(ranks) else None
    added = {}
    if estimate.time is not None and busiest is not None:
        added = _waits(estimate.time, busiest)
    step = None if busiest is None else busiest + sum(added.values())
    memory: dict[str, Any] = peaks([one for run in ranks.values() for one in run.memory])
    if memory["device_bytes"] is not None and estimate.device_bytes is not None:
        outside = estimate.device_bytes - (estimate.peak_reserved_bytes or 0.0)
        memory["communicator_bytes"] = outside - job.cluster.gpu.context_bytes
        memory["device_bytes"] += memory["communicator_bytes"]
    tokens = job.training.global_batch_size * job.training.seq_len / job.cluster.num_gpus
    slowest = max(ranks.values(), key=lambda outcome: outcome.step_seconds or 0.0)
    return Measured.model_validate(
        {
            "status": "ok",
            "rung": "emulated",
            "step_seconds": step,
            "steps": len(slowest.step_seconds_each),
            "tokens_per_second_per_gpu": None if step is None else tokens / step,
            **memory,
            "measured_seconds": busiest,
            "from_model": added,
            "ranks": [
                {"rank": rank, "step_seconds": one.step_seconds, **peaks(one.memory)}
                for rank, one in sorted(ranks.items())
            ],
        }
    )


def _waits(time: TimeBreakdown, busy_seconds: float) -> dict[str, float]:
    """Seconds that an emulated rank does not wait: communication, the pipeline bubble, stragglers.

    Communication is as predicted; the others are predicted in proportion to the busy seconds.
    """
    busy = time.compute_seconds + time.host_seconds + time.recompute_seconds
    busy += time.optimizer_seconds + time.other_seconds
    return {
        "communication_seconds": sum(time.exposed_communication_seconds.values()),
        "bubble_seconds": time.bubble_seconds * busy_seconds / busy,
        "straggler_seconds": time.straggler_seconds * busy_seconds / busy,
    }
