"""Reads a measured row, from a file or a request, as a measurement."""

from collections.abc import Mapping
from typing import Any

from planner.catalog.clusters import gpu_names
from planner.errors import fault
from planner.intake.jobs import read_job
from planner.intake.machines import load_gpu
from planner.specs.job import Job
from planner.specs.measurement import Measured, Measurement
from planner.specs.validation import build


def read_measurement(
    row: Mapping[str, Any], *, measurement_id: str, created_at: str, allow_files: bool = True
) -> Measurement:
    """The measurement in a job with a layout, whose label `measured` holds the numbers.

    Raises SpecError.
    """
    values = {key: value for key, value in row.items() if key not in ("measured", "source")}
    job = with_catalogue_gpu(read_job(values, allow_files=allow_files))
    if job.layout is None:
        raise fault("layout", None, "is required in a measurement", "add the layout that ran")
    measured = row.get("measured")
    if not isinstance(measured, Mapping):
        rule, remedy = "is required in a measurement", "add measured: {step_seconds: ...}"
        raise fault("measured", measured, rule, remedy)
    software = measured.get("software") or {}
    if not isinstance(software, Mapping):
        remedy = "write software: {torch: 2.11.0}"
        raise fault("measured.software", software, "must be a mapping of names to versions", remedy)
    numbers = build(
        Measured, {key: value for key, value in measured.items() if key != "software"}, "measured"
    )
    return Measurement(
        id=measurement_id,
        created_at=created_at,
        job=job,
        measured=numbers,
        software={str(k): str(v) for k, v in software.items()},
        source=str(row.get("source", "")),
    )


def with_catalogue_gpu(job: Job) -> Job:
    """The job on the catalogue's GPU of that name, whatever figures the row gives it.

    Runs teach by their GPU's name, so figures under it would pass for everyone's.
    """
    gpu = job.cluster.gpu
    if gpu.name not in gpu_names() or gpu == load_gpu(gpu.name):
        return job
    cluster = job.cluster.model_copy(update={"gpu": load_gpu(gpu.name)})
    return job.model_copy(update={"cluster": cluster})
