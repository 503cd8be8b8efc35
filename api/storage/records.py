"""Records of the stores: plans, estimates, measurements, sweeps, the audit trail.

Stores raise StoreError when the database cannot answer, NotFoundError for an unknown id and
ConflictError for an id that exists already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from planner.cost.machine.knobs import StaleRuns
from planner.specs.estimate import Estimate
from planner.specs.job import Job

Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    """Part of a list. next_cursor: pass it as `cursor` to get the next page; null on the last."""

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True)

    items: list[Item]
    next_cursor: str | None


# ---- plans and estimates -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLabels:
    """Keys by which a stored plan is found.

    job_hash: of the job without its id and labels, so that equal questions have equal hashes.
    status: "done"; "cancelled" for the best so far of a study that somebody ended.
    asked_by: the key, as of a job of a queue.
    """

    job_hash: str
    model: str
    gpu: str
    seq_len: int
    global_batch_size: int
    trainer: str
    status: str = "done"
    asked_by: str | None = None

    @classmethod
    def of(
        cls, job: Job, job_hash: str, status: str = "done", asked_by: str | None = None
    ) -> "PlanLabels":
        return cls(
            job_hash=job_hash,
            model=job.model.name,
            gpu=job.cluster.gpu.name,
            seq_len=job.training.seq_len,
            global_batch_size=job.training.global_batch_size,
            trainer=job.training.trainer,
            status=status,
            asked_by=asked_by,
        )


class PlanLine(BaseModel):
    """One plan of a list. A field that has the name of a column of `plans` is read from there.

    status: "done"; "cancelled" with the best so far; "queued" or "running" while probes are spent
        on it.
    layout, tokens_per_second_per_gpu, model_version: null until there is a plan.
    tokens_per_second_per_gpu: expected of number 1, measurements counted where probes were spent.
    seq_len, global_batch_size, trainer: of its job; null until there is a plan, and where an
        earlier version kept it.
    """

    model_config = ConfigDict(frozen=True, from_attributes=True)

    id: str
    created_at: datetime
    model: str
    gpu: str
    num_gpus: int
    seq_len: int | None = None
    global_batch_size: int | None = None
    trainer: str | None = None
    layout: str | None = None
    tokens_per_second_per_gpu: float | None = None
    status: str
    model_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEstimate:
    """An estimate with the job that asked for it."""

    id: str
    created_at: datetime
    job: Mapping[str, Any]
    estimate: Estimate


# ---- measurements and calibrations ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementFilter:
    """Filter on measurements; None is any. job_hash: as in `MeasurementKey`."""

    model: str | None = None
    gpu: str | None = None
    status: str | None = None
    rung: str | None = None
    job_hash: str | None = None
    asked_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The subject of a calibration: a trainer on a GPU, for everyone or for one owner's plans."""

    trainer: str
    gpu: str
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A stored run that a calibration may be made from.

    layout: names its job and layout. priced: what pricing it found; None where nobody has.
    """

    id: str
    created_at: datetime
    layout: str
    step_seconds: float
    priced: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningInputs:
    """Inputs of a calibration, as they stand in the database.

    runs: newest first, of the software of the newest; only shared ones and the owner's.
    software: of these runs. kernel_probes: ids, newest first. digest: of all of it.
    stale: runs under the same software that are left out, because step times have changed since.
    """

    software: Mapping[str, str]
    runs: tuple[RunRow, ...]
    kernel_probes: tuple[str, ...]
    digest: str
    stale: StaleRuns | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftFinding:
    """A change of step times that a sweep found, as learning needs it; fields as `DriftRow`."""

    trainer: str
    gpu: str
    owner: str
    software_hash: str
    job_hash: str | None
    layout_hash: str | None
    since: datetime
    statement: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One measured step of a layout, with what drift is told by.

    run: of the sweep that asked for it; else its own id.
    program: that ran.
    """

    id: str
    created_at: datetime
    job_hash: str
    layout_hash: str
    software_hash: str
    model: str
    trainer: str
    gpu: str
    num_gpus: int
    layout: str
    step_seconds: float
    software: Mapping[str, str]
    hosts: tuple[str, ...]
    run: str
    program: str
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """The calibration that runs of one trainer on one GPU under one software gave.

    document: the posterior, JSON-safe.
    owner: for whose plans; empty for everyone's.
    built_from: digest of what it was made from.
    superseded_at: None while it is in use.
    """

    id: str
    created_at: datetime
    trainer: str
    gpu: str
    software: Mapping[str, str]
    num_runs: int
    document: Mapping[str, Any]
    owner: str = ""
    built_from: str | None = None
    superseded_at: datetime | None = None

    @property
    def subject(self) -> Subject:
        return Subject(trainer=self.trainer, gpu=self.gpu, owner=self.owner)


# ---- who did what --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """One line of the audit trail.

    asked_by: name of the key, "cli:USER" for the command line; None where nobody is known.
    action: what was done, such as "probe.asked".
    subject: id of what it was done to; of a refusal the request.
    gpu_seconds: what it may use, or has used once it has ended.
    """

    id: int
    at: datetime
    asked_by: str | None
    action: str
    subject: str
    gpu_seconds: float | None
    detail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Filter on events; None is any."""

    asked_by: str | None = None
    action: str | None = None
    subject: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedHost:
    """A host that no run of this pool uses until then.

    found_by: the run of a sweep that found it bad. evidence: sentences.
    """

    pool: str
    host: str
    since: datetime
    until: datetime
    found_by: str
    evidence: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        times = {"since": self.since.isoformat(), "until": self.until.isoformat()}
        return {**asdict(self), **times}


# ---- sweeps --------------------------------------------------------------------------------------

SweepState = Literal["active", "paused", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    """A stored sweep.

    spec: as `planner.intake.sweeps` reads it.
    next_due_at: next scheduled time; None without a schedule, or when the sweep is not active.
    asked_by: the key that stored it.
    """

    id: str
    created_at: datetime
    name: str
    spec: Mapping[str, Any]
    state: SweepState = "active"
    next_due_at: datetime | None = None
    asked_by: str | None = None
