"""`planner-cli accuracy`: predicted against measured, over published rows or a file of one's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from planner.calibration.accuracy import Row

NAME = "accuracy"
PUBLIC_ROWS = Path(__file__).parents[2] / "benchmarks" / "measured" / "public.jsonl"


def command(
    jobs: Annotated[
        str | None, typer.Option(help="File with one measured job a line; the repository's published rows unless given.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="Report these rows alone, as complete=true or 'platform=fsdp on hopper,fsdp on ampere'."),
    ] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Print every row too.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write the whole report with every row to this file, as docs/accuracy.md.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine output on stdout alone.")] = False,
) -> None:
    """Errors of time and memory on measured runs, predicted without having seen them; by trainer, GPU, model family and technique.

    --where takes several values at a comma, and may be given again: a row then meets all of them. Keys: trainer, platform (the trainer on
    the GPU's family), gpu, family (the model's), model, group (the source), complete (its publisher states everything).
    """
    import json as json_module

    from api.cli.output import make_console, note, show
    from api.cli.simulate import write_text
    from api.errors import fault
    from planner.calibration.report import report
    from planner.catalog.calibrations import shipped_calibration

    wanted = [_wanted(text) for text in where or ()]
    measured, malformed = read_rows(jobs)
    for line, error in malformed:
        note(f"line {line}: {error}")
    if not measured:
        raise fault("--jobs", jobs, "holds no line that could be read", "write one measured JSON job a line")
    _check_some(measured, wanted)
    note("fitting again without each source, model and GPU in turn ...")
    result = report(measured, shipped_calibration(), lambda row: _meets(row, wanted))
    if markdown is not None:
        from api.render.accuracy_document import document

        write_text(markdown, document(result), "--markdown")
    if json:
        body = {"malformed": len(malformed), **result.as_dict()}
        typer.echo(json_module.dumps(body if not rows else {**body, "rows": [_row(row) for row in result.rows]}, indent=2))
        return
    from api.render.accuracy import accuracy_view, rows_view

    console = make_console()
    show(accuracy_view(result), console)
    if rows:
        show(rows_view(result.rows), console)


def _wanted(text: str) -> tuple[str, list[str]]:
    from api.errors import fault
    from planner.calibration.accuracy import LABELS

    key, equals, values = text.partition("=")
    if key not in LABELS or not equals:
        raise fault("--where", text, "is no label and its values", f"use KEY=VALUE[,VALUE]; keys are {', '.join(LABELS)}")
    return key, [value.strip().lower() for value in values.split(",")]


def _meets(row: "Row", wanted: Sequence[tuple[str, list[str]]]) -> bool:
    return all(row.label(key).lower() in values for key, values in wanted)


def _check_some(rows: "Sequence[Row]", wanted: Sequence[tuple[str, list[str]]]) -> None:
    """Raises SpecError for a value that no row has, and where no row meets all."""
    from api.errors import fault

    for key, values in wanted:
        known = {row.label(key) for row in rows}
        for value in values:
            if value not in {name.lower() for name in known}:
                raise fault("--where", f"{key}={value}", "no row has it", f"use one of {', '.join(sorted(known))}")
    if wanted and not any(_meets(row, wanted) for row in rows):
        raise fault("--where", ", ".join(key for key, _ in wanted), "no row meets all of them", "ask for less at once")


def read_rows(path: str | None) -> "tuple[list[Row], list[tuple[int, str]]]":
    """(rows with their estimates, (line, error) of what could not be read). Raises SpecError for a file that is not there."""
    from api.reading import read_json
    from api.service import Refusal, estimate_many, parse_for_estimate
    from planner.calibration.accuracy import Row
    from planner.errors import PlannerError

    rows: list[Row] = []
    malformed: list[tuple[int, str]] = []
    for number, text in enumerate(_lines(path), start=1):
        if not text.strip():
            continue
        try:
            job = parse_for_estimate(read_json(text, "job"), allow_files=True)
        except PlannerError as error:
            malformed.append((number, str(error)))
            continue
        (answer,) = estimate_many([job.request], allow_files=True)
        if isinstance(answer, Refusal):
            malformed.append((number, str(answer.error)))
        else:
            rows.append(Row.build(job, answer))
    return rows, malformed


def _lines(path: str | None) -> list[str]:
    from api.errors import fault

    chosen = PUBLIC_ROWS if path is None else Path(path)
    try:
        return chosen.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise fault("--jobs", str(chosen), f"cannot be read ({reason})", "give a file with one JSON job a line") from None


def _row(row: "Row") -> dict[str, object]:
    estimate = row.estimate
    return {
        "id": row.job.id,
        "status": row.status,
        "measured_step_seconds": row.measured_seconds,
        "step_seconds": estimate.step_seconds,
        "measured_peak_allocated_bytes": row.measured_allocated_bytes,
        "peak_allocated_bytes": estimate.peak_allocated_bytes,
        "measured_peak_reserved_bytes": row.measured_reserved_bytes,
        "peak_reserved_bytes": estimate.peak_reserved_bytes,
        "fits": estimate.fits,
    }
