"""The queue of tasks in SQL and their events; see `api.storage.queue` for leases and fencing."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.storage.common import plain_text
from api.storage.queue import SqlQueue
from api.storage.records import TaskEnd, TaskEvent, TaskFilter, TaskRecord
from api.storage.store import add_plan
from api.storage.tables import PlanRow, TaskEventRow, TaskRow
from api.storage.transactions import reading, writing

KEPT_EVENTS = 10_000


class SqlTaskStore(SqlQueue[TaskRecord, TaskFilter, TaskEnd]):
    """Studies and runs of sweeps; a study's plan is stored with its end."""

    row_class, record_class, filter_class = TaskRow, TaskRecord, TaskFilter
    what, where = "task", "GET /sweeps or GET /plans"

    def add_event(self, claimed: TaskRecord, body: Mapping[str, Any], now: datetime) -> TaskEvent:
        """Appends an event. Raises NotFoundError; ConflictError where the lease was lost.

        The row is locked meanwhile, so that nobody takes the task over.
        """
        with writing(self.engine) as session:
            self._lock(session, claimed)
            newest = select(func.max(TaskEventRow.number)).where(TaskEventRow.task_id == claimed.id)
            number = (session.scalar(newest) or 0) + 1
            event = TaskEvent(number=number, created_at=now, body=dict(body))
            session.add(TaskEventRow(task_id=claimed.id, **asdict(event)))
        return event

    def events(self, task_id: str, after: int = 0, limit: int = KEPT_EVENTS) -> Sequence[TaskEvent]:
        """Events with a number above `after`, in order."""
        query = select(TaskEventRow).where(
            TaskEventRow.task_id == plain_text(task_id), TaskEventRow.number > after
        )
        with reading(self.engine) as session:
            rows = session.scalars(query.order_by(TaskEventRow.number).limit(limit))
            return tuple(
                TaskEvent(number=row.number, created_at=row.created_at, body=row.body)
                for row in rows
            )

    def _values(self, record: TaskRecord) -> dict[str, Any]:
        return task_values(record)

    def _end_values(self, session: Session, end: TaskEnd) -> dict[str, Any]:
        # a plan of this id was stored by an earlier owner, of a version that stored it apart
        if end.plan is not None and session.get(PlanRow, end.plan[0].id) is None:
            add_plan(session, *end.plan)
        return {"result": None if end.result is None else dict(end.result)}

    def _used_gpu_seconds(self, record: TaskRecord, end: TaskEnd) -> float | None:
        return end.gpu_seconds


def task_values(record: TaskRecord) -> dict[str, Any]:
    """The columns of a new task."""
    result = None if record.result is None else dict(record.result)
    return {**asdict(record), "request": dict(record.request), "result": result}
