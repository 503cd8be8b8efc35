"""A simulated pipeline as a table: one row a rank."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.plan.timeline import PipelineTimeline
from planner.units import format_bytes, format_seconds

BAR = 30


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
