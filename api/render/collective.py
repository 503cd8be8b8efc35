"""Collectives as tables: the algorithms of one that was asked about, and those of a layout."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from planner.api.render.figures import seconds, size
from planner.api.render.grid import Column, grid, number
from planner.specs.collective import CollectiveAnswer
from planner.specs.estimate import CommunicationRow
from planner.units import counted, format_bandwidth, format_bytes, format_seconds

COLUMNS = ("algorithm", "protocol", "library", "closed form", "steps", "sent a rank", "")
DROPPED = {"sent a rank": 0, "steps": 1, "protocol": 2}  # where there is no room
NOTE = (
    "library: with its measured curves; closed form: on bandwidth and latency alone. * what the "
    "library may choose by itself"
)
STEP_COLUMNS = (
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
STEP_NOTE = (
    "Of one GPU in one step. sent: all that it sends of them; alone: seconds with nothing beside; "
    "exposed: seconds that the step waits. All-reduces of a few bytes are in the optimizer's time."
)


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
    columns = [
        Column(name=name, right=name not in ("algorithm", "protocol", ""), drop=DROPPED.get(name))
        for name in COLUMNS
    ]
    rows = []
    for found in answer.candidates:
        asked = ""
        if found.algorithm == answer.algorithm:
            asked = " <- closed form" if answer.basis == "datasheet" else " <- chosen"
        rows.append(
            (
                found.algorithm,
                found.protocol,
                format_seconds(found.seconds),
                format_seconds(found.closed_form_seconds),
                str(found.steps),
                format_bytes(found.wire_bytes_per_rank),
                f"{'*' if found.automatic else ' '}{asked}".rstrip(),
            )
        )
    bold = [found.algorithm == answer.algorithm for found in answer.candidates]
    return grid(columns, rows, width, bold=bold)


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
        grid(STEP_COLUMNS, cells, width),
        Text(STEP_NOTE, style="dim"),
    ]
