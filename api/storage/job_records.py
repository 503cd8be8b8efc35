"""Records of the queues: probes, studies and runs of sweeps."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from planner.api.storage.records import PlanLabels
from planner.specs.measurement import Measurement
from planner.specs.plan import Plan

JobState = Literal["queued", "running", "done", "failed", "cancelled"]
EndState = Literal["done", "failed", "cancelled"]
OPEN: tuple[JobState, ...] = ("queued", "running")
QUEUED, RUNNING, FAILED, CANCELLED = "queued", "running", "failed", "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A claim on a job. It expires `seconds` after the last heartbeat, by the database's clock."""

    owner: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job of a queue: what every kind has in common.

    request: what was asked.
    asked_by: name of the key that asked for it, "cli:USER" for the command line; None of older
        ones.
    attempts: claims so far, of max_attempts.
    not_before: a queued job waits until then, after an attempt that took its worker down.
    gpu_seconds: the most that it may use, and once it has ended what it used; None where that is
        not known.
    owner: the process that runs it, as `planner.api.jobs.owners` names it.
    fencing_token: rises with every claim; only the owner with the newest may write.
    lease_until: the owner counts as crashed after this time.
    failure: class of what went wrong, with the root cause in `message`.
    priority: of two that wait the one with the higher goes first.
    """

    id: str
    created_at: datetime
    request: Mapping[str, Any]
    asked_by: str | None = None
    state: JobState = "queued"
    attempts: int = 0
    max_attempts: int = 1
    not_before: datetime | None = None
    gpu_seconds: float | None = None
    owner: str | None = None
    fencing_token: int = 0
    heartbeat_at: datetime | None = None
    lease_until: datetime | None = None
    cancel_requested: bool = False
    progress: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    failure: str | None = None
    message: str | None = None
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """End of a job. gpu_seconds: used by it, where that is known."""

    state: EndState
    failure: str | None = None
    message: str | None = None
    gpu_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeRecord(JobRecord):
    """One layout to measure. request: the job with its layout, and how to measure it.

    folder: "host:path" of its files.
    results: result files of its runs.
    failure: "oom", "backend" or a `planner.probes.protocol.FailureKind`.
    devices: that it occupies in its pool while it runs; None of older ones.
    """

    job_hash: str
    model: str
    gpu: str
    num_gpus: int
    layout: str
    pool: str
    plan_id: str | None = None
    plan_rank: int | None = None
    folder: str | None = None
    results: tuple[Mapping[str, Any], ...] = ()
    measurement_id: str | None = None
    devices: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeEnd(JobEnd):
    """The result of a probe; its measurements are stored in the same transaction."""

    results: tuple[Mapping[str, Any], ...] = ()
    measurements: tuple[Measurement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFilter:
    """Filter on probes; None is any."""

    state: JobState | None = None
    failure: str | None = None
    model: str | None = None
    gpu: str | None = None
    plan_id: str | None = None
    pool: str | None = None
    asked_by: str | None = None


TaskKind = Literal["study", "sweep"]


@dataclass(frozen=True, kw_only=True)
class TaskRecord(JobRecord):
    """A background task: a study, with the id of its plan, or one run of a sweep.

    parent_id, due_at: the sweep and its scheduled time; a scheduled time is run once.
    result: the report of a sweep's run; None for a study, whose plan is stored.
    standing: how far a sweep's run is (`planner.api.jobs.standing.Standing`).
    notify_at: when the webhook of a sweep's run is called next; None where there is none to call.
    notified: calls of it so far.
    """

    kind: TaskKind
    max_attempts: int = 3
    job_hash: str | None = None
    parent_id: str | None = None
    due_at: datetime | None = None
    result: Mapping[str, Any] | None = None
    standing: Mapping[str, Any] | None = None
    notify_at: datetime | None = None
    notified: int = 0


@dataclass(frozen=True, kw_only=True)
class TaskEnd(JobEnd):
    """End of a task. plan: of a study, stored in the same transaction."""

    result: Mapping[str, Any] | None = None
    plan: "tuple[Plan, PlanLabels] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """Filter on tasks; None is any."""

    kind: TaskKind | None = None
    state: JobState | None = None
    parent_id: str | None = None
    job_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvent:
    """One event of a running task. number: 1, 2, 3 ... within the task."""

    number: int
    created_at: datetime
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """A job of either queue, as a line.

    kind: probe, study or sweep.
    about: what it is, for a person.
    asked_by: the key that asked; None of older ones.
    not_before: when it is tried again, after an attempt that took its worker down.
    gpu_seconds: the most that it may use, and once it has ended what it used.
    """

    id: str
    kind: Literal["probe", "study", "sweep"]
    created_at: datetime
    state: JobState
    about: str
    asked_by: str | None
    attempts: int
    max_attempts: int
    not_before: datetime | None
    gpu_seconds: float | None
    owner: str | None
    failure: str | None
    message: str | None
