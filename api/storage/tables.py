"""All tables; the queues have theirs in `job_records`. `Base.metadata` names every one."""

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, ForeignKey, Index, Integer, String, true
from sqlalchemy.orm import Mapped, mapped_column

from planner.api.storage.base import HASH_LENGTH, ID_LENGTH, Listed
from planner.api.storage.base import Base as Base
from planner.api.storage.job_records import ProbeRecord as ProbeRecord
from planner.api.storage.job_records import TaskRecord as TaskRecord
from planner.api.storage.records import Subject, SweepState

# columns of what was priced and of what was measured, of the same names there
FIGURES = (
    *("step_seconds", "tokens_per_second_per_gpu"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes"),
)


class PlanRow(Listed, kw_only=True):
    """A plan. `body` is the whole answer; the other columns are what lists and filters need."""

    __tablename__ = "plans"
    __table_args__ = (
        Index("ix_plans_created_at_id", "created_at", "id"),
        Index("ix_plans_asked_by_created_at", "asked_by", "created_at"),
    )

    job_hash: Mapped[str] = mapped_column(String(HASH_LENGTH), index=True)
    model: Mapped[str]
    gpu: Mapped[str]
    num_gpus: Mapped[int] = mapped_column(Integer)
    seq_len: Mapped[int | None] = mapped_column(BigInteger)
    global_batch_size: Mapped[int | None] = mapped_column(BigInteger)
    trainer: Mapped[str | None]
    layout: Mapped[str]
    tokens_per_second_per_gpu: Mapped[float | None]
    status: Mapped[str] = mapped_column(String(16))
    seed: Mapped[int] = mapped_column(BigInteger)
    model_version: Mapped[str]
    calibration_id: Mapped[str]
    asked_by: Mapped[str | None]
    body: Mapped[dict[str, Any]]


class PlanLayoutRow(Base, kw_only=True):
    """One ranked layout of a plan, in columns, so that layouts can be compared across plans."""

    __tablename__ = "plan_layouts"

    plan_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("plans.id", ondelete="CASCADE"), primary_key=True
    )
    rank: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    layout: Mapped[dict[str, Any]]
    num_gpus: Mapped[int] = mapped_column(Integer)
    source: Mapped[str] = mapped_column(String(16))
    step_seconds: Mapped[float | None]
    tokens_per_second_per_gpu: Mapped[float | None]
    peak_allocated_bytes: Mapped[float | None]
    peak_reserved_bytes: Mapped[float | None]
    device_bytes: Mapped[float | None]
    oom_probability: Mapped[float | None]


class EstimateRow(Listed, kw_only=True):
    """An estimate and the job that asked for it."""

    __tablename__ = "estimates"

    job_hash: Mapped[str] = mapped_column(String(HASH_LENGTH), index=True)
    job: Mapped[dict[str, Any]]
    estimate: Mapped[dict[str, Any]]
    model_version: Mapped[str]
    calibration_id: Mapped[str]


class MeasurementRow(Listed, kw_only=True):
    """One run of one layout. `body` is the whole row; the other columns are for look-ups.

    shared: whether it counts for others. refused: why it is not believed.
    """

    __tablename__ = "measurements"
    __table_args__ = (
        Index("ix_measurements_created_at_id", "created_at", "id"),
        Index("ix_measurements_key", "model", "gpu", "software_hash", "layout_hash"),
        Index("ix_measurements_learning", "gpu", "trainer", "created_at", "id"),
    )

    job_hash: Mapped[str] = mapped_column(String(HASH_LENGTH), index=True)
    model: Mapped[str]
    gpu: Mapped[str]
    num_gpus: Mapped[int] = mapped_column(Integer)
    layout: Mapped[str]
    layout_hash: Mapped[str] = mapped_column(String(HASH_LENGTH))
    software_hash: Mapped[str] = mapped_column(String(HASH_LENGTH))
    status: Mapped[str] = mapped_column(String(16))
    rung: Mapped[str] = mapped_column(String(16))
    step_seconds: Mapped[float | None]
    tokens_per_second_per_gpu: Mapped[float | None]
    peak_allocated_bytes: Mapped[float | None]
    peak_reserved_bytes: Mapped[float | None]
    device_bytes: Mapped[float | None]
    asked_by: Mapped[str | None]
    body: Mapped[dict[str, Any]]
    trainer: Mapped[str] = mapped_column(server_default="")
    shared: Mapped[bool] = mapped_column(Boolean, server_default=true())
    refused: Mapped[str | None]


class PricedRunRow(Base, kw_only=True):
    """Predictions for a measured run, priced once.

    basis: the model's version and the calibration at whose knobs it was priced.
    """

    __tablename__ = "priced_runs"

    measurement_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("measurements.id", ondelete="CASCADE"), primary_key=True
    )
    basis: Mapped[str]
    document: Mapped[dict[str, Any]]


