"""The queue of probes in SQL; see `api.storage.queue` for leases and fencing."""

from dataclasses import asdict, fields
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.storage.common import flush_new, plain_text
from api.storage.engine import store_errors
from api.storage.measurements import measurement_row
from api.storage.queue import MESSAGE_CHARACTERS, QUEUED, SqlQueue
from api.storage.tables import ProbeRow
from planner.ports import Lease, ProbeEnd, ProbeFilter, ProbePage, ProbeRecord


class SqlProbeStore(SqlQueue[ProbeRecord]):
    """A ProbeStore on one engine; see `planner.ports` for what each method promises."""

    row_class = ProbeRow
    what, where = "probe", "GET /probes"

    def list(
        self, wanted: ProbeFilter | None = None, cursor: str | None = None, limit: int = 50
    ) -> ProbePage:
        """Newest first."""
        items, next_cursor = self._page(wanted or ProbeFilter(), cursor, limit)
        return ProbePage(items=items, next_cursor=next_cursor)

    def claim(self, lease: Lease, *, probe_id: str | None = None) -> ProbeRecord | None:
        """The oldest queued probe, or the queued one of this id."""
        query = select(ProbeRow).where(ProbeRow.state == QUEUED)
        if probe_id is not None:
            query = query.where(ProbeRow.id == plain_text(probe_id))
        return self._take(query.order_by(ProbeRow.created_at, ProbeRow.id), lease)

    def heartbeat(
        self,
        held: ProbeRecord,
        lease: Lease,
        *,
        progress: str | None = None,
        folder: str | None = None,
    ) -> bool:
        """Prolongs the lease and tells whether somebody asked to cancel."""
        words = {} if progress is None else {"progress": plain_text(progress)}
        return self._beat(held, lease, words if folder is None else {**words, "folder": folder})

    def finish(self, held: ProbeRecord, end: ProbeEnd, now: datetime) -> ProbeRecord:
        """Ends it and stores its measurements, all or nothing."""
        with store_errors(self.engine), Session(self._writer) as session:
            session.add_all(measurement_row(measurement) for measurement in end.measurements)
            flush_new(session, ", ".join(measurement.id for measurement in end.measurements[:3]))
            values = {
                "state": end.state,
                "finished_at": now,
                "lease_until": None,
                "results": [dict(result) for result in end.results],
                "measurement_id": end.measurements[0].id if end.measurements else None,
                "failure": end.failure,
                "message": None
                if end.message is None
                else plain_text(end.message, MESSAGE_CHARACTERS),
                "progress": None,
            }
            self._write(session, held, values)
            record = self._record(self._found(session, held.id))
            session.commit()
        return record

    def release(self, held: ProbeRecord, *, counts: bool) -> ProbeRecord:
        """Back into the queue."""
        return self._release(held, counts, {"folder": None})

    def _values(self, record: ProbeRecord) -> dict[str, Any]:
        values = asdict(record)
        texts = {key: plain_text(values[key]) for key in ("model", "gpu", "layout", "pool")}
        return {**values, **texts, "request": dict(record.request), "results": list(record.results)}

    def _record(self, row: ProbeRow) -> ProbeRecord:
        values = {field.name: getattr(row, field.name) for field in fields(ProbeRecord)}
        return ProbeRecord(**{**values, "results": tuple(row.results)})
