"""`--plot`: the chart of an answer, as a file or as text on stdout."""

import os
from pathlib import Path
from typing import Annotated

import typer

from planner.api.cli.output import make_console, note, say
from planner.api.errors import need
from planner.charts.chart import Chart
from planner.charts.terminal import scatter
from planner.errors import fault
from planner.specs.plan import Plan

FLAG = "--plot"
TERMINAL = Path("-")
SUFFIXES = (".svg", ".png", ".html")
Plot = Annotated[
    Path | None, typer.Option(FLAG, metavar="FILE", help="Draw it too: FILE.svg, .png or .html.")
]
PlotOrText = Annotated[
    Path | None,
    typer.Option(
        FLAG,
        metavar="FILE",
        help="Draw throughput against memory too: FILE.svg, .png or .html; - for text here.",
    ),
]


def check_plot(path: Path | None, *, text: bool = False) -> None:
    """Raises before any work is done what would keep the chart from being drawn.

    text: whether "-" is a place. Raises SpecError, MissingPackageError.
    """
    if path is None or (text and path == TERMINAL):
        return
    if path.suffix.lower() not in SUFFIXES:
        remedy = f"name a file that ends in {', '.join(SUFFIXES)}" + (", or -" if text else "")
        raise fault(FLAG, str(path), "is no format of a chart", remedy)
    if not path.expanduser().absolute().parent.is_dir():
        raise fault(FLAG, str(path), "is in no folder", "give a path in a folder that exists")
    need("vl_convert", extra="plot")


def write_plot(path: Path, chart: Chart) -> None:
    write_file(path, chart.drawn(path.suffix), FLAG)
    note(f"drew {path}")


def write_file(path: Path, content: str | bytes, flag: str) -> None:
    """Writes a whole file or nothing. Raises SpecError when the place cannot be written."""
    target = path.expanduser()
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        rule = f"cannot be written ({error.strerror})"
        raise fault(flag, str(path), rule, "give a path in a folder that exists") from None


def plot_plan(path: Path | None, plan: Plan) -> None:
    """The chart of a plan as a file; "-" prints it as text."""
    if path is None:
        return
    if path != TERMINAL:
        write_plot(path, plan.plot())
        return
    usable = plan.ranked[0].estimate.usable_bytes
    say("\n" + "\n".join(scatter(plan.points(), usable, make_console().width)))
