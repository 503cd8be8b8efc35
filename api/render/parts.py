"""What an estimate's memory and time consist of, as parts of a bar."""

from api.render.bars import BarPart
from planner.specs.estimate import Estimate
from planner.units import format_bytes, format_seconds

NEGLIGIBLE = 0.0005
MEMORY_PARTS = (
    ("parameters", "P", "parameters_bytes"), ("gradients", "G", "gradients_bytes"),
    ("optimizer", "O", "optimizer_bytes"),
    ("activations", "A", "activations_bytes"), ("logits", "L", "logits_bytes"),
    ("buffers", "B", "communication_buffers_bytes"),
    ("workspace", "W", "workspace_bytes"), ("fragmentation", "F", "fragmentation_bytes"),
)  # fmt: skip
TIME_PARTS = (
    ("compute", "C", "compute_seconds"), ("recompute", "R", "recompute_seconds"),
    ("launches", "l", "launch_seconds"), ("host waits", "w", "host_wait_seconds"),
    ("bubble", "b", "bubble_seconds"),
    ("optimizer", "O", "optimizer_seconds"), ("straggler", "s", "straggler_seconds"),
    ("other", "o", "other_seconds"),
)  # fmt: skip
AXIS_LETTERS = {"tp": "T", "cp": "X", "ep": "E", "pp": "P", "fsdp": "F", "dp": "D"}
BOTTLENECKS = {
    "recompute": "recomputing activations", "bubble": "the pipeline bubble",
    "optimizer": "the optimizer step",
    "straggler": "waiting for the slowest rank",
    "launches": "waiting for kernel launches", "host waits": "host waits for the device",
    "other": "loading, logging and synchronisation", "tp comm": "tensor-parallel communication",
    "cp comm": "context-parallel communication", "ep comm": "expert dispatch and combine",
    "pp comm": "pipeline sends",
    "fsdp comm": "waiting for FSDP gathers and scatters",
    "dp comm": "the gradient all-reduce across replicas",
}  # fmt: skip


def memory_parts(estimate: Estimate) -> list[BarPart]:
    """Parts of the worst pipeline rank's device memory, in bytes; they sum to device_bytes."""
    if estimate.memory is None:
        return []
    stage = estimate.memory.stages[estimate.memory.worst_stage]
    sizes = [(name, letter, float(getattr(stage, field))) for name, letter, field in MEMORY_PARTS]
    beyond = (estimate.device_bytes or 0.0) - sum(size for _, _, size in sizes)
    sizes.append(("context", "x", max(0.0, beyond)))
    total = sum(size for _, _, size in sizes) or 1.0
    return [
        BarPart(name, letter, size, format_bytes(size))
        for name, letter, size in sizes
        if size / total > NEGLIGIBLE
    ]


def time_parts(estimate: Estimate) -> list[BarPart]:
    """Parts of one step on the critical path, in seconds; they sum to step_seconds."""
    if estimate.time is None:
        return []
    sizes = [
        (name, letter, float(getattr(estimate.time, field))) for name, letter, field in TIME_PARTS
    ]
    exposed = [
        (f"{axis} comm", AXIS_LETTERS.get(axis, "c"), seconds)
        for axis, seconds in estimate.time.exposed_communication_seconds.items()
    ]
    total = estimate.step_seconds or 1.0
    ordered = [*sizes[:2], *exposed, *sizes[2:]]
    return [
        BarPart(name, letter, size, f"{format_seconds(size)} ({size / total:.0%})")
        for name, letter, size in ordered
        if size / total > NEGLIGIBLE
    ]


def bottleneck(estimate: Estimate) -> str:
    """What costs most beside useful compute, in words."""
    costs = [part for part in time_parts(estimate) if part.name != "compute"]
    if not costs or not estimate.step_seconds:
        return "compute alone"
    worst = max(costs, key=lambda part: part.size)
    share = worst.size / estimate.step_seconds
    return (
        f"{BOTTLENECKS.get(worst.name, worst.name)}, {share:.1%} of the step; useful compute is "
        f"{_compute_share(estimate):.0%}"
    )


def _compute_share(estimate: Estimate) -> float:
    if estimate.time is None or not estimate.step_seconds:
        return 0.0
    return estimate.time.compute_seconds / estimate.step_seconds
