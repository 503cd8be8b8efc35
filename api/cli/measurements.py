"""`planner-cli measurements`: measured runs, in and out."""

import json as encoder
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from planner.api.calibration.update import line_about, update_about, update_from_measurements
from planner.api.cli.files import write_file
from planner.api.cli.output import (
    make_console,
    note,
    note_more,
    say,
    show,
    show_json,
    tell,
    working,
)
from planner.api.cli.typed import Cursor, Json, Limit, complete_gpu, complete_model
from planner.api.identity import local_user
from planner.api.input.belief import believe
from planner.api.input.measurement_rows import row_of, shown_row, to_csv
from planner.api.input.measurements import FORMATS, all_of, filter_of, read_file, store_new
from planner.api.input.text import read_mapping_file
from planner.api.render.probe import beside, measurements_table
from planner.api.wiring import Wiring, wire
from planner.errors import fault
from planner.units import counted

app = typer.Typer(rich_markup_mode=None)
SHOWN = 10  # measurements of an import, each with its prediction
Model = Annotated[
    str | None, typer.Option(autocompletion=complete_model, help="Only of this model.")
]
Gpu = Annotated[str | None, typer.Option(autocompletion=complete_gpu, help="Only on this GPU.")]
Status = Annotated[str | None, typer.Option(help="Only ok, oom or failed.")]
Rung = Annotated[str | None, typer.Option(help="Only probed, imitated, emulated or published.")]
MeasurementId = Annotated[str, typer.Argument(metavar="MEASUREMENT_ID")]


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE")],
    format: str | None = None,
    job: str | None = None,
    shared: bool = False,
    json: Json = False,
) -> None:
    """Store measurements and learn from them; the same import twice changes nothing. The first new
    ones are compared with predictions.

    file: Rows (JSON lines or CSV), a log of TorchTitan or Megatron-LM, or a TensorBoard folder.
    format: rows, csv, torchtitan, megatron or tensorboard; else by the file.
    job: Job of the run, with its layout: what a log does not say.
    shared: They count for everyone's plans, not yours alone.
    """
    if format is not None and format not in FORMATS:
        raise fault("--format", format, "is no format", f"use {', '.join(FORMATS)}")
    wiring = wire()
    given = None if job is None else read_mapping_file(job, "--job")
    with working("reading and learning", quiet=json):
        measurements = read_file(
            wiring, file, next((known for known in FORMATS if known == format), None), given
        )
        stored = store_new(wiring, measurements, asked_by=local_user(), shared=shared)
        learnt = update_from_measurements(wiring, stored.new)
    for record in learnt:
        note(line_about(record))
    fresh = [one for one in stored.new if one.refused is None]
    if json:
        compared = [asdict(one) for one in beside(fresh[:SHOWN])]
        body = {
            "new": [one.id for one in stored.new],
            "known": stored.known,
            "refused": stored.refused,
            "calibrations": [record.id for record in learnt],
        }
        show_json({**body, "compared": compared}, indent=None)
        return
    already = f", {len(stored.known)} were there already" if stored.known else ""
    say(f"{len(stored.new)} stored{already}")
    for name, reason in list(stored.refused.items())[:SHOWN]:
        say(f"  {name}: not believed, counts for nothing: {reason}")
    if len(stored.refused) > SHOWN:
        say(f"  and {len(stored.refused) - SHOWN:,} more that are not believed")
    for one in beside(fresh[:SHOWN]):
        said = one.sentence()
        say(f"  {one.id}" + (f": {said}" if said else ""))


