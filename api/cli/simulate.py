"""`planner-cli simulate`: a layout's pipeline played out, for Perfetto and for torch."""

import json as encoder
from pathlib import Path

from planner.api.cli.files import Plot, check_plot, write_file, write_plot
from planner.api.cli.flags import PlanOption, layout_given
from planner.api.cli.output import make_console, note, show, show_json, working
from planner.api.cli.typed import Json
from planner.api.input.jobs import check_one_size, parse_job
from planner.api.own_entries import with_own
from planner.api.render.simulations import timeline_view
from planner.api.storage.common import told
from planner.api.wiring import wire
from planner.plan.timeline import timeline


def command(
    job: str | None = None,
    plan: PlanOption = None,
    rank: int | None = None,
    trace: Path | None = None,
    csv: Path | None = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Play out one step of a pipeline: who waits when, and what each stage holds.

    job: YAML or JSON file of a job whose layout has pp > 1, - for stdin.
    rank: Which layout of the plan; 1 unless given.
    trace: Write a Chrome trace here; Perfetto opens it.
    csv: Write torch's pipeline schedule CSV here.
    """
    check_plot(plot)
    wiring = wire()
    parsed = parse_job(with_own(wiring, layout_given(wiring, job, plan, rank)), allow_files=True)
    check_one_size(parsed)
    with working("playing out the step", quiet=json):
        played = timeline(parsed)
    if plot is not None:
        write_plot(plot, played.plot())
    for flag, path, text in (
        ("--trace", trace, None if trace is None else encoder.dumps(played.trace)),
        ("--csv", csv, played.csv),
    ):
        if path is not None and text is not None:
            write_file(path, text, flag)
            note(f"wrote {path}")
    if json:
        seconds = told(played, "makespan_seconds", "pipeline_seconds", "bubble_share")
        show_json({"estimate": played.estimate.model_dump(mode="json"), **seconds})
        return
    show(timeline_view(played), make_console())
