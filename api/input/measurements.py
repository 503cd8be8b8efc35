"""Measurements in and out: rows as JSON lines or CSV, a TorchTitan log or TensorBoard files.

In CSV a nested key is a column with dots ("training.seq_len"). A cell that is JSON means its
value, everything else is text.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from planner.api.catalog import named
from planner.api.input.belief import checked_rows
from planner.api.input.measurement_rows import STORED, csv_rows, json_rows
from planner.api.input.text import check_plain, read_text
from planner.api.own_entries import with_own
from planner.api.storage.common import is_id
from planner.api.wiring import Wiring
from planner.errors import ConflictError, Fault, NotFoundError, SpecError, fault
from planner.intake.current import complete
from planner.intake.measurements import read_measurement
from planner.intake.near_files import with_near_file
from planner.intake.trainer_files.megatron_log import is_log, measured_by
from planner.probes.trainers.titan_run import (
    check_log,
    completed,
    event_numbers,
    log_numbers,
    stated_by,
)
from planner.specs.job import MAX_TEXT
from planner.specs.measurement import Measurement, Rung, Status

Format = Literal["rows", "csv", "torchtitan", "megatron", "tensorboard"]
FORMATS: tuple[Format, ...] = ("rows", "csv", "torchtitan", "megatron", "tensorboard")
ID_LENGTH = 64
ROWS = re.compile(r"\s*(?:\{|\[\s*(?:\{|\]))")  # a log may begin with a bracket too: "[rank0]:"
OWNER_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """New measurements, and ids that the database had already, with the same content."""

    new: tuple[Measurement, ...]
    known: tuple[str, ...]

    @property
    def refused(self) -> dict[str, str]:
        """Why new ones are not believed, by id."""
        return {one.id: one.refused for one in self.new if one.refused is not None}


def guess_format(path: Path, text: str | None) -> Format:
    """By name and first characters. text: None for a folder or a binary file."""
    if text is None:
        return "tensorboard"
    if ROWS.match(text):
        return "rows"
    if path.suffix.lower() == ".csv":
        return "csv"
    return "megatron" if is_log(text) else "torchtitan"


def read_file(
    wiring: Wiring, path: str, format: Format | None, job: Mapping[str, Any] | None
) -> list[Measurement]:
    """The measurements of a file or of a TensorBoard folder.

    Raises SpecError; for rows with the faults of every line.
    """
    place = Path(path).expanduser()
    binary = path != "-" and (place.is_dir() or "tfevents" in place.name)
    if format == "tensorboard" and not binary:
        rule = f"{path} is no folder and no event file"
        raise fault("--format", format, rule, "give the folder of events.out.tfevents.*")
    remedy = "give the path of rows, of a TorchTitan log, or of a TensorBoard folder"
    text = None if binary else read_text(path, "FILE", remedy)
    chosen = format or guess_format(place, text)
    if chosen == "tensorboard":
        return [_from_events(wiring, place, job)]
    assert text is not None, "a text format has its text"
    return read_measurements(wiring, text, chosen, job=job, source=path, allow_files=True)


def read_measurements(
    wiring: Wiring,
    text: str,
    format: Format,
    *,
    job: Mapping[str, Any] | None = None,
    source: str = "",
    allow_files: bool = False,
) -> list[Measurement]:
    """The measurements of a text. Raises SpecError."""
    if format == "torchtitan":
        check_log(text, source or "the log")
        said, doubts = stated_by(text)
        parsed = completed(said, doubts, job or {}, source or "the log")
        numbers = {"source": source, "measured": log_numbers(text, parsed, source)}
        return [_of_row(wiring, {**parsed.request, **numbers}, "", allow_files)]
    if format == "megatron":
        return [_of_row(wiring, _megatron_row(text, job or {}, source or "the log"), "", False)]
    rows = csv_rows(text) if format == "csv" else json_rows(text)
    return of_rows(wiring, rows, allow_files=allow_files)


def _megatron_row(text: str, job: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The row of a Megatron-LM log. Raises SpecError for a log without arguments or steps."""
    measured = measured_by(text)
    if not is_log(text) or not measured:
        rule = "holds no arguments and steps of Megatron-LM"
        remedy = "give the log from its first line on, with `elapsed time per iteration`"
        raise fault("FILE", source, rule, remedy)
    current = {"name": source, "format": "megatron-log", "text": text[:MAX_TEXT]}
    try:
        whole = complete({**job, "current": current})
    except SpecError as error:
        remedy = "give it in --job FILE, for example cluster: {gpu: h100-sxm-80gb}"
        raise SpecError([replace(one, remedy=remedy) for one in error.faults]) from None
    parts = {name: whole[name] for name in ("model", "cluster", "training", "layout")}
    return {**parts, "source": source, "measured": measured}


