"""The accuracy report as Markdown, with every row: docs/accuracy.md."""

from collections.abc import Sequence

from planner.api.render.accuracy import COLUMNS, NOTES, headlines, row_cells, table_rows
from planner.calibration.outcome import Compared
from planner.calibration.report import Report
from planner.units import counted

GIB_PER_BYTE = 2.0**-30
# Rows believed to say something else than the layout does; they stay in every figure.
DOUBTS = {
    "lf-080": "2.8 times lf-081 at twice its length, on a nearly full device: allocator retries?",
    "bs-087": "one sequence a microbatch takes longer than two (bs-088)",
    "mbr-228": "1.7 times the same job in mbr-147; MoE rows change by as much between releases",
}


def document(report: Report) -> str:
    """The whole report. Rows are predicted without their source; memory in GiB."""
    written = (
        "Written by `planner-cli accuracy --recompute --markdown docs/accuracy.md`; calibration "
        f"`{report.calibration_id}`."
    )
    lines = ["# Accuracy", "", written, ""]
    lines += [f"- {line}" for line in headlines(report)]
    lines += ["", "![Predicted against measured by unit](accuracy.svg)", ""]
    lines += ["## How far off, by trainer, GPU and number format", "", *_kinds(report), ""]
    lines += [
        "## Every group of rows",
        "",
        *_table(
            ("rows of", *COLUMNS), [cells for cells in table_rows(report) if cells is not None]
        ),
        "",
    ]
    lines += [f"- {note}" for note in NOTES]
    lines += ["", "## Every row", ""]
    names = (
        "id",
        "layout",
        "measured s",
        "predicted s",
        "error",
        "in 90%",
        "allocated",
        "predicted",
        "reserved",
        "predicted",
        "fits",
        "doubts",
    )
    lines += _table(names, [_row(row) for row in report.rows])
    return "\n".join(lines) + "\n"


def _kinds(report: Report) -> list[str]:
    """Errors where the planner was never run, and after runs of one's own."""
    after = {one.runs: one.kinds for one in report.own_runs if one.runs}
    names = ("trainer, GPU, format", "units", "rows", "never seen", "in 90%")
    cells = []
    for summary in report.headline.groups["kind"]:
        if summary.units is None:
            continue
        kind = summary.name.removeprefix("kind ")
        own = [after[count].get(kind) for count in after]
        cells.append(
            (
                kind,
                str(summary.units.units),
                str(summary.rows),
                f"{summary.units.mape:.1%}",
                f"{summary.units.coverage:.0%}",
                *("-" if error is None else f"{error:.1%}" for error in own),
            )
        )
    return _table((*names, *(f"after {counted(count, 'own run')}" for count in after)), cells)


def _row(row: Compared) -> tuple[str, ...]:
    inside = "-"
    if row.interval_seconds is not None and row.measured_seconds is not None:
        low, high = row.interval_seconds
        inside = "yes" if low <= row.measured_seconds <= high else "no"
    allocated = row.predicted_allocated_bytes if row.measured_allocated_bytes else None
    reserved = row.predicted_reserved_bytes if row.measured_reserved_bytes else None
    return (
        *row_cells(row),
        inside,
        _gib(row.measured_allocated_bytes),
        _gib(allocated),
        _gib(row.measured_reserved_bytes),
        _gib(reserved),
        "yes" if row.fits else "no",
        DOUBTS.get(row.id, ""),
    )


def _gib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes * GIB_PER_BYTE:.2f}"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return [*head, *(f"| {' | '.join(cell.strip() for cell in cells)} |" for cells in rows)]
