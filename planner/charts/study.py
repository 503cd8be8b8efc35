"""A study as it probes: the best step so far against the GPU-seconds spent."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.charts.chart import BLUE, ORANGE, Spec, by_name, spec_of
from planner.units import counted

REAL, EXPECTED = "ran itself", "expected from smaller runs"
HEIGHT = 240


# of the study after one result; `ran`: whether the best layout so far ran itself
SHOWN = ("layout", "message", "probes", "gpu_seconds", "best_step_seconds", "expected_regret")


def progress(points: Sequence[Mapping[str, Any]], *, title: str) -> Spec:
    """The chart: a step line that falls while probes find something faster.

    points: with the keys `number`, `ran` and SHOWN.
    """
    rows = [{**point, "best": REAL if point["ran"] else EXPECTED} for point in points]
    x = {"field": "gpu_seconds", "type": "quantitative", "title": "GPU-seconds spent"}
    y = {
        "field": "best_step_seconds", "type": "quantitative", "title": "best step so far, s",
        "scale": {"zero": False},
    }  # fmt: skip
    shown = [name for name in (REAL, EXPECTED) if any(row["best"] == name for row in rows)]
    colours = {REAL: BLUE, EXPECTED: ORANGE}
    body = {
        "datasets": {"points": rows},
        "data": {"name": "points"},
        "encoding": {"x": x, "y": y},
        "layer": [
            {"mark": {"type": "line", "interpolate": "step-after", "color": BLUE}},
            {
                "mark": {"type": "point", "filled": True, "size": 60},
                "encoding": {
                    "color": by_name("best", shown, [colours[name] for name in shown]),
                    "shape": {"field": "best", "type": "nominal", "title": None,
                              "scale": {"domain": shown}},
                    "tooltip": [
                        {"field": "layout"}, {"field": "message"}, {"field": "probes"},
                        {"field": "best_step_seconds", "title": "best step, s", "format": ".4g"},
                        {"field": "expected_regret", "title": "expected regret", "format": ".1%"},
                        {"field": "gpu_seconds", "title": "GPU-seconds", "format": ",.0f"},
                    ],
                },
            },
        ],
    }  # fmt: skip
    subtitle = f"after {counted(len(points), 'result')}"
    return spec_of(title, subtitle, body, height=HEIGHT)
