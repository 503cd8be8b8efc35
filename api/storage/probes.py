"""The queue of probes in SQL: claims, leases and fencing on SQLite and PostgreSQL alike.

Two claimers never get the same probe: SQLite's writers take turns (BEGIN IMMEDIATE), PostgreSQL's skip what another has locked.
Every write of an owner names its fencing token, so that one who was believed dead and came back changes nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, Select, select, tuple_, update
from sqlalchemy.orm import Session

from api.storage.common import SHOWN_CHARACTERS, check_limit, cursor_of, flush_new, is_id, plain_text, read_cursor
from api.storage.engine import store_errors
from api.storage.measurements import measurement_row
from api.storage.tables import ProbeRow
from planner.errors import ConflictError, NotFoundError
from planner.ports import Lease, ProbeEnd, ProbeFilter, ProbePage, ProbeRecord

MESSAGE_CHARACTERS = 20_000
QUEUED, RUNNING, CANCELLED = "queued", "running", "cancelled"


class SqlProbeStore:
    """A ProbeStore on one engine; see `planner.ports` for what each method promises."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writer = engine.execution_options(planner_writes=True)

    def add(self, records: Sequence[ProbeRecord]) -> None:
        """Stores all or none."""
        with store_errors(self.engine), Session(self._writer) as session:
            session.add_all(ProbeRow(**_values(record)) for record in records)
            flush_new(session, ", ".join(record.id for record in records[:3]))
            session.commit()

    def get(self, probe_id: str) -> ProbeRecord:
        """The probe as it stands."""
        with store_errors(self.engine), Session(self.engine) as session:
            return _record(_found(session, probe_id))

    def list(self, wanted: ProbeFilter | None = None, cursor: str | None = None, limit: int = 50) -> ProbePage:
        """Newest first, by (created_at, id), which later probes never disturb."""
        check_limit(limit)
        query = select(ProbeRow).order_by(ProbeRow.created_at.desc(), ProbeRow.id.desc())
        for field in fields(ProbeFilter):
            value = getattr(wanted or ProbeFilter(), field.name)
            if value is not None:
                query = query.where(getattr(ProbeRow, field.name) == plain_text(value))
        if cursor is not None:
            query = query.where(tuple_(ProbeRow.created_at, ProbeRow.id) < tuple_(*read_cursor(cursor)))
        with store_errors(self.engine), Session(self.engine) as session:
            items = tuple(_record(row) for row in session.scalars(query.limit(limit + 1)))
        last = items[limit - 1] if len(items) > limit else None
        return ProbePage(items=items[:limit], next_cursor=None if last is None else cursor_of(last.created_at, last.id))

    def claim(self, lease: Lease, *, probe_id: str | None = None) -> ProbeRecord | None:
        """The oldest queued probe, or the queued one of this id."""
        query = select(ProbeRow).where(ProbeRow.state == QUEUED)
        if probe_id is not None:
            query = query.where(ProbeRow.id == plain_text(probe_id))
        return self._take(query.order_by(ProbeRow.created_at, ProbeRow.id), lease)

    def take_over(self, probe_id: str, lease: Lease) -> ProbeRecord | None:
        """A running probe whose lease has ended."""
        ended = (ProbeRow.state == RUNNING, ProbeRow.lease_until < lease.now)
        return self._take(select(ProbeRow).where(ProbeRow.id == plain_text(probe_id), *ended), lease, counts=False)

    def _take(self, query: Select[Any], lease: Lease, *, counts: bool = True) -> ProbeRecord | None:
        with store_errors(self.engine), Session(self._writer) as session:
            row: ProbeRow | None = session.scalars(query.limit(1).with_for_update(skip_locked=True)).first()
            if row is None:
                return None
            row.state, row.owner, row.fencing_token = RUNNING, plain_text(lease.owner), row.fencing_token + 1
            row.attempts += counts
            row.heartbeat_at, row.lease_until = lease.now, lease.now + timedelta(seconds=lease.seconds)
            row.started_at = row.started_at or lease.now
            record = _record(row)
            session.commit()
            return record

    def heartbeat(self, held: ProbeRecord, lease: Lease, *, progress: str | None = None, folder: str | None = None) -> bool:
        """Prolongs the lease and tells whether somebody asked to cancel."""
        values: dict[str, Any] = {"heartbeat_at": lease.now, "lease_until": lease.now + timedelta(seconds=lease.seconds)}
        if progress is not None:
            values["progress"] = plain_text(progress)
        if folder is not None:
            values["folder"] = folder
        with store_errors(self.engine), Session(self._writer) as session:
            self._write(session, held, values)
            asked = _found(session, held.id).cancel_requested
            session.commit()
        return asked

    def finish(self, held: ProbeRecord, end: ProbeEnd, now: datetime) -> ProbeRecord:
        """Ends it and stores its measurements, all or nothing."""
        with store_errors(self.engine), Session(self._writer) as session:
            session.add_all(measurement_row(measurement) for measurement in end.measurements)
            flush_new(session, ", ".join(measurement.id for measurement in end.measurements[:3]))
            values = {
                "state": end.state, "finished_at": now, "lease_until": None, "results": [dict(result) for result in end.results],
                "measurement_id": end.measurements[0].id if end.measurements else None, "failure": end.failure,
                "message": None if end.message is None else plain_text(end.message, MESSAGE_CHARACTERS), "progress": None,
            }  # fmt: skip
            self._write(session, held, values)
            record = _record(_found(session, held.id))
            session.commit()
        return record

    def release(self, held: ProbeRecord, *, counts: bool) -> ProbeRecord:
        """Back into the queue."""
        values = {"state": QUEUED, "owner": None, "lease_until": None, "heartbeat_at": None, "progress": None, "folder": None}
        with store_errors(self.engine), Session(self._writer) as session:
            self._write(session, held, {**values, "attempts": held.attempts if counts else max(held.attempts - 1, 0)})
            record = _record(_found(session, held.id))
            session.commit()
        return record

    def cancel(self, probe_id: str, now: datetime) -> ProbeRecord:
        """A queued probe is cancelled; of a running one its owner is asked; an ended one stays as it is."""
        with store_errors(self.engine), Session(self._writer) as session:
            row = _found(session, probe_id, lock=True)
            if row.state == QUEUED:
                row.state, row.finished_at, row.cancel_requested = CANCELLED, now, True
            elif row.state == RUNNING:
                row.cancel_requested = True
            record = _record(row)
            session.commit()
        return record

    def expired(self, now: datetime) -> Sequence[ProbeRecord]:
        """Running probes whose lease has ended, oldest first."""
        query = select(ProbeRow).where(ProbeRow.state == RUNNING, ProbeRow.lease_until < now).order_by(ProbeRow.created_at, ProbeRow.id)
        with store_errors(self.engine), Session(self.engine) as session:
            return tuple(_record(row) for row in session.scalars(query))

    def _write(self, session: Session, held: ProbeRecord, values: dict[str, Any]) -> None:
        ours = (ProbeRow.id == held.id, ProbeRow.state == RUNNING, ProbeRow.fencing_token == held.fencing_token)
        written = session.execute(update(ProbeRow).where(*ours).values(**values).returning(ProbeRow.id)).first()
        if written is None:
            row = _found(session, held.id)
            raise ConflictError(f"probe {held.id} is {row.state}, held by {row.owner or 'nobody'}: the lease of {held.owner} was lost")
        session.expire_all()


def _found(session: Session, probe_id: str, *, lock: bool = False) -> ProbeRow:
    row = session.get(ProbeRow, probe_id, with_for_update=lock) if is_id(probe_id) else None
    if row is None:
        raise NotFoundError(f"no probe of id {probe_id[:SHOWN_CHARACTERS]!r}; GET /probes lists them")
    return row


def _values(record: ProbeRecord) -> dict[str, Any]:
    values = asdict(record)
    texts = {key: plain_text(values[key]) for key in ("model", "gpu", "layout", "pool")}
    return {**values, **texts, "request": dict(record.request), "results": list(record.results)}


def _record(row: ProbeRow) -> ProbeRecord:
    values = {field.name: getattr(row, field.name) for field in fields(ProbeRecord)}
    return ProbeRecord(**{**values, "results": tuple(row.results)})