class SweepRecord(Listed, kw_only=True):
    """Jobs that are measured again and again.

    spec: as `planner.intake.sweeps` reads it.
    next_due_at: next scheduled time; None without a schedule, or when the sweep is not active.
    asked_by: the key that stored it.
    """

    __tablename__ = "sweeps"
    __table_args__ = (Index("ix_sweeps_created_at_id", "created_at", "id"),)

    name: Mapped[str]
    spec: Mapped[dict[str, Any]]
    state: Mapped[SweepState] = mapped_column(String(16), default="active")
    next_due_at: Mapped[datetime | None] = mapped_column(default=None)
    asked_by: Mapped[str | None] = mapped_column(default=None)


class QuarantinedHost(Base, kw_only=True):
    """A host of a pool that no run uses until then.

    found_by: the run of a sweep that found it bad. evidence: sentences.
    """

    __tablename__ = "quarantined_hosts"

    pool: Mapped[str] = mapped_column(primary_key=True)
    host: Mapped[str] = mapped_column(primary_key=True)
    since: Mapped[datetime]
    until: Mapped[datetime]
    found_by: Mapped[str]
    evidence: Mapped[list[Any]]


class CalibrationRecord(Listed, kw_only=True):
    """The calibration that runs of one trainer on one GPU under one software gave.

    document: the posterior, JSON-safe.
    owner: for whose plans; empty for everyone's.
    built_from: digest of what it was made from.
    superseded_at: None while it is in use.
    """

    __tablename__ = "calibrations"
    __table_args__ = (
        Index("ix_calibrations_created_at_id", "created_at", "id"),
        Index("ix_calibrations_trainer_gpu_created_at", "trainer", "gpu", "created_at"),
    )

    trainer: Mapped[str]
    gpu: Mapped[str]
    software: Mapped[dict[str, Any]]
    num_runs: Mapped[int] = mapped_column(Integer)
    document: Mapped[dict[str, Any]]
    owner: Mapped[str] = mapped_column(server_default="", default="")
    built_from: Mapped[str | None] = mapped_column(String(HASH_LENGTH), default=None)
    superseded_at: Mapped[datetime | None] = mapped_column(default=None)

    @property
    def subject(self) -> Subject:
        return Subject(trainer=self.trainer, gpu=self.gpu, owner=self.owner)


class AuditRow(Base, kw_only=True):
    """One line of the audit trail: who did what, when, for how many GPU-seconds."""

    __tablename__ = "audit_events"
    __table_args__ = (Index("ix_audit_events_asked_by_id", "asked_by", "id"),)

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, init=False
    )
    at: Mapped[datetime]
    asked_by: Mapped[str | None]
    action: Mapped[str] = mapped_column(String(32))
    subject: Mapped[str]
    gpu_seconds: Mapped[float | None]
    detail: Mapped[str | None]


class OwnEntry(Base, kw_only=True):
    """One version of a model, GPU or cluster of the users' own. It never changes.

    kind: models, gpus or clusters. spec: as a job writes it. asked_by: whose it is.
    """

    __tablename__ = "catalog_entries"

    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    created_at: Mapped[datetime]
    asked_by: Mapped[str | None]
    spec: Mapped[dict[str, Any]]


class DriftFinding(Base, kw_only=True):
    """A change of step times that a sweep found: what was learnt before it counts no more.

    owner: for whose plans; empty for everyone's.
    software_hash: of the runs since; those before under another are another stack anyway.
    job_hash, layout_hash: of the one layout that changed; null for the whole stack.
    since: of its first run.
    """

    __tablename__ = "drift_findings"
    __table_args__ = (
        Index("ix_drift_findings_gpu_trainer", "gpu", "trainer"),
        Index("ix_drift_findings_sweep_id", "sweep_id"),
    )

    id: Mapped[int] = mapped_column(Integer, primary_key=True, init=False)
    sweep_id: Mapped[str] = mapped_column(String(ID_LENGTH), ForeignKey("sweeps.id"))
    trainer: Mapped[str]
    gpu: Mapped[str]
    owner: Mapped[str]
    software_hash: Mapped[str] = mapped_column(String(HASH_LENGTH))
    job_hash: Mapped[str | None] = mapped_column(String(HASH_LENGTH))
    layout_hash: Mapped[str | None] = mapped_column(String(HASH_LENGTH))
    since: Mapped[datetime]
    statement: Mapped[str]


class KeptAnswer(Base, kw_only=True):
    """The answer given under an Idempotency-Key, stored with what the request made.

    status: of HTTP; null in what older versions left of a request that was never answered.
    body: as it was sent.
    """

    __tablename__ = "idempotency_keys"
    __table_args__ = (Index("ix_idempotency_keys_created_at", "created_at"),)

    key_hash: Mapped[str] = mapped_column(String(HASH_LENGTH), primary_key=True)
    request_hash: Mapped[str] = mapped_column(String(HASH_LENGTH))
    created_at: Mapped[datetime]
    status: Mapped[int | None] = mapped_column(Integer, default=None)
    headers: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    body: Mapped[str | None] = mapped_column(default=None)
