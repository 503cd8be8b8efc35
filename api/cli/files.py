"""Files that commands write: a chart, a file, a folder of files; each whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from planner.api.cli.output import PIPED_WIDTH, as_text, make_console, note, say
from planner.api.errors import need
from planner.api.render.current import current_files
from planner.api.render.plan import plan_view
from planner.charts.chart import SUFFIXES, Chart
from planner.charts.terminal import scatter
from planner.errors import fault
from planner.specs.plan import Plan

FLAG = "--plot"
TERMINAL = Path("-")
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
SAVE_DIR, MARKER = "--save-dir", ".planner"


def check_plot(path: Path | None, *, text: bool = False) -> None:
    """Checks, before any work is done, that the chart can be drawn.

    text: whether "-" is allowed. Raises SpecError, MissingPackageError.
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


def check_target(target: Path) -> None:
    """Raises SpecError unless `target` is free, empty, or was written by us before."""
    try:
        if target.exists() and not target.is_dir():
            raise fault(SAVE_DIR, str(target), "is a file", "name a new or empty directory")
        if target.is_dir() and any(target.iterdir()) and not (target / MARKER).is_file():
            rule = "is not empty and was not written by planner-cli"
            raise fault(SAVE_DIR, str(target), rule, "name a new or empty directory")
    except (OSError, ValueError) as error:
        rule = f"cannot be used ({getattr(error, 'strerror', None) or error})"
        raise fault(SAVE_DIR, str(target), rule, "name a new directory") from None


def write_folder(target: Path, files: Mapping[str, str]) -> None:
    """Replaces `target` by a folder with these files (relative path -> text).

    Raises SpecError; then nothing has changed.
    """
    check_target(target)
    target = target.expanduser().absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
            new = Path(work) / "new"
            marker = {MARKER: "Written by planner-cli, which may replace this folder.\n"}
            for name, text in {**marker, **files}.items():
                path = new / name
                if not path.resolve().is_relative_to(new.resolve()):
                    rule = "is a file name outside the folder"
                    raise fault(SAVE_DIR, name, rule, "report this as a bug")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
                if name.endswith(".sh"):
                    path.chmod(0o755)
            if target.exists():
                shutil.move(target, Path(work) / "old")
            new.rename(target)
    except OSError as error:
        rule = f"cannot be written ({error.strerror or error})"
        raise fault(SAVE_DIR, str(target), rule, "name a directory that you may write to") from None


def save_plan(plan: Plan, target: Path) -> None:
    """plan.json, plan.txt, and one folder a rank with the files of its export. Raises SpecError."""
    shown = as_text(plan_view(plan, PIPED_WIDTH, letters=True, saved=str(target)))
    files = {"plan.json": plan.model_dump_json(indent=2) + "\n", "plan.txt": shown}
    files |= current_files(plan)
    for entry in plan.ranked:
        for export in entry.export.values():
            for name, text in export.get("files", {}).items():
                files[f"rank-{entry.rank:02d}/{name}"] = text
    write_folder(target, files)
