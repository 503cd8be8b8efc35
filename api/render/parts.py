"""What an estimate's memory and time consist of, as parts of a bar."""

from api.render.bars import BarPart
from planner.specs import estimate_parts
from planner.specs.estimate import Estimate
from planner.units import format_bytes, format_seconds

LETTERS = {
    "parameters": "P", "gradients": "G", "activations": "A", "logits": "L", "buffers": "B",
    "workspace": "W", "fragmentation": "F", "context": "x",
    "compute": "C", "recompute": "R", "launches": "l", "host waits": "w", "bubble": "b",
    "optimizer": "O", "straggler": "s", "other": "o",
    "tp comm": "T", "cp comm": "X", "ep comm": "E", "pp comm": "P", "fsdp comm": "F",
    "dp comm": "D",
}  # fmt: skip
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
    return [
        BarPart(name, LETTERS[name], size, format_bytes(size))
        for name, size in estimate_parts.memory_parts(estimate)
    ]


def time_parts(estimate: Estimate) -> list[BarPart]:
    """Parts of one step on the critical path, in seconds; they sum to step_seconds."""
    total = estimate.step_seconds or 1.0
    return [
        BarPart(name, LETTERS[name], size, f"{format_seconds(size)} ({size / total:.0%})")
        for name, size in estimate_parts.time_parts(estimate)
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
