"""Measurements as rows of JSON and CSV, in and out."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from planner.api.input.text import MAX_DEPTH, MAX_FILE_BYTES, read_json
from planner.errors import fault
from planner.specs.measurement import Measurement

# what `shown_row` adds to `measured`; a row imported again may hold it
STORED = ("asked_by", "shared", "refused")
OPEN_PARTS = ("model", "cluster", "training", "layout", "measured")


def row_of(measurement: Measurement) -> dict[str, Any]:
    """A row as in `benchmarks/measured/public.jsonl`; importing it gives the same measurement."""
    row = measurement.as_row()
    return {
        **row,
        "id": measurement.id,
        "measured": {**row["measured"], "created_at": measurement.created_at},
    }


def shown_row(measurement: Measurement) -> dict[str, Any]:
    """The row with what the database says of it: whose it is, and why it is not believed."""
    row = row_of(measurement)
    stored = {name: getattr(measurement, name) for name in STORED}
    return {**row, "measured": {**row["measured"], **stored}}


def json_rows(text: str) -> Iterator[tuple[str, object]]:
    """(where, row) of JSON lines, or of one JSON list or object."""
    stripped = text.strip()
    if stripped.startswith("["):
        yield from (
            (f"row {number}", row)
            for number, row in enumerate(read_json(stripped, "rows"), start=1)
        )
        return
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and stripped.startswith("{") and not lines[0].rstrip().endswith("}"):
        yield "row 1", read_json(stripped, "rows")
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"line {number}", read_json(line, f"line {number}")


def csv_rows(text: str) -> Iterator[tuple[str, object]]:
    """(where, row) of CSV with a header."""
    csv.field_size_limit(MAX_FILE_BYTES)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        where, remedy = f"line {reader.line_num}", "quote cells with RFC 4180's quotes"
        raise fault(where, None, f"is not CSV ({error})", remedy) from None
    for number, cells in enumerate(rows, start=2):
        if None in cells or None in cells.values():
            rule = "has other columns than the header"
            raise fault(f"line {number}", None, rule, "quote cells that hold commas")
        row: dict[str, Any] = {}
        for column, cell in cells.items():
            if cell != "":
                _put(row, column.split("."), _value(cell, f"line {number} {column}"))
        yield f"line {number}", row


def _put(row: dict[str, Any], path: Sequence[str], value: object) -> None:
    for key in path[:-1]:
        inner = row.setdefault(key, {})
        row = inner if isinstance(inner, dict) else {}
    row[path[-1]] = value


def _value(cell: str, where: str = "cell") -> object:
    try:
        return json.loads(cell)
    except RecursionError:
        rule = f"is nested deeper than {MAX_DEPTH} levels"
        raise fault(where, None, rule, "remove the nesting") from None
    except ValueError:
        return cell


def to_csv(measurements: Iterable[Measurement]) -> str:
    """CSV with a column for every key that occurs."""
    rows = [_flat(row_of(measurement)) for measurement in measurements]
    columns = list(dict.fromkeys(["id", "source", *(column for row in rows for column in row)]))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, str]:
    cells: dict[str, str] = {}
    for key, value in row.items():
        if key in OPEN_PARTS and isinstance(value, Mapping):
            cells |= {f"{key}.{name}": _cell(item) for name, item in value.items()}
        else:
            cells[key] = _cell(value)
    return cells


def _cell(value: object) -> str:
    """Text as it is, unless it would be read as something else.

    Null is a value too (`max_grad_norm: null` is no clipping).
    """
    if isinstance(value, str) and value and _value(value) == value:
        return value
    return json.dumps(value)
