"""Measured runs beside their predictions, as points of the accuracy chart."""

from collections.abc import Iterable

from planner.calibration.comparison import Compared
from planner.charts.accuracy import RunPoint, accuracy
from planner.charts.chart import Chart


def runs_of(rows: Iterable[Compared]) -> list[RunPoint]:
    """A point for every row with a measured and a predicted step time."""
    return [
        RunPoint(
            id=row.id,
            layout=row.layout,
            model=row.label("model"),
            trainer=row.label("trainer"),
            gpu=row.label("gpu"),
            measured_seconds=row.measured_seconds,
            predicted_seconds=row.predicted_seconds,
        )
        for row in rows
        if row.measured_seconds and row.predicted_seconds
    ]


def chart_of(rows: Iterable[Compared], title: str) -> Chart:
    return Chart(accuracy(runs_of(rows), title=title))
