"""A measurement: what one run of one layout really did. Rows of `benchmarks/measured/` and results of probes are this one object."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from planner.errors import Fault, SpecError
from planner.specs.job import Job

Status = Literal["ok", "oom", "failed"]
Rung = Literal["emulated", "imitated", "probed", "published"]


class Measured(BaseModel):
    """The numbers of one run; None where it did not say. Keys are those of a row's `measured`; unknown keys of a row are kept.

    step_seconds: median of the timed steps.  step_seconds_sd: their standard deviation.  steps: how many.
    peak_*_bytes: of the worst rank.  device_bytes: memory in use on the device.  rung: `emulated`: one rank of a larger world, no
    communication; `imitated`: extrapolated from fewer layers or replicas; `probed`: the layout itself; `published`: somebody's own run.
    failure: class of what went wrong (`probes.protocol.FailureKind`), with its first root cause in `message`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    status: Status = "ok"
    rung: Rung = "published"
    step_seconds: float | None = None
    step_seconds_sd: float | None = None
    steps: int | None = None
    tokens_per_second_per_gpu: float | None = None
    peak_allocated_bytes: float | None = None
    peak_reserved_bytes: float | None = None
    device_bytes: float | None = None
    failure: str | None = None
    message: str | None = None
    gpu_seconds: float | None = None


class Measurement(BaseModel):
    """A job with the layout that ran, and what came of it.

    software: versions and device that the result holds for (torch, cuda, nccl, driver, gpu_name, trainer version).
    created_at: ISO 8601, UTC.  source: where it comes from (a probe's id, a file, a publication).
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    id: str
    created_at: str
    job: Job
    measured: Measured
    software: Mapping[str, str] = {}
    source: str = ""

    @classmethod
    def from_row(cls, row: Mapping[str, Any], *, measurement_id: str, created_at: str, allow_files: bool = True) -> "Measurement":
        """From a job with a layout whose `measured` label holds the numbers. Raises SpecError."""
        job = Job.from_user(row, allow_files=allow_files)
        if job.layout is None:
            raise SpecError(Fault("layout", None, "is required in a measurement", "add the layout that ran"))
        values = job.labels.get("measured")
        if not isinstance(values, Mapping):
            raise SpecError(Fault("measured", values, "is required in a measurement", "add measured: {step_seconds: ...}"))
        software = values.get("software") or {}
        return cls(
            id=measurement_id, created_at=created_at, job=job, measured=Measured.model_validate(dict(values)),
            software={str(k): str(v) for k, v in software.items()}, source=str(job.labels.get("source", "")),
        )  # fmt: skip

    def as_row(self) -> dict[str, Any]:
        """The row that `from_row` reads back to the same measurement."""
        row = {key: value for key, value in self.job.request.items() if key not in ("search", "probe")}
        numbers = self.measured.model_dump(exclude_none=True)
        return {**row, "source": self.source, "measured": {**numbers, "software": dict(self.software)}}
