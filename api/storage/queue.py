"""A queue of jobs with leases and fencing in SQL: what probes and tasks share.

Two workers never claim the same row: SQLite's writers take turns (BEGIN IMMEDIATE), PostgreSQL's
skip what another has locked. Every write of an owner names its fencing token, so that an owner
whose lease was taken over changes nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any, ClassVar, Generic, TypeVar

from sqlalchemy import Engine, Select, select, update
from sqlalchemy.orm import Session

from api.storage.common import SHOWN_CHARACTERS, flush_new, plain_text, row_of
from api.storage.engine import store_errors
from api.storage.paging import read_page
from api.storage.records import JobEnd, JobRecord, Lease, Page
from api.storage.tables import LeasedRow
from planner.errors import ConflictError

MESSAGE_CHARACTERS = 20_000
QUEUED, RUNNING, CANCELLED = "queued", "running", "cancelled"
Record = TypeVar("Record", bound=JobRecord)
Filter = TypeVar("Filter")
End = TypeVar("End", bound=JobEnd)


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
        self._writer = engine.execution_options(planner_writes=True)

    @abstractmethod
    def _values(self, record: Record) -> dict[str, Any]:
        """The columns of a new record."""

    @abstractmethod
    def _end_values(self, session: Session, end: End) -> dict[str, Any]:
        """The columns that an end sets beside the common ones; adds the rows stored with it."""

    def _record(self, row: Any) -> Record:
        names = (field.name for field in fields(self.record_class))
        record: Any = self.record_class(**{name: getattr(row, name) for name in names})
        return record  # type: ignore[no-any-return]

    def add(self, records: Sequence[Record]) -> None:
        """Stores all or none. Raises ConflictError when an id is taken."""
        with store_errors(self.engine), Session(self._writer) as session:
            values = [self._values(record) for record in records]
            session.add_all(self.row_class(**each) for each in values)
            flush_new(session, ", ".join(each["id"] for each in values[:3]))
            session.commit()

    def get(self, job_id: str) -> Record:
        """The job as it stands. Raises NotFoundError."""
        with store_errors(self.engine), Session(self.engine) as session:
            return self._record(self._row(session, job_id))

    def list(
        self, wanted: Filter | None = None, cursor: str | None = None, limit: int = 50
    ) -> Page[Record]:
        """The wanted jobs, newest first."""
        return read_page(self.engine, self.row_class, self._record, cursor, limit, wanted=wanted)

    def claim(self, lease: Lease, *, job_id: str | None = None) -> Record | None:
        """The oldest queued job, or the queued one of this id, now running and ours; else None."""
        table = self.row_class
        query = select(table).where(table.state == QUEUED)
        if job_id is not None:
            query = query.where(table.id == plain_text(job_id))
        return self._take(query.order_by(table.created_at, table.id), lease, counts=True)

    def take_over(self, job_id: str, lease: Lease) -> Record | None:
        """A running job whose lease has expired, now ours; None where another was quicker."""
        table = self.row_class
        expired = (table.state == RUNNING, table.lease_until < lease.now)
        query = select(table).where(table.id == plain_text(job_id), *expired)
        return self._take(query, lease, counts=False)

    def _take(self, query: Select[Any], lease: Lease, *, counts: bool) -> Record | None:
        with store_errors(self.engine), Session(self._writer) as session:
            row: LeasedRow | None = session.scalars(
                query.limit(1).with_for_update(skip_locked=True)
            ).first()
            if row is None:
                return None
            row.state, row.owner = RUNNING, plain_text(lease.owner)
            row.fencing_token += 1
            row.attempts += counts
            row.heartbeat_at, row.lease_until = lease.now, _end_of(lease)
            row.started_at = row.started_at or lease.now
            record = self._record(row)
            session.commit()
            return record

    def heartbeat(self, claimed: Record, lease: Lease, **columns: str) -> bool:
        """Renews the lease. Returns whether somebody asked to cancel.

        columns: text to store with it: `progress`, and of a probe its `folder`.
        """
        texts = {
            name: plain_text(text, MESSAGE_CHARACTERS if name == "folder" else SHOWN_CHARACTERS)
            for name, text in columns.items()
        }
        values = {**texts, "heartbeat_at": lease.now, "lease_until": _end_of(lease)}
        with store_errors(self.engine), Session(self._writer) as session:
            asked = bool(self._write(session, claimed, values).cancel_requested)
            session.commit()
        return asked

    def finish(self, claimed: Record, end: End, now: datetime) -> Record:
        """Ends it, and stores what came of it, all or nothing."""
        message = None if end.message is None else plain_text(end.message, MESSAGE_CHARACTERS)
        with store_errors(self.engine), Session(self._writer) as session:
            values = {
                "state": end.state,
                "finished_at": now,
                "lease_until": None,
                "failure": end.failure,
                "message": message,
                "progress": None,
                **self._end_values(session, end),
            }
            record = self._record(self._write(session, claimed, values))
            session.commit()
        return record

    def release(self, claimed: Record, *, counts: bool) -> Record:
        """Puts it back into the queue. counts: whether the attempt was one."""
        values = {
            "state": QUEUED,
            "owner": None,
            "lease_until": None,
            "heartbeat_at": None,
            "progress": None,
            "attempts": claimed.attempts if counts else max(claimed.attempts - 1, 0),
        }
        with store_errors(self.engine), Session(self._writer) as session:
            record = self._record(self._write(session, claimed, values))
            session.commit()
        return record

    def cancel(self, job_id: str, now: datetime) -> Record:
        """Cancels a queued job; asks the owner of a running one; an ended one stays as it is."""
        with store_errors(self.engine), Session(self._writer) as session:
            row = self._row(session, job_id, lock=True)
            if row.state == QUEUED:
                row.state, row.finished_at, row.cancel_requested = CANCELLED, now, True
            elif row.state == RUNNING:
                row.cancel_requested = True
            record = self._record(row)
            session.commit()
        return record

    def expired(self, now: datetime) -> Sequence[Record]:
        """Running jobs whose lease has expired, oldest first."""
        table = self.row_class
        query = (
            select(table)
            .where(table.state == RUNNING, table.lease_until < now)
            .order_by(table.created_at, table.id)
        )
        with store_errors(self.engine), Session(self.engine) as session:
            return tuple(self._record(row) for row in session.scalars(query))

    def _write(self, session: Session, claimed: JobRecord, values: dict[str, Any]) -> Any:
        """The row with these values. Raises ConflictError where the lease was lost."""
        table = self.row_class
        fence = (
            table.id == claimed.id,
            table.state == RUNNING,
            table.fencing_token == claimed.fencing_token,
        )
        written = session.execute(
            update(table).where(*fence).values(**values).returning(table.id)
        ).first()
        session.expire_all()
        row = self._row(session, claimed.id)
        if written is None:
            raise self._lost(row, claimed)
        return row

    def _lock(self, session: Session, claimed: JobRecord) -> None:
        """Locks its row. Raises ConflictError where the lease was lost."""
        row = self._row(session, claimed.id, lock=True)
        if row.state != RUNNING or row.fencing_token != claimed.fencing_token:
            raise self._lost(row, claimed)

    def _lost(self, row: LeasedRow, claimed: JobRecord) -> ConflictError:
        owner = row.owner or "nobody"
        return ConflictError(
            f"{self.what} {claimed.id} is {row.state}, owned by {owner}: the lease of "
            f"{claimed.owner} was lost"
        )

    def _row(self, session: Session, job_id: str, *, lock: bool = False) -> LeasedRow:
        remedy = f"{self.where} lists them"
        return row_of(session, self.row_class, job_id, self.what, remedy, lock=lock)


def _end_of(lease: Lease) -> datetime:
    return lease.now + timedelta(seconds=lease.seconds)
