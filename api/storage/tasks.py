"""The queue of tasks in SQL, and what they said; see `api.storage.queue` for leases and fencing."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.storage.common import plain_text
from api.storage.engine import store_errors
from api.storage.queue import MESSAGE_CHARACTERS, QUEUED, SqlQueue
from api.storage.tables import TaskEventRow, TaskRow
from planner.ports import Lease, TaskEnd, TaskEvent, TaskFilter, TaskPage, TaskRecord

KEPT_EVENTS = 10_000


class SqlTaskStore(SqlQueue[TaskRecord]):
    """A TaskStore on one engine; see `planner.ports` for what each method promises."""

    row_class = TaskRow
    what, where = "task", "GET /sweeps or GET /plans"

    def list(
        self, wanted: TaskFilter | None = None, cursor: str | None = None, limit: int = 50
    ) -> TaskPage:
        """Newest first."""
        items, next_cursor = self._page(wanted or TaskFilter(), cursor, limit)
        return TaskPage(items=items, next_cursor=next_cursor)

    def claim(self, lease: Lease, *, task_id: str | None = None) -> TaskRecord | None:
        """The oldest queued task, or the queued one of this id."""
        query = select(TaskRow).where(TaskRow.state == QUEUED)
        if task_id is not None:
            query = query.where(TaskRow.id == plain_text(task_id))
        return self._take(query.order_by(TaskRow.created_at, TaskRow.id), lease)

    def heartbeat(self, held: TaskRecord, lease: Lease, *, progress: str | None = None) -> bool:
        """Prolongs the lease and tells whether somebody asked to cancel."""
        return self._beat(
            held, lease, {} if progress is None else {"progress": plain_text(progress)}
        )

    def finish(self, held: TaskRecord, end: TaskEnd, now: datetime) -> TaskRecord:
        """Ends it."""
        message = None if end.message is None else plain_text(end.message, MESSAGE_CHARACTERS)
        values = {
            "state": end.state,
            "finished_at": now,
            "lease_until": None,
            "failure": end.failure,
            "message": message,
            "progress": None,
            "result": None if end.result is None else dict(end.result),
        }
        with store_errors(self.engine), Session(self._writer) as session:
            self._write(session, held, values)
            record = self._record(self._found(session, held.id))
            session.commit()
        return record

    def release(self, held: TaskRecord, *, counts: bool) -> TaskRecord:
        """Back into the queue."""
        return self._release(held, counts, {})

    def say(self, held: TaskRecord, body: Mapping[str, Any], now: datetime) -> TaskEvent:
        """Appends an event; who takes the task over waits because its row is locked."""
        with store_errors(self.engine), Session(self._writer) as session:
            self._owned(session, held)
            last = (
                session.scalar(
                    select(func.max(TaskEventRow.number)).where(TaskEventRow.task_id == held.id)
                )
                or 0
            )
            session.add(
                TaskEventRow(task_id=held.id, number=last + 1, created_at=now, body=dict(body))
            )
            session.commit()
        return TaskEvent(number=last + 1, created_at=now, body=dict(body))

    def events(self, task_id: str, after: int = 0, limit: int = KEPT_EVENTS) -> Sequence[TaskEvent]:
        """Events with a number above `after`, in order."""
        query = select(TaskEventRow).where(
            TaskEventRow.task_id == plain_text(task_id), TaskEventRow.number > after
        )
        with store_errors(self.engine), Session(self.engine) as session:
            rows = session.scalars(query.order_by(TaskEventRow.number).limit(limit))
            return tuple(
                TaskEvent(number=row.number, created_at=row.created_at, body=row.body)
                for row in rows
            )

    def _values(self, record: TaskRecord) -> dict[str, Any]:
        values = asdict(record)
        return {
            **values,
            "request": dict(record.request),
            "result": None if record.result is None else dict(record.result),
        }

    def _record(self, row: TaskRow) -> TaskRecord:
        return TaskRecord(**{field.name: getattr(row, field.name) for field in fields(TaskRecord)})
