"""`planner-cli accuracy`: predicted against measured, for published rows or a user's own file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from planner.api.cli.files import Plot, check_plot, write_file, write_plot
from planner.api.cli.output import make_console, note, show, show_json, working
from planner.api.cli.typed import Json
from planner.api.input.text import read_json
from planner.api.render.accuracy import accuracy_view, rows_view
from planner.api.render.accuracy_document import document
from planner.api.service import growing, parse_for_estimate
from planner.calibration.accuracy import LABELS, Row
from planner.calibration.comparison import Compared, Comparison, digest_of, shipped_comparison
from planner.calibration.held_out import comparison_of
from planner.calibration.report import chart_of, report
from planner.cost.machine.shipped import shipped_calibration
from planner.errors import PlannerError, fault
from planner.estimates import Estimator
from planner.intake.jobs import JobReader
from planner.specs.job import Job

PUBLIC_ROWS = Path(__file__).resolve().parents[2] / "benchmarks" / "measured" / "public.jsonl"
Where = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUES")]


def command(
    jobs: str | None = None,
    where: Where = None,
    rows: bool = False,
    markdown: Path | None = None,
    recompute: bool = False,
    save: Path | None = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Errors of time and memory on measured runs, predicted without having seen them; by trainer,
    GPU, model family and technique.

    The report on the published rows ships with the planner and is printed at once; --recompute
    makes it anew, --jobs one of other rows. --where takes several values at a comma, and may be
    given again: a row then meets all of them. Keys: trainer, platform (the trainer on the GPU's
        family), gpu, family (the model's), model, group (the source), complete (its publisher
        states everything).

    jobs: File with one measured job a line; the repository's published rows unless given.
    where: Report these rows alone, as complete=true or 'platform=fsdp on hopper,fsdp on ampere'.
    rows: Print every row too.
    markdown: Write the whole report with every row to this file, as docs/accuracy.md.
    recompute: Predict and fit anew instead of printing the report that ships; takes a minute or
        two.
    save: With --recompute: write what was computed here, as the report that ships.
    """
    check_plot(plot)
    wanted = [_wanted(text) for text in where or ()]
    anew = recompute or jobs is not None
    if save is not None and not anew:
        remedy = "add --recompute, or leave --save out"
        raise fault("--save", str(save), "is what was computed, and nothing is", remedy)
    compared, malformed = _computed(jobs, quiet=json) if anew else (_shipped(), 0)
    _check_some(compared.rows, wanted)
    if save is not None:
        write_file(save, compared.as_document(), "--save")
    result = report(compared, lambda row: _meets(row, wanted))
    if markdown is not None:
        write_file(markdown, document(result), "--markdown")
    if plot is not None:
        write_plot(plot, chart_of(result.rows, "Predicted against measured, left out by source"))
    if json:
        body = {"malformed": malformed, **result.as_dict()}
        show_json(body if not rows else {**body, "rows": [_row(row) for row in result.rows]})
        return
    console = make_console()
    show(accuracy_view(result, console.width), console)
    if rows:
        show(rows_view(result.rows, console.width), console)


def _shipped() -> Comparison:
    """The report that ships, with a note where today's rows or calibration are others."""
    compared = shipped_comparison()
    digest = digest_of(PUBLIC_ROWS.read_text(encoding="utf-8")) if PUBLIC_ROWS.exists() else None
    for change in compared.stale(shipped_calibration().id, digest):
        note(f"note: this report was made before a change ({change}); --recompute makes it anew")
    return compared


def _computed(jobs: str | None, *, quiet: bool) -> tuple[Comparison, int]:
    """(predictions made now, number of lines that could not be read)."""
    text = _text(jobs)
    with working("predicting", total=text.count("\n"), quiet=quiet) as shown:
        measured, malformed = read_rows(text, shown.done)
    for line, error in malformed:
        note(f"line {line}: {error}")
    if not measured:
        remedy = "write one measured JSON job a line"
        raise fault("--jobs", jobs, "holds no line that could be read", remedy)
    with working("fitting again without each source, model and GPU in turn", quiet=quiet):
        return comparison_of(measured, shipped_calibration(), digest_of(text)), len(malformed)


def _wanted(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    if key not in LABELS or not equals:
        remedy = f"use KEY=VALUE[,VALUE]; keys are {', '.join(LABELS)}"
        raise fault("--where", text, "is no label and its values", remedy)
    return key, [value.strip().lower() for value in values.split(",")]


def _meets(row: Compared, wanted: Sequence[tuple[str, list[str]]]) -> bool:
    return all(row.label(key).lower() in values for key, values in wanted)


def _check_some(rows: Sequence[Compared], wanted: Sequence[tuple[str, list[str]]]) -> None:
    """Raises SpecError for a value that no row has, and where no row meets all."""
    for key, values in wanted:
        known = {row.label(key) for row in rows}
        for value in values:
            if value not in {name.lower() for name in known}:
                remedy = f"use one of {', '.join(sorted(known))}"
                raise fault("--where", f"{key}={value}", "no row has it", remedy)
    if wanted and not any(_meets(row, wanted) for row in rows):
        keys = ", ".join(key for key, _ in wanted)
        raise fault("--where", keys, "no row meets all of them", "ask for less at once")


def read_rows(
    text: str, done: Callable[[], None] = lambda: None
) -> tuple[list[Row], list[tuple[int, str]]]:
    """(rows with their estimates, (line, error) of what could not be read)."""
    reader, estimator = JobReader(), Estimator()
    rows: list[Row] = []
    malformed: list[tuple[int, str]] = []
    for chunk in growing(enumerate(text.splitlines(), start=1), most=256):
        jobs: dict[int, Job] = {}
        for number, line in chunk:
            done()
            try:
                if line.strip():
                    jobs[number] = parse_for_estimate(read_json(line, "job"), reader)
            except PlannerError as error:
                malformed.append((number, str(error)))
        answers = estimator.estimates([*jobs.values()])
        for (number, job), answer in zip(jobs.items(), answers, strict=True):
            if isinstance(answer, PlannerError):
                malformed.append((number, str(answer)))
            else:
                rows.append(Row(job=job, estimate=answer))
    return rows, sorted(malformed)


def _text(path: str | None) -> str:
    if path is None and not PUBLIC_ROWS.exists():
        rule = (
            "needs the published rows, which are in the repository and not in the installed package"
        )
        remedy = "run it in a checkout, or give --jobs FILE.jsonl with measured jobs"
        raise fault("--recompute", None, rule, remedy)
    chosen = PUBLIC_ROWS if path is None else Path(path).expanduser()
    try:
        return chosen.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read ({getattr(error, 'strerror', None) or 'is not UTF-8 text'})"
        remedy = "give a file with one JSON job a line"
        raise fault("--jobs", str(chosen), rule, remedy) from None


def _row(row: Compared) -> dict[str, object]:
    return {
        "id": row.id,
        "status": row.status,
        "measured_step_seconds": row.measured_seconds,
        "step_seconds": row.predicted_seconds,
        "measured_peak_allocated_bytes": row.measured_allocated_bytes,
        "peak_allocated_bytes": row.peak_allocated_bytes,
        "measured_peak_reserved_bytes": row.measured_reserved_bytes,
        "peak_reserved_bytes": row.peak_reserved_bytes,
        "fits": row.fits,
    }
