"""A chart: its Vega-Lite specification, and the formats it is drawn in.

Source: https://vega.github.io/vega-lite/docs/
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from planner.errors import MissingPackageError, fault, how_to_install

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
MIME = "application/vnd.vegalite.v6+json"
WIDTH, HEIGHT = 720, 400
PNG_SCALE = 2.0
SUFFIXES = (".svg", ".png", ".html")  # each a method of `Chart`

# Okabe and Ito 2008, told apart with every kind of colour vision.
BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, VERMILION, PURPLE, GREY = "#E69F00", "#D55E00", "#CC79A7", "#999999"
# of things that have no colour of their own: the first, the second, ...
PALETTE = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, YELLOW, GREY)
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")

CONFIG: Spec = {
    "font": "system-ui, 'DejaVu Sans', sans-serif",
    "background": "white",
    "view": {"stroke": None},
    "axis": {"grid": True, "gridOpacity": 0.4, "domain": False, "ticks": False, "labelPadding": 6},
    "title": {"anchor": "start", "fontSize": 14, "subtitleFontSize": 11, "offset": 12},
    "legend": {"orient": "bottom", "title": None, "labelLimit": 0, "symbolOpacity": 1},
}


def spec_of(title: str, subtitle: str, body: Mapping[str, Any], *, height: object = HEIGHT) -> Spec:
    """The frame of every chart, around its data and layers."""
    return {
        "$schema": SCHEMA,
        "title": {"text": title, **({"subtitle": subtitle} if subtitle else {})},
        "description": f"{title}. {subtitle}".removesuffix(" "),
        "width": WIDTH,
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": CONFIG,
        **body,
    }


def layer(data: str, mark: Spec, encoding: Spec, *, only: str = "") -> Spec:
    """A layer of one data set; only: Vega's expression for the rows that it draws."""
    chosen = {"transform": [{"filter": only}]} if only else {}
    return {"data": {"name": data}, **chosen, "mark": mark, "encoding": encoding}


def by_name(field: str, names: Sequence[str], values: Sequence[str], **more: object) -> Spec:
    """An encoding of a field by a colour or shape for each name; over again where they run out."""
    chosen = [values[place % len(values)] for place in range(len(names))]
    scale = {"domain": list(names), "range": chosen}
    return {"field": field, "type": "nominal", "scale": scale, **(more or {"title": None})}


def present(colours: Mapping[str, str], found: Iterable[str]) -> dict[str, str]:
    """The names among those found, in the order of their colours."""
    known = set(found)
    return {name: colour for name, colour in colours.items() if name in known}


@dataclass(frozen=True, slots=True)
class Chart:
    """A specification that draws itself; in a notebook by being the last value of a cell."""

    spec: Spec

    def svg(self) -> str:
        """As a vector drawing. Raises MissingPackageError."""
        return str(_converter().vegalite_to_svg(self.spec))

    def png(self, scale: float = PNG_SCALE) -> bytes:
        """As pixels. Raises MissingPackageError."""
        return bytes(_converter().vegalite_to_png(self.spec, scale=scale))

    def html(self) -> str:
        """As a page that asks nothing of the network. Raises MissingPackageError."""
        return str(_converter().vegalite_to_html(self.spec, bundle=True))

    def drawn(self, suffix: str) -> bytes:
        """As a file of this suffix: .svg, .png or .html. Raises SpecError for another."""
        if suffix.lower() not in SUFFIXES:
            remedy = f"name a file that ends in {', '.join(SUFFIXES)}"
            raise fault("plot", suffix or None, "is no format of a chart", remedy)
        made: str | bytes = getattr(self, suffix.lower().removeprefix("."))()
        return made.encode() if isinstance(made, str) else made

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """The drawing for a notebook, and the specification where it can draw that."""
        bundle: dict[str, Any] = {MIME: self.spec, "text/plain": self.spec["description"]}
        try:
            return {**bundle, "image/svg+xml": self.svg()}
        except MissingPackageError:
            return bundle


def javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script. Raises MissingPackageError."""
    return str(_converter().javascript_bundle())


def _converter() -> Any:
    try:
        return import_module("vl_convert")
    except ImportError:
        raise MissingPackageError(f"no vl_convert here; {how_to_install('plot')}") from None
