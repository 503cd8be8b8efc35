"""A pipeline's step: which rank does what when."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from planner.charts.chart import BLUE, GREEN, ORANGE, PURPLE, Spec, by_name, present, spec_of
from planner.units import format_seconds

ROW_STEP = 24
MOST_DRAWN = 6000  # actions; judgement: more are narrower than a pixel
COLOURS = {"forward": BLUE, "input gradient": PURPLE, "weight gradient": GREEN, "backward": ORANGE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action of one pipeline rank. action: in PyTorch's notation, "2F0"."""

    rank: int
    action: str
    kind: str
    stage: int
    microbatch: int
    start_seconds: float
    end_seconds: float


def timeline(spans: Sequence[Span], *, title: str, subtitle: str = "") -> Spec:
    """The chart; of a step with more than MOST_DRAWN actions its beginning."""
    drawn = sorted(spans, key=lambda span: span.start_seconds)[:MOST_DRAWN]
    if len(drawn) < len(spans):
        until = format_seconds(drawn[-1].end_seconds)
        whole = format_seconds(max(span.end_seconds for span in spans))
        subtitle = f"{subtitle}; the first {until} of {whole}".removeprefix("; ")
    kinds = present(COLOURS, (span.kind for span in drawn))
    body = {
        "datasets": {"spans": [asdict(span) for span in drawn]},
        "data": {"name": "spans"},
        "mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.3},
        "encoding": {
            "y": {"field": "rank", "type": "ordinal", "title": "pipeline rank"},
            "x": {"field": "start_seconds", "type": "quantitative", "title": "seconds",
                  "scale": {"nice": False}},
            "x2": {"field": "end_seconds"},
            "color": by_name("kind", [*kinds], [*kinds.values()]),
            "tooltip": [
                {"field": "action"}, {"field": "kind"}, {"field": "rank"}, {"field": "stage"},
                {"field": "microbatch"},
                {"field": "start_seconds", "title": "start, s", "format": ".4s"},
                {"field": "end_seconds", "title": "end, s", "format": ".4s"},
            ],
        },
    }  # fmt: skip
    return spec_of(title, subtitle, body, height={"step": ROW_STEP})
