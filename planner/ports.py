"""What the planner asks of the outside world. Only `api/wiring.py` chooses who answers.

Stores raise StoreError when the database cannot answer, NotFoundError for an unknown id, ConflictError for an id that
exists already. Every implementation passes `tests/contract/test_store_contract.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

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
    """What a stored plan is found by. job_hash: of the job without its id and labels, so that equal questions meet."""

    job_hash: str
    model: str
    gpu: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """One line of a list of plans."""

    id: str
    created_at: datetime
    model: str
    gpu: str
    num_gpus: int
    layout: str
    tokens_per_second_per_gpu: float | None
    status: str
    model_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPage:
    """Part of a list, newest first. next_cursor: where the next page starts; None on the last one."""

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
        """At most `limit` plans, newest first, from `cursor` on. Raises SpecError for a cursor that no page gave."""
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
    """Which measurements to list; None is any. job_hash, layout_hash, software_hash: see `MeasurementKey`."""

    model: str | None = None
    gpu: str | None = None
    status: str | None = None
    rung: str | None = None
    job_hash: str | None = None
    layout_hash: str | None = None
    software_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPage:
    """Part of a list, newest first. next_cursor: where the next page starts; None on the last one."""

    items: tuple[Measurement, ...]
    next_cursor: str | None


class MeasurementStore(Protocol):
    """Keeps what was measured, one entry a run: a repeated measurement is a second entry. Passes `tests/contract`."""

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Stores all or none. Raises ConflictError when an id is taken."""
        ...

    def get(self, measurement_id: str) -> Measurement:
        """The measurement as it was stored. Raises NotFoundError."""
        ...

    def list(self, wanted: MeasurementFilter, cursor: str | None, limit: int) -> MeasurementPage:
        """At most `limit` of the wanted ones, newest first, from `cursor` on. Raises SpecError for a cursor that no page gave."""
        ...

    def matching(self, job_hash: str) -> Sequence[Measurement]:
        """Measurements of this question (`planner.specs.measurement.question_hash`), oldest first."""
        ...


ProbeState = Literal["queued", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """One layout to measure, and how far that is.

    request: job with its layout, and how to measure it.  owner: who runs it, "host:pid:...".  fencing_token: rises with every claim;
    only its holder may write.  lease_until: after it the owner counts as dead.  attempts: claims so far, of max_attempts.
    folder: where its files lie on the owner's host.  results: result files of its runs.  failure: class of what went wrong, "oom" or
    a `probes.protocol.FailureKind`, with the root cause in `message`.
    """

    id: str
    created_at: datetime
    request: Mapping[str, Any]
    job_hash: str
    model: str
    gpu: str
    num_gpus: int
    layout: str
    pool: str
    state: ProbeState = "queued"
    plan_id: str | None = None
    plan_rank: int | None = None
    attempts: int = 0
    max_attempts: int = 1
    owner: str | None = None
    fencing_token: int = 0
    heartbeat_at: datetime | None = None
    lease_until: datetime | None = None
    cancel_requested: bool = False
    folder: str | None = None
    progress: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    results: tuple[Mapping[str, Any], ...] = ()
    measurement_id: str | None = None
    failure: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEnd:
    """How a probe ended. measurements: stored with it in one transaction, the probe's own first, then of smaller runs that served it."""

    state: Literal["done", "failed", "cancelled"]
    results: tuple[Mapping[str, Any], ...] = ()
    measurements: tuple[Measurement, ...] = ()
    failure: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFilter:
    """Which probes to list; None is any."""

    state: ProbeState | None = None
    model: str | None = None
    gpu: str | None = None
    plan_id: str | None = None
    pool: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePage:
    """Part of a list, newest first. next_cursor: where the next page starts; None on the last one."""

    items: tuple[ProbeRecord, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A claim on a probe. The owner is believed to live until `seconds` after its last heartbeat."""

    owner: str
    now: datetime
    seconds: float


class ProbeStore(Protocol):
    """A queue of probes with leases. Who holds the newest fencing token writes; anyone older gets ConflictError."""

    def add(self, records: Sequence[ProbeRecord]) -> None:
        """Stores all or none. Raises ConflictError when an id is taken."""
        ...

    def get(self, probe_id: str) -> ProbeRecord:
        """The probe as it stands. Raises NotFoundError."""
        ...

    def list(self, wanted: ProbeFilter, cursor: str | None, limit: int) -> ProbePage:
        """At most `limit` of the wanted ones, newest first, from `cursor` on. Raises SpecError for a cursor that no page gave."""
        ...

    def claim(self, lease: Lease, *, probe_id: str | None = None) -> ProbeRecord | None:
        """The oldest queued probe, or the queued one of this id, now running and ours; None when there is none."""
        ...

    def take_over(self, probe_id: str, lease: Lease) -> ProbeRecord | None:
        """A running probe whose lease has ended, now ours; None when somebody else was quicker or its owner came back."""
        ...

    def heartbeat(self, held: ProbeRecord, lease: Lease, *, progress: str | None = None, folder: str | None = None) -> bool:
        """Prolongs the lease. Returns whether somebody asked to cancel. Raises ConflictError when the lease was lost."""
        ...

    def finish(self, held: ProbeRecord, end: ProbeEnd, now: datetime) -> ProbeRecord:
        """Ends it and stores its measurements, all or nothing. Raises ConflictError when the lease was lost."""
        ...

    def release(self, held: ProbeRecord, *, counts: bool) -> ProbeRecord:
        """Back into the queue. counts: whether the attempt was one. Raises ConflictError when the lease was lost."""
        ...

    def cancel(self, probe_id: str, now: datetime) -> ProbeRecord:
        """A queued probe is cancelled; of a running one its owner is asked; an ended one stays as it is. Raises NotFoundError."""
        ...

    def expired(self, now: datetime) -> Sequence[ProbeRecord]:
        """Running probes whose lease has ended, oldest first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What the use cases are given. measurements: None where nothing has been measured."""

    clock: Clock
    ids: IdFactory
    measurements: MeasurementStore | None = None
