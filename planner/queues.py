"""Work in line, as the planner's ports know it: probes, studies and sweeps, each a queue whose
entries are held under leases.

Whoever holds the newest fencing token of an entry may write it. Stores raise what `planner.ports`
says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

from planner.specs.measurement import Measurement

ProbeState = Literal["queued", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """One layout to measure, and how far that is.

    request: job with its layout, and how to measure it.  owner: who runs it, "host:pid:...".
    fencing_token: rises with every claim; only its holder may write.  lease_until: after it the
        owner counts as dead.  attempts: claims so far, of max_attempts.
    folder: where its files lie on the owner's host.  results: result files of its runs.  failure:
    class of what went wrong, "oom" or a `probes.protocol.FailureKind`, with the root cause in
    `message`.
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
    """How a probe ended. measurements: stored with it in one transaction, the probe's own first,
    then of smaller runs that served it.
    """

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
    """Part of a list, newest first. next_cursor: where the next page starts; None on the last
    one.
    """

    items: tuple[ProbeRecord, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A claim on a probe. The owner is believed to live until `seconds` after its last
    heartbeat.
    """

    owner: str
    now: datetime
    seconds: float


class ProbeStore(Protocol):
    """A queue of probes with leases. Who holds the newest fencing token writes; anyone older gets
    ConflictError.
    """

    def add(self, records: Sequence[ProbeRecord]) -> None:
        """Stores all or none. Raises ConflictError when an id is taken."""
        ...

    def get(self, probe_id: str) -> ProbeRecord:
        """The probe as it stands. Raises NotFoundError."""
        ...

    def list(self, wanted: ProbeFilter, cursor: str | None, limit: int) -> ProbePage:
        """At most `limit` of the wanted ones, newest first, from `cursor` on. Raises SpecError for
        a cursor that no page gave.
        """
        ...

    def claim(self, lease: Lease, *, probe_id: str | None = None) -> ProbeRecord | None:
        """The oldest queued probe, or the queued one of this id, now running and ours; None when
        there is none.
        """
        ...

    def take_over(self, probe_id: str, lease: Lease) -> ProbeRecord | None:
        """A running probe whose lease has ended, now ours; None when somebody else was quicker or
        its owner came back.
        """
        ...

    def heartbeat(
        self,
        held: ProbeRecord,
        lease: Lease,
        *,
        progress: str | None = None,
        folder: str | None = None,
    ) -> bool:
        """Prolongs the lease. Returns whether somebody asked to cancel. Raises ConflictError when
        the lease was lost.
        """
        ...

    def finish(self, held: ProbeRecord, end: ProbeEnd, now: datetime) -> ProbeRecord:
        """Ends it and stores its measurements, all or nothing. Raises ConflictError when the lease
        was lost.
        """
        ...

    def release(self, held: ProbeRecord, *, counts: bool) -> ProbeRecord:
        """Back into the queue. counts: whether the attempt was one. Raises ConflictError when the
        lease was lost.
        """
        ...

    def cancel(self, probe_id: str, now: datetime) -> ProbeRecord:
        """A queued probe is cancelled; of a running one its owner is asked; an ended one stays as
        it is. Raises NotFoundError.
        """
        ...

    def expired(self, now: datetime) -> Sequence[ProbeRecord]:
        """Running probes whose lease has ended, oldest first."""
        ...


TaskState = Literal["queued", "running", "done", "failed", "cancelled"]
TaskKind = Literal["study", "sweep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """Work that takes probes: a study of one job (its id is that of the plan it will make), or one
    run of a sweep.

    request: what it was asked.  parent_id, due_at: the sweep and the moment that it is for; a
        moment is worked on once.
    result: what it came to: of a study nothing (the plan is stored), of a sweep's run its report.
        Leases as in ProbeRecord.
    """

    id: str
    kind: TaskKind
    created_at: datetime
    request: Mapping[str, Any]
    job_hash: str | None = None
    parent_id: str | None = None
    due_at: datetime | None = None
    state: TaskState = "queued"
    attempts: int = 0
    max_attempts: int = 3
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
    result: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """Which tasks to list; None is any."""

    kind: TaskKind | None = None
    state: TaskState | None = None
    parent_id: str | None = None
    job_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPage:
    """Part of a list, newest first. next_cursor: where the next page starts; None on the last
    one.
    """

    items: tuple[TaskRecord, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnd:
    """How a task ended."""

    state: Literal["done", "failed", "cancelled"]
    result: Mapping[str, Any] | None = None
    failure: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvent:
    """What a task said. number: 1, 2, 3 ... within the task."""

    number: int
    created_at: datetime
    body: Mapping[str, Any]


class TaskStore(Protocol):
    """A queue of tasks with leases, fenced as ProbeStore is, and what they said while they ran."""

    def add(self, records: Sequence[TaskRecord]) -> None:
        """Stores all or none. Raises ConflictError when an id, or a parent's moment, is taken."""
        ...

    def get(self, task_id: str) -> TaskRecord:
        """The task as it stands. Raises NotFoundError."""
        ...

    def list(self, wanted: TaskFilter, cursor: str | None, limit: int) -> TaskPage:
        """At most `limit` of the wanted ones, newest first, from `cursor` on. Raises SpecError for
        a cursor that no page gave.
        """
        ...

    def claim(self, lease: Lease, *, task_id: str | None = None) -> TaskRecord | None:
        """The oldest queued task, or the queued one of this id, now running and ours; None when
        there is none.
        """
        ...

    def take_over(self, task_id: str, lease: Lease) -> TaskRecord | None:
        """A running task whose lease has ended, now ours; None when somebody else was quicker or
        its owner came back.
        """
        ...

    def heartbeat(self, held: TaskRecord, lease: Lease, *, progress: str | None = None) -> bool:
        """Prolongs the lease. Returns whether somebody asked to cancel. Raises ConflictError when
        the lease was lost.
        """
        ...

    def finish(self, held: TaskRecord, end: TaskEnd, now: datetime) -> TaskRecord:
        """Ends it. Raises ConflictError when the lease was lost."""
        ...

    def release(self, held: TaskRecord, *, counts: bool) -> TaskRecord:
        """Back into the queue. counts: whether the attempt was one. Raises ConflictError when the
        lease was lost.
        """
        ...

    def cancel(self, task_id: str, now: datetime) -> TaskRecord:
        """A queued task is cancelled; of a running one its owner is asked; an ended one stays as it
        is. Raises NotFoundError.
        """
        ...

    def expired(self, now: datetime) -> Sequence[TaskRecord]:
        """Running tasks whose lease has ended, oldest first."""
        ...

    def say(self, held: TaskRecord, body: Mapping[str, Any], now: datetime) -> TaskEvent:
        """Appends an event. Raises NotFoundError; ConflictError when the lease was lost."""
        ...

    def events(self, task_id: str, after: int, limit: int) -> Sequence[TaskEvent]:
        """Events with a number above `after`, in order."""
        ...


SweepState = Literal["active", "paused", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    """A stored sweep. spec: as `planner.specs.sweep` reads it.  next_due_at: None without a
    schedule, or when not active.
    """

    id: str
    created_at: datetime
    name: str
    spec: Mapping[str, Any]
    state: SweepState = "active"
    next_due_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPage:
    """Part of a list, newest first. next_cursor: where the next page starts; None on the last
    one.
    """

    items: tuple[SweepRecord, ...]
    next_cursor: str | None


class SweepStore(Protocol):
    """Keeps sweeps, and turns a moment that is due into one task, never two."""

    def add(self, record: SweepRecord) -> None:
        """Stores it. Raises ConflictError when the id is taken."""
        ...

    def get(self, sweep_id: str) -> SweepRecord:
        """The sweep as it stands. Raises NotFoundError."""
        ...

    def list(self, cursor: str | None, limit: int) -> SweepPage:
        """At most `limit`, newest first, from `cursor` on."""
        ...

    def due(self, now: datetime) -> Sequence[SweepRecord]:
        """Active sweeps whose moment has come, earliest first."""
        ...

    def advance(
        self, sweep: SweepRecord, next_due_at: datetime | None, task: TaskRecord | None
    ) -> bool:
        """Moves the sweep from the moment it was read with to the next, and adds the task, in one
        transaction; False if another did.
        """
        ...

    def change(self, sweep_id: str, state: SweepState, next_due_at: datetime | None) -> SweepRecord:
        """Pauses, resumes or cancels it. Raises NotFoundError; ConflictError for one that was
        cancelled.
        """
        ...
