"""Lists of the catalogue as tables."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from planner.api.render.grid import Column, grid
from planner.units import TERA, format_bandwidth, format_bytes, format_count


def catalog_table(kind: str, lines: Sequence[dict[str, Any]], width: int) -> Text:
    """One row an entry; of `defaults` one column a trainer, because there are many fields.

    On narrow terminals text that does not fit stands below its row, and the last columns are left
    out.
    """
    if kind == "defaults":
        return _defaults_table(lines, width)
    keys = list(lines[0]) if lines else []
    columns = []
    for index, key in enumerate(keys):
        right = not isinstance(lines[0][key], str)
        text = not right and key != "name"
        drop = None if index == 0 else len(keys) - index
        columns.append(Column(name=_title(key), right=right, wraps=text, below=text, drop=drop))
    return grid(columns, [[_shown(key, line[key]) for key in keys] for line in lines], width)


def _defaults_table(lines: Sequence[dict[str, Any]], width: int) -> Text:
    """Trainers that do not fit beside the others follow in a table of their own."""
    keys = [key for key in lines[0] if key != "name"]
    parts, taken = [], 0
    while taken < len(lines):
        some = len(lines) - taken
        while some > 1 and not _fits(keys, lines[taken : taken + some], width):
            some -= 1
        parts.append(_trainers(keys, lines[taken : taken + some], width))
        taken += some
    return Text("\n\n").join(parts)


def _fits(keys: Sequence[str], lines: Sequence[dict[str, Any]], width: int) -> bool:
    return max(len(line) for line in _trainers(keys, lines, sys.maxsize).plain.split("\n")) <= width


def _trainers(keys: Sequence[str], lines: Sequence[dict[str, Any]], width: int) -> Text:
    columns = [Column(name="field"), *(Column(name=str(line["name"])) for line in lines)]
    rows = [(key, *(_shown(key, line.get(key)) for line in lines)) for key in keys]
    return grid(columns, rows, width)


def _title(key: str) -> str:
    for suffix in ("_bytes_per_second", "_flops_per_second", "_bytes", "_watts"):
        if key.endswith(suffix):
            return key.removesuffix(suffix).replace("_", " ")
    return key.removeprefix("num_").replace("_", " ")


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_flops_per_second"):
        return f"{value / TERA:,.0f} TFLOP/s" if value >= TERA else f"{value / TERA:.2g} TFLOP/s"
    if key.endswith("_bytes_per_second"):
        return format_bandwidth(value)
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key.endswith("_watts"):
        return f"{value:.0f} W"
    if key.endswith("parameters"):
        return format_count(value)
    return f"{value:,}" if isinstance(value, int) and key != "hidden_size" else str(value)
