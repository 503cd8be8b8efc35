"""A queue of jobs with leases and fencing in SQL: what probes and tasks share.

Two workers never claim the same row: SQLite's writers take turns (BEGIN IMMEDIATE), PostgreSQL's
skip what another has locked. Every write of an owner names its fencing token, so that an owner
whose lease was taken over changes nothing. When a lease ends the database's clock says.

A job whose worker is lost waits before it is tried again, longer each time, and has failed with
LOST_WORKERS once all its attempts are made; `requeue` gives it new ones. That a worker was killed
is no attempt of its job, until MOST_LOSSES were lost.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Generic, TypeVar

from sqlalchemy import ColumnElement, Engine, Select, or_, select, update
from sqlalchemy.orm import Session

from planner.api.storage.audit import note
from planner.api.storage.clock import database_time
from planner.api.storage.common import SHOWN_CHARACTERS, flush_new, plain_text, row_of
from planner.api.storage.job_records import JobEnd, JobRecord, Lease
from planner.api.storage.paging import read_page
from planner.api.storage.records import Page
from planner.api.storage.tables import LeasedRow
from planner.api.storage.transactions import reading, writing
from planner.errors import ConflictError

MESSAGE_CHARACTERS = 20_000
QUEUED, RUNNING, FAILED, CANCELLED = "queued", "running", "failed", "cancelled"
LOST_WORKERS = "lost_workers"  # the failure of a job that took down every worker it was given to
MOST_LOSSES = 10  # workers that may be killed under a job before each counts against it
LONGEST_LEASE_SECONDS = 60.0  # one that lasts longer was taken before the clock was put back
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 2.0, 300.0  # before a second attempt, before any
Record = TypeVar("Record", bound=JobRecord)
Filter = TypeVar("Filter")
End = TypeVar("End", bound=JobEnd)
Check = Callable[[Session], None]


def delay_seconds(attempts: int, chance: float) -> float:
    """How long a job waits after so many attempts: twice as long each time, spread by half.

    chance: uniform in 0..1, so that jobs that failed together do not come back together.
    """
    most = min(FIRST_DELAY_SECONDS * 2.0 ** max(attempts - 1, 0), LONGEST_DELAY_SECONDS)
    return most * (0.5 + 0.5 * chance)


class SqlQueue(ABC, Generic[Record, Filter, End]):
    """A queue on one table. Whoever claimed a job last may write it; anyone else: ConflictError.

    what: the name of its jobs in messages.
    where: how a user lists them.
    """

    row_class: ClassVar[type[LeasedRow]]
    record_class: ClassVar[type[JobRecord]]
    filter_class: ClassVar[type[Any]]
    what: ClassVar[str]
    where: ClassVar[str]

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.away_at = -math.inf  # on the monotonic clock, when the database last gave no answer

    @abstractmethod
    def _values(self, record: Record) -> dict[str, Any]:
        """The columns of a new record."""

    @abstractmethod
    def _end_values(self, session: Session, claimed: Record, end: End) -> dict[str, Any]:
        """The columns that an end sets beside the common ones; adds the rows stored with it."""

    @abstractmethod
    def _used_gpu_seconds(self, record: Record, end: End) -> float | None:
        """GPU-seconds that an ended job used."""

    def _record(self, row: Any) -> Record:
        names = (field.name for field in fields(self.record_class))
        record: Any = self.record_class(**{name: getattr(row, name) for name in names})
        return record  # type: ignore[no-any-return]

    def add(
        self,
        records: Sequence[Record],
        *,
        lease: Lease | None = None,
        check: Check = lambda _: None,
    ) -> list[Record]:
        """Stores all or none. Raises ConflictError when an id is taken.

        lease: they are ours from the start: running, never queued, so no worker takes them.
        check: called before, in the same transaction; raises what forbids them.
        """
        with writing(self.engine) as session:
            check(session)
            rows = [self.row_class(**self._values(record)) for record in records]
            if lease is not None:
                for row in rows:
                    self._claim(row, lease, counts=True)
            session.add_all(rows)
            for record in records:
                note(
                    session,
                    record.asked_by,
                    f"{self.what}.asked",
                    record.id,
                    gpu_seconds=record.gpu_seconds,
                )
            flush_new(session, ", ".join(record.id for record in records[:3]))
            return [self._record(row) for row in rows]

    def get(self, job_id: str) -> Record:
        """The job as it stands. Raises NotFoundError."""
        with reading(self.engine) as session:
            return self._record(self._row(session, job_id))

    def list(
        self, wanted: Filter | None = None, cursor: str | None = None, limit: int = 50
    ) -> Page[Record]:
        """The wanted jobs, newest first."""
        return read_page(self.engine, self.row_class, self._record, cursor, limit, wanted=wanted)

    def claim(self, lease: Lease, *, job_id: str | None = None) -> Record | None:
        """The queued job of the highest priority, of equal ones the oldest, now running and ours.

        None where none is, or all have to wait.

        job_id: the queued one of this id instead, whether it has to wait or not.
        """
        table = self.row_class
        query = select(table).where(table.state == QUEUED, table.attempts < table.max_attempts)
        if job_id is not None:
            query = query.where(table.id == plain_text(job_id))
        else:
            waited = or_(
                table.not_before.is_(None),
                table.not_before <= database_time(),
                table.not_before > database_time(LONGEST_DELAY_SECONDS),  # its clock was put back
            )
            query = query.where(waited, *self._may_start())
        first = query.order_by(table.priority.desc(), table.created_at, table.id)
        return self._take(first, lease, counts=True, fresh=True)

    def _may_start(self) -> tuple[ColumnElement[bool], ...]:
        """Further conditions on a queued job that a worker takes."""
        return ()

    def _waits(self, session: Session, row: Any) -> bool:
        """Whether a job that was just chosen must wait after all; asked with its row locked."""
        return False

    def take_over(
        self, abandoned: Record, lease: Lease, *, crashed: bool, counts: bool = False
    ) -> Record | None:
        """A running job whose lease has expired, now ours; None where another was quicker.

        crashed: its owner is known to be gone, so its lease need not expire first.
        counts: whether that is an attempt.
        """
        table = self.row_class
        query = select(table).where(table.id == abandoned.id, table.state == RUNNING)
        if crashed:
            query = query.where(table.fencing_token == abandoned.fencing_token)
        else:
            query = query.where(table.lease_until < database_time())
        return self._take(query, lease, counts=counts)

    def _take(
        self, query: Select[Any], lease: Lease, *, counts: bool, fresh: bool = False
    ) -> Record | None:
        """fresh: it was queued, so it may have to wait."""
        with writing(self.engine) as session:
            row: LeasedRow | None = session.scalars(
                query.limit(1).with_for_update(skip_locked=True)
            ).first()
            if row is None or (fresh and self._waits(session, row)):
                return None
            self._claim(row, lease, counts=counts)
            session.flush()
            return self._record(row)

    def _claim(self, row: LeasedRow, lease: Lease, *, counts: bool) -> None:
        row.state, row.owner, row.not_before = RUNNING, plain_text(lease.owner), None
        row.fencing_token = (row.fencing_token or 0) + 1
        row.attempts = (row.attempts or 0) + counts
        row.heartbeat_at, row.lease_until = database_time(), database_time(lease.seconds)
        if row.started_at is None:
            row.started_at = database_time()

    def heartbeat(self, claimed: Record, lease: Lease, **columns: str) -> bool:
        """Renews the lease. Returns whether somebody asked to cancel.

        An expired lease that nobody has taken over is renewed too: its owner could not reach the
        database for a while.
        columns: text to store with it: `progress`, and of a probe its `folder`.
        """
        texts = {
            name: plain_text(text, MESSAGE_CHARACTERS if name == "folder" else SHOWN_CHARACTERS)
            for name, text in columns.items()
        }
        values = {
            **texts,
            "heartbeat_at": database_time(),
            "lease_until": database_time(lease.seconds),
        }
        with writing(self.engine) as session:
            return bool(self._write(session, claimed, values, expired=True).cancel_requested)

    def finish(self, claimed: Record, end: End) -> Record:
        """Ends it, and stores what came of it, all or nothing, while the lease lasts."""
        with writing(self.engine) as session:
            return self._finish(session, claimed, end)

    def _finish(self, session: Session, claimed: Record, end: End) -> Record:
        message = None if end.message is None else plain_text(end.message, MESSAGE_CHARACTERS)
        values = {
            "state": end.state,
            "finished_at": database_time(),
            "lease_until": None,
            "failure": end.failure,
            "message": message,
            "progress": None,
            **self._end_values(session, claimed, end),
        }
        row = self._write(session, claimed, values)
        row.gpu_seconds = self._used_gpu_seconds(self._record(row), end)
        record = self._record(row)
        detail = f"{end.state}{f', {end.failure}' if end.failure else ''}; run by {record.owner}"
        note(
            session,
            record.asked_by,
            f"{self.what}.ended",
            record.id,
            gpu_seconds=record.gpu_seconds,
            detail=detail,
        )
        return record

    def release(self, claimed: Record) -> Record:
        """Puts it back into the queue; the attempt does not count."""
        values = {**_WAITING, "attempts": max(claimed.attempts - 1, 0), "not_before": None}
        with writing(self.engine) as session:
            return self._record(self._write(session, claimed, values))

    def retry(self, claimed: Record, end: End, *, counts: bool = True) -> Record:
        """Puts it back into the queue for its next attempt, after a delay.

        end: how it ends instead where no attempt is left, or somebody asked to cancel it.
        counts: whether this attempt does.
        """
        with writing(self.engine) as session:
            row = self._row(session, claimed.id, lock=True)
            lost = row.fencing_token // 2  # a loss is a claim and a taking over
            counts = counts or lost >= MOST_LOSSES
            if (counts and row.attempts >= row.max_attempts) or row.cancel_requested:
                return self._finish(session, claimed, end)
            seconds = delay_seconds(max(row.attempts, lost), random.random())
            values = {
                **_WAITING,
                "attempts": row.attempts - (not counts),
                "not_before": database_time(seconds),
                "message": None if end.message is None else plain_text(end.message),
            }
            return self._record(self._write(session, claimed, values))

    def requeue(self, job_id: str, by: str | None, gpu_seconds: float | None = None) -> Record:
        """Gives a failed job new attempts. Raises NotFoundError; ConflictError for any other.

        gpu_seconds: the most that they may use.
        """
        with writing(self.engine) as session:
            row = self._row(session, job_id, lock=True)
            if row.state != FAILED:
                raise ConflictError(
                    f"{self.what} {job_id} is {row.state}; only a failed one can be queued again"
                )
            row.state, row.attempts, row.not_before = QUEUED, 0, None
            row.gpu_seconds = gpu_seconds
            row.finished_at = row.failure = row.message = row.owner = None
            row.cancel_requested = False
            note(session, by, f"{self.what}.requeued", job_id, gpu_seconds=gpu_seconds)
            session.flush()
            return self._record(row)

    def cancel(self, job_id: str, by: str | None = None) -> Record:
        """Cancels a queued job; asks the owner of a running one; an ended one stays as it is.

        by: who asks, for the audit trail.
        """
        with writing(self.engine) as session:
            row = self._row(session, job_id, lock=True)
            if row.state in (QUEUED, RUNNING) and not row.cancel_requested:
                note(session, by, f"{self.what}.cancelled", job_id)
            if row.state == QUEUED:
                row.state, row.finished_at = CANCELLED, database_time()
                row.cancel_requested, row.gpu_seconds = True, 0.0
            elif row.state == RUNNING:
                row.cancel_requested = True
            session.flush()
            return self._record(row)

    def expired(self) -> Sequence[Record]:
        """Running jobs whose lease has expired, oldest first.

        Leases from before the clock was put back are cut: a living owner renews its own in time.
        """
        table, longest = self.row_class, database_time(LONGEST_LEASE_SECONDS)
        query = select(table).where(*self._has_expired()).order_by(table.created_at, table.id)
        ahead = table.state == RUNNING, table.lease_until > longest
        with reading(self.engine) as session:
            found = tuple(self._record(row) for row in session.scalars(query))
            to_cut = session.scalars(select(table.id).where(*ahead)).first() is not None
        if to_cut:
            with writing(self.engine) as session:
                session.execute(update(table).where(*ahead).values(lease_until=longest))
        return found

    def has_expired(self, record: Record) -> bool:
        """Whether a running job's lease has expired by now."""
        table = self.row_class
        query = select(table.id).where(table.id == record.id, *self._has_expired())
        with reading(self.engine) as session:
            return session.scalars(query).first() is not None

    def _has_expired(self) -> tuple[ColumnElement[bool], ...]:
        table = self.row_class
        return table.state == RUNNING, table.lease_until < database_time()

    def _write(
        self, session: Session, claimed: JobRecord, values: dict[str, Any], *, expired: bool = False
    ) -> Any:
        """The row with these values. Raises ConflictError where the lease was lost.

        expired: whether a lease that has expired, and was not taken over, will do.
        """
        table = self.row_class
        fence = [
            table.id == claimed.id,
            table.state == RUNNING,
            table.fencing_token == claimed.fencing_token,
        ]
        if not expired:
            fence.append(table.lease_until >= database_time())
        written = session.execute(
            update(table)
            .where(*fence)
            .values(**values)
            .returning(table.id)
            .execution_options(synchronize_session=False)
        ).first()
        session.expire_all()
        row = self._row(session, claimed.id)
        if written is None:
            raise self._lost(row, claimed)
        return row

    def _lock(self, session: Session, claimed: JobRecord) -> None:
        """Locks its row. Raises ConflictError where the lease was lost."""
        table = self.row_class
        row = self._row(session, claimed.id, lock=True)
        alive = select(table.id).where(table.id == claimed.id, table.lease_until >= database_time())
        ours = row.state == RUNNING and row.fencing_token == claimed.fencing_token
        if not ours or session.scalars(alive).first() is None:
            raise self._lost(row, claimed)

    def _lost(self, row: LeasedRow, claimed: JobRecord) -> ConflictError:
        owner = row.owner or "nobody"
        if row.state == RUNNING and row.fencing_token == claimed.fencing_token:
            return ConflictError(
                f"{self.what} {claimed.id}: the lease of {claimed.owner} was lost, it ended at "
                f"{row.lease_until:%H:%M:%S} UTC; what it did since is not stored"
            )
        return ConflictError(
            f"{self.what} {claimed.id} is {row.state}, owned by {owner}: the lease of "
            f"{claimed.owner} was lost"
        )

    def _row(self, session: Session, job_id: str, *, lock: bool = False) -> LeasedRow:
        remedy = f"{self.where} lists them"
        return row_of(session, self.row_class, job_id, self.what, remedy, lock=lock)


_WAITING: dict[str, Any] = {
    "state": QUEUED,
    "owner": None,
    "lease_until": None,
    "heartbeat_at": None,
    "progress": None,
}
