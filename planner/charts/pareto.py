"""Throughput against memory: layouts considered, with intervals and measurements."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.charts.chart import BLUE, GREEN, GREY, ORANGE, VERMILION, Spec, by_name, layer, spec_of
from planner.units import GIB, counted, format_bytes

Axis = Callable[[str], Spec]
FIRST, RANKED, OTHER, UNFIT, MEASURED = (
    "number 1", "other ranked", "considered", "does not fit", "measured",
)  # fmt: skip
COLOURS = {FIRST: VERMILION, RANKED: BLUE, OTHER: GREY, UNFIT: ORANGE, MEASURED: GREEN}
SHAPES = {FIRST: "circle", RANKED: "circle", OTHER: "circle", UNFIT: "cross", MEASURED: "diamond"}
MARGIN = 0.12  # of the range of values; judgement
FARTHEST = 1.25  # times the usable memory; judgement
X_TITLE, Y_TITLE = "device memory of the fullest GPU, GiB", "tokens/s/GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One layout.

    rank: None where the plan does not show it.
    tokens_per_second_per_gpu, device_bytes: as predicted, with the ends of their intervals.
    measured_tokens_per_second_per_gpu: of a probe; None without one.
    """

    layout: str
    rank: int | None
    num_gpus: int
    tokens_per_second_per_gpu: float
    interval: tuple[float, float] | None
    device_bytes: float
    memory_interval: tuple[float, float] | None
    fits: bool
    measured_tokens_per_second_per_gpu: float | None = None

    @property
    def series(self) -> str:
        if not self.fits:
            return UNFIT
        return OTHER if self.rank is None else FIRST if self.rank == 1 else RANKED

    def row(self) -> dict[str, Any]:
        """Data of the point: SI numbers, and memory in GiB too."""
        low, high = self.interval or (None, None)
        least, most = self.memory_interval or (None, None)
        return {
            **{key: value for key, value in asdict(self).items() if not key.endswith("interval")},
            "series": self.series,
            "low": low,
            "high": high,
            "gib": self.device_bytes / GIB,
            "low_gib": None if least is None else least / GIB,
            "high_gib": None if most is None else most / GIB,
        }


def front(points: Sequence[Point]) -> list[Point]:
    """Points that fit and that no other beats in both throughput and memory, least memory first."""
    found: list[Point] = []
    fitting = [point for point in points if point.fits]
    for point in sorted(fitting, key=lambda p: (p.device_bytes, -p.tokens_per_second_per_gpu)):
        if not found or point.tokens_per_second_per_gpu > found[-1].tokens_per_second_per_gpu:
            found.append(point)
    return found


def shown(points: Sequence[Point], usable_bytes: float | None) -> tuple[list[Point], int]:
    """(points to draw, how many are left out): what is far from fitting would take all the room."""
    if usable_bytes is None:
        return list(points), 0
    near = [point for point in points if point.device_bytes <= FARTHEST * usable_bytes]
    return near, len(points) - len(near)


def pareto(
    points: Sequence[Point], usable_bytes: float | None, *, title: str, subtitle: str = ""
) -> Spec:
    """The chart. usable_bytes: of a GPU, the limit that is drawn."""
    points, left_out = shown(points, usable_bytes)
    subtitle = f"{subtitle}; lines are 90% intervals".removeprefix("; ")
    if left_out:
        beyond = (
            f"{counted(left_out, 'layout')} beyond {FARTHEST:g} times the usable memory left out"
        )
        subtitle += f"; {beyond}"
    rows = [point.row() for point in points]
    measured = [
        {**row, "series": MEASURED} for row in rows if row["measured_tokens_per_second_per_gpu"]
    ]
    series = [name for name in COLOURS if any(row["series"] == name for row in [*rows, *measured])]
    # what the plan ranks lies above what it only considered
    rows.sort(key=lambda row: (row["rank"] is not None, -(row["rank"] or 0)))
    limit = []
    if usable_bytes is not None:
        limit = [{"gib": usable_bytes / GIB, "text": f"usable {format_bytes(usable_bytes)}"}]
    x, y = _axes(points, usable_bytes)
    body = {
        "datasets": {
            "points": rows,
            "measured": measured,
            "front": [point.row() for point in front(points)],
            "limit": limit,
        },
        "encoding": {"x": x("gib"), "y": y("tokens_per_second_per_gpu")},
        "layer": [
            *_limit(),
            {
                "data": {"name": "front"},
                "mark": {"type": "line", "strokeDash": [4, 3], "color": GREY, "opacity": 0.8},
            },
            _interval({"y": y("low"), "y2": {"field": "high"}}, "datum.low != null"),
            _interval({"x": x("low_gib"), "x2": {"field": "high_gib"}}, "datum.low_gib != null"),
            _marks("points", y("tokens_per_second_per_gpu"), series),
            _marks("measured", y("measured_tokens_per_second_per_gpu"), series),
            layer(
                "points",
                {"type": "text", "dx": 10, "dy": -8, "fontSize": 11},
                {"text": {"field": "rank", "type": "quantitative"}},
                only="datum.rank != null",
            ),
        ],
    }
    return spec_of(title, subtitle, body)


