"""The two queues in SQL, of tasks and of probes; `planner.api.storage.queue` has the leases."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Exists, case, exists, func, literal, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from planner.api.storage.audit import note
from planner.api.storage.clock import database_time
from planner.api.storage.common import flush_new, plain_text
from planner.api.storage.job_records import (
    CANCELLED,
    OPEN,
    QUEUED,
    RUNNING,
    JobEnd,
    JobState,
    ProbeRecord,
    TaskEvent,
    TaskRecord,
)
from planner.api.storage.measurements import measurement_row
from planner.api.storage.queue import SqlQueue, whole
from planner.api.storage.room import take_turns
from planner.api.storage.store import add_plan
from planner.api.storage.tables import PlanRow
from planner.api.storage.transactions import reading, writing

KEPT_EVENTS = 10_000
MOST_RANKS = 3  # that an emulation runs, one after the other


class SqlTaskStore(SqlQueue[TaskRecord]):
    """Studies and runs of sweeps; a study's plan is stored with its end."""

    table, what, where = TaskRecord, "task", "GET /sweeps or GET /plans lists them"

    def add_event(self, claimed: TaskRecord, body: Mapping[str, Any], now: datetime) -> TaskEvent:
        """Appends an event. Raises NotFoundError; ConflictError where the lease was lost.

        The row is locked meanwhile, so that nobody takes the task over.
        """
        with writing(self.engine) as session:
            self.write(session, claimed, {"state": RUNNING})
            newest = select(func.max(TaskEvent.number)).where(TaskEvent.task_id == claimed.id)
            number = (session.scalar(newest) or 0) + 1
            event = TaskEvent(task_id=claimed.id, number=number, created_at=now, body=dict(body))
            session.add(event)
        return event

    def events(self, task_id: str, after: int = 0, limit: int = KEPT_EVENTS) -> Sequence[TaskEvent]:
        """Events with a number above `after`, in order."""
        query = select(TaskEvent).where(
            TaskEvent.task_id == plain_text(task_id), TaskEvent.number > after
        )
        with reading(self.engine) as session:
            return tuple(session.scalars(query.order_by(TaskEvent.number).limit(limit)))

    def take_notification(self, wait_seconds: float) -> TaskRecord | None:
        """A run whose end is to be told now; nobody else gets it for so many seconds."""
        ended = TaskRecord.state.not_in(OPEN)  # else it was queued again, and ends once more
        due = select(TaskRecord).where(TaskRecord.notify_at <= database_time(), ended)
        with writing(self.engine) as session:
            first = due.order_by(TaskRecord.notify_at).limit(1).with_for_update(skip_locked=True)
            row = session.scalars(first).first()
            if row is None:
                return None
            row.notify_at, row.notified = database_time(wait_seconds), row.notified + 1
            return whole(session, row)

    def untold(self) -> int:
        """Number of ended runs whose webhook is still to be called."""
        query = select(func.count()).where(TaskRecord.notify_at.is_not(None))
        with reading(self.engine) as session:
            return int(session.scalar(query) or 0)

    def notify_again(self, task: TaskRecord, seconds: float | None) -> None:
        """Tells it again after so many seconds; None: it was told, or is given up."""
        later = None if seconds is None else database_time(seconds)
        ours = (TaskRecord.id == task.id, TaskRecord.notified == task.notified)
        with writing(self.engine) as session:
            session.execute(update(TaskRecord).where(*ours).values(notify_at=later))

    def _may_start(self) -> tuple[ColumnElement[bool], ...]:
        return (~_runs_already(TaskRecord.parent_id),)

    def _waits(self, session: Session, row: TaskRecord) -> bool:
        """One run of a sweep at a time: two workers may have chosen two at once."""
        if row.parent_id is None:
            return False
        take_turns(session, f"runs of {row.parent_id}")
        return bool(session.scalar(select(_runs_already(literal(row.parent_id)))))

    def _end_values(self, session: Session, claimed: TaskRecord, end: JobEnd) -> dict[str, Any]:
        # a plan of this id was stored by an earlier owner, of a version that stored it apart
        if end.plan is not None and session.get(PlanRow, end.plan[0].id) is None:
            add_plan(session, *end.plan, end.state, claimed.asked_by)
        result = None if end.result is None else dict(end.result)
        told = claimed.request.get("webhook") is not None  # whoever ends it
        notify = {"notify_at": database_time(), "notified": 0} if told else {}
        return {"result": result, "pool": None, "wants_gpus": None, **notify}

    def _used_gpu_seconds(self, record: TaskRecord, end: JobEnd) -> float | None:
        return end.gpu_seconds


