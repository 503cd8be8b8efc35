"""One collective in words and a table: the choice first, then every algorithm that could have run."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.specs.collective import CollectiveAnswer
from planner.units import counted, format_bandwidth, format_bytes, format_seconds

COLUMNS = ("algorithm", "protocol", "library", "closed form", "steps", "sent a rank", "")
NOTE = "library: with its measured curves; closed form: on bandwidth and latency alone. * what the library may choose by itself"


def collective_view(answer: CollectiveAnswer) -> RenderableType:
    """The answer, why, and the candidates, fastest first."""
    apart = f", {answer.stride} apart" if answer.stride > 1 else ""
    lines = (
        f"{answer.operation} of {format_bytes(answer.size_bytes)} over "
        f"{counted(answer.num_ranks, 'rank')}{apart}: {format_seconds(answer.seconds)}"
        f" by {answer.algorithm} ({answer.protocol}, {answer.basis})",
        f"{counted(answer.steps, 'step')}, {format_bytes(answer.wire_bytes_per_rank)} sent by the busiest rank; algorithm bandwidth "
        f"{format_bandwidth(answer.algorithm_bandwidth_bytes_per_second)}, bus bandwidth "
        f"{format_bandwidth(answer.bus_bandwidth_bytes_per_second)}",
        f"Why: {answer.why}",
    )
    return Group(*(Text(line) for line in lines), _candidates(answer), Text(NOTE, style="dim"))


def _candidates(answer: CollectiveAnswer) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("algorithm", "protocol", "") else "right")
    for found in answer.candidates:
        answered = found.algorithm == answer.algorithm
        asked = " <- closed form" if answered and answer.basis == "datasheet" else " <- chosen" if answered else ""
        table.add_row(
            found.algorithm, found.protocol, format_seconds(found.seconds), format_seconds(found.closed_form_seconds), str(found.steps),
            format_bytes(found.wire_bytes_per_rank), f"{'*' if found.automatic else ' '}{asked}", style="bold" if answered else "",
        )  # fmt: skip
    return table
