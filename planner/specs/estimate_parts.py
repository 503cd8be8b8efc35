"""What an estimate's memory and time consist of, in the words of every table and chart."""

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


def memory_parts(estimate: Estimate) -> list[tuple[str, float]]:
    """(name, bytes) of the worst pipeline rank's device memory; they sum to device_bytes."""
    if estimate.memory is None:
        return []
    stage = estimate.memory.stages[estimate.memory.worst_stage]
    sizes = [(name, float(getattr(stage, field))) for name, field in MEMORY_PARTS]
    beyond = (estimate.device_bytes or 0.0) - sum(size for _, size in sizes)
    return _noticeable([*sizes, ("context", max(0.0, beyond))], sum(s for _, s in sizes) + beyond)


def time_parts(estimate: Estimate) -> list[tuple[str, float]]:
    """(name, seconds) of one step on the critical path; they sum to step_seconds."""
    if estimate.time is None:
        return []
    sizes = [(name, float(getattr(estimate.time, field))) for name, field in TIME_PARTS]
    exposed = estimate.time.exposed_communication_seconds.items()
    ordered = [*sizes[:2], *((f"{axis} comm", size) for axis, size in exposed), *sizes[2:]]
    return _noticeable(ordered, estimate.step_seconds or 1.0)


def _noticeable(sizes: list[tuple[str, float]], total: float) -> list[tuple[str, float]]:
    return [(name, size) for name, size in sizes if size / (total or 1.0) > NEGLIGIBLE]
