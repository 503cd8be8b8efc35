"""Memory and time of layouts by their parts: one stacked bar a layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.charts.chart import VERMILION, Spec, by_name, present, spec_of
from planner.units import GIB, format_bytes

BAR_STEP = 26
Colours = Mapping[str, str]  # of each part, in their order


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One layout of a plan and its parts in their order: bytes, or seconds."""

    rank: int
    layout: str
    parts: Sequence[tuple[str, float]]

    def rows(self) -> list[dict[str, Any]]:
        whole = sum(size for _, size in self.parts) or 1.0
        return [
            {
                "rank": self.rank,
                "number": f"#{self.rank}",
                "layout": self.layout,
                "part": name,
                "order": place,
                "size": size,
                "share": size / whole,
            }
            for place, (name, size) in enumerate(self.parts)
        ]


def memory(
    bars: Sequence[Bar], colours: Colours, usable_bytes: float | None, *, title: str
) -> Spec:
    """Device memory of the fullest GPU. usable_bytes: the limit that is drawn."""
    rows = [{**row, "gib": row["size"] / GIB} for bar in bars for row in bar.rows()]
    subtitle = "" if usable_bytes is None else f"the line is at {format_bytes(usable_bytes)} usable"
    body = _bars(rows, "gib", "device memory, GiB", colours, ".2f")
    if usable_bytes is not None:
        body["datasets"]["limit"] = [{"gib": usable_bytes / GIB}]
        rule = {"type": "rule", "color": VERMILION, "strokeDash": [2, 2], "strokeWidth": 2}
        x = {"field": "gib", "type": "quantitative"}
        body["layer"].append({"data": {"name": "limit"}, "mark": rule, "encoding": {"x": x}})
    return spec_of(title, subtitle, body, height={"step": BAR_STEP})


def time(bars: Sequence[Bar], colours: Colours, *, title: str) -> Spec:
    rows = [{**row, "seconds": row["size"]} for bar in bars for row in bar.rows()]
    body = _bars(rows, "seconds", "seconds of one step", colours, ".4s")
    return spec_of(title, "on the critical path", body, height={"step": BAR_STEP})


def _bars(rows: list[dict[str, Any]], field: str, title: str, colours: Colours, shown: str) -> Spec:
    drawn = present(colours, (row["part"] for row in rows))
    y = {"field": "number", "type": "nominal", "sort": None, "title": None}
    mark = {
        "mark": {"type": "bar"},
        "data": {"name": "parts"},
        "encoding": {
            "y": y,
            "x": {"field": field, "type": "quantitative", "title": title, "stack": "zero"},
            "color": by_name("part", [*drawn], [*drawn.values()]),
            "order": {"field": "order"},
            "tooltip": [
                {"field": "number", "title": "number"},
                {"field": "layout"},
                {"field": "part"},
                {"field": field, "title": title, "format": shown},
                {"field": "share", "format": ".1%"},
            ],
        },
    }
    return {"datasets": {"parts": rows}, "layer": [mark]}