@app.command("export")
def export(
    format: str = "rows",
    output: Path | None = None,
    model: Model = None,
    gpu: Gpu = None,
    status: Status = None,
    rung: Rung = None,
    json: bool = False,
) -> None:
    """Print stored measurements as rows that import reads back.

    format: rows (JSON lines) or csv.
    output: Write here instead of to stdout.
    json: Machine output on stdout alone: rows are JSON lines already.
    """
    if format not in ("rows", "csv"):
        raise fault("--format", format, "is no format", "use rows or csv")
    if json and format == "csv":
        raise fault("--format", format, "is not JSON", "leave --json out, or use rows")
    found = list(all_of(wire(), filter_of(model=model, gpu=gpu, status=status, rung=rung)))
    found.reverse()
    text = (
        to_csv(found)
        if format == "csv"
        else "".join(encoder.dumps(row_of(one), ensure_ascii=False) + "\n" for one in found)
    )
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_file(output, text, "--output")
    note(counted(len(found), "measurement"))


@app.command("list")
def list_(
    model: Model = None,
    gpu: Gpu = None,
    status: Status = None,
    rung: Rung = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    json: Json = False,
) -> None:
    """Show stored measurements, newest first, each beside its prediction; ratio: measured over
    predicted tokens a second.
    """
    wanted = filter_of(model=model, gpu=gpu, status=status, rung=rung)
    page = wire().measurements.list(cursor, limit, **wanted)
    with working("predicting the same runs", quiet=json):
        predicted = beside(page.items)
    if json:
        items = [shown_row(one) for one in page.items]
        compared = [asdict(one) for one in predicted]
        show_json({"items": items, "compared": compared, "next_cursor": page.next_cursor})
        return
    console = make_console()
    show(measurements_table(page.items, predicted, console.width), console)
    note_more(page)
    for one in page.items:
        if one.refused is not None:
            note(f"not believed: {one.id}: {one.refused}")


@app.command("delete")
def delete(measurement_id: MeasurementId, json: Json = False) -> None:
    """Delete a stored measurement and learn again without it."""
    _after(lambda at: ([measurement_id], [at.measurements.delete(measurement_id)]), "deleted", json)


@app.command("believe")
def believe_(measurement_id: MeasurementId, json: Json = False) -> None:
    """Count a measurement that is far from its prediction: it is true, and of that job."""

    def believed(wiring: Wiring) -> tuple[list[str], list[tuple[str, str]]]:
        found = believe(wiring, measurement_id, local_user())
        return [found.id], [(found.job.training.trainer, found.job.cluster.gpu.name)]

    _after(believed, "believed", json)


@app.command("share")
def share(
    measurement_id: Annotated[str | None, typer.Argument(metavar="[MEASUREMENT_ID]")] = None,
    owner: str | None = None,
    json: Json = False,
) -> None:
    """Let measurements that a key imported count for everyone's plans.

    measurement_id: Only this one.
    owner: All that this key has stored.
    """
    if (measurement_id is None) == (owner is None):
        rule, remedy = "or --owner is needed, not both", "name one measurement, or one key"
        raise fault("MEASUREMENT_ID", measurement_id, rule, remedy)

    def shared(wiring: Wiring) -> tuple[Sequence[str], list[tuple[str, str]]]:
        if measurement_id is not None:
            wiring.measurements.get(measurement_id)  # or says that there is none
        ids = wiring.measurements.share(measurement_id=measurement_id, asked_by=owner)
        found = [wiring.measurements.get(one) for one in ids]
        return ids, [(one.job.training.trainer, one.job.cluster.gpu.name) for one in found]

    _after(shared, "shared", json)


def _after(
    work: Callable[[Wiring], tuple[Sequence[str], list[tuple[str, str]]]], verb: str, json: bool
) -> None:
    """Runs `work`, learns from the measurements that it changed, and reports both.

    work: returns ids, and the (trainer, GPU) that it changed.
    """
    wiring = wire()
    with working("learning again", quiet=json):
        done, about = work(wiring)
        learnt = update_about(wiring, about)
    for record in learnt if not json else ():
        note(line_about(record))
    body = {verb: list(done), "calibrations": [record.id for record in learnt]}
    tell(body, [f"{counted(len(done), 'measurement')} {verb}"], json=json, indent=None)
