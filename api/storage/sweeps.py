"""Sweeps in SQL, for SQLite and PostgreSQL alike."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from planner.api.storage.audit import note
from planner.api.storage.clock import database_time
from planner.api.storage.common import Store, flush_new, plain_text, record_of, row_of, values_of
from planner.api.storage.job_records import OPEN, JobState, TaskRecord
from planner.api.storage.paging import read_page
from planner.api.storage.queue import Check
from planner.api.storage.records import Page, SweepRecord, SweepState
from planner.api.storage.tables import SweepRow, TaskRow
from planner.api.storage.tasks import cancel_runs, has_open_run
from planner.api.storage.transactions import reading, writing
from planner.errors import ConflictError
from planner.specs.sweep import Overlap

# runs that end with a sweep that is put into a state
ENDED_WITH: dict[SweepState, tuple[JobState, ...]] = {
    "active": (),
    "paused": ("queued",),
    "cancelled": OPEN,
}


class SqlSweepStore(Store):
    """Keeps sweeps, and turns a scheduled time that has come into one task, never two."""

    def add(self, record: SweepRecord) -> None:
        """Stores it. Raises ConflictError when the id is taken."""
        values = {**values_of(record), "name": plain_text(record.name)}
        with writing(self.engine) as session:
            session.add(SweepRow(**values))
            flush_new(session, record.id)
            note(session, record.asked_by, "sweep.stored", record.id, detail=record.name)

    def get(self, sweep_id: str) -> SweepRecord:
        """The sweep as it stands. Raises NotFoundError."""
        with reading(self.engine) as session:
            return record_of(SweepRecord, _row(session, sweep_id))

    def list(self, cursor: str | None = None, limit: int = 50) -> Page[SweepRecord]:
        """All sweeps, newest first."""
        return read_page(self.engine, SweepRow, partial(record_of, SweepRecord), cursor, limit)

    def now(self) -> datetime:
        """The database's time: by it sweeps come due, whatever the clocks of workers say."""
        with reading(self.engine) as session:
            now: datetime = session.scalars(select(database_time())).one()
        return now

    def due(self, now: datetime) -> Sequence[SweepRecord]:
        """Active sweeps whose scheduled time has come, earliest first."""
        query = (
            select(SweepRow)
            .where(SweepRow.state == "active", SweepRow.next_due_at <= now)
            .order_by(SweepRow.next_due_at, SweepRow.id)
        )
        with reading(self.engine) as session:
            return tuple(record_of(SweepRecord, row) for row in session.scalars(query))

    def advance(
        self,
        sweep: SweepRecord,
        next_due_at: datetime | None,
        task: TaskRecord | None,
        check: Check = lambda _: None,
        overlap: Overlap = "queue",
    ) -> bool:
        """Moves the sweep from the scheduled time that it was read with to the next.

        Adds the task in the same transaction; returns whether it did. Where another process was
        quicker nothing is changed.

        check: called in it before a task is added; raises what forbids it.
        overlap: where a run of the sweep waits or runs: `skip` adds none, `replace` cancels it.
        """
        unchanged = (
            SweepRow.id == sweep.id,
            SweepRow.state == "active",
            SweepRow.next_due_at == sweep.next_due_at,
        )
        moving = update(SweepRow).where(*unchanged).values(next_due_at=next_due_at)
        with writing(self.engine) as session:
            if session.execute(moving.returning(SweepRow.id)).first() is None:
                return False
            if task is None:
                return False
            if overlap == "replace":
                cancel_runs(session, sweep.id, OPEN, None)
            elif overlap == "skip" and has_open_run(session, sweep.id):
                note(session, task.asked_by, "sweep.skipped", sweep.id, detail=str(task.due_at))
                return False
            check(session)
            note(session, task.asked_by, "task.asked", task.id, gpu_seconds=task.gpu_seconds)
            session.add(TaskRow(**values_of(task)))
            flush_new(session, f"a run of {sweep.id} for {task.due_at}")
        return True

    def check_open(self, session: Session, sweep_id: str) -> None:
        """Raises ConflictError for a cancelled sweep; it stays as it is until the session ends."""
        if _row(session, sweep_id, lock=True).state == "cancelled":
            raise ConflictError(f"sweep {sweep_id} was cancelled; schedule it anew")

    def change(
        self, sweep_id: str, state: SweepState, next_due_at: datetime | None, by: str | None = None
    ) -> SweepRecord:
        """Pauses, resumes or cancels it. Raises NotFoundError; ConflictError once cancelled.

        Its queued runs end with it, of a cancelled sweep also those that run: they are asked to.
        by: who asks, for the audit trail.
        """
        with writing(self.engine) as session:
            row = _row(session, sweep_id, lock=True)
            if row.state == "cancelled" and state != "cancelled":
                raise ConflictError(f"sweep {sweep_id} was cancelled; schedule it anew")
            row.state, row.next_due_at = state, next_due_at
            note(session, by, f"sweep.{state}", sweep_id)
            cancel_runs(session, sweep_id, ENDED_WITH[state], by)
            record = record_of(SweepRecord, row)
        return record


def _row(session: Session, sweep_id: str, *, lock: bool = False) -> SweepRow:
    remedy = "`planner-cli sweep list` shows the ids"
    return row_of(session, SweepRow, sweep_id, "sweep", remedy, lock=lock)
