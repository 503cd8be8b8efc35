"""A sweep over time: each layout's step against its first measured one."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.charts.chart import GREY, PALETTE, SHAPES, VERMILION, Spec, by_name, layer, spec_of

Rows = Sequence[Mapping[str, Any]]


def over_time(points: Rows, *, title: str, changes: Rows = ()) -> Spec:
    """The chart: above 100% a layout is slower than it was at first.

    points: one a measured layout of a run: `at` (when the run was due, ISO 8601), `run`, `job`,
        `layout`, `step_seconds`, `predicted_seconds`, `change` (against the run before),
        `versions` (of software that changed since, in words).
    changes: of step times that are no noise: `at` (the first run), `statement`.
    """
    ordered = sorted(points, key=lambda point: str(point["at"]))
    rows, first = [], dict[str, float]()
    for point in ordered:
        series, seconds = f"{point['job']}: {point['layout']}", point["step_seconds"]
        first.setdefault(series, seconds)
        rows.append({**point, "series": series, "relative": seconds / first[series]})
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
                     "changes": list(changes)},
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