def _domain(values: Sequence[float]) -> Spec:
    """A scale that holds the values with room around them; intervals may reach beyond it."""
    low, high = min(values), max(values)
    room = MARGIN * (high - low or high)
    return {"domain": [low - room, high + room], "zero": False, "nice": False}


def _axes(points: Sequence[Point], usable_bytes: float | None) -> tuple[Axis, Axis]:
    """Makers of an encoding of a field on each axis."""
    sizes = [point.device_bytes / GIB for point in points]
    limit = [] if usable_bytes is None else [usable_bytes / GIB]
    rates = [point.tokens_per_second_per_gpu for point in points]
    measured = [point.measured_tokens_per_second_per_gpu for point in points]
    x_scale = _domain([*sizes, *limit] or [1.0])
    y_scale = _domain([*rates, *(rate for rate in measured if rate)] or [1.0])

    def axis(title: str, scale: Spec, **drawn: object) -> Axis:
        shown = {"type": "quantitative", "title": title, "scale": scale, "axis": drawn}
        return lambda field: {"field": field, **shown}

    return axis(X_TITLE, x_scale, tickCount=8), axis(Y_TITLE, y_scale, format=",.0f", tickCount=7)


def _limit() -> list[Spec]:
    text = {"type": "text", "align": "right", "baseline": "top", "dx": -5, "fontSize": 11}
    at_top = {"y": {"value": 0}, "text": {"field": "text"}}
    rule = {"type": "rule", "color": VERMILION, "strokeDash": [2, 2]}
    return [layer("limit", rule, {"y": None}), layer("limit", text, at_top)]


def _interval(encoding: Spec, drawn: str) -> Spec:
    mark = {"type": "rule", "opacity": 0.5, "strokeWidth": 1, "clip": True}
    series = {"field": "series", "type": "nominal"}
    return layer(
        "points", mark, {**encoding, "color": series}, only=f"datum.rank != null && {drawn}"
    )


def _marks(data: str, encoding: Spec, series: Sequence[str]) -> Spec:
    ranked = {"test": "datum.rank != null", "value": 90}
    return layer(data, {"type": "point", "filled": True, "opacity": 0.9}, {
        "y": encoding,
        "color": by_name("series", series, [COLOURS[name] for name in series]),
        "shape": by_name("series", series, [SHAPES[name] for name in series]),
        "size": {"condition": ranked, "value": 36},
        "tooltip": [
            {"field": "rank", "title": "number"},
            {"field": "layout"},
            {"field": "num_gpus", "title": "GPUs", "format": ","},
            {"field": "tokens_per_second_per_gpu", "title": "tokens/s/GPU", "format": ",.0f"},
            {"field": "low", "title": "at least, 90%", "format": ",.0f"},
            {"field": "high", "title": "at most, 90%", "format": ",.0f"},
            {"field": "measured_tokens_per_second_per_gpu", "title": "measured",
             "format": ",.0f"},
            {"field": "gib", "title": "memory, GiB", "format": ".1f"},
        ],
    })  # fmt: skip