def _runs_already(parent_id: ColumnElement[Any] | InstrumentedAttribute[Any]) -> Exists:
    other = aliased(TaskRecord)
    return exists(select(other.id).where(other.parent_id == parent_id, other.state == RUNNING))


def has_open_run(session: Session, sweep_id: str) -> bool:
    query = select(TaskRecord.id).where(
        TaskRecord.parent_id == sweep_id, TaskRecord.state.in_(OPEN)
    )
    return session.scalar(query.limit(1)) is not None


def cancel_runs(
    session: Session, sweep_id: str, states: Sequence[JobState], by: str | None
) -> None:
    """Ends the runs of a sweep in these states, all at once: queued ones are cancelled.

    The owner of a running one is asked. One that a worker claims meanwhile counts as running.
    """
    queued = TaskRecord.state == QUEUED
    values = {
        "cancel_requested": True,
        "finished_at": case((queued, database_time()), else_=TaskRecord.finished_at),
        "gpu_seconds": case((queued, 0.0), else_=TaskRecord.gpu_seconds),
        "state": case((queued, CANCELLED), else_=TaskRecord.state),
    }
    chosen = (
        TaskRecord.parent_id == sweep_id,
        TaskRecord.state.in_(states),
        ~TaskRecord.cancel_requested,
    )
    ending = update(TaskRecord).where(*chosen).values(values).returning(TaskRecord.id)
    ended = session.scalars(ending.execution_options(synchronize_session=False)).all()
    session.expire_all()
    for task_id in ended:
        note(session, by, "task.cancelled", task_id)


def most_gpu_seconds(request: Mapping[str, Any], num_gpus: int) -> float:
    """GPU-seconds that a probe uses at most: its time limit, on its GPUs, for all its runs."""
    times = MOST_RANKS if request.get("emulate") else num_gpus
    return float(request["time_limit_seconds"]) * times


def gpu_seconds_of(record: ProbeRecord) -> float:
    """GPU-seconds that a probe used, by its runs' own account.

    Without results: from its start to its end, at most its time limit, because the end of a
    crashed owner is noticed late.
    """
    if record.results or record.started_at is None or record.finished_at is None:
        return sum(float(result["gpu_seconds"]) for result in record.results)
    most = most_gpu_seconds(record.request, record.num_gpus)
    gpus = 1 if record.request.get("emulate") else record.num_gpus
    return min((record.finished_at - record.started_at).total_seconds() * gpus, most)


class SqlProbeStore(SqlQueue[ProbeRecord]):
    """Probes; their measurements are stored with their end."""

    table, what, where = ProbeRecord, "probe", "GET /probes lists them"
    texts = ("model", "gpu", "layout", "pool")

    def _end_values(self, session: Session, claimed: ProbeRecord, end: JobEnd) -> dict[str, Any]:
        session.add_all(measurement_row(measurement) for measurement in end.measurements)
        flush_new(session, ", ".join(measurement.id for measurement in end.measurements[:3]))
        return {
            "results": [dict(result) for result in end.results],
            "measurement_id": end.measurements[0].id if end.measurements else None,
        }

    def _used_gpu_seconds(self, record: ProbeRecord, end: JobEnd) -> float | None:
        return gpu_seconds_of(record) if "time_limit_seconds" in record.request else None
