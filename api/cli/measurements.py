"""`planner-cli measurements`: what was measured, in and out."""

from pathlib import Path
from typing import Annotated

import typer

from api.cli.typed import complete_gpu, complete_model

app = typer.Typer(help="What was measured: import, export, list.", rich_markup_mode=None)
SHOWN = 10  # measurements of an import, each with its prediction
Json = Annotated[bool, typer.Option("--json", help="Machine output on stdout alone.")]
Model = Annotated[
    str | None, typer.Option(autocompletion=complete_model, help="Only of this model.")
]
Gpu = Annotated[str | None, typer.Option(autocompletion=complete_gpu, help="Only on this GPU.")]
Status = Annotated[str | None, typer.Option(help="Only ok, oom or failed.")]
Rung = Annotated[str | None, typer.Option(help="Only probed, imitated, emulated or published.")]


@app.callback()
def _group() -> None:
    """What was measured: import, export, list."""


@app.command("import")
def import_(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Rows (JSON lines or CSV), a TorchTitan log, or a TensorBoard folder.",
        ),
    ],
    format: Annotated[
        str | None,
        typer.Option("--format", help="rows, csv, torchtitan or tensorboard; else by the file."),
    ] = None,
    job: Annotated[
        str | None, typer.Option(help="Job of the run, with its layout: what a log does not say.")
    ] = None,
    json: Json = False,
) -> None:
    """Store measurements and learn from them; the same import twice changes nothing. The first new
    ones are compared with predictions.
    """
    import json as encoder

    from api.calibration.update import line_about, update_from_measurements
    from api.cli.output import note, say
    from api.cli.working import working
    from api.errors import fault
    from api.input.measurements import FORMATS, read_file, store_new
    from api.input.text import read_mapping_file
    from api.render.comparison import beside
    from api.wiring import wire

    if format is not None and format not in FORMATS:
        raise fault("--format", format, "is no format", f"use {', '.join(FORMATS)}")
    wiring = wire()
    given = None if job is None else read_mapping_file(job, "--job")
    with working("reading and learning", quiet=json):
        measurements = read_file(
            wiring, file, next((known for known in FORMATS if known == format), None), given
        )
        stored = store_new(wiring, measurements)
        learnt = update_from_measurements(wiring, stored.new)
    for record in learnt:
        note(line_about(record))
    fresh = [one for one in measurements if one.id in set(stored.new)]
    if json:
        compared = [one.as_dict() for one in beside(fresh[:SHOWN])]
        body = {
            "new": stored.new,
            "known": stored.known,
            "calibrations": [record.id for record in learnt],
        }
        say(encoder.dumps({**body, "compared": compared}))
        return
    say(
        f"{len(stored.new)} stored"
        + (f", {len(stored.known)} were there already" if stored.known else "")
    )
    for one in beside(fresh[:SHOWN]):
        said = one.sentence()
        say(f"  {one.id}" + (f": {said}" if said else ""))


@app.command("export")
def export(
    format: Annotated[str, typer.Option("--format", help="rows (JSON lines) or csv.")] = "rows",
    output: Annotated[Path | None, typer.Option(help="Write here instead of to stdout.")] = None,
    model: Model = None,
    gpu: Gpu = None,
    status: Status = None,
    rung: Rung = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Machine output on stdout alone: rows are JSON lines already."),
    ] = False,
) -> None:
    """Print stored measurements as rows that import reads back."""
    import json as encoder

    from api.cli.output import note
    from api.cli.simulate import write_text
    from api.errors import fault
    from api.input.measurements import all_of, filter_of, row_of, to_csv
    from api.wiring import wire
    from planner.units import counted

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
        write_text(output.expanduser(), text, "--output")
    note(counted(len(found), "measurement"))


@app.command("list")
def list_(
    model: Model = None,
    gpu: Gpu = None,
    status: Status = None,
    rung: Rung = None,
    limit: Annotated[int, typer.Option(help="At most so many, newest first.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Where the page before ended.")] = None,
    json: Json = False,
) -> None:
    """Show stored measurements, newest first, each beside its prediction; ratio: measured over
    predicted tokens a second.
    """
    import json as encoder

    from api.cli.output import make_console, note, say, show
    from api.cli.working import working
    from api.input.measurements import filter_of, row_of
    from api.render.comparison import beside
    from api.render.probe import measurements_table
    from api.wiring import wire

    page = wire().measurements.list(
        filter_of(model=model, gpu=gpu, status=status, rung=rung), cursor, limit
    )
    with working("predicting the same runs", quiet=json):
        predicted = beside(page.items)
    if json:
        compared = [one.as_dict() for one in predicted]
        say(
            encoder.dumps(
                {
                    "items": [row_of(one) for one in page.items],
                    "compared": compared,
                    "next_cursor": page.next_cursor,
                },
                indent=2,
            )
        )
        return
    console = make_console()
    show(measurements_table(page.items, predicted, console.width), console)
    if page.next_cursor is not None:
        note(f"more: --cursor {page.next_cursor}")
