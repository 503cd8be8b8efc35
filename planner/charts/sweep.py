"""A sweep over time: each layout's step against its first measured one."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from planner.charts.chart import GREY, PALETTE, SHAPES, VERMILION, Spec, by_name, layer, spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One measured layout of one run.

    at: when the run was due, ISO 8601.
    change: against the run before; versions: of software that changed since, in words.
    """

    at: str
    run: str
    job: str
    layout: str
    step_seconds: float
    predicted_seconds: float | None
    change: float | None
    versions: str

    @property
    def series(self) -> str:
        return f"{self.job}: {self.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """A change of step times that is no noise. at: its first run, ISO 8601."""

    at: str
    statement: str


def over_time(
    points: Sequence[SweepPoint], *, title: str, changes: Sequence[ChangePoint] = ()
) -> Spec:
    """The chart: above 100% a layout is slower than it was at first."""
    ordered = sorted(points, key=lambda point: point.at)
    first: dict[str, float] = {}
    for point in ordered:
        first.setdefault(point.series, point.step_seconds)
    rows = [
        {
            **asdict(point),
            "series": point.series,
            "relative": point.step_seconds / first[point.series],
        }
        for point in ordered
    ]
    names = list(first)

    legend = {"columns": 1, "labelLimit": 680}
    colour = by_name("series", names, PALETTE, legend=legend)
    shape = by_name("series", names, SHAPES, legend=legend)
    x = {"field": "at", "type": "temporal", "title": "run of the sweep"}
    y = {
        "field": "relative", "type": "quantitative", "title": "step time over its first",
        "axis": {"format": ".1~%"}, "scale": {"zero": False},
    }  # fmt: skip
    tooltip = [
        {"field": "at", "type": "temporal", "title": "due", "format": "%Y-%m-%d %H:%M"},
        {"field": "job"}, {"field": "layout"},
        {"field": "step_seconds", "title": "step, s", "format": ".4g"},
        {"field": "predicted_seconds", "title": "predicted, s", "format": ".4g"},
        {"field": "change", "title": "since the last run", "format": "+.1%"},
        {"field": "versions", "title": "versions changed"},
    ]  # fmt: skip
    body = {
        "datasets": {"points": rows, "base": [{"relative": 1.0}],
                     "changes": [asdict(change) for change in changes]},
        "layer": [
            layer("base", {"type": "rule", "color": GREY, "strokeDash": [3, 3]}, {"y": y}),
            layer("changes", {"type": "rule", "color": VERMILION, "strokeWidth": 2},
                  {"x": x, "tooltip": [
                      {"field": "at", "type": "temporal", "title": "changed",
                       "format": "%Y-%m-%d %H:%M"},
                      {"field": "statement", "title": "by"},
                  ]}),
            layer("points", {"type": "line"}, {"x": x, "y": y, "color": colour}),
            layer("points", {"type": "point", "filled": True, "size": 60},
                  {"x": x, "y": y, "color": colour, "shape": shape, "tooltip": tooltip}),
            layer("points", {"type": "point", "size": 220, "strokeWidth": 1.5},
                  {"x": x, "y": y, "color": colour}, only="datum.versions != ''"),
        ],
    }  # fmt: skip
    marks = "a ring marks a change of software versions"
    if changes:
        marks += ", a line a change of step times that is no noise"
    return spec_of(title, marks, body)