def _from_events(wiring: Wiring, place: Path, job: Mapping[str, Any] | None) -> Measurement:
    if not place.exists():
        remedy = with_near_file("give a log, rows, or a folder of event files", place)
        raise fault("FILE", str(place), "no such file or folder", remedy)
    parsed = completed({}, (), job or {}, str(place))
    numbers = {"source": str(place), "measured": event_numbers(place, parsed)}
    return _of_row(wiring, {**parsed.request, **numbers}, "", True)


def of_rows(
    wiring: Wiring, rows: Iterable[tuple[str, object]], *, allow_files: bool
) -> list[Measurement]:
    """Measurements from (where, row) pairs.

    Raises SpecError with the faults of all rows, each with where it is.
    """
    found, faults = [], []
    for where, row in rows:
        try:
            found.append(_of_row(wiring, with_own(wiring, row), where, allow_files))
        except SpecError as error:
            faults += [
                Fault(f"{where} {one.field}".strip(), one.value, one.rule, one.remedy)
                for one in error.faults
            ]
    if faults:
        raise SpecError(faults)
    if not found:
        remedy = "write one JSON object a line, with model, cluster, training, layout, measured"
        raise fault("rows", None, "hold no measurement", remedy)
    return found


def _of_row(wiring: Wiring, row: object, where: str, allow_files: bool) -> Measurement:
    if not isinstance(row, Mapping):
        remedy = "write model, cluster, training, layout and measured"
        raise fault("row", row, "is no JSON object", remedy)
    check_plain(dict(row), where or "row")
    asked, measured, at = row.get("id"), row.get("measured"), None
    written = {**row}
    if isinstance(measured, Mapping):
        written["measured"] = {key: measured[key] for key in measured if key not in STORED}
    usable = isinstance(asked, str) and 0 < len(asked) <= ID_LENGTH and is_id(asked)
    content = hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()
    name = str(asked) if usable else f"measurement-{content[:24]}"
    if isinstance(measured, Mapping):
        at = written["measured"].pop("created_at", None)
    created_at = _moment(at) if isinstance(at, str) else wiring.clock.now().isoformat()
    return read_measurement(
        written, measurement_id=name, created_at=created_at, allow_files=allow_files
    )


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        remedy = "write for example 2026-11-21T12:00:00+00:00"
        raise fault("measured.created_at", text, "is no moment with a time zone", remedy)
    return text


def store_new(
    wiring: Wiring, measurements: Sequence[Measurement], *, asked_by: str, shared: bool
) -> Stored:
    """Stores the rows that this owner has not stored yet; the same import twice changes nothing.

    asked_by: who stores them. shared: whether they count for others' plans.

    Raises ConflictError for an id with other content.
    """
    new: dict[str, Measurement] = {}
    known: list[str] = []
    for one in measurements:
        name, before = _owners(wiring, one.id, asked_by)
        before = new.get(name, before)
        if before is None:
            own = {"id": name, "asked_by": asked_by, "shared": shared}
            new[name] = one.model_copy(update=own)
        elif _content(before) == _content(one):
            known.append(name)
        else:
            raise ConflictError(
                f"measurement {name} exists with other content; give the row another id, or "
                "leave its id out"
            )
    stored = checked_rows(wiring, list(new.values()), asked_by)
    wiring.measurements.add(stored)
    return Stored(new=tuple(stored), known=tuple(known))


def _owners(wiring: Wiring, name: str, owner: str) -> tuple[str, Measurement | None]:
    """(id under which this owner's row of that name is stored, the row where there is one).

    A name that somebody else's row has is followed by a hash of the owner.
    """
    while True:
        try:
            found = wiring.measurements.get(name)
        except NotFoundError:
            return name, None
        if found.asked_by in (None, owner):
            return name, found
        whose = hashlib.sha256(f"{owner}\n{name}".encode()).hexdigest()[:OWNER_DIGITS]
        name = f"{name[: ID_LENGTH - 1 - OWNER_DIGITS]}~{whose}"


def _content(measurement: Measurement) -> dict[str, Any]:
    """A measurement's content without the id of its row, which an export changes."""
    return {key: value for key, value in measurement.as_row().items() if key != "id"}


def filter_of(**wanted: str | None) -> dict[str, str | None]:
    """Filter on measurements; model and gpu by any name of the catalogue.

    wanted: columns of a measurement. Raises SpecError for an unknown status or fidelity.
    """
    kinds = {"status": get_args(Status), "rung": get_args(Rung)}
    faults = [
        Fault(field, wanted[field], "is not one of the known values", f"use {', '.join(known)}")
        for field, known in kinds.items()
        if wanted.get(field) not in (None, *known)
    ]
    if faults:
        raise SpecError(faults)
    return named(wanted)


def all_of(wiring: Wiring, wanted: Mapping[str, str | None]) -> Iterator[Measurement]:
    """All wanted measurements, newest first, page by page."""
    return wiring.measurements.all(**wanted)
