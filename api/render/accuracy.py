"""The accuracy report as tables: predictions of unseen runs first, in-sample ones beside them."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from planner.api.render.figures import NONE, percent
from planner.api.render.grid import Column, grid, number
from planner.calibration.accuracy import BASELINE_MFU, Errors, Summary
from planner.calibration.comparison import Compared
from planner.calibration.report import AfterOwnRuns, Figures, Report
from planner.calibration.sweeps import FEWEST, FEWEST_AGAINST_RULE
from planner.units import counted

COLUMNS = (
    "rows", "units", "time", "rows'", "seen", "bias", "p90", "40%", "mem", "resv", "in90", "oom",
    "refu",
)  # fmt: skip
# where there is no room
DROPPED = {
    name: place
    for place, name in enumerate(
        ("refu", "oom", "resv", "mem", "40%", "bias", "p90", "rows'", "seen", "units")
    )
}
NOTES = (
    "units: one source, trainer, GPU and number format, dense or with experts.",
    "time: mean over units of |predicted / measured - 1| of the step time, predicted without the "
    "run's source; rows': the same over rows; bias, p90 of the same over rows.",
    "seen: the same error where the calibration has seen the run (in sample).",
    f"40%: error of the baseline, step time at {BASELINE_MFU:.0%} of the dense bf16 peak.",
    "mem, resv: error of peak allocated and reserved bytes.  in90: measured steps inside the "
    "90% interval, mean over units.",
    "oom: runs out of memory that are called a fit.  refu: runs that did fit and are called a "
    "misfit.",
)


def accuracy_view(report: Report, width: int) -> RenderableType:
    """Headline, all rows, every group, ranking quality; fewer columns on narrow terminals."""
    columns = [Column(name="rows of"), *(number(name, drop=DROPPED.get(name)) for name in COLUMNS)]
    blank = ("",) * len(columns)
    rows = [blank if cells is None else cells for cells in table_rows(report)]
    table = grid(columns, rows, width, bold=[place == 0 for place in range(len(rows))], gap=1)
    return Group(
        *(Text(line) for line in headlines(report)), "", table, "", *(Text(line) for line in NOTES)
    )


def headlines(report: Report) -> list[str]:
    """The figures that matter, one sentence a line."""
    lines = [_after(one) for one in report.own_runs if one.runs]
    for by, summary in report.left_out.items():
        complete = report.complete[by]
        line = f"step time {_sentence(summary)}; complete rows {_sentence(complete)}."
        if by == "group":
            lines.insert(0, f"A cluster never seen, its trainer measured elsewhere: {line}")
        else:
            lines.append(f"Left out by {by}: {line}")
    if not report.left_out and report.headline.overall.rows:
        lines.append(
            f"Rows that calibration {report.calibration_id} has not seen: step time "
            f"{_sentence(report.headline.overall)}."
        )
    if report.in_sample is not None:
        lines.append(f"In sample, for comparison: step time {_sentence(report.in_sample.overall)}.")
    units = report.headline.overall.units
    if units is not None and units.offset_known is not None:
        lines.append(
            f"The mean error of each unit known: {counted(units.several, 'unit')} off by "
            f"{units.offset_known:.1%}, below which no number of own runs comes; one run, which is "
            f"off by as much itself, would leave {2**0.5 * units.offset_known:.1%}."
        )
    lines.append(_ranking(report.headline))
    if report.headline.against_rule:
        rule = report.headline.against_rule[0]
        lines.append(
            f"{counted(rule.sweeps, 'sweep')} of at least {FEWEST_AGAINST_RULE} layouts: regret of "
            f"number one {rule.number_one:.1%}, of the rule of thumb {rule.rule_of_thumb:.1%} "
            "(fewest TP, PP and CP ranks, least recomputation, largest microbatch that fits)."
        )
    return lines


def _sentence(summary: Summary) -> str:
    if summary.time is None:
        return "not measured"
    covered = "-" if summary.coverage is None else f"{summary.coverage:.0%}"
    over = f"{summary.time.mape:.1%} over {counted(summary.time.rows, 'run')} ({covered} inside)"
    units = summary.units
    if units is None:
        return over
    return (
        f"off by {units.mape:.1%} over {counted(units.units, 'unit')} (median {units.median:.1%}), "
        f"{units.coverage:.0%} inside the 90% interval; {over}"
    )


def _after(one: AfterOwnRuns) -> str:
    return (
        f"After {counted(one.runs, 'run')} of one's own: the rest of {counted(one.units, 'unit')} "
        f"off by {one.error:.1%} (median {one.median:.1%}), {one.coverage:.0%} inside the 90% "
        "interval."
    )


def _ranking(figures: Figures) -> str:
    known = {first: value for first, value in figures.regret.items() if value is not None}
    regrets = ", ".join(f"at {first} {value:.1%}" for first, value in known.items()) or NONE
    spearman = "-" if figures.spearman is None else f"{figures.spearman:.2f}"
    return (
        f"{counted(figures.num_sweeps, 'sweep')} of at least {FEWEST} layouts: regret {regrets}; "
        f"Spearman {spearman}."
    )


def table_rows(report: Report) -> Iterator[tuple[str, ...] | None]:
    """Cells of the table, name first; None between sections."""
    overall, inside = report.headline.overall, report.in_sample
    groups = inside.groups.values() if inside else ()
    seen = {summary.name: summary for members in groups for summary in members}
    yield _cells(overall, overall.name, inside.overall if inside else None)
    for key, summaries in report.headline.groups.items():
        yield None
        for index, summary in enumerate(summaries):
            name = summary.name.removeprefix(key).strip().removeprefix("precision ")
            yield _cells(summary, f"{key if index == 0 else '':10}{name}", seen.get(summary.name))


def _cells(summary: Summary, name: str, seen: Summary | None) -> tuple[str, ...]:
    time, units = summary.time, summary.units
    return (
        name,
        str(summary.rows),
        NONE if units is None else str(units.units),
        NONE if units is None else f"{units.mape:.1%}",
        _mape(time),
        _mape(seen.time if seen else None),
        NONE if time is None else f"{time.bias:+.1%}",
        NONE if time is None else f"{time.p90:.1%}",
        _mape(summary.baseline),
        _mape(summary.allocated),
        _mape(summary.reserved),
        NONE if units is None else f"{units.coverage:.0%}",
        str(summary.out_of_memory_missed),
        str(summary.refused),
    )


ROW = (
    Column(name="id"),
    Column(name="layout", wraps=True, below=True),
    number("measured s"),
    number("predicted s"),
    number("error"),
)


def rows_view(rows: Sequence[Compared], width: int) -> RenderableType:
    """Every row: predicted beside measured."""
    return grid(ROW, [row_cells(row) for row in rows], width)


def row_cells(row: Compared) -> tuple[str, str, str, str, str]:
    """id, layout, measured and predicted seconds, error."""
    predicted, measured = row.predicted_seconds, row.measured_seconds
    error = "-" if predicted is None or measured is None else f"{predicted / measured - 1:+.1%}"
    return row.id, row.layout, _number(measured, row.status), _number(predicted, "refused"), error


def _number(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.4g}"


def _mape(errors: Errors | None) -> str:
    return percent(None if errors is None else errors.mape)
