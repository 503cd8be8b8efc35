"""A table of the communication of a layout: one line a kind of collective."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from planner.api.render.figures import seconds, size
from planner.api.render.grid import Column, grid, number
from planner.specs.estimate import CommunicationRow

COLUMNS = (
    Column(name=""),
    Column(name="collective"),
    number("ranks"),
    Column(name="level", drop=2),
    Column(name="algorithm", drop=1),
    number("a step"),
    number("message"),
    number("sent", drop=0),
    number("alone"),
    number("exposed"),
)
NOTE = (
    "Of one GPU in one step. sent: all that it sends of them; alone: seconds with nothing beside; "
    "exposed: seconds that the step waits. All-reduces of a few bytes are in the optimizer's time."
)


def communication_section(rows: Sequence[CommunicationRow], width: int) -> list[RenderableType]:
    """Heading, table and note; nothing for a layout that communicates nothing."""
    if not rows:
        return []
    cells = [
        (
            one.dimension,
            one.operation,
            f"{one.group_size:,}",
            one.level,
            one.algorithm,
            f"{one.per_step:,.0f}",
            size(one.message_bytes),
            size(one.volume_bytes),
            seconds(one.seconds),
            seconds(one.exposed_seconds),
        )
        for one in rows
    ]
    return [
        Text("What it communicates", style="bold"),
        grid(COLUMNS, cells, width),
        Text(NOTE, style="dim"),
    ]
