"""The accuracy report as tables."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.calibration.accuracy import BASELINE_MFU, Errors, Row, Summary
from planner.calibration.report import Report


def accuracy_view(report: Report) -> RenderableType:
    """Summary of all rows and of every group, then ranking quality."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rows of", no_wrap=True)
    for name in ("rows", "time", "bias", "med", "p90", "max", "40%", "mem", "resv", "in90", "oom", "refu"):
        table.add_column(name, justify="right", no_wrap=True)
    _add(table, report.overall, report.overall.name)
    for key, summaries in report.groups.items():
        table.add_section()
        for place, summary in enumerate(summaries):
            _add(table, summary, f"{key if place == 0 else '':10}{summary.name.removeprefix(key).strip()}")
    regrets = ", ".join(f"at {first} {value:.1%}" for first, value in report.regret.items() if value is not None) or "-"
    spearman = "-" if report.spearman is None else f"{report.spearman:.2f}"
    notes = [
        "In sample: the profiles were set with these rows in view. "
        "time, mem (allocated), resv (reserved): mean of |predicted / measured - 1|.",
        f"40%: error of the baseline, step time at {BASELINE_MFU:.0%} of the dense bf16 peak.",
        "in90: measured steps inside the 90% interval. med, p90, max: of the time error.",
        "oom: runs out of memory that are called a fit. refu: runs that did fit and are called a misfit.",
        f"{report.num_sweeps} sweeps of at least 3 layouts: regret {regrets}; Spearman {spearman}.",
    ]
    return Group(table, *(Text(line) for line in notes))


def rows_view(rows: Sequence[Row]) -> RenderableType:
    """Every row: predicted beside measured."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("id", "layout", "measured s", "predicted s", "error"):
        table.add_column(name, justify="left" if name in ("id", "layout") else "right")
    for row in rows:
        predicted, measured = row.estimate.step_seconds, row.measured_seconds
        error = "-" if predicted is None or measured is None else f"{predicted / measured - 1:+.1%}"
        layout = row.job.layout.short() if row.job.layout else "-"
        table.add_row(str(row.job.id), layout, _number(measured, row.status), _number(predicted, "refused"), error)
    return table


def _number(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.4g}"


def _add(table: Table, summary: Summary, name: str) -> None:
    time = summary.time
    figures = (
        ("-",) * 5
        if time is None
        else (f"{time.mape:.1%}", f"{time.bias:+.1%}", f"{time.median:.1%}", f"{time.p90:.1%}", f"{time.worst:.0%}")
    )
    table.add_row(
        name,
        str(summary.rows),
        *figures,
        _mape(summary.baseline),
        _mape(summary.allocated),
        _mape(summary.reserved),
        "-" if summary.coverage is None else f"{summary.coverage:.0%}",
        str(summary.out_of_memory_missed),
        str(summary.refused),
    )


def _mape(errors: Errors | None) -> str:
    return "-" if errors is None else f"{errors.mape:.1%}"
