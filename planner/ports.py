"""What the planner asks of the outside world. Only `api/wiring.py` chooses who answers.

Stores raise StoreError when the database cannot answer, NotFoundError for an unknown id,
ConflictError for an id that exists already. Every implementation passes
`tests/contract/test_store_contract.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from planner.queues import (
    Lease,
    ProbeEnd,
    ProbeFilter,
    ProbePage,
    ProbeRecord,
    ProbeState,
    ProbeStore,
    SweepPage,
    SweepRecord,
    SweepState,
    SweepStore,
    TaskEnd,
    TaskEvent,
    TaskFilter,
    TaskKind,
    TaskPage,
    TaskRecord,
    TaskState,
    TaskStore,
)
from planner.specs.estimate import Estimate
from planner.specs.measurement import Measurement
from planner.specs.plan import Plan


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> datetime:
        """The present, in UTC, with its time zone."""
        ...


class IdFactory(Protocol):
    """Names new objects."""

    def new_id(self, prefix: str) -> str:
        """A name "prefix-..." that nothing else has; later names sort after earlier ones."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLabels:
    """What a stored plan is found by. job_hash: of the job without its id and labels, so that equal
    questions meet.

    status: "done"; "cancelled" of the best so far where somebody ended the study.
    """

    job_hash: str
    model: str
    gpu: str
    status: str = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """One line of a list of plans. layout, model_version: None while probes are spent on it.

    tokens_per_second_per_gpu: expected of number 1, measurements counted where probes were spent.
    """

    id: str
    created_at: datetime
    model: str
    gpu: str
    num_gpus: int
    layout: str | None
    tokens_per_second_per_gpu: float | None
    status: str
    model_version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPage:
    """Part of a list, newest first. next_cursor: where the next page starts; None on the last
    one.
    """

    items: tuple[PlanSummary, ...]
    next_cursor: str | None


class PlanStore(Protocol):
    """Keeps plans."""

    def save_plan(self, plan: Plan, labels: PlanLabels) -> None:
        """Stores the plan under its id. Raises ConflictError when the id is taken."""
        ...

    def get_plan(self, plan_id: str) -> Plan:
        """The plan as it was stored. Raises NotFoundError."""
        ...

    def list_plans(self, cursor: str | None, limit: int) -> PlanPage:
        """At most `limit` plans, newest first, from `cursor` on. Raises SpecError for a cursor that
        no page gave.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEstimate:
    """An estimate with the job that asked for it."""

    id: str
    created_at: datetime
    job: Mapping[str, Any]
    estimate: Estimate


class EstimateStore(Protocol):
    """Keeps estimates."""

    def save_estimates(self, estimates: Sequence[StoredEstimate]) -> None:
        """Stores all or none. Raises ConflictError when an id is taken."""
        ...

    def get_estimate(self, estimate_id: str) -> StoredEstimate:
        """The estimate as it was stored. Raises NotFoundError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementFilter:
    """Which measurements to list; None is any. job_hash, layout_hash, software_hash: see
    `MeasurementKey`.
    """

    model: str | None = None
    gpu: str | None = None
    status: str | None = None
    rung: str | None = None
    job_hash: str | None = None
    layout_hash: str | None = None
    software_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPage:
    """Part of a list, newest first. next_cursor: where the next page starts; None on the last
    one.
    """

    items: tuple[Measurement, ...]
    next_cursor: str | None


class MeasurementStore(Protocol):
    """Keeps what was measured, one entry a run: a repeated measurement is a second entry. Passes
    `tests/contract`.
    """

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Stores all or none. Raises ConflictError when an id is taken."""
        ...

    def get(self, measurement_id: str) -> Measurement:
        """The measurement as it was stored. Raises NotFoundError."""
        ...

    def list(self, wanted: MeasurementFilter, cursor: str | None, limit: int) -> MeasurementPage:
        """At most `limit` of the wanted ones, newest first, from `cursor` on. Raises SpecError for
        a cursor that no page gave.
        """
        ...

    def matching(self, job_hash: str) -> Sequence[Measurement]:
        """Measurements of this question (`planner.specs.measurement.question_hash`), oldest
        first.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """What runs of one trainer on one GPU under one software have taught. document: the posterior,
    JSON-safe.
    """

    id: str
    created_at: datetime
    trainer: str
    gpu: str
    software: Mapping[str, str]
    num_runs: int
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPage:
    """Part of a list, newest first. next_cursor: where the next page starts; None on the last
    one.
    """

    items: tuple[CalibrationRecord, ...]
    next_cursor: str | None


class CalibrationStore(Protocol):
    """Keeps calibrations."""

    def save(self, record: CalibrationRecord) -> None:
        """Stores it; one of the same id stays as it is, because the same runs teach the same."""
        ...

    def get(self, calibration_id: str) -> CalibrationRecord:
        """The calibration of this id. Raises NotFoundError."""
        ...

    def latest(
        self, trainer: str, gpu: str, *, until: datetime | None = None
    ) -> CalibrationRecord | None:
        """The newest of this trainer on this GPU, or the newest at a moment; None when nothing was
        learnt.
        """
        ...

    def list(self, cursor: str | None, limit: int) -> CalibrationPage:
        """At most `limit`, newest first, from `cursor` on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What the use cases are given."""

    clock: Clock
    ids: IdFactory


__all__ = [
    "CalibrationPage",
    "CalibrationRecord",
    "CalibrationStore",
    "Clock",
    "EstimateStore",
    "IdFactory",
    "Lease",
    "MeasurementFilter",
    "MeasurementPage",
    "MeasurementStore",
    "PlanLabels",
    "PlanPage",
    "PlanStore",
    "PlanSummary",
    "Ports",
    "ProbeEnd",
    "ProbeFilter",
    "ProbePage",
    "ProbeRecord",
    "ProbeState",
    "ProbeStore",
    "StoredEstimate",
    "SweepPage",
    "SweepRecord",
    "SweepState",
    "SweepStore",
    "TaskEnd",
    "TaskEvent",
    "TaskFilter",
    "TaskKind",
    "TaskPage",
    "TaskRecord",
    "TaskState",
    "TaskStore",
]
