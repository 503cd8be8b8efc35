"""Parts of an estimate's memory and time, in the words of every table and chart."""

from dataclasses import dataclass

from planner.charts.chart import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from planner.specs.estimate import Estimate

NEGLIGIBLE = 0.0005
DARK = "#666666"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a layout's memory or time.

    field: of `StageMemory` or `TimeBreakdown`; "" for what follows from other figures.
    letter: shown in bars without colours. colour: on every chart; what waits or is lost is grey.
    words: its name in sentences.
    """

    name: str
    field: str
    letter: str
    colour: str
    words: str = ""


MEMORY_PARTS = (
    Part("parameters", "parameters_bytes", "P", BLUE),
    Part("gradients", "gradients_bytes", "G", SKY),
    Part("optimizer", "optimizer_bytes", "O", GREEN),
    Part("activations", "activations_bytes", "A", ORANGE),
    Part("logits", "logits_bytes", "L", YELLOW),
    Part("buffers", "communication_buffers_bytes", "B", PURPLE),
    Part("workspace", "workspace_bytes", "W", VERMILION),
    Part("fragmentation", "fragmentation_bytes", "F", GREY),
    Part("context", "", "x", DARK),
)
TIME_PARTS = (
    Part("compute", "compute_seconds", "C", BLUE, "matrix and attention kernels"),
    Part("recompute", "recompute_seconds", "R", SKY, "recomputing activations"),
    Part("tp comm", "", "T", ORANGE, "tensor-parallel communication"),
    Part("cp comm", "", "X", YELLOW, "context-parallel communication"),
    Part("ep comm", "", "E", VERMILION, "expert dispatch and combine"),
    Part("pp comm", "", "P", "#B8860B", "pipeline sends"),
    Part("fsdp comm", "", "F", PURPLE, "FSDP gathers and scatters"),
    Part("dp comm", "", "D", "#8A4F9E", "the gradient all-reduce across replicas"),
    Part("launches", "launch_seconds", "l", "#44AA99", "waiting for kernel launches"),
    Part("host waits", "host_wait_seconds", "w", "#88CCAA", "host waits for the device"),
    Part("bubble", "bubble_seconds", "b", GREY, "the pipeline bubble"),
    Part("optimizer", "optimizer_seconds", "O", GREEN, "the optimizer step"),
    Part("straggler", "straggler_seconds", "s", DARK, "waiting for the slowest rank"),
    Part("other", "other_seconds", "o", "#BBBBBB", "loading, logging and synchronisation"),
)
PART_WORDS = {part.name: part.words for part in TIME_PARTS}


def memory_parts(estimate: Estimate) -> list[tuple[str, float]]:
    """(name, bytes) of the worst pipeline rank's device memory; they sum to device_bytes."""
    if estimate.memory is None:
        return []
    stage = estimate.memory.stages[estimate.memory.worst_stage]
    stated = [part for part in MEMORY_PARTS if part.field]
    sizes = [(part.name, float(getattr(stage, part.field))) for part in stated]
    beyond = (estimate.device_bytes or 0.0) - sum(size for _, size in sizes)
    return _noticeable([*sizes, ("context", max(0.0, beyond))], sum(s for _, s in sizes) + beyond)


def time_parts(estimate: Estimate) -> list[tuple[str, float]]:
    """(name, seconds) of what is noticeable of one step on the critical path."""
    return _noticeable(all_time_parts(estimate), estimate.step_seconds or 1.0)


def all_time_parts(estimate: Estimate) -> list[tuple[str, float]]:
    """(name, seconds) of one step on the critical path; they sum to step_seconds."""
    if estimate.time is None:
        return []
    exposed = estimate.time.exposed_communication_seconds
    return [
        (
            part.name,
            float(getattr(estimate.time, part.field))
            if part.field
            else exposed.get(part.name.removesuffix(" comm"), 0.0),
        )
        for part in TIME_PARTS
    ]


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
