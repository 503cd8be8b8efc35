"""Reads a measured row, from a file or a request, as a measurement."""

from collections.abc import Mapping
from typing import Any

from planner.errors import Fault, SpecError
from planner.intake.jobs import read_job
from planner.specs.measurement import Measured, Measurement
from planner.specs.validation import build


def read_measurement(
    row: Mapping[str, Any], *, measurement_id: str, created_at: str, allow_files: bool = True
) -> Measurement:
    """The measurement in a job with a layout, whose label `measured` holds the numbers.

    Raises SpecError.
    """
    job = read_job(
        {key: value for key, value in row.items() if key not in ("measured", "source")},
        allow_files=allow_files,
    )
    if job.layout is None:
        raise SpecError(
            Fault("layout", None, "is required in a measurement", "add the layout that ran")
        )
    values = row.get("measured")
    if not isinstance(values, Mapping):
        raise SpecError(
            Fault(
                "measured",
                values,
                "is required in a measurement",
                "add measured: {step_seconds: ...}",
            )
        )
    software = values.get("software") or {}
    if not isinstance(software, Mapping):
        remedy = "write software: {torch: 2.11.0}"
        raise SpecError(
            Fault("measured.software", software, "must be a mapping of names to versions", remedy)
        )
    numbers = build(
        Measured, {key: value for key, value in values.items() if key != "software"}, "measured"
    )
    return Measurement(
        id=measurement_id,
        created_at=created_at,
        job=job,
        measured=numbers,
        software={str(k): str(v) for k, v in software.items()},
        source=str(row.get("source", "")),
    )
