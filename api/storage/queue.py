"""A queue with leases and fencing in SQL, for SQLite and PostgreSQL alike: what probes and tasks
share.

Two claimers never get the same row: SQLite's writers take turns (BEGIN IMMEDIATE), PostgreSQL's
skip what another has locked. Every write of an owner names its fencing token, so that one who was
believed dead and came back changes nothing.
"""

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any, ClassVar, Generic, TypeVar

from sqlalchemy import Engine, Select, select, tuple_, update
from sqlalchemy.orm import Session

from api.storage.common import (
    SHOWN_CHARACTERS,
    check_limit,
    cursor_of,
    flush_new,
    is_id,
    plain_text,
    read_cursor,
)
from api.storage.engine import store_errors
from api.storage.tables import LeasedRow
from planner.errors import ConflictError, NotFoundError
from planner.ports import Lease

MESSAGE_CHARACTERS = 20_000
QUEUED, RUNNING, CANCELLED = "queued", "running", "cancelled"
Record = TypeVar("Record")


class SqlQueue(Generic[Record]):
    """One table of leased rows. what: its name in messages.  where: how to list them.  A subclass
    converts rows and records.
    """

    row_class: ClassVar[type[LeasedRow]]
    what: ClassVar[str]
    where: ClassVar[str]

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writer = engine.execution_options(planner_writes=True)

    def _values(self, record: Record) -> dict[str, Any]:
        raise NotImplementedError

    def _record(self, row: Any) -> Record:
        raise NotImplementedError

    def add(self, records: Sequence[Record]) -> None:
        """Stores all or none."""
        with store_errors(self.engine), Session(self._writer) as session:
            values = [self._values(record) for record in records]
            session.add_all(self.row_class(**each) for each in values)
            flush_new(session, ", ".join(each["id"] for each in values[:3]))
            session.commit()

    def get(self, row_id: str) -> Record:
        """The record as it stands."""
        with store_errors(self.engine), Session(self.engine) as session:
            return self._record(self._found(session, row_id))

    def _page(
        self, wanted: Any, cursor: str | None, limit: int
    ) -> tuple[tuple[Record, ...], str | None]:
        """Newest first, by (created_at, id), which later rows never disturb; and the cursor of the
        next page.
        """
        check_limit(limit)
        table = self.row_class
        query = select(table).order_by(table.created_at.desc(), table.id.desc())
        for name in (field.name for field in fields(wanted)):
            value = getattr(wanted, name)
            if value is not None:
                query = query.where(getattr(table, name) == plain_text(value))
        if cursor is not None:
            query = query.where(tuple_(table.created_at, table.id) < tuple_(*read_cursor(cursor)))
        with store_errors(self.engine), Session(self.engine) as session:
            rows = session.scalars(query.limit(limit + 1)).all()
            last = rows[limit - 1] if len(rows) > limit else None
            items = tuple(self._record(row) for row in rows[:limit])
            return items, None if last is None else cursor_of(last.created_at, last.id)

    def take_over(self, row_id: str, lease: Lease) -> Record | None:
        """A running one whose lease has ended."""
        table = self.row_class
        ended = (table.state == RUNNING, table.lease_until < lease.now)
        return self._take(
            select(table).where(table.id == plain_text(row_id), *ended), lease, counts=False
        )

    def _take(self, query: Select[Any], lease: Lease, *, counts: bool = True) -> Record | None:
        with store_errors(self.engine), Session(self._writer) as session:
            row: LeasedRow | None = session.scalars(
                query.limit(1).with_for_update(skip_locked=True)
            ).first()
            if row is None:
                return None
            row.state, row.owner, row.fencing_token = (
                RUNNING,
                plain_text(lease.owner),
                row.fencing_token + 1,
            )
            row.attempts += counts
            row.heartbeat_at, row.lease_until = (
                lease.now,
                lease.now + timedelta(seconds=lease.seconds),
            )
            row.started_at = row.started_at or lease.now
            record = self._record(row)
            session.commit()
            return record

    def _beat(self, held: Any, lease: Lease, values: dict[str, Any]) -> bool:
        values = {
            **values,
            "heartbeat_at": lease.now,
            "lease_until": lease.now + timedelta(seconds=lease.seconds),
        }
        with store_errors(self.engine), Session(self._writer) as session:
            self._write(session, held, values)
            asked = bool(self._found(session, held.id).cancel_requested)
            session.commit()
        return asked

    def _release(self, held: Any, counts: bool, values: dict[str, Any]) -> Record:
        back = {
            "state": QUEUED,
            "owner": None,
            "lease_until": None,
            "heartbeat_at": None,
            "progress": None,
            **values,
        }
        with store_errors(self.engine), Session(self._writer) as session:
            self._write(
                session,
                held,
                {**back, "attempts": held.attempts if counts else max(held.attempts - 1, 0)},
            )
            record = self._record(self._found(session, held.id))
            session.commit()
        return record

    def cancel(self, row_id: str, now: datetime) -> Record:
        """A queued one is cancelled; of a running one its owner is asked; an ended one stays as it
        is.
        """
        with store_errors(self.engine), Session(self._writer) as session:
            row = self._found(session, row_id, lock=True)
            if row.state == QUEUED:
                row.state, row.finished_at, row.cancel_requested = CANCELLED, now, True
            elif row.state == RUNNING:
                row.cancel_requested = True
            record = self._record(row)
            session.commit()
        return record

    def expired(self, now: datetime) -> Sequence[Record]:
        """Running ones whose lease has ended, oldest first."""
        table = self.row_class
        query = (
            select(table)
            .where(table.state == RUNNING, table.lease_until < now)
            .order_by(table.created_at, table.id)
        )
        with store_errors(self.engine), Session(self.engine) as session:
            return tuple(self._record(row) for row in session.scalars(query))

    def _write(self, session: Session, held: Any, values: dict[str, Any]) -> None:
        table = self.row_class
        ours = (
            table.id == held.id,
            table.state == RUNNING,
            table.fencing_token == held.fencing_token,
        )
        written = session.execute(
            update(table).where(*ours).values(**values).returning(table.id)
        ).first()
        if written is None:
            raise self._lost(self._found(session, held.id), held)
        session.expire_all()

    def _owned(self, session: Session, held: Any) -> None:
        """Locks its row. Raises ConflictError where it is no longer held."""
        row = self._found(session, held.id, lock=True)
        if row.state != RUNNING or row.fencing_token != held.fencing_token:
            raise self._lost(row, held)

    def _lost(self, row: Any, held: Any) -> ConflictError:
        holder = row.owner or "nobody"
        return ConflictError(
            f"{self.what} {held.id} is {row.state}, held by {holder}: the lease of {held.owner} "
            "was lost"
        )

    def _found(self, session: Session, row_id: str, *, lock: bool = False) -> Any:
        row = session.get(self.row_class, row_id, with_for_update=lock) if is_id(row_id) else None
        if row is None:
            raise NotFoundError(
                f"no {self.what} of id {row_id[:SHOWN_CHARACTERS]!r}; {self.where} lists them"
            )
        return row
