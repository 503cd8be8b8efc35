"""Queues: the tables of probes, studies and runs of sweeps, and how a job of one ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    ForeignKey,
    Index,
    Integer,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import Mapped, mapped_column

from planner.api.storage.base import HASH_LENGTH, ID_LENGTH, Base, Listed
from planner.specs.job import Job
from planner.specs.measurement import Measurement
from planner.specs.plan import Plan

JobState = Literal["queued", "running", "done", "failed", "cancelled"]
EndState = Literal["done", "failed", "cancelled"]
TaskKind = Literal["study", "sweep"]
OPEN: tuple[JobState, ...] = ("queued", "running")
QUEUED: Final = "queued"
RUNNING: Final = "running"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A claim on a job. It expires `seconds` after the last heartbeat, by the database's clock."""

    owner: str
    seconds: float


class JobRecord(Listed, kw_only=True):
    """A job of any queue: its state and its lease.

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

    __abstract__ = True

    request: Mapped[dict[str, Any]]
    asked_by: Mapped[str | None] = mapped_column(default=None)
    state: Mapped[JobState] = mapped_column(String(16), default="queued")
    attempts: Mapped[int] = mapped_column(Integer, default=0)
    max_attempts: Mapped[int] = mapped_column(Integer, default=1)
    not_before: Mapped[datetime | None] = mapped_column(default=None)
    gpu_seconds: Mapped[float | None] = mapped_column(default=None)
    owner: Mapped[str | None] = mapped_column(default=None)
    fencing_token: Mapped[int] = mapped_column(BigInteger, default=0)
    heartbeat_at: Mapped[datetime | None] = mapped_column(default=None)
    lease_until: Mapped[datetime | None] = mapped_column(default=None)
    cancel_requested: Mapped[bool] = mapped_column(Boolean, default=False)
    progress: Mapped[str | None] = mapped_column(default=None)
    started_at: Mapped[datetime | None] = mapped_column(default=None)
    finished_at: Mapped[datetime | None] = mapped_column(default=None)
    failure: Mapped[str | None] = mapped_column(String(32), default=None)
    message: Mapped[str | None] = mapped_column(default=None)
    priority: Mapped[int] = mapped_column(Integer, server_default="0", default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """End of a job, and its results, which are stored in the same transaction.

    gpu_seconds: used by it, where that is known.
    results, measurements: of a probe.
    result: the report of a sweep's run. plan: of a study, and its job.
    """

    state: EndState
    failure: str | None = None
    message: str | None = None
    gpu_seconds: float | None = None
    results: tuple[Mapping[str, Any], ...] = ()
    measurements: tuple[Measurement, ...] = ()
    result: Mapping[str, Any] | None = None
    plan: tuple[Plan, Job] | None = None


class ProbeRecord(JobRecord, kw_only=True):
    """One layout to measure. request: the job with its layout, and how to measure it.

    folder: "host:path" of its files.
    results: result files of its runs.
    failure: "oom", "backend" or a `planner.probes.protocol.FailureKind`.
    devices: that it occupies in its pool while it runs; None of older ones.
    """

    __tablename__ = "probes"
    __table_args__ = (
        Index("ix_probes_pool_state", "pool", "state"),
        Index("ix_probes_created_at_id", "created_at", "id"),
        Index("ix_probes_state_created_at", "state", "created_at"),
        Index("ix_probes_asked_by_created_at", "asked_by", "created_at"),
    )

    job_hash: Mapped[str] = mapped_column(String(HASH_LENGTH), index=True)
    model: Mapped[str]
    gpu: Mapped[str]
    num_gpus: Mapped[int] = mapped_column(Integer)
    layout: Mapped[str]
    pool: Mapped[str]
    plan_id: Mapped[str | None] = mapped_column(String(ID_LENGTH), index=True, default=None)
    plan_rank: Mapped[int | None] = mapped_column(Integer, default=None)
    folder: Mapped[str | None] = mapped_column(default=None)
    results: Mapped[list[Any]] = mapped_column(default_factory=list)
    measurement_id: Mapped[str | None] = mapped_column(
        String(ID_LENGTH), ForeignKey("measurements.id"), default=None
    )
    devices: Mapped[int | None] = mapped_column(Integer, default=None)


class TaskRecord(JobRecord, kw_only=True):
    """A background task: a study, with the id of its plan, or one run of a sweep.

    parent_id, due_at: the sweep and its scheduled time; a scheduled time is run once.
    result: the report of a sweep's run; None for a study, whose plan is stored.
    pool, wants_gpus: where it waits for room, and for how much; None while it does not wait.
    standing: how far a sweep's run is (`planner.api.jobs.standing.Standing`).
    notify_at: when the webhook of a sweep's run is called next; None where there is none to call.
    notified: calls of it so far.
    """

    __tablename__ = "tasks"
    __table_args__ = (
        Index("ix_tasks_created_at_id", "created_at", "id"),
        Index("ix_tasks_state_created_at", "state", "created_at"),
        Index("ix_tasks_asked_by_created_at", "asked_by", "created_at"),
        UniqueConstraint("parent_id", "due_at", name="uq_tasks_parent_id_due_at"),
    )

    kind: Mapped[TaskKind] = mapped_column(String(16))
    max_attempts: Mapped[int] = mapped_column(Integer, default=3)
    job_hash: Mapped[str | None] = mapped_column(String(HASH_LENGTH), index=True, default=None)
    parent_id: Mapped[str | None] = mapped_column(
        String(ID_LENGTH), ForeignKey("sweeps.id"), default=None
    )
    due_at: Mapped[datetime | None] = mapped_column(default=None)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    pool: Mapped[str | None] = mapped_column(default=None)
    wants_gpus: Mapped[int | None] = mapped_column(Integer, default=None)
    standing: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    notify_at: Mapped[datetime | None] = mapped_column(default=None)
    notified: Mapped[int] = mapped_column(Integer, server_default="0", default=0)


class TaskEvent(Base, kw_only=True):
    """One event of a running task. number: 1, 2, 3 ... within the task."""

    __tablename__ = "task_events"

    task_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    created_at: Mapped[datetime]
    body: Mapped[dict[str, Any]]


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
