"""Parts of an estimate's memory and time, in the words of every table and chart."""

from planner.specs.estimate import Estimate

NEGLIGIBLE = 0.0005
MEMORY_PARTS = (
    ("parameters", "parameters_bytes"), ("gradients", "gradients_bytes"),
    ("optimizer", "optimizer_bytes"), ("activations", "activations_bytes"),
    ("logits", "logits_bytes"), ("buffers", "communication_buffers_bytes"),
    ("workspace", "workspace_bytes"), ("fragmentation", "fragmentation_bytes"),
)  # fmt: skip
TIME_PARTS = (
    ("compute", "compute_seconds"), ("recompute", "recompute_seconds"),
    ("launches", "launch_seconds"), ("host waits", "host_wait_seconds"),
    ("bubble", "bubble_seconds"), ("optimizer", "optimizer_seconds"),
    ("straggler", "straggler_seconds"), ("other", "other_seconds"),
)  # fmt: skip


PART_WORDS = {
    "compute": "matrix and attention kernels",
    "recompute": "recomputing activations",
    "bubble": "the pipeline bubble",
    "optimizer": "the optimizer step",
    "straggler": "waiting for the slowest rank",
    "launches": "waiting for kernel launches",
    "host waits": "host waits for the device",
    "other": "loading, logging and synchronisation",
    "tp comm": "tensor-parallel communication",
    "cp comm": "context-parallel communication",
    "ep comm": "expert dispatch and combine",
    "pp comm": "pipeline sends",
    "fsdp comm": "FSDP gathers and scatters",
    "dp comm": "the gradient all-reduce across replicas",
}


def memory_parts(estimate: Estimate) -> list[tuple[str, float]]:
    """(name, bytes) of the worst pipeline rank's device memory; they sum to device_bytes."""
    if estimate.memory is None:
        return []
    stage = estimate.memory.stages[estimate.memory.worst_stage]
    sizes = [(name, float(getattr(stage, field))) for name, field in MEMORY_PARTS]
    beyond = (estimate.device_bytes or 0.0) - sum(size for _, size in sizes)
    return _noticeable([*sizes, ("context", max(0.0, beyond))], sum(s for _, s in sizes) + beyond)


def time_parts(estimate: Estimate) -> list[tuple[str, float]]:
    """(name, seconds) of what is noticeable of one step on the critical path."""
    return _noticeable(all_time_parts(estimate), estimate.step_seconds or 1.0)


def all_time_parts(estimate: Estimate) -> list[tuple[str, float]]:
    """(name, seconds) of one step on the critical path; they sum to step_seconds."""
    if estimate.time is None:
        return []
    sizes = [(name, float(getattr(estimate.time, field))) for name, field in TIME_PARTS]
    exposed = estimate.time.exposed_communication_seconds.items()
    return [*sizes[:2], *((f"{axis} comm", size) for axis, size in exposed), *sizes[2:]]


def bottleneck(estimate: Estimate) -> str:
    """The largest part of a step, and the largest loss where that is compute.

    For example "compute-bound (91%); the largest loss is FSDP gathers and scatters, 7%".
    """
    step = estimate.step_seconds or 1.0
    parts = sorted(time_parts(estimate), key=lambda part: -part[1])
    losses = [part for part in parts if part[0] != "compute"]
    if not losses:
        return "compute-bound"
    (worst, lost), compute = losses[0], dict(parts).get("compute", 0.0)
    if compute >= lost:
        bound = "compute-bound" if compute > step / 2 else "compute is the largest part"
        return (
            f"{bound} ({compute / step:.0%}); the largest loss is {PART_WORDS[worst]}, "
            f"{_share(lost / step)}"
        )
    return f"bound by {PART_WORDS[worst]} ({lost / step:.0%}); compute is {compute / step:.0%}"


def _share(value: float) -> str:
    """A share of the step; small ones with one digit behind the point."""
    return f"{value:.0%}" if value >= 0.01 else f"{value:.1%}"


def _noticeable(sizes: list[tuple[str, float]], total: float) -> list[tuple[str, float]]:
    return [(name, size) for name, size in sizes if size / (total or 1.0) > NEGLIGIBLE]
