"""Sweeps in SQL and what they find: hosts that no run uses for a while, changes of step times."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from planner.api.storage.audit import note
from planner.api.storage.clock import database_time
from planner.api.storage.common import Store, TableStore, flush_new, plain_text, record_of
from planner.api.storage.job_records import OPEN, JobState, ProbeRecord, TaskRecord
from planner.api.storage.learning import believed_by
from planner.api.storage.queue import Check
from planner.api.storage.records import HistoryRow, SweepState
from planner.api.storage.tables import DriftFinding, MeasurementRow, QuarantinedHost, SweepRecord
from planner.api.storage.tasks import cancel_runs, has_open_run
from planner.api.storage.transactions import reading, writing
from planner.errors import ConflictError, NotFoundError
from planner.specs.sweep import Overlap

# runs that end with a sweep that is put into a state
ENDED_WITH: dict[SweepState, tuple[JobState, ...]] = {
    "active": (),
    "paused": ("queued",),
    "cancelled": OPEN,
}
LONGEST_SENTENCE = 500
MOST_READINGS = 50_000  # newest ones of the questions of a sweep


class SqlSweepStore(TableStore[SweepRecord]):
    """Keeps sweeps, and turns a scheduled time that has come into one task, never two."""

    table, what, where = SweepRecord, "sweep", "`planner-cli sweep list` shows the ids"

    def add(self, record: SweepRecord) -> None:
        """Stores it. Raises ConflictError when the id is taken."""
        with writing(self.engine) as session:
            session.add(replace(record, name=plain_text(record.name)))
            flush_new(session, record.id)
            note(session, record.asked_by, "sweep.stored", record.id, detail=record.name)

    def now(self) -> datetime:
        """The database's time: by it sweeps come due, whatever the clocks of workers say."""
        with reading(self.engine) as session:
            now: datetime = session.scalars(select(database_time())).one()
        return now

    def due(self, now: datetime) -> Sequence[SweepRecord]:
        """Active sweeps whose scheduled time has come, earliest first."""
        query = select(SweepRecord).where(
            SweepRecord.state == "active", SweepRecord.next_due_at <= now
        )
        with reading(self.engine) as session:
            return tuple(session.scalars(query.order_by(SweepRecord.next_due_at, SweepRecord.id)))

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
            SweepRecord.id == sweep.id,
            SweepRecord.state == "active",
            SweepRecord.next_due_at == sweep.next_due_at,
        )
        moving = update(SweepRecord).where(*unchanged).values(next_due_at=next_due_at)
        with writing(self.engine) as session:
            if session.execute(moving.returning(SweepRecord.id)).first() is None:
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
            session.add(replace(task))
            flush_new(session, f"a run of {sweep.id} for {task.due_at}")
        return True

    def check_open(self, session: Session, sweep_id: str) -> None:
        """Raises ConflictError for a cancelled sweep; it stays as it is until the session ends."""
        if self.row(session, sweep_id, lock=True).state == "cancelled":
            raise ConflictError(f"sweep {sweep_id} was cancelled; schedule it anew")

    def change(
        self, sweep_id: str, state: SweepState, next_due_at: datetime | None, by: str | None = None
    ) -> SweepRecord:
        """Pauses, resumes or cancels it. Raises NotFoundError; ConflictError once cancelled.

        Its queued runs end with it, of a cancelled sweep also those that run: they are asked to.
        by: who asks, for the audit trail.
        """
        with writing(self.engine) as session:
            if state != "cancelled":
                self.check_open(session, sweep_id)
            row: SweepRecord = self.row(session, sweep_id, lock=True)
            row.state, row.next_due_at = state, next_due_at
            note(session, by, f"sweep.{state}", sweep_id)
            cancel_runs(session, sweep_id, ENDED_WITH[state], by)
            session.refresh(row)
        return row


class SqlQuarantine(Store):
    """The hosts that are kept out, by pool; every worker that shares a pool keeps off them."""

    def add(
        self, pool: str, host: str, *, seconds: float, found_by: str, evidence: Sequence[str]
    ) -> None:
        row = QuarantinedHost(
            pool=plain_text(pool),
            host=plain_text(host),
            since=database_time(),
            until=database_time(seconds),
            found_by=found_by,
            evidence=[plain_text(one, LONGEST_SENTENCE) for one in evidence],
        )
        with writing(self.engine) as session:
            session.merge(row)
            note(session, None, "host.quarantined", found_by, detail=f"{host} of {pool}")

    def active(self, pool: str | None = None) -> tuple[QuarantinedHost, ...]:
        """Hosts that are kept out now, of one pool or of all, by name."""
        table = QuarantinedHost
        query = select(table).where(table.until > database_time())
        if pool is not None:
            query = query.where(table.pool == plain_text(pool))
        with reading(self.engine) as session:
            return tuple(session.scalars(query.order_by(table.pool, table.host)))

    def release(self, host: str, by: str | None, pool: str | None = None) -> int:
        """Lets a host in again, in one pool or in all; returns in how many.

        Raises NotFoundError.
        """
        table = QuarantinedHost
        query = delete(table).where(table.host == plain_text(host))
        if pool is not None:
            query = query.where(table.pool == plain_text(pool))
        with writing(self.engine) as session:
            released = session.scalars(query.returning(table.pool)).all()
            if not released:
                none = f"no host {host[:100]!r} is kept out"
                raise NotFoundError(f"{none}; `planner-cli sweep hosts` lists them")
            for name in released:
                note(session, by, "host.released", plain_text(host), detail=name)
        return len(released)


class SqlDriftStore(Store):
    """Repeated measurements, and since when they are different."""

    def history(self, measured: Sequence[str], pool: str, owner: str) -> Sequence[HistoryRow]:
        """All runs of the questions that these measurements answer, on this pool, oldest first.

        Only runs of layouts themselves that count for this owner.
        """
        table, asked = MeasurementRow, select(MeasurementRow.job_hash)
        numbers = table.body["row"]["measured"]
        query = (
            select(
                table.id, table.created_at, table.job_hash, table.layout_hash, table.software_hash,
                table.model, table.trainer, table.gpu, table.num_gpus, table.layout,
                table.step_seconds, table.shared, numbers["software"].label("software"),
                numbers["hosts"].label("hosts"), ProbeRecord.plan_id,
                ProbeRecord.request["trainer"].as_string().label("program"),
            )
            .join(ProbeRecord, ProbeRecord.measurement_id == table.id)
            .where(
                table.job_hash.in_(asked.where(table.id.in_(measured))),
                ProbeRecord.pool == plain_text(pool),
                table.status == "ok",
                table.rung == "probed",
                table.step_seconds > 0,
                *believed_by(owner),
            )
            .order_by(table.created_at.desc(), table.id.desc())
            .limit(MOST_READINGS)
        )  # fmt: skip
        with reading(self.engine) as session:
            return [_history(row) for row in reversed(session.execute(query).all())]

    def replace(self, sweep_id: str, found: Sequence[DriftFinding]) -> None:
        """From now on these are what the sweep has found."""
        with writing(self.engine) as session:
            session.execute(delete(DriftFinding).where(DriftFinding.sweep_id == sweep_id))
            session.add_all(replace(one, statement=plain_text(one.statement)) for one in found)


def _history(row: Any) -> HistoryRow:
    return record_of(
        HistoryRow,
        row,
        software=row.software or {},
        hosts=tuple(row.hosts or ()),
        run=row.plan_id or row.id,
        program=row.program or "",
    )
