"""The accuracy report as Markdown, with every row: docs/accuracy.md."""

from collections.abc import Sequence

from planner.api.render.accuracy import COLUMNS, NOTES, headlines, row_cells, table_rows
from planner.api.render.figures import percent
from planner.calibration.accuracy import UnitErrors, by_label, summarise
from planner.calibration.comparison import Compared
from planner.calibration.report import MODELS, Report, complete
from planner.calibration.sweeps import FEWEST_AGAINST_RULE, NOISE
from planner.units import counted

AFTER_ONE = "after 1 own run"
CLASSES = (
    "Runs predicted by a fit and interval factors that have not seen their source.",
    "width: mean of half the 90% interval of log seconds; score: mean interval score, the "
    "interval's width and 20 times by how much the run lies outside (less is better).",
    f"{AFTER_ONE}: by how much the rest of a unit is off then, over units of at least two rows.",
    "offset known: the same where each unit's mean error is known. complete: units off over rows "
    "whose publisher states everything.",
)
RULE = (
    f"Sweeps: one source, model, cluster, training and number format, at least "
    f"{FEWEST_AGAINST_RULE} layouts. Regret: how much slower a pick is than the best layout "
    "measured. Both pick among the layouts whose memory estimate fits.",
    "rule of thumb: fewest TP ranks, then fewest PP, fewest CP, least recomputation, largest "
    "microbatch (`planner.calibration.sweeps.rule_of_thumb`).",
    f"sweeps behind: where number one is slower than the rule's pick by more than {NOISE:.0%}.",
)
REPEATS = (
    "Jobs with several published runs, which differ by release, dispatcher, graphs, overlap or "
    "report (`planner.calibration.sweeps`); off: from the mean of their job. Closer than this "
    "comes nobody who is not told what differs.",
)
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
    lines = ["# Accuracy", "", written, "", *_classes(report), ""]
    lines += [*(f"- {one}" for one in CLASSES), "", *(f"- {one}" for one in headlines(report))]
    lines += ["", "![Predicted against measured by unit](accuracy.svg)", ""]
    lines += ["## Number one against a rule of thumb", "", *_against_rule(report), ""]
    lines += ["## The same job again", "", *_repeats(report), ""]
    lines += ["## How far off, by trainer, GPU and number format", "", *_kinds(report), ""]
    groups = [cells for cells in table_rows(report) if cells is not None]
    lines += ["## Every group of rows", "", *_table(("rows of", *COLUMNS), groups), ""]
    lines += [f"- {note}" for note in NOTES]
    lines += ["", "## Every row", ""]
    names = (
        *("id", "layout", "measured s", "predicted s", "error", "in 90%"),
        *("allocated", "predicted", "reserved", "predicted", "fits", "doubts"),
    )
    lines += _table(names, [_row(row) for row in report.rows])
    return "\n".join(lines) + "\n"


def _classes(report: Report) -> list[str]:
    """Dense models and those with experts, by trainer and generation of GPUs."""
    names = (
        "trainer, class", "rows", "units", "rows off", "units off", "complete", "in 90%", "width",
        "score", AFTER_ONE, "offset known",
    )  # fmt: skip
    after = {one.runs: one.classes for one in report.own_runs}.get(1, {})
    cells = []
    kinds = [
        summarise([row for row in report.rows if kind in row.label("class")], f"all {kind}")
        for kind in MODELS
    ]
    for one in [*by_label(report.rows, "class"), *kinds]:
        if one.time is None or one.units is None or one.half_width is None:
            continue
        name = one.name.removeprefix("class ")
        rows = [row for row in report.rows if name.removeprefix("all ") in row.label("class")]
        stated = UnitErrors.of(complete(rows))
        cells.append(
            (
                name,
                str(one.rows),
                str(one.units.units),
                f"{one.time.mape:.1%}",
                f"{one.units.mape:.1%}",
                percent(stated.mape if stated else None),
                f"{one.coverage or 0.0:.0%}",
                f"{one.half_width:.0%}",
                f"{one.interval_score:.2f}",
                percent(after.get(name)),
                percent(one.units.offset_known),
            )
        )
    return _table(names, cells)


def _against_rule(report: Report) -> list[str]:
    """Regret of number one and of the rule of thumb by class."""
    names = ("trainer, class", "sweeps", "number one", "rule of thumb", "sweeps behind")
    cells = [
        (
            one.name,
            str(one.sweeps),
            f"{one.number_one:.1%}",
            f"{one.rule_of_thumb:.1%}",
            str(one.behind),
        )
        for one in report.headline.against_rule
    ]
    return [*_table(names, cells), "", *(f"- {line}" for line in RULE)]


def _repeats(report: Report) -> list[str]:
    """How far published runs of one job are from each other, by class."""
    cells = [
        (one.name, str(one.jobs), str(one.rows), f"{one.off:.1%}")
        for one in report.headline.repeats
    ]
    table = _table(("trainer, class", "jobs", "rows", "off"), cells)
    return [*table, "", *(f"- {line}" for line in REPEATS)]


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
                *map(percent, own),
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
