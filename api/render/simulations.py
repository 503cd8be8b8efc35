"""Simulations as tables: algorithms of a collective, the collectives of a layout, a pipeline."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.api.render.figures import seconds, size
from planner.api.render.grid import Column, Columns, listed, number
from planner.plan.timeline import PipelineTimeline
from planner.specs.collective import CollectiveAnswer, CollectiveCandidate
from planner.specs.estimate import CommunicationRow
from planner.units import counted, format_bandwidth, format_bytes, format_seconds

NOTE = (
    "library: with its measured curves; closed form: on bandwidth and latency alone. * what the "
    "library may choose by itself"
)
# each with what it shows of one kind of collective in a step
STEP_COLUMNS: Columns[CommunicationRow] = (
    (Column(name=""), lambda one: one.dimension),
    (Column(name="collective"), lambda one: one.operation),
    (number("ranks"), lambda one: f"{one.group_size:,}"),
    (Column(name="level", drop=2), lambda one: one.level),
    (Column(name="algorithm", drop=1), lambda one: one.algorithm),
    (number("a step"), lambda one: f"{one.per_step:,.0f}"),
    (number("message"), lambda one: size(one.message_bytes)),
    (number("sent", drop=0), lambda one: size(one.volume_bytes)),
    (number("alone"), lambda one: seconds(one.seconds)),
    (number("exposed"), lambda one: seconds(one.exposed_seconds)),
)
STEP_NOTE = (
    "Of one GPU in one step. sent: all that it sends of them; alone: seconds with nothing beside; "
    "exposed: seconds that the step waits. All-reduces of a few bytes are in the optimizer's time."
)
BAR = 30


def collective_view(answer: CollectiveAnswer, width: int) -> RenderableType:
    apart = f", {answer.stride} apart" if answer.stride > 1 else ""
    lines = (
        f"{answer.operation} of {format_bytes(answer.size_bytes)} over "
        f"{counted(answer.num_ranks, 'rank')}{apart}: {format_seconds(answer.seconds)}"
        f" by {answer.algorithm} ({answer.protocol}, {answer.basis})",
        f"{counted(answer.steps, 'step')}, {format_bytes(answer.wire_bytes_per_rank)} sent by "
        "the busiest rank; algorithm bandwidth "
        f"{format_bandwidth(answer.algorithm_bandwidth_bytes_per_second)}, bus bandwidth "
        f"{format_bandwidth(answer.bus_bandwidth_bytes_per_second)}",
        f"Why: {answer.why}",
    )
    return Group(
        *(Text(line) for line in lines), "", _candidates(answer, width), "", Text(NOTE, style="dim")
    )


def _candidates(answer: CollectiveAnswer, width: int) -> RenderableType:
    chosen = " <- closed form" if answer.basis == "datasheet" else " <- chosen"

    def mark(one: CollectiveCandidate) -> str:
        asked = chosen if one.algorithm == answer.algorithm else ""
        return f"{'*' if one.automatic else ' '}{asked}".rstrip()

    columns: Columns[CollectiveCandidate] = (
        (Column(name="algorithm"), lambda one: one.algorithm),
        (Column(name="protocol", drop=2), lambda one: one.protocol),
        (number("library"), lambda one: format_seconds(one.seconds)),
        (number("closed form"), lambda one: format_seconds(one.closed_form_seconds)),
        (number("steps", drop=1), lambda one: str(one.steps)),
        (number("sent a rank", drop=0), lambda one: format_bytes(one.wire_bytes_per_rank)),
        (Column(name=""), mark),
    )
    bold = [found.algorithm == answer.algorithm for found in answer.candidates]
    return listed(columns, answer.candidates, width, bold=bold)


def communication_section(rows: Sequence[CommunicationRow], width: int) -> list[RenderableType]:
    """Heading, table and note; nothing for a layout that communicates nothing."""
    if not rows:
        return []
    return [
        Text("What it communicates", style="bold"),
        listed(STEP_COLUMNS, rows, width),
        Text(STEP_NOTE, style="dim"),
    ]


def timeline_view(played: PipelineTimeline) -> RenderableType:
    """Busy and idle share of the pipeline's time, and peak memory, of every pipeline rank."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "busy", "idle", "peak reserved", "activations"):
        table.add_column(name, justify="left" if name == "busy" else "right")
    memory = played.estimate.memory
    for rank, idle in enumerate(played.bubble_share):
        stage = memory.stages[rank] if memory else None
        busy = round(BAR * (1.0 - idle))
        table.add_row(
            str(rank),
            "#" * busy + "." * (BAR - busy),
            f"{idle:.1%}",
            format_bytes(stage.peak_reserved_bytes) if stage else "-",
            format_bytes(stage.activations_bytes) if stage else "-",
        )
    step = played.estimate.step_seconds or 0.0
    took = format_seconds(played.pipeline_seconds)
    pipeline = f"The pipeline takes {took} of a step of {format_seconds(step)}"
    return Group(
        Text("One step, rank by rank: # busy, . idle, waiting for other ranks", style="bold"),
        table,
        Text(f"{pipeline}; the rest is gradient reduction and the optimizer."),
    )
