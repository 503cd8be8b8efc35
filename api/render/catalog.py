"""Lists of the catalogue as tables."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from planner.units import TERA, format_bandwidth, format_bytes, format_count


def catalog_table(kind: str, lines: Sequence[dict[str, Any]]) -> Table:
    """One row an entry; of `defaults` one column a trainer, because there are many fields."""
    if kind == "defaults":
        return _defaults_table(lines)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for key in lines[0] if lines else ():
        numeric = not isinstance(lines[0][key], str)
        table.add_column(_title(key), justify="right" if numeric else "left", no_wrap=key == "name")
    for line in lines:
        table.add_row(*(_shown(key, value) for key, value in line.items()))
    return table


def _defaults_table(lines: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("field", no_wrap=True)
    for line in lines:
        table.add_column(str(line["name"]))
    for key in (key for key in lines[0] if key != "name"):
        table.add_row(key, *(_shown(key, line.get(key)) for line in lines))
    return table


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
