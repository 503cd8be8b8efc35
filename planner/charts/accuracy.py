"""Predicted against measured step times, with a band around where they are equal."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from planner.charts.chart import GREY, PALETTE, SHAPES, Spec, by_name, layer, spec_of
from planner.units import counted

BAND = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoint:
    """One measured run and its prediction. low_seconds, high_seconds: the 90% interval."""

    id: str
    layout: str
    model: str
    trainer: str
    gpu: str
    measured_seconds: float
    predicted_seconds: float
    low_seconds: float | None = None
    high_seconds: float | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_seconds / self.measured_seconds - 1.0


def within_band(runs: Sequence[RunPoint]) -> int:
    return sum(abs(run.error) <= BAND for run in runs)


def accuracy(runs: Sequence[RunPoint], *, title: str) -> Spec:
    """The chart, both axes logarithmic."""
    rows = [{**asdict(run), "error": run.error} for run in runs]
    ends = [run.measured_seconds for run in runs] or [1.0]
    band = [
        {"at": at, "below": at * (1.0 - BAND), "above": at * (1.0 + BAND)}
        for at in (min(ends) / 1.1, max(ends) * 1.1)
    ]
    trainers = sorted({run.trainer for run in runs})
    subtitle = f"{within_band(runs):,} of {counted(len(runs), 'run')} within {BAND:.0%} (the band)"
    log = {"type": "log", "nice": False}
    axis = {"format": "~g"}
    x = {"type": "quantitative", "scale": log, "axis": axis, "title": "measured seconds of a step"}
    y = {"type": "quantitative", "scale": log, "axis": axis, "title": "predicted seconds"}

    measured = {"field": "measured_seconds", **x}
    colour = by_name("trainer", trainers, PALETTE)
    tooltip = [
        {"field": "id"}, {"field": "model"}, {"field": "gpu", "title": "GPU"},
        {"field": "trainer"}, {"field": "layout"},
        {"field": "measured_seconds", "title": "measured, s", "format": ".4g"},
        {"field": "predicted_seconds", "title": "predicted, s", "format": ".4g"},
        {"field": "error", "format": "+.1%"},
    ]  # fmt: skip
    body = {
        "datasets": {"runs": rows, "band": band},
        "layer": [
            layer("band", {"type": "area", "opacity": 0.18, "color": GREY},
                  {"x": {"field": "at", **x}, "y": {"field": "below", **y},
                   "y2": {"field": "above"}}),
            layer("band", {"type": "line", "color": GREY, "strokeWidth": 1},
                  {"x": {"field": "at", **x}, "y": {"field": "at", **y}}),
            layer("runs", {"type": "rule", "opacity": 0.3},
                  {"x": measured, "y": {"field": "low_seconds", **y},
                   "y2": {"field": "high_seconds"}, "color": colour},
                  only="datum.low_seconds != null"),
            layer("runs", {"type": "point", "filled": True, "opacity": 0.75, "size": 34},
                  {"x": measured, "y": {"field": "predicted_seconds", **y}, "color": colour,
                   "shape": by_name("trainer", trainers, SHAPES), "tooltip": tooltip}),
        ],
    }  # fmt: skip
    return spec_of(title, subtitle, body)
