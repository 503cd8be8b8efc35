"""Parts of an estimate's memory and time, as parts of a bar."""

from planner.api.render.bars import BarPart
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
